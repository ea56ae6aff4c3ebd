"""A broker in memory that listens on a socket, and clients that send to it byte by byte."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from llog.broker.listeners import listen
from llog.broker.server import Server
from tests.broker.serving import Served

LIMIT_S = 300
FILES = 10_000


class Client:
    """One connection, byte by byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self) -> tuple[int, dict[str, str], Any]:
        async with asyncio.timeout(LIMIT_S):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
            body = await self.reader.readexactly(int(headers["content-length"]))
        return int(head[0].split()[1]), headers, json.loads(body)

    async def ended(self) -> bytes:
        """What came before the broker closed the connection."""
        async with asyncio.timeout(LIMIT_S):
            try:
                return await self.reader.read()
            except ConnectionResetError:
                return b""


class Listening:
    def __init__(self, served: Served) -> None:
        self.served = served
        self.listener = listen("127.0.0.1", 0)
        self.server = Server(served.broker, served.settings, FILES, lambda: None)
        self._clients: list[Client] = []

    async def connect(self, receive_bytes: int | None = None) -> Client:
        raw = socket.socket()
        if receive_bytes is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        raw.setblocking(False)
        await asyncio.get_running_loop().sock_connect(raw, self.listener.getsockname())
        client = Client(*await asyncio.open_connection(sock=raw, limit=1 << 20))
        self._clients.append(client)
        return client

    async def until_open(self, count: int) -> None:
        async with asyncio.timeout(LIMIT_S):
            while self.served.broker.metrics.connections != count:
                await asyncio.sleep(0.01)

    def hang_up(self) -> None:
        for client in self._clients:
            client.writer.transport.abort()


@asynccontextmanager
async def listening_broker(**settings: Any) -> AsyncIterator[Listening]:
    served = Served(**settings)
    found = Listening(served)
    serving = asyncio.ensure_future(found.server.serve([found.listener]))
    while not found.server.started:
        await asyncio.sleep(0.01)
    try:
        yield found
    finally:
        found.hang_up()
        found.server.should_exit = True
        served.broker.stopping.set()
        await serving
        await served.close()
        found.listener.close()
