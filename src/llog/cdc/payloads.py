"""Rows as JSON: the payloads and the keys of change events, a column at a time.

Every payload is one JSON object in UTF-8, with its columns in the table's order and without spaces; the same row always
has the same bytes.

| Arrow type | JSON |
| --- | --- |
| bool, integers of any width | the exact value |
| floats | the shortest number that reads back the same; NaN and infinities are null |
| decimals (hugeint too) | a string, exactly |
| strings, uuid, enum | a string |
| JSON columns | the JSON itself; a string if it is not JSON by RFC 8259 (DuckDB accepts NaN and trailing commas) |
| binary | a string, base64 |
| date, time | a string: `2024-12-31`, `23:59:59.000000` |
| timestamps | a string in UTC: `2024-12-31T23:59:59.000000Z`. One without a zone counts as UTC. `infinity` and `-infinity` are DuckDB's |
| interval | a string: `P1M2DT3.5S` |
| list, map, struct | an array, an array of {"key", "value"}, an object |

Only JSON, binary and interval columns, and text columns with characters to escape, are converted in a loop.
"""  # noqa: E501

from __future__ import annotations

import binascii
import uuid
from collections.abc import Callable, Iterable
from itertools import repeat
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from llog.batch.columns import FEW, binary_offsets, one_array
from llog.cdc.changes import FewRows, TableShape, table_of
from llog.errors import InvalidArgument

_NULL: Final = pa.scalar("null")
_NOTHING: Final = pa.scalar("")
_JOIN: Final = pc.JoinOptions(null_handling="emit_null")
_YEARS_1_TO_9999_DAYS: Final = (-719_162, 2_932_896)
_PER_DAY: Final = {"s": 86_400, "ms": 86_400_000, "us": 86_400_000_000, "ns": 86_400_000_000_000}
_FOREVER: Final = (1 << 63) - 1
_encode = msgspec.json.Encoder().encode


Rows: TypeAlias = pa.Table | FewRows
Texts = Any
"""A `pa.StringArray`, or a list of strings if a column of `FewRows` was a list."""


class _Text(NamedTuple):
    """A column as text; null stays null."""

    values: pa.StringArray
    quoted: bool
    """Whether the text has to be put in quotes."""
    plain: bool = True
    """Whether no character of the text has to be escaped."""


def keys_of(shape: TableShape, rows: Rows) -> Texts:
    """Return each row's primary key: a single column as text (`42`, `abc`), several as a JSON array (`[42,"abc"]`)."""
    if len(shape.primary_key) == 1:
        name = shape.primary_key[0]
        column = _column(rows, name)
        if isinstance(column, list):
            return [value if isinstance(value, str) else _json(value) for value in column]
        return _fill_nulls(_text(column, name in shape.json).values)
    parts: list[_Part] = []
    for name in shape.primary_key:
        parts += [",", *_parts(_column(rows, name), name in shape.json)]
    return _join("[", *parts[1:], "]")


def key_payloads(shape: TableShape, rows: Rows, preview: int = 0) -> Texts:
    """Return the primary key of each row and, if `preview` is not 0, that many characters of the row's JSON as
    "preview".
    """
    rows = table_of(rows) if preview else rows
    parts = _members(shape, rows, shape.primary_key)
    if preview and "preview" not in shape.primary_key:
        shown = pc.utf8_slice_codeunits(full_payloads(shape, rows), 0, preview)
        parts += [',"preview":', *_parts(shown, is_json=False)]
    return _join("{", *parts, "}")


def full_payloads(shape: TableShape, rows: Rows) -> Texts:
    return _join("{", *_members(shape, rows, shape.columns), "}")


def diff_payloads(shape: TableShape, rows: pa.Table, old: pa.Table) -> pa.StringArray:
    """Return the primary key of each row and the columns that differ from `old`; the key alone if none does."""
    parts = _members(shape, rows, shape.primary_key)
    for name in shape.columns:
        if name not in shape.primary_key:
            now, before = (json_of(_column(table, name), name in shape.json) for table in (rows, old))
            parts.append(pc.if_else(pc.equal(now, before), "", _join(f",{_json(name)}:", now)))
    return _join("{", *parts, "}")


def json_of(array: pa.Array, is_json: bool) -> pa.StringArray:
    """Return each value as JSON."""
    return _join(*_parts(array, is_json))


