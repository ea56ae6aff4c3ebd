"""Where partitions begin and end, and which offsets a start means in them."""

from __future__ import annotations

from collections.abc import Sequence

from llog.engines.port import Bounds, LogReader
from llog.errors import OffsetOutOfRange
from llog.groups.requests import Start
from llog.groups.waits import gathered
from llog.model import TopicPartition


async def resolved(reader: LogReader, topic: str, start: Start, partitions: Sequence[int]) -> dict[int, int]:
    """The offset that `start` means in each partition. `OffsetOutOfRange` for an offset, if there is one partition
    only.
    """
    bounds = await bounds_of(reader, topic, partitions)
    match start:
        case Start("latest"):
            return {partition: bounds[partition].next_offset for partition in partitions}
        case Start("timestamp", int(time)):
            tps = [TopicPartition(topic, partition) for partition in partitions]
            times = await gathered([reader.offset_for_time(tp, time) for tp in tps])
            return dict(zip(partitions, times, strict=True))
        case Start("offset" | "after", int(value)):
            offset = value + (start.kind == "after")
            low, high = bounds[partitions[0]]
            if len(partitions) == 1 and not low <= offset <= high:
                raise OffsetOutOfRange(str(TopicPartition(topic, partitions[0])), offset, low, high)
            return {each: min(max(offset, bounds[each][0]), bounds[each][1]) for each in partitions}
        case _:
            return {partition: bounds[partition].log_start_offset for partition in partitions}


async def bounds_of(reader: LogReader, topic: str, partitions: Sequence[int]) -> dict[int, Bounds]:
    found = await gathered([reader.bounds(TopicPartition(topic, partition)) for partition in partitions])
    return dict(zip(partitions, found, strict=True))
