"""Reading a range of offsets of any engine's partition as messages, up to a number of rows and bytes."""

from __future__ import annotations

from collections import deque
from functools import cached_property
from typing import Final, NamedTuple

import pyarrow as pa

from llog.batch.columns import byte_size, count_fitting, slice_columns
from llog.cdc.events import MESSAGE_SCHEMA, messages_of
from llog.errors import OffsetOutOfRange
from llog.log.engine import Batch, LogReader
from llog.log.records import Cleanup, Topic
from llog.model import TopicPartition

CONSUMED_SCHEMA: Final = MESSAGE_SCHEMA.append(pa.field("attempt", pa.int32()))
_READ_AHEAD: Final = 4
"""How many times the wanted number of records a read asks for."""
_PARTS_MAX: Final = 8
_CACHED_MAX: Final = 32
_CACHED_BYTES_MAX: Final = 64 << 20


class _SourceBatch:
    """A batch as it was read, and its messages once they are needed."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    @cached_property
    def messages(self) -> pa.Table:
        return messages_of(self.batch)

    def part(self, batch: Batch) -> pa.Table:
        """Return the messages of a part of the batch; a small part is converted alone."""
        if self.batch.columns.count > _PARTS_MAX * batch.columns.count:
            return messages_of(batch)
        return self.messages.slice(batch.start_offset - self.batch.start_offset, batch.columns.count)


class MessageSlice(NamedTuple):
    """The messages that one read found."""

    batches: list[Batch]
    sources: list[_SourceBatch]
    """For each batch, the batch that it is a part of."""
    rows: int
    size: int
    """In bytes; all of `max_bytes` if the next record did not fit."""
    next_offset: int
    """Every record of the range below this offset was read or no longer exists."""

    @property
    def last(self) -> int | None:
        """The highest offset that was read."""
        return self.batches[-1].end_offset if self.batches else None

    def tables(self, attempt: int) -> list[pa.Table]:
        """Return the messages as tables of the schema `CONSUMED_SCHEMA`."""
        parts = zip(self.sources, self.batches, strict=True)
        return [_add_attempt(source.part(batch), attempt) for source, batch in parts]


class MessageReader:
    """Reads ahead, and caches the last batches of which only a part was delivered: a group that reads on finds its next
    messages here.
    """

    def __init__(self, reader: LogReader) -> None:
        self._reader = reader
        self._cached: deque[tuple[str, _SourceBatch]] = deque()
        self._cached_bytes = 0

    async def read(
        self,
        topic: Topic,
        tp: TopicPartition,
        start: int,
        end: int,
        *,
        log_start: int,
        max_rows: int,
        max_bytes: int,
        at_least_one: bool,
    ) -> MessageSlice:
        """Read from `start` to `end`, both included; `at_least_one` record is read however large it is.

        Records that retention (everything below `log_start`) or key compaction removed are skipped.
        """
        batches: list[Batch] = []
        sources: list[_SourceBatch] = []
        offset, rows_left, bytes_left = min(max(start, log_start), end + 1), max_rows, max_bytes
        while offset <= end and rows_left > 0 and bytes_left > 0:
            stop = min(end + 1, offset + rows_left)
            try:
                found = await self._read_sources(topic, tp, offset, stop, bytes_left)
            except OffsetOutOfRange as error:
                if error.log_start_offset <= offset:
                    raise
                offset = min(error.log_start_offset, end + 1)  # trimmed a moment ago
                continue
            if not found:
                offset = stop
            for source in found:
                batch = source.batch
                offset = max(offset, min(batch.start_offset, end + 1))
                first, last = offset - batch.start_offset, min(end - batch.start_offset + 1, batch.columns.count)
                if first >= last:
                    continue
                wanted = slice_columns(batch.columns, first, min(last, first + rows_left))
                count, size = count_fitting(wanted, bytes_left)
                if count == 0 and at_least_one and not batches:
                    count, size = 1, bytes_left
                if count:
                    batches.append(Batch(tp, offset, slice_columns(wanted, 0, count)))
                    sources.append(source)
                    offset, rows_left, bytes_left = offset + count, rows_left - count, bytes_left - size
                if count < wanted.count:
                    return MessageSlice(batches, sources, max_rows - rows_left, max_bytes, offset)
                if rows_left == 0:
                    break
        return MessageSlice(batches, sources, max_rows - rows_left, max_bytes - bytes_left, offset)

    async def _read_sources(
        self, topic: Topic, tp: TopicPartition, offset: int, stop: int, max_bytes: int
    ) -> list[_SourceBatch]:
        if topic.cleanup is Cleanup.COMPACT:  # records of a cached batch may have been removed since
            return [_SourceBatch(batch) for batch in await self._reader.read(tp, offset, max_bytes, stop=stop)]
        for directory, source in self._cached:
            batch = source.batch
            if directory == topic.directory and batch.tp == tp and batch.start_offset <= offset <= batch.end_offset:
                return [source]
        ahead = offset + _READ_AHEAD * (stop - offset)
        sources = [_SourceBatch(batch) for batch in await self._reader.read(tp, offset, max_bytes, stop=ahead)]
        for source in sources:
            if source.batch.end_offset >= stop:
                self._cache(topic.directory, source)
        return sources

    def _cache(self, directory: str, source: _SourceBatch) -> None:
        size = byte_size(source.batch.columns)
        if size > _CACHED_BYTES_MAX:
            return
        self._cached.append((directory, source))
        self._cached_bytes += size
        while len(self._cached) > _CACHED_MAX or self._cached_bytes > _CACHED_BYTES_MAX:
            _, oldest = self._cached.popleft()
            self._cached_bytes -= byte_size(oldest.batch.columns)


def _add_attempt(messages: pa.Table, attempt: int) -> pa.Table:
    attempts = pa.repeat(pa.scalar(attempt, pa.int32()), len(messages))
    return messages.append_column(CONSUMED_SCHEMA.field("attempt"), attempts)
