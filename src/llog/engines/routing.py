"""Every topic by its own engine: a reader and an appender that ask the catalog which one that is.

What a topic's engine is changes only when it is deleted and created again, so it is asked once; an engine that does not
know the topic any more has it asked anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Final, NamedTuple, TypeVar

import msgspec

from llog.engines.checks import checked_columns
from llog.engines.port import (
    AppendResult,
    Batch,
    Bounds,
    Group,
    Look,
    RetentionResult,
    TopicReader,
    WriterOptions,
)
from llog.engines.reading import iter_from, read_offset
from llog.engines.turnstile import Line
from llog.errors import LlogError, PartitionNotInitialized, TopicNotFound, WrongEngine
from llog.log.catalog import Catalog
from llog.log.engine import pick_engine
from llog.log.log import Log
from llog.log.records import Topic
from llog.model import Record, TimestampType, TopicPartition
from llog.stores.meta import Reads

_KNOWN_MAX: Final = 10_000
_MOVED: Final = (PartitionNotInitialized, WrongEngine)

E = TypeVar("E")
R = TypeVar("R")


class _Home(NamedTuple):
    """Who keeps a topic, and under which directory: another one once it was created again."""

    engine: str
    directory: str


_Homes = dict[str, _Home | LlogError]
"""Of topics; the error says why there is none."""


class _Engines:
    """Which engine keeps which topic, as far as it was asked for."""

    def __init__(self, log: Log) -> None:
        self._catalog = Catalog(log)
        self._known: dict[str, _Home] = {}

    def known(self, topic: str) -> _Home | None:
        return self._known.get(topic)

    async def ask(self, topic: str) -> _Home:
        """As the catalog says now."""
        home = (await self.ask_all([topic]))[topic]
        if isinstance(home, LlogError):
            raise home
        return home

    async def ask_all(self, topics: Sequence[str]) -> _Homes:
        """As `ask`, for all of these in few round trips."""
        for topic in topics:
            self._known.pop(topic, None)
        homes: _Homes = {}
        for topic, found in (await self._catalog.find(topics)).items():
            if isinstance(found, LlogError):
                homes[topic] = found
                continue
            if len(self._known) >= _KNOWN_MAX:
                self._known.clear()
            homes[topic] = self._known[topic] = _Home(found.engine, found.directory)
        return homes

    async def call(self, topic: str, engines: Mapping[str, E], operation: Callable[[E], Awaitable[R]]) -> R:
        """Calls the topic's engine; once more if that does not know the topic, which was created again by now."""
        home = self.known(topic) or await self.ask(topic)
        try:
            return await operation(pick_engine(engines, home.engine, topic))
        except _MOVED:
            now = await self.ask(topic)
            if now == home:
                raise
        return await operation(pick_engine(engines, now.engine, topic))


class EngineReader:
    """Reads any partition of a log, whatever its engine, from any process, while others write."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._engines = _Engines(log)
        self._readers = {name: engine.reader(log) for name, engine in log.engines.items()}

    async def bounds(self, tp: TopicPartition) -> Bounds:
        return await self._call(tp, lambda reader: reader.bounds(tp))

    async def topic_bounds(self, topic: Topic) -> list[Bounds]:
        """The bounds of all partitions of a topic, in their order, in few round trips."""
        return await pick_engine(self._readers, topic.engine, topic.name).topic_bounds(topic)

    async def look(self, tp: TopicPartition) -> Look:
        """The bounds, and whose they are: for those who keep what they read."""
        return await self._call(tp, lambda reader: reader.look(tp))

    async def begin_reads(self) -> Reads:
        """As the metadata store's: what was not found may count after their `confirm`."""
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
        """Batches from `offset` up to `stop` (exclusive), or to what was the end when this began."""
        return iter_from(self, tp, offset, stop)

    async def _call(self, tp: TopicPartition, operation: Callable[[TopicReader], Awaitable[R]]) -> R:
        return await self._engines.call(tp.topic, self._readers, operation)


