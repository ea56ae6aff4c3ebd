"""The envelope of a record: what goes in comes out, and what is damaged is told."""

from __future__ import annotations

import itertools

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llog.batch.columns import effective_timestamps, encode_headers
from llog.engines.rocksdb.envelope import FIXED_BYTES, DecodedRecords, check_records, decode, decode_header, encode
from llog.errors import CorruptBatch, InvalidArgument

APPEND_MS = 1_700_000_000_000

some_headers = st.lists(st.tuples(st.text(max_size=5), st.none() | st.binary(max_size=9)), max_size=3).map(
    encode_headers
)
KINDS = (pa.binary(), pa.binary(), pa.binary(), pa.int64())
record = st.tuples(
    st.none() | st.binary(max_size=40),
    st.none() | st.binary(max_size=9),
    some_headers,
    st.none() | st.integers(-(1 << 52), 1 << 52),
)


def encoded(*values: bytes | None, first_offset: int = 1, append_ms: int = APPEND_MS) -> list[bytes]:
    return encode(
        values, None, None, None, first_offset=first_offset, append_ms=append_ms, newest_ms=0, position=0
    ).envelopes


def found_in(decoded: DecodedRecords) -> list[tuple[bytes | None, bytes | None, bytes, int]]:
    columns, count = decoded.columns, decoded.columns.count
    keys = [None] * count if columns.keys is None else columns.keys.to_pylist()
    headers = [b""] * count if columns.headers is None else columns.headers.to_pylist()
    times = effective_timestamps(columns).to_pylist()
    return list(zip(columns.values.to_pylist(), keys, headers, times, strict=True))


def test_envelopes_that_no_array_can_hold_are_made_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    values = pa.array([b"v" * 30] * 20, pa.binary())
    keys = pa.array([b"k" * 30, None] * 10, pa.binary())
    whole = encode(values, keys, None, None, first_offset=1, append_ms=1, newest_ms=0, position=0)
    monkeypatch.setattr("llog.engines.rocksdb.envelope.COLUMN_BYTES_MAX", 1000)
    monkeypatch.setattr("llog.engines.rocksdb.envelope.binary_rows", None)
    assert encode(values, keys, None, None, first_offset=1, append_ms=1, newest_ms=0, position=0) == whole


@given(
    records=st.lists(record, min_size=1, max_size=20),
    first=st.integers(1, 1 << 60),
    newest=st.integers(0, 1 << 52),
    position=st.integers(0, 1 << 60),
)
def test_records_come_back_as_they_went_in(
    records: list[tuple[bytes | None, bytes | None, bytes, int | None]], first: int, newest: int, position: int
) -> None:
    values, keys, headers, times = map(list, zip(*records, strict=True))
    arrays = [pa.array(each, kind) for each, kind in zip((values, keys, headers, times), KINDS, strict=True)]
    made = encode(
        values, keys, headers, times, first_offset=first, append_ms=APPEND_MS, newest_ms=newest, position=position
    )
    assert made == encode(*arrays, first_offset=first, append_ms=APPEND_MS, newest_ms=newest, position=position)
    decoded = decode(made.envelopes)
    effective = [APPEND_MS if ms is None else ms for ms in times]
    assert found_in(decoded) == list(zip(values, keys, headers, effective, strict=True))
    assert decoded.offsets.tolist() == list(range(first, first + len(records)))
    assert decoded.newest_ms.tolist() == list(itertools.accumulate(effective, max, initial=newest))[1:]
    lengths = list(map(len, made.envelopes))
    assert decoded.positions.tolist() == list(itertools.accumulate(lengths, initial=position))[:-1]
    assert (made.newest_ms, made.position) == (max(newest, *effective), position + sum(lengths))
    assert decoded.columns.append_runs == ((len(records), APPEND_MS),)
    for place, envelope in enumerate(made.envelopes):
        fixed = decode_header(envelope)
        assert fixed[:3] == (first + place, effective[place], APPEND_MS)
        assert fixed[3:] == (decoded.newest_ms[place], decoded.positions[place], len(envelope))


def test_columns_that_no_record_has_are_left_out() -> None:
    columns = decode(encoded(b"a", None, b"")).columns
    assert (columns.keys, columns.headers, columns.timestamps) == (None, None, None)
    assert columns.values.to_pylist() == [b"a", None, b""]


def test_records_are_cut_at_gaps_with_their_own_append_times() -> None:
    envelopes = [encoded(b"%d" % offset, first_offset=offset, append_ms=offset)[0] for offset in (3, 4, 7, 9, 10)]
    decoded = decode(envelopes)
    assert decoded.columns.append_runs == ((1, 3), (1, 4), (1, 7), (1, 9), (1, 10))
    runs = decoded.runs()
    assert [(start, columns.values.to_pylist()) for start, columns in runs] == [
        (3, [b"3", b"4"]),
        (7, [b"7"]),
        (9, [b"9", b"10"]),
    ]
    assert [columns.append_runs for _, columns in runs] == [((1, 3), (1, 4)), ((1, 7),), ((1, 9), (1, 10))]


@given(envelopes=st.lists(st.binary(max_size=80), min_size=1, max_size=4))
def test_any_bytes_are_records_or_damaged(envelopes: list[bytes]) -> None:
    for call in (lambda: decode(envelopes), lambda: decode_header(envelopes[0])):
        try:
            call()
        except CorruptBatch:
            continue
    with pytest.raises(CorruptBatch):
        decode([*envelopes, b"short"])


@given(data=st.data())
def test_a_damaged_number_at_the_front_is_told_or_stays_within_its_own_record(data: st.DataObject) -> None:
    envelopes = encode(
        [b"payload", b"other"], [b"key", None], [b"", b""], None, first_offset=5, append_ms=9, newest_ms=0, position=0
    ).envelopes
    place = data.draw(st.integers(0, 11))
    damaged = bytearray(envelopes[0])
    damaged[place] ^= 1 << data.draw(st.integers(0, 7))
    try:
        values = decode([bytes(damaged), envelopes[1]]).columns.values.to_pylist()
    except CorruptBatch:
        return
    assert place >= 1
    assert values[1] == b"other"
    assert values[0] in (b"keypayload"[cut:] for cut in range(11))


@pytest.mark.parametrize(
    "envelopes",
    [
        [],
        [encoded(b"a")[0][: FIXED_BYTES - 1]],
        [encoded(b"a")[0], encoded(b"a")[0]],
        [encoded(b"a", first_offset=2)[0], encoded(b"a", first_offset=1)[0]],
        [b"\x02" + encoded(b"a")[0][1:]],
        [encoded(b"a", first_offset=0)[0]],
    ],
    ids=["nothing", "cut short", "twice", "backwards", "another version", "offset 0"],
)
def test_what_cannot_follow_one_another_is_refused(envelopes: list[bytes]) -> None:
    with pytest.raises(CorruptBatch):
        decode(envelopes)


def test_columns_must_go_together_and_times_fit() -> None:
    check_records([b"a"], [None], [b""], [None])
    with pytest.raises(InvalidArgument):
        check_records([], None, None, None)
    with pytest.raises(InvalidArgument, match="0 keys"):
        check_records([b"a"], [], None, None)
    with pytest.raises(InvalidArgument, match="2 headers"):
        check_records([b"a"], None, [b"", b""], None)
    with pytest.raises(InvalidArgument, match="milliseconds"):
        check_records([b"a"], None, None, [1 << 60])
