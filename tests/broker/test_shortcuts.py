"""Small requests that arrive whole reach their handler by a shortcut, and get the answer of the usual way."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import uvloop

from llog.broker.http.connections import Connection
from llog.broker.http.shortcuts import Exchange
from tests.broker.listening import LIMIT_S, Client, Listening, listening_broker


@pytest.fixture(scope="module")
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    policy: asyncio.AbstractEventLoopPolicy = uvloop.EventLoopPolicy()
    return policy


@pytest.fixture
def shortcuts(monkeypatch: pytest.MonkeyPatch) -> list[Exchange]:
    """The requests that took a shortcut."""
    taken: list[Exchange] = []
    shipped = Exchange.answer

    async def answer(self: Exchange, *arguments: Any) -> None:
        taken.append(self)
        await shipped(self, *arguments)

    monkeypatch.setattr(Exchange, "answer", answer)
    return taken


def request(path: str, body: object, *fields: str, version: str = "1.1", host: str = "localhost") -> bytes:
    content = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/{version}", f"host: {host}", "content-type: application/json", *fields]
    return "\r\n".join([*lines, f"content-length: {len(content)}", "", ""]).encode() + content


def produce(*records: object, topic: str = "t") -> dict[str, Any]:
    return {"topic_partitions": [{"topic": topic, "partition": 0, "records": records}]}


def consume(offset: int, wait_ms: int = 0) -> dict[str, Any]:
    item = {"topic": "t", "partition": 0, "fetch_offset": offset}
    return {"topic_partitions": [item], "max_wait_ms": wait_ms}


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.01)


async def send_in_two(broker: Listening, client: Client, data: bytes) -> None:
    """Send all but the last byte, and that one once the request has begun its usual way, or was refused already."""
    await broker.until_open(1)
    await client.send(data[:-1])
    await until(lambda: any(cycles(broker)) or not cycles(broker))
    with suppress(ConnectionError):
        await client.send(data[-1:])


def cycles(broker: Listening) -> list[Any]:
    """The request of each connection that is being answered, or was answered last."""
    return [each.cycle for each in broker.server.server_state.connections if isinstance(each, Connection)]


@pytest.mark.parametrize(
    "sent",
    [
        request("/consume", consume(1)),
        request("/consume", consume(9)),
        request("/produce", produce(topic="no such name!")),
        request("/produce", produce()),
        request("/produce", {"unknown": 1}),
        request("/produce", produce("x" * 2000)),
        request("/produce", produce("x"), "connection: close"),
        request("/produce", produce("x"), version="1.0"),
    ],
    ids=["records", "beyond the end", "a bad topic", "no records", "a bad field", "too large", "close", "1.0"],
)
async def test_an_answer_is_the_same_by_either_way(sent: bytes, shortcuts: list[Exchange]) -> None:
    answers = []
    for is_whole in (True, False):
        async with listening_broker(request_max_bytes=1024) as broker:
            await broker.served.produce("t", "a", "b")
            client = await broker.connect()
            if is_whole:
                await client.send(sent)
            else:
                await send_in_two(broker, client, sent)
            status, headers, body = await client.answer()
            headers.pop("date")
            answers.append((status, headers, _without_times(body)))
            assert len(shortcuts) == 1
            if headers.get("connection") == "close":
                assert await client.ended() == b""
    assert answers[0] == answers[1]


def _without_times(body: Any) -> Any:
    for item in body.get("topic_partitions", ()):
        for record in item.get("records", ()):
            del record["timestamp"]
    return body


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (request("/produce", produce("x"), host="evil.example"), 421),
        (request("/produce", produce("x"), "host: localhost"), 421),
        (request("/produce", produce("x"), "origin: https://page.example"), 200),
        (request("/produce", produce("x"), "expect: 100-continue"), 200),
        (request("/produce", produce("x" * 70_000)), 200),
        (request("/produce?x=1", produce("x")), 200),
        (request("/produce", produce("x")).replace(b"application/json", b"text/plain"), 400),
        (request("/produce", produce("x")).replace(b"application/json", b"Application/JSON; charset=utf-8"), 200),
        (request("/produce", produce("x"), "content-type: text/plain"), 200),
    ],
    ids=[
        *("another name", "two names", "another origin", "expect", "a large body", "a query"),
        *("another type", "another spelling of the type", "two types"),
    ],
)
async def test_a_request_that_needs_more_takes_the_usual_way(
    sent: bytes, status: int, shortcuts: list[Exchange]
) -> None:
    async with listening_broker(cors_origins="https://page.example") as broker:
        client = await broker.connect()
        await client.send(sent)
        if b"100-continue" in sent:
            await client.reader.readuntil(b"\r\n\r\n")
        found, headers, _ = await client.answer()
        assert found == status
        if b"origin" in sent:
            assert headers["access-control-allow-origin"] == "https://page.example"
        assert not shortcuts


async def test_requests_that_are_sent_at_once_are_answered_in_order(shortcuts: list[Exchange]) -> None:
    async with listening_broker() as broker:
        client = await broker.connect()
        await client.send(b"".join(request("/produce", produce(text)) for text in ("a", "b", "c")))
        offsets = [(await client.answer())[2]["topic_partitions"][0]["start_offset"] for _ in range(3)]
        assert offsets == [1, 2, 3]
        await client.send(request("/produce", produce("d")))
        assert (await client.answer())[2]["topic_partitions"][0]["start_offset"] == 4
        assert len(shortcuts) == 2  # the first, and the one that was sent after its answers


async def test_a_client_that_leaves_harms_nobody(shortcuts: list[Exchange]) -> None:
    async with listening_broker() as broker:
        await broker.served.produce("t", "a")
        gone, other = await broker.connect(), await broker.connect()
        await gone.send(request("/consume", consume(2, wait_ms=60_000)))
        await other.send(request("/consume", consume(2, wait_ms=60_000)))
        await until(lambda: broker.served.broker.metrics.waiting == 2)
        gone.writer.transport.abort()
        await broker.until_open(1)
        await broker.served.produce("t", "b")
        _, _, body = await other.answer()
        assert [each["payload"] for each in body["topic_partitions"][0]["records"]] == ["b"]
        assert len(shortcuts) == 2


async def test_a_broker_that_stops_answers_what_it_has(shortcuts: list[Exchange]) -> None:
    async with listening_broker() as broker:
        await broker.served.produce("t", "a")
        client = await broker.connect()
        await client.send(request("/consume", consume(2, wait_ms=60_000)))
        await until(lambda: broker.served.broker.metrics.waiting)
        broker.server.should_exit = True
        await until(lambda: not any(cycle.keep_alive for cycle in cycles(broker)))
        broker.served.broker.stopping.set()
        status, headers, body = await client.answer()
        assert (status, headers["connection"]) == (200, "close")
        assert body["topic_partitions"][0]["records"] == []
        assert await client.ended() == b""
        assert shortcuts
