from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llog.batch import encodings, format
from llog.batch.columns import Columns, columns_of, concat, records_of, slice_columns, stamp
from llog.batch.format import Codec, decode, encode, encode_joined, peek
from llog.errors import CorruptBatch, InvalidArgument, RecordTooLarge
from llog.model import Record
from tests.unit.batch.examples import (
    hidden_bytes_under_nulls,
    joined,
    reference_encode,
    stamped_columns,
    with_checksum,
)

VECTORS = json.loads((Path(__file__).parent / "vectors.json").read_text())["batches"]
EVERY_FLAG = concat(
    [
        stamp(columns_of([Record(payload=b"ab", key=b"", timestamp=5, headers=(("h", None),))]), 7),
        stamp(columns_of([Record(payload=None, key=b"k"), Record(payload=b"")]), 8),
    ]
)
codec_choice = st.sampled_from(list(Codec))


def columns_of_vector(vector: dict[str, Any]) -> Columns:
    records = [
        Record(
            payload=_unhex(record["payload"]),
            key=_unhex(record.get("key")),
            timestamp=record.get("timestamp"),
            headers=tuple((key, _unhex(value)) for key, value in record.get("headers", [])),
        )
        for record in vector["records"]
    ]
    parts = []
    for count, append_ms in vector["append_runs"]:
        parts.append(stamp(columns_of(records[:count]), append_ms))
        records = records[count:]
    return concat(parts)


def _unhex(text: str | None) -> bytes | None:
    return None if text is None else bytes.fromhex(text)


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
def test_checked_in_batches_decode_to_their_records(vector: dict[str, Any]) -> None:
    columns = columns_of_vector(vector)
    decoded = decode(bytes.fromhex(vector["batch"]))
    assert records_of(decoded, 1) == records_of(columns, 1)
    assert decoded.append_runs == columns.append_runs


@pytest.mark.parametrize(
    "vector", [vector for vector in VECTORS if vector["codec"] == "none"], ids=lambda vector: vector["name"]
)
def test_the_encoder_still_makes_the_checked_in_bytes(vector: dict[str, Any]) -> None:
    assert joined(encode(columns_of_vector(vector))).hex() == vector["batch"]


@given(stamped_columns(), codec_choice)
def test_columns_round_trip(columns: Columns, codec: Codec) -> None:
    decoded = decode(joined(encode(columns, codec)))
    assert records_of(decoded, 1) == records_of(columns, 1)
    assert decoded.append_runs == columns.append_runs
    for array in decoded[:4]:
        if array is not None:
            array.validate(full=True)


@given(stamped_columns())
def test_the_bytes_are_those_that_the_documented_format_describes(columns: Columns) -> None:
    assert joined(encode(columns)) == reference_encode(columns)


@given(stamped_columns(), codec_choice)
def test_peek_tells_what_decode_finds(columns: Columns, codec: Codec) -> None:
    batch = joined(encode(columns, codec))
    header = peek(batch[: format.HEADER_BYTES])
    times = [record.timestamp or 0 for record in records_of(columns, 1)]
    assert (header.count, header.append_ms, header.timestamp_max, header.codec) == (
        columns.count,
        columns.append_runs[0][1],
        max(times),
        codec,
    )


@given(stamped_columns(), st.integers(0, 7))
def test_a_batch_decodes_from_memory_of_any_alignment(columns: Columns, shift: int) -> None:
    batch = joined(encode(columns))
    decoded = decode(memoryview(bytes(shift) + batch)[shift:])
    assert records_of(decoded, 1) == records_of(columns, 1)
    assert columns.timestamps is None or decoded.timestamps.buffers()[1].address % 8 == 0  # type: ignore[union-attr]


@pytest.mark.parametrize("codec", Codec)
def test_the_parts_of_a_large_batch_have_the_lengths_of_their_bytes(codec: Codec) -> None:
    columns = stamp(columns_of([Record(payload=b"%d" % i + bytes(range(256)) * 4) for i in range(20_000)]), 1)
    parts = encode(columns, codec)
    assert len(parts) > 1
    assert sum(map(len, parts)) == len(joined(parts))


def test_decoding_copies_nothing_that_is_not_compressed() -> None:
    columns = stamp(columns_of([Record(payload=b"v" * 100, key=b"k" * 10, timestamp=3)] * 1000), 1)
    batch = joined(encode(columns))
    memory = pa.py_buffer(batch)
    decoded = decode(batch)
    assert decoded.keys is not None
    assert decoded.timestamps is not None
    buffers = decoded.values.buffers() + decoded.keys.buffers() + decoded.timestamps.buffers()
    for buffer in filter(None, buffers):
        assert memory.address <= buffer.address < memory.address + memory.size