class EngineAppender:
    """Appends to any partition of a log, whatever its engine.

    All appenders on one `Log` share the disk topics and the RocksDB that it holds; they are let go when the log is
    closed.
    """

    def __init__(self, log: Log, options: WriterOptions | None = None) -> None:
        options = options or WriterOptions()
        self._append_bytes_max = options.append_bytes_max
        self._engines = _Engines(log)
        self._appenders = {name: engine.appender(log, options) for name, engine in log.engines.items()}
        self._line = Line()

    async def append(self, groups: Sequence[Group]) -> list[AppendResult | LlogError]:
        """One result or error per group, in their order: partitions commit independently, and in the order of the
        calls.

        Raises only if nothing at all was appended.
        """
        if not groups:
            checked_columns(groups, self._append_bytes_max)
        outcome = await self._append(groups)
        again = [place for place, result in enumerate(outcome.results) if isinstance(result, _MOVED)]
        topics = sorted({groups[place].topic for place in again})
        moved = {topic for topic in topics if await self._has_moved(topic, outcome.homes)}
        again = [place for place in again if groups[place].topic in moved]
        if again:
            repeated = await self._append([groups[place] for place in again])
            for place, result in zip(again, repeated.results, strict=True):
                outcome.results[place] = result
            outcome = outcome._replace(raised=outcome.raised and repeated.raised)
        if outcome.raised:
            raise next(result for result in outcome.results if isinstance(result, LlogError))
        return outcome.results

    async def trim(self, tp: TopicPartition, before_offset: int) -> RetentionResult:
        return await self._engines.call(tp.topic, self._appenders, lambda appender: appender.trim(tp, before_offset))

    async def retain(
        self, tp: TopicPartition, *, retention_ms: int | None, retention_bytes: int | None
    ) -> RetentionResult:
        return await self._engines.call(
            tp.topic,
            self._appenders,
            lambda appender: appender.retain(tp, retention_ms=retention_ms, retention_bytes=retention_bytes),
        )

    async def _append(self, groups: Sequence[Group]) -> _Outcome:
        topics = sorted({group.topic for group in groups})
        homes = await self._line.through(lambda: self._known(topics), lambda: self._asked(topics))
        begun = self._begin(groups, homes)
        results = begun.failed
        answers = await asyncio.gather(*(call.answer for call in begun.calls), return_exceptions=True)
        for call, answer in zip(begun.calls, answers, strict=True):
            if isinstance(answer, BaseException) and not isinstance(answer, LlogError):
                raise answer
            all_of_them = [answer] * len(call.places) if isinstance(answer, LlogError) else answer
            results |= zip(call.places, all_of_them, strict=True)
        raised = all(isinstance(answer, LlogError) for answer in answers)
        return _Outcome([results[place] for place in range(len(groups))], homes, raised)

    def _begin(self, groups: Sequence[Group], homes: _Homes) -> _Begun:
        """Starts one append for each engine. As a task, even if it is the only one: tasks begin in the order in which
        they were made.
        """
        failed: dict[int, AppendResult | LlogError] = {}
        places: dict[str, list[int]] = {}
        for place, group in enumerate(groups):
            home = homes[group.topic]
            if isinstance(home, LlogError):
                failed[place] = home
            else:
                places.setdefault(home.engine, []).append(place)
        if len(places) > 1:
            # What is wrong with any group must be known before one engine appends.
            columns = checked_columns(groups, self._append_bytes_max)
            groups = [msgspec.structs.replace(each, records=part) for each, part in zip(groups, columns, strict=True)]
        appenders = {name: pick_engine(self._appenders, name, groups[mine[0]].topic) for name, mine in places.items()}
        calls = [
            _Call(mine, asyncio.ensure_future(appenders[name].append([groups[place] for place in mine])))
            for name, mine in places.items()
        ]
        return _Begun(calls, failed)

    def _known(self, topics: Sequence[str]) -> _Homes | None:
        """Where these topics are, if all of them are known."""
        homes = {topic: self._engines.known(topic) for topic in topics}
        known: _Homes = {topic: home for topic, home in homes.items() if home is not None}
        return known if len(known) == len(homes) else None

    async def _asked(self, topics: Sequence[str]) -> _Homes:
        """Where these topics are, or why they are nowhere."""
        known: _Homes = {topic: home for topic in topics if (home := self._engines.known(topic)) is not None}
        unknown = [topic for topic in topics if topic not in known]
        try:
            return known | await self._engines.ask_all(unknown)
        except LlogError as error:
            return known | dict.fromkeys(unknown, error)

    async def _has_moved(self, topic: str, homes: _Homes) -> bool:
        """Whether the topic was created again since it was appended to."""
        try:
            return isinstance(homes[topic], _Home) and await self._engines.ask(topic) != homes[topic]
        except TopicNotFound:
            return False


class _Call(NamedTuple):
    """An append of one engine under way, and the places of its groups."""

    places: list[int]
    answer: asyncio.Future[list[AppendResult | LlogError]]


class _Begun(NamedTuple):
    calls: list[_Call]
    failed: dict[int, AppendResult | LlogError]
    """The groups of topics that there are not."""


class _Outcome(NamedTuple):
    results: list[AppendResult | LlogError]
    homes: _Homes
    raised: bool
    """Whether every engine raised, so that nothing at all was appended."""
