"""Topics for consumer groups over HTTP: consume, ack, release, and web pages that may ask."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pyarrow as pa
import pytest

from llog.batch.columns import encode_headers
from llog.broker.http.arrow import MEDIA_TYPE
from llog.cdc.events import Op, PayloadMode, encode_event_headers
from llog.engines.routing import EngineAppender
from llog.errors import ConfigurationError
from llog.groups.messages import CONSUMED_SCHEMA
from llog.log.engine import AppendGroup
from llog.model import Record
from tests.broker.serving import Served

MESSAGE_ID = (1 << 60) + 7
EVENT_HEADER = (b"\1\2\1\0\0\0\0\0" + MESSAGE_ID.to_bytes(8, "little") + b"chat.messages").decode()


async def post(served: Served, path: str, **asked: Any) -> httpx.Response:
    return await served.client.post(f"/topics/{path}", json=asked)


async def consumed(served: Served, **asked: Any) -> list[dict[str, Any]]:
    response = await post(served, "consume", **{"topic": "t", "group_id": "g", **asked})
    assert response.status_code == 200, response.text
    found: list[dict[str, Any]] = response.json()["messages"]
    return found


async def event(served: Served) -> None:
    from llog.batch.columns import decode_headers

    (encoded,) = encode_event_headers(Op.UPDATE, PayloadMode.KEY, "chat.messages", range(MESSAGE_ID, MESSAGE_ID + 1))
    record = Record(payload=b'{"id": 7}', key=b"7", timestamp=1_767_225_600_123, headers=decode_headers(encoded))
    assert encode_headers(record.headers) == encoded
    await served.client.post("/topics", json={"name": "t"})
    await EngineAppender(served.log).append([AppendGroup(topic="t", partition=0, records=[record])])


async def test_a_message_has_the_fields_of_a_change_event_and_its_id_as_text(served: Served) -> None:
    await event(served)
    response = await post(served, "consume", topic="t", group_id="g", start="Earliest", limit=10, member="m")
    assert response.json() == {
        "messages": [
            {
                "topic_id": "t",
                "partition_id": 0,
                "offset": 1,
                "message_id": str(MESSAGE_ID),
                "source_table": "chat.messages",
                "op": "UPDATE",
                "ts": "2026-01-01T00:00:00.123Z",
                "payload_mode": "key",
                "key": "7",
                "payload": {"id": 7},
                "headers": [["llog-event", EVENT_HEADER]],
                "attempt": 1,
            }
        ],
        "member": "m",
    }
    response = await post(served, "ack", topic="t", group_id="g", partition_id=0, upto_offset=1, member="m")
    assert response.json() == {"committed": {"0": 2}}


async def test_the_requests_of_the_document_need_no_member(served: Served) -> None:
    await served.produce("t", "1", "2", "3")
    assert [each["offset"] for each in await consumed(served, start="Earliest", limit=2)] == [1, 2]
    response = await post(served, "ack", topic="t", group_id="g", partition_id=0, upto_offset=2)
    assert response.json() == {"committed": {"0": 3}}
    assert [each["offset"] for each in await consumed(served, start={"Offset": 1}, limit=1)] == [1]
    assert [each["offset"] for each in await consumed(served)] == [3]


async def test_a_consume_without_a_name_gets_one_that_its_ack_may_carry(served: Served) -> None:
    await served.produce("t", "1", "2", "3", "4")
    answers = [(await post(served, "consume", topic="t", group_id="g", limit=2)).json() for _ in range(2)]
    crashed, alive = (each["member"] for each in answers)
    assert crashed != alive
    ack = {"topic": "t", "group_id": "g", "upto_offset": 4}
    assert (await post(served, "ack", **ack, member=alive)).json() == {"committed": {"0": 1}}
    asked = {"topic": "t", "group_id": "g", "limit": 1}
    response = await served.client.post("/topics/consume", json=asked, headers={"accept": MEDIA_TYPE})
    assert response.headers["llog-member"] not in (crashed, alive, "")
    assert (await post(served, "ack", **ack)).json() == {"committed": {"0": 5}}, "without one, it is for all of them"
    plain = (await post(served, "consume", topic="t", limit=1)).json()
    assert plain["member"] == ""


async def test_an_ack_of_what_others_hold_says_who_does(served: Served) -> None:
    await served.produce("t", "1", "2", "3")
    await consumed(served, member="w1", limit=2)
    asked = {"topic": "t", "group_id": "g", "upto_offset": 2}
    assert (await post(served, "ack", **asked, member="w2")).json() == {
        "committed": {"0": 1},
        "held_by_others": {"0": [{"start": 1, "end": 2, "member": "w1"}]},
        "warnings": ["acknowledged nothing: of t/0, offsets 1 to 2 are held by 'w1'"],
    }
    assert (await post(served, "ack", **asked, member="w1")).json() == {"committed": {"0": 3}}
    await consumed(served)
    refused = (await post(served, "ack", **asked | {"upto_offset": 3}, member="w1")).json()
    assert refused["warnings"] == ["acknowledged nothing: of t/0, offset 3 is held by a member without a name"]


@pytest.mark.parametrize(
    ("record", "payload"),
    [
        ('{"a": [1, 2.5, null]}', {"a": [1, 2.5, None]}),
        ("text", "text"),
        ('"text"', "text"),
        ("NaN", "NaN"),
        ("[" * 5000 + "]" * 5000, "[" * 5000 + "]" * 5000),
        ({"base64": "/w=="}, {"base64": "/w=="}),
        ({"base64": ""}, ""),
        ({"value": None, "key": "k"}, None),
        ('{"a": "\\u0000"} x', '{"a": "\\u0000"} x'),
    ],
)
async def test_a_payload_is_json_or_text_or_base64(served: Served, record: Any, payload: Any) -> None:
    await served.produce("t", record)
    (message,) = await consumed(served)
    assert message["payload"] == payload
    assert (message["message_id"], message["op"], message["source_table"]) == (None, None, None)


async def test_any_client_can_append_a_header_that_looks_like_an_events_and_stops_nobody(served: Served) -> None:
    await served.produce("t", {"value": "x", "headers": [["llog-event", "garbage"]]})
    (message,) = await consumed(served)
    assert (message["payload"], message["op"]) == ("x", None)


async def test_a_message_has_the_headers_of_its_record(served: Served) -> None:
    headers = [["trace", "x"], ["trace", None], ["raw", {"base64": "/w=="}]]
    await served.produce("t", {"value": "1", "headers": headers}, "2")
    assert [each["headers"] for each in await consumed(served)] == [headers, []]


async def test_messages_come_as_arrow_if_asked_for(served: Served) -> None:
    await event(served)
    asked = {"topic": "t", "group_id": "g", "member": "m"}
    response = await served.client.post("/topics/consume", json=asked, headers={"accept": MEDIA_TYPE})
    assert response.headers["content-type"] == MEDIA_TYPE
    assert response.headers["llog-member"] == "m"
    with pa.ipc.open_stream(response.content) as reader:
        table = reader.read_all()
    assert table.schema == CONSUMED_SCHEMA
    assert table.to_pylist()[0]["message_id"] == MESSAGE_ID


async def test_partitions_are_acknowledged_one_by_one_or_together(served: Served) -> None:
    await served.client.post("/topics", json={"name": "t", "partitions": 2})
    for partition in range(2):
        await served.produce("t", "a", "b", partition=partition)
    await consumed(served)
    refused = await post(served, "ack", topic="t", group_id="g", upto_offset=1)
    assert refused.status_code == 400
    assert "has 2 partitions" in refused.json()["detail"]
    both = [{"partition_id": 0, "offset": 2}, {"partition_id": 1, "offset": 1}]
    assert (await post(served, "ack", topic="t", group_id="g", upto=both)).json() == {"committed": {"0": 3, "1": 2}}
    beyond = await post(served, "ack", topic="t", group_id="g", partition_id=1, upto_offset=3)
    assert (beyond.status_code, beyond.json()["next_offset"]) == (416, 3)


async def test_a_released_message_comes_again(served: Served) -> None:
    await served.produce("t", "a")
    await consumed(served, member="m")
    asked = {"topic": "t", "group_id": "g", "partition_id": 0, "offset": 1, "member": "m"}
    assert (await post(served, "release", **asked)).json() == {"released": True}
    assert [(each["offset"], each["attempt"]) for each in await consumed(served, member="n")] == [(1, 2)]


async def test_a_member_that_leaves_gives_its_partitions_to_the_others(served: Served) -> None:
    await served.client.post("/topics", json={"name": "t", "partitions": 2})
    await served.produce("t", "a")
    assert len(await consumed(served, member="m", mode="assigned")) == 1
    assert await consumed(served, member="n", mode="assigned") == []
    assert (await post(served, "leave", topic="t", group_id="g", member="m")).status_code == 200
    assert [each["attempt"] for each in await consumed(served, member="n", mode="assigned")] == [2]


async def test_a_heartbeat_keeps_a_member_and_tells_its_partitions(served: Served) -> None:
    await served.client.post("/topics", json={"name": "t", "partitions": 2})
    await consumed(served, member="m", mode="assigned")
    asked = {"topic": "t", "group_id": "g", "member": "m"}
    assert (await post(served, "heartbeat", **asked, visibility_ms=5)).json() == {"partitions": [0, 1]}
    await asyncio.sleep(0.01)
    await consumed(served, member="n", mode="assigned")
    gone = await post(served, "heartbeat", **asked)
    assert (gone.status_code, "Join again" in gone.json()["detail"]) == (409, True)


async def test_a_time_that_text_does_not_have_is_a_number(served: Served) -> None:
    await served.produce("t", {"value": "far", "timestamp": 9_000_000_000_000_000}, {"value": "old", "timestamp": -1})
    assert [each["ts"] for each in await consumed(served)] == [9_000_000_000_000_000, "1969-12-31T23:59:59.999Z"]


async def test_a_consume_waits_until_there_is_something(served: Served) -> None:
    await served.client.post("/topics", json={"name": "t"})
    waiting = asyncio.ensure_future(consumed(served, wait_ms=30_000))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await served.produce("t", "came")
    assert [each["payload"] for each in await asyncio.wait_for(waiting, 10)] == ["came"]


async def test_what_comes_after_a_client_has_gone_is_for_others(served: Served) -> None:
    await served.client.post("/topics", json={"name": "t"})
    body = b'{"topic": "t", "group_id": "g", "member": "page", "wait_ms": 60000}'
    asked: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]
    left = asyncio.Event()

    async def receive() -> dict[str, Any]:
        if asked:
            return asked.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(_: Any) -> None:
        pass

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/topics/consume",
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
    }
    waiting = asyncio.ensure_future(served.broker.app()(scope, receive, send))
    await asyncio.sleep(0.1)
    left.set()
    await waiting
    await EngineAppender(served.log).append([AppendGroup(topic="t", partition=0, records=[Record(payload=b"1")])])
    assert [(each["offset"], each["attempt"]) for each in await consumed(served, member="other")] == [(1, 1)]


async def test_a_broker_that_stops_ends_the_waits(served: Served) -> None:
    await served.client.post("/topics", json={"name": "t"})
    waiting = asyncio.ensure_future(consumed(served, wait_ms=60_000))
    await asyncio.sleep(0.05)
    served.broker.stopping.set()
    assert await asyncio.wait_for(waiting, 10) == []


@pytest.mark.parametrize(
    "start",
    ["latest", {"Offset": 0}, {"Offset": 1, "After": 1}, {}, {"Offset": -1}, {"Timestamp": "yesterday"}, {"At": 1}, 7],
)
async def test_a_start_that_is_none_is_refused(served: Served, start: Any) -> None:
    await served.produce("t", "a")
    response = await post(served, "consume", topic="t", group_id="g", start=start)
    assert (response.status_code, response.json()["code"]) == (400, "invalid_argument")


@pytest.mark.parametrize("time", [0, "2020-01-01", "2020-01-01T00:00:00Z", "2020-01-01T01:00:00+01:00"])
async def test_a_timestamp_is_ms_or_iso(served: Served, time: Any) -> None:
    await served.produce("t", "a")
    assert len(await consumed(served, start={"Timestamp": time})) == 1
    assert await consumed(served, start={"Timestamp": "2200-01-01"}) == []


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("consume", {"topic": "t", "group_id": "g", "limit": 0}),
        ("consume", {"topic": "t", "group_id": "g", "wait_ms": 1_000_000}),
        ("consume", {"topic": "t", "group_id": "g", "visibility_ms": 0}),
        ("consume", {"topic": "t", "group_id": "a b"}),
        ("consume", {"topic": "t", "group_id": "g", "unknown": 1}),
        ("consume", {"topic": "t", "group_id": "g", "mode": "assigned"}),
        ("consume", {"topic": "t", "group_id": "g", "member": "m" * 300}),
        ("ack", {"topic": "t", "group_id": "g"}),
        ("ack", {"topic": "t", "group_id": "g", "upto": []}),
        ("ack", {"topic": "t", "group_id": "g", "upto_offset": 1, "upto": [{"partition_id": 0, "offset": 1}]}),
        ("ack", {"topic": "t", "group_id": "g", "upto": [{"partition_id": 0, "offset": 1}] * 2}),
        ("ack", {"topic": "t", "group_id": "g", "upto_offset": -1}),
        ("release", {"topic": "t", "group_id": "g", "partition_id": 0, "offset": 1, "delay_ms": -1}),
    ],
)
async def test_what_is_not_a_request_is_refused(served: Served, path: str, asked: dict[str, Any]) -> None:
    await served.produce("t", "a")
    response = await post(served, path, **asked)
    assert (response.status_code, response.json()["code"]) == (400, "invalid_argument")


async def test_errors_have_their_codes_and_are_counted(served: Served) -> None:
    response = await post(served, "consume", topic="none", group_id="g")
    assert (response.status_code, response.json()["code"]) == (404, "topic_not_found")
    await served.produce("t", "a")
    await consumed(served)
    assert (await post(served, "consume", topic="t", group_id="g", member="m", mode="assigned")).status_code == 409
    text = (await served.client.get("/metrics/prometheus")).text
    assert 'llog_requests_total{route="POST /topics/consume",status="404"} 1' in text
    assert "llog_consumed_records_total 1" in text


async def test_dispatcher_is_what_readers_do(served: Served) -> None:
    await served.produce("t", "a")
    writer, reader = Served(beside=served, role="write"), Served(beside=served, role="read")
    assert (await post(writer, "consume", topic="t", group_id="g")).status_code == 421
    assert (await post(writer, "ack", topic="t", group_id="g", upto_offset=1)).status_code == 421
    assert len(await consumed(reader)) == 1
    assert (await post(reader, "ack", topic="t", group_id="g", upto_offset=1)).status_code == 200
    await writer.close()
    await reader.close()


async def test_members_of_two_brokers_share_a_group(served: Served) -> None:
    await served.produce("t", *map(str, range(6)))
    other = Served(beside=served)
    assert [each["offset"] for each in await consumed(served, member="a", limit=3)] == [1, 2, 3]
    assert [each["offset"] for each in await consumed(other, member="b", limit=3)] == [4, 5, 6]
    await other.close()


PAGE = "https://app.example.com"
PREFLIGHT = {"origin": PAGE, "access-control-request-method": "POST", "access-control-request-headers": "content-type"}


async def test_web_pages_may_ask_only_if_they_are_named(served: Served) -> None:
    closed = await served.client.options("/topics/consume", headers=PREFLIGHT)
    assert "access-control-allow-origin" not in closed.headers
    named = Served(beside=served, cors_origins=f"http://localhost:3000, {PAGE}")
    preflight = await named.client.options("/topics/consume", headers=PREFLIGHT)
    assert (preflight.status_code, preflight.headers["access-control-allow-origin"]) == (200, PAGE)
    answer = await named.client.post("/topics/consume", json={"topic": "none"}, headers={"origin": PAGE})
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (404, PAGE)
    stranger = await named.client.options("/topics/ack", headers=PREFLIGHT | {"origin": "https://evil.example"})
    assert "access-control-allow-origin" not in stranger.headers
    await named.close()
    every = Served(beside=served, cors_origins="*")
    assert (await every.client.get("/topics", headers={"origin": PAGE})).headers["access-control-allow-origin"] == "*"
    await every.close()


@pytest.mark.parametrize("origins", ["app.example.com", "https://app.example.com/page", "https://*.example.com/ ,*"])
def test_what_is_no_origin_is_refused(origins: str) -> None:
    with pytest.raises(ConfigurationError, match="LLOG_CORS_ORIGINS"):
        Served(cors_origins=origins)
