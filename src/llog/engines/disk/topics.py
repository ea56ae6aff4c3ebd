"""Finds the files of disk topics, and remembers where they are.

A topic's directory exists as long as the topic does. By checking the directory on every call, and the catalog every
second, a process notices that a topic was deleted, or created again under another directory.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final, NamedTuple

from llog.engines.disk.directories import remove_directories, topic_path
from llog.engines.disk.segment_pool import SegmentPool
from llog.errors import ConfigurationError, PartitionNotInitialized, TopicElsewhere, TopicNotFound, WrongEngine
from llog.log.catalog import DISK, Catalog, check_partition
from llog.log.log import Log
from llog.log.records import Topic
from llog.model import TopicPartition
from llog.stores.meta import read_confirmed

CACHED_MS: Final = 1000
_TOPICS_MAX: Final = 10_000


class DiskPartition(NamedTuple):
    """The topic of a partition, and the directory of the partition's files."""

    topic: Topic
    path: Path


class DiskTopics:
    """Finds the files of disk topics."""

    def __init__(self, log: Log, segments: SegmentPool | None) -> None:
        self._log = log
        self._segments = segments
        self._catalog = Catalog(log)
        self._cached: dict[str, _CachedTopic] = {}

    @property
    def segments(self) -> SegmentPool:
        if self._segments is None:
            raise ConfigurationError("this process has no directory for disk topics: set LLOG_SEGMENTS_DIR to one")
        return self._segments

    def find_cached(self, tp: TopicPartition) -> DiskPartition | None:
        """Return the partition if it was found less than `CACHED_MS` ago and its directory still exists."""
        cached = self._cached.get(tp.topic)
        if cached is None or not 0 <= tp.partition < cached.topic.partitions:
            return None
        partition = DiskPartition(cached.topic, cached.path / str(tp.partition))
        if not 0 <= self._log.runtime.now_ms() - cached.found_ms < CACHED_MS or not partition.path.is_dir():
            return None
        return partition

    async def find(self, tp: TopicPartition) -> DiskPartition:
        """Return the partition, from the catalog if it is not cached. Raises `TopicElsewhere` if its files are not
        here.
        """
        found = self.find_cached(tp)
        if found is not None:
            return found
        before = self._cached.pop(tp.topic, None)
        try:
            topic = await self._catalog.get(tp.topic)
        except TopicNotFound:
            await self._close_files(before)
            raise
        if before is not None and topic.directory != before.topic.directory:
            await self._close_files(before)
        if topic.engine != DISK:
            raise WrongEngine(f"topic {tp.topic!r} is of engine {topic.engine!r}, not of engine {DISK!r}")
        check_partition(topic, tp.partition)
        path = await topic_path(self._log, self._segments, topic)
        if not path.is_dir():
            raise TopicElsewhere(
                f"topic {tp.topic!r} is of engine {DISK!r}, and its directory {path} is not here: run this on the "
                "machine that has it, with the LLOG_SEGMENTS_DIR under which the topic was created, or use the broker "
                "there"
            )
        partition = DiskPartition(topic, path / str(tp.partition))
        if not partition.path.is_dir():
            raise TopicElsewhere(
                f"partition {tp} has lost its directory {partition.path}: restore it from a copy, or delete the topic"
            )
        if len(self._cached) >= _TOPICS_MAX:
            self._cached.clear()
        self._cached[tp.topic] = _CachedTopic(topic, path, self._log.runtime.now_ms())
        return partition

    async def has_directory(self, topic: str) -> bool:
        """Whether the topic's directory is here; directories of partitions may still be missing."""
        return (await topic_path(self._log, self._segments, await self._catalog.get(topic))).is_dir()

    async def confirm(self, tp: TopicPartition, partition: DiskPartition) -> None:
        """Check, after files were made in the partition, that its topic was not deleted meanwhile. If it was, remove
        the files again and raise `PartitionNotInitialized`.
        """
        self._cached.pop(tp.topic, None)
        if await self._directory(tp) == partition.topic.directory:
            return
        # Confirmed before files are removed: a stale read of the catalog may not show the topic yet.
        if await read_confirmed(self._log.meta, lambda: self._directory(tp)) != partition.topic.directory:
            await self.segments.close_below(partition.path.parent)
            await asyncio.to_thread(remove_directories, partition.path.parent)
            raise PartitionNotInitialized(f"partition {tp} was deleted")

    async def _directory(self, tp: TopicPartition) -> str | None:
        """Return the directory of the topic that has the name now; None if no topic has."""
        try:
            return await self._catalog.directory(tp)
        except TopicNotFound:
            return None

    def is_gone(self, partition: DiskPartition) -> bool:
        """Whether the topic was deleted since the partition was found."""
        return not partition.path.parent.is_dir()

    async def _close_files(self, cached: _CachedTopic | None) -> None:
        if cached is not None:
            await self.segments.close_below(cached.path)


class _CachedTopic(NamedTuple):
    topic: Topic
    path: Path
    found_ms: int
