"""From ranges of offsets to tasks that carry blob names and byte ranges, so that no task looks at the metadata again.

A task reads runs of consecutive records, each in order. Large partitions are cut between extents; small runs whose bytes lie in
the same blobs share a task, so that neighbours of a blob share a GET. Only where more tasks are wanted than there are extents is an
extent cut.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pyspark.sql.datasource import InputPartition

from llog.model import TopicPartition
from llog.partition.log import Log
from llog.partition.records import TimestampType, Topic
from llog.partition.snapshot import Snapshot, take_snapshot
from llog.spark.offsets import Range

PACKED_BYTES_MAX = 32 << 20
"""Small runs are put together up to this size."""


class Run(NamedTuple):
    """Consecutive records [start, stop) of one partition and the extents that hold them."""

    time_type: TimestampType
    start: int
    stop: int
    extents: Snapshot

    @property
    def tp(self) -> TopicPartition:
        return self.extents.tp


class ReadTask(InputPartition):  # type: ignore[misc]
    """What one Spark task reads."""

    def __init__(self, runs: Sequence[Run], pin: str | None) -> None:
        super().__init__(None)
        self.runs = tuple(runs)
        self.pin = pin


async def plan_tasks(
    log: Log,
    ranges: Sequence[Range],
    topics: Mapping[str, Topic],
    *,
    pin: str | None,
    task_bytes_max: int,
    min_tasks: int,
) -> list[ReadTask]:
    """The tasks for these ranges, which the caller has pinned."""
    runs: list[Run] = []
    for tp, start, stop in ranges:
        if start < stop:
            snapshot = await take_snapshot(log, tp, start, stop)
            runs += _cut(snapshot, topics[tp.topic].timestamp_type, start, stop, task_bytes_max)
    runs = _split(runs, min_tasks)
    return [ReadTask(packed, pin) for packed in _pack(runs, min(task_bytes_max, PACKED_BYTES_MAX), min_tasks)]


def _cut(extents: Snapshot, time_type: TimestampType, start: int, stop: int, bytes_max: int) -> list[Run]:
    runs: list[Run] = []
    first, size = 0, 0
    for place, extent in enumerate(extents):
        if place > first and size + extent.byte_length > bytes_max:
            runs.append(_run(extents.part(first, place), time_type, start, stop))
            first, size = place, 0
        size += extent.byte_length
    runs.append(_run(extents.part(first, len(extents)), time_type, start, stop))
    return runs


def _run(extents: Snapshot, time_type: TimestampType, start: int, stop: int) -> Run:
    first, last = max(start, extents[0].start_offset), min(stop, extents[-1].end_offset + 1)
    return Run(time_type, first, last, extents)


def _split(runs: list[Run], wanted: int) -> list[Run]:
    """At least `wanted` runs if there are as many records, by halving the longest."""
    if not runs or len(runs) >= wanted:
        return runs
    heap = [(run.start - run.stop, place, run) for place, run in enumerate(runs)]
    heapq.heapify(heap)
    place = len(heap)
    while len(heap) < wanted and heap[0][0] < -1:
        _, _, run = heapq.heappop(heap)
        middle = (run.start + run.stop) // 2
        for start, stop in ((run.start, middle), (middle, run.stop)):
            places = [i for i, e in enumerate(run.extents) if e.end_offset >= start and e.start_offset < stop]
            kept = run.extents.part(places[0], places[-1] + 1)
            heapq.heappush(heap, (start - stop, place, Run(run.time_type, start, stop, kept)))
            place += 1
    return sorted((run for _, _, run in heap), key=lambda run: (run.tp, run.start))


def _pack(runs: list[Run], bytes_max: int, wanted: int) -> list[list[Run]]:
    """Runs grouped into tasks, those that begin in the same blob together; never fewer groups than wanted if avoidable."""
    groups: list[list[Run]] = []
    size = 0
    spare = len(runs) - wanted  # how many runs may still join another
    for run in sorted(runs, key=lambda run: (run.extents[0].data_uri, run.extents[0].byte_offset)):
        run_bytes = run.extents.byte_size
        if groups and size + run_bytes <= bytes_max and spare > 0:
            groups[-1].append(run)
            size += run_bytes
            spare -= 1
        else:
            groups.append([run])
            size = run_bytes
    return groups
