"""The engine `rocksdb`: a topic's records lie in the same RocksDB as the tables, so that a change and its events commit
together.

One process owns the RocksDB, from its first use until its log is closed; others must go through it, even to read. A
topic exists as long as its `meta` key does, so the next call after a deletion notices it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

from llog.engines.rocksdb.description import RocksDescription, describe_partition
from llog.engines.rocksdb.handle import RocksHandle
from llog.engines.rocksdb.topic_appender import RocksAppender
from llog.engines.rocksdb.topic_reader import RocksReader
from llog.engines.rocksdb.topics import RocksTopics, require_rocks
from llog.engines.rocksdb.verify import verify
from llog.engines.verify import verify_or_report
from llog.log.catalog import ROCKSDB
from llog.log.engine import Check, CleanResult, Verifier, WriterOptions
from llog.log.findings import VerifyReport
from llog.log.log import Log
from llog.log.owners import ROCKSDB_OWNERSHIP
from llog.log.records import Topic, encode
from llog.model import TopicPartition


class RocksEngine:
    """`rocks` is the RocksDB of this machine, or None if no setting names its directory."""

    has_owner: Final = True
    compacts_keys: Final = True
    keeps_groups: Final = True

    def __init__(self, rocks: RocksHandle | None = None) -> None:
        self.rocks = rocks

    async def create(self, log: Log, topic: Topic) -> Topic:
        logs = await (await self._require_rocks(log, topic)).open()
        await asyncio.to_thread(logs.create, topic.directory, encode(topic))
        return topic

    async def add_partitions(self, log: Log, topic: Topic, partitions: range) -> None:
        """Check that the RocksDB can be used: a partition needs nothing but its topic."""
        await (await self._require_rocks(log, topic)).open()

    async def check_removable(self, log: Log, topic: Topic) -> None:
        await (await self._require_rocks(log, topic)).open()

    async def remove(self, log: Log, topic: Topic) -> None:
        logs = await (await self._require_rocks(log, topic)).open()
        await asyncio.to_thread(logs.remove, topic.directory)

    async def is_here(self) -> bool:
        """Whether the RocksDB exists here. If it does not exist yet, a deletion must not be taken for finished."""
        return self.rocks is not None and await asyncio.to_thread(self.rocks.directory.is_dir)

    def topics(self, log: Log) -> RocksTopics:
        return RocksTopics(log, self.rocks)

    def reader(self, log: Log) -> RocksReader:
        return RocksReader(log, self.rocks)

    def appender(self, log: Log, options: WriterOptions) -> RocksAppender:
        return RocksAppender(log, self.rocks, options.append_bytes_max)

    async def describe(
        self, log: Log, tp: TopicPartition, max_pieces: int, *, from_offset: int = 0
    ) -> RocksDescription:
        """Describe the partition's state, and up to `max_pieces` records from `from_offset` on."""
        return await describe_partition(self.topics(log), tp, max_pieces, from_offset=from_offset)

    def verifier(self, log: Log) -> Verifier:
        topics = self.topics(log)

        async def verify_one(tp: TopicPartition, *, progress: Callable[[int], None] | None = None) -> VerifyReport:
            return await verify_or_report(tp, verify(topics, tp, progress))

        return verify_one

    @property
    def is_open(self) -> bool:
        """Whether this process has the RocksDB open, and so owns it."""
        return self.rocks is not None and self.rocks.logs_if_open is not None

    @property
    def allows_background_upkeep(self) -> bool:
        return self.is_open

    async def clean(self, log: Log, tp: TopicPartition, *, force: bool = False) -> CleanResult:
        return await RocksAppender(log, self.rocks).clean(tp, force=force)

    async def release_deleted(self) -> None:
        """Do nothing: no files belong to a single topic."""

    async def take_ownership(self) -> None:
        """Do nothing: a broker opens the RocksDB with its tables."""

    def ownership_name(self, topic: Topic) -> str:
        return ROCKSDB_OWNERSHIP

    def checks(self) -> Mapping[str, Check]:
        return {} if self.rocks is None else {"tables": self.rocks.check}

    async def close(self) -> None:
        if self.rocks is not None:
            await self.rocks.close()

    async def _require_rocks(self, log: Log, topic: Topic) -> RocksHandle:
        return await require_rocks(log, self.rocks, f"{'the deleted ' if topic.deleted else ''}topic {topic.name!r}")


def rocksdb_of(log: Log) -> RocksEngine:
    """Return the engine whose RocksDB also holds the tables of this log."""
    engine = log.engines[ROCKSDB]
    assert isinstance(engine, RocksEngine)
    return engine
