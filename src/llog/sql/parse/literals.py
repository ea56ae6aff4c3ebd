"""Parses `INSERT … VALUES` of plain literals and parameters into Python values, without sqlglot and DuckDB."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any, Final, NamedTuple

from llog.sql.parse.lexer import Kind
from llog.sql.parse.token_stream import TokenStream

_WORDS: Final = {"TRUE": True, "FALSE": False, "NULL": None}
_DIGITS_MAX: Final = 38
"""The most digits of an integer or a DECIMAL in DuckDB."""


class PlainInsert(NamedTuple):
    table: str
    table_at: int
    """The number of the first token of the table's name."""
    columns: tuple[str, ...]
    values: tuple[tuple[Any, ...], ...]
    is_whole_statement: bool
    """Whether nothing follows the rows."""


def parse_plain_insert(stream: TokenStream) -> PlainInsert | None:
    """Parse `INSERT INTO t [(columns)] VALUES` and plain rows. Returns None for any other statement or an error."""
    if not stream.accept("INSERT", "INTO") or not stream.is_name():
        return None
    table_at = stream.at
    table = stream.table()
    if table.startswith("system."):
        return None
    columns: list[str] = []
    if stream.accept("("):
        while stream.is_name():
            columns.append(stream.take().value.lower())
            if not stream.accept(","):
                break
        if not stream.accept(")"):
            return None
    if not stream.accept("VALUES"):
        return None
    rows = parse_plain_rows(stream, len(columns))
    is_whole_statement = stream.token.kind is Kind.END
    return None if rows is None else PlainInsert(table, table_at, tuple(columns), rows, is_whole_statement)


def parse_plain_rows(stream: TokenStream, width: int = 0) -> tuple[tuple[Any, ...], ...] | None:
    """Parse the rows after VALUES, or return None if one of them is not plain.

    Raises `SqlError` unless each has `width` values; without a `width`, as many as the first.
    """
    rows: list[tuple[Any, ...]] = []
    symbol = Kind.SYMBOL
    while True:
        start = stream.token
        if not stream.accept("("):
            return None
        row: list[Any] = []
        while True:
            value = _parse_literal(stream)
            after = stream.take()
            if value is _NOT_PLAIN or after.kind is not symbol or after.value not in ",)":
                return None
            row.append(value)
            if after.value == ")":
                break
        width = width or len(row)
        if len(row) != width:
            raise stream.error(f"this row has {len(row)} values, but {width} are expected", token=start)
        rows.append(tuple(row))
        if not stream.accept(","):
            return tuple(rows)


_NOT_PLAIN: Final = object()


def _parse_literal(stream: TokenStream) -> Any:
    token = stream.take()
    kind = token.kind
    if kind is Kind.STRING:
        return _NOT_PLAIN if stream.token.kind is Kind.STRING else token.value
    if kind is Kind.PARAMETER:
        return stream.parameters[token.start]
    if kind is Kind.NUMBER:
        return _parse_number(token.value, "")
    if kind is Kind.BLOB:
        return bytes.fromhex(token.value)
    if kind is Kind.WORD:
        return _WORDS.get(token.value.upper(), _NOT_PLAIN)
    if kind is Kind.SYMBOL and token.value in "-+" and stream.token.kind is Kind.NUMBER:
        return _parse_number(stream.take().value, token.value)
    return _NOT_PLAIN


def _parse_number(text: str, sign: str) -> Any:
    """Return the number with the type that DuckDB gives it: integer, DECIMAL of up to 38 digits, or DOUBLE if it has an
    exponent.
    """
    if text.isdigit():
        return int(sign + text) if len(text) <= _DIGITS_MAX else _NOT_PLAIN
    if "e" not in text.lower():
        return Decimal(sign + text) if len(text) - 1 <= _DIGITS_MAX else _NOT_PLAIN
    value = float(sign + text)
    return value if math.isfinite(value) else _NOT_PLAIN
