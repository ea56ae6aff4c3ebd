"""Topics of any engine to consume from, with a clock that can be put forward, and readers that fail."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from llog.batch.columns import columns_of, records_of
from llog.config import Settings
from llog.engines.registry import all_engines
from llog.engines.routing import EngineAppender, EngineReader
from llog.errors import LlogError, StoreUnavailable
from llog.groups.dispatcher import Dispatcher
from llog.groups.groups import Groups
from llog.groups.options import ConsumeOptions
from llog.log.catalog import Catalog
from llog.log.engine import AppendGroup, Batch, Bounds
from llog.log.log import Log
from llog.log.opening import opened_log
from llog.model import Record, TimestampType, TopicPartition
from llog.runtime import SystemRuntime
from llog.stores.memory.blobs import MemoryBlobs, MemoryBlobStore
from llog.stores.memory.meta import MemoryMeta, MemoryMetaStore

ENGINES = ("object", "disk", "rocksdb")


class Clock(SystemRuntime):
    """The wall clock, which can be put forward."""

    def __init__(self) -> None:
        super().__init__()
        self.ahead_ms = 0

    def now_ms(self) -> int:
        return super().now_ms() + self.ahead_ms


class World:
    def __init__(self, log: Log, clock: Clock, engine: str = "object") -> None:
        self.log = log
        self.clock = clock
        self.engine = engine
        self.dispatcher = Dispatcher(log)
        self.groups = Groups(log)

    async def create(self, name: str = "t", partitions: int = 1, **options: Any) -> None:
        await Catalog(self.log).create(name, partitions, **{"engine": self.engine, **options})

    async def append(self, *payloads: str, topic: str = "t", partition: int = 0, key: bytes | None = None) -> None:
        records = [Record(payload=each.encode(), key=key) for each in payloads]
        (result,) = await EngineAppender(self.log).append(
            [AppendGroup(topic=topic, partition=partition, records=records)]
        )
        assert not isinstance(result, LlogError), result

    async def consume(self, member: str = "m", **call: Any) -> pa.Table:
        return await self.dispatcher.consume(ConsumeOptions(**{"topic": "t", "group": "g", "member": member, **call}))

    async def offsets(self, member: str = "m", **call: Any) -> list[int]:
        found: list[int] = (await self.consume(member, **call)).column("offset").to_pylist()
        return found

    async def ack(self, upto: int, member: str = "m", partition: int | None = 0) -> int:
        (acked,) = (await self.dispatcher.ack("t", "g", {partition: upto}, member)).values()
        return acked.committed

    async def position(self, partition: int = 0) -> int | None:
        return await (await self.groups.partition("g", TopicPartition("t", partition))).position()


@asynccontextmanager
async def opened_world(engine: str, directory: Path) -> AsyncIterator[World]:
    clock = Clock()
    if engine == "rocksdb":
        pytest.importorskip("rocksdict")
    if engine == "object":
        blobs = MemoryBlobStore(MemoryBlobs(), uri="memory://c")
        yield World(Log(MemoryMetaStore(MemoryMeta()), blobs, clock, all_engines()), clock)
        return
    async with opened_log(Settings(data_dir=str(directory)), runtime=clock) as log:
        yield World(log, clock, engine)


def numbers(first: int, last: int) -> list[str]:
    return [str(n) for n in range(first, last + 1)]


def places(table: pa.Table) -> list[tuple[int, int]]:
    return list(zip(table.column("partition").to_pylist(), table.column("offset").to_pylist(), strict=True))


class Through:
    """A reader before another one."""

    def __init__(self, reader: EngineReader) -> None:
        self.reader = reader

    async def bounds(self, tp: TopicPartition) -> Bounds:
        return await self.reader.bounds(tp)

    async def read(
        self, tp: TopicPartition, offset: int, max_bytes: int = 8 << 20, *, stop: int | None = None
    ) -> list[Batch]:
        return await self.reader.read(tp, offset, max_bytes, stop=stop)

    async def wait(self, tp: TopicPartition, past_offset: int, timeout: float) -> bool:
        return await self.reader.wait(tp, past_offset, timeout)

    async def offset_for_time(self, tp: TopicPartition, timestamp_ms: int, by: TimestampType | None = None) -> int:
        return await self.reader.offset_for_time(tp, timestamp_ms, by)


class Broken(Through):
    """One partition cannot be read."""

    def __init__(self, reader: EngineReader, partition: int = 0) -> None:
        super().__init__(reader)
        self.partition = partition

    async def read(
        self, tp: TopicPartition, offset: int, max_bytes: int = 8 << 20, *, stop: int | None = None
    ) -> list[Batch]:
        if tp.partition == self.partition:
            raise StoreUnavailable("out of order")
        return await super().read(tp, offset, max_bytes, stop=stop)


class Counting(Through):
    reads = 0

    async def read(
        self, tp: TopicPartition, offset: int, max_bytes: int = 8 << 20, *, stop: int | None = None
    ) -> list[Batch]:
        self.reads += 1
        return await super().read(tp, offset, max_bytes, stop=stop)


class Holes(Through):
    """Some records were removed."""

    def __init__(self, reader: EngineReader, removed: set[int]) -> None:
        super().__init__(reader)
        self.removed = removed

    async def read(
        self, tp: TopicPartition, offset: int, max_bytes: int = 8 << 20, *, stop: int | None = None
    ) -> list[Batch]:
        batches = await super().read(tp, offset, max_bytes, stop=stop)
        return [
            Batch(tp, n, columns_of([record])._replace(append_runs=((1, 0),)))
            for batch in batches
            for n, record in enumerate(records_of(batch.columns, batch.start_offset), batch.start_offset)
            if n not in self.removed and (stop is None or n < stop)
        ]


class NoAppends:
    async def append(self, groups: Any) -> list[Any]:
        return [StoreUnavailable("out of order")]

    async def trim(self, tp: Any, before_offset: int) -> Any:
        raise NotImplementedError

    async def retain(self, tp: Any, *, retention_ms: Any, retention_bytes: Any) -> Any:
        raise NotImplementedError
