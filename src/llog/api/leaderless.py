"""The log for programs without an event loop: blocking classes over the asynchronous core.

All of them share one event loop in a background thread, so they may be used from any thread. Stores are opened by the
first call, in the process that makes it: an object that was made before a fork works on both sides of it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from types import TracebackType
from typing import NamedTuple

import msgspec

from llog.api.portal import Connection
from llog.batch.columns import records_of
from llog.config import Settings
from llog.config.loading import load_settings
from llog.engines.object.compaction.compactor import CompactionResult, Compactor
from llog.engines.object.fencing import fence, unfence
from llog.engines.port import AppendResult, Batch, Bounds, Group
from llog.engines.routing import EngineAppender, EngineReader
from llog.errors import InvalidArgument, LlogError, PartlyAppended, TopicExists, TopicNotFound
from llog.log.catalog import OBJECT, Catalog
from llog.log.log import Log
from llog.log.opening import compactor_options, writer_options
from llog.log.producers import Producer
from llog.log.records import DELETE_RETENTION_MS, Cleanup, Topic
from llog.model import Record, TimestampType, TopicPartition

Payload = str | bytes | bytearray | memoryview | Record


class SharedAppendGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Records for one partition, appended together or not at all. Text is stored as UTF-8; a `Record` has a key and
    more.
    """

    topic: str
    partition: int
    payloads: Sequence[Payload]
    producer: Producer | None = None
    """Identity of this append: repeated under it, nothing is appended twice."""


class LeaderlessLogWriter:
    """Appends to any partition. Any number of writers, in any processes, may append to the same ones.

    Except for topics of engine `disk`: the first to append to one of their partitions owns it until it is closed.
    """

    def __init__(self, settings: Settings) -> None:
        options = writer_options(settings)
        self._connection = Connection(
            settings, lambda log: _WriterParts(log, EngineAppender(log, options), Catalog(log))
        )

    @classmethod
    def from_env(cls) -> LeaderlessLogWriter:
        """From the `LLOG_…` variables and the configuration file; `ConfigurationError` if they are wrong."""
        return cls(load_settings())

    def append_shared(self, groups: Sequence[SharedAppendGroup]) -> list[AppendResult]:
        """Appends all groups, those of object topics through one shared blob; returns their offsets, in their order,
        once they are durable.

        Partitions commit independently. If only some groups failed, `PartlyAppended` carries every group's result or
        error; if all did, the first one's error is raised.
        """
        wanted = [group_of(group) for group in groups]
        results = self._connection.call(lambda parts: parts.appender.append(wanted))
        appended = [result for result in results if isinstance(result, AppendResult)]
        if len(appended) == len(results):
            return appended
        first = next(result for result in results if isinstance(result, LlogError))
        if not appended:
            raise first
        raise PartlyAppended(len(appended), list(results), first)

    def initialize_partition(self, topic: str, partition: int) -> None:
        """Makes sure that the partition exists: creates the topic, or adds partitions to it, as far as needed."""
        self._connection.call(lambda parts: ensure_partition(parts.catalog, topic, partition))

    def create_topic(
        self,
        name: str,
        partitions: int = 1,
        *,
        retention_ms: int | None = None,
        retention_bytes: int | None = None,
        timestamp_type: str = TimestampType.CREATE,
        engine: str = OBJECT,
        cleanup: str = Cleanup.DELETE,
        delete_retention_ms: int = DELETE_RETENTION_MS,
    ) -> Topic:
        """Raises `TopicExists` if there is one of that name. Retention is applied by `llog retain` or a pipeline, not
        by itself.

        `cleanup` compact keeps the newest record of each key, and deletions for `delete_retention_ms`; it needs engine
        `disk`.
        """
        if timestamp_type not in list(TimestampType):
            raise InvalidArgument(f"timestamp_type {timestamp_type!r} is unknown: use {' or '.join(TimestampType)}")
        if cleanup not in list(Cleanup):
            raise InvalidArgument(f"cleanup {cleanup!r} is unknown: use {' or '.join(Cleanup)}")
        return self._connection.call(
            lambda parts: parts.catalog.create(
                name,
                partitions,
                engine=engine,
                retention_ms=retention_ms,
                retention_bytes=retention_bytes,
                timestamp_type=TimestampType(timestamp_type),
                cleanup=Cleanup(cleanup),
                delete_retention_ms=delete_retention_ms,
            )
        )

    def delete_topic(self, name: str) -> None:
        """Its records are gone at once, its blobs with the next collection, the files of a disk topic at once."""
        self._connection.call(lambda parts: parts.catalog.delete(name))

    def fence(self, topic: str, partition: int) -> None:
        """Once this returns, nothing is appended to the partition until `unfence`. `WrongEngine` if it is on disk."""
        self._connection.call(lambda parts: fence(parts.log, TopicPartition(topic, partition)))

    def unfence(self, topic: str, partition: int) -> None:
        self._connection.call(lambda parts: unfence(parts.log, TopicPartition(topic, partition)))

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> LeaderlessLogWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class LeaderlessLogReader:
    """Reads any partition, from any process, while others write. It needs no LLOG_BLOBS: the metadata says where the
    blobs are.
    """

    def __init__(self, settings: Settings) -> None:
        self._connection = Connection(settings, _ReaderParts.of, reads_only=True)

    @classmethod
    def from_env(cls) -> LeaderlessLogReader:
        """From the `LLOG_…` variables and the configuration file; `ConfigurationError` if they are wrong."""
        return cls(load_settings())

    def read_offset(self, topic: str, partition: int, offset: int) -> Record:
        """The record at `offset`; `OffsetOutOfRange` with both bounds if there is none."""
        return self._connection.call(lambda parts: parts.reader.read_offset(TopicPartition(topic, partition), offset))

    def read_range(self, topic: str, partition: int, start: int, stop: int) -> list[Record]:
        """The records of [start, stop), fewer if the partition ends before; all of them in memory.

        None if `start` is the next offset; `OffsetOutOfRange` with both bounds if it is outside them.
        """
        return list(self.iter_from(topic, partition, start, stop=stop))

    def iter_from(self, topic: str, partition: int, offset: int, *, stop: int | None = None) -> Iterator[Record]:
        """Records from `offset` up to `stop` (exclusive), or to what was the end when this began.

        None if `offset` is the next offset; the first step raises `OffsetOutOfRange` with both bounds if it is outside
        them.
        """
        tp = TopicPartition(topic, partition)
        batches = self._connection.call(lambda parts: _begun(parts.reader.iter_from(tp, offset, stop)))
        while (batch := self._connection.call(lambda _: _next(batches))) is not None:
            yield from records_of(batch.columns, batch.start_offset)

    def bounds(self, topic: str, partition: int) -> Bounds:
        """Readable are the offsets in [log_start_offset, next_offset)."""
        return self._connection.call(lambda parts: parts.reader.bounds(TopicPartition(topic, partition)))

    def offset_for_time(self, topic: str, partition: int, timestamp_ms: int) -> int:
        """The first offset whose time is at or after this; the next offset if there is none."""
        return self._connection.call(
            lambda parts: parts.reader.offset_for_time(TopicPartition(topic, partition), timestamp_ms)
        )

    def wait(self, topic: str, partition: int, past_offset: int, timeout: float) -> bool:
        """Whether there is a record at `past_offset` within `timeout` seconds; wakes when any process appends one."""
        return self._connection.call(
            lambda parts: parts.reader.wait(TopicPartition(topic, partition), past_offset, timeout)
        )

    def topics(self) -> list[Topic]:
        return self._connection.call(lambda parts: parts.catalog.topics())

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> LeaderlessLogReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class LeaderlessLogCompactor:
    """Joins the many small pieces of a partition into few large blobs. Several may run; each partition has one at a
    time.
    """

    def __init__(self, settings: Settings) -> None:
        options = compactor_options(settings)
        self._connection = Connection(settings, lambda log: Compactor(log, options))

    @classmethod
    def from_env(cls) -> LeaderlessLogCompactor:
        """From the `LLOG_…` variables and the configuration file; `ConfigurationError` if they are wrong."""
        return cls(load_settings())

    def compact_once(self, topic: str, partition: int, *, force: bool = False) -> CompactionResult:
        """One run of the partition; what it did. `force` takes the newest append and a single index entry, too."""
        tp = TopicPartition(topic, partition)
        return self._connection.call(lambda compactor: compactor.compact_once(tp, force=force))

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> LeaderlessLogCompactor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _WriterParts(NamedTuple):
    log: Log
    appender: EngineAppender
    catalog: Catalog


