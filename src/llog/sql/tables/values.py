"""Values to columns of a table, without DuckDB where that gives exactly what DuckDB would give.

Plain values of the type that a column has are taken as they are; anything else (text for a number, a float for an
integer) is left to DuckDB, whose rules for casts are those of every other statement.
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

Columns = dict[int, Cells]
"""By place in the table."""

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
_TAKEN: Final[dict[str, frozenset[type]]] = {
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
_REFUSED: Final = (pa.ArrowException, OverflowError, ValueError, TypeError, RecursionError)


class _LeftToDuckDb(Exception):
    pass


def from_values(definition: TableDefinition, names: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> Columns | None:
    """Columns of these rows. None: DuckDB has to say what they are, or what is wrong with them."""
    places = definition.codec.places
    wanted = [places.get(name.lower()) for name in names] if names else list(range(len(definition.columns)))
    if not rows or None in wanted or len(set(wanted)) < len(wanted) or any(len(row) != len(wanted) for row in rows):
        return None
    columns: Columns = {}
    try:
        for place, values in zip(wanted, zip(*rows, strict=True), strict=True):
            assert place is not None
            columns[place] = _column(definition.columns[place], values, definition.codec.kinds[place])
    except (_LeftToDuckDb, *_REFUSED):
        return None
    return columns


def _column(column: Column, values: Sequence[Any], kind: pa.DataType) -> Cells:
    types = set(map(type, values))
    types.discard(_NONE)
    if types == {str} and column.type in _FROM_TEXT:
        return _times(values, kind)
    taken = _DECIMAL if column.type.startswith("DECIMAL") else _TAKEN.get(column.type)
    if taken is None or not types <= taken:
        raise _LeftToDuckDb
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
        raise _LeftToDuckDb
    return array


def _is_plain(column: Column, values: Sequence[Any]) -> bool:
    """Whether these values, of a type that the column takes, are stored as they are. `_LeftToDuckDb` if one does not
    fit.
    """
    if column.type in _BOUNDS:
        low, high = _BOUNDS[column.type]
        if not all(each is None or low <= each <= high for each in values):
            raise _LeftToDuckDb
        return True
    if column.type == "VARCHAR":
        for each in values:
            if each is not None:
                each.encode()  # text that is no Unicode is refused as by Arrow
        return True
    return column.type == "BOOLEAN"


def _times(values: Sequence[str | None], kind: pa.DataType) -> pa.Array:
    if any(each is not None and not _ISO.fullmatch(each) for each in values):
        raise _LeftToDuckDb
    texts = pa.array(values, pa.string())
    try:
        return texts.cast(kind)
    except pa.ArrowInvalid:
        if not (pa.types.is_timestamp(kind) and kind.tz):
            raise
        return texts.cast(pa.timestamp("us")).cast(kind)


def _double(value: decimal.Decimal) -> float:
    """Exactly rounded, as DuckDB's division is as long as digits and power of ten are doubles themselves."""
    _, digits, exponent = value.as_tuple()
    if not isinstance(exponent, int) or len(digits) > 15 or not -15 <= exponent <= 0:
        raise _LeftToDuckDb
    return float(value)


def _json(value: Any) -> str:
    if isinstance(value, str):
        msgspec.json.decode(value.encode())
        return value
    return msgspec.json.encode(value).decode()


def _uuid(value: str | uuid.UUID) -> str:
    text = str(value)
    if not _UUID.fullmatch(text):
        raise _LeftToDuckDb
    return text.lower()


def from_arrow(definition: TableDefinition, rows: pa.Table) -> Columns:
    """Columns of an Arrow table, by name. `SqlError` names the column that does not fit; nothing is rounded or cut."""
    columns: Columns = {}
    for name, column in zip(rows.column_names, rows.columns, strict=True):
        place = definition.codec.places.get(name.lower())
        if place is None or place in columns:
            raise SqlError(
                f"column {name!r} is {'no column' if place is None else 'there twice, a column'} of table "
                f"{definition.name!r}",
                hint=f"its columns are {', '.join(definition.codec.names)}",
            )
        wanted, kind = definition.columns[place], definition.codec.kinds[place]
        try:
            columns[place] = _cast(wanted, one_array(column), kind)
        except (_LeftToDuckDb, *_REFUSED) as error:
            raise SqlError(
                f"column {wanted.name!r} of table {definition.name!r} is {wanted.type}, and {column.type} does not "
                "fit: "
                f"{error or 'no such value'}"
            ) from error
    return columns


def _cast(column: Column, array: pa.Array, kind: pa.DataType) -> pa.Array:
    if pa.types.is_temporal(kind) and not (
        _is_time(array.type) or _is_text(array.type) or pa.types.is_null(array.type)
    ):
        raise TypeError("a time is wanted")
    if column.type in ("JSON", "UUID"):
        if isinstance(array, pa.ExtensionArray):
            array = array.storage
        checked = _json if column.type == "JSON" else _uuid
        if pa.types.is_fixed_size_binary(array.type) and column.type == "UUID":
            found = [each if each is None else str(uuid.UUID(bytes=each)) for each in array.to_pylist()]
        elif _is_text(array.type) or pa.types.is_null(array.type):
            found = [each if each is None else checked(each) for each in array.to_pylist()]
        else:
            raise TypeError("text is wanted")
        return pa.array(found, pa.string())
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
    """What goes into columns that an INSERT does not name. `evaluate` has DuckDB run SQL."""

    def __init__(self, runtime: Runtime, evaluate: Callable[[str], pa.Table]) -> None:
        self._runtime = runtime
        self._evaluate = evaluate
        self._literals: dict[tuple[int, int], pa.Scalar] = {}

    def filled(self, definition: TableDefinition, columns: Columns) -> list[Cells]:
        """All columns; `ConstraintViolation` if a column that must have values has none."""
        count = len(next(iter(columns.values())))
        kinds = definition.codec.kinds
        asked: list[int] = []
        if len(columns) < len(definition.columns):
            for place, column in enumerate(definition.columns):
                if place not in columns:
                    found = self._default(definition, place, column, count)
                    columns[place] = pa.nulls(count, kinds[place]) if found is None else found
                    if found is None and column.default is not None:
                        asked.append(place)
        if asked:
            chosen = ", ".join(
                f"CAST({definition.columns[place].default} AS {definition.columns[place].type})" for place in asked
            )
            answer = self._evaluate(f"SELECT {chosen} FROM range({count})")
            for place, column in zip(asked, answer.columns, strict=True):
                columns[place] = column.combine_chunks().cast(kinds[place])
        for place, column in enumerate(definition.columns):
            if not column.nullable and _has_null(columns[place]):
                raise ConstraintViolation(f"NOT NULL: column {column.name!r} of table {definition.name!r} has a null")
        return [columns[place] for place in range(len(definition.columns))]

    def _default(self, definition: TableDefinition, place: int, column: Column, count: int) -> pa.Array | None:
        """None: there is none, or DuckDB has to say."""
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
