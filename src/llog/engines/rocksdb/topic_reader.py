"""Reads topics of engine `rocksdb`, in the process that owns them."""

from __future__ import annotations

import asyncio

from llog.engines.port import Batch, Bounds, Look
from llog.engines.reading import with_times_of
from llog.engines.rocksdb.open_rocks import OpenRocks
from llog.engines.rocksdb.topics import Kept, RocksTopics
from llog.log.log import Log
from llog.log.records import Topic
from llog.model import TimestampType, TopicPartition


class RocksReader:
    def __init__(self, log: Log, rocks: OpenRocks | None) -> None:
        self._topics = RocksTopics(log, rocks)

    async def bounds(self, tp: TopicPartition) -> Bounds:
        return (await self.look(tp)).bounds

    async def topic_bounds(self, topic: Topic) -> list[Bounds]:
        """The bounds of all partitions, in their order."""
        directory, logs = topic.directory, (await self._kept(TopicPartition(topic.name, 0))).logs

        def bounds() -> list[Bounds]:
            return [logs.bounds(directory, each, f"{topic.name}/{each}") for each in range(topic.partitions)]

        return await asyncio.to_thread(bounds)

    async def look(self, tp: TopicPartition) -> Look:
        topic, logs = await self._kept(tp)
        return Look(topic.directory, logs.bounds(topic.directory, tp.partition, str(tp)))

    async def read(
        self, tp: TopicPartition, offset: int, max_bytes: int = 8 << 20, *, stop: int | None = None
    ) -> list[Batch]:
        topic, logs = await self._kept(tp)
        found = await asyncio.to_thread(
            logs.read, topic.directory, tp.partition, offset, max_bytes, stop=stop, what=str(tp)
        )
        return [with_times_of(topic, Batch(tp, start, columns)) for start, columns in found]

    async def wait(self, tp: TopicPartition, past_offset: int, timeout: float) -> bool:
        topic, logs = await self._kept(tp)
        try:
            async with asyncio.timeout(timeout):
                with logs.changed(topic.directory, tp.partition) as event:
                    while logs.bounds(topic.directory, tp.partition, str(tp)).next_offset <= past_offset:
                        await event.wait()
                        event.clear()
        except TimeoutError:
            return False
        return True

    async def offset_for_time(self, tp: TopicPartition, timestamp_ms: int, by: TimestampType | None = None) -> int:
        topic, logs = await self._kept(tp)
        by = by or topic.timestamp_type
        return await asyncio.to_thread(logs.offset_for_time, topic.directory, tp.partition, timestamp_ms, by, str(tp))

    async def _kept(self, tp: TopicPartition) -> Kept:
        return self._topics.known(tp) or await self._topics.find(tp)