class _ReaderParts(NamedTuple):
    reader: EngineReader
    catalog: Catalog

    @classmethod
    def of(cls, log: Log) -> _ReaderParts:
        return cls(EngineReader(log), Catalog(log))


async def ensure_partition(catalog: Catalog, name: str, partition: int) -> None:
    """Creates the topic, or adds partitions to it, as far as needed; whoever does the same at the same time does not
    matter.
    """
    if partition < 0:
        raise InvalidArgument(f"partition {partition} of {name!r} cannot be: partitions are counted from 0")
    while True:
        try:
            topic = await catalog.get(name)
        except TopicNotFound:
            try:
                await catalog.create(name, partition + 1)
            except TopicExists:
                continue  # somebody else created it just now, perhaps with fewer partitions
            return
        if partition < topic.partitions:
            return
        try:
            await catalog.add_partitions(name, partition + 1)
        except InvalidArgument:
            if partition >= (await catalog.get(name)).partitions:
                raise
        return  # by this call, or by somebody else who added more of them


def group_of(group: SharedAppendGroup) -> Group:
    """The group as the core takes it; `InvalidArgument` if a payload is neither text, bytes nor a record."""
    return Group(
        topic=group.topic,
        partition=group.partition,
        records=[_record(payload) for payload in group.payloads],
        producer=group.producer,
    )


async def _begun(batches: AsyncIterator[Batch]) -> AsyncIterator[Batch]:
    return batches


async def _next(batches: AsyncIterator[Batch]) -> Batch | None:
    return await anext(batches, None)


def _record(payload: Payload) -> Record:
    if isinstance(payload, Record):
        return payload
    if isinstance(payload, str):
        try:
            return Record(payload=payload.encode())
        except UnicodeEncodeError:
            raise InvalidArgument("a payload is text with a lone surrogate, which is no Unicode: send bytes") from None
    if isinstance(payload, bytes | bytearray | memoryview):
        return Record(payload=bytes(payload))
    raise InvalidArgument(f"a payload is text, bytes or a Record, not {type(payload).__name__}")
