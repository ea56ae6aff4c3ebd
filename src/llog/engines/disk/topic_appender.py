"""Appends to disk topics, which this process then owns until its log is closed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from llog.batch.columns import Columns
from llog.engines.checks import check_keys, checked_columns
from llog.engines.disk.log.log import SegmentLog
from llog.engines.disk.open_segments import OpenSegments
from llog.engines.disk.topics import DiskTopics, Place
from llog.engines.port import AppendResult, CleanResult, Group, RetentionResult
from llog.engines.turnstile import Line
from llog.errors import InvalidArgument, LlogError, PartitionNotInitialized
from llog.log.log import Log
from llog.log.records import Cleanup
from llog.model import TopicPartition


class DiskAppender:
    """`LogOwned` if another process owns the partition."""

    def __init__(self, log: Log, segments: OpenSegments | None, append_bytes_max: int = 256 << 20) -> None:
        self._append_bytes_max = append_bytes_max
        self._topics = DiskTopics(log, segments)
        self._lines: dict[TopicPartition, Line] = {}

    async def append(self, groups: Sequence[Group]) -> list[AppendResult | LlogError]:
        columns = checked_columns(groups, self._append_bytes_max)
        # As tasks, even if it is a single one: they begin in the order of the calls.
        return list(await asyncio.gather(*map(self._settled, groups, columns)))

    async def trim(self, tp: TopicPartition, before_offset: int) -> RetentionResult:
        async with self._borrowed(tp) as (_, owned):
            return await owned.trim(before_offset)

    async def retain(
        self, tp: TopicPartition, *, retention_ms: int | None, retention_bytes: int | None
    ) -> RetentionResult:
        async with self._borrowed(tp) as (place, owned):
            return await owned.retain(
                retention_ms=retention_ms, retention_bytes=retention_bytes, by=place.topic.timestamp_type
            )

    async def clean(self, tp: TopicPartition, *, force: bool = False) -> CleanResult:
        """Key compaction: of each key, the newest record stays. `InvalidArgument` if the topic is not to be compacted.

        What is not worth it yet is left alone, and so is the newest segment, unless with `force`.
        """
        place = await self._topics.find(tp)
        if place.topic.cleanup is not Cleanup.COMPACT:
            raise InvalidArgument(f"topic {tp.topic!r} keeps all records of a key (cleanup {place.topic.cleanup})")
        delete_retention_ms = place.topic.delete_retention_ms
        async with self._borrowed(tp):
            return await self._topics.segments.clean(place.path, tp, delete_retention_ms, force=force)

    async def _settled(self, group: Group, columns: Columns) -> AppendResult | LlogError:
        tp = TopicPartition(group.topic, group.partition)
        try:
            line = self._lines.setdefault(tp, Line())
            place, owned = await line.through(lambda: self._ready(tp), lambda: self._owned(tp))
        except LlogError as error:
            return error
        try:
            check_keys(place.topic, columns)
            start, end, repeated = await owned.append(columns, group.producer)
        except LlogError as error:
            if self._topics.is_gone(place):
                return PartitionNotInitialized(f"partition {tp} was deleted")
            return error
        return AppendResult(
            topic=tp.topic, partition=tp.partition, start_offset=start, end_offset=end, repeated=repeated
        )

    @asynccontextmanager
    async def _borrowed(self, tp: TopicPartition) -> AsyncIterator[tuple[Place, SegmentLog]]:
        place = await self._topics.find(tp)
        is_held = self._topics.segments.held(place.path) is not None
        async with self._topics.segments.borrowed(place.path, tp) as owned:
            if not is_held:
                await self._topics.confirm(tp, place)
            yield place, owned

    def _ready(self, tp: TopicPartition) -> tuple[Place, SegmentLog] | None:
        place = self._topics.known(tp)
        owned = None if place is None else self._topics.segments.held(place.path)
        return None if place is None or owned is None else (place, owned)

    async def _owned(self, tp: TopicPartition) -> tuple[Place, SegmentLog]:
        place = await self._topics.find(tp)
        owned = self._topics.segments.held(place.path)
        if owned is None:
            owned = await self._topics.segments.writer(place.path, tp)
            await self._topics.confirm(tp, place)
        return place, owned
