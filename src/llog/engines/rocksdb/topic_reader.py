"""Reads topics of engine `rocksdb`, in the process that owns them."""

from __future__ import annotations

import asyncio

from llog.engines.reading import apply_timestamp_type
from llog.engines.rocksdb.handle import RocksHandle
from llog.engines.rocksdb.topics import RocksTopic, RocksTopics
from llog.log.engine import Batch, Bounds, PartitionView
from llog.log.log import Log
from llog.log.records import Topic
from llog.model import TimestampType, TopicPartition


class RocksReader:
    def __init__(self, log: Log, rocks: RocksHandle | None) -> None:
        self._topics = RocksTopics(log, rocks)

    async def bounds(self, tp: TopicPartition) -> Bounds:
        return (await self.view(tp)).bounds

    async def topic_bounds(self, topic: Topic) -> list[Bounds]:
        """Return the bounds of all partitions, in their order."""
        directory, logs = topic.directory, (await self._find_topic(TopicPartition(topic.name, 0))).logs

        def bounds() -> list[Bounds]:
            return [logs.bounds(directory, each, f"{topic.name}/{each}") for each in range(topic.partitions)]

        return await asyncio.to_thread(bounds)

    async def view(self, tp: TopicPartition) -> PartitionView:
        topic, logs = await self._find_topic(tp)
        return PartitionView(topic.directory, logs.bounds(topic.directory, tp.partition, str(tp)))

    async def read(
        self, tp: TopicPartition, offset: int, max_bytes: int = 8 << 20, *, stop: int | None = None
    ) -> list[Batch]:
        topic, logs = await self._find_topic(tp)
        found = await asyncio.to_thread(
            logs.read, topic.directory, tp.partition, offset, max_bytes, stop=stop, what=str(tp)
        )
        return [apply_timestamp_type(topic, Batch(tp, start, columns)) for start, columns in found]

    async def wait(self, tp: TopicPartition, past_offset: int, timeout: float) -> bool:
        topic, logs = await self._find_topic(tp)
        try:
            async with asyncio.timeout(timeout):
                with logs.commit_event(topic.directory, tp.partition) as event:
                    while logs.bounds(topic.directory, tp.partition, str(tp)).next_offset <= past_offset:
                        await event.wait()
                        event.clear()
        except TimeoutError:
            return False
        return True

    async def offset_for_time(self, tp: TopicPartition, timestamp_ms: int, by: TimestampType | None = None) -> int:
        topic, logs = await self._find_topic(tp)
        by = by or topic.timestamp_type
        return await asyncio.to_thread(logs.offset_for_time, topic.directory, tp.partition, timestamp_ms, by, str(tp))

    async def _find_topic(self, tp: TopicPartition) -> RocksTopic:
        return self._topics.find_cached(tp) or await self._topics.find(tp)
