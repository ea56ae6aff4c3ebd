from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import aiokafka.record.default_records as aiokafka_records
import kafka.record.default_records as kafka_python_records
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llog.batch.columns import Buffer, Columns, columns_of, records_of, stamp
from llog.batch.kafka_batch import decode, encode, heads, with_base_offset
from llog.batch.kafka_compression import KafkaCodec
from llog.errors import CorruptBatch, OldMessageFormat
from llog.model import Record
from tests.unit.batch.examples import joined, stamped_columns

BYTES_MAX = 64 << 20
NOW = 1_800_000_000_000
EVERY_KIND = [
    Record(payload=b"value", key=b"key", timestamp=NOW),
    Record(payload=None, key=b"gone", timestamp=NOW - 100_000),
    Record(payload=b"", key=b"", timestamp=NOW + 9_000_000),
    Record(payload=b"v" * 70, key=None, timestamp=NOW - 1, headers=(("trace", b"1"), ("ü", None), ("", b""))),
    Record(payload=b"v" * 20_000, key=b"k" * 9_000, timestamp=3, headers=(("h", b"x" * 500),)),
]


def build(records: Sequence[Record], builder: Any, codec: KafkaCodec = KafkaCodec.NONE) -> bytes:
    """The batch that the builder of a Kafka client makes of these records."""
    batch = builder(2, codec, False, -1, -1, -1, BYTES_MAX)
    for i, record in enumerate(records):
        assert batch.append(i, record.timestamp, record.key, record.payload, list(record.headers)) is not None
    return bytes(batch.build())


def only(data: Buffer) -> Columns:
    (head,) = heads(data)
    return decode(data, head, bytes_max=BYTES_MAX)


def read(data: Buffer, append_ms: int = 1) -> list[Record]:
    return records_of(stamp(only(data), append_ms), 0)


@pytest.mark.parametrize("builder", [aiokafka_records, kafka_python_records])
@pytest.mark.parametrize("codec", [KafkaCodec.NONE, KafkaCodec.GZIP])
def test_batches_of_kafka_clients_decode_to_their_records(builder: Any, codec: KafkaCodec) -> None:
    data = build(EVERY_KIND, builder.DefaultRecordBatchBuilder, codec)
    assert read(data) == records_of(stamp(columns_of(EVERY_KIND), 1), 0)


def test_the_encoder_writes_the_bytes_that_a_kafka_client_writes() -> None:
    data = joined(encode(stamp(columns_of(EVERY_KIND), 1), 0))
    assert data[16:] == build(EVERY_KIND, aiokafka_records.DefaultRecordBatchBuilder)[16:]


@given(stamped_columns(), st.sampled_from(KafkaCodec))
def test_columns_round_trip(columns: Columns, codec: KafkaCodec) -> None:
    assert read(joined(encode(columns, 5, codec=codec)), -1) == records_of(columns, 0)


def test_each_kind_of_refusal_has_its_own_error() -> None:
    data = bytearray(joined(encode(stamp(columns_of(EVERY_KIND), 1), 0)))
    data[16] = 1
    with pytest.raises(OldMessageFormat, match="message format 1"):
        heads(data)
    data[16] = 2
    data[-1] ^= 1
    with pytest.raises(CorruptBatch, match="checksum"):
        heads(data)


def test_a_batch_gets_another_base_offset_without_a_copy_of_its_records() -> None:
    data = joined(encode(stamp(columns_of(EVERY_KIND), 1), 0)) * 2
    first, second = heads(data)
    moved = with_base_offset(data, second, 77)
    assert isinstance(moved[1], memoryview)
    assert moved[1].obj is data
    (head,) = heads(joined(moved))
    assert head == first._replace(base_offset=77)
