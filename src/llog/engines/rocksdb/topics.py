"""Topics of engine `rocksdb`, as this process knows them: one exists as long as its `meta` key in RocksDB does."""

from __future__ import annotations

import asyncio
from typing import Final, NamedTuple

from llog.engines.rocksdb.logs import RocksLogs
from llog.engines.rocksdb.open_rocks import OpenRocks
from llog.errors import ConfigurationError, PartitionNotInitialized, TopicElsewhere, WrongEngine
from llog.log.catalog import ROCKSDB, Catalog, check_partition
from llog.log.log import Log
from llog.log.owners import ROCKSDB_NAMED
from llog.log.records import Topic
from llog.model import TopicPartition

LOOK_AGAIN_MS: Final = 1000
_TOPICS_MAX: Final = 10_000


async def require_rocks(log: Log, rocks: OpenRocks | None, what: str) -> OpenRocks:
    """The RocksDB of this machine. If no setting names one: `LogOwned` if a process elsewhere has it, else
    `ConfigurationError`.
    """
    if rocks is not None:
        return rocks
    if log.owners is not None and (home := await log.owners.home(ROCKSDB)) is not None:
        raise await log.owners.elsewhere(ROCKSDB, ROCKSDB_NAMED, home, None, "LLOG_ROCKSDB_DIR")
    raise ConfigurationError(
        f"{what} is of engine 'rocksdb', and nothing says where that lies: set LLOG_ROCKSDB_DIR to a directory"
    )


class Kept(NamedTuple):
    """A topic of engine `rocksdb`, and the logs that its partitions are among."""

    topic: Topic
    logs: RocksLogs


class RocksTopics:
    def __init__(self, log: Log, rocks: OpenRocks | None) -> None:
        self._log = log
        self._rocks = rocks
        self._catalog = Catalog(log)
        self._known: dict[str, tuple[Topic, int]] = {}

    @property
    def rocks(self) -> OpenRocks:
        if self._rocks is None:
            raise ConfigurationError(
                "there are no topics of engine 'rocksdb' here: set LLOG_ROCKSDB_DIR to a directory"
            )
        return self._rocks

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
        rocks = await require_rocks(self._log, self._rocks, f"topic {tp.topic!r}")
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
