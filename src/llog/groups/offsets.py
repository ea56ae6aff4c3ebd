"""The bounds of a topic's partitions, and the offset at which a read begins in each."""

from __future__ import annotations

from collections.abc import Sequence

from llog.errors import OffsetOutOfRange
from llog.groups.options import Start
from llog.groups.waits import gather_bounded
from llog.log.engine import Bounds, LogReader
from llog.model import TopicPartition


async def resolve_start(reader: LogReader, topic: str, start: Start, partitions: Sequence[int]) -> dict[int, int]:
    """Return the offset that `start` names in each partition.

    An offset is moved into the bounds of each partition; for a single partition, raises `OffsetOutOfRange` instead.
    """
    bounds = await read_bounds(reader, topic, partitions)
    match start:
        case Start("latest"):
            return {partition: bounds[partition].next_offset for partition in partitions}
        case Start("timestamp", int(time)):
            tps = [TopicPartition(topic, partition) for partition in partitions]
            times = await gather_bounded([reader.offset_for_time(tp, time) for tp in tps])
            return dict(zip(partitions, times, strict=True))
        case Start("offset" | "after", int(value)):
            offset = value + (start.kind == "after")
            low, high = bounds[partitions[0]]
            if len(partitions) == 1 and not low <= offset <= high:
                raise OffsetOutOfRange(str(TopicPartition(topic, partitions[0])), offset, low, high)
            return {each: min(max(offset, bounds[each][0]), bounds[each][1]) for each in partitions}
        case _:
            return {partition: bounds[partition].log_start_offset for partition in partitions}


async def read_bounds(reader: LogReader, topic: str, partitions: Sequence[int]) -> dict[int, Bounds]:
    found = await gather_bounded([reader.bounds(TopicPartition(topic, partition)) for partition in partitions])
    return dict(zip(partitions, found, strict=True))
