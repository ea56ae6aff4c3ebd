"""From ranges of offsets to tasks that carry blob names and byte ranges, so that no task looks at the metadata again.

A task reads runs of consecutive records, each in order. Large partitions are cut between extents; small runs whose
bytes lie in the same blobs share a task, so that neighbours of a blob share a GET. Only where more tasks are wanted
than there are extents is an extent cut.
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
from llog.engines.port import Bounds
from llog.errors import OffsetOutOfRange
from llog.log.catalog import Catalog
from llog.log.log import Log
from llog.log.records import Topic
from llog.model import TopicPartition
from llog.spark.offsets import check_unchanged, within_bounds
from llog.spark.source_log import Range

PACKED_BYTES_MAX = 64 << 20
"""Small runs are put together up to this size."""


class Run(NamedTuple):
    """Consecutive records [start, stop) of one partition and the extents that hold them."""

    topic: Topic
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
    fail_on_data_loss: bool,
) -> list[ReadTask]:
    """Return the tasks for these ranges, which the caller has pinned."""
    reads = await log.meta.begin_reads()
    runs: list[Run] = []
    for wanted in ranges:
        (tp, start, stop), snapshot = await locate(log, wanted, fail_on_data_loss=fail_on_data_loss)
        if start < stop:
            runs += _cut(snapshot, topics[tp.topic], start, stop, task_bytes_max)
    # Looked up by name: only an incarnation that is still the same afterwards says that all of it is of one topic.
    await check_unchanged(Catalog(log).get, topics)
    await reads.confirm()
    runs = _split(runs, min_tasks)
    packed = _pack(runs, min(task_bytes_max, PACKED_BYTES_MAX), min_tasks)
    # Where there is nothing to read, Spark would start a task of its own making, which has no runs.
    return [ReadTask(group, pin) for group in packed or [[]]]


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


def _cut(extents: Snapshot, topic: Topic, start: int, stop: int, bytes_max: int) -> list[Run]:
    runs: list[Run] = []
    sizes = np.cumsum(extents.byte_lengths)
    first, size = 0, 0
    while first < len(extents):
        last = max(first + 1, int(np.searchsorted(sizes, size + bytes_max, "right")))
        runs.append(_run(extents.part(first, last), topic, start, stop))
        first, size = last, int(sizes[last - 1])
    return runs


def _run(extents: Snapshot, topic: Topic, start: int, stop: int) -> Run:
    first, last = max(start, extents[0].start_offset), min(stop, extents[-1].end_offset + 1)
    return Run(topic, first, last, extents)


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
            heapq.heappush(heap, (start - stop, place, Run(run.topic, start, stop, kept)))
            place += 1
    return sorted((run for _, _, run in heap), key=lambda run: (run.tp, run.start))


def _pack(runs: list[Run], bytes_max: int, wanted: int) -> list[list[Run]]:
    """Runs grouped into tasks, those that begin in the same blob together; never fewer groups than wanted if
    avoidable.
    """
    groups: list[list[Run]] = []
    size = 0
    spare = len(runs) - wanted  # how many runs may still join another
    for run in sorted(runs, key=lambda run: (run.extents[0].data_uri, run.extents[0].byte_offset)):
        run_bytes = int(run.extents.byte_lengths.sum())
        if groups and size + run_bytes <= bytes_max and spare > 0:
            groups[-1].append(run)
            size += run_bytes
            spare -= 1
        else:
            groups.append([run])
            size = run_bytes
    return groups
