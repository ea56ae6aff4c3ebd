"""The cursor of PEP 249: results of statements, their rows as tuples or as Arrow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from llog.client.exceptions import DataError, InterfaceError, Warning, translate_errors
from llog.client.sessions import SqlSession
from llog.sql.result import Result

if TYPE_CHECKING:
    from llog.client.connection import Connection

_ROWS_AT_A_TIME: Final = 4096
"""How many rows are converted to Python objects at a time: rows that are not fetched cost nothing."""

Row = tuple[Any, ...]
Column = tuple[str, pa.DataType, None, None, int | None, int | None, bool]


class Cursor:
    """Runs statements and returns their rows. For one thread.

    After several statements, the cursor is at the result of the first, and `nextset` moves to the next. `rowcount` is
    how many rows a statement returned or changed. Rows can be iterated over once.
    """

    arraysize: int = 1
    lastrowid: None = None

    def __init__(self, connection: Connection, session: Callable[[], SqlSession]) -> None:
        self.connection = connection
        self._session = session
        self._closed = False
        self.messages: list[tuple[type[Warning], str]] = []
        """What the last statements did not do although they succeeded, such as an ACK of what other members hold."""
        self._results: list[Result] = []
        self._rows: Iterator[Row] | None = None

    @property
    def description(self) -> list[Column] | None:
        """For each column: name, Arrow type, None, None, precision, scale, and whether it may be null."""
        table = self._results[0].table if self._results else None
        if table is None:
            return None
        return [
            (
                field.name,
                field.type,
                None,
                None,
                getattr(field.type, "precision", None),
                getattr(field.type, "scale", None),
                field.nullable,
            )
            for field in table.schema
        ]

    @property
    def rowcount(self) -> int:
        """-1 before the first statement."""
        if not self._results:
            return -1
        result = self._results[0]
        return result.changed if result.table is None else max(result.changed, result.table.num_rows)

    def execute(self, operation: str, parameters: Sequence[Any] | Mapping[str, Any] = ()) -> Cursor:
        """Run the statements, in which `?` stands for the next parameter and `:name` for a named one; return the cursor
        itself.
        """
        session = self._require_open()
        self._set_results([])
        self.messages = []
        with translate_errors():
            self._set_results(session.execute(operation, parameters))
        self.messages = [(Warning, text) for result in self._results for text in result.warnings]
        return self

    def executemany(self, operation: str, seq_of_parameters: Iterable[Sequence[Any]]) -> Cursor:
        """Run the statement for each row of parameters, as one: all of it takes effect or nothing does."""
        session = self._require_open()
        self._set_results([])
        self.messages = []
        with translate_errors():
            self._set_results([session.execute_many(operation, list(seq_of_parameters))])
        return self

    def nextset(self) -> bool | None:
        """Move to the next statement's result; return None if there is none."""
        self._require_open()
        if len(self._results) < 2:
            self._set_results([])
            return None
        self._set_results(self._results[1:])
        return True

    def fetchone(self) -> Row | None:
        return next(self._rows_left(), None)

    def fetchmany(self, size: int | None = None) -> list[Row]:
        rows = self._rows_left()
        wanted = self.arraysize if size is None else size
        return [row for _, row in zip(range(wanted), rows, strict=False)]

    def fetchall(self) -> list[Row]:
        return list(self._rows_left())

    def arrow(self) -> pa.Table:
        """Return all rows of the result, whether or not some were fetched already."""
        self._rows_left()
        table = self._results[0].table
        assert table is not None
        return table

    def __iter__(self) -> Iterator[Row]:
        return self._rows_left()

    def __next__(self) -> Row:
        return next(self._rows_left())

    def close(self) -> None:
        """Close the cursor; the connection stays open. Idempotent."""
        self._closed = True
        self._set_results([])

    def setinputsizes(self, sizes: Sequence[Any]) -> None:
        """Do nothing: the values determine their sizes."""

    def setoutputsize(self, size: int, column: int | None = None) -> None:
        """Do nothing: columns are never cut."""

    def __enter__(self) -> Cursor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _require_open(self) -> SqlSession:
        if self._closed:
            raise InterfaceError("this cursor is closed: make another one with connection.cursor()")
        return self._session()

    def _set_results(self, results: list[Result]) -> None:
        self._results = results
        table = results[0].table if results else None
        self._rows = None if table is None else _rows(table)

    def _rows_left(self) -> Iterator[Row]:
        self._require_open()
        if self._rows is None:
            what = f"{self._results[0].kind} returns no rows" if self._results else "no statement was executed"
            raise InterfaceError(f"there is nothing to fetch: {what}")
        return self._rows


def _rows(table: pa.Table) -> Iterator[Row]:
    for start in range(0, table.num_rows, _ROWS_AT_A_TIME):
        part = table.slice(start, _ROWS_AT_A_TIME)
        columns = [_values(part, index) for index in range(part.num_columns)]
        yield from zip(*columns, strict=True) if columns else [()] * part.num_rows


def _values(table: pa.Table, index: int) -> list[Any]:
    try:
        values: list[Any] = table.column(index).to_pylist()
    except (OverflowError, ValueError) as error:
        field = table.schema.field(index)
        raise DataError(
            f"column {field.name!r} ({field.type}) has a value that Python cannot hold ({error}): cast it to "
            "VARCHAR, or use arrow()"
        ) from error
    return values
