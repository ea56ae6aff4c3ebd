"""Converts rows to JSON values and text, the same way for every interface. No I/O.

| type | as JSON |
| --- | --- |
| BOOLEAN, integers | the same; integers have 64 bits, and some JSON readers lose precision beyond 2^53 |
| HUGEINT and DECIMAL without a fraction | a number if it fits into 64 bits, else text |
| DECIMAL | text |
| FLOAT, DOUBLE | a number; NaN and infinity are null |
| DATE, TIME, TIMESTAMP | ISO 8601 text, in UTC with `Z` if the type has a time zone; or `infinity`, `-infinity` |
| BLOB | text if it is UTF-8, else `{"base64": …}` |
| lists, structs, maps | arrays and objects of these |
| all others | text |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from llog.base.units import bytes_to_json

_INT64: Final = 1 << 63
_INT32: Final = 1 << 31
_TYPE_NAMES: Final[list[tuple[Callable[[Any], bool], str]]] = [
    (pa.types.is_boolean, "BOOLEAN"),
    (pa.types.is_int8, "TINYINT"),
    (pa.types.is_int16, "SMALLINT"),
    (pa.types.is_int32, "INTEGER"),
    (pa.types.is_int64, "BIGINT"),
    (pa.types.is_uint8, "UTINYINT"),
    (pa.types.is_uint16, "USMALLINT"),
    (pa.types.is_uint32, "UINTEGER"),
    (pa.types.is_uint64, "UBIGINT"),
    (pa.types.is_float32, "FLOAT"),
    (pa.types.is_floating, "DOUBLE"),
    (pa.types.is_string, "VARCHAR"),
    (pa.types.is_large_string, "VARCHAR"),
    (pa.types.is_string_view, "VARCHAR"),
    (pa.types.is_binary, "BLOB"),
    (pa.types.is_large_binary, "BLOB"),
    (pa.types.is_binary_view, "BLOB"),
    (pa.types.is_fixed_size_binary, "BLOB"),
    (pa.types.is_date, "DATE"),
    (pa.types.is_time, "TIME"),
    (pa.types.is_duration, "INTERVAL"),
    (pa.types.is_interval, "INTERVAL"),
    (pa.types.is_null, "NULL"),
]
_PLAIN: Final = {
    "BOOLEAN",
    *(f"{sign}{size}" for sign in ("", "U") for size in ("TINYINT", "SMALLINT", "INTEGER", "BIGINT")),
    "FLOAT",
    "DOUBLE",
    "VARCHAR",
}


def type_name(kind: pa.DataType) -> str:
    """Return SQL's name of an Arrow type."""
    if pa.types.is_decimal(kind):
        return "HUGEINT" if (kind.precision, kind.scale) == (38, 0) else f"DECIMAL({kind.precision},{kind.scale})"
    if pa.types.is_timestamp(kind):
        return "TIMESTAMP" if kind.tz is None else "TIMESTAMP WITH TIME ZONE"
    if pa.types.is_dictionary(kind):
        return type_name(kind.value_type)
    if pa.types.is_map(kind):
        return f"MAP({type_name(kind.key_type)}, {type_name(kind.item_type)})"
    if pa.types.is_struct(kind):
        return f"STRUCT({', '.join(f'{field.name} {type_name(field.type)}' for field in kind)})"
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return f"{type_name(kind.value_type)}[]"
    if isinstance(kind, pa.BaseExtensionType):
        return "JSON" if kind.extension_name == "arrow.json" else type_name(kind.storage_type)
    return next((name for fits, name in _TYPE_NAMES if fits(kind)), str(kind).upper())


def is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))


def json_columns(table: pa.Table) -> list[list[Any]]:
    """Return the JSON values of each column."""
    return [json_values(column) for column in table.columns]


def json_rows(table: pa.Table) -> Iterator[tuple[Any, ...]]:
    columns = json_columns(table)
    return zip(*columns, strict=True) if columns else iter([()] * table.num_rows)


def json_values(column: pa.ChunkedArray) -> list[Any]:
    kind = column.type
    if isinstance(kind, pa.BaseExtensionType):
        return json_values(column.cast(kind.storage_type))
    if pa.types.is_dictionary(kind):
        return json_values(column.cast(kind.value_type))
    if pa.types.is_timestamp(kind):
        text = column.cast(pa.timestamp(kind.unit)).cast(pa.string())
        text = pc.replace_substring(text, " ", "T", max_replacements=1)
        text = text if kind.tz is None else pc.binary_join_element_wise(text, "Z", "")
        column = _with_infinity(text, column.cast(pa.int64()), _INT64 - 1)
    elif pa.types.is_date32(kind):
        column = _with_infinity(column.cast(pa.string()), column.cast(pa.int32()), _INT32 - 1)
    elif pa.types.is_date(kind) or pa.types.is_time(kind):
        column = column.cast(pa.string())
    elif pa.types.is_floating(kind):
        column = pc.if_else(pc.is_finite(column), column, pa.scalar(None, kind))
    values: list[Any] = column.to_pylist()
    return values if type_name(column.type) in _PLAIN else [json_value(value) for value in values]


def _with_infinity(text: pa.ChunkedArray, numbers: pa.ChunkedArray, most: int) -> pa.ChunkedArray:
    """Replace DuckDB's infinities, which are the largest and the smallest number."""
    text = pc.if_else(pc.equal(numbers, most), "infinity", text)
    return pc.if_else(pc.equal(numbers, -most), "-infinity", text)


def json_value(value: Any) -> Any:
    """Return the JSON form of one value, however deeply it is nested."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else None
        case Decimal():
            is_int64 = value.is_finite() and value.as_tuple().exponent == 0 and -_INT64 <= value < _INT64
            return int(value) if is_int64 else str(value)
        case bytes():
            return bytes_to_json(value)
        case datetime():
            if value.tzinfo is None:
                return value.isoformat()
            return value.astimezone(UTC).replace(tzinfo=None).isoformat() + "Z"
        case date() | time():
            return value.isoformat()
        case timedelta():
            return str(value)
        case pa.MonthDayNano():
            return _interval_text(value)
        case dict():
            return {_key_text(key): json_value(each) for key, each in value.items()}
        case list() if value and all(type(each) is tuple and len(each) == 2 for each in value):  # a map
            return {_key_text(key): json_value(each) for key, each in value}
        case list() | tuple():
            return [json_value(each) for each in value]
        case _:
            return str(value)


def unique_names(names: Sequence[str]) -> list[str]:
    """Return the names with a number after each repeated one, since a JSON object has every name once."""
    taken: dict[str, None] = {}
    for name in names:
        unique, number = name, 1
        while unique in taken:
            unique, number = f"{name}_{number}", number + 1
        taken[unique] = None
    return list(taken)


def text_of(value: Any) -> str:
    """Return text as it is, and any other value as JSON."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _key_text(key: Any) -> str:
    return text_of(json_value(key))


def _interval_text(value: Any) -> str:
    parts = [f"{value.months} months"] if value.months else []
    parts += [f"{value.days} days"] if value.days else []
    if value.nanoseconds or not parts:
        parts.append(f"{Decimal(value.nanoseconds) / 1_000_000_000:f} seconds")
    return " ".join(parts)
