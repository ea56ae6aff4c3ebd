"""The reader and the appender for topics of every engine: they call the engine that the catalog names.

A topic's engine changes only when the topic is deleted and created again, so it is looked up once; and again when the
engine does not know the topic any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Final, NamedTuple, TypeVar

import msgspec

from llog.engines.checks import checked_columns
from llog.engines.fifo_gate import FifoGate
from llog.engines.reading import iter_from, read_offset
from llog.errors import LlogError, PartitionNotInitialized, TopicNotFound, WrongEngine
from llog.log.catalog import Catalog
from llog.log.engine import (
    AppendGroup,
    AppendResult,
    Batch,
    Bounds,
    PartitionView,
    RetentionResult,
    TopicReader,
    WriterOptions,
    pick_engine,
)
from llog.log.log import Log
from llog.log.records import Topic
from llog.model import Record, TimestampType, TopicPartition
from llog.stores.meta import Reads

_CACHED_TOPICS_MAX: Final = 10_000
_MOVED_ERRORS: Final = (PartitionNotInitialized, WrongEngine)

E = TypeVar("E")
R = TypeVar("R")


class _TopicLocation(NamedTuple):
    """The engine and the directory of a topic; either may change when the topic is created again."""

    engine: str
    directory: str


_TopicLocations = dict[str, _TopicLocation | LlogError]
"""By topic; the error says why a topic has no location."""


class _TopicLocator:
    """Finds the engines of topics, and remembers them."""

    def __init__(self, log: Log) -> None:
        self._catalog = Catalog(log)
        self._cached_locations: dict[str, _TopicLocation] = {}

    def cached(self, topic: str) -> _TopicLocation | None:
        return self._cached_locations.get(topic)

    async def look_up(self, topic: str) -> _TopicLocation:
        """Return the location that the catalog has now."""
        location = (await self.look_up_all([topic]))[topic]
        if isinstance(location, LlogError):
            raise location
        return location

    async def look_up_all(self, topics: Sequence[str]) -> _TopicLocations:
        """Like `look_up`, for many topics in few round trips."""
        for topic in topics:
            self._cached_locations.pop(topic, None)
        locations: _TopicLocations = {}
        for topic, found in (await self._catalog.find(topics)).items():
            if isinstance(found, LlogError):
                locations[topic] = found
                continue
            if len(self._cached_locations) >= _CACHED_TOPICS_MAX:
                self._cached_locations.clear()
            locations[topic] = self._cached_locations[topic] = _TopicLocation(found.engine, found.directory)
        return locations

    async def call(self, topic: str, engines: Mapping[str, E], operation: Callable[[E], Awaitable[R]]) -> R:
        """Call the topic's engine, and call again if the topic has moved, because it was created again."""
        location = self.cached(topic) or await self.look_up(topic)
        try:
            return await operation(pick_engine(engines, location.engine, topic))
        except _MOVED_ERRORS:
            now = await self.look_up(topic)
            if now == location:
                raise
        return await operation(pick_engine(engines, now.engine, topic))