def test_a_large_batch_is_encoded_without_copying_its_payload() -> None:
    columns = stamp(columns_of([Record(payload=b"v" * 100)] * 1000), 1)
    addresses = [pa.py_buffer(part).address for part in encode(columns)]
    assert columns.values.buffers()[2].address in addresses
    assert records_of(decode(joined(encode(columns))), 1) == records_of(columns, 1)


def test_a_large_slice_is_encoded_without_the_rest_of_its_buffers() -> None:
    whole = stamp(columns_of([Record(payload=b"%05d" % i * 20, key=b"%d" % i) for i in range(3000)]), 1)
    part = slice_columns(whole, 1001, 2002)
    fresh = stamp(columns_of([Record(payload=b"%05d" % i * 20, key=b"%d" % i) for i in range(1001, 2002)]), 1)
    assert joined(encode(part)) == joined(encode(fresh))


def test_bytes_hidden_under_nulls_are_not_stored() -> None:
    columns = Columns(hidden_bytes_under_nulls(), hidden_bytes_under_nulls(), None, None, ((3, 1),))
    batch = joined(encode(columns))
    assert b"cde" not in batch
    assert decode(batch).values.to_pylist() == [b"ab", None, b"f"]


def test_columns_without_any_key_or_header_are_stored_as_absent() -> None:
    columns = Columns(pa.array([b"a"]), pa.nulls(1, pa.binary()), None, pa.array([None], pa.binary()), ((1, 1),))
    assert joined(encode(columns)) == joined(encode(columns._replace(keys=None, headers=None)))


@pytest.mark.parametrize(
    "columns",
    [
        columns_of([]),
        columns_of([Record(payload=b"")]),
        EVERY_FLAG._replace(append_runs=((2, 1),)),
        EVERY_FLAG._replace(append_runs=((3, 1), (0, 2))),
        EVERY_FLAG._replace(timestamps=pa.array([1, None, 2])),
        EVERY_FLAG._replace(timestamps=pa.array([1, 2, 3], pa.int32())),
        EVERY_FLAG._replace(keys=pa.array([b"a"])),
        EVERY_FLAG._replace(values=pa.array(["a", "b", "c"])),
    ],
    ids=["empty", "unstamped", "short runs", "empty run", "null timestamp", "narrow timestamps", "short keys", "text"],
)
def test_columns_that_are_not_a_batch_are_refused(columns: Columns) -> None:
    with pytest.raises(InvalidArgument):
        encode(columns)


def test_a_batch_beyond_the_limit_is_refused_before_it_is_read() -> None:
    data = pa.py_buffer(np.zeros(format.BATCH_BYTES_MAX, np.uint8))
    values = pa.Array.from_buffers(pa.binary(), 1, [None, pa.array([0, data.size], pa.int32()).buffers()[1], data])
    with pytest.raises(RecordTooLarge):
        encode(Columns(values, None, None, None, ((1, 1),)))


