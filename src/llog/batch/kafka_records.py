"""The records of a Kafka batch, uncompressed, to columns and back, by operations on whole arrays.

A record is: length · attributes (i8, unused) · timestamp delta · offset delta · key length · key · value length · value
· header count · headers. All its numbers are varints (`varints.py`); the length of null is -1.

Python loops only over the lengths of records, since each says where the next one is, and over headers.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from llog.batch import kafka_headers, varints
from llog.batch.columns import COLUMN_BYTES_MAX, TIMESTAMP_MS_MAX, Buffer, Columns, binary_lengths
from llog.batch.varints import Field, Numbers, Positions, VarintReader, Varints
from llog.errors import InvalidRecord, RecordTooLarge

RECORD_BYTES_MIN: Final = 6
"""Of a record whose parts have one byte each, or none, after its length."""
NO_TIMESTAMP: Final = -1
_COPIED_RECORD_BYTES_MAX: Final = 1024
"""Smaller records are copied before their lengths are read: bytes have a faster index than a memoryview."""


def decode(body: memoryview, count: int, base_timestamp: int | None) -> Columns:
    """Decode all records of a batch, with timestamps unless they are None; raises `InvalidRecord` unless they are whole
    and fill the body.
    """
    edges = _edges(body, count)
    limits = edges[1:]
    reader = VarintReader(body)
    lengths, positions = reader.read(edges[:-1])
    fits = (lengths >= RECORD_BYTES_MIN) & (positions + lengths == limits)
    if np.count_nonzero(fits) < count or limits[-1] != len(body):
        raise InvalidRecord(f"a Kafka batch has records whose lengths do not add up to its {len(body)} bytes")

    time_deltas, positions = _read(reader, positions + 1, limits)  # after the attributes, which Kafka does not use
    offset_deltas, positions = _read(reader, positions, limits)
    if np.count_nonzero(offset_deltas != np.arange(count)):
        raise InvalidRecord(f"a Kafka batch of {count} records has offset deltas that do not count them from 0")
    keys = _read_spans(reader, positions, limits, "key")
    values = _read_spans(reader, keys.ends, limits, "value")
    header_counts, positions = _read(reader, values.ends, limits)
    key_array = None
    if keys.absent.all():
        (value_array,) = _pick(body, values)
    else:
        key_array, value_array = _pick(body, keys, values)
    return Columns(
        values=value_array,
        keys=key_array,
        timestamps=None if base_timestamp is None else _timestamps(base_timestamp, time_deltas),
        headers=_headers(body, header_counts, positions, limits),
        append_runs=(),
    )


def encode(columns: Columns, time_deltas: Numbers) -> memoryview:
    """Encode records with these timestamps; raises `RecordTooLarge` if they do not fit into a batch."""
    count = columns.count
    headers: pa.BinaryArray | pa.BinaryScalar = pa.scalar(b"\0")
    header_bytes: Numbers | int = 1
    if columns.headers is not None:
        headers = kafka_headers.all_to_kafka(columns.headers)
        header_bytes = binary_lengths(headers)
    key_lengths = np.full(count, -1, np.int64) if columns.keys is None else _lengths(columns.keys)
    value_lengths = _lengths(columns.values)
    front: list[Numbers] = [np.zeros(count, np.int64), time_deltas, np.arange(count), key_lengths]
    fields = [Field(numbers) for numbers in front]
    value_field = Field(value_lengths)
    sizes: Numbers = value_field.widths + header_bytes
    sizes += np.maximum(key_lengths, 0)
    sizes += np.maximum(value_lengths, 0)
    for field in fields:
        sizes += field.widths
    fields.insert(0, Field(sizes))
    size = int(sizes.sum() + fields[0].widths.sum())
    if size > COLUMN_BYTES_MAX:
        raise RecordTooLarge(f"a Kafka batch would have {size} bytes: encode fewer records at a time")
    parts: list[pa.BinaryArray | pa.BinaryScalar]
    if columns.keys is None:
        parts = [varints.rows([*fields, value_field]), columns.values, headers]
    else:
        parts = [varints.rows(fields), columns.keys, varints.rows([value_field]), columns.values, headers]
    joined = pc.binary_join_element_wise(*parts, pa.scalar(b""), null_handling="replace", null_replacement="")
    return memoryview(joined.buffers()[2]).cast("B")[:size]


def check_timestamps(lowest: int, highest: int) -> None:
    """Raise `InvalidRecord` if a timestamp is farther from 1970 than `TIMESTAMP_MS_MAX`."""
    for ms in (lowest, highest):
        if abs(ms) > TIMESTAMP_MS_MAX:
            raise InvalidRecord(
                f"a Kafka batch has timestamp {ms}: it is in milliseconds since 1970, "
                f"and at most {TIMESTAMP_MS_MAX} either way"
            )


class _Spans(NamedTuple):
    """Where each record has its key or value."""

    starts: Positions
    ends: Positions
    absent: npt.NDArray[np.bool_]


def _edges(body: memoryview, count: int) -> Positions:
    """Return where the records begin and where the last one ends, by lengths that the caller has to verify."""
    data: Buffer = bytes(body) if len(body) < count * _COPIED_RECORD_BYTES_MAX else body
    edges = [0]
    append = edges.append
    position = 0
    try:
        for _ in range(count):
            low = data[position]
            if low < 0x80:
                position += (low >> 1) + 1
            elif (high := data[position + 1]) < 0x80:
                position += (high << 6 | low >> 1 & 0x3F) + 2
            else:
                length, position = varints.read_one(data, position)
                position += abs(length)
            append(position)
    except IndexError as error:
        raise InvalidRecord(f"a Kafka batch ends before the last of its {count} records") from error
    return np.array(edges, np.int64)


def _read(reader: VarintReader, positions: Positions, limits: Positions) -> Varints:
    found = reader.read(positions)
    if np.count_nonzero(found.ends > limits):
        raise InvalidRecord("a Kafka batch has a record that is shorter than its parts")
    return found


def _read_spans(reader: VarintReader, positions: Positions, limits: Positions, what: str) -> _Spans:
    lengths, starts = _read(reader, positions, limits)
    absent = lengths < 0
    ends = starts + np.maximum(lengths, 0)
    if np.count_nonzero(lengths < -1) or np.count_nonzero(ends > limits):
        raise InvalidRecord(f"a Kafka batch has a record with a {what} whose length is negative or exceeds the record")
    return _Spans(starts, ends, absent)


def _pick(body: memoryview, *columns: _Spans) -> list[pa.BinaryArray]:
    """Return the bytes in the spans of each column, whose spans take turns from record to record.

    Arrow copies them: it takes every second item of an array that covers the body.
    """
    count = len(columns[0].starts)
    step = 2 * len(columns)
    offsets = np.zeros(step * count + 1, np.int32)
    for i, spans in enumerate(columns):
        offsets[2 * i + 1 :: step] = spans.starts
        offsets[2 * i + 2 :: step] = spans.ends
    pieces = pa.Array.from_buffers(pa.binary(), step * count, [None, pa.py_buffer(offsets), pa.py_buffer(body)])
    return [
        pieces.take(
            pa.array(np.arange(2 * i + 1, step * count, step), mask=spans.absent if spans.absent.any() else None)
        )
        for i, spans in enumerate(columns)
    ]


def _timestamps(base: int, deltas: Numbers) -> pa.Int64Array | None:
    check_timestamps(base, base)  # and no delta has more than 56 bits: the sum cannot overflow
    times = deltas + base
    check_timestamps(int(times.min()), int(times.max()))
    absent = times == NO_TIMESTAMP
    if not absent.any():
        return pa.array(times)
    return None if absent.all() else pa.array(times, mask=absent)


def _headers(body: memoryview, counts: Numbers, starts: Positions, ends: Positions) -> pa.BinaryArray | None:
    if np.count_nonzero(counts < 0) or np.count_nonzero((starts != ends) & (counts == 0)):
        raise InvalidRecord("a Kafka batch has a record with fewer than no headers, or with bytes after its last part")
    if not np.count_nonzero(counts):
        return None
    (sections,) = _pick(body, _Spans(starts, ends, np.zeros(len(counts), np.bool_)))
    return kafka_headers.all_from_kafka(sections, counts)


def _lengths(array: pa.BinaryArray) -> Numbers:
    lengths = binary_lengths(array)
    if array.null_count:
        lengths[array.is_null().to_numpy(zero_copy_only=False)] = -1
    return lengths
