"""Change events: records that describe the change of a row of a table, the same on every engine.

A record's value is the payload, as JSON; its key is the row's primary key; the rest is in one header, `llog-event`
(`batch/event_headers.py`). Topic, partition, offset and time are the record's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from llog.batch.columns import (
    HEADERS_TYPE,
    binary_offsets,
    binary_rows,
    decode_headers,
    effective_timestamps,
    headers_to_arrow,
)
from llog.batch.event_headers import FIXED, HEADER, START, TABLE, VALUE, VERSION
from llog.batch.event_headers import Op as Op
from llog.batch.event_headers import PayloadMode as PayloadMode
from llog.log.engine import Batch


class Event(NamedTuple):
    op: Op
    payload_mode: PayloadMode
    message_id: int
    source_table: str


MESSAGE_SCHEMA: Final = pa.schema(
    [
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("message_id", pa.int64()),
        ("source_table", pa.string()),
        ("op", pa.string()),
        ("ts", pa.timestamp("ms", "UTC")),
        ("payload_mode", pa.string()),
        ("key", pa.binary()),
        ("payload", pa.binary()),
        ("headers", HEADERS_TYPE),
    ]
)
"""Records as messages. A record that is not a change event has no message id, table, op and payload mode."""


def encode_event_headers(op: Op, mode: PayloadMode, table: str, message_ids: Iterable[int]) -> list[bytes]:
    """Return the encoded headers of events that differ only in their message ids."""
    front, name = _around_id(op, mode, table)
    return [front + each.to_bytes(8, "little") + name for each in message_ids]


def event_header_column(op: Op, mode: PayloadMode, table: str, message_ids: Sequence[range]) -> pa.BinaryArray:
    """As `encode_event_headers`, as a column and without a loop over the events."""
    front, name = _around_id(op, mode, table)
    ids = np.concatenate([np.arange(each.start, each.stop, dtype="<i8") for each in message_ids])
    rows = np.empty((len(ids), len(front) + 8 + len(name)), np.uint8)
    rows[:] = np.frombuffer(front + bytes(8) + name, np.uint8)
    rows[:, len(front) : len(front) + 8] = ids.view(np.uint8).reshape(-1, 8)
    return binary_rows(rows)


def _around_id(op: Op, mode: PayloadMode, table: str) -> tuple[bytes, bytes]:
    name = table.encode()
    return START + (FIXED.size + len(name)).to_bytes(4, "little") + bytes((VERSION, op, mode, 0, 0, 0, 0, 0)), name


def decode_event(headers: bytes) -> Event | None:
    """Return the event that these encoded headers describe; None if they describe none.

    A malformed header of that name is skipped: any client can append one, and it must not stop the readers.
    """
    for name, value in decode_headers(headers):
        if name == HEADER and value is not None and len(value) >= FIXED.size and value[0] == VERSION:
            _, op, mode, _, _, message_id = FIXED.unpack_from(value)
            try:
                return Event(Op(op), PayloadMode(mode), message_id, value[FIXED.size :].decode())
            except ValueError:
                continue
    return None


def messages_of(batch: Batch) -> pa.Table:
    """Return the records of a batch as `MESSAGE_SCHEMA`. Events of a single table are converted without a loop."""
    columns, count = batch.columns, batch.columns.count
    nulls = pa.nulls(count, pa.string())
    ids, tables, ops, modes, headers = pa.nulls(count, pa.int64()), nulls, nulls, nulls, pa.nulls(count, HEADERS_TYPE)
    if columns.headers is not None:
        ids, tables, ops, modes, headers = _parse_uniform(columns.headers) or _parse_each(columns.headers)
    offsets = pa.array(np.arange(batch.start_offset, batch.start_offset + count, dtype=np.int64))
    return pa.table(
        [
            pa.repeat(pa.scalar(batch.tp.topic), count),
            pa.repeat(pa.scalar(batch.tp.partition, pa.int32()), count),
            offsets,
            ids,
            tables,
            ops,
            effective_timestamps(columns).view(MESSAGE_SCHEMA.field("ts").type),
            modes,
            pa.nulls(count, pa.binary()) if columns.keys is None else columns.keys,
            columns.values,
            headers,
        ],
        schema=MESSAGE_SCHEMA,
    )


_Parts = tuple[Any, Any, Any, Any, Any]
_OPS: Final = pa.array([None, *(op.name for op in Op)])
_MODES: Final = pa.array([None, *(mode.name.lower() for mode in PayloadMode)])


def _parse_uniform(headers: pa.BinaryArray) -> _Parts | None:
    """Parse all headers at once; return None unless every record has exactly an event's header, all of one table."""
    offsets = binary_offsets(headers)
    length = int(offsets[1] - offsets[0])
    if length < TABLE or (np.diff(offsets) != length).any():
        return None
    data: npt.NDArray[np.uint8] = np.frombuffer(headers.buffers()[2], np.uint8)[offsets[0] : offsets[-1]]
    rows = data.reshape(len(headers), length)
    first = rows[0].tobytes()
    expected = START + (length - VALUE).to_bytes(4, "little") + bytes((VERSION,))
    if not first.startswith(expected):
        return None
    ids, codes = slice(TABLE - 8, TABLE), slice(VALUE + 1, VALUE + 3)
    for part in (slice(codes.start), slice(codes.stop, ids.start), slice(ids.stop, length)):
        if (rows[:, part] != rows[0, part]).any():
            return None
    ops, modes = _code_names(rows[:, codes.start], _OPS), _code_names(rows[:, codes.start + 1], _MODES)
    if ops is None or modes is None:
        return None
    try:
        table = pa.repeat(pa.scalar(first[TABLE:].decode()), len(headers))
    except UnicodeDecodeError:
        return None
    numbers = np.ascontiguousarray(rows[:, ids]).view("<i8").reshape(-1)
    return pa.array(numbers), table, ops, modes, _headers_list(rows[:, VALUE:])


def _headers_list(values: npt.NDArray[np.uint8]) -> pa.ListArray:
    """Return the headers as lists, for records that have only an event's header each."""
    count = len(values)
    items = pa.StructArray.from_arrays(
        [pa.repeat(pa.scalar(HEADER), count), binary_rows(np.ascontiguousarray(values))],
        fields=list(HEADERS_TYPE.value_type),
    )
    return pa.ListArray.from_arrays(pa.array(np.arange(count + 1, dtype=np.int32)), items)


def _code_names(codes: npt.NDArray[np.uint8], names: Any) -> Any:
    """Return the names of these codes; None if one of them is unknown."""
    low, high = int(codes.min()), int(codes.max())
    if low < 1 or high >= len(names):
        return None
    if low == high:
        return pa.repeat(names[low], len(codes))
    return names.take(pa.array(np.ascontiguousarray(codes)))


def _parse_each(headers: pa.BinaryArray) -> _Parts:
    found = [decode_event(each) for each in headers.to_pylist()]
    return (
        pa.array([None if each is None else each.message_id for each in found], pa.int64()),
        pa.array([None if each is None else each.source_table for each in found], pa.string()),
        pa.array([None if each is None else each.op.name for each in found], pa.string()),
        pa.array([None if each is None else each.payload_mode.name.lower() for each in found], pa.string()),
        headers_to_arrow(headers, len(headers)),
    )
