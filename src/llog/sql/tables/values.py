"""Converts values to columns of a table without DuckDB, where the result is exactly what DuckDB's would be.

Plain values of a column's own type are taken as they are. Anything else (text for a number, a float for an integer) is
left to DuckDB, whose casting rules apply to every other statement, too.
"""

from __future__ import annotations

import datetime
import decimal
import re
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from llog.batch.columns import FEW, one_array
from llog.errors import ConstraintViolation, SqlError
from llog.runtime import Runtime
from llog.sql.tables.definitions import Column, TableDefinition
from llog.sql.tables.rows import Cells

CellsByPlace = dict[int, Cells]
"""The values of columns, by the column's place in the table."""

_BOUNDS: Final = {
    "TINYINT": (-(1 << 7), (1 << 7) - 1),
    "SMALLINT": (-(1 << 15), (1 << 15) - 1),
    "INTEGER": (-(1 << 31), (1 << 31) - 1),
    "BIGINT": (-(1 << 63), (1 << 63) - 1),
    "UTINYINT": (0, (1 << 8) - 1),
    "USMALLINT": (0, (1 << 16) - 1),
    "UINTEGER": (0, (1 << 32) - 1),
    "UBIGINT": (0, (1 << 64) - 1),
}
_ACCEPTED_TYPES: Final[dict[str, frozenset[type]]] = {
    "BOOLEAN": frozenset({bool}),
    "FLOAT": frozenset({float}),
    "DOUBLE": frozenset({float, int, decimal.Decimal}),
    "VARCHAR": frozenset({str}),
    "BLOB": frozenset({bytes}),
    "JSON": frozenset({str, dict, list}),
    "UUID": frozenset({str, uuid.UUID}),
    "DATE": frozenset({datetime.date}),
    "TIMESTAMP": frozenset({datetime.datetime}),
    "TIMESTAMP WITH TIME ZONE": frozenset({datetime.datetime}),
    **{each: frozenset({int}) for each in (*_BOUNDS, "HUGEINT")},
}
_DECIMAL: Final = frozenset({decimal.Decimal, int})
_FROM_TEXT: Final = {"DATE", "TIMESTAMP", "TIMESTAMP WITH TIME ZONE"}
_NONE: Final = type(None)
_ISO: Final = re.compile(r"\d{4}-\d\d-\d\d(?:[ T]\d\d:\d\d:\d\d(?:\.\d{1,6})?(?:Z|[+-]\d\d:\d\d)?)?", re.ASCII)
_UUID: Final = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_LITERAL: Final = re.compile(r"'(?:[^']|'')*'|-?\d+(?:\.\d+)?|true|false|NULL|CAST\('[^']*' AS [A-Z]+\)", re.IGNORECASE)
_NOW: Final = re.compile(
    r"(?:now|get_current_timestamp|current_timestamp|transaction_timestamp)(?:\(\))?", re.IGNORECASE
)
_CONVERSION_ERRORS: Final = (pa.ArrowException, OverflowError, ValueError, TypeError, RecursionError)


class _NeedsDuckDB(Exception):
    """Only DuckDB can convert a value, or say what is wrong with it."""


def from_values(
    definition: TableDefinition, names: Sequence[str], rows: Sequence[tuple[Any, ...]]
) -> CellsByPlace | None:
    """Return the columns of these rows, or None if only DuckDB can convert them or say what is wrong with them."""
    places = definition.codec.places
    wanted = [places.get(name.lower()) for name in names] if names else list(range(len(definition.columns)))
    if not rows or None in wanted or len(set(wanted)) < len(wanted) or any(len(row) != len(wanted) for row in rows):
        return None
    columns: CellsByPlace = {}
    try:
        for place, values in zip(wanted, zip(*rows, strict=True), strict=True):
            assert place is not None
            columns[place] = _column(definition.columns[place], values, definition.codec.kinds[place])
    except (_NeedsDuckDB, *_CONVERSION_ERRORS):
        return None
    return columns


