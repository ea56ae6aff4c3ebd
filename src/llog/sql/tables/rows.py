"""The encoding of rows as bytes, for every type that a column may have. No I/O.

A row is a msgpack array of its columns' storage values, in the table's order; a row key is the msgpack array of the
primary key's. Booleans, numbers, text and bytes are stored as they are; temporal values as integers in the type's unit
(days for DATE); DECIMAL and HUGEINT as the 16 bytes of their unscaled value, little-endian; JSON and UUID as text;
lists as arrays.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec
import pyarrow as pa

from llog.errors import CorruptBatch

_ARROW: Final = {
    "BOOLEAN": pa.bool_(),
    "TINYINT": pa.int8(),
    "SMALLINT": pa.int16(),
    "INTEGER": pa.int32(),
    "BIGINT": pa.int64(),
    "UTINYINT": pa.uint8(),
    "USMALLINT": pa.uint16(),
    "UINTEGER": pa.uint32(),
    "UBIGINT": pa.uint64(),
    "HUGEINT": pa.decimal128(38, 0),
    "FLOAT": pa.float32(),
    "DOUBLE": pa.float64(),
    "VARCHAR": pa.string(),
    "BLOB": pa.binary(),
    "JSON": pa.string(),
    "UUID": pa.string(),
    "DATE": pa.date32(),
    "TIME": pa.time64("us"),
    "TIMESTAMP": pa.timestamp("us"),
    "TIMESTAMP WITH TIME ZONE": pa.timestamp("us", "UTC"),
    "TIMESTAMP_S": pa.timestamp("s"),
    "TIMESTAMP_MS": pa.timestamp("ms"),
    "TIMESTAMP_NS": pa.timestamp("ns"),
}
_DECIMAL: Final = re.compile(r"DECIMAL\((\d+),(\d+)\)")
_NOT_IN_KEYS: Final = {"FLOAT", "DOUBLE", "JSON"}
_INT128: Final = pa.binary(16)
TYPES: Final = "BOOLEAN, integers (TINYINT to HUGEINT), REAL, DOUBLE, DECIMAL, VARCHAR, BLOB, DATE, TIME, TIMESTAMP, \
TIMESTAMPTZ, UUID, JSON, and lists of numbers, booleans, text or bytes"


def arrow_type(sql_type: str) -> pa.DataType | None:
    """Return the Arrow type of a column of this type, as DuckDB spells it, or None if tables do not support it."""
    if sql_type.endswith("[]"):
        inner = arrow_type(sql_type[:-2])
        return None if inner is None or _storage_type(inner) != inner else pa.list_(inner)
    if decimal := _DECIMAL.fullmatch(sql_type):
        return pa.decimal128(int(decimal[1]), int(decimal[2]))
    return _ARROW.get(sql_type)


def can_be_key(sql_type: str) -> bool:
    """Whether equal values of this type always have equal bytes."""
    return not sql_type.endswith("[]") and sql_type not in _NOT_IN_KEYS


def _storage_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_date32(kind):
        return pa.int32()
    if pa.types.is_temporal(kind):
        return pa.int64()
    return _INT128 if pa.types.is_decimal(kind) else kind


Cells: TypeAlias = pa.Array | list[Any]
"""The values of one column: an Arrow array, or a list of storage values."""


class _ColumnStorage(NamedTuple):
    kind: pa.DataType
    stored: pa.DataType

    def pack(self, cells: Cells) -> list[Any]:
        if isinstance(cells, list):
            return cells
        if self.kind != self.stored:
            cells = _reinterpret(cells, self.stored)
        values: list[Any] = cells.to_pylist()
        return values

    def unpack(self, values: Sequence[Any]) -> pa.Array:
        array = pa.array(values, self.stored)
        return array if self.kind == self.stored else _reinterpret(array, self.kind)


def _reinterpret(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return the same bytes as an array of another type of the same width."""
    return pa.Array.from_buffers(kind, len(array), array.buffers(), array.null_count, array.offset)


class RowCodec:
    """Encodes and decodes the rows of one table exactly: NaN, -0.0 and the largest decimals survive."""

    def __init__(self, columns: Sequence[tuple[str, str]], primary_key: Sequence[str]) -> None:
        fields = [pa.field(name, arrow_type(sql_type)) for name, sql_type in columns]
        self.schema = pa.schema(fields)
        self.kinds = [field.type for field in fields]
        self.names = tuple(name for name, _ in columns)
        self.places = {name.lower(): place for place, name in enumerate(self.names)}
        self._storages = [_ColumnStorage(field.type, _storage_type(field.type)) for field in fields]
        self._key_places = [self.places[name.lower()] for name in primary_key]
        self._encode: Callable[[Any], bytes] = msgspec.msgpack.Encoder().encode
        self._decoder = msgspec.msgpack.Decoder(list[list[Any]])

    def table(self, columns: Sequence[Cells]) -> pa.Table:
        arrays = [
            storage.unpack(cells) if isinstance(cells, list) else cells
            for storage, cells in zip(self._storages, columns, strict=True)
        ]
        return pa.table(arrays, schema=self.schema)

    def encode(self, columns: Sequence[Cells], prefix: bytes) -> tuple[list[bytes], list[bytes]]:
        """Return the row keys, each with `prefix` before it, and the rows."""
        packed = [storage.pack(column) for storage, column in zip(self._storages, columns, strict=True)]
        encode = self._encode
        keys = [prefix + encode(key) for key in zip(*(packed[place] for place in self._key_places), strict=True)]
        return keys, list(map(encode, zip(*packed, strict=True)))

    def decode(self, values: Sequence[bytes], what: str) -> pa.Table:
        """Decode all rows at once. Raises `CorruptBatch`, which names `what`, if they are not rows of this table."""
        joined = b"\xdd" + len(values).to_bytes(4, "big") + b"".join(values)
        try:
            rows = self._decoder.decode(joined)
            columns = zip(*rows, strict=True) if rows else ((),) * len(self._storages)
            arrays = [each.unpack(list(column)) for each, column in zip(self._storages, columns, strict=True)]
        except (msgspec.DecodeError, ValueError, TypeError, pa.ArrowException) as error:
            raise CorruptBatch(f"rows of {what} are damaged: {error}") from error
        return pa.table(arrays, schema=self.schema)
