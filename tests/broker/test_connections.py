"""Connections that send too much, too slowly or nothing, or that do not read: none of them harms the others."""

from __future__ import annotations

import asyncio
import json

import pytest
import uvloop

from tests.broker.listening import LIMIT_S, listening_broker

GET = b"GET /topics HTTP/1.1\r\nhost: localhost\r\n"


@pytest.fixture(scope="module")
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    """The event loop that brokers run on: its transports are not asyncio's."""
    policy: asyncio.AbstractEventLoopPolicy = uvloop.EventLoopPolicy()
    return policy


@pytest.mark.parametrize(
    "header",
    [
        GET + b"x: " + b"y" * (64 << 20),
        b"GET /" + b"y" * (64 << 20),
        GET + b"x: y\r\n" * (10 << 20),
        GET + b"x: " + b"y" * 10_000 + b"\r\n\r\n",
    ],
    ids=["one field", "the address", "many fields", "whole"],
)
async def test_a_header_over_the_limit_is_refused_and_not_kept(header: bytes) -> None:
    async with listening_broker(request_header_max_bytes=8192) as broker:
        client = await broker.connect()

        async def send() -> None:
            try:
                await client.send(header)
            except ConnectionError:
                pass  # the broker closed the connection: as it should

        sending = asyncio.ensure_future(send())
        try:
            status, headers, body = await client.answer()
            assert (status, headers["connection"], body["code"]) == (431, "close", "header_too_large")
        except (ConnectionResetError, asyncio.IncompleteReadError):
            pass  # what was on its way to a closed connection may overtake the answer
        await client.ended()
        await sending
        other = await broker.connect()
        await other.send(GET + b"\r\n")
        assert (await other.answer())[0] == 200


async def test_a_header_below_the_limit_is_read_however_it_is_cut() -> None:
    async with listening_broker(request_header_max_bytes=8192) as broker:
        client = await broker.connect()
        for _ in range(3):
            for part in (GET[:3], GET[3:], b"x: " + b"y" * 7000, b"\r\n", b"\r\n"):
                await client.send(part)
                await asyncio.sleep(0.01)
            assert (await client.answer())[0] == 200


async def test_what_follows_a_body_is_bounded_as_a_header_is() -> None:
    async with listening_broker(request_header_max_bytes=8192) as broker:
        client = await broker.connect()
        await client.send(
            b"POST /produce HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ntransfer-encoding: "
            b"chunked\r\n\r\n1\r\n{\r\n"
        )
        await asyncio.sleep(0.05)
        try:
            await client.send(b"0\r\nx: " + b"y" * (4 << 20))
        except ConnectionError:
            pass
        await client.ended()
        await broker.until_open(0)


@pytest.mark.parametrize(
    "sent",
    [b"", b"\r\n", b"GET /topics HT", GET, GET + b"\r\nGET /"],
    ids=["nothing", "an empty line", "half a line", "half a header", "half of a second one"],
)
async def test_a_connection_that_begins_a_request_and_does_not_go_on_is_closed(sent: bytes) -> None:
    async with listening_broker(request_timeout_ms=200) as broker:
        client = await broker.connect()
        await client.send(sent)
        await client.ended()
        await broker.until_open(0)


async def test_bytes_that_begin_no_request_do_not_keep_an_idle_connection() -> None:
    async with listening_broker(request_timeout_ms=2000) as broker:
        client = await broker.connect()
        await client.send(GET + b"\r\n")
        assert (await client.answer())[0] == 200
        await client.send(b"\r\n")
        assert await client.ended() == b""


async def test_a_header_that_drips_is_cut_off_with_408() -> None:
    async with listening_broker(request_timeout_ms=300) as broker:
        client = await broker.connect()
        answer = asyncio.ensure_future(client.answer())
        await client.send(GET)
        async with asyncio.timeout(LIMIT_S):
            while not answer.done():
                try:
                    await client.send(b"x: y\r\n")
                except ConnectionError:
                    break
                await asyncio.sleep(0.02)
        assert ((await answer)[0], (await answer)[2]["code"]) == (408, "request_timeout")


async def test_the_rest_of_a_body_that_was_refused_does_not_keep_the_connection() -> None:
    async with listening_broker(request_timeout_ms=2000) as broker:
        client = await broker.connect()
        await client.send(b"POST /nowhere HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000\r\n\r\n123")
        assert (await client.answer())[0] == 404
        assert await client.ended() == b""


@pytest.mark.parametrize("waits", [False, True], ids=["at once", "after a long poll"])
async def test_a_client_that_does_not_read_its_answer_is_cut_off(waits: bool) -> None:
    async with listening_broker(request_timeout_ms=200 if waits else 2000) as broker:
        await broker.served.produce("t", "first")
        if not waits:
            for _ in range(4):
                await broker.served.produce("t", "x" * (4 << 20))
        client = await broker.connect(receive_bytes=4096)
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        item = {"topic": "t", "partition": 0, "fetch_offset": 2, "partition_max_bytes": 16 << 20}
        body = json.dumps({"topic_partitions": [item], "max_bytes": 16 << 20, "max_wait_ms": 60_000}).encode()
        await client.send(
            b"POST /consume HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: "
            b"%d\r\n\r\n%s" % (len(body), body)
        )
        await broker.until_open(1)
        if waits:
            await asyncio.sleep(0.5)  # the connection has nothing to be checked for any more
            assert broker.served.broker.metrics.connections == 1
            await broker.served.produce("t", "x" * (8 << 20))
        await broker.until_open(0)


async def test_waiting_for_an_answer_has_no_deadline_of_the_connection() -> None:
    async with listening_broker(request_timeout_ms=2000) as broker:
        await broker.served.produce("t", "first")
        client = await broker.connect()
        target = b"GET /topics/t/partitions/0/offset?timestamp_ms=0 HTTP/1.1\r\nhost: localhost\r\n\r\n"
        body = b'{"topic_partitions": [{"topic": "t", "partition": 0, "fetch_offset": 2}], "max_wait_ms": 4000}'
        await client.send(
            b"POST /consume HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: "
            b"%d\r\n\r\n%s%s" % (len(body), body, target)
        )
        status, _, found = await client.answer()
        assert (status, found["topic_partitions"][0]["records"]) == (200, [])
        assert (await client.answer())[2] == {"offset": 1}, "the request that was sent behind it"
