from __future__ import annotations

from datetime import UTC, datetime
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llog.batch.columns import (
    TIMESTAMP_MS_MAX,
    Columns,
    append_times,
    binary_size,
    byte_size,
    columns_of,
    concat,
    count_fitting,
    cut_columns,
    decode_headers,
    effective_timestamps,
    encode_headers,
    headers_from_arrow,
    headers_to_arrow,
    records_of,
    slice_columns,
    stamp,
    timestamp_bounds,
)
from llog.errors import CorruptBatch, InvalidArgument, RecordTooLarge
from llog.model import Header, Record
from tests.unit.batch.examples import (
    appended,
    headers,
    hidden_bytes_under_nulls,
    millis,
    record_lists,
    stamped_columns,
)


@given(record_lists(), millis)
def test_records_come_back_with_offsets_and_the_append_time_where_they_had_none(
    records: list[Record], append_ms: int
) -> None:
    columns = stamp(columns_of(records), append_ms)
    assert columns.count == len(records)
    assert records_of(columns, 7) == appended(records, [append_ms] * len(records), 7)


def test_columns_that_no_record_uses_are_absent() -> None:
    columns = columns_of([Record(payload=b"a"), Record(payload=None)])
    assert (columns.keys, columns.timestamps, columns.headers, columns.append_runs) == (None, None, None, ())


def test_an_empty_key_is_not_an_absent_key() -> None:
    columns = columns_of([Record(payload=b"", key=b""), Record(payload=None, key=None)])
    assert columns.keys is not None
    assert columns.keys.to_pylist() == [b"", None]
    assert columns.values.to_pylist() == [b"", None]


def test_stamping_leaves_create_times_and_fills_the_others() -> None:
    columns = stamp(columns_of([Record(payload=b"", timestamp=5), Record(payload=b"")]), 9)
    assert columns.timestamps is not None
    assert columns.timestamps.to_pylist() == [5, 9]
    assert columns.append_runs == ((2, 9),)


def test_stamping_drops_timestamps_that_are_all_null() -> None:
    columns = columns_of([Record(payload=b"")])._replace(timestamps=pa.nulls(1, pa.int64()))
    assert stamp(columns, 9).timestamps is None


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("payload", 5, "payload of a record is int, not bytes"),
        ("payload", "text", "payload of a record is str, not bytes"),
        ("key", "text", "key of a record is str, not bytes"),
        ("timestamp", "5", "a timestamp is not a number of milliseconds"),
        ("timestamp", datetime(2025, 1, 1, tzinfo=UTC), "a timestamp is not a number of milliseconds"),
        ("timestamp", 1 << 63, "a timestamp is not a number of milliseconds in 64 bits"),
        ("headers", (("a", "text"),), "value of header 'a' is str, not bytes"),
        ("headers", ((b"a", b"b"),), "header key is bytes, not str"),
        ("headers", (("a", b"b", b"c"),), "not a pair of a key and a value"),
        ("headers", (5,), "not a pair of a key and a value"),
    ],
)
def test_a_record_of_wrong_types_is_refused_by_what_is_wrong(field: str, value: object, named: str) -> None:
    wrong = Record(**({"payload": b""} | {field: value}))  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=named):
        columns_of([Record(payload=b"", key=b"", timestamp=1, headers=(("h", b""),)), wrong])


@pytest.mark.parametrize("sign", [1, -1])
def test_a_timestamp_that_microseconds_cannot_hold_is_refused(sign: int) -> None:
    last = sign * TIMESTAMP_MS_MAX
    columns = stamp(columns_of([Record(payload=b"", timestamp=last), Record(payload=b"")]), 9)
    assert pa.scalar(effective_timestamps(columns)[0].as_py() * 1000, pa.timestamp("us")).value == last * 1000
    with pytest.raises(InvalidArgument, match=f"a timestamp is {last + sign}: "):
        columns_of([Record(payload=b"", timestamp=last + sign)])
    given = columns_of([Record(payload=b""), Record(payload=b"")])
    with pytest.raises(InvalidArgument, match=f"a timestamp is {last + sign}: "):
        stamp(given._replace(timestamps=pa.array([last + sign, None], pa.int64())), 9)


