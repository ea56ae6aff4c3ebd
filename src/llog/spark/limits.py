"""Limits the records or bytes of a micro-batch, divided among the partitions by what each of them has."""

from __future__ import annotations

from collections.abc import Mapping

from llog.log.log import Log
from llog.model import TopicPartition
from llog.spark.planner import locate
from llog.spark.source_log import Range

Offsets = dict[TopicPartition, int]


def cut_by_records(starts: Mapping[TopicPartition, int], ends: Offsets, records_max: int) -> Offsets:
    """Return ends with at most `records_max` records before them.

    Every partition that has records gets at least one, so that a busy partition does not starve the others.
    """
    waiting = {tp: ends[tp] - starts[tp] for tp in ends if ends[tp] > starts[tp]}
    total = sum(waiting.values())
    if total <= records_max:
        return ends
    spare, rest = max(0, records_max - len(waiting)), max(1, total - len(waiting))
    return ends | {tp: starts[tp] + 1 + (count - 1) * spare // rest for tp, count in waiting.items()}


async def cut_by_bytes(
    log: Log, starts: Mapping[TopicPartition, int], ends: Offsets, bytes_max: int, *, fail_on_data_loss: bool
) -> Offsets:
    """Return ends with about `bytes_max` stored bytes before them, and at least one record of every partition.

    An extent is cut by its mean record size.
    """
    sizes = {}
    for tp in ends:
        if ends[tp] > starts[tp]:
            _, snapshot = await locate(log, Range(tp, starts[tp], ends[tp]), fail_on_data_loss=fail_on_data_loss)
            sizes[tp] = [(extent.start_offset, extent.end_offset, extent.byte_length) for extent in snapshot]
    total = sum(length for extents in sizes.values() for _, _, length in extents)
    if total <= bytes_max:
        return ends
    cut = dict(ends)
    for tp, extents in sizes.items():
        if not extents:
            continue  # retention has removed all of it: there is nothing to read before its end
        budget = bytes_max * sum(length for _, _, length in extents) / total
        cut[tp] = max(starts[tp] + 1, min(ends[tp], _end_within(extents, starts[tp], budget)))
    return cut


def _end_within(extents: list[tuple[int, int, int]], start: int, budget: float) -> int:
    end = start
    for first, last, length in extents:
        record_bytes = length / (last - first + 1)
        low = max(first, start)
        records = min(last - low + 1, int(budget / record_bytes))
        end = low + records
        budget -= records * record_bytes
        if end <= last:
            break
    return end
