"""The log for programs without an event loop: blocking classes over the asynchronous core.

All of them share one event loop in a background thread, so that any thread may use them. The first call opens the
stores, in the process that makes it: an object that was created before a fork works in both processes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from types import TracebackType
from typing import NamedTuple

import msgspec

from llog.api.portal import LogPortal
from llog.batch.columns import records_of
from llog.config import Settings
from llog.config.loading import load_settings
from llog.engines.object.compaction.compactor import CompactionResult, Compactor
from llog.engines.object.fencing import fence, unfence
from llog.engines.routing import EngineAppender, EngineReader
from llog.errors import InvalidArgument, LlogError, PartlyAppended
from llog.log.catalog import OBJECT, Catalog
from llog.log.engine import AppendGroup, AppendResult, Batch, Bounds
from llog.log.log import Log
from llog.log.opening import compactor_options, writer_options
from llog.log.producers import Producer
from llog.log.records import DELETE_RETENTION_MS, Cleanup, Topic
from llog.model import Record, TimestampType, TopicPartition

Payload = str | bytes | bytearray | memoryview | Record


class SharedAppendGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Records for one partition, appended together or not at all. Text is stored as UTF-8; a `Record` can also have a
    key, a timestamp and headers.
    """

    topic: str
    partition: int
    payloads: Sequence[Payload]
    producer: Producer | None = None
    """The identity of this append: a repetition under the same identity appends nothing."""


