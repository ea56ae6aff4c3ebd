from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llog.batch import kafka_batch
from llog.batch.columns import TIMESTAMP_MS_MAX, Columns, columns_of, concat, records_of, stamp
from llog.batch.kafka_batch import encode, heads, with_base_offset
from llog.batch.kafka_compression import KafkaCodec
from llog.errors import (
    CorruptBatch,
    InvalidArgument,
    InvalidRecord,
    LlogError,
    OldMessageFormat,
    RecordTooLarge,
    UnsupportedCompression,
)
from llog.model import Record, TimestampType
from tests.unit.batch.examples import joined, stamped_columns
from tests.unit.batch.kafka_examples import (
    BYTES_MAX,
    CLIENT_CODECS,
    EVERY_KIND,
    NOW,
    build,
    decode,
    read,
    read_by_client,
    with_checksum,
)

VECTORS = json.loads((Path(__file__).parent / "vectors.json").read_text())["kafka_batches"]
STAMPED = stamp(columns_of(EVERY_KIND), 1)
BATCH = joined(encode(STAMPED, 0))
COUNTS = [1, 2, 63, 64, 65, 66, 129, 1000, 10_000]
"""Both sides of where records are no longer read by a loop, and where offset deltas get wider."""


def many(count: int) -> list[Record]:
    """Records of all kinds, of which the times go back and forth."""
    return [
        Record(
            payload=None if i % 11 == 0 else b"v" * (i % 200),
            key=None if i % 5 == 0 else b"%d" % i,
            timestamp=NOW + (-1) ** i * i * 37,
            headers=(("h", b"%d" % i),) if i % 7 == 0 else (),
        )
        for i in range(count)
    ]


def offset_by(records: list[Record], offset: int) -> list[Record]:
    return records_of(stamp(columns_of(records), 1), offset)


@pytest.mark.parametrize(("client", "codec"), CLIENT_CODECS)
def test_a_batch_of_a_kafka_client_decodes_to_its_records(client: str, codec: KafkaCodec) -> None:
    assert read(build(EVERY_KIND, client, codec)) == offset_by(EVERY_KIND, 0)


@pytest.mark.parametrize(("client", "codec"), CLIENT_CODECS)
def test_a_kafka_client_reads_the_batches_that_llog_encodes(client: str, codec: KafkaCodec) -> None:
    data = joined(encode(STAMPED, 41, codec=codec))
    assert read_by_client(data, client) == offset_by(EVERY_KIND, 41)


@pytest.mark.parametrize("count", COUNTS)
def test_batches_of_any_size_agree_with_a_kafka_client(count: int) -> None:
    records = many(count)
    data = build(records)
    assert read(data) == offset_by(records, 0)
    encoded = joined(encode(stamp(columns_of(records), 1), 0))
    assert encoded[16:] == data[16:]  # all but the base offset, the length and the leader epoch
    assert read_by_client(encoded, "kafka-python") == offset_by(records, 0)


@pytest.mark.parametrize("count", [3, 300])
def test_records_without_keys_and_headers_agree_with_a_kafka_client(count: int) -> None:
    records = [Record(payload=b"v" * i, timestamp=NOW) for i in range(count)]
    data = build(records)
    assert read(data) == offset_by(records, 0)
    columns = decode(data)
    assert columns.keys is None
    assert columns.headers is None
    assert columns.append_runs == ()
    assert joined(encode(stamp(columns_of(records), 1), 0))[16:] == data[16:]


@given(stamped_columns(), st.sampled_from(KafkaCodec), st.integers(0, 1 << 62))
def test_columns_round_trip(columns: Columns, codec: KafkaCodec, base_offset: int) -> None:
    data = joined(encode(columns, base_offset, codec=codec))
    (head,) = heads(data)
    assert (head.base_offset, head.records, head.codec) == (base_offset, columns.count, codec)
    # A timestamp of -1 means in Kafka that there is none; it comes back as the append time.
    assert read(data, 1, append_ms=-1) == records_of(columns, 1)


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
def test_checked_in_batches_decode_to_their_records(vector: dict[str, Any]) -> None:
    found = read(bytes.fromhex(vector["batch"]))
    assert [
        {
            "payload": None if record.payload is None else record.payload.hex(),
            "key": None if record.key is None else record.key.hex(),
            "timestamp": record.timestamp,
            "headers": [[key, None if value is None else value.hex()] for key, value in record.headers],
        }
        for record in found
    ] == vector["records"]