def _column(column: Column, values: Sequence[Any], kind: pa.DataType) -> Cells:
    types = set(map(type, values))
    types.discard(_NONE)
    if types == {str} and column.type in _FROM_TEXT:
        return _times(values, kind)
    accepted = _DECIMAL if column.type.startswith("DECIMAL") else _ACCEPTED_TYPES.get(column.type)
    if accepted is None or not types <= accepted:
        raise _NeedsDuckDB
    if len(values) <= FEW and (not types or _is_plain(column, values)):
        return list(values)
    if column.type == "JSON":
        values = [each if each is None else _json(each) for each in values]
    elif column.type == "DOUBLE" and decimal.Decimal in types:
        values = [_double(each) if isinstance(each, decimal.Decimal) else each for each in values]
    elif column.type == "UUID":
        values = [each if each is None else _uuid(each) for each in values]
    array = pa.array(values, kind)
    if column.type == "FLOAT" and pc.any(pc.is_inf(array)).as_py():
        raise _NeedsDuckDB
    return array


def _is_plain(column: Column, values: Sequence[Any]) -> bool:
    """Whether the column stores these values, of accepted types, as they are.

    Raises `_NeedsDuckDB` if one is out of range.
    """
    if column.type in _BOUNDS:
        low, high = _BOUNDS[column.type]
        if not all(each is None or low <= each <= high for each in values):
            raise _NeedsDuckDB
        return True
    if column.type == "VARCHAR":
        for each in values:
            if each is not None:
                each.encode()  # refuses text with lone surrogates, as Arrow does
        return True
    return column.type == "BOOLEAN"


def _times(values: Sequence[str | None], kind: pa.DataType) -> pa.Array:
    if any(each is not None and not _ISO.fullmatch(each) for each in values):
        raise _NeedsDuckDB
    texts = pa.array(values, pa.string())
    try:
        return texts.cast(kind)
    except pa.ArrowInvalid:
        if not (pa.types.is_timestamp(kind) and kind.tz):
            raise
        return texts.cast(pa.timestamp("us")).cast(kind)


def _double(value: decimal.Decimal) -> float:
    """Convert with correct rounding, as DuckDB's division does if digits and power of ten are exact doubles."""
    _, digits, exponent = value.as_tuple()
    if not isinstance(exponent, int) or len(digits) > 15 or not -15 <= exponent <= 0:
        raise _NeedsDuckDB
    return float(value)


def _json(value: Any) -> str:
    if isinstance(value, str):
        msgspec.json.decode(value.encode())
        return value
    return msgspec.json.encode(value).decode()


def _uuid(value: str | uuid.UUID) -> str:
    text = str(value)
    if not _UUID.fullmatch(text):
        raise _NeedsDuckDB
    return text.lower()


def from_arrow(definition: TableDefinition, rows: pa.Table) -> CellsByPlace:
    """Return the columns of an Arrow table by place. `SqlError` names a column whose values would not stay exact."""
    columns: CellsByPlace = {}
    for name, column in zip(rows.column_names, rows.columns, strict=True):
        place = definition.codec.places.get(name.lower())
        if place is None or place in columns:
            raise SqlError(
                f"table {definition.name!r} has no column {name!r}"
                if place is None
                else f"the column {name!r} of table {definition.name!r} is given twice",
                hint=f"its columns are {', '.join(definition.codec.names)}",
            )
        wanted, kind = definition.columns[place], definition.codec.kinds[place]
        try:
            columns[place] = _cast(wanted, one_array(column), kind)
        except (_NeedsDuckDB, *_CONVERSION_ERRORS) as error:
            raise SqlError(
                f"column {wanted.name!r} of table {definition.name!r} has type {wanted.type}, and {column.type} does "
                f"not fit: {error or f'not a valid {wanted.type}'}"
            ) from error
    return columns


