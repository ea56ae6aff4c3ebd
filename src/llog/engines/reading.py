"""Reads single records and ranges of any engine, by its port alone."""

from __future__ import annotations

from collections.abc import AsyncIterator

from llog.batch.columns import records_of, slice_columns
from llog.errors import OffsetOutOfRange, RecordRemoved
from llog.log.engine import Batch, LogReader
from llog.log.records import Topic
from llog.model import Record, TimestampType, TopicPartition


async def read_offset(reader: LogReader, tp: TopicPartition, offset: int) -> Record:
    """Return the record at `offset`. Raises `OffsetOutOfRange` outside the bounds and at the next offset, and
    `RecordRemoved` if key compaction removed the record.
    """
    batches = await reader.read(tp, offset, 1)
    if batches and batches[0].start_offset == offset:
        return records_of(slice_columns(batches[0].columns, 0, 1), offset)[0]
    bounds = await reader.bounds(tp)
    if not batches and not bounds.log_start_offset <= offset < bounds.next_offset:
        raise OffsetOutOfRange(str(tp), offset, *bounds)
    raise RecordRemoved(f"offset {offset} of {tp} was removed by key compaction: its key has a newer record")


async def iter_from(
    reader: LogReader, tp: TopicPartition, offset: int, stop: int | None = None
) -> AsyncIterator[Batch]:
    """Yield batches from `offset` up to `stop` (exclusive), by default the next offset at the time of the call.

    Yields nothing at the next offset. Raises `OffsetOutOfRange` outside the bounds.
    """
    bounds = await reader.bounds(tp)
    if not bounds.log_start_offset <= offset <= bounds.next_offset:
        raise OffsetOutOfRange(str(tp), offset, *bounds)
    stop = bounds.next_offset if stop is None else min(stop, bounds.next_offset)
    while offset < stop:
        batches = await reader.read(tp, offset, stop=stop)
        if not batches:
            return  # key compaction removed all that is left below `stop`
        for batch in batches:
            if batch.end_offset >= stop:
                batch = batch._replace(columns=slice_columns(batch.columns, 0, stop - batch.start_offset))
            yield batch
            offset = batch.end_offset + 1


def apply_timestamp_type(topic: Topic, batch: Batch) -> Batch:
    """Return the batch without its producers' timestamps if the topic's timestamps are append times."""
    if topic.timestamp_type is TimestampType.CREATE:
        return batch
    return batch._replace(columns=batch.columns._replace(timestamps=None))
