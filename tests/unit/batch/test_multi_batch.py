from __future__ import annotations

import struct

import pytest
from awscrt.checksums import crc32c
from hypothesis import given
from hypothesis import strategies as st

from llog.batch import multi_batch as bodies
from llog.batch.columns import Columns, columns_of, concat, records_of, stamp
from llog.batch.encodings import decoder
from llog.batch.format import ENCODING as ONE_BATCH
from llog.batch.format import Codec, encode
from llog.batch.multi_batch import ENCODING, BatchPart, encode_run, layout_of, positions
from llog.errors import CorruptBatch, RecordTooLarge
from llog.model import Record
from tests.unit.batch.examples import joined, stamped_columns


def columns(*payloads: bytes) -> Columns:
    return stamp(columns_of([Record(payload=payload) for payload in payloads]), 1000)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "PART_BYTES", 64)


@given(st.lists(stamped_columns(), min_size=1, max_size=6), st.sampled_from(Codec))
def test_what_is_encoded_comes_back_whole_and_in_parts(run: list[Columns], codec: Codec) -> None:
    buffers, encoded = encode_run(run, codec)
    body = joined(buffers)
    assert layout_of(body) == encoded
    assert len(body) == encoded.byte_length
    expected = records_of(concat(run), 1)
    assert records_of(decoder(encoded.encoding)(body), 1) == expected
    alone = []
    for start, part in zip(positions(encoded.parts), encoded.parts, strict=True):
        alone.append(decoder(ONE_BATCH)(body[start : start + part.byte_length]))
    if alone:
        assert records_of(concat(alone), 1) == expected
        assert [part.records for part in encoded.parts] == [part.count for part in alone]


def test_few_records_are_one_plain_batch() -> None:
    buffers, encoded = encode_run([columns(b"a"), columns(b"b")])
    assert encoded == (ONE_BATCH, len(joined(buffers)), ())
    assert joined(buffers) == joined(encode(concat([columns(b"a"), columns(b"b")])))


def test_every_byte_is_as_documented() -> None:
    run = [columns(b"a" * 60), columns(b"b" * 61, b"c")]
    batches = [joined(encode(each)) for each in run]
    padded = [batch + bytes(-len(batch) % 8) for batch in batches]
    table = struct.pack("<II2I2Q", 2, 0, 1, 2, *map(len, batches))
    expected = b"LLC1" + struct.pack("<I", crc32c(table)) + table + b"".join(padded)
    buffers, encoded = encode_run(run)
    assert joined(buffers) == expected
    assert encoded.encoding == ENCODING
    assert encoded.parts == (BatchPart(1, len(batches[0])), BatchPart(2, len(batches[1])))


@given(st.data())
def test_a_changed_or_missing_byte_is_noticed(data: st.DataObject) -> None:
    body = bytearray(joined(encode_run([columns(b"a" * 60), columns(b"b" * 61, b"c")])[0]))
    if data.draw(st.booleans()):
        del body[data.draw(st.integers(0, len(body) - 1)) :]
    else:
        body[data.draw(st.integers(0, len(body) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(CorruptBatch):
        decoder(ENCODING)(bytes(body))


def test_more_than_a_body_holds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "BATCH_BYTES_MAX", 100)
    with pytest.raises(RecordTooLarge):
        encode_run([columns(b"a" * 60), columns(b"b" * 61)])
