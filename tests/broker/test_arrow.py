"""Records as Arrow streams, out and in, and bodies that are none."""

from __future__ import annotations

import asyncio
import os
from datetime import UTC, datetime
from typing import Any

import httpx
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llog.batch.columns import columns_of, stamp
from llog.broker.auto_creation import AutoCreatingProducer
from llog.broker.http.arrow import MEDIA_TYPE, SCHEMA, decode_records, encode_records
from llog.engines.object.compaction.compactor import Compactor
from llog.engines.object.retention import trim
from llog.errors import InvalidArgument, LogOwned
from llog.log.engine import Batch
from llog.model import Record, TopicPartition
from tests.broker.serving import Served

PATH = "/topics/t/partitions/0/records"
WHOLE = pa.table(
    {
        "timestamp": pa.array([1, None, 3], pa.timestamp("ms", tz="UTC")),
        "key": pa.array([b"k", None, b"\xff"], pa.binary()),
        "value": pa.array([b"v", b"", None], pa.binary()),
        "headers": pa.array(
            [[{"key": "h", "value": b"x"}, {"key": "n", "value": None}], None, []], SCHEMA.field(4).type
        ),
    }
)


def _stream(table: pa.Table, **options: Any) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table)
    data: bytes = sink.getvalue().to_pybytes()
    return data


async def _post(served: Served, body: bytes, kind: str = MEDIA_TYPE) -> httpx.Response:
    return await served.client.post(PATH, content=body, headers={"content-type": kind})


async def _get(served: Served, offset: int, **asked: object) -> tuple[pa.Table, httpx.Headers]:
    query: dict[str, Any] = {"offset": offset, **asked}
    response = await served.client.get(PATH, params=query, headers={"accept": MEDIA_TYPE})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == MEDIA_TYPE
    return pa.ipc.open_stream(response.content).read_all(), response.headers


async def test_what_was_sent_as_arrow_comes_back_as_arrow_and_as_json(served: Served) -> None:
    response = await _post(served, _stream(WHOLE))
    assert response.json() == {"topic": "t", "partition": 0, "start_offset": 1, "end_offset": 3}
    table, headers = await _get(served, 1)
    assert table.schema == SCHEMA
    assert table["offset"].to_pylist() == [1, 2, 3]
    assert table["key"].to_pylist() == [b"k", None, b"\xff"]
    assert table["value"].to_pylist() == [b"v", b"", None]
    assert table["headers"].to_pylist() == [[{"key": "h", "value": b"x"}, {"key": "n", "value": None}], None, None]
    times = table["timestamp"].to_pylist()
    assert times[0] == datetime(1970, 1, 1, 0, 0, 0, 1000, UTC)
    assert times[1] > datetime(2020, 1, 1, tzinfo=UTC)
    assert (headers["llog-log-start-offset"], headers["llog-next-offset"]) == ("1", "4")
    assert (headers["llog-next-fetch-offset"], headers["llog-topic-directory"]) == ("4", "t")
    records = (await served.consume("t", 1))["records"]
    assert records[0]["headers"] == [["h", "x"], ["n", None]]
    assert records[2]["payload"] is None


async def test_a_client_that_catches_up_gets_large_pieces_of_compacted_blobs(served: Served) -> None:
    values = [os.urandom(300_000) for _ in range(100)]
    for first in range(0, 100, 5):
        await _post(served, _stream(pa.table({"value": pa.array(values[first : first + 5], pa.binary())})))
    assert (await Compactor(served.log).compact_once(TopicPartition("t", 0), force=True)).records == 100
    served.blobs.counts.count.clear()
    served.blobs.counts.bytes.clear()
    other = Served(beside=served)
    found: list[bytes] = []
    while len(found) < 100:
        found += (await _get(other, len(found) + 1))[0]["value"].to_pylist()
    assert found == values
    fetched = served.blobs.counts.bytes["range_get"]
    assert fetched < 1.01 * sum(map(len, values))
    assert fetched / served.blobs.counts.count["range_get"] >= 4 << 20
    await other.close()


async def test_an_answer_can_be_sent_on_as_it_is(served: Served) -> None:
    await served.produce("t", {"value": "a", "key": "k", "timestamp": 5}, "b")
    answer = await served.client.get(PATH, params={"offset": 1}, headers={"accept": MEDIA_TYPE})
    assert (await _post(served, answer.content)).json()["start_offset"] == 3
    table, _ = await _get(served, 1)
    assert table["value"].to_pylist() == [b"a", b"b"] * 2
    assert table["timestamp"].to_pylist()[0] == table["timestamp"].to_pylist()[2]


