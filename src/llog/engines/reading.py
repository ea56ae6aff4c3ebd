"""What can be read from any engine by its port alone: single records, and ranges batch by batch."""

from __future__ import annotations

from collections.abc import AsyncIterator

from llog.batch.columns import records_of, slice_columns
from llog.engines.port import Batch, LogReader
from llog.errors import OffsetOutOfRange, RecordRemoved
from llog.log.records import Topic
from llog.model import Record, TimestampType, TopicPartition


async def read_offset(reader: LogReader, tp: TopicPartition, offset: int) -> Record:
    """The record at `offset`; `OffsetOutOfRange` at the next offset, too, and `RecordRemoved` where key compaction took
    it.
    """
    batches = await reader.read(tp, offset, 1)
    if batches and batches[0].start_offset == offset:
        return records_of(slice_columns(batches[0].columns, 0, 1), offset)[0]
    bounds = await reader.bounds(tp)
    if not batches and not bounds.log_start_offset <= offset < bounds.next_offset:
        raise OffsetOutOfRange(str(tp), offset, *bounds)
    raise RecordRemoved(f"offset {offset} of {tp} was removed by key compaction: a newer record of its key is there")


async def iter_from(
    reader: LogReader, tp: TopicPartition, offset: int, stop: int | None = None
) -> AsyncIterator[Batch]:
    """Batches from `offset` up to `stop` (exclusive), or to what was the end when this began.

    None at the next offset; `OffsetOutOfRange` outside the bounds.
    """
    bounds = await reader.bounds(tp)
    if not bounds.log_start_offset <= offset <= bounds.next_offset:
        raise OffsetOutOfRange(str(tp), offset, *bounds)
    stop = bounds.next_offset if stop is None else min(stop, bounds.next_offset)
    while offset < stop:
        batches = await reader.read(tp, offset, stop=stop)
        if not batches:
            return  # all that is left below `stop` was removed by key compaction
        for batch in batches:
            if batch.end_offset >= stop:
                batch = batch._replace(columns=slice_columns(batch.columns, 0, stop - batch.start_offset))
            yield batch
            offset = batch.end_offset + 1


def with_times_of(topic: Topic, batch: Batch) -> Batch:
    """In a topic of append time, what producers say of the time does not show."""
    if topic.timestamp_type is TimestampType.CREATE:
        return batch
    return batch._replace(columns=batch.columns._replace(timestamps=None))