_Part = Any
"""A string that is the same for every row, or `Texts`."""


def _parts(array: pa.Array | list[Any], is_json: bool) -> list[_Part]:
    """Return parts that, joined, are each value as JSON."""
    if isinstance(array, list):
        return [[_json(value) for value in array]]
    text = _text(array, is_json)
    if not text.quoted:
        return [_fill_nulls(text.values)]
    if not text.plain:
        return [pa.array([_encode(each) for each in text.values.to_pylist()], pa.binary()).cast(pa.string())]
    quoted = ['"', text.values, '"']
    return [_fill_nulls(_join(*quoted))] if text.values.null_count else quoted


def _members(shape: TableShape, rows: Rows, names: Iterable[str]) -> list[_Part]:
    parts: list[_Part] = []
    for name in names:
        parts += [f"{',' if parts else ''}{_json(name)}:", *_parts(_column(rows, name), name in shape.json)]
    return parts


def _fill_nulls(texts: pa.StringArray) -> pa.StringArray:
    return texts.fill_null(_NULL) if texts.null_count else texts


def _join(*parts: _Part) -> Texts:
    """Join the parts row by row, null where one of them is null; return a list if one of them is a list."""
    if len(parts) == 1:
        return parts[0]
    count = next(len(part) for part in parts if not isinstance(part, str))
    if count <= FEW:
        columns = [repeat(part, count) if isinstance(part, str) else to_list(part) for part in parts]
        texts = [None if None in row else "".join(row) for row in zip(*columns, strict=True)]
        return texts if any(isinstance(part, list) for part in parts) else pa.array(texts, pa.string())
    joined: list[_Part] = []
    text = ""
    for part in parts:
        if isinstance(part, str):
            text += part
            continue
        joined += [pa.scalar(text), part] if text else [part]
        text = ""
    return pc.call_function("binary_join_element_wise", [*joined, pa.scalar(text), _NOTHING], _JOIN)


def to_list(cells: Any) -> list[Any]:
    """Return an Arrow array as a list, and a list as it is."""
    return cells if isinstance(cells, list) else cells.to_pylist()


def _json(value: Any) -> str:
    return _encode(value).decode()


def _column(rows: Rows, name: str) -> pa.Array | list[Any]:
    if isinstance(rows, FewRows):
        return rows.column(name)
    return one_array(rows.column(name))


def _text(array: pa.Array, is_json: bool) -> _Text:
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        if kind.extension_name == "arrow.uuid":
            return _convert_each(array.storage, lambda value: str(uuid.UUID(bytes=value)))
        return _text(array.storage, is_json or kind.extension_name == "arrow.json")
    if pa.types.is_dictionary(kind):
        return _text(array.cast(kind.value_type), is_json)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        if is_json:
            return _Text(_valid_json(array), quoted=False)
        strings = array if pa.types.is_string(kind) else array.cast(pa.string())
        return _Text(strings, quoted=True, plain=_is_plain(strings))
    for applies, convert in _CONVERSIONS:
        if applies(kind):
            return convert(array)
    raise InvalidArgument(f"a column of type {kind} cannot be written as JSON: leave it out of the table, or cast it")


def _is_plain(strings: pa.StringArray) -> bool:
    """Return whether the strings' bytes can stand between quotes without escapes."""
    if len(strings) == 0 or strings.buffers()[2] is None:
        return True
    offsets = binary_offsets(strings)
    data = np.frombuffer(strings.buffers()[2], np.uint8)[offsets[0] : offsets[-1]]
    return not ((data < 0x20) | (data == 0x22) | (data == 0x5C)).any()


def _valid_json(array: pa.Array) -> pa.StringArray:
    def to_valid_json(text: str) -> str:
        try:
            msgspec.json.decode(text, type=msgspec.Raw)
        except (msgspec.DecodeError, RecursionError):
            return _json(text)
        return text

    return _convert_each(array, to_valid_json).values


def _convert_each(array: pa.Array, convert: Callable[[Any], str]) -> _Text:
    values = [None if value is None else convert(value) for value in array.to_pylist()]
    return _Text(pa.array(values, pa.string()), quoted=True)


def _number(array: pa.Array) -> _Text:
    if len(array) <= FEW and pa.types.is_integer(array.type):
        texts = [None if value is None else str(value) for value in array.to_pylist()]
        return _Text(pa.array(texts, pa.string()), quoted=False)
    return _Text(array.cast(pa.string()), quoted=False)


