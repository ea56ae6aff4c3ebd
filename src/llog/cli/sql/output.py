"""Prints results and errors of SQL: as tables, as one JSON object per row, or as CSV."""

from __future__ import annotations

import csv
import io
import shutil
import sys
from collections.abc import Sequence
from enum import StrEnum
from typing import Final, Literal

import click
import msgspec
import pyarrow as pa
from rich.cells import cell_len

from llog.cli.common import note
from llog.cli.sql.script import ScriptStatement
from llog.errors import LlogError, SqlError
from llog.sql.json_values import is_number, json_columns, json_rows, text_of, unique_names
from llog.sql.result import Result

_ROWS_AT_A_TIME: Final = 4096
_ROWS_DRAWN_MAX: Final = 1000
"""Rows that a terminal shows: nobody reads more, and drawing them would take longer than the query."""
_VALUE_CHARS_MIN: Final = 12
_NAME_CHARS_MIN: Final = 24
"""The least width of a long value, and of a long name, at which a table is worth drawing."""
_GAP_CHARS: Final = 3
_LINE_CHARS_MAX: Final = 200
_NULL: Final = "NULL"
_CONTROL_ESCAPES: Final = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))} | {
    9: "\\t",
    10: "\\n",
    13: "\\r",
}
"""Escapes for control characters, which could draw anything on the terminal."""


class Format(StrEnum):
    TABLE = "table"
    EXPANDED = "expanded"
    JSON = "json"
    CSV = "csv"


class Output:
    """Prints results: rows to stdout, status lines and warnings to stderr. No status lines follow rows in a pipe."""

    def __init__(self, form: Format, *, quiet: bool = False, timing: bool = False) -> None:
        self.form = form
        self.timing = timing
        self._quiet = quiet

    def show(self, result: Result, ms: float) -> None:
        if result.table is not None:
            _PRINTERS[self.form](result.table)
        for warning in result.warnings:
            note(f"warning: {warning.translate(_CONTROL_ESCAPES)}")
        if self._quiet or (result.table is not None and not sys.stdout.isatty()):
            return
        if result.table is None:
            status = f"{result.kind} {result.changed}" if result.changed or result.kind in _COUNTED else result.kind
        elif result.table.num_rows == 1:
            status = "1 row"
        else:
            status = f"{result.table.num_rows:,} rows"
        note(f"{status}, {ms:,.1f} ms" if self.timing else status)


_COUNTED: Final = ("INSERT", "UPDATE", "DELETE")


def _cells(table: pa.Table) -> list[list[str]]:
    """Return the rows as text that is safe to show on a terminal."""
    columns = [
        [_NULL if value is None else text_of(value).translate(_CONTROL_ESCAPES) for value in column]
        for column in json_columns(table)
    ]
    return [list(row) for row in zip(*columns, strict=True)]


def _names(table: pa.Table) -> list[str]:
    return [name.translate(_CONTROL_ESCAPES) for name in table.column_names]


def _print_table(table: pa.Table) -> None:
    if not sys.stdout.isatty():
        _print_plain(table)
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    part = table.slice(0, _ROWS_DRAWN_MAX)
    names, rows = _names(table), _cells(part)
    nulls = [column.is_null().to_pylist() for column in part.columns]
    full_widths = [max(map(cell_len, column)) for column in zip(names, *rows, strict=True)]
    room = shutil.get_terminal_size().columns - _GAP_CHARS * len(names)
    least_widths = [max(_VALUE_CHARS_MIN, min(cell_len(name), _NAME_CHARS_MIN)) for name in names]
    if sum(map(min, full_widths, least_widths)) > room:
        _print_expanded(table)
        return
    widths = _fit_widths(full_widths, room)
    drawn = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    for name, field, width in zip(names, table.schema, widths, strict=True):
        justify: Literal["left", "right"] = "right" if is_number(field.type) else "left"
        drawn.add_column(Text(name), justify=justify, no_wrap=True, overflow="ellipsis", width=width)
    for number, row in enumerate(rows):
        drawn.add_row(
            *(
                Text(_NULL, style="dim") if nulls[place][number] else Text(cell[: widths[place] + 1])
                for place, cell in enumerate(row)
            )
        )
    Console(highlight=False).print(drawn)
    _note_more_rows(table)


