"""Appends to topics of engine `rocksdb`, which this process then owns until its log is closed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from weakref import WeakValueDictionary

from llog.batch.columns import Columns
from llog.engines.checks import check_keys, checked_columns, producer_of_appends
from llog.engines.fifo_gate import FifoGate
from llog.engines.rocksdb.handle import RocksHandle
from llog.engines.rocksdb.topics import RocksTopics
from llog.errors import InvalidArgument, LlogError
from llog.log.engine import AppendGroup, AppendResult, CleanResult, RetentionResult
from llog.log.log import Log
from llog.log.records import Cleanup
from llog.model import TopicPartition


class RocksAppender:
    """Calls raise `LogOwned` if another process owns the RocksDB."""

    def __init__(self, log: Log, rocks: RocksHandle | None, append_bytes_max: int = 256 << 20) -> None:
        self._append_bytes_max = append_bytes_max
        self._topics = RocksTopics(log, rocks)
        self._gates: WeakValueDictionary[TopicPartition, FifoGate] = WeakValueDictionary()
        """The gates of appends under way."""

    async def append(self, groups: Sequence[AppendGroup]) -> list[AppendResult | LlogError]:
        columns = checked_columns(groups, self._append_bytes_max)
        # `gather` makes tasks, even of a single group: tasks start in the order of the calls.
        return list(await asyncio.gather(*map(self._append_group, groups, columns)))

    async def trim(self, tp: TopicPartition, before_offset: int) -> RetentionResult:
        topic, logs = await self._topics.find(tp)
        return await asyncio.to_thread(logs.trim, topic.directory, tp.partition, before_offset, str(tp))

    async def retain(
        self, tp: TopicPartition, *, retention_ms: int | None, retention_bytes: int | None
    ) -> RetentionResult:
        topic, logs = await self._topics.find(tp)
        return await asyncio.to_thread(
            logs.retain,
            topic.directory,
            tp.partition,
            retention_ms=retention_ms,
            retention_bytes=retention_bytes,
            by=topic.timestamp_type,
            what=str(tp),
        )

    async def clean(self, tp: TopicPartition, *, force: bool = False) -> CleanResult:
        """Compact by key: the newest record of each key stays. Raises `InvalidArgument` if the topic keeps all records.

        Without `force`, a partition with few new records is left alone.
        """
        topic, logs = await self._topics.find(tp)
        if topic.cleanup is not Cleanup.COMPACT:
            raise InvalidArgument(f"topic {tp.topic!r} keeps all records of a key (cleanup {topic.cleanup})")
        done = await asyncio.to_thread(
            logs.compact,
            topic.directory,
            tp.partition,
            delete_retention_ms=topic.delete_retention_ms,
            force=force,
            what=str(tp),
        )
        return CleanResult(
            through=done.through,
            passes=done.passes,
            removed=done.removed,
            bytes_before=done.bytes_before,
            bytes_after=done.bytes_after,
        )

    async def _append_group(self, group: AppendGroup, columns: Columns) -> AppendResult | LlogError:
        tp = TopicPartition(group.topic, group.partition)
        try:
            gate = self._gates.setdefault(tp, FifoGate())
            topic, _ = await gate.enter(lambda: self._topics.find_cached(tp), lambda: self._topics.find(tp))
            check_keys(topic, columns)
            producer = producer_of_appends(topic, group.producer)
            start, end, repeated = await self._topics.rocks.append(topic.directory, tp, columns, producer)
        except LlogError as error:
            return error
        return AppendResult(
            topic=tp.topic, partition=tp.partition, start_offset=start, end_offset=end, repeated=repeated
        )