def _float(array: pa.Array) -> _Text:
    wide = array.cast(pa.float32()) if pa.types.is_float16(array.type) else array
    return _Text(pc.if_else(pc.is_finite(wide), wide.cast(pa.string()), None), quoted=False)


def _cast(array: pa.Array) -> _Text:
    return _Text(array.cast(pa.string()), quoted=True)


def _base64(array: pa.Array) -> _Text:
    return _convert_each(array, lambda value: binascii.b2a_base64(value, newline=False).decode())


def _date(array: pa.Array) -> _Text:
    days = array.cast(pa.date32()).cast(pa.int32()).cast(pa.int64())
    if _can_arrow_spell(days, 1):
        return _Text(array.cast(pa.date32()).cast(pa.string()), quoted=True)
    return _convert_each(days, lambda value: str(np.datetime64(value, "D")))


def _timestamp(array: pa.Array) -> _Text:
    unit = array.type.unit
    counts = array.cast(pa.int64())
    if _can_arrow_spell(counts, _PER_DAY[unit]):
        text = counts.cast(pa.timestamp(unit)).cast(pa.string())
        return _Text(_join(pc.replace_substring(text, " ", "T"), "Z"), quoted=True)

    def spell(value: int) -> str:
        if abs(value) == _FOREVER:
            return "infinity" if value > 0 else "-infinity"
        return f"{np.datetime64(value, unit)}Z"

    return _convert_each(counts, spell)


def _can_arrow_spell(counts: pa.Int64Array, per_day: int) -> bool:
    """Return whether all times lie in the years that Arrow can format."""
    bounds = pc.min_max(counts)
    low, high = bounds["min"].as_py(), bounds["max"].as_py()
    return low is None or (
        low >= _YEARS_1_TO_9999_DAYS[0] * per_day and high < (_YEARS_1_TO_9999_DAYS[1] + 1) * per_day
    )


def _interval(array: pa.Array) -> _Text:
    def spell(value: Any) -> str:
        seconds, nanoseconds = divmod(abs(value.nanoseconds), 10**9)
        fraction = f".{nanoseconds:09}".rstrip("0").rstrip(".")
        return f"P{value.months}M{value.days}DT{'-' if value.nanoseconds < 0 else ''}{seconds}{fraction}S"

    return _convert_each(array, spell)


def _list(array: pa.Array) -> _Text:
    array = array.cast(pa.list_(array.type.value_type))
    items = pa.ListArray.from_arrays(array.offsets, json_of(array.values, is_json=False))
    return _where_valid(array, _join("[", pc.binary_join(items, ","), "]"))


def _map(array: pa.MapArray) -> _Text:
    entries = pa.StructArray.from_arrays([array.keys, array.items], ["key", "value"])
    items = pa.ListArray.from_arrays(array.offsets, json_of(entries, is_json=False))
    return _where_valid(array, _join("[", pc.binary_join(items, ","), "]"))


def _struct(array: pa.StructArray) -> _Text:
    parts: list[_Part] = []
    for field, values in zip(array.type, array.flatten(), strict=True):
        parts += [f"{',' if parts else ''}{_json(field.name)}:", *_parts(values, is_json=False)]
    return _where_valid(array, _join("{", *parts, "}") if parts else pa.array(["{}"] * len(array)))


def _where_valid(array: pa.Array, texts: pa.StringArray) -> _Text:
    return _Text(pc.if_else(array.is_valid(), texts, None), quoted=False)


_CONVERSIONS: Final[tuple[tuple[Callable[[Any], bool], Callable[[Any], _Text]], ...]] = (
    (lambda kind: pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_null(kind), _number),
    (pa.types.is_floating, _float),
    (lambda kind: pa.types.is_decimal(kind) or pa.types.is_time(kind), _cast),
    (
        lambda kind: (
            pa.types.is_binary(kind)
            or pa.types.is_large_binary(kind)
            or pa.types.is_fixed_size_binary(kind)
            or pa.types.is_binary_view(kind)
        ),
        _base64,
    ),
    (pa.types.is_date, _date),
    (pa.types.is_timestamp, _timestamp),
    (pa.types.is_interval, _interval),
    (pa.types.is_map, _map),
    (
        lambda kind: pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind),
        _list,
    ),
    (pa.types.is_struct, _struct),
)
