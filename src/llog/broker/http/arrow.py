"""Records as an Arrow IPC stream (`application/vnd.apache.arrow.stream`), out and in.

| column | type | |
| --- | --- | --- |
| `offset` | int64 | never null; ignored on the way in |
| `timestamp` | timestamp[ms, UTC] | never null on the way out; null or absent on the way in: the time of the append |
| `key` | binary | |
| `value` | binary | null marks its key as deleted |
| `headers` | list<struct<key: string, value: binary>> | null where a record has none |

A body from outside is looked at before Arrow allocates anything for it: no compression and no dictionaries, which make
much of little, and only these columns. Then every array is validated in full.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from starlette.requests import Request

from llog.batch.columns import (
    HEADERS_TYPE,
    Columns,
    byte_size,
    check_times,
    concat,
    effective_timestamps,
    headers_from_arrow,
    headers_to_arrow,
)
from llog.broker.http.requests import JSON
from llog.errors import InvalidArgument
from llog.log.engine import Batch

K = TypeVar("K")
T = TypeVar("T")

MEDIA_TYPE: Final = "application/vnd.apache.arrow.stream"
_TIME: Final = pa.timestamp("ms", tz="UTC")
SCHEMA: Final = pa.schema(
    [
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("timestamp", _TIME, nullable=False),
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field("headers", HEADERS_TYPE),
    ]
)
_SMALL_BYTES: Final = 64 << 10
"""Batches that are smaller on average are joined: each costs more than its bytes do, here and at the client."""
_COLUMNS_MAX: Final = 5
_RECORD_BATCH: Final = 3
_COMPRESSION: Final = 3


def wants_arrow(request: Request) -> bool:
    """Return whether the client accepts an Arrow stream; otherwise it gets JSON."""
    accepted = request.headers.get("accept", "*/*")
    if MEDIA_TYPE in accepted:
        return True
    if any(each in accepted for each in (JSON, "*/*", "application/*")):
        return False
    raise InvalidArgument(f"accept is {accepted[:80]!r}: this is answered as {JSON} or {MEDIA_TYPE}")


def encode_stream(schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> memoryview:
    """Return an Arrow stream of these batches; of none, it has the schema alone."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return memoryview(sink.getvalue())


def encode_records(batches: Sequence[Batch]) -> memoryview:
    """Return an Arrow stream of the records of these batches; of none, it has the schema alone."""
    parts = [(_offsets(batch), batch.columns) for batch in batches]
    if len(parts) > 1 and sum(byte_size(columns) for _, columns in parts) < _SMALL_BYTES * len(parts):
        parts = [(np.concatenate([offsets for offsets, _ in parts]), concat([columns for _, columns in parts]))]
    return encode_stream(SCHEMA, (_rows(offsets, columns) for offsets, columns in parts))


def decode_records(body: bytes | bytearray) -> Columns:
    """Return the records of an Arrow stream, not yet stamped; `InvalidArgument` says what is wrong with it."""
    return decode_stream(body, _column_types, _columns)


def decode_stream(body: bytes | bytearray, check: Callable[[pa.Schema], K], convert: Callable[[pa.Table, K], T]) -> T:
    """Return what `convert` makes of the table in an Arrow stream, with what `check` returned for its schema.

    Raises `InvalidArgument` if the body is not an Arrow stream.
    """
    data = pa.py_buffer(body)
    try:
        _check_messages(data)
        with pa.ipc.open_stream(data) as reader:
            kinds = check(reader.schema)
            table = reader.read_all()
        table.validate(full=True)
        return convert(table.combine_chunks(), kinds)
    except (pa.ArrowException, struct.error, OSError, OverflowError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"the body is no Arrow stream that can be read: {str(error)[:300]}") from error


def _offsets(batch: Batch) -> npt.NDArray[np.int64]:
    return np.arange(batch.start_offset, batch.start_offset + batch.columns.count, dtype=np.int64)


