"""How much of what is there goes into one micro-batch, shared out over the partitions by what each of them has."""

from __future__ import annotations

from collections.abc import Mapping

from llog.model import TopicPartition
from llog.partition.log import Log
from llog.partition.snapshot import take_snapshot

Offsets = dict[TopicPartition, int]


def cut_by_records(starts: Mapping[TopicPartition, int], ends: Offsets, records_max: int) -> Offsets:
    """At most `records_max` records, each partition its share, and every share at least one while records last."""
    waiting = {tp: ends[tp] - starts[tp] for tp in ends if ends[tp] > starts[tp]}
    total = sum(waiting.values())
    if total <= records_max:
        return ends
    cut = dict(ends)
    left = records_max
    for tp in sorted(waiting, key=lambda tp: (waiting[tp], tp)):
        share = min(left, max(1, waiting[tp] * records_max // total))
        cut[tp] = starts[tp] + share
        left -= share
    return cut


async def cut_by_bytes(log: Log, starts: Mapping[TopicPartition, int], ends: Offsets, bytes_max: int) -> Offsets:
    """About `bytes_max` stored bytes, at least one record: extents are cut by their mean record size."""
    sizes = {}
    for tp in ends:
        if ends[tp] > starts[tp]:
            snapshot = await take_snapshot(log, tp, starts[tp], ends[tp])
            sizes[tp] = [(extent.start_offset, extent.end_offset, extent.byte_length) for extent in snapshot]
    total = sum(length for extents in sizes.values() for _, _, length in extents)
    if total <= bytes_max:
        return ends
    cut = dict(ends)
    for tp, extents in sizes.items():
        budget = bytes_max * sum(length for _, _, length in extents) / total
        cut[tp] = max(starts[tp] + 1, min(ends[tp], _end_within(extents, starts[tp], budget)))
    return cut


def _end_within(extents: list[tuple[int, int, int]], start: int, budget: float) -> int:
    end = start
    for first, last, length in extents:
        each = length / (last - first + 1)
        low = max(first, start)
        taken = min(last - low + 1, int(budget / each))
        end = low + taken
        budget -= taken * each
        if end <= last:
            break
    return end
