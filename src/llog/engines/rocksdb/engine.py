"""The engine `rocksdb`: a topic's records in the RocksDB that tables are in, so that a change and its events commit
together.

One process owns that RocksDB, from its first use until its log is closed; all others go through it, to read, too. A
topic exists there as long as its `meta` key does: a deletion is noticed with the next call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

from llog.engines.port import CleanResult, WriterOptions
from llog.engines.rocksdb.description import RocksDescription, describe_partition
from llog.engines.rocksdb.open_rocks import OpenRocks
from llog.engines.rocksdb.topic_appender import RocksAppender
from llog.engines.rocksdb.topic_reader import RocksReader
from llog.engines.rocksdb.topics import RocksTopics, require_rocks
from llog.engines.rocksdb.verify import verify
from llog.engines.verify import report_reach
from llog.log.catalog import ROCKSDB
from llog.log.engine import Check, Verifier
from llog.log.findings import VerifyReport
from llog.log.log import Log
from llog.log.records import Topic, encode
from llog.model import TopicPartition


class RocksEngine:
    """`rocks` is the RocksDB of this machine, or None where no setting says where it lies."""

    has_owner: Final = True
    compacts_keys: Final = True
    keeps_groups: Final = True

    def __init__(self, rocks: OpenRocks | None = None) -> None:
        self.rocks = rocks

    async def create(self, log: Log, topic: Topic) -> Topic:
        logs = await (await self._required(log, topic)).opened()
        await asyncio.to_thread(logs.create, topic.directory, encode(topic))
        return topic

    async def add_partitions(self, log: Log, topic: Topic, partitions: range) -> None:
        """A partition needs nothing but its topic."""
        await (await self._required(log, topic)).opened()

    async def check_removable(self, log: Log, topic: Topic) -> None:
        await (await self._required(log, topic)).opened()

    async def remove(self, log: Log, topic: Topic) -> None:
        logs = await (await self._required(log, topic)).opened()
        await asyncio.to_thread(logs.remove, topic.directory)

    async def is_here(self) -> bool:
        """Not where there is no RocksDB yet: a deletion would be taken for finished that is not."""
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
        """The state, and up to `max_pieces` records from `from_offset` on."""
        return await describe_partition(self.topics(log), tp, max_pieces, from_offset=from_offset)

    def verifier(self, log: Log) -> Verifier:
        topics = self.topics(log)

        async def verify_one(tp: TopicPartition, *, progress: Callable[[int], None] | None = None) -> VerifyReport:
            return await report_reach(tp, verify(topics, tp, progress))

        return verify_one

    @property
    def is_taken_up(self) -> bool:
        return self.rocks is not None and self.rocks.known is not None

    async def clean(self, log: Log, tp: TopicPartition, *, force: bool = False) -> CleanResult:
        return await RocksAppender(log, self.rocks).clean(tp, force=force)

    async def release_deleted(self) -> None:
        """Nothing is open of a topic alone."""

    async def take_up(self) -> None:
        """A broker takes the RocksDB up with its tables."""

    def owner_key(self, topic: Topic) -> str:
        return ROCKSDB

    def checks(self) -> Mapping[str, Check]:
        return {} if self.rocks is None else {"tables": self.rocks.check}

    async def close(self) -> None:
        if self.rocks is not None:
            await self.rocks.close()

    async def _required(self, log: Log, topic: Topic) -> OpenRocks:
        return await require_rocks(log, self.rocks, f"{'the deleted ' if topic.deleted else ''}topic {topic.name!r}")


def rocksdb_of(log: Log) -> RocksEngine:
    """The engine whose RocksDB has the tables of this log, too."""
    engine = log.engines[ROCKSDB]
    assert isinstance(engine, RocksEngine)
    return engine