def _fit_widths(widths: Sequence[int], room: int) -> list[int]:
    """Return widths that fit the room: narrow columns keep theirs, and wide ones share what is left."""
    fitting = list(widths)
    left = room
    for rank, place in enumerate(sorted(range(len(widths)), key=widths.__getitem__)):
        fitting[place] = max(1, min(widths[place], left // (len(widths) - rank)))
        left -= fitting[place]
    return fitting


def _note_more_rows(table: pa.Table) -> None:
    if table.num_rows > _ROWS_DRAWN_MAX:
        note(
            f"… {table.num_rows - _ROWS_DRAWN_MAX:,} more rows: select fewer with LIMIT, or print all with --csv "
            "or --json"
        )


def _print_plain(table: pa.Table) -> None:
    """Print aligned columns with full values, for a pipe."""
    names, rows = _names(table), _cells(table)
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    right = [is_number(field.type) for field in table.schema]

    def line(cells: Sequence[str]) -> str:
        padded = zip(cells, widths, right, strict=True)
        return "  ".join(f"{cell:>{width}}" if end else f"{cell:<{width}}" for cell, width, end in padded).rstrip()

    click.echo("\n".join(map(line, [names, *rows])))


def _print_expanded(table: pa.Table) -> None:
    """Print one value per line."""
    part = table.slice(0, _ROWS_DRAWN_MAX) if sys.stdout.isatty() else table
    names = _names(table)
    width = max(map(len, names), default=0)
    for number, row in enumerate(_cells(part), 1):
        click.echo(f"-- row {number}")
        click.echo("\n".join(f"{name:<{width}}  {cell}" for name, cell in zip(names, row, strict=True)))
    if sys.stdout.isatty():
        _note_more_rows(table)


def _print_json(table: pa.Table) -> None:
    names = unique_names(table.column_names)
    encoder = msgspec.json.Encoder()
    for start in range(0, table.num_rows, _ROWS_AT_A_TIME):
        rows = json_rows(table.slice(start, _ROWS_AT_A_TIME))
        lines = encoder.encode_lines([dict(zip(names, row, strict=True)) for row in rows])
        click.echo(lines, nl=False)


def _print_csv(table: pa.Table) -> None:
    """Print CSV with a header; NULL is an empty field."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(table.column_names)
    for start in range(0, max(table.num_rows, 1), _ROWS_AT_A_TIME):
        rows = json_rows(table.slice(start, _ROWS_AT_A_TIME))
        writer.writerows(["" if value is None else text_of(value) for value in row] for row in rows)
        click.echo(text.getvalue(), nl=False)
        text.seek(0)
        text.truncate()


_PRINTERS: Final = {
    Format.TABLE: _print_table,
    Format.EXPANDED: _print_expanded,
    Format.JSON: _print_json,
    Format.CSV: _print_csv,
}


def place_of(error: LlogError, statement: ScriptStatement) -> tuple[int, int | None]:
    """Return the line and column of the error in the source of the statement.

    If the error has none, that is the statement's first line, without a column.
    """
    if not isinstance(error, SqlError) or not error.line:
        return statement.line, None
    column = error.column
    if column and error.line == 1:
        column += statement.column - 1
    return statement.line + error.line - 1, column or None


def show_place(error: LlogError, statement: ScriptStatement, source: str | None) -> None:
    """Print the line with the error to stderr, and a caret below the column."""
    if isinstance(error, SqlError) and not error.line and error.shown:
        note(error.shown.strip("\n"))  # an excerpt of DuckDB's text, whose lines differ from the source's
        return
    line, column = place_of(error, statement)
    lines = statement.sql.split("\n")
    within = min(line - statement.line, len(lines) - 1)
    text = lines[within].translate(_CONTROL_ESCAPES | {9: " "})
    front = f"{source}:{line}: " if source else ""
    if not column:
        if source:
            note(f"{front}{text[:_LINE_CHARS_MAX]}")
        return
    indent = column - 1 - (statement.column - 1 if within == 0 else 0)
    first = max(0, indent - _LINE_CHARS_MAX // 2)
    note(f"{front}{text[first : first + _LINE_CHARS_MAX]}")
    if indent <= len(text):
        note(" " * cell_len(front + text[first:indent]) + "^")


def message_of(error: LlogError) -> str:
    """Return the error on one line, with its hint and without its place."""
    if not isinstance(error, SqlError):
        return " ".join(str(error).split())
    message = " ".join(error.message.split())
    return f"{message} (hint: {error.hint})" if error.hint else message
