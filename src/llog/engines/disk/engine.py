"""The engine `disk`: a topic's partitions as segment files in directories of one machine.

A partition is at `{segments}/{topic directory}/{partition}/`. The first process that appends to it owns it, by a lock,
until it closes its log; any process of the machine reads it meanwhile. The topic's directory is there as long as the
topic is: with a look at it on every call, and one at the catalog every second, a process notices that a topic was
deleted, or created again under another directory.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, NamedTuple

from llog.batch.columns import Columns
from llog.engines.checks import check_keys, checked_columns
from llog.engines.disk.directories import remove_directories, topic_path
from llog.engines.disk.log.log import SegmentLog
from llog.engines.disk.log.reader import SegmentReader
from llog.engines.disk.open_segments import OpenSegments
from llog.engines.port import AppendResult, Batch, Bounds, CleanResult, Group, RetentionResult
from llog.engines.reading import with_times_of
from llog.engines.turnstile import Line
from llog.errors import (
    ConfigurationError,
    InvalidArgument,
    LlogError,
    PartitionNotInitialized,
    TopicElsewhere,
    TopicNotFound,
    WrongEngine,
)
from llog.log.catalog import DISK, Catalog, check_partition
from llog.log.log import Log
from llog.log.records import Cleanup, Topic
from llog.model import TimestampType, TopicPartition
from llog.stores.meta import confirmed

LOOK_AGAIN_MS: Final = 1000
_TOPICS_MAX: Final = 10_000
_BOUNDS_AT_A_TIME: Final = 64


class Place(NamedTuple):
    """A partition of a disk topic, and where its files are."""

    topic: Topic
    path: Path


class DiskTopics:
    """Where the partitions of disk topics are, as this process knows it."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._catalog = Catalog(log)
        self._known: dict[str, _Known] = {}

    @property
    def segments(self) -> OpenSegments:
        segments = self._log.segments
        if not isinstance(segments, OpenSegments):
            raise ConfigurationError("there are no disk topics here: set LLOG_SEGMENTS_DIR to a directory")
        return segments

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
        path = await topic_path(self._log, topic)
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


class DiskReader:
    """Reads disk topics beside the process that writes them."""

    def __init__(self, log: Log) -> None:
        self._topics = DiskTopics(log)

    async def bounds(self, tp: TopicPartition) -> Bounds:
        return (await self.look(tp))[1]

    async def topic_bounds(self, topic: Topic) -> list[Bounds]:
        """The bounds of all partitions, in their order."""
        found: list[Bounds] = []
        for first in range(0, topic.partitions, _BOUNDS_AT_A_TIME):
            page = range(first, min(first + _BOUNDS_AT_A_TIME, topic.partitions))
            found += await asyncio.gather(*(self.bounds(TopicPartition(topic.name, each)) for each in page))
        return found

    async def look(self, tp: TopicPartition) -> tuple[str, Bounds]:
        """The topic's directory, too."""
        async with self._reading(tp) as (topic, reader):
            return topic.directory, await reader.bounds()

    async def read(
        self, tp: TopicPartition, offset: int, max_bytes: int = 8 << 20, *, stop: int | None = None
    ) -> list[Batch]:
        async with self._reading(tp) as (topic, reader):
            found = await reader.read(offset, max_bytes, stop=stop)
        return [with_times_of(topic, Batch(tp, start, columns)) for start, columns in found]

    async def wait(self, tp: TopicPartition, past_offset: int, timeout: float) -> bool:
        """In pieces, so that a deletion, and a writer that this process opens or closes, are noticed."""
        try:
            async with asyncio.timeout(timeout):
                while True:
                    async with self._reading(tp) as (_, reader):
                        if await reader.wait(past_offset, LOOK_AGAIN_MS / 1000):
                            return True
        except TimeoutError:
            return False

    async def offset_for_time(self, tp: TopicPartition, timestamp_ms: int, by: TimestampType | None = None) -> int:
        async with self._reading(tp) as (topic, reader):
            return await reader.offset_for_time(timestamp_ms, by or topic.timestamp_type)

    @asynccontextmanager
    async def _reading(self, tp: TopicPartition) -> AsyncIterator[tuple[Topic, SegmentReader]]:
        place = self._topics.known(tp) or await self._topics.find(tp)
        try:
            with self._topics.segments.reading(place.path, tp) as reader:
                yield place.topic, reader
        except LlogError as error:
            if self._topics.is_gone(place):
                raise PartitionNotInitialized(f"partition {tp} was deleted") from error
            raise


class DiskAppender:
    """Appends to disk topics, which this process then owns until its log is closed; `LogOwned` if another one does."""

    def __init__(self, log: Log, append_bytes_max: int = 256 << 20) -> None:
        self._log = log
        self._append_bytes_max = append_bytes_max
        self._topics = DiskTopics(log)
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
