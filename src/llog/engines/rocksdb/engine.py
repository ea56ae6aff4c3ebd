"""The engine `rocksdb`: a topic's records in the RocksDB that tables are in, so that a change and its events commit
together.

One process owns that RocksDB, from its first use until its log is closed; all others go through it, to read, too. A
topic exists there as long as its `meta` key does: a deletion is noticed with the next call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, NamedTuple
from weakref import WeakValueDictionary

from llog.batch.columns import Columns
from llog.engines.checks import check_keys, checked_columns
from llog.engines.disk.directories import rocks_of
from llog.engines.port import AppendResult, Batch, Bounds, CleanResult, Group, RetentionResult
from llog.engines.reading import with_times_of
from llog.engines.rocksdb.logs import RocksLogs
from llog.engines.rocksdb.open_rocks import OpenRocks
from llog.engines.turnstile import Line
from llog.errors import (
    ConfigurationError,
    InvalidArgument,
    LlogError,
    PartitionNotInitialized,
    TopicElsewhere,
    WrongEngine,
)
from llog.log.catalog import ROCKSDB, Catalog, check_partition
from llog.log.log import Log
from llog.log.records import Cleanup, Topic
from llog.model import TimestampType, TopicPartition

__all__ = ["OpenRocks", "RocksAppender", "RocksReader", "RocksTopics"]

LOOK_AGAIN_MS: Final = 1000
_TOPICS_MAX: Final = 10_000


class Kept(NamedTuple):
    """A topic of engine `rocksdb`, and the logs that its partitions are among."""

    topic: Topic
    logs: RocksLogs


class RocksTopics:
    """Topics of engine `rocksdb`, as this process knows them."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._catalog = Catalog(log)
        self._known: dict[str, tuple[Topic, int]] = {}

    @property
    def rocks(self) -> OpenRocks:
        rocks = self._log.rocks
        if not isinstance(rocks, OpenRocks):
            raise ConfigurationError(
                "there are no topics of engine 'rocksdb' here: set LLOG_ROCKSDB_DIR to a directory"
            )
        return rocks

    def known(self, tp: TopicPartition) -> Kept | None:
        """If it was looked up just now and is still there."""
        topic, looked_ms = self._known.get(tp.topic, (None, 0))
        if topic is None or not 0 <= tp.partition < topic.partitions:
            return None
        logs = self.rocks.known
        if logs is None or logs.known(topic.directory, tp.partition) is None:
            return None
        if not 0 <= self._log.runtime.now_ms() - looked_ms < LOOK_AGAIN_MS:
            return None
        return Kept(topic, logs)

    async def find(self, tp: TopicPartition) -> Kept:
        """As the catalog says; `TopicElsewhere` if the topic is not here, `LogOwned` if another process owns what
        is.
        """
        found = self.known(tp)
        if found is not None:
            return found
        self._known.pop(tp.topic, None)
        topic = await self._catalog.get(tp.topic)
        if topic.engine != ROCKSDB:
            raise WrongEngine(f"topic {tp.topic!r} is of engine {topic.engine!r}, not of engine {ROCKSDB!r}")
        check_partition(topic, tp.partition)
        if self._log.rocks is None:
            await rocks_of(self._log, f"topic {tp.topic!r}")
        rocks = self.rocks
        elsewhere = TopicElsewhere(
            f"topic {tp.topic!r} is of engine {ROCKSDB!r}, and is not in {rocks.directory}: run this on the "
            "machine that has it, with "
            "LLOG_ROCKSDB_DIR as it was there when the topic was created, or go through the broker there"
        )
        if not await asyncio.to_thread(rocks.directory.is_dir) and not await self._has_home():
            raise elsewhere
        logs = await rocks.opened()
        try:
            await asyncio.to_thread(logs.state, topic.directory, tp.partition, str(tp))
        except PartitionNotInitialized:
            if await self._catalog.directory(tp) == topic.directory:
                raise elsewhere from None
            raise
        if len(self._known) >= _TOPICS_MAX:
            self._known.clear()
        self._known[tp.topic] = topic, self._log.runtime.now_ms()
        return Kept(topic, logs)

    async def _has_home(self) -> bool:
        """Whether the RocksDB of this log is known to be in some directory, here or elsewhere."""
        owners = self._log.owners
        return owners is not None and await owners.home(ROCKSDB) is not None


class RocksReader:
    """Reads topics of engine `rocksdb`, in the process that owns them."""

    def __init__(self, log: Log) -> None:
        self._topics = RocksTopics(log)

    async def bounds(self, tp: TopicPartition) -> Bounds:
        return (await self.look(tp))[1]

    async def topic_bounds(self, topic: Topic) -> list[Bounds]:
        """The bounds of all partitions, in their order."""
        directory, logs = topic.directory, (await self._kept(TopicPartition(topic.name, 0))).logs

        def bounds() -> list[Bounds]:
            return [logs.bounds(directory, each, f"{topic.name}/{each}") for each in range(topic.partitions)]

        return await asyncio.to_thread(bounds)

    async def look(self, tp: TopicPartition) -> tuple[str, Bounds]:
        """The topic's directory, too."""
        topic, logs = await self._kept(tp)
        return topic.directory, logs.bounds(topic.directory, tp.partition, str(tp))

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


class RocksAppender:
    """Appends to topics of engine `rocksdb`, which this process then owns until its log is closed; `LogOwned` if
    another one does.
    """

    def __init__(self, log: Log, append_bytes_max: int = 256 << 20) -> None:
        self._append_bytes_max = append_bytes_max
        self._topics = RocksTopics(log)
        self._lines: WeakValueDictionary[TopicPartition, Line] = WeakValueDictionary()
        """Of those who are on their way."""

    async def append(self, groups: Sequence[Group]) -> list[AppendResult | LlogError]:
        columns = checked_columns(groups, self._append_bytes_max)
        # As tasks, even if it is a single one: they begin in the order of the calls.
        return list(await asyncio.gather(*map(self._settled, groups, columns)))

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
        """Key compaction: of each key, the newest record stays. `InvalidArgument` if the topic is not to be compacted.

        What is not worth it yet is left alone, unless with `force`.
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

    async def _settled(self, group: Group, columns: Columns) -> AppendResult | LlogError:
        tp = TopicPartition(group.topic, group.partition)
        try:
            line = self._lines.setdefault(tp, Line())
            topic, _ = await line.through(lambda: self._topics.known(tp), lambda: self._topics.find(tp))
            check_keys(topic, columns)
            start, end, repeated = await self._topics.rocks.append(topic.directory, tp, columns, group.producer)
        except LlogError as error:
            return error
        return AppendResult(
            topic=tp.topic, partition=tp.partition, start_offset=start, end_offset=end, repeated=repeated
        )