def _rows(offsets: npt.NDArray[np.int64], columns: Columns) -> pa.RecordBatch:
    count = columns.count
    arrays = [
        pa.array(offsets),
        effective_timestamps(columns).view(_TIME),
        pa.nulls(count, pa.binary()) if columns.keys is None else columns.keys,
        columns.values,
        headers_to_arrow(columns.headers, count),
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def _check_messages(data: pa.Buffer) -> None:
    """Raise `InvalidArgument` unless there is a schema, then record batches alone, none of them compressed."""
    messages = pa.ipc.MessageReader.open_stream(data)
    expected = "schema"
    while True:
        try:
            message = messages.read_next_message()
        except StopIteration:
            break
        if message.type != expected:
            raise InvalidArgument(f"the Arrow stream has a message of kind {message.type!r} where a {expected} must be")
        if expected == "record batch" and _is_compressed(memoryview(message.metadata).cast("B")):
            raise InvalidArgument("the Arrow stream is compressed: write it without compression")
        expected = "record batch"
    if expected == "schema":
        raise InvalidArgument("the body is empty: it must be an Arrow stream")


def _is_compressed(message: memoryview) -> bool:
    """Return whether the header of this message, a flatbuffer, is a record batch that names a compression."""
    root = struct.unpack_from("<I", message)[0]
    kind, header = _field(message, root, 1), _field(message, root, 2)
    if kind is None or header is None or message[kind] != _RECORD_BATCH:
        raise InvalidArgument("the Arrow stream has a record batch without a header")
    batch = header + struct.unpack_from("<I", message, header)[0]
    return _field(message, batch, _COMPRESSION) is not None


def _field(message: memoryview, table: int, number: int) -> int | None:
    """Return where a flatbuffer's table has this field; None if it lacks the field."""
    entries = table - struct.unpack_from("<i", message, table)[0]
    if entries < 0 or 4 + 2 * number + 2 > struct.unpack_from("<H", message, entries)[0]:
        return None
    offset: int = struct.unpack_from("<H", message, entries + 4 + 2 * number)[0]
    if offset and table + offset >= len(message):
        raise InvalidArgument("the Arrow stream has a message that points beyond its end")
    return table + offset if offset else None


def _column_types(schema: pa.Schema) -> dict[str, Any]:
    """Return the types of the columns by name; `InvalidArgument` unless they are those of a record."""
    names = schema.names
    if len(names) > _COLUMNS_MAX or len(set(names)) < len(names) or "value" not in names:
        raise InvalidArgument(
            f"the Arrow stream has the columns {', '.join(names)[:200]}: there must be a value, and may be each of "
            "key, timestamp, headers and offset"
        )
    kinds = {field.name: field.type for field in schema}
    for name, kind in kinds.items():
        if not _fits(name, kind):
            raise InvalidArgument(
                f"the Arrow stream has a column {name[:80]!r} of type {str(kind)[:200]}: value and key are binary "
                f"or string, timestamp is a timestamp or int64 (ms), headers are {HEADERS_TYPE}, offset is int64"
            )
    return kinds


def _fits(name: str, kind: Any) -> bool:
    is_bytes = kind in (pa.binary(), pa.large_binary(), pa.string(), pa.large_string())
    match name:
        case "value" | "key":
            return bool(is_bytes)
        case "timestamp":
            return bool(kind == pa.int64() or pa.types.is_timestamp(kind))
        case "offset":
            return bool(kind == pa.int64())
        case "headers":
            return bool(kind == HEADERS_TYPE)
        case _:
            return False


def _columns(table: pa.Table, kinds: dict[str, Any]) -> Columns:
    if table.num_rows == 0:
        raise InvalidArgument("the Arrow stream has no records: there is nothing to append")
    arrays = {name: _array(table.column(name), kind) for name, kind in kinds.items() if name != "offset"}
    key, timestamp, headers = arrays.get("key"), arrays.get("timestamp"), arrays.get("headers")
    return Columns(
        values=arrays["value"].cast(pa.binary()),
        keys=None if key is None or key.null_count == len(key) else key.cast(pa.binary()),
        timestamps=None if timestamp is None or timestamp.null_count == len(timestamp) else _checked_millis(timestamp),
        headers=None if headers is None else headers_from_arrow(headers),
        append_runs=(),
    )


def _array(column: pa.ChunkedArray, kind: Any) -> Any:
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays([*column.chunks, pa.nulls(0, kind)])


def _checked_millis(timestamps: Any) -> pa.Int64Array:
    """Checked here: in a batch, one that is out of bounds would fail the records of others, too."""
    millis = _millis(timestamps)
    check_times(millis)
    return millis


def _millis(timestamps: Any) -> pa.Int64Array:
    if timestamps.type == pa.int64():
        return timestamps
    whole = timestamps
    if timestamps.type.unit in ("us", "ns"):  # what is finer than a millisecond is dropped
        whole = pc.floor_temporal(timestamps.cast(pa.timestamp(timestamps.type.unit, tz="UTC")), unit="millisecond")
    return whole.cast(pa.timestamp("ms", tz="UTC")).cast(pa.int64())
