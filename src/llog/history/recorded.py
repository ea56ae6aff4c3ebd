"""Appenders, readers and writers that record every call. Each wraps the object that it records and takes its place."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

from llog.api.leaderless import LeaderlessLogReader, LeaderlessLogWriter, SharedAppendGroup, to_append_group
from llog.batch.columns import columns_of
from llog.engines.reading import iter_from, read_offset
from llog.errors import LlogError, PartlyAppended
from llog.history.recorder import HistoryRecorder, OpenOperation
from llog.log.engine import AppendGroup, AppendResult, Batch, Bounds, LogAppender, LogReader, RetentionResult
from llog.model import Record, TimestampType, TopicPartition

R = TypeVar("R")


class RecordedAppender:
    """An appender of any engine, e.g. `Writer` or `EngineAppender`, whose appends and trims are recorded."""

    def __init__(self, recorder: HistoryRecorder, appender: LogAppender) -> None:
        self._recorder = recorder
        self._appender = appender

    async def append(self, groups: Sequence[AppendGroup]) -> list[AppendResult | LlogError]:
        under_way = _begin_appends(self._recorder, groups)
        try:
            results = await self._appender.append(groups)
        except BaseException as error:
            for operation in under_way:
                operation.raised(error)
            raise
        _end_appends(under_way, results)
        return results

    async def trim(self, tp: TopicPartition, before_offset: int) -> RetentionResult:
        return await self._record_trim(self._recorder.trim(tp, before_offset), self._appender.trim(tp, before_offset))

    async def retain(
        self, tp: TopicPartition, *, retention_ms: int | None, retention_bytes: int | None
    ) -> RetentionResult:
        retained = self._appender.retain(tp, retention_ms=retention_ms, retention_bytes=retention_bytes)
        return await self._record_trim(self._recorder.trim(tp), retained)

    async def _record_trim(self, operation: OpenOperation, result: Awaitable[RetentionResult]) -> RetentionResult:
        try:
            found = await result
        except BaseException as error:
            operation.raised(error)
            raise
        operation.answered(log_start_offset=found.new_start)
        return found


class RecordedReader:
    """A reader of any engine, e.g. `Reader` or `EngineReader`, whose reads and requests for bounds are recorded.

    Waits are not recorded, because a read follows them.
    """

    def __init__(self, recorder: HistoryRecorder, reader: LogReader) -> None:
        self._recorder = recorder
        self._reader = reader

    async def bounds(self, tp: TopicPartition) -> Bounds:
        operation = self._recorder.bounds(tp)
        try:
            found = await self._reader.bounds(tp)
        except BaseException as error:
            operation.raised(error)
            raise
        operation.answered(log_start_offset=found.log_start_offset, next_offset=found.next_offset)
        return found

    async def read(
        self, tp: TopicPartition, offset: int, max_bytes: int = 8 << 20, *, stop: int | None = None
    ) -> list[Batch]:
        operation = self._recorder.read(tp, offset, stop=stop, max_bytes=max_bytes)
        try:
            batches = await self._reader.read(tp, offset, max_bytes, stop=stop)
        except BaseException as error:
            operation.raised(error)
            raise
        is_end = not batches and (stop is None or stop > offset)
        operation.answered(batches, next_offset=offset if is_end else None)
        return batches

    async def wait(self, tp: TopicPartition, past_offset: int, timeout: float) -> bool:
        return await self._reader.wait(tp, past_offset, timeout)

    async def offset_for_time(self, tp: TopicPartition, timestamp_ms: int, by: TimestampType | None = None) -> int:
        return await self._reader.offset_for_time(tp, timestamp_ms, by)

    async def read_offset(self, tp: TopicPartition, offset: int) -> Record:
        return await read_offset(self, tp, offset)

    def iter_from(self, tp: TopicPartition, offset: int, stop: int | None = None) -> AsyncIterator[Batch]:
        return iter_from(self, tp, offset, stop)


class RecordedLogWriter:
    """A `LeaderlessLogWriter` whose appends are recorded."""

    def __init__(self, recorder: HistoryRecorder, writer: LeaderlessLogWriter) -> None:
        self._recorder = recorder
        self._writer = writer

    def append_shared(self, groups: Sequence[SharedAppendGroup]) -> list[AppendResult]:
        under_way = _begin_appends(self._recorder, [to_append_group(group) for group in groups])
        try:
            results = self._writer.append_shared(groups)
        except PartlyAppended as error:
            _end_appends(under_way, error.results)
            raise
        except BaseException as error:
            for operation in under_way:
                operation.raised(error)
            raise
        _end_appends(under_way, results)
        return results


class RecordedLogReader:
    """A `LeaderlessLogReader` whose reads and requests for bounds are recorded."""

    def __init__(self, recorder: HistoryRecorder, reader: LeaderlessLogReader) -> None:
        self._recorder = recorder
        self._reader = reader

    def bounds(self, topic: str, partition: int) -> Bounds:
        operation = self._recorder.bounds(TopicPartition(topic, partition))
        found = _call_recorded(operation, lambda: self._reader.bounds(topic, partition))
        operation.answered(log_start_offset=found.log_start_offset, next_offset=found.next_offset)
        return found

    def read_offset(self, topic: str, partition: int, offset: int) -> Record:
        tp = TopicPartition(topic, partition)
        operation = self._recorder.read(tp, offset, stop=offset + 1)
        record = _call_recorded(operation, lambda: self._reader.read_offset(topic, partition, offset))
        operation.answered([_batch(tp, offset, [record])])
        return record

    def read_range(self, topic: str, partition: int, start: int, stop: int) -> list[Record]:
        tp = TopicPartition(topic, partition)
        operation = self._recorder.read(tp, start, stop=stop)
        records = _call_recorded(operation, lambda: self._reader.read_range(topic, partition, start, stop))
        end = start + len(records)
        operation.answered([_batch(tp, start, records)] if records else [], next_offset=end if end < stop else None)
        return records


def _begin_appends(recorder: HistoryRecorder, groups: Sequence[AppendGroup]) -> list[OpenOperation]:
    return [
        recorder.append(TopicPartition(group.topic, group.partition), group.records, group.producer) for group in groups
    ]


def _end_appends(under_way: Sequence[OpenOperation], results: Sequence[object]) -> None:
    for operation, result in zip(under_way, results, strict=True):
        if isinstance(result, AppendResult):
            operation.appended(result.start_offset, result.end_offset)
        else:
            assert isinstance(result, LlogError)
            operation.raised(result)


def _call_recorded(operation: OpenOperation, call: Callable[[], R]) -> R:
    try:
        return call()
    except BaseException as error:
        operation.raised(error)
        raise


def _batch(tp: TopicPartition, offset: int, records: Sequence[Record]) -> Batch:
    return Batch(tp, offset, columns_of(records))
