"""Where the partitions of disk topics are, as this process knows it.

The topic's directory is there as long as the topic is: with a look at it on every call, and one at the catalog every
second, a process notices that a topic was deleted, or created again under another directory.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final, NamedTuple

from llog.engines.disk.directories import remove_directories, topic_path
from llog.engines.disk.open_segments import OpenSegments
from llog.errors import ConfigurationError, PartitionNotInitialized, TopicElsewhere, TopicNotFound, WrongEngine
from llog.log.catalog import DISK, Catalog, check_partition
from llog.log.log import Log
from llog.log.records import Topic
from llog.model import TopicPartition
from llog.stores.meta import confirmed

LOOK_AGAIN_MS: Final = 1000
_TOPICS_MAX: Final = 10_000


class Place(NamedTuple):
    """A partition of a disk topic, and where its files are."""

    topic: Topic
    path: Path


class DiskTopics:
    """Where the partitions of disk topics are, as this process knows it."""

    def __init__(self, log: Log, segments: OpenSegments | None) -> None:
        self._log = log
        self._segments = segments
        self._catalog = Catalog(log)
        self._known: dict[str, _Known] = {}

    @property
    def segments(self) -> OpenSegments:
        if self._segments is None:
            raise ConfigurationError("there are no disk topics here: set LLOG_SEGMENTS_DIR to a directory")
        return self._segments

    def known(self, tp: TopicPartition) -> Place | None:
        """If it was looked up just now and its directory is still there."""
        known = self._known.get(tp.topic)
        if known is None or not 0 <= tp.partition < known.topic.partitions:
            return None
        place = Place(known.topic, known.path / str(tp.partition))
        if not 0 <= self._log.runtime.now_ms() - known.looked_ms < LOOK_AGAIN_MS or not place.path.is_dir():
            return None
        return place

    async def find(self, tp: TopicPartition) -> Place:
        """As the catalog says; `TopicElsewhere` if the topic's files are not here."""
        found = self.known(tp)
        if found is not None:
            return found
        before = self._known.pop(tp.topic, None)
        try:
            topic = await self._catalog.get(tp.topic)
        except TopicNotFound:
            await self._let_go(before)
            raise
        if before is not None and topic.directory != before.topic.directory:
            await self._let_go(before)
        if topic.engine != DISK:
            raise WrongEngine(f"topic {tp.topic!r} is of engine {topic.engine!r}, not of engine {DISK!r}")
        check_partition(topic, tp.partition)
        path = await topic_path(self._log, self._segments, topic)
        if not path.is_dir():
            raise TopicElsewhere(
                f"topic {tp.topic!r} is of engine {DISK!r}, and its directory {path} is not here: run this on the "
                "machine that has it, "
                "with LLOG_SEGMENTS_DIR as it was there when the topic was created, or go through the broker there"
            )
        place = Place(topic, path / str(tp.partition))
        if not place.path.is_dir():
            raise TopicElsewhere(
                f"partition {tp} has lost its directory {place.path}: bring it back from a copy, or delete the topic"
            )
        if len(self._known) >= _TOPICS_MAX:
            self._known.clear()
        self._known[tp.topic] = _Known(topic, path, self._log.runtime.now_ms())
        return place

    async def has_directory(self, topic: str) -> bool:
        """Whether files of this topic are here, though perhaps not those of every partition."""
        return (await topic_path(self._log, self._segments, await self._catalog.get(topic))).is_dir()

    async def confirm(self, tp: TopicPartition, place: Place) -> None:
        """After files were made there: a topic that was deleted meanwhile must not come back by that."""
        self._known.pop(tp.topic, None)
        if await self._directory(tp) == place.topic.directory:
            return
        # Before all its files are removed, for an old state of the catalog may not show the topic yet.
        if await confirmed(self._log.meta, lambda: self._directory(tp)) != place.topic.directory:
            await self.segments.let_go(place.path.parent)
            await asyncio.to_thread(remove_directories, place.path.parent)
            raise PartitionNotInitialized(f"partition {tp} was deleted")

    async def _directory(self, tp: TopicPartition) -> str | None:
        """The directory of the topic that has the name now; None if there is none."""
        try:
            return await self._catalog.directory(tp)
        except TopicNotFound:
            return None

    def is_gone(self, place: Place) -> bool:
        """Whether the topic was deleted since it was found."""
        return not place.path.parent.is_dir()

    async def _let_go(self, known: _Known | None) -> None:
        if known is not None:
            await self.segments.let_go(known.path)


class _Known(NamedTuple):
    topic: Topic
    path: Path
    looked_ms: int
