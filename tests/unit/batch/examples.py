"""Records, columns and an independent encoder of `bytes-batch-v1`, written from docs/format.md with `struct` alone."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import pyarrow as pa
from awscrt.checksums import crc32c
from hypothesis import strategies as st

from llog.batch.columns import (
    TIMESTAMP_MS_MAX,
    Buffer,
    Columns,
    columns_of,
    concat,
    encode_headers,
    records_of,
    slice_columns,
    stamp,
)
from llog.model import Header, Record

millis = st.integers(-TIMESTAMP_MS_MAX, TIMESTAMP_MS_MAX)
text = st.text('aZ0 \0"\\üя漢🎈', max_size=8)
"""Characters of one to four bytes; named ones, since all of Unicode takes seconds to list on a fresh checkout."""
headers: st.SearchStrategy[tuple[Header, ...]] = st.lists(
    st.tuples(text, st.none() | st.binary(max_size=5)), max_size=3
).map(tuple)


def records(*, keys: bool = True, timestamps: bool = True, with_headers: bool = True) -> st.SearchStrategy[Record]:
    return st.builds(
        Record,
        payload=st.none() | st.binary(max_size=20),
        key=st.none() | st.binary(max_size=9) if keys else st.none(),
        timestamp=st.none() | millis if timestamps else st.none(),
        headers=headers if with_headers else st.just(()),
    )


@st.composite
def record_lists(draw: st.DrawFn, *, min_size: int = 0) -> list[Record]:
    """Lists in which each optional column is absent about as often as not."""
    one = records(keys=draw(st.booleans()), timestamps=draw(st.booleans()), with_headers=draw(st.booleans()))
    return draw(st.lists(one, min_size=min_size, max_size=12))


@st.composite
def stamped_columns(draw: st.DrawFn) -> Columns:
    """Non-empty columns of one or more appends; some are slices, so that their arrays begin within their buffers."""
    parts = [stamp(columns_of(draw(record_lists(min_size=1))), draw(millis)) for _ in range(draw(st.integers(1, 3)))]
    columns = concat(parts)
    start = draw(st.integers(0, columns.count - 1))
    return slice_columns(columns, start, draw(st.integers(start + 1, columns.count)))


def appended(records: Sequence[Record], append_ms: Sequence[int], first_offset: int) -> list[Record]:
    """What is read back of records that were appended at these times."""
    return [
        Record(
            payload=record.payload,
            key=record.key,
            timestamp=ms if record.timestamp is None else record.timestamp,
            headers=record.headers,
            offset=offset,
        )
        for offset, (record, ms) in enumerate(zip(records, append_ms, strict=True), first_offset)
    ]


def joined(parts: Sequence[Buffer]) -> bytes:
    return b"".join(parts)


def with_checksum(batch: bytes) -> bytes:
    """The batch with a checksum that fits: damage that a checksum does not catch."""
    return batch[:4] + struct.pack("<I", crc32c(batch[8:])) + batch[8:]


def hidden_bytes_under_nulls() -> pa.BinaryArray:
    """An array [b"ab", null, b"f"] whose null slot has bytes, as filters and casts of other libraries leave them."""
    offsets = pa.py_buffer(struct.pack("<4i", 0, 2, 5, 6))
    return pa.Array.from_buffers(pa.binary(), 3, [pa.py_buffer(b"\x05"), offsets, pa.py_buffer(b"abcdef")])


def reference_encode(columns: Columns) -> bytes:
    records = records_of(columns, 1)
    count = len(records)
    flags = 0
    body = _reference_binary([record.payload for record in records])
    if any(record.key is not None for record in records):
        flags |= 1
        body += _reference_bitmap([record.key is not None for record in records])
        body += _reference_binary([record.key for record in records])
    if columns.timestamps is not None:
        flags |= 2
        body += b"".join(struct.pack("<q", record.timestamp) for record in records)
    if any(record.headers for record in records):
        flags |= 4
        body += _reference_binary([encode_headers(record.headers) for record in records])
    runs = columns.append_runs
    if len(runs) > 1:
        flags |= 8
        body += struct.pack("<Ixxxx", len(runs))
        body += b"".join(struct.pack("<q", run[0]) for run in runs) + b"".join(
            struct.pack("<q", run[1]) for run in runs
        )
    if any(record.payload is None for record in records):
        flags |= 16
        body += _reference_bitmap([record.payload is not None for record in records])
    timestamp_max = max(record.timestamp or 0 for record in records if record.timestamp is not None)
    tail = struct.pack("<IBBHqq", count, 0, flags, 0, runs[0][1], timestamp_max) + body
    return b"LLB1" + struct.pack("<I", crc32c(tail)) + tail


def _reference_binary(values: Sequence[bytes | None]) -> bytes:
    ends = [0]
    for value in values:
        ends.append(ends[-1] + len(value or b""))
    return _padded(b"".join(struct.pack("<i", end) for end in ends)) + _padded(
        b"".join(value or b"" for value in values)
    )


def _reference_bitmap(present: Sequence[bool]) -> bytes:
    bits = sum(1 << i for i, bit in enumerate(present) if bit)
    return _padded(bits.to_bytes((len(present) + 7) // 8, "little"))


def _padded(section: bytes) -> bytes:
    while len(section) % 8:
        section += b"\0"
    return section
