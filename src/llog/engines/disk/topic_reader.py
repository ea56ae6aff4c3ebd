"""Reads disk topics beside the process that writes them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from llog.engines.disk.log.reader import SegmentReader
from llog.engines.disk.segment_pool import SegmentPool
from llog.engines.disk.topics import CACHED_MS, DiskTopics
from llog.engines.reading import apply_timestamp_type
from llog.errors import LlogError, PartitionNotInitialized
from llog.log.engine import Batch, Bounds, PartitionView
from llog.log.log import Log
from llog.log.records import Topic
from llog.model import TimestampType, TopicPartition

_BOUNDS_AT_A_TIME: Final = 64


class DiskReader:
    def __init__(self, log: Log, segments: SegmentPool | None) -> None:
        self._topics = DiskTopics(log, segments)

    async def bounds(self, tp: TopicPartition) -> Bounds:
        return (await self.view(tp)).bounds

    async def topic_bounds(self, topic: Topic) -> list[Bounds]:
        """Return the bounds of all partitions, in their order."""
        found: list[Bounds] = []
        for first in range(0, topic.partitions, _BOUNDS_AT_A_TIME):
            page = range(first, min(first + _BOUNDS_AT_A_TIME, topic.partitions))
            found += await asyncio.gather(*(self.bounds(TopicPartition(topic.name, each)) for each in page))
        return found

    async def view(self, tp: TopicPartition) -> PartitionView:
        async with self._borrow_reader(tp) as (topic, reader):
            return PartitionView(topic.directory, await reader.bounds())

    async def read(
        self, tp: TopicPartition, offset: int, max_bytes: int = 8 << 20, *, stop: int | None = None
    ) -> list[Batch]:
        async with self._borrow_reader(tp) as (topic, reader):
            found = await reader.read(offset, max_bytes, stop=stop)
        return [apply_timestamp_type(topic, Batch(tp, start, columns)) for start, columns in found]

    async def wait(self, tp: TopicPartition, past_offset: int, timeout: float) -> bool:
        """Wait in short intervals, to notice a deletion, or a writer that this process opens or closes."""
        try:
            async with asyncio.timeout(timeout):
                while True:
                    async with self._borrow_reader(tp) as (_, reader):
                        if await reader.wait(past_offset, CACHED_MS / 1000):
                            return True
        except TimeoutError:
            return False

    async def offset_for_time(self, tp: TopicPartition, timestamp_ms: int, by: TimestampType | None = None) -> int:
        async with self._borrow_reader(tp) as (topic, reader):
            return await reader.offset_for_time(timestamp_ms, by or topic.timestamp_type)

    @asynccontextmanager
    async def _borrow_reader(self, tp: TopicPartition) -> AsyncIterator[tuple[Topic, SegmentReader]]:
        partition = self._topics.find_cached(tp) or await self._topics.find(tp)
        try:
            with self._topics.segments.borrow_reader(partition.path, tp) as reader:
                yield partition.topic, reader
        except LlogError as error:
            if self._topics.is_gone(partition):
                raise PartitionNotInitialized(f"partition {tp} was deleted") from error
            raise
