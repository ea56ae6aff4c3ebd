"""Reads disk topics beside the process that writes them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from llog.engines.disk.log.reader import SegmentReader
from llog.engines.disk.open_segments import OpenSegments
from llog.engines.disk.topics import LOOK_AGAIN_MS, DiskTopics
from llog.engines.port import Batch, Bounds, Look
from llog.engines.reading import with_times_of
from llog.errors import LlogError, PartitionNotInitialized
from llog.log.log import Log
from llog.log.records import Topic
from llog.model import TimestampType, TopicPartition

_BOUNDS_AT_A_TIME: Final = 64


class DiskReader:
    def __init__(self, log: Log, segments: OpenSegments | None) -> None:
        self._topics = DiskTopics(log, segments)

    async def bounds(self, tp: TopicPartition) -> Bounds:
        return (await self.look(tp)).bounds

    async def topic_bounds(self, topic: Topic) -> list[Bounds]:
        """The bounds of all partitions, in their order."""
        found: list[Bounds] = []
        for first in range(0, topic.partitions, _BOUNDS_AT_A_TIME):
            page = range(first, min(first + _BOUNDS_AT_A_TIME, topic.partitions))
            found += await asyncio.gather(*(self.bounds(TopicPartition(topic.name, each)) for each in page))
        return found

    async def look(self, tp: TopicPartition) -> Look:
        async with self._reading(tp) as (topic, reader):
            return Look(topic.directory, await reader.bounds())

    async def read(
        self, tp: TopicPartition, offset: int, max_bytes: int = 8 << 20, *, stop: int | None = None
    ) -> list[Batch]:
        async with self._reading(tp) as (topic, reader):
            found = await reader.read(offset, max_bytes, stop=stop)
        return [with_times_of(topic, Batch(tp, start, columns)) for start, columns in found]

    async def wait(self, tp: TopicPartition, past_offset: int, timeout: float) -> bool:
        """In pieces, so that a deletion, and a writer that this process opens or closes, are noticed."""
        try:
            async with asyncio.timeout(timeout):
                while True:
                    async with self._reading(tp) as (_, reader):
                        if await reader.wait(past_offset, LOOK_AGAIN_MS / 1000):
                            return True
        except TimeoutError:
            return False

    async def offset_for_time(self, tp: TopicPartition, timestamp_ms: int, by: TimestampType | None = None) -> int:
        async with self._reading(tp) as (topic, reader):
            return await reader.offset_for_time(timestamp_ms, by or topic.timestamp_type)

    @asynccontextmanager
    async def _reading(self, tp: TopicPartition) -> AsyncIterator[tuple[Topic, SegmentReader]]:
        place = self._topics.known(tp) or await self._topics.find(tp)
        try:
            with self._topics.segments.reading(place.path, tp) as reader:
                yield place.topic, reader
        except LlogError as error:
            if self._topics.is_gone(place):
                raise PartitionNotInitialized(f"partition {tp} was deleted") from error
            raise