def test_the_head_has_the_fields_that_the_client_wrote() -> None:
    attributes = KafkaCodec.NONE | 0x10 | 0x20
    head = struct.pack(">qiibIhiqqqhii", 7, len(BATCH) - 12, 9, 2, 0, attributes, 4, NOW, NOW + 1, 12, 3, 55, 5)
    (found,) = heads(with_checksum(head + BATCH[61:]))
    assert found == kafka_batch.BatchHead(
        position=0,
        length=len(BATCH),
        base_offset=7,
        records=5,
        codec=KafkaCodec.NONE,
        timestamp_type=TimestampType.CREATE,
        is_transactional=True,
        is_control=True,
        base_timestamp=NOW,
        max_timestamp=NOW + 1,
        producer_id=12,
        producer_epoch=3,
        base_sequence=55,
    )


def test_batches_that_follow_one_another_are_all_found() -> None:
    other = joined(encode(stamp(columns_of(EVERY_KIND[:2]), 1), 5, codec=KafkaCodec.GZIP))
    data = memoryview(BATCH + other + BATCH)
    found = heads(data)
    assert [head.position for head in found] == [0, len(BATCH), len(BATCH) + len(other)]
    parts = [records_of(stamp(kafka_batch.decode(data, head, bytes_max=BYTES_MAX), 1), 0) for head in found]
    assert parts == [offset_by(EVERY_KIND, 0), offset_by(EVERY_KIND[:2], 0), offset_by(EVERY_KIND, 0)]
    assert heads(b"") == []


def test_a_batch_gets_another_base_offset_without_a_copy_of_its_records() -> None:
    data = BATCH * 2
    first, second = heads(data)
    moved = with_base_offset(data, second, 77)
    assert isinstance(moved[1], memoryview)
    assert moved[1].obj is data
    assert heads(joined(moved)) == [first._replace(base_offset=77)]
    assert read_by_client(joined(moved), "aiokafka") == offset_by(EVERY_KIND, 77)


@pytest.mark.parametrize("count", [4, 400])
def test_with_append_time_every_record_has_the_time_of_its_append(count: int) -> None:
    data = joined(encode(stamp(columns_of(many(count)), NOW + 5), 0, append_time=True))
    (head,) = heads(data)
    assert head.timestamp_type is TimestampType.APPEND
    assert head.max_timestamp == NOW + 5
    assert decode(data).timestamps is None
    assert {record.timestamp for record in read_by_client(data, "aiokafka")} == {NOW + 5}
    assert {record.timestamp for record in read_by_client(data, "kafka-python")} == {NOW + 5}


def test_records_of_several_appends_do_not_have_one_append_time() -> None:
    columns = concat([stamp(columns_of(EVERY_KIND), 1), stamp(columns_of(EVERY_KIND), 2)])
    with pytest.raises(InvalidArgument, match="2 appends do not have one append time"):
        encode(columns, 0, append_time=True)


@pytest.mark.parametrize("columns", [columns_of([]), columns_of([Record(payload=b"")])])
def test_columns_that_are_empty_or_not_stamped_are_not_encoded(columns: Columns) -> None:
    with pytest.raises(InvalidArgument, match=r"nothing to encode|stamp them first"):
        encode(columns, 0)


@pytest.mark.parametrize("count", [4, 400])
def test_a_record_without_a_timestamp_gets_the_time_of_its_append(count: int) -> None:
    records = [Record(payload=b"v", timestamp=NOW if i % 3 else -1) for i in range(count)]
    found = read(build(records, "kafka-python"), append_ms=8)
    assert [record.timestamp for record in found] == [NOW if i % 3 else 8 for i in range(count)]
    records = [Record(payload=b"v", timestamp=-1)] * count
    assert decode(build(records, "kafka-python")).timestamps is None