@given(st.lists(st.tuples(record_lists(), millis), max_size=4))
def test_joined_columns_hold_the_records_of_all_parts_in_order(parts: list[tuple[list[Record], int]]) -> None:
    columns = concat([stamp(columns_of(records), append_ms) for records, append_ms in parts])
    records = [record for part, _ in parts for record in part]
    times = [append_ms for part, append_ms in parts for _ in part]
    assert records_of(columns, 1) == appended(records, times, 1)
    assert append_times(columns).tolist() == times
    assert all(a[1] != b[1] for a, b in zip(columns.append_runs, columns.append_runs[1:], strict=False))


@given(st.lists(record_lists(), max_size=4), millis)
def test_joining_before_stamping_is_the_same_as_after(parts: list[list[Record]], append_ms: int) -> None:
    before = stamp(concat([columns_of(part) for part in parts]), append_ms)
    after = concat([stamp(columns_of(part), append_ms) for part in parts])
    assert records_of(before, 1) == records_of(after, 1)
    assert before.append_runs == after.append_runs


def test_joining_adds_an_optional_column_only_where_some_part_has_it() -> None:
    plain = stamp(columns_of([Record(payload=b"a")]), 1)
    keyed = stamp(columns_of([Record(payload=b"b", key=b"k")]), 2)
    joined = concat([plain, keyed])
    assert joined.keys is not None
    assert joined.keys.to_pylist() == [None, b"k"]
    assert joined.timestamps is None
    assert joined.headers is None


def test_stamped_and_unstamped_columns_are_not_joined() -> None:
    columns = columns_of([Record(payload=b"a")])
    with pytest.raises(InvalidArgument, match="stamped"):
        concat([columns, stamp(columns, 1)])


def test_joining_more_than_one_array_can_hold_is_refused_before_memory_is_taken() -> None:
    data = pa.py_buffer(np.zeros(1 << 30, np.uint8))
    values = pa.Array.from_buffers(pa.binary(), 1, [None, pa.array([0, 1 << 30], pa.int32()).buffers()[1], data])
    large = Columns(values, None, None, None, ((1, 1),))
    with pytest.raises(RecordTooLarge):
        concat([large, large])


@given(stamped_columns(), st.data())
def test_a_slice_holds_exactly_its_records(columns: Columns, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, columns.count))
    stop = data.draw(st.integers(start, columns.count))
    part = slice_columns(columns, start, stop)
    assert records_of(part, 1 + start) == records_of(columns, 1)[start:stop]
    assert append_times(part).tolist() == append_times(columns).tolist()[start:stop]
    assert byte_size(part) == payload_bytes(part)


@given(stamped_columns(), st.data())
def test_columns_cut_in_many_places_are_the_slices_between_them(columns: Columns, data: st.DataObject) -> None:
    edges = sorted({0, *data.draw(st.sets(st.integers(0, columns.count))), columns.count})
    assert cut_columns(columns, edges) == [slice_columns(columns, *between) for between in pairwise(edges)]


@pytest.mark.parametrize(("start", "stop"), [(-1, 1), (0, 3), (2, 1)])
def test_a_slice_outside_the_records_is_refused(start: int, stop: int) -> None:
    with pytest.raises(InvalidArgument):
        slice_columns(columns_of([Record(payload=b"a")] * 2), start, stop)


def test_a_slice_shares_memory() -> None:
    columns = columns_of([Record(payload=b"a" * 100)] * 3)
    part = slice_columns(columns, 1, 2)
    assert part.values.buffers()[2].address == columns.values.buffers()[2].address


