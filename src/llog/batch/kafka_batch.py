"""`kafka-batch-v2`: Kafka's record batches, as Kafka's clients send and fetch them. All numbers are big-endian.

 0  8  base offset                    27  8  base timestamp, ms
 8  4  length of all that follows     35  8  highest timestamp, ms
12  4  partition leader epoch         43  8  producer id
16  1  magic 2                        51  2  producer epoch
17  4  crc32c of bytes 21..           53  4  base sequence
21  2  attributes                     57  4  record count
23  4  last offset delta              61  …  the records (`kafka_records.py`), compressed

The base offset and the leader epoch are outside the checksum: who stores a batch sets them without reading the rest.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

import numpy as np
from awscrt.checksums import crc32c

from llog.batch import kafka_few_records, kafka_records
from llog.batch.columns import (
    COLUMN_BYTES_MAX,
    Buffer,
    Columns,
    effective_timestamps,
)
from llog.batch.kafka_compression import KafkaCodec, compress, decompress
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

_CODEC_BITS: Final = 0x07
_APPEND_TIME: Final = 0x08
_TRANSACTIONAL: Final = 0x10
_CONTROL: Final = 0x20
_NONE: Final = -1
"""A leader epoch or a producer that is not known."""


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
    if head.records * (kafka_records.RECORD_BYTES_MIN + 1) > len(body):
        raise InvalidRecord(f"a Kafka batch has {len(body)} bytes of records, which are too few for {head.records}")
    base_timestamp = head.base_timestamp if head.timestamp_type is TimestampType.CREATE else None
    if head.records <= kafka_few_records.RECORDS_MAX:
        return kafka_few_records.decode(bytes(body), head.records, base_timestamp)
    return kafka_records.decode(body, head.records, base_timestamp)


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
    records = kafka_few_records if count <= kafka_few_records.RECORDS_MAX else kafka_records
    body = compress(records.encode(columns, deltas), codec)
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
