"""The keyed log over HTTP: bytes in and out, pages, tails, one writer, and what is refused."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from devtools.servers.weed import S3Server
from llog.base.secret import Secret
from llog.broker.http.arrow import MEDIA_TYPE
from llog.broker.http.events import TAILS_MAX
from llog.broker.keyed.messages import ScanQuery
from llog.broker.keyed.pages import scan_page
from llog.keyed import KeyedLog, KeyedLogReader, SyncKeyedLog, follower
from llog.keyed.model import KEY_BYTES_MAX
from llog.log.opening import opened_log
from tests.broker.events import Events
from tests.broker.serving import Served
from tests.broker.test_process import running

_numbers = count()


@pytest.fixture
def url() -> str:
    return f"memory://keyed-broker-{next(_numbers)}"


@pytest.fixture
async def keyed(url: str) -> AsyncIterator[Served]:
    served = Served(keyed=url)
    yield served
    await served.close()


async def _append(served: Served, *pairs: tuple[object, object], **more: object) -> dict[str, Any]:
    records = [{"key": key, "value": value} for key, value in pairs]
    response = await served.client.post("/keyed/append", json={"records": records, **more})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


async def _get(served: Served, path: str, **asked: object) -> dict[str, Any]:
    query: dict[str, Any] = asked
    response = await served.client.get(f"/keyed/{path}", params=query)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


async def _all(served: Served, **asked: object) -> list[dict[str, Any]]:
    """The records of all pages of a scan."""
    records: list[dict[str, Any]] = []
    cursor: dict[str, str] = {}
    while True:
        page = await _get(served, "scan", **asked, **cursor)
        records += page["records"]
        if page["cursor"] is None:
            return records
        assert page["records"]
        cursor = {"cursor": page["cursor"]}


def _values(records: list[dict[str, Any]]) -> list[object]:
    return [record["value"] for record in records]


async def _refused(served: Served, path: str, status: int, code: str, **request: Any) -> str:
    response = await served.client.request(request.pop("method", "GET"), f"/keyed/{path}", **request)
    assert (response.status_code, response.json()["code"]) == (status, code), response.text
    detail: str = response.json()["detail"]
    return detail


# --- records


async def test_what_was_appended_is_scanned_and_counted_by_key(keyed: Served) -> None:
    assert await _append(keyed, ("a", "1"), ("b", "2")) == {"first_sequence": 0, "last_sequence": 1, "records": 2}
    assert (await _append(keyed, ("a", "3"), await_durable=False))["first_sequence"] == 2
    await keyed.client.post("/keyed/seal", json={})  # makes all of it durable
    page = await _get(keyed, "scan", key="a")
    assert [(each["sequence"], each["key"], each["value"]) for each in page["records"]] == [
        (0, "a", "1"),
        (2, "a", "3"),
    ]
    assert page["cursor"] is None
    assert page["records"][0]["append_time_ms"] > 1_700_000_000_000
    assert _values((await _get(keyed, "scan", key="a", start=1))["records"]) == ["3"]
    assert _values((await _get(keyed, "scan", key="a", end=2))["records"]) == ["1"]
    assert (await _get(keyed, "scan", key="a", end_time_ms=1))["records"] == []
    assert (await _get(keyed, "scan", key="unknown"))["records"] == []
    assert await _get(keyed, "count", key="a") == {"count": 2}
    assert await _get(keyed, "count", key="a", start=1, approximate="true") == {"count": 1}


async def test_any_bytes_are_a_key_and_a_value_in_json_and_in_an_address(keyed: Served) -> None:
    raw, empty = b"\x00\xff+/\xc3", b""
    encoded = {"base64": base64.b64encode(raw).decode()}
    await _append(keyed, (encoded, encoded), ("", ""), ("ü +", "text"))
    for query in ("key=%00%FF%2B%2F%C3", "key64=AP8rL8M", "key64=AP8rL8M="):
        found = (await keyed.client.get(f"/keyed/scan?{query}")).json()["records"]
        assert [(each["key"], each["value"]) for each in found] == [(encoded, encoded)], query
    assert _values((await _get(keyed, "scan", key=""))["records"]) == [""]
    assert _values((await keyed.client.get("/keyed/scan?key64=")).json()["records"]) == [""]
    assert _values((await _get(keyed, "scan", key="ü +"))["records"]) == ["text"]
    keys = (await _get(keyed, "keys"))["keys"]
    assert keys == [empty.decode(), encoded, "ü +"]


async def test_records_go_in_and_out_as_arrow_and_an_answer_can_be_sent_on_as_it_is(keyed: Served) -> None:
    table = pa.table({"key": pa.array([b"k\xff", b"l"]), "value": pa.array(["one", "two"])})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    headers = {"content-type": MEDIA_TYPE}
    posted = await keyed.client.post("/keyed/append", content=sink.getvalue().to_pybytes(), headers=headers)
    assert posted.json() == {"first_sequence": 0, "last_sequence": 1, "records": 2}
    accept = {"accept": MEDIA_TYPE}
    scanned = await keyed.client.get("/keyed/scan?prefix=", headers=accept)
    assert scanned.headers["content-type"] == MEDIA_TYPE
    found = pa.ipc.open_stream(scanned.content).read_all()
    assert found.schema.names == ["key", "sequence", "value", "append_time"]
    assert found.select(["key", "sequence", "value"]).to_pydict() == {
        "key": [b"k\xff", b"l"],
        "sequence": [0, 1],
        "value": [b"one", b"two"],
    }
    again = await keyed.client.post("/keyed/append", content=scanned.content, headers=headers)
    assert again.json()["first_sequence"] == 2
    first = await keyed.client.get("/keyed/scan?prefix=&limit=3", headers=accept)
    rest = await keyed.client.get(f"/keyed/scan?prefix=&cursor={first.headers['llog-cursor']}", headers=accept)
    assert "llog-cursor" not in rest.headers
    tables = [pa.ipc.open_stream(each.content).read_all() for each in (first, rest)]
    assert pa.concat_tables(tables)["sequence"].to_pylist() == [0, 2, 1, 3]
    keys = pa.ipc.open_stream((await keyed.client.get("/keyed/keys", headers=accept)).content).read_all()
    assert keys.to_pydict() == {"key": [b"k\xff", b"l"]}
    segments = pa.ipc.open_stream((await keyed.client.get("/keyed/segments", headers=accept)).content).read_all()
    assert segments.select(["segment_id", "records", "end_time_ms"]).to_pylist() == [
        {"segment_id": 0, "records": 4, "end_time_ms": None}
    ]


async def test_pages_of_a_scan_over_keys_and_segments_are_the_log_as_it_was_at_the_first(keyed: Served) -> None:
    for part in range(3):
        await _append(keyed, *((key, f"{key}{part}.{n}") for n in range(3) for key in ("x/a", "x/b", "y", "x/\u00ff")))
        await keyed.client.post("/keyed/seal", json={})
    whole = await _get(keyed, "scan", prefix="x/")
    assert len(whole["records"]) == 27
    for limit in (1, 2, 4, 26, 27):
        assert await _all(keyed, prefix="x/", limit=limit) == whole["records"]
    assert await _all(keyed, prefix="x/", max_bytes=200) == whole["records"]
    assert await _all(keyed, key_start="x/b", key_end="y", limit=5) == [
        each for each in whole["records"] if each["key"] >= "x/b"
    ]
    assert await _all(keyed, key="y", limit=2, start=3, end=30) == [
        each for each in (await _get(keyed, "scan", key="y"))["records"] if 3 <= each["sequence"] < 30
    ]
    first = await _get(keyed, "scan", prefix="x/", limit=20)
    await _append(keyed, ("x/a", "too late"), ("x/z", "too late"))
    rest = await _get(keyed, "scan", prefix="x/", cursor=first["cursor"])
    assert first["records"] + rest["records"] == whole["records"]


async def test_keys_are_listed_page_by_page_and_by_segment(keyed: Served) -> None:
    await _append(keyed, *((f"k{n}", "") for n in range(5)), ("other", ""))
    sealed = await keyed.client.post("/keyed/seal", json={"user_meta": {"base64": "/w=="}})
    assert sealed.json() == {"sealed": 0}
    await _append(keyed, ("k9", ""))
    assert await _get(keyed, "keys", prefix="k", limit=4) == {"keys": ["k0", "k1", "k2", "k3"], "more": True}
    assert await _get(keyed, "keys", prefix="k", after_key="k3") == {"keys": ["k4", "k9"], "more": False}
    assert (await _get(keyed, "keys", segment_start=1))["keys"] == ["k9"]
    segments = (await _get(keyed, "segments"))["segments"]
    assert [(each["segment_id"], each["start_seq"], each["records"]) for each in segments] == [(0, 0, 6), (1, 6, 1)]
    assert [each["user_meta"] for each in segments] == [{"base64": "/w=="}, None]
    assert len((await _get(keyed, "segments", start=6))["segments"]) == 1


# --- one writer


async def test_reads_alone_never_open_a_writer(url: str) -> None:
    other = await KeyedLog.open(url)
    await other.append([(b"k", b"1")])
    for role in ("all", "read"):
        served = Served(keyed=url, role=role)
        assert await _get(served, "count", key="k") == {"count": 1}
        assert len((await _get(served, "segments"))["segments"]) == 1
        assert (await _get(served, "keys"))["keys"] == ["k"]
        await served.close()
    await other.append([(b"k", b"2")])  # was not fenced
    await other.close()


async def test_a_broker_that_was_taken_over_from_refuses_appends_for_good_and_goes_on_reading(
    keyed: Served, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    await _append(keyed, ("k", "1"))
    assert "is now the writer of the keyed log" in caplog.text
    other = await KeyedLog.open(url)
    await other.append([(b"k", b"2")])
    async with asyncio.timeout(10):
        while (await _get(keyed, "count", key="k")) != {"count": 2}:  # until it notices, and asks a reader
            await asyncio.sleep(0.05)
    assert (await _get(keyed, "segments"))["segments"][0]["records"] == 2
    for _ in range(2):
        body = {"records": [{"key": "k", "value": "3"}]}
        detail = await _refused(keyed, "append", 409, "writer_fenced", method="POST", json=body)
        assert "restart this broker" in detail
    await _refused(keyed, "seal", 409, "writer_fenced", method="POST", json={})
    await other.append([(b"k", b"4")])  # nobody took it back
    reader = await KeyedLogReader.open(url)
    assert [entry.value async for entry in reader.scan(b"k")] == [b"1", b"2", b"4"]
    await reader.close()
    await other.close()
    metrics = (await keyed.client.get("/metrics")).json()
    assert metrics["llog_keyed_fenced"] == 1
    assert {"code": "writer_fenced", "value": 3} in metrics["llog_errors_total"]


async def test_a_restarted_broker_takes_the_log_back(keyed: Served, url: str) -> None:
    await _append(keyed, ("k", "1"))
    other = Served(keyed=url)
    await _append(other, ("k", "2"))
    body = {"records": [{"key": "k", "value": "3"}]}
    await _refused(keyed, "append", 409, "writer_fenced", method="POST", json=body)
    restarted = Served(keyed=url)
    await _append(restarted, ("k", "4"))
    await _refused(other, "append", 409, "writer_fenced", method="POST", json=body)
    assert _values((await _get(restarted, "scan", key="k"))["records"]) == ["1", "2", "4"]
    await other.close()
    await restarted.close()


async def test_an_append_that_meets_the_fence_is_not_acknowledged(keyed: Served, url: str) -> None:
    await _append(keyed, ("k", "1"))
    other = await KeyedLog.open(url)
    body = {"records": [{"key": "k", "value": "2"}]}
    await _refused(keyed, "append", 409, "writer_fenced", method="POST", json=body)
    await other.close()


async def test_many_first_appends_at_once_open_one_writer(keyed: Served) -> None:
    answers = await asyncio.gather(*(_append(keyed, ("k", str(n))) for n in range(20)))
    assert sorted(each["first_sequence"] for each in answers) == list(range(20))


async def test_a_broker_ends_although_its_keyed_log_is_out_of_reach(
    keyed: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await _append(keyed, ("k", "1"))
    close, waits = KeyedLog.close, 0

    async def stuck(log: KeyedLog) -> None:
        nonlocal waits
        try:
            waits += 1
            await asyncio.Event().wait()
        finally:
            waits += 1
            await asyncio.Event().wait()

    held = keyed.broker._keyed._handlers._held  # type: ignore[union-attr]
    writer = held._writer.now
    assert writer is not None
    with monkeypatch.context() as patch:
        patch.setattr(KeyedLog, "close", stuck)
        patch.setattr("llog.broker.keyed.holder.CLOSE_LIMIT_S", 0.05)
        patch.setattr("llog.broker.keyed.holder._CANCEL_S", 0.05)
        await keyed.broker.close()
    assert waits == 2
    assert "is it out of reach?" in caplog.text
    await close(writer)


async def test_a_log_in_a_bucket_is_served_with_the_credentials_of_the_settings(s3_server: S3Server) -> None:
    s3_server.create_bucket("keyed-broker")
    served = Served(
        keyed="s3://keyed-broker/log",
        s3_endpoint_url=s3_server.endpoint,
        s3_region_name=s3_server.region,
        s3_access_key_id=s3_server.access_key,
        s3_secret_access_key=Secret(s3_server.secret_key),
    )
    await _refused(served, "scan?key=k", 404, "keyed_log_not_found")
    async with opened_log(served.settings):  # where the lease of the writer is
        await _append(served, ("k", "1"))
        assert _values((await _get(served, "scan", key="k"))["records"]) == ["1"]
        async with Events(served, "/keyed/tail?key=k&after=-1") as events:
            assert await tailed(events, 1) == [(0, "1")]
        await served.close()


# --- tails


async def tailed(events: Events, number: int) -> list[tuple[int, object]]:
    found = await events.records(number)
    assert [id for id, _ in found] == [str(data["sequence"]) for _, data in found]
    return [(data["sequence"], data["value"]) for _, data in found]


async def test_a_tail_goes_on_behind_the_last_event_without_loss_or_repetition(keyed: Served) -> None:
    await _append(keyed, *(("k", str(n)) for n in range(3)), ("other", "x"))
    async with Events(keyed, "/keyed/tail?key=k&after=-1") as events:
        assert await tailed(events, 2) == [(0, "0"), (1, "1")]
    async with Events(keyed, "/keyed/tail?key=k&after=-1", last="1") as events:
        assert await tailed(events, 1) == [(2, "2")]
        await _append(keyed, ("k", "3"))
        assert await tailed(events, 1) == [(4, "3")]
    async with Events(keyed, "/keyed/tail?prefix=&after=2") as events:
        assert await tailed(events, 2) == [(3, "x"), (4, "3")]
    metrics = (await keyed.client.get("/metrics")).json()
    assert metrics["llog_keyed_tails"] == 0


async def test_a_tail_that_is_cut_off_before_any_record_knows_where_it_began(keyed: Served) -> None:
    await _append(keyed, ("k", "old"))
    async with Events(keyed, "/keyed/tail?key=k") as events:
        begun = await events.next()
        assert begun is not None
        assert "data" not in begun
    await _append(keyed, ("k", "while it was away"))
    async with Events(keyed, "/keyed/tail?key=k", last=begun["id"]) as events:
        assert await tailed(events, 1) == [(1, "while it was away")]


async def test_a_tail_follows_the_next_writer_too(keyed: Served, url: str) -> None:
    await _append(keyed, ("k", "1"))
    async with Events(keyed, "/keyed/tail?key=k&after=-1") as events:
        await tailed(events, 1)
        other = await KeyedLog.open(url)
        sequence = await other.append([(b"k", b"2")])
        assert await tailed(events, 1) == [(sequence, "2")]
        await other.close()


async def test_a_tail_tells_that_it_lives_and_ends_with_the_broker(keyed: Served) -> None:
    await _append(keyed, ("k", "1"))
    async with Events(keyed, "/keyed/tail?key=k&heartbeat_ms=100") as events:
        assert await events.next() == {"retry": "1000", "id": "0"}
        for _ in range(2):
            assert await events.next() == {"": "still here"}
        keyed.broker.stopping.set()
        assert await events.next() is None


async def test_the_head_of_a_tail_has_an_end(keyed: Served) -> None:
    response = await keyed.client.head("/keyed/tail?key=k")
    assert (response.status_code, response.content) == (200, b"")


async def test_there_is_an_end_to_how_many_may_follow(keyed: Served) -> None:
    await _append(keyed, ("k", "1"))
    keyed.broker.metrics.keyed_tails = TAILS_MAX
    await _refused(keyed, "tail?key=k", 429, "overloaded")


def test_a_broker_that_is_terminated_ends_its_tails_and_leaves_no_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLOG_KEYED", "file://./keyed")
    with running(tmp_path, "serve") as broker:
        body = {"records": [{"key": "k", "value": "v"}]}
        assert broker.client.post("/keyed/append", json=body).json()["first_sequence"] == 0
        with broker.client.stream("GET", "/keyed/tail?key=k&after=-1") as response:
            lines = response.iter_lines()
            while next(lines) != "id: 0":
                pass
            broker.process.terminate()
            assert list(lines)[-1] == ""
        assert broker.process.wait(60) == 0
        assert "is now the writer" in broker.errors
        assert "Traceback" not in broker.errors
    with SyncKeyedLog.open(f"file://{tmp_path}/keyed") as log:
        assert log.append([(b"k", b"w")]) == 1


# --- refusals and numbers


async def test_without_a_setting_the_routes_say_how_to_turn_them_on(served: Served) -> None:
    for method, path in (("POST", "append"), ("GET", "scan?key=k"), ("GET", "tail?key=k"), ("GET", "segments")):
        detail = await _refused(served, path, 404, "keyed_log_not_configured", method=method)
        assert "LLOG_KEYED" in detail


async def test_a_log_that_nobody_has_begun_is_not_found_until_somebody_does(keyed: Served) -> None:
    await _refused(keyed, "scan?key=k", 404, "keyed_log_not_found")
    await _refused(keyed, "tail?key=k", 404, "keyed_log_not_found")
    await _append(keyed, ("k", "1"))
    assert _values((await _get(keyed, "scan", key="k"))["records"]) == ["1"]


async def test_roles_split_appends_from_reads(keyed: Served, url: str) -> None:
    await _append(keyed, ("k", "1"))
    reads, writes = Served(keyed=url, role="read"), Served(keyed=url, role="write")
    for path in ("append", "seal"):
        await _refused(reads, path, 421, "wrong_role", method="POST", json={})
    for path in ("scan?key=k", "count?key=k", "keys", "segments", "tail?key=k"):
        await _refused(writes, path, 421, "wrong_role")
    await reads.close()
    await writes.close()


@pytest.mark.parametrize(
    ("query", "named"),
    [
        ("scan", "give one of key, prefix"),
        ("scan?key=a&prefix=b", "give one of key, prefix"),
        ("scan?key=a&key=b", "'key' more than once"),
        ("scan?key=a&key64=Yg", "'key' more than once"),
        ("scan?key64=%2B%2F", "key64 is wrong: '+/' is not base64url"),
        ("scan?key=a&limit=0", "limit"),
        ("scan?key=a&limit=100001", "limit"),
        ("scan?key=a&max_bytes=99999999", "max_bytes"),
        ("scan?key=a&start=-1", "start"),
        ("scan?key=a&end=9223372036854775808", "end"),
        ("scan?key=a&cursor=%FF", "no text"),
        ("scan?key=a&cursor=abc", "cursor"),
        ("scan?key=a&nonsense=1", "nonsense"),
        ("scan?" + "&".join(f"a{n}=1" for n in range(17)), "fields"),
        ("count", "key"),
        ("keys?after=x", "after"),
        ("segments?start=x", "start"),
        ("tail", "give either key or prefix"),
        ("tail?key=a&after=-2", "after"),
        ("tail?key=a&heartbeat_ms=1", "heartbeat_ms"),
    ],
)
async def test_a_query_that_is_wrong_is_refused_by_name(keyed: Served, query: str, named: str) -> None:
    await _append(keyed, ("a", ""))
    assert named in await _refused(keyed, query, 400, "invalid_argument")


async def test_headers_that_are_wrong_are_refused(keyed: Served) -> None:
    await _append(keyed, ("a", ""))
    bad = {"last-event-id": "x"}
    assert "last_event_id" in await _refused(keyed, "tail?key=a", 400, "invalid_argument", headers=bad)
    plain = {"accept": "text/plain"}
    assert MEDIA_TYPE in await _refused(keyed, "scan?key=a", 400, "invalid_argument", headers=plain)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"records": []},
        {"records": [{"key": "k"}]},
        {"records": [{"key": None, "value": "v"}]},
        {"records": [{"key": "k", "value": {"base64": "?"}}]},
        {"records": [{"key": "k", "value": "\ud800"}]},
        {"records": [{"key": "k", "value": "v", "timestamp": 1}]},
        [["k", "v"]],
    ],
)
async def test_a_body_that_is_wrong_is_refused_and_opens_no_writer(keyed: Served, url: str, body: object) -> None:
    content = json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    await _refused(keyed, "append", 400, "invalid_argument", method="POST", content=content, headers=headers)
    await _refused(keyed, "scan?key=k", 404, "keyed_log_not_found")


@pytest.mark.parametrize(
    "table",
    [
        pa.table({"key": ["k"]}),
        pa.table({"key": ["k"], "value": [1]}),
        pa.table({"key": ["k"], "value": ["v"], "headers": ["h"]}),
        pa.table({"key": pa.array([None], pa.binary()), "value": ["v"]}),
        pa.table({"key": ["k"], "value": pa.array(["v"]).dictionary_encode()}),
    ],
)
async def test_an_arrow_stream_that_is_wrong_is_refused(keyed: Served, table: pa.Table) -> None:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    content, headers = sink.getvalue().to_pybytes(), {"content-type": MEDIA_TYPE}
    await _refused(keyed, "append", 400, "invalid_argument", method="POST", content=content, headers=headers)


async def test_what_is_too_large_is_refused(url: str) -> None:
    served = Served(keyed=url, request_max_bytes=200_000)
    long = {"records": [{"key": "k" * 65_537, "value": "v"}]}
    await _refused(served, "append", 413, "record_too_large", method="POST", json=long)
    await _refused(served, "append", 413, "request_too_large", method="POST", json=[long] * 4)
    meta = {"user_meta": "m" * 65_537}
    await _refused(served, "seal", 413, "record_too_large", method="POST", json=meta)
    await served.close()


async def test_what_is_appended_and_scanned_is_counted(keyed: Served) -> None:
    await _append(keyed, ("key", "value"), ("k", ""))
    await _append(keyed, ("key", "more"))
    await _get(keyed, "scan", key="key")
    metrics = (await keyed.client.get("/metrics")).json()
    assert metrics["llog_keyed_appends_total"] == 2
    assert metrics["llog_keyed_records_total"] == 3
    assert metrics["llog_keyed_bytes_total"] == 16
    assert metrics["llog_keyed_scans_total"] == 1
    assert metrics["llog_keyed_scanned_records_total"] == 2
    assert metrics["llog_keyed_fenced"] == 0
    assert "llog_keyed_appends_total 2" in (await keyed.client.get("/metrics/prometheus")).text


async def test_a_cursor_from_beyond_the_log_costs_the_broker_neither_its_writer_nor_its_reader(
    keyed: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(follower, "CATCH_UP_S", 0.05)
    await _append(keyed, ("k", "1"))
    cursor = base64.urlsafe_b64encode(msgspec.msgpack.encode([10**15, 0, b"k"])).rstrip(b"=").decode()
    detail = await _refused(keyed, "scan", 503, "not_seen_yet", params={"prefix": "", "cursor": cursor})
    assert "is it the same log?" in detail
    assert (await _append(keyed, ("k", "2")))["first_sequence"] == 1
    assert caplog.text.count("is now the writer") == 1


async def test_a_scan_goes_on_behind_a_page_that_ends_with_the_longest_key(url: str) -> None:
    longest = b"k" * KEY_BYTES_MAX
    async with await KeyedLog.open(url) as log:
        await log.append([(longest, b"1"), (b"z", b"2")])
        first = await scan_page(log, ScanQuery(prefix=b"", limit=1))
        second = await scan_page(log, ScanQuery(prefix=b"", limit=5, cursor=first.next_token))
    assert [batch.column("value").to_pylist() for batch in first.batches + second.batches] == [[b"1"], [b"2"]]


async def test_parameters_that_are_too_long_for_an_address_go_into_the_body(keyed: Served) -> None:
    long = "k" * KEY_BYTES_MAX
    await _append(keyed, (long, "1"), (long, "2"), (long[:-1] + "l", "3"))
    counted = await keyed.client.post("/keyed/count", data={"key": long})
    assert counted.json()["count"] == 2, counted.text
    found: list[object] = []
    asked: dict[str, str] = {"prefix": "k" * 1000, "limit": "1"}
    while True:
        page = await keyed.client.post("/keyed/scan", data=asked)
        assert page.status_code == 200, page.text
        found += _values(page.json()["records"])
        if page.json()["cursor"] is None:
            break
        asked["cursor"] = page.json()["cursor"]
    assert found == ["1", "2", "3"]
    await _refused(keyed, "scan", 400, "invalid_argument", method="POST", json={"key": "k"})
