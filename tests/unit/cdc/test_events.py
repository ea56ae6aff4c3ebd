"""Change events as records, and records as messages."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from llog.batch.columns import Columns, decode_arrow_headers, decode_headers, encode_headers, slice_columns
from llog.batch.event_headers import HEADER
from llog.cdc.events import MESSAGE_SCHEMA, Event, Op, PayloadMode, decode_event, encode_event_headers, messages_of
from llog.log.engine import Batch
from llog.model import TopicPartition

FIRST_ID = 1 << 60
PARTS = ("message_id", "source_table", "op", "payload_mode")


def batch(headers: list[bytes] | None, start: int = 1) -> Batch:
    count = 3 if headers is None else len(headers)
    columns = Columns(
        values=pa.array([b"%d" % n for n in range(count)], pa.binary()),
        keys=None,
        timestamps=pa.array(range(1000, 1000 + count), pa.int64()),
        headers=None if headers is None else pa.array(headers, pa.binary()),
        append_runs=((count, 5),),
    )
    return Batch(TopicPartition("app.t", 2), start, columns)


def parts(table: pa.Table) -> list[tuple[Any, ...]]:
    return list(zip(*(table.column(name).to_pylist() for name in PARTS), strict=True))


def test_records_without_headers_are_messages_that_tell_of_no_change() -> None:
    table = messages_of(batch(None, start=7))
    assert table.schema == MESSAGE_SCHEMA
    assert table.column("topic").to_pylist() == ["app.t"] * 3
    assert table.column("partition").to_pylist() == [2] * 3
    assert table.column("offset").to_pylist() == [7, 8, 9]
    assert table.column("ts").cast(pa.int64()).to_pylist() == [1000, 1001, 1002]
    assert table.column("payload").to_pylist() == [b"0", b"1", b"2"]
    assert parts(table) == [(None,) * 4] * 3


@pytest.mark.parametrize("start", [0, 1, 4])
def test_events_of_one_table_are_told_apart_from_each_other(start: int) -> None:
    ops, modes = [*Op, Op.DELETE, Op.INSERT], [PayloadMode.KEY, PayloadMode.FULL, PayloadMode.DIFF, *PayloadMode][:5]
    headers = [
        encode_event_headers(op, mode, "chat.mëssages", range(FIRST_ID + n, FIRST_ID + n + 1))[0]
        for n, (op, mode) in enumerate(zip(ops, modes, strict=True))
    ]
    whole = batch(headers)
    cut = whole._replace(start_offset=1 + start, columns=slice_columns(whole.columns, start, 5))
    expected = [
        (FIRST_ID + n, "chat.mëssages", op.name, mode.name.lower())
        for n, (op, mode) in enumerate(zip(ops, modes, strict=True))
    ]
    assert parts(messages_of(cut)) == expected[start:]
    assert [decode_event(each) for each in headers] == [
        Event(op, mode, FIRST_ID + n, "chat.mëssages") for n, (op, mode) in enumerate(zip(ops, modes, strict=True))
    ]


def test_events_of_several_tables_and_plain_records_may_be_mixed() -> None:
    (one,) = encode_event_headers(Op.INSERT, PayloadMode.KEY, "a.aaa", range(1, 2))
    (other,) = encode_event_headers(Op.DELETE, PayloadMode.FULL, "b.bbb", range(2, 3))
    assert len(one) == len(other)
    two = encode_headers([("trace", b"x")]) + one
    assert parts(messages_of(batch([one, other]))) == [(1, "a.aaa", "INSERT", "key"), (2, "b.bbb", "DELETE", "full")]
    assert parts(messages_of(batch([two, b"", other]))) == [
        (1, "a.aaa", "INSERT", "key"),
        (None,) * 4,
        (2, "b.bbb", "DELETE", "full"),
    ]


def test_messages_have_the_headers_of_their_records() -> None:
    events = encode_event_headers(Op.INSERT, PayloadMode.KEY, "a.aaa", range(1, 5))
    traced = encode_headers([("trace", b"x"), ("trace", None), ("", b"\xff")])
    for encoded in (events, [traced, b"", *events[:2]]):
        whole = messages_of(batch(encoded))
        assert decode_arrow_headers(whole.column("headers")) == [decode_headers(each) for each in encoded]
        cut = pa.concat_tables([whole.slice(1, 2), whole.slice(0, 1), whole.slice(4)])
        assert decode_arrow_headers(cut.column("headers")) == [decode_headers(encoded[n]) for n in (1, 2, 0)]
    assert decode_arrow_headers(messages_of(batch(None)).column("headers")) == [(), (), ()]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"garbage",
        b"\x02" + bytes(15),
        b"\x01\x09\x01" + bytes(13),
        b"\x01\x01\x00" + bytes(13),
        b"\x01\x01\x01" + bytes(13) + b"\xff",
        None,
    ],
)
def test_a_header_of_that_name_that_is_no_events_is_passed_over(value: bytes | None, count: int) -> None:
    encoded = encode_headers([(HEADER, value)])
    assert decode_event(encoded) is None
    assert parts(messages_of(batch([encoded] * count))) == [(None,) * 4] * count