@pytest.mark.parametrize("count", [4, 400])
@pytest.mark.parametrize("ms", [TIMESTAMP_MS_MAX + 1, -TIMESTAMP_MS_MAX - 1, (1 << 63) - 1, -(1 << 63)])
def test_a_timestamp_that_is_not_in_milliseconds_is_refused(ms: int, count: int) -> None:
    for base in (0, ms):
        times = [base, *[0] * (count - 2), ms]
        data = build([Record(payload=b"v", timestamp=time) for time in times])
        with pytest.raises(InvalidRecord, match=r"in milliseconds since 1970|too wide|shorter than its parts"):
            decode(data)


def test_each_kind_of_refusal_has_its_own_error() -> None:
    old = bytearray(BATCH)
    old[16] = 1
    with pytest.raises(OldMessageFormat, match=r"message format 1, which Kafka 0\.11 replaced by 2"):
        heads(old)
    old[16] = 3
    with pytest.raises(CorruptBatch, match="message format 3, not 2"):
        heads(old)
    unknown = bytearray(BATCH)
    unknown[22] = 5
    with pytest.raises(UnsupportedCompression, match="compression 5: use none, gzip, snappy, lz4, zstd"):
        heads(with_checksum(bytes(unknown)))
    damaged = bytearray(BATCH)
    damaged[-1] ^= 1
    with pytest.raises(CorruptBatch, match="checksum") as caught:
        heads(damaged)
    assert type(caught.value) is CorruptBatch


@pytest.mark.parametrize(("records", "last_delta"), [(0, -1), (-1, -2), (5, 3), (4, 4), (1 << 30, 4)])
def test_a_record_count_that_differs_from_the_last_offset_delta_is_refused(records: int, last_delta: int) -> None:
    data = bytearray(BATCH)
    struct.pack_into(">i", data, 23, last_delta)
    struct.pack_into(">i", data, 57, records)
    with pytest.raises(InvalidRecord, match=f"a Kafka batch of {records} records has {last_delta} as its last"):
        heads(with_checksum(bytes(data)))


def test_a_record_count_beyond_the_bytes_is_refused_before_it_is_believed() -> None:
    data = bytearray(BATCH)
    struct.pack_into(">i", data, 23, (1 << 31) - 2)
    struct.pack_into(">i", data, 57, (1 << 31) - 1)
    with pytest.raises(InvalidRecord, match="too few for 2147483647"):
        decode(with_checksum(bytes(data)))


@pytest.mark.parametrize("length", [-(1 << 31), -1, 0, 48, len(BATCH) - 11, (1 << 31) - 1])
def test_a_length_that_does_not_fit_is_refused(length: int) -> None:
    data = bytearray(BATCH)
    struct.pack_into(">i", data, 8, length)
    with pytest.raises(CorruptBatch, match=f"says that it has {length + 12} bytes"):
        heads(data)


def test_every_prefix_of_a_batch_is_refused() -> None:
    whole = build(EVERY_KIND[:4])
    for size in range(1, len(whole)):
        with pytest.raises(CorruptBatch):
            heads(whole[:size])


@pytest.mark.parametrize("codec", KafkaCodec)
def test_records_beyond_the_bound_are_refused(codec: KafkaCodec) -> None:
    data = joined(encode(stamp(columns_of([Record(payload=bytes(1000))] * 500), 1), 0, codec=codec))
    (head,) = heads(data)
    with pytest.raises(RecordTooLarge, match="more than 400000 bytes of records"):
        kafka_batch.decode(data, head, bytes_max=400_000)


@given(
    st.sampled_from(KafkaCodec),
    st.sampled_from([5, 100]),
    st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=3),
)
def test_damage_that_no_checksum_catches_is_refused_or_decodes_to_whole_records(
    codec: KafkaCodec, count: int, changes: list[tuple[float, int]]
) -> None:
    data = bytearray(joined(encode(stamp(columns_of(many(count)), 1), 0, codec=codec)))
    for place, byte in changes:
        data[21 + int(place * (len(data) - 21))] = byte
    try:
        columns = decode(with_checksum(bytes(data)))
    except (CorruptBatch, RecordTooLarge):
        return
    except LlogError as error:
        pytest.fail(f"{type(error).__name__} is not an error of a batch")
    for array in columns[:4]:
        if array is not None:
            array.validate(full=True)
    assert len(records_of(stamp(columns, 1), 0)) == columns.count
