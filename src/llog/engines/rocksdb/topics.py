"""Finds and caches the topics of engine `rocksdb`: a topic exists as long as its `meta` key in RocksDB does."""

from __future__ import annotations

import asyncio
from typing import Final, NamedTuple

from llog.engines.rocksdb.handle import RocksHandle
from llog.engines.rocksdb.logs import RocksLogs
from llog.errors import ConfigurationError, PartitionNotInitialized, TopicElsewhere, WrongEngine
from llog.log.catalog import ROCKSDB, Catalog, check_partition
from llog.log.log import Log
from llog.log.owners import ROCKSDB_LABEL, ROCKSDB_OWNERSHIP
from llog.log.records import Topic
from llog.model import TopicPartition

CACHED_MS: Final = 1000
_TOPICS_MAX: Final = 10_000


async def require_rocks(log: Log, rocks: RocksHandle | None, what: str) -> RocksHandle:
    """Return the RocksDB of this machine. If no setting names one, raise `LogOwned` if a process elsewhere has it, and
    `ConfigurationError` otherwise.
    """
    if rocks is not None:
        return rocks
    if log.owners is not None and (home := await log.owners.home(ROCKSDB_OWNERSHIP)) is not None:
        raise await log.owners.elsewhere(ROCKSDB_OWNERSHIP, ROCKSDB_LABEL, home, None, "LLOG_ROCKSDB_DIR")
    raise ConfigurationError(
        f"{what} is of engine 'rocksdb', and no setting says where that is: set LLOG_ROCKSDB_DIR to a directory"
    )


class RocksTopic(NamedTuple):
    """A topic of engine `rocksdb`, and the logs that hold its partitions."""

    topic: Topic
    logs: RocksLogs


class RocksTopics:
    def __init__(self, log: Log, rocks: RocksHandle | None) -> None:
        self._log = log
        self._rocks = rocks
        self._catalog = Catalog(log)
        self._cached: dict[str, tuple[Topic, int]] = {}

    @property
    def rocks(self) -> RocksHandle:
        if self._rocks is None:
            raise ConfigurationError(
                "this process has no directory for topics of engine 'rocksdb': set LLOG_ROCKSDB_DIR to one"
            )
        return self._rocks

    def find_cached(self, tp: TopicPartition) -> RocksTopic | None:
        """Return the topic if it was found less than `CACHED_MS` ago and still exists."""
        topic, found_ms = self._cached.get(tp.topic, (None, 0))
        if topic is None or not 0 <= tp.partition < topic.partitions:
            return None
        logs = self.rocks.logs_if_open
        if logs is None or logs.cached_state(topic.directory, tp.partition) is None:
            return None
        if not 0 <= self._log.runtime.now_ms() - found_ms < CACHED_MS:
            return None
        return RocksTopic(topic, logs)

    async def find(self, tp: TopicPartition) -> RocksTopic:
        """Return the topic, from the catalog if it is not cached. Raises `TopicElsewhere` if it is not here, and
        `LogOwned` if another process owns the RocksDB.
        """
        found = self.find_cached(tp)
        if found is not None:
            return found
        self._cached.pop(tp.topic, None)
        topic = await self._catalog.get(tp.topic)
        if topic.engine != ROCKSDB:
            raise WrongEngine(f"topic {tp.topic!r} is of engine {topic.engine!r}, not of engine {ROCKSDB!r}")
        check_partition(topic, tp.partition)
        rocks = await require_rocks(self._log, self._rocks, f"topic {tp.topic!r}")
        elsewhere = TopicElsewhere(
            f"topic {tp.topic!r} is of engine {ROCKSDB!r}, and is not in {rocks.directory}: run this on the "
            "machine that has it, with the LLOG_ROCKSDB_DIR under which the topic was created, or use the broker there"
        )
        if not await asyncio.to_thread(rocks.directory.is_dir) and not await self._has_home():
            raise elsewhere
        logs = await rocks.open()
        try:
            await asyncio.to_thread(logs.state, topic.directory, tp.partition, str(tp))
        except PartitionNotInitialized:
            if await self._catalog.directory(tp) == topic.directory:
                raise elsewhere from None
            raise
        if len(self._cached) >= _TOPICS_MAX:
            self._cached.clear()
        self._cached[tp.topic] = topic, self._log.runtime.now_ms()
        return RocksTopic(topic, logs)

    async def _has_home(self) -> bool:
        """Whether the log has recorded a directory of its RocksDB, here or elsewhere."""
        owners = self._log.owners
        return owners is not None and await owners.home(ROCKSDB_OWNERSHIP) is not None
