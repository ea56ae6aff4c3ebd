"""Plans tasks for ranges of offsets. Tasks carry blob names and byte ranges, or inline records, so that none of them
reads metadata again.

A task reads located ranges, each in the order of its offsets. Large partitions are cut between extents; small ranges
whose bytes lie in the same blobs share a task, so that neighbours in a blob share a GET. An extent is cut only if more
tasks are wanted than there are extents.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from pyspark.sql.datasource import InputPartition

from llog.engines.object.reader import Reader
from llog.engines.object.snapshot import Snapshot, take_snapshot
from llog.engines.object.spill import spill_inline
from llog.errors import OffsetOutOfRange
from llog.log.catalog import Catalog
from llog.log.engine import Bounds
from llog.log.log import Log
from llog.log.records import Topic
from llog.model import TopicPartition
from llog.spark.offsets import check_unchanged, within_bounds
from llog.spark.source_log import Range

PACKED_BYTES_MAX = 64 << 20
"""The size up to which small ranges share a task."""


INLINE_BYTES_MAX = 64 << 20
"""The inline records that a plan carries; more go into a blob."""


class LocatedRange(NamedTuple):
    """Consecutive records [start, stop) of one partition and the extents that hold them."""

    topic: Topic
    start: int
    stop: int
    extents: Snapshot

    @property
    def tp(self) -> TopicPartition:
        return self.extents.tp


class ReadTask(InputPartition):  # type: ignore[misc]
    """The ranges that one Spark task reads."""

    def __init__(self, ranges: Sequence[LocatedRange], pin: str | None) -> None:
        super().__init__(None)
        self.ranges = tuple(ranges)
        self.pin = pin


async def plan_tasks(
    log: Log,
    ranges: Sequence[Range],
    topics: Mapping[str, Topic],
    *,
    pin: str | None,
    task_bytes_max: int,
    min_tasks: int,
    fail_on_data_loss: bool,
) -> list[ReadTask]:
    """Return the tasks for these ranges, which the caller has pinned."""
    reads = await log.meta.begin_reads()
    found = await _locate_all(log, ranges, topics, fail_on_data_loss=fail_on_data_loss)
    located: list[LocatedRange] = []
    for (tp, start, stop), snapshot in found:
        if start < stop:
            located += _cut(snapshot, topics[tp.topic], start, stop, task_bytes_max)
    # The partitions were looked up by name: only an unchanged incarnation proves that all extents are of one topic.
    await check_unchanged(Catalog(log).get, topics)
    await reads.confirm()
    located = _split(located, min_tasks)
    groups = _pack(located, min(task_bytes_max, PACKED_BYTES_MAX), min_tasks)
    # Without a task, Spark would create one of its own, which has no ranges.
    return [ReadTask(group, pin) for group in groups or [[]]]


async def _locate_all(
    log: Log, ranges: Sequence[Range], topics: Mapping[str, Topic], *, fail_on_data_loss: bool
) -> list[tuple[Range, Snapshot]]:
    """Locate all ranges, and put inline records that are too many for the plan into blobs.

    A reader without a blob store of its own carries them all.
    """
    found: list[tuple[Range, Snapshot]] = []
    carried: list[tuple[Snapshot, str]] = []
    size = 0
    for wanted in ranges:
        located = await locate(log, wanted, fail_on_data_loss=fail_on_data_loss)
        found.append(located)
        snapshot = located[1]
        carried.append((snapshot, topics[snapshot.tp.topic].directory))
        size += snapshot.inline_bytes
        if size > INLINE_BYTES_MAX and log.blobs.uri:
            await spill_inline(log, carried)
            carried, size = [], 0
    return found


async def read_bounds(log: Log, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, Bounds]:
    reader = Reader(log)
    return dict(zip(partitions, await asyncio.gather(*map(reader.bounds, partitions)), strict=True))


async def locate(log: Log, wanted: Range, *, fail_on_data_loss: bool) -> tuple[Range, Snapshot]:
    """Return where the records lie, and which of them exist: retention may have gone on since the bounds were read."""
    while True:
        try:
            return wanted, await take_snapshot(log, *wanted)
        except OffsetOutOfRange as error:
            bounds = Bounds(error.log_start_offset, error.next_offset)
            wanted = within_bounds(wanted, bounds, fail_on_data_loss=fail_on_data_loss)


def _cut(extents: Snapshot, topic: Topic, start: int, stop: int, bytes_max: int) -> list[LocatedRange]:
    """Return the range in parts of up to `bytes_max`, cut between extents."""
    parts: list[LocatedRange] = []
    sizes = np.cumsum(extents.byte_lengths)
    first, size = 0, 0
    while first < len(extents):
        last = max(first + 1, int(np.searchsorted(sizes, size + bytes_max, "right")))
        parts.append(_located_range(extents.part(first, last), topic, start, stop))
        first, size = last, int(sizes[last - 1])
    return parts


def _located_range(extents: Snapshot, topic: Topic, start: int, stop: int) -> LocatedRange:
    first, last = max(start, extents[0].start_offset), min(stop, extents[-1].end_offset + 1)
    return LocatedRange(topic, first, last, extents)


def _split(ranges: list[LocatedRange], wanted: int) -> list[LocatedRange]:
    """Return at least `wanted` ranges if there are as many records, by halving the longest ones."""
    if not ranges or len(ranges) >= wanted:
        return ranges
    heap = [(each.start - each.stop, number, each) for number, each in enumerate(ranges)]
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) < wanted and heap[0][0] < -1:
        _, _, longest = heapq.heappop(heap)
        middle = (longest.start + longest.stop) // 2
        for start, stop in ((longest.start, middle), (middle, longest.stop)):
            indexes = [i for i, e in enumerate(longest.extents) if e.end_offset >= start and e.start_offset < stop]
            extents = longest.extents.part(indexes[0], indexes[-1] + 1)
            heapq.heappush(heap, (start - stop, number, LocatedRange(longest.topic, start, stop, extents)))
            number += 1
    return sorted((each for _, _, each in heap), key=lambda each: (each.tp, each.start))


def _pack(ranges: list[LocatedRange], bytes_max: int, wanted: int) -> list[list[LocatedRange]]:
    """Return the ranges in groups for tasks; ranges that begin in the same blob are neighbours.

    There are no fewer groups than `wanted`, unless there are fewer ranges.
    """
    groups: list[list[LocatedRange]] = []
    size = 0
    spare = len(ranges) - wanted  # how many ranges may still join another
    for each in sorted(ranges, key=lambda each: (each.extents[0].data_uri, each.extents[0].byte_offset)):
        range_bytes = int(each.extents.byte_lengths.sum())
        if groups and size + range_bytes <= bytes_max and spare > 0:
            groups[-1].append(each)
            size += range_bytes
            spare -= 1
        else:
            groups.append([each])
            size = range_bytes
    return groups
