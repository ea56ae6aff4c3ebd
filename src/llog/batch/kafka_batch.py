"""`kafka-batch-v2`: Kafka's record batches, as Kafka's clients send and fetch them. All numbers are big-endian.

 0  8  base offset                    27  8  base timestamp, ms
 8  4  length of all that follows     35  8  highest timestamp, ms
12  4  partition leader epoch         43  8  producer id
16  1  magic 2                        51  2  producer epoch
17  4  crc32c of bytes 21..           53  4  base sequence
21  2  attributes                     57  4  record count
23  4  last offset delta              61  …  the records, compressed together

A record is: length · attributes (i8, unused) · timestamp delta · offset delta · key length · key · value length · value
· header count · headers. All its numbers are varints (`varints.py`); the length of null is -1.

The base offset and the leader epoch are outside the checksum: who stores a batch sets them without reading the rest.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from awscrt.checksums import crc32c

from llog.batch import kafka_headers, varints
from llog.batch.columns import (
    COLUMN_BYTES_MAX,
    TIMESTAMP_MS_MAX,
    Buffer,
    Columns,
    binary_array,
    binary_lengths,
    effective_timestamps,
)
from llog.batch.kafka_compression import KafkaCodec, compress, decompress
from llog.batch.varints import Numbers, Positions, VarintReader, Varints
from llog.errors import (
    CorruptBatch,
    InvalidArgument,
    InvalidRecord,
    OldMessageFormat,
    RecordTooLarge,
    UnsupportedCompression,
)
from llog.model import TimestampType

ENCODING: Final = "kafka-batch-v2"
MAGIC: Final = 2
HEAD_BYTES: Final = 61

_HEAD: Final = struct.Struct(">qiibIhiqqqhii")
_START: Final = struct.Struct(">qii")
"""The part of the head before the magic number, which the checksum does not cover."""
_MAGIC_AND_SUM: Final = struct.Struct(">bI")
_SUMMED: Final = struct.Struct(">hiqqqhii")
_SUMMED_FROM: Final = 21
_LENGTH_FROM: Final = 12
"""The length of a batch counts the bytes from here on."""
_RECORD_BYTES_MIN: Final = 6
"""Of a record whose parts have one byte each, or none, after its length."""
_COPIED_RECORD_BYTES_MAX: Final = 1024
"""Smaller records are copied before their lengths are read: bytes have a faster index than a memoryview."""

_CODEC_BITS: Final = 0x07
_APPEND_TIME: Final = 0x08
_TRANSACTIONAL: Final = 0x10
_CONTROL: Final = 0x20
_NONE: Final = -1
"""A leader epoch, a producer or a timestamp that is not known."""


class BatchHead(NamedTuple):
    """The head of one batch, and where the batch is."""

    position: int
    length: int
    """The bytes of the whole batch."""
    base_offset: int
    records: int
    codec: KafkaCodec
    timestamp_type: TimestampType
    is_transactional: bool
    is_control: bool
    base_timestamp: int
    max_timestamp: int
    producer_id: int
    producer_epoch: int
    base_sequence: int


def heads(data: Buffer) -> list[BatchHead]:
    """Return the heads of batches that follow one another up to the end of `data`, with their checksums verified.

    Raises `OldMessageFormat`, `UnsupportedCompression`, or `CorruptBatch` for all other damage; `decode` checks the
    records.
    """
    view = memoryview(data).cast("B")
    found: list[BatchHead] = []
    position = 0
    while position < len(view):
        head = _head(view, position)
        found.append(head)
        position += head.length
    return found


def _head(view: memoryview, position: int) -> BatchHead:
    rest = len(view) - position
    if rest < HEAD_BYTES:
        raise CorruptBatch(f"a Kafka batch has at least {HEAD_BYTES} bytes, but only {rest} follow byte {position}")
    (
        base_offset,
        length,
        _,
        magic,
        stored,
        attributes,
        last_delta,
        base_timestamp,
        max_timestamp,
        producer_id,
        producer_epoch,
        base_sequence,
        records,
    ) = _HEAD.unpack_from(view, position)
    if magic in (0, 1):
        raise OldMessageFormat(
            f"a Kafka batch has message format {magic}, which Kafka 0.11 replaced by {MAGIC}: use a newer client"
        )
    if magic != MAGIC:
        raise CorruptBatch(f"a Kafka batch has message format {magic}, not {MAGIC}")
    length += _LENGTH_FROM
    if not HEAD_BYTES <= length <= rest:
        raise CorruptBatch(f"a Kafka batch says that it has {length} bytes, but {rest} follow byte {position}")
    computed = crc32c(view[position + _SUMMED_FROM : position + length])
    if computed != stored:
        raise CorruptBatch(
            f"a Kafka batch of {length} bytes has checksum {computed:08x}, but its head says {stored:08x}"
        )
    if attributes & _CODEC_BITS > max(KafkaCodec):
        raise UnsupportedCompression(
            f"a Kafka batch has compression {attributes & _CODEC_BITS}: use "
            f"{', '.join(codec.name.lower() for codec in KafkaCodec)}"
        )
    codec = KafkaCodec(attributes & _CODEC_BITS)
    if records < 1 or last_delta != records - 1:
        raise InvalidRecord(f"a Kafka batch of {records} records has {last_delta} as its last offset delta")
    return BatchHead(
        position=position,
        length=length,
        base_offset=base_offset,
        records=records,
        codec=codec,
        timestamp_type=TimestampType.APPEND if attributes & _APPEND_TIME else TimestampType.CREATE,
        is_transactional=bool(attributes & _TRANSACTIONAL),
        is_control=bool(attributes & _CONTROL),
        base_timestamp=base_timestamp,
        max_timestamp=max_timestamp,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
    )


def with_base_offset(data: Buffer, head: BatchHead, base_offset: int) -> list[Buffer]:
    """Return a batch with another base offset and without a leader epoch. The rest shares the memory of `data`."""
    batch = memoryview(data).cast("B")[head.position : head.position + head.length]
    return [_START.pack(base_offset, head.length - _LENGTH_FROM, _NONE), batch[_START.size :]]


def decode(data: Buffer, head: BatchHead, *, bytes_max: int) -> Columns:
    """Return the records of the batch of `data` that `head` describes, without append times.

    A timestamp is null where the record has none (-1). Raises `RecordTooLarge` if the records have more than
    `bytes_max` bytes uncompressed, and `InvalidRecord` unless they are whole and fill the batch.
    """
    batch = memoryview(data).cast("B")[head.position : head.position + head.length]
    body = decompress(batch[HEAD_BYTES:], head.codec, min(bytes_max, COLUMN_BYTES_MAX))
    edges = _edges(body, head.records)
    limits = edges[1:]
    reader = VarintReader(body)
    lengths, positions = reader.read(edges[:-1])
    if (lengths < _RECORD_BYTES_MIN).any() or (positions + lengths != limits).any() or limits[-1] != len(body):
        raise InvalidRecord(f"a Kafka batch has records whose lengths do not add up to its {len(body)} bytes")

    time_deltas, positions = _read(reader, positions + 1, limits)  # after the attributes, which Kafka does not use
    offset_deltas, positions = _read(reader, positions, limits)
    if (offset_deltas != np.arange(head.records)).any():
        raise InvalidRecord(f"a Kafka batch of {head.records} records has offset deltas that do not count them from 0")
    keys = _read_spans(reader, positions, limits, "key")
    values = _read_spans(reader, keys.ends, limits, "value")
    header_counts, positions = _read(reader, values.ends, limits)
    if keys.absent.all():
        (value_array,) = _pick(body, values)
        key_array = None
    else:
        key_array, value_array = _pick(body, keys, values)
    return Columns(
        values=value_array,
        keys=key_array,
        timestamps=None if head.timestamp_type is TimestampType.APPEND else _timestamps(head, time_deltas),
        headers=_headers(body, header_counts, positions, limits),
        append_runs=(),
    )


class _Spans(NamedTuple):
    """Where each record has its key or value."""

    starts: Positions
    ends: Positions
    absent: npt.NDArray[np.bool_]


def _edges(body: memoryview, count: int) -> Positions:
    """Return where the records begin and where the last one ends, by lengths that the caller has to verify."""
    if count * (_RECORD_BYTES_MIN + 1) > len(body):
        raise InvalidRecord(f"a Kafka batch has {len(body)} bytes of records, which are too few for {count}")
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
    if (found.ends > limits).any():
        raise InvalidRecord("a Kafka batch has a record that is shorter than its parts")
    return found


def _read_spans(reader: VarintReader, positions: Positions, limits: Positions, what: str) -> _Spans:
    lengths, starts = _read(reader, positions, limits)
    absent = lengths < 0
    ends = starts + np.maximum(lengths, 0)
    if (lengths < -1).any() or (ends > limits).any():
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


def _timestamps(head: BatchHead, deltas: Numbers) -> pa.Int64Array | None:
    # Neither can be so large that their sum would overflow: `VarintReader` reads no more than 56 bits.
    times = max(-TIMESTAMP_MS_MAX - 1, min(head.base_timestamp, TIMESTAMP_MS_MAX + 1)) + deltas
    if abs(head.base_timestamp) > TIMESTAMP_MS_MAX or (np.abs(times) > TIMESTAMP_MS_MAX).any():
        raise InvalidRecord(
            f"a Kafka batch has a timestamp that is not in milliseconds since 1970, or more than {TIMESTAMP_MS_MAX}"
        )
    absent = times == _NONE
    if absent.all():
        return None
    return pa.array(times, mask=absent if absent.any() else None)


def _headers(body: memoryview, counts: Numbers, starts: Positions, ends: Positions) -> pa.BinaryArray | None:
    having = counts != 0
    if (starts != ends)[~having].any() or (counts < 0).any():
        raise InvalidRecord("a Kafka batch has a record with fewer than no headers, or with bytes after its last part")
    if not having.any():
        return None
    encoded = [b""] * len(counts)
    for i in np.flatnonzero(having).tolist():
        encoded[i] = kafka_headers.from_kafka(bytes(body[starts[i] : ends[i]]), int(counts[i]))
    return binary_array(encoded)


def encode(
    columns: Columns, base_offset: int, *, codec: KafkaCodec = KafkaCodec.NONE, append_time: bool = False
) -> list[Buffer]:
    """Encode stamped, non-empty columns as one batch that no producer is known of.

    With `append_time`, its timestamps are the append time, which must be the same for all records. Raises
    `RecordTooLarge` if the records do not fit into a batch.
    """
    count = columns.count
    if not count:
        raise InvalidArgument("a batch has at least one record: there is nothing to encode")
    if append_time:
        if len(columns.append_runs) != 1:
            raise InvalidArgument(f"records of {len(columns.append_runs)} appends do not have one append time")
        base_timestamp = max_timestamp = columns.append_runs[0][1]
        deltas = np.zeros(count, np.int64)
    else:
        times = effective_timestamps(columns)
        if times.null_count:
            raise InvalidArgument(f"{times.null_count} records have no timestamp: stamp them first")
        deltas = times.to_numpy()
        base_timestamp, max_timestamp = int(deltas[0]), int(deltas.max())
        deltas = deltas - base_timestamp
    body = compress(_body(columns, deltas), codec)
    length = HEAD_BYTES + len(body)
    if length - _LENGTH_FROM > COLUMN_BYTES_MAX:
        raise RecordTooLarge(f"a Kafka batch would have {length} bytes: encode fewer records at a time")
    summed = _SUMMED.pack(
        codec | (_APPEND_TIME if append_time else 0),
        count - 1,
        base_timestamp,
        max_timestamp,
        _NONE,
        _NONE,
        _NONE,
        count,
    )
    checksum = crc32c(body, crc32c(summed))
    start = _START.pack(base_offset, length - _LENGTH_FROM, _NONE) + _MAGIC_AND_SUM.pack(MAGIC, checksum)
    return [start + summed, body]


def _body(columns: Columns, time_deltas: Numbers) -> memoryview:
    count = columns.count
    headers: pa.BinaryArray | pa.BinaryScalar = pa.scalar(b"\0")
    header_bytes: Numbers | int = 1
    if columns.headers is not None:
        headers = binary_array([kafka_headers.to_kafka(encoded) for encoded in columns.headers.to_pylist()])
        header_bytes = binary_lengths(headers)
    key_lengths = np.full(count, -1, np.int64) if columns.keys is None else _lengths(columns.keys)
    value_lengths = _lengths(columns.values)
    front: list[Numbers] = [np.zeros(count, np.int64), time_deltas, np.arange(count), key_lengths]
    fields = [varints.Field(numbers) for numbers in front]
    value_field = varints.Field(value_lengths)
    sizes: Numbers = value_field.widths + header_bytes
    sizes += np.maximum(key_lengths, 0)
    sizes += np.maximum(value_lengths, 0)
    for field in fields:
        sizes += field.widths
    fields.insert(0, varints.Field(sizes))
    size = int(sizes.sum() + fields[0].widths.sum())
    if size > COLUMN_BYTES_MAX:
        raise RecordTooLarge(f"a Kafka batch would have {size} bytes: encode fewer records at a time")
    parts: list[pa.BinaryArray | pa.BinaryScalar]
    if columns.keys is None:
        parts = [varints.rows([*fields, value_field]), columns.values, headers]
    else:
        parts = [varints.rows(fields), columns.keys, varints.rows([value_field]), columns.values, headers]
    joined = pc.binary_join_element_wise(*parts, pa.scalar(b""), null_handling="replace", null_replacement="")
    return memoryview(joined.buffers()[2])[:size]


def _lengths(array: pa.BinaryArray) -> Numbers:
    lengths = binary_lengths(array)
    if array.null_count:
        lengths[array.is_null().to_numpy(zero_copy_only=False)] = -1
    return lengths