def _cast(column: Column, array: pa.Array, kind: pa.DataType) -> pa.Array:
    if pa.types.is_temporal(kind) and not (
        _is_time(array.type) or _is_text(array.type) or pa.types.is_null(array.type)
    ):
        raise TypeError("expected a date or time")
    if column.type in ("JSON", "UUID"):
        if isinstance(array, pa.ExtensionArray):
            array = array.storage
        convert = _json if column.type == "JSON" else _uuid
        if pa.types.is_fixed_size_binary(array.type) and column.type == "UUID":
            texts = [each if each is None else str(uuid.UUID(bytes=each)) for each in array.to_pylist()]
        elif _is_text(array.type) or pa.types.is_null(array.type):
            texts = [each if each is None else convert(each) for each in array.to_pylist()]
        else:
            raise TypeError("expected text")
        return pa.array(texts, pa.string())
    if array.type == kind:
        return array
    if pa.types.is_decimal(kind) and pa.types.is_integer(array.type):
        array = array.cast(pa.decimal128(20, 0))
    result = array.cast(kind)
    if column.type == "FLOAT" and pc.any(pc.and_(pc.is_inf(result), pc.is_finite(array))).as_py():
        raise OverflowError("a number is too large")
    return result


def _is_text(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _is_time(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_temporal(kind))


class Defaults:
    """Fills the columns that an INSERT does not name. `evaluate` runs SQL in DuckDB."""

    def __init__(self, runtime: Runtime, evaluate: Callable[[str], pa.Table]) -> None:
        self._runtime = runtime
        self._evaluate = evaluate
        self._literals: dict[tuple[int, int], pa.Scalar] = {}

    def fill(self, definition: TableDefinition, columns: CellsByPlace) -> list[Cells]:
        """Add the missing columns and return all. Raises `ConstraintViolation` for a null in a NOT NULL column."""
        count = len(next(iter(columns.values())))
        kinds = definition.codec.kinds
        to_evaluate: list[int] = []
        if len(columns) < len(definition.columns):
            for place, column in enumerate(definition.columns):
                if place not in columns:
                    found = self._default(definition, place, column, count)
                    columns[place] = pa.nulls(count, kinds[place]) if found is None else found
                    if found is None and column.default is not None:
                        to_evaluate.append(place)
        if to_evaluate:
            chosen = ", ".join(
                f"CAST({definition.columns[place].default} AS {definition.columns[place].type})"
                for place in to_evaluate
            )
            answer = self._evaluate(f"SELECT {chosen} FROM range({count})")
            for place, column in zip(to_evaluate, answer.columns, strict=True):
                columns[place] = column.combine_chunks().cast(kinds[place])
        for place, column in enumerate(definition.columns):
            if not column.nullable and _has_null(columns[place]):
                raise ConstraintViolation(
                    f"column {column.name!r} of table {definition.name!r} is NOT NULL and got a NULL"
                )
        return [columns[place] for place in range(len(definition.columns))]

    def _default(self, definition: TableDefinition, place: int, column: Column, count: int) -> pa.Array | None:
        """Return the column's default, or None if it has none or DuckDB has to evaluate it."""
        if column.default is None:
            return None
        kind = definition.codec.kinds[place]
        if column.type.startswith("TIMESTAMP") and _NOW.fullmatch(column.default):
            now = pa.scalar(self._runtime.now_ms(), pa.timestamp("ms")).cast(kind, safe=False)
            return pa.repeat(now, count)
        if not _LITERAL.fullmatch(column.default):
            return None
        scalar = self._literals.get((definition.number, place))
        if scalar is None:
            found = self._evaluate(f"SELECT CAST({column.default} AS {column.type})")
            scalar = self._literals[definition.number, place] = found.column(0).combine_chunks().cast(kind)[0]
        return pa.repeat(scalar, count)


def _has_null(cells: Cells) -> bool:
    return None in cells if isinstance(cells, list) else cells.null_count > 0