@pytest.mark.parametrize(
    "table",
    [
        pa.table({"value": pa.array(["ä"])}),
        pa.table({"value": pa.array([b"\xc3\xa4"], pa.large_binary()), "key": pa.array([None], pa.large_string())}),
        pa.table({"value": pa.array([b"\xc3\xa4"]), "timestamp": pa.array([-1], pa.timestamp("us"))}),
        pa.table({"value": pa.array([b"\xc3\xa4"]), "timestamp": pa.array([7], pa.int64())}),
        pa.table({"offset": pa.array([77], pa.int64()), "value": pa.array([b"\xc3\xa4"])}),
    ],
)
async def test_text_large_types_and_other_units_are_taken(served: Served, table: pa.Table) -> None:
    assert (await _post(served, _stream(table))).json()["start_offset"] == 1
    found, _ = await _get(served, 1)
    assert found["value"].to_pylist() == ["ä".encode()]
    if "timestamp" in table.column_names:
        wanted = 7 if table.schema.field("timestamp").type == pa.int64() else -1
        assert found["timestamp"].cast(pa.int64()).to_pylist() == [wanted]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"\xff\xff\xff\xff\xff\xff\xff\x7f" + b"x" * 100,
        _stream(WHOLE)[:-50],
        _stream(WHOLE.slice(0, 0)),
        _stream(WHOLE, compression="zstd"),
        _stream(WHOLE, compression="lz4"),
        _stream(pa.table({"value": pa.array([b"a"]).dictionary_encode()})),
        _stream(pa.table({"key": pa.array([b"a"])})),
        _stream(pa.table({"value": pa.array([1])})),
        _stream(pa.table({"value": pa.nulls(5)})),
        _stream(pa.table({"value": pa.array([b"a"]), "valeu": pa.array([b"a"])})),
        _stream(pa.table([pa.array([b"a"]), pa.array([b"b"])], names=["value", "value"])),
        _stream(pa.table({"value": pa.array([b"a"]), "timestamp": pa.array([1 << 62], pa.timestamp("s"))})),
        _stream(pa.table({"value": pa.array([b"a"]), "headers": pa.array([[{"key": None, "value": b""}]], SCHEMA.field(4).type)})),  # noqa: E501
    ],
)  # fmt: skip
async def test_a_body_that_is_no_stream_of_records_is_refused_and_appends_nothing(served: Served, body: bytes) -> None:
    response = await _post(served, body)
    assert response.status_code == 400, response.text
    assert response.json()["code"] == "invalid_argument"
    assert (await served.client.get("/topics")).json() == {"topics": []}
    assert served.broker.metrics.buffered_bytes == 0


async def test_another_content_type_or_a_body_over_the_limit_is_refused() -> None:
    served = Served(request_max_bytes=1024)
    assert (await _post(served, _stream(WHOLE), "application/json")).status_code == 400
    large = pa.table({"value": pa.array([b"x" * 2000])})
    assert (await _post(served, _stream(large))).json()["code"] == "request_too_large"
    await served.close()


