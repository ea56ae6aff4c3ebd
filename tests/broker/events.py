"""A client of server-sent events, on the ASGI application itself: httpx would wait for the end of the answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import MutableMapping
from typing import Any

import httpx

from tests.broker.serving import Served

LIMIT_S = 60


class Events:
    """One client, which is gone when its block ends."""

    def __init__(self, served: Served, target: str, last: str | None = None) -> None:
        self._chunks: asyncio.Queue[MutableMapping[str, Any]] = asyncio.Queue()
        self._gone = asyncio.Event()
        self.may_take = asyncio.Event()
        """The client takes nothing while it is not set."""
        self.may_take.set()
        self._rest = b""
        headers = [] if last is None else [(b"last-event-id", last.encode())]
        path, _, query = target.partition("?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "method": "GET",
            "path": path,
            "query_string": query.encode(),
            "headers": [(b"host", b"localhost"), *headers],
        }
        transport = served.client._transport
        assert isinstance(transport, httpx.ASGITransport)
        self._task = asyncio.ensure_future(transport.app(scope, self._receive, self._send))

    async def __aenter__(self) -> Events:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._gone.set()
        await asyncio.wait_for(self._task, LIMIT_S)

    async def _receive(self) -> dict[str, Any]:
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        await self.may_take.wait()
        await self._chunks.put(message)

    async def next(self) -> dict[str, str] | None:
        """The fields of the next event; None at the end."""
        while b"\n\n" not in self._rest:
            message = await asyncio.wait_for(self._chunks.get(), LIMIT_S)
            if message["type"] == "http.response.start":
                assert message["status"] == 200
                assert (b"content-type", b"text/event-stream; charset=utf-8") in message["headers"]
                continue
            self._rest += message["body"]
            if not message["more_body"]:
                return None
        event, _, self._rest = self._rest.partition(b"\n\n")
        return dict(line.split(": ", 1) for line in event.decode().splitlines())

    async def records(self, number: int) -> list[tuple[str, dict[str, Any]]]:
        """The ids and the data of this many events that have data."""
        found: list[tuple[str, dict[str, Any]]] = []
        while len(found) < number:
            event = await self.next()
            assert event is not None
            assert event.get("event") != "problem", event
            if "data" in event:
                found.append((event["id"], json.loads(event["data"])))
        return found