@pytest.mark.parametrize("codec", list(Codec))
def test_any_flipped_bit_is_corrupt(codec: Codec) -> None:
    batch = joined(encode(EVERY_FLAG, codec))
    for position in range(len(batch) * 8):
        damaged = bytearray(batch)
        damaged[position // 8] ^= 1 << position % 8
        with pytest.raises(CorruptBatch):
            decode(damaged)


@pytest.mark.parametrize("codec", list(Codec))
def test_a_batch_cut_short_or_with_more_behind_it_is_corrupt(codec: Codec) -> None:
    batch = joined(encode(EVERY_FLAG, codec))
    for length in range(len(batch)):
        with pytest.raises(CorruptBatch):
            decode(batch[:length])
        if length >= format.HEADER_BYTES:
            with pytest.raises(CorruptBatch):
                decode(with_checksum(batch[:length]))
    for more in (b"\0", bytes(8), batch):
        with pytest.raises(CorruptBatch):
            decode(batch + more)
        with pytest.raises(CorruptBatch):
            decode(with_checksum(batch + more))


def test_a_flipped_bit_that_the_checksum_misses_is_corrupt_or_another_whole_batch() -> None:
    batch = joined(encode(EVERY_FLAG))
    for position in range(64, len(batch) * 8):
        damaged = bytearray(batch)
        damaged[position // 8] ^= 1 << position % 8
        _decodes_to_itself_or_is_corrupt(with_checksum(bytes(damaged)))


@settings(max_examples=500)
@given(st.sampled_from([vector["batch"] for vector in VECTORS if vector["codec"] == "none"]), st.data())
def test_damage_that_the_checksum_misses_is_corrupt_or_another_whole_batch(batch: str, data: st.DataObject) -> None:
    damaged = bytearray.fromhex(batch)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(8, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    _decodes_to_itself_or_is_corrupt(with_checksum(bytes(damaged)))


@given(st.binary(max_size=200))
def test_random_bytes_are_corrupt(data: bytes) -> None:
    with pytest.raises(CorruptBatch):
        decode(data)


@settings(max_examples=500)
@given(st.integers(0, 3), st.sampled_from([0, 1, 2, 4, 8, 16, 31]), st.binary(max_size=160))
def test_random_sections_behind_a_good_header_are_corrupt_or_a_whole_batch(
    count: int, flags: int, sections: bytes
) -> None:
    _decodes_to_itself_or_is_corrupt(
        with_checksum(struct.pack("<4sIIBBHqq", b"LLB1", 0, count, 0, flags, 0, 0, 0) + sections)
    )


@settings(max_examples=300)
@given(st.sampled_from([1, 2]), st.data())
def test_damage_inside_compressed_sections_is_corrupt_or_a_batch_of_valid_columns(
    codec: int, data: st.DataObject
) -> None:
    damaged = bytearray(joined(encode(EVERY_FLAG, Codec.LZ4 if codec == 1 else Codec.ZSTD)))
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(32, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        decoded = decode(with_checksum(bytes(damaged)))
    except CorruptBatch:
        return
    assert decode(joined(encode(decoded))).values == decoded.values


@pytest.mark.parametrize("codec", [Codec.LZ4, Codec.ZSTD])
@pytest.mark.parametrize("change", [-8, 8, format.BATCH_BYTES_MAX, (1 << 63)])
def test_a_wrong_uncompressed_length_is_corrupt(codec: Codec, change: int) -> None:
    batch = joined(encode(EVERY_FLAG, codec))
    length = int.from_bytes(batch[32:40], "little") + change
    with pytest.raises(CorruptBatch):
        decode(with_checksum(batch[:32] + length.to_bytes(8, "little") + batch[40:]))


def _crafted(count: int, flags: int, sections: bytes, *, codec: int = 0) -> bytes:
    return with_checksum(struct.pack("<4sIIBBHqq", b"LLB1", 0, count, codec, flags, 0, 0, 0) + sections)


@pytest.mark.parametrize(
    ("flags", "sections", "message"),
    [
        (1, bytes(8) + bytes(16), "all of them are null"),
        (4, bytes(16), "all of them are empty"),
        (8, struct.pack("<q4q", 2, 0, 2, 0, 0), "do not add up"),
        (8, struct.pack("<q4q", 2, -1, 3, 0, 0), "do not add up"),
    ],
    ids=["keys all null", "headers all empty", "empty run", "negative run"],
)
def test_a_section_that_no_encoder_writes_is_corrupt(flags: int, sections: bytes, message: str) -> None:
    values = bytes(16)
    assert decode(_crafted(2, 0, values)).values.to_pylist() == [b"", b""]
    with pytest.raises(CorruptBatch, match=message):
        decode(_crafted(2, flags, values + sections))


@pytest.mark.parametrize(("codec", "number"), [("lz4", 1), ("zstd", 2)])
def test_compressed_bytes_beyond_the_length_they_state_are_corrupt(codec: str, number: int) -> None:
    for extra, fits in ((b"", True), (bytes(8), False)):
        compressed = pa.Codec(codec).compress(bytes(16) + extra, asbytes=True)
        batch = _crafted(2, 0, (16).to_bytes(8, "little") + compressed, codec=number)
        if fits:
            assert decode(batch).count == 2
        else:
            with pytest.raises(CorruptBatch, match="uncompressed"):
                decode(batch)


def test_each_encoding_is_found_by_its_name() -> None:
    batch = joined(encode(EVERY_FLAG))
    assert records_of(encodings.decoder("bytes-batch-v1")(batch), 1) == records_of(EVERY_FLAG, 1)


def test_an_unknown_encoding_is_named() -> None:
    with pytest.raises(CorruptBatch, match="kafka-v2"):
        encodings.decoder("kafka-v2")


def _decodes_to_itself_or_is_corrupt(data: bytes) -> None:
    try:
        decoded = decode(data)
    except CorruptBatch:
        return
    assert joined(encode(decoded)) == data
    for array in decoded[:4]:
        if array is not None:
            array.validate(full=True)


@given(st.lists(stamped_columns(), min_size=1, max_size=5), codec_choice)
def test_joined_columns_encode_to_the_bytes_of_their_concatenation(parts: list[Columns], codec: Codec) -> None:
    assert joined(encode_joined(parts, codec)) == joined(encode(concat(parts), codec))