@given(st.data())
def test_no_damage_to_a_stream_does_more_than_fail(data: st.DataObject) -> None:
    body = bytearray(_stream(WHOLE))
    for _ in range(data.draw(st.integers(1, 8))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        columns = decode_records(body[: data.draw(st.integers(len(body) // 2, len(body)))])
    except InvalidArgument:
        return
    assert columns.count >= 1
    assert len(columns.values.to_pylist()) == columns.count


def test_many_small_batches_become_one() -> None:
    columns = decode_records(_stream(pa.table({"value": pa.array([b"a", b"b"])})))._replace(append_runs=((2, 5),))
    batches = [Batch(TopicPartition("t", 0), offset, columns) for offset in (1, 3, 9)]
    reader = pa.ipc.open_stream(encode_records(batches))
    found = list(reader)
    assert len(found) == 1
    assert found[0]["offset"].to_pylist() == [1, 2, 3, 4, 9, 10]


def test_small_batches_that_differ_in_what_they_have_become_one() -> None:
    tp = TopicPartition("t", 0)
    full = Record(payload=b"a", key=b"k", timestamp=7, headers=(("h", b"x"),))
    parts = [(1, [full]), (5, [Record(payload=None)]), (9, [Record(payload=b"c", key=b"l"), full])]
    batches = [Batch(tp, start, stamp(columns_of(records), start)) for start, records in parts]
    table = pa.ipc.open_stream(encode_records(batches)).read_all()
    assert table["offset"].to_pylist() == [1, 5, 9, 10]
    assert [time.microsecond for time in table["timestamp"].to_pylist()] == [7000, 5000, 9000, 7000]
    assert table["key"].to_pylist() == [b"k", None, b"l", b"k"]
    assert table["value"].to_pylist() == [b"a", None, b"c", b"a"]
    headers = [{"key": "h", "value": b"x"}]
    assert table["headers"].to_pylist() == [headers, None, None, headers]


async def test_pages_hand_out_every_record_once_and_stop_where_they_are_told(served: Served) -> None:
    for n in range(0, 100, 10):
        await served.produce("t", *(f"{i:04}" for i in range(n, n + 10)))
    offset, values = 1, []
    while offset < 95:
        table, headers = await _get(served, offset, max_bytes=200, stop=95)
        values += table["value"].to_pylist()
        offset = int(headers["llog-next-fetch-offset"])
        assert table["offset"].to_pylist()[-1] == offset - 1
    assert values == [f"{i:04}".encode() for i in range(94)]
    table, headers = await _get(served, 95, stop=95, max_wait_ms=60_000)
    assert table.num_rows == 0
    assert headers["llog-next-fetch-offset"] == "95"


async def test_a_fetch_at_the_end_waits_for_the_next_record(served: Served) -> None:
    await served.produce("t", "a")
    table, _ = await _get(served, 2)
    assert table.num_rows == 0
    assert table.schema == SCHEMA
    waiting = asyncio.ensure_future(_get(served, 2, max_wait_ms=60_000))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await served.produce("t", "b")
    assert (await waiting)[0]["value"].to_pylist() == [b"b"]


async def test_an_offset_outside_the_bounds_is_a_problem_with_them(served: Served) -> None:
    await served.produce("t", "a", "b", "c")
    await trim(served.log, TopicPartition("t", 0), 3)
    for offset in (2, 5):
        response = await served.client.get(PATH, params={"offset": offset})
        assert response.status_code == 416
        found = response.json()
        assert (found["code"], found["log_start_offset"], found["next_offset"]) == ("offset_out_of_range", 3, 4)
    assert served.broker.metrics.errors["offset_out_of_range"] == 2


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        (f"{PATH}?offset=1&last=1", 400, "invalid_argument"),
        (f"{PATH}?limit=0", 400, "invalid_argument"),
        (f"{PATH}?offset=0", 400, "invalid_argument"),
        (f"{PATH}?offset=x", 400, "invalid_argument"),
        (f"{PATH}?offset=1&max_bytes=999999999", 400, "invalid_argument"),
        (f"{PATH}?offset=1&of=1", 400, "invalid_argument"),
        ("/topics/t/partitions/-1/records?offset=1", 400, "invalid_argument"),
        ("/topics/t/partitions/x/records?offset=1", 400, "invalid_argument"),
        ("/topics/t/partitions/9/records?offset=1", 404, "partition_not_initialized"),
        ("/topics/u/partitions/0/records?offset=1", 404, "topic_not_found"),
    ],
)
async def test_a_fetch_that_cannot_be_is_a_problem(served: Served, path: str, status: int, code: str) -> None:
    await served.produce("t", "a")
    response = await served.client.get(path)
    assert (response.status_code, response.json()["code"]) == (status, code)


async def test_a_form_that_is_not_offered_is_refused(served: Served) -> None:
    await served.produce("t", "a")
    response = await served.client.get(PATH, params={"offset": 1}, headers={"accept": "text/csv"})
    assert response.status_code == 400
    assert MEDIA_TYPE in response.json()["detail"]


async def test_the_offset_of_a_time_is_told(served: Served) -> None:
    await served.produce("t", *({"value": "v", "timestamp": ms} for ms in (10, 20, 30)))
    for ms, offset in ((0, 1), (20, 2), (21, 3), (31, 4)):
        found = await served.client.get("/topics/t/partitions/0/offset", params={"timestamp_ms": ms})
        assert found.json() == {"offset": offset}
    assert (await served.client.get("/topics/t/partitions/0/offset")).status_code == 400


async def test_a_topic_tells_what_a_reader_plans_with(served: Served) -> None:
    await served.client.post("/topics", json={"name": "t", "partitions": 2})
    await served.produce("t", "a", "b", partition=1)
    found = (await served.client.get("/topics/t")).json()
    assert (found["engine"], found["directory"], found["partitions"]) == ("object", "t", 2)
    assert found["bounds"] == [
        {"partition": 0, "log_start_offset": 1, "next_offset": 1},
        {"partition": 1, "log_start_offset": 1, "next_offset": 3},
    ]


async def test_a_broker_that_stops_waits_for_the_owner_of_records_that_it_sent_on(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrived, go = asyncio.Event(), asyncio.Event()

    async def own(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        arrived.set()
        await go.wait()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")
        writer.close()

    async def refuse(*_: object) -> list[LogOwned]:
        error = LogOwned("another broker owns it")
        error.address = f"http://127.0.0.1:{owner.sockets[0].getsockname()[1]}"
        return [error]

    monkeypatch.setattr(AutoCreatingProducer, "append", refuse)
    async with await asyncio.start_server(own, "127.0.0.1", 0) as owner:
        posting = asyncio.ensure_future(_post(served, _stream(pa.table({"value": [b"a"]}))))
        await arrived.wait()
        served.broker.stopping.set()
        await asyncio.sleep(0.05)
        go.set()
        assert (await posting).status_code == 200
