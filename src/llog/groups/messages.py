"""Records of a range of offsets as messages, bounded by rows and bytes, from a partition of any engine."""

from __future__ import annotations

from collections import deque
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from llog.batch.columns import Columns, byte_size, record_sizes, slice_columns
from llog.cdc.events import MESSAGES, messages_of
from llog.engines.port import Batch, LogReader
from llog.errors import OffsetOutOfRange
from llog.log.records import Cleanup, Topic
from llog.model import TopicPartition

CONSUMED: Final = MESSAGES.append(pa.field("attempt", pa.int32()))
_AHEAD: Final = 4
"""How many times what was asked for is read, if there is as much."""
_PARTS_MAX: Final = 8
_KEPT_MAX: Final = 32
_KEPT_BYTES_MAX: Final = 64 << 20


class _Whole:
    """A batch as it was read, and its messages once they were asked for."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    @cached_property
    def messages(self) -> pa.Table:
        return messages_of(self.batch)

    def part(self, batch: Batch) -> pa.Table:
        """The messages of a part of it. If they are few of many, only those."""
        if self.batch.columns.count > _PARTS_MAX * batch.columns.count:
            return messages_of(batch)
        return self.messages.slice(batch.start_offset - self.batch.start_offset, batch.columns.count)


class Read(NamedTuple):
    batches: list[Batch]
    wholes: list[_Whole]
    """What each of them is a part of."""
    rows: int
    size: int
    """In bytes: all that there was room for, if the next record does not fit."""
    next_offset: int
    """Everything below it in the range was read, or is not there any more."""

    @property
    def last(self) -> int | None:
        """The highest offset that was read."""
        return self.batches[-1].end_offset if self.batches else None

    def tables(self, attempt: int) -> list[pa.Table]:
        """As messages of the schema `CONSUMED`."""
        parts = zip(self.wholes, self.batches, strict=True)
        return [_consumed(whole.part(batch), attempt) for whole, batch in parts]


class MessageReader:
    """Reads ahead, and keeps the last batches that were larger than what was read of them: who goes on finds the next
    messages here.
    """

    def __init__(self, reader: LogReader) -> None:
        self._reader = reader
        self._kept: deque[tuple[str, _Whole]] = deque()
        self._kept_bytes = 0

    async def read(
        self, topic: Topic, tp: TopicPartition, start: int, end: int, *, low: int, rows: int, size: int, whole: bool
    ) -> Read:
        """From `start` to `end`, both included, at most `rows` records and `size` bytes; `whole`: one at least, however
        large.

        What retention (all below `low`) or key compaction took is passed over.
        """
        found: list[Batch] = []
        wholes: list[_Whole] = []
        offset, rows_left, size_left = min(max(start, low), end + 1), rows, size
        while offset <= end and rows_left > 0 and size_left > 0:
            stop = min(end + 1, offset + rows_left)
            try:
                read = await self._wholes(topic, tp, offset, stop, size_left)
            except OffsetOutOfRange as error:
                if error.log_start_offset <= offset:
                    raise
                offset = min(error.log_start_offset, end + 1)  # trimmed a moment ago
                continue
            if not read:
                offset = stop
            for source in read:
                batch = source.batch
                offset = max(offset, min(batch.start_offset, end + 1))
                first, last = offset - batch.start_offset, min(end - batch.start_offset + 1, batch.columns.count)
                if first >= last:
                    continue
                wanted = slice_columns(batch.columns, first, min(last, first + rows_left))
                count, taken = _fitting(wanted, size_left)
                if count == 0 and whole and not found:
                    count, taken = 1, size_left
                if count:
                    found.append(Batch(tp, offset, slice_columns(wanted, 0, count)))
                    wholes.append(source)
                    offset, rows_left, size_left = offset + count, rows_left - count, size_left - taken
                if count < wanted.count:
                    return Read(found, wholes, rows - rows_left, size, offset)
                if rows_left == 0:
                    break
        return Read(found, wholes, rows - rows_left, size - size_left, offset)

    async def _wholes(self, topic: Topic, tp: TopicPartition, offset: int, stop: int, size: int) -> list[_Whole]:
        if topic.cleanup is Cleanup.COMPACT:  # what was read may be gone by now
            return [_Whole(batch) for batch in await self._reader.read(tp, offset, size, stop=stop)]
        for directory, whole in self._kept:
            batch = whole.batch
            if directory == topic.directory and batch.tp == tp and batch.start_offset <= offset <= batch.end_offset:
                return [whole]
        ahead = offset + _AHEAD * (stop - offset)
        wholes = [_Whole(batch) for batch in await self._reader.read(tp, offset, size, stop=ahead)]
        for whole in wholes:
            if whole.batch.end_offset >= stop:
                self._keep(topic.directory, whole)
        return wholes

    def _keep(self, directory: str, whole: _Whole) -> None:
        size = byte_size(whole.batch.columns)
        if size > _KEPT_BYTES_MAX:
            return
        self._kept.append((directory, whole))
        self._kept_bytes += size
        while len(self._kept) > _KEPT_MAX or self._kept_bytes > _KEPT_BYTES_MAX:
            _, oldest = self._kept.popleft()
            self._kept_bytes -= byte_size(oldest.batch.columns)


def _fitting(columns: Columns, size: int) -> tuple[int, int]:
    """How many of the first records fit into `size` bytes, and the bytes of those."""
    whole = byte_size(columns)
    if whole <= size:
        return columns.count, whole
    through = record_sizes(columns).cumsum()
    count = int(np.searchsorted(through, size, side="right"))
    return count, int(through[count - 1]) if count else 0


def _consumed(messages: pa.Table, attempt: int) -> pa.Table:
    return messages.append_column(CONSUMED.field("attempt"), pa.repeat(pa.scalar(attempt, pa.int32()), len(messages)))
