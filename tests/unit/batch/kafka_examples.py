"""Kafka batches that Kafka's clients build and read, and damage that a checksum does not catch."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import aiokafka.record.default_records as aiokafka_records
import kafka.record.default_records as kafka_python_records
from awscrt.checksums import crc32c

from llog.batch import kafka_batch
from llog.batch.columns import Buffer, Columns, records_of, stamp
from llog.batch.kafka_compression import KafkaCodec
from llog.model import Record

BYTES_MAX = 64 << 20
NOW = 1_800_000_000_000
EVERY_KIND = [
    Record(payload=b"value", key=b"key", timestamp=NOW),
    Record(payload=None, key=b"gone", timestamp=NOW - 100_000),
    Record(payload=b"", key=b"", timestamp=NOW + 9_000_000),
    Record(payload=b"v" * 70, key=None, timestamp=NOW - 1, headers=(("trace", b"1"), ("ü", None), ("", b""))),
    Record(payload=b"v" * 20_000, key=b"k" * 9_000, timestamp=3, headers=(("h", b"x" * 500),)),
]
CLIENTS = {"aiokafka": aiokafka_records, "kafka-python": kafka_python_records}
CLIENT_CODECS = [
    *[("aiokafka", codec) for codec in KafkaCodec],
    *[("kafka-python", codec) for codec in (KafkaCodec.NONE, KafkaCodec.GZIP, KafkaCodec.ZSTD)],
]
"""The codecs that each client has with the packages of the development environment."""


def build(records: Sequence[Record], client: str = "aiokafka", codec: KafkaCodec = KafkaCodec.NONE) -> bytes:
    """Return the batch that a Kafka client makes of these records."""
    batch: Any = CLIENTS[client].DefaultRecordBatchBuilder(2, codec, False, -1, -1, -1, BYTES_MAX)
    for i, record in enumerate(records):
        assert batch.append(i, record.timestamp, record.key, record.payload, list(record.headers)) is not None
    return bytes(batch.build())


def read_by_client(data: bytes, client: str) -> list[Record]:
    """Return the records that a Kafka client finds in a batch, of which it checks the checksum."""
    batch: Any = CLIENTS[client].DefaultRecordBatch(bytearray(data))
    assert batch.validate_crc()
    return [
        Record(
            payload=None if record.value is None else bytes(record.value),
            key=None if record.key is None else bytes(record.key),
            timestamp=record.timestamp,
            headers=tuple((key, None if value is None else bytes(value)) for key, value in record.headers),
            offset=record.offset,
        )
        for record in batch
    ]


def decode(data: Buffer) -> Columns:
    (head,) = kafka_batch.heads(data)
    return kafka_batch.decode(data, head, bytes_max=BYTES_MAX)


def read(data: Buffer, first_offset: int = 0, append_ms: int = 1) -> list[Record]:
    return records_of(stamp(decode(data), append_ms), first_offset)


def with_checksum(batch: bytes) -> bytes:
    return batch[:17] + struct.pack(">I", crc32c(batch[21:])) + batch[21:]