class LeaderlessLogWriter:
    """Appends to any partition. Any number of writers, in any processes, may append to a partition of an `object`
    topic.

    The first writer that appends to a partition of a `disk` topic owns it until the writer is closed.
    """

    def __init__(self, settings: Settings) -> None:
        options = writer_options(settings)
        self._portal = LogPortal(settings, lambda log: _WriterParts(log, EngineAppender(log, options), Catalog(log)))

    @classmethod
    def from_env(cls) -> LeaderlessLogWriter:
        """Use the `LLOG_…` variables and the configuration file; raise `ConfigurationError` if they are wrong."""
        return cls(load_settings())

    def append_shared(self, groups: Sequence[SharedAppendGroup]) -> list[AppendResult]:
        """Append all groups, those of `object` topics through one shared blob; return their offsets, in the order of
        the groups, once they are durable.

        Partitions commit independently. If only some groups failed, raises `PartlyAppended` with every group's result
        or error; if all failed, raises the error of the first.
        """
        wanted = [to_append_group(group) for group in groups]
        results = self._portal.call(lambda parts: parts.appender.append(wanted))
        appended = [result for result in results if isinstance(result, AppendResult)]
        if len(appended) == len(results):
            return appended
        first = next(result for result in results if isinstance(result, LlogError))
        if not appended:
            raise first
        raise PartlyAppended(len(appended), list(results), first)

    def initialize_partition(self, topic: str, partition: int) -> None:
        """Create the topic, or add partitions to it, unless the partition exists."""
        self._portal.call(lambda parts: parts.catalog.get_or_create_partition(TopicPartition(topic, partition)))

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
        """Create a topic; raise `TopicExists` if the name is taken. Retention takes place when `llog retain` or a
        pipeline runs.

        With `cleanup` "compact", key compaction keeps the newest record of each key, and deletions for
        `delete_retention_ms`; it needs engine `disk` or `rocksdb`.
        """
        if timestamp_type not in list(TimestampType):
            raise InvalidArgument(f"timestamp_type {timestamp_type!r} is unknown: use {' or '.join(TimestampType)}")
        if cleanup not in list(Cleanup):
            raise InvalidArgument(f"cleanup {cleanup!r} is unknown: use {' or '.join(Cleanup)}")
        return self._portal.call(
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
        """Delete a topic: its records and the files of a `disk` topic at once, its blobs with the next collection."""
        self._portal.call(lambda parts: parts.catalog.delete(name))

    def fence(self, topic: str, partition: int) -> None:
        """Stop all appends to the partition until `unfence`; raise `WrongEngine` unless its engine is `object`."""
        self._portal.call(lambda parts: fence(parts.log, TopicPartition(topic, partition)))

    def unfence(self, topic: str, partition: int) -> None:
        self._portal.call(lambda parts: unfence(parts.log, TopicPartition(topic, partition)))

    def close(self) -> None:
        self._portal.close()

    def __enter__(self) -> LeaderlessLogWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class LeaderlessLogReader:
    """Reads any partition, from any process, while others write. It needs no LLOG_BLOBS: the metadata store names the
    blob store.
    """

    def __init__(self, settings: Settings) -> None:
        self._portal = LogPortal(settings, _ReaderParts.of, reads_only=True)

    @classmethod
    def from_env(cls) -> LeaderlessLogReader:
        """Use the `LLOG_…` variables and the configuration file; raise `ConfigurationError` if they are wrong."""
        return cls(load_settings())

    def read_offset(self, topic: str, partition: int, offset: int) -> Record:
        """Return the record at `offset`; raise `OffsetOutOfRange` with both bounds if there is none."""
        return self._portal.call(lambda parts: parts.reader.read_offset(TopicPartition(topic, partition), offset))

    def read_range(self, topic: str, partition: int, start: int, stop: int) -> list[Record]:
        """Return the records of [start, stop), fewer if the partition ends before; all of them in memory.

        Returns none if `start` is the next offset; raises `OffsetOutOfRange` with both bounds if it is outside them.
        """
        return list(self.iter_from(topic, partition, start, stop=stop))

    def iter_from(self, topic: str, partition: int, offset: int, *, stop: int | None = None) -> Iterator[Record]:
        """Yield the records from `offset` up to `stop` (exclusive), or to the end that the partition has now.

        Yields none if `offset` is the next offset; the first step raises `OffsetOutOfRange` with both bounds if it is
        outside them.
        """
        tp = TopicPartition(topic, partition)
        batches = self._portal.call(lambda parts: _start_iterating(parts.reader.iter_from(tp, offset, stop)))
        while (batch := self._portal.call(lambda _: _next(batches))) is not None:
            yield from records_of(batch.columns, batch.start_offset)

    def bounds(self, topic: str, partition: int) -> Bounds:
        """Return the bounds: the offsets in [log_start_offset, next_offset) can be read."""
        return self._portal.call(lambda parts: parts.reader.bounds(TopicPartition(topic, partition)))

    def offset_for_time(self, topic: str, partition: int, timestamp_ms: int) -> int:
        """Return the first offset whose time is at or after `timestamp_ms`; the next offset if there is none."""
        return self._portal.call(
            lambda parts: parts.reader.offset_for_time(TopicPartition(topic, partition), timestamp_ms)
        )

    def wait(self, topic: str, partition: int, past_offset: int, timeout: float) -> bool:
        """Wait up to `timeout` seconds for a record at `past_offset`, which any process may append; return whether it
        exists.
        """
        return self._portal.call(
            lambda parts: parts.reader.wait(TopicPartition(topic, partition), past_offset, timeout)
        )

    def topics(self) -> list[Topic]:
        return self._portal.call(lambda parts: parts.catalog.topics())

    def close(self) -> None:
        self._portal.close()

    def __enter__(self) -> LeaderlessLogReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class LeaderlessLogCompactor:
    """Joins many small ranges of a partition into few large blobs. Several compactors may run; each partition has one
    at a time.
    """

    def __init__(self, settings: Settings) -> None:
        options = compactor_options(settings)
        self._portal = LogPortal(settings, lambda log: Compactor(log, options))

    @classmethod
    def from_env(cls) -> LeaderlessLogCompactor:
        """Use the `LLOG_…` variables and the configuration file; raise `ConfigurationError` if they are wrong."""
        return cls(load_settings())

    def compact_once(self, topic: str, partition: int, *, force: bool = False) -> CompactionResult:
        """Compact the partition once; return what was done. `force` includes the newest append and a single index
        entry.
        """
        tp = TopicPartition(topic, partition)
        return self._portal.call(lambda compactor: compactor.compact_once(tp, force=force))

    def close(self) -> None:
        self._portal.close()

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


def to_append_group(group: SharedAppendGroup) -> AppendGroup:
    """Return the group with records; raise `InvalidArgument` if a payload is neither text, bytes nor a record."""
    return AppendGroup(
        topic=group.topic,
        partition=group.partition,
        records=[_record(payload) for payload in group.payloads],
        producer=group.producer,
    )


async def _start_iterating(batches: AsyncIterator[Batch]) -> AsyncIterator[Batch]:
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
            raise InvalidArgument("a payload has a lone surrogate, which UTF-8 cannot encode: send bytes") from None
    if isinstance(payload, bytes | bytearray | memoryview):
        return Record(payload=bytes(payload))
    raise InvalidArgument(f"a payload must be text, bytes or a Record, not {type(payload).__name__}")
