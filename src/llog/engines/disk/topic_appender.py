"""Appends to disk topics, which this process then owns until its log is closed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from llog.batch.columns import Columns
from llog.engines.checks import check_keys, checked_columns, producer_of_appends
from llog.engines.disk.log.log import SegmentLog
from llog.engines.disk.segment_pool import SegmentPool
from llog.engines.disk.topics import DiskPartition, DiskTopics
from llog.engines.fifo_gate import FifoGate
from llog.errors import InvalidArgument, LlogError, PartitionNotInitialized
from llog.log.engine import AppendGroup, AppendResult, CleanResult, RetentionResult
from llog.log.log import Log
from llog.log.records import Cleanup
from llog.model import TopicPartition


class DiskAppender:
    """Calls raise `LogOwned` if another process owns the partition."""

    def __init__(self, log: Log, segments: SegmentPool | None, append_bytes_max: int = 256 << 20) -> None:
        self._append_bytes_max = append_bytes_max
        self._topics = DiskTopics(log, segments)
        self._gates: dict[TopicPartition, FifoGate] = {}

    async def append(self, groups: Sequence[AppendGroup]) -> list[AppendResult | LlogError]:
        columns = checked_columns(groups, self._append_bytes_max)
        # `gather` makes tasks, even of a single group: tasks start in the order of the calls.
        return list(await asyncio.gather(*map(self._append_group, groups, columns)))

    async def trim(self, tp: TopicPartition, before_offset: int) -> RetentionResult:
        async with self._borrow_writer(tp) as (_, writer):
            return await writer.trim(before_offset)

    async def retain(
        self, tp: TopicPartition, *, retention_ms: int | None, retention_bytes: int | None
    ) -> RetentionResult:
        async with self._borrow_writer(tp) as (partition, writer):
            return await writer.retain(
                retention_ms=retention_ms, retention_bytes=retention_bytes, by=partition.topic.timestamp_type
            )

    async def clean(self, tp: TopicPartition, *, force: bool = False) -> CleanResult:
        """Compact by key: the newest record of each key stays. Raises `InvalidArgument` if the topic keeps all records.

        Without `force`, a partition with few new records is left alone, and so is the newest segment.
        """
        partition = await self._topics.find(tp)
        if partition.topic.cleanup is not Cleanup.COMPACT:
            raise InvalidArgument(f"topic {tp.topic!r} keeps all records of a key (cleanup {partition.topic.cleanup})")
        delete_retention_ms = partition.topic.delete_retention_ms
        async with self._borrow_writer(tp):
            return await self._topics.segments.clean(partition.path, tp, delete_retention_ms, force=force)

    async def _append_group(self, group: AppendGroup, columns: Columns) -> AppendResult | LlogError:
        tp = TopicPartition(group.topic, group.partition)
        try:
            gate = self._gates.setdefault(tp, FifoGate())
            partition, writer = await gate.enter(lambda: self._kept_writer(tp), lambda: self._find_or_open_writer(tp))
        except LlogError as error:
            return error
        try:
            check_keys(partition.topic, columns)
            producer = producer_of_appends(partition.topic, group.producer)
            start, end, repeated = await writer.append(columns, producer)
        except LlogError as error:
            if self._topics.is_gone(partition):
                return PartitionNotInitialized(f"partition {tp} was deleted")
            return error
        return AppendResult(
            topic=tp.topic, partition=tp.partition, start_offset=start, end_offset=end, repeated=repeated
        )

    @asynccontextmanager
    async def _borrow_writer(self, tp: TopicPartition) -> AsyncIterator[tuple[DiskPartition, SegmentLog]]:
        partition = await self._topics.find(tp)
        is_kept = self._topics.segments.kept_writer(partition.path) is not None
        async with self._topics.segments.borrow_writer(partition.path, tp) as writer:
            if not is_kept:
                await self._topics.confirm(tp, partition)
            yield partition, writer

    def _kept_writer(self, tp: TopicPartition) -> tuple[DiskPartition, SegmentLog] | None:
        partition = self._topics.find_cached(tp)
        writer = None if partition is None else self._topics.segments.kept_writer(partition.path)
        return None if partition is None or writer is None else (partition, writer)

    async def _find_or_open_writer(self, tp: TopicPartition) -> tuple[DiskPartition, SegmentLog]:
        partition = await self._topics.find(tp)
        writer = self._topics.segments.kept_writer(partition.path)
        if writer is None:
            writer = await self._topics.segments.open_kept_writer(partition.path, tp)
            await self._topics.confirm(tp, partition)
        return partition, writer
