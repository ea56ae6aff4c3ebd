"""A broker on stores in memory, asked through its ASGI application; its blob store can be held up and broken."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx

from llog.broker.app import Broker
from llog.config import Settings
from llog.engines.registry import all_engines
from llog.errors import StoreUnavailable
from llog.log.log import Log
from llog.runtime import SystemRuntime
from llog.stores.blobs import Buffer
from llog.stores.memory.blobs import MemoryBlobs, MemoryBlobStore
from llog.stores.memory.meta import MemoryMeta, MemoryMetaStore
from llog.stores.meta import MetaStore


class Blobs(MemoryBlobStore):
    """Puts wait while `gate` is closed; everything fails while `broken`."""

    def __init__(self) -> None:
        super().__init__(MemoryBlobs(), uri="memory://broker")
        self.gate = asyncio.Event()
        self.gate.set()
        self.broken = False
        self.reads = 0
        self.puts: list[str] = []

    async def put(self, name: str, parts: Sequence[Buffer]) -> None:
        self.puts.append(name)
        await self.gate.wait()
        self._check()
        await super().put(name, parts)

    async def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        self.reads += 1
        self._check()
        return await super().get_ranges(name, ranges)

    async def head(self, name: str) -> Any:
        self._check()
        return await super().head(name)

    async def check(self) -> None:
        self._check()

    def _check(self) -> None:
        if self.broken:
            raise StoreUnavailable("the blob store is out of order")


class Served:
    def __init__(self, beside: Served | None = None, *, meta_store: MetaStore | None = None, **settings: Any) -> None:
        """On stores of its own, or on those of another one, with the other's client of the metadata store or one of its
        own: as a second process would be.
        """
        self.blobs: Blobs = beside.blobs if beside else Blobs()
        if beside is not None and meta_store is None:
            self.log: Log = beside.log
        else:
            self.log = Log(meta_store or MemoryMetaStore(MemoryMeta()), self.blobs, SystemRuntime(), all_engines())
        self.settings = Settings(meta="memory://", blobs="memory://", **{"inline_max_bytes": 0, **settings})
        self.broker = Broker(self.log, self.settings)
        transport = httpx.ASGITransport(app=self.broker.app())
        self.client = httpx.AsyncClient(transport=transport, base_url="http://localhost")

    async def produce(self, topic: str, *records: object, partition: int = 0) -> dict[str, Any]:
        item = {"topic": topic, "partition": partition, "records": records}
        response = await self.client.post("/produce", json={"topic_partitions": [item]})
        return _only_item(response)

    async def consume(self, topic: str, offset: int, partition: int = 0, **asked: object) -> dict[str, Any]:
        item = {"topic": topic, "partition": partition, "fetch_offset": offset}
        if "partition_max_bytes" in asked:
            item["partition_max_bytes"] = asked.pop("partition_max_bytes")
        response = await self.client.post("/consume", json={"topic_partitions": [item], **asked})
        return _only_item(response)

    async def close(self) -> None:
        self.blobs.gate.set()
        await self.broker.close()
        await self.client.aclose()


def _only_item(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code in (200, 503), response.text
    found: dict[str, Any] = response.json()["topic_partitions"][0]
    return found
