from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from awscrt.checksums import crc32c
from hypothesis import given
from hypothesis import strategies as st

from llog.batch import shared
from llog.batch.columns import Columns, columns_of, records_of, stamp, timestamp_bounds
from llog.batch.encodings import decoder
from llog.batch.format import Codec
from llog.batch.multi_batch import encode_run
from llog.batch.shared import Body, body_parts, header_length, pack, pack_one, unpack_header
from llog.errors import CorruptBatch, RecordTooLarge
from llog.model import Record, TopicPartition
from tests.unit.batch.examples import joined, millis, stamped_columns, text

VECTORS = json.loads((Path(__file__).parent / "vectors.json").read_text())
VECTOR = VECTORS["shared_blob"]
GROUPS = [
    (TopicPartition("orders", 0), "orders", stamp(columns_of([Record(payload=b"a")]), 1000)),
    (
        TopicPartition("clicks", 12),
        "clicks~2",
        stamp(columns_of([Record(payload=b"bcd", key=b"k", timestamp=5)]), 1001),
    ),
]


def blob_of(header: object) -> bytes:
    encoded = msgspec.json.encode(header)
    return b"LLS1" + len(encoded).to_bytes(4, "big") + int(crc32c(encoded)).to_bytes(4, "big") + encoded


def test_the_checked_in_blob_is_still_made_and_read() -> None:
    parts, bodies = pack(GROUPS, writer=VECTOR["writer"], created_at_ms=VECTOR["created_at_ms"])
    assert joined(parts).hex() == VECTOR["blob"]
    assert list(unpack_header(bytes.fromhex(VECTOR["blob"])).partitions) == bodies


def test_bodies_may_tell_the_next_offset_that_the_writer_knew() -> None:
    vector = VECTORS["shared_blob_with_next_offsets"]
    parts, bodies = pack(
        GROUPS,
        writer=vector["writer"],
        created_at_ms=vector["created_at_ms"],
        next_offsets=vector["next_offsets"],
    )
    assert joined(parts).hex() == vector["blob"]
    assert [body.next_offset for body in bodies] == vector["next_offsets"] == [1, 40]
    assert list(unpack_header(bytes.fromhex(vector["blob"])).partitions) == bodies


def test_a_compacted_blob_is_a_shared_one_of_one_body_that_names_its_offset() -> None:
    vector = VECTORS["compacted_blob"]
    buffers, encoded = encode_run([GROUPS[0][2]])
    body = Body(
        topic="orders",
        partition=0,
        directory="orders",
        msg_count=1,
        encoding=encoded.encoding,
        body_offset=0,
        body_length=encoded.byte_length,
        append_ms=1000,
        timestamp_min=1000,
        timestamp_max=1000,
        start_offset=vector["start_offset"],
    )
    parts, placed = pack_one(body, buffers, writer=vector["writer"], created_at_ms=vector["created_at_ms"])
    blob = joined(parts)
    assert blob.hex() == vector["blob"]
    assert unpack_header(blob).partitions == (placed,)
    assert records_of(decoder(placed.encoding)(blob[placed.body_offset :][: placed.body_length]), 7)[0].offset == 7


groups = st.lists(
    st.tuples(
        st.builds(TopicPartition, st.text("abc.-_", min_size=1, max_size=20), st.integers(0, 99_999)),
        st.text("abc~2", min_size=1, max_size=20),
        stamped_columns(),
    ),
    max_size=5,
)


@given(groups, text, millis, st.sampled_from(list(Codec)))
def test_every_body_is_where_the_header_says(
    groups: list[tuple[TopicPartition, str, Columns]], writer: str, created_at_ms: int, codec: Codec
) -> None:
    parts, bodies = pack(groups, writer=writer, created_at_ms=created_at_ms, codec=codec)
    blob = joined(parts)
    header = unpack_header(blob[: header_length(blob[:12])])
    assert (header.version, header.writer, header.created_at_ms) == (1, writer, created_at_ms)
    assert list(header.partitions) == bodies
    for (partition, directory, columns), body in zip(groups, bodies, strict=True):
        assert (body.topic, body.partition, body.directory) == (*partition, directory)
        assert (body.msg_count, body.append_ms) == (columns.count, columns.append_runs[0][1])
        assert (body.timestamp_min, body.timestamp_max) == timestamp_bounds(columns)
        assert body.body_offset % 8 == 0
        decoded = decoder(body.encoding)(blob[body.body_offset : body.body_offset + body.body_length])
        assert records_of(decoded, 1) == records_of(columns, 1)
    assert len(blob) % 8 == 0
    for body, own in zip(bodies, body_parts(parts, bodies), strict=True):
        assert joined(own) == blob[body.body_offset :][: body.body_length]


def test_offsets_settle_for_every_length_of_header() -> None:
    columns = stamp(columns_of([Record(payload=b"x" * 900)]), 1)
    for length in range(200):
        group = (TopicPartition("t", 0), "t", columns)
        parts, bodies = pack([group] * 50, writer="w" * length, created_at_ms=1)
        assert list(unpack_header(joined(parts)).partitions) == bodies


def test_any_flipped_bit_of_the_header_is_corrupt() -> None:
    parts, _ = pack(GROUPS, writer="w", created_at_ms=1)
    blob = joined(parts)
    for position in range(header_length(blob) * 8):
        damaged = bytearray(blob)
        damaged[position // 8] ^= 1 << position % 8
        with pytest.raises(CorruptBatch):
            unpack_header(damaged)


def test_a_header_cut_short_is_corrupt() -> None:
    parts, _ = pack(GROUPS, writer="w", created_at_ms=1)
    blob = joined(parts)
    for length in range(header_length(blob)):
        with pytest.raises(CorruptBatch):
            unpack_header(blob[:length])


@given(st.binary(max_size=64))
def test_random_bytes_are_corrupt(data: bytes) -> None:
    for candidate in (data, b"LLS1" + data):
        with pytest.raises(CorruptBatch):
            unpack_header(candidate)


@given(st.recursive(st.none() | st.integers() | text, lambda inner: st.lists(inner) | st.dictionaries(text, inner)))
def test_any_other_json_is_corrupt(header: object) -> None:
    with pytest.raises(CorruptBatch):
        unpack_header(blob_of(header))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("body_offset", 0),
        ("body_offset", 1 << 70),
        ("body_length", 0),
        ("body_length", -8),
        ("msg_count", 0),
        ("partition", -1),
        ("append_ms", 1 << 63),
        ("topic", 1),
    ],
)
def test_an_impossible_directory_entry_is_corrupt(field: str, value: object) -> None:
    parts, _ = pack(GROUPS, writer="w", created_at_ms=1)
    header = msgspec.to_builtins(unpack_header(joined(parts)))
    header["partitions"][1][field] = value
    with pytest.raises(CorruptBatch):
        unpack_header(blob_of(header))


def test_a_newer_version_is_refused_by_number() -> None:
    with pytest.raises(CorruptBatch, match="version 2"):
        unpack_header(blob_of({"version": 2, "created_at_ms": 1, "writer": "w", "partitions": []}))


def test_a_header_says_it_is_too_long_before_it_is_fetched() -> None:
    with pytest.raises(CorruptBatch, match="more than"):
        header_length(b"LLS1" + (shared.HEADER_BYTES_MAX + 1).to_bytes(4, "big") + bytes(4))


def test_a_header_beyond_the_limit_is_not_written() -> None:
    with pytest.raises(RecordTooLarge, match="several blobs"):
        pack(GROUPS, writer="w" * shared.HEADER_BYTES_MAX, created_at_ms=1)