class EngineReader:
    """Reads the partitions of a log, whatever their engines, from any process, while others write."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._locator = _TopicLocator(log)
        self._readers = {name: engine.reader(log) for name, engine in log.engines.items()}

    async def bounds(self, tp: TopicPartition) -> Bounds:
        return await self._call(tp, lambda reader: reader.bounds(tp))

    async def topic_bounds(self, topic: Topic) -> list[Bounds]:
        """Return the bounds of all partitions of a topic, in their order, in few round trips."""
        return await pick_engine(self._readers, topic.engine, topic.name).topic_bounds(topic)

    async def view(self, tp: TopicPartition) -> PartitionView:
        """Return the bounds with the directory they belong to, for a caller that caches records."""
        return await self._call(tp, lambda reader: reader.view(tp))

    async def begin_reads(self) -> Reads:
        """Begin reads as on the metadata store: what was not found counts only after their `confirm`."""
        return await self._log.meta.begin_reads()

    async def read(
        self, tp: TopicPartition, offset: int, max_bytes: int = 8 << 20, *, stop: int | None = None
    ) -> list[Batch]:
        return await self._call(tp, lambda reader: reader.read(tp, offset, max_bytes, stop=stop))

    async def wait(self, tp: TopicPartition, past_offset: int, timeout: float) -> bool:
        return await self._call(tp, lambda reader: reader.wait(tp, past_offset, timeout))

    async def offset_for_time(self, tp: TopicPartition, timestamp_ms: int, by: TimestampType | None = None) -> int:
        return await self._call(tp, lambda reader: reader.offset_for_time(tp, timestamp_ms, by))

    async def read_offset(self, tp: TopicPartition, offset: int) -> Record:
        return await read_offset(self, tp, offset)

    def iter_from(self, tp: TopicPartition, offset: int, stop: int | None = None) -> AsyncIterator[Batch]:
        """Yield batches from `offset` up to `stop` (exclusive), by default the next offset at the time of the call."""
        return iter_from(self, tp, offset, stop)

    async def _call(self, tp: TopicPartition, operation: Callable[[TopicReader], Awaitable[R]]) -> R:
        return await self._locator.call(tp.topic, self._readers, operation)


class EngineAppender:
    """Appends to the partitions of a log, whatever their engines.

    All appenders on one `Log` share its disk topics and its RocksDB, which are released when the log is closed.
    """

    def __init__(self, log: Log, options: WriterOptions | None = None) -> None:
        options = options or WriterOptions()
        self._append_bytes_max = options.append_bytes_max
        self._locator = _TopicLocator(log)
        self._appenders = {name: engine.appender(log, options) for name, engine in log.engines.items()}
        self._gate = FifoGate()

    async def append(self, groups: Sequence[AppendGroup]) -> list[AppendResult | LlogError]:
        """Return one result or error per group, in their order. Partitions commit independently, and each in the order
        of the calls.

        Raises only if nothing was appended.
        """
        if not groups:
            checked_columns(groups, self._append_bytes_max)
        outcome = await self._append(groups)
        again = [index for index, result in enumerate(outcome.results) if isinstance(result, _MOVED_ERRORS)]
        topics = sorted({groups[index].topic for index in again})
        moved = {topic for topic in topics if await self._has_moved(topic, outcome.locations)}
        again = [index for index in again if groups[index].topic in moved]
        if again:
            repeated = await self._append([groups[index] for index in again])
            for index, result in zip(again, repeated.results, strict=True):
                outcome.results[index] = result
            outcome = outcome._replace(raised=outcome.raised and repeated.raised)
        if outcome.raised:
            raise next(result for result in outcome.results if isinstance(result, LlogError))
        return outcome.results

    async def trim(self, tp: TopicPartition, before_offset: int) -> RetentionResult:
        return await self._locator.call(tp.topic, self._appenders, lambda appender: appender.trim(tp, before_offset))

    async def retain(
        self, tp: TopicPartition, *, retention_ms: int | None, retention_bytes: int | None
    ) -> RetentionResult:
        return await self._locator.call(
            tp.topic,
            self._appenders,
            lambda appender: appender.retain(tp, retention_ms=retention_ms, retention_bytes=retention_bytes),
        )

    async def _append(self, groups: Sequence[AppendGroup]) -> _Outcome:
        topics = sorted({group.topic for group in groups})
        locations = await self._gate.enter(lambda: self._cached_locations(topics), lambda: self._look_up(topics))
        started = self._start_calls(groups, locations)
        results = started.failed
        answers = await asyncio.gather(*(call.answer for call in started.calls), return_exceptions=True)
        for call, answer in zip(started.calls, answers, strict=True):
            if isinstance(answer, BaseException) and not isinstance(answer, LlogError):
                raise answer
            of_groups = [answer] * len(call.indexes) if isinstance(answer, LlogError) else answer
            results |= zip(call.indexes, of_groups, strict=True)
        raised = all(isinstance(answer, LlogError) for answer in answers)
        return _Outcome([results[index] for index in range(len(groups))], locations, raised)

    def _start_calls(self, groups: Sequence[AppendGroup], locations: _TopicLocations) -> _StartedCalls:
        """Start one append for each engine, as a task even for a single one: tasks start in the order of the calls."""
        failed: dict[int, AppendResult | LlogError] = {}
        indexes: dict[str, list[int]] = {}
        for index, group in enumerate(groups):
            location = locations[group.topic]
            if isinstance(location, LlogError):
                failed[index] = location
            else:
                indexes.setdefault(location.engine, []).append(index)
        if len(indexes) > 1:
            # Check all groups before any engine appends.
            columns = checked_columns(groups, self._append_bytes_max)
            groups = [msgspec.structs.replace(each, records=part) for each, part in zip(groups, columns, strict=True)]
        appenders = {name: pick_engine(self._appenders, name, groups[own[0]].topic) for name, own in indexes.items()}
        calls = [
            _EngineCall(own, asyncio.ensure_future(appenders[name].append([groups[index] for index in own])))
            for name, own in indexes.items()
        ]
        return _StartedCalls(calls, failed)

    def _cached_locations(self, topics: Sequence[str]) -> _TopicLocations | None:
        """Return the locations of these topics if all of them are cached; None otherwise."""
        locations = {topic: self._locator.cached(topic) for topic in topics}
        cached: _TopicLocations = {topic: location for topic, location in locations.items() if location is not None}
        return cached if len(cached) == len(locations) else None

    async def _look_up(self, topics: Sequence[str]) -> _TopicLocations:
        """Return the locations of these topics, after looking up those that are not cached."""
        cached = {topic: self._locator.cached(topic) for topic in topics}
        locations: _TopicLocations = {topic: location for topic, location in cached.items() if location is not None}
        unknown = [topic for topic in topics if topic not in locations]
        try:
            return locations | await self._locator.look_up_all(unknown)
        except LlogError as error:
            return locations | dict.fromkeys(unknown, error)

    async def _has_moved(self, topic: str, locations: _TopicLocations) -> bool:
        """Whether the topic was created again since the append began."""
        location = locations[topic]
        try:
            return isinstance(location, _TopicLocation) and await self._locator.look_up(topic) != location
        except TopicNotFound:
            return False


class _EngineCall(NamedTuple):
    """An append under way in one engine, and the indexes of its groups."""

    indexes: list[int]
    answer: asyncio.Future[list[AppendResult | LlogError]]


class _StartedCalls(NamedTuple):
    calls: list[_EngineCall]
    failed: dict[int, AppendResult | LlogError]
    """The errors of groups whose topic was not found, by index."""


class _Outcome(NamedTuple):
    results: list[AppendResult | LlogError]
    locations: _TopicLocations
    raised: bool
    """Whether every engine raised, so that nothing was appended."""