@given(stamped_columns())
def test_sizes_and_times_agree_with_the_records(columns: Columns) -> None:
    times = [record.timestamp for record in records_of(columns, 1)]
    assert effective_timestamps(columns).to_pylist() == times
    assert timestamp_bounds(columns) == (min(t for t in times if t is not None), max(t for t in times if t is not None))
    assert byte_size(columns) == payload_bytes(columns)


@given(stamped_columns(), st.integers(0, 120), st.integers(0, 9))
def test_as_many_of_the_first_records_fit_as_their_bytes_allow(columns: Columns, max_bytes: int, overhead: int) -> None:
    count, size = count_fitting(columns, max_bytes, record_overhead=overhead)
    sizes = [byte_size(slice_columns(columns, 0, n)) + overhead * n for n in range(columns.count + 1)]
    assert count == max(n for n, total in enumerate(sizes) if total <= max_bytes)
    assert size == sizes[max(count, 1)]


def test_bytes_hidden_under_nulls_do_not_count() -> None:
    assert binary_size(hidden_bytes_under_nulls()) == 3


def test_append_times_of_unstamped_columns_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="stamp"):
        append_times(columns_of([Record(payload=b"a")]))


@given(headers)
def test_headers_round_trip(items: tuple[Header, ...]) -> None:
    assert decode_headers(encode_headers(items)) == items
    assert decode_headers(memoryview(encode_headers(items))) == items


def test_headers_have_these_bytes() -> None:
    encoded = encode_headers((("ü", b"\x01"), ("", None), ("a", b"")))
    assert encoded.hex(" ") == "02 00 00 00 c3 bc 01 00 00 00 01 00 00 00 00 ff ff ff ff 01 00 00 00 61 00 00 00 00"


def test_a_header_key_that_utf8_cannot_hold_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="UTF-8"):
        encode_headers((("\ud800", b""),))


@given(headers.filter(bool), st.data())
def test_headers_cut_short_are_corrupt_or_fewer(items: tuple[Header, ...], data: st.DataObject) -> None:
    encoded = encode_headers(items)
    cut = encoded[: data.draw(st.integers(0, len(encoded) - 1))]
    boundaries = {encode_headers(items[:n]): items[:n] for n in range(len(items))}
    if cut in boundaries:
        assert decode_headers(cut) == boundaries[cut]
    else:
        with pytest.raises(CorruptBatch):
            decode_headers(cut)


@given(st.binary(max_size=40))
def test_any_bytes_are_headers_of_exactly_these_bytes_or_corrupt(data: bytes) -> None:
    try:
        items = decode_headers(data)
    except CorruptBatch:
        return
    assert encode_headers(items) == data


@given(st.lists(headers))
def test_headers_round_trip_through_arrow_lists(items: list[tuple[Header, ...]]) -> None:
    encoded = columns_of([Record(payload=b"", headers=one) for one in items]).headers
    lists = headers_to_arrow(encoded, len(items))
    assert lists.type == pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    lists.validate(full=True)
    assert lists.to_pylist() == [[{"key": k, "value": v} for k, v in one] or None for one in items]
    back = headers_from_arrow(lists)
    assert back == encoded if encoded is not None else back is None
    if items:
        tail = headers_from_arrow(lists.slice(1))
        expected = [encode_headers(one) for one in items[1:]]
        assert (tail.to_pylist() if tail is not None else [b""] * len(expected)) == expected


def test_empty_lists_are_no_headers() -> None:
    lists = pa.array([[], None], pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])))
    assert headers_from_arrow(lists) is None


def test_a_header_without_a_key_is_refused() -> None:
    lists = pa.array(
        [[{"key": None, "value": b""}]], pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    )
    with pytest.raises(InvalidArgument, match="key"):
        headers_from_arrow(lists)


def payload_bytes(columns: Columns) -> int:
    return sum(
        len(record.payload or b"") + len(record.key or b"") + len(encode_headers(record.headers))
        for record in records_of(columns, 1)
    )
