"""Compacts all partitions that lag, in rounds.

The driver finds the blobs of each partition's next records and puts partitions that share blobs into one task. Each
task runs the compactor, with claims, so that other compactors may run beside it. A round compacts each partition once;
the next round continues with those that made progress.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from llog.base.concurrency import gather_bounded
from llog.base.units import format_size
from llog.config import Settings
from llog.engines.object.compaction.compactor import Compactor, LaggingPartition, lagging_partitions
from llog.engines.object.compaction.plan import CompactorOptions, read_cursor
from llog.engines.object.partition_keys import find_keys
from llog.errors import LlogError, PartitionNotInitialized, TopicNotFound
from llog.log.inline import is_inline
from llog.log.log import Log
from llog.log.opening import compactor_options
from llog.log.records import Control, IndexEntry, Kind, decode
from llog.model import TopicPartition
from llog.spark.jobs.tasks import StepResult, check_reachable, first_failures, run_tasks
from llog.spark.process import run
from llog.stores.meta import prefix_end

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROUNDS_MAX = 1000
TOGETHER_BYTES_MAX = 64 << 20
"""The size up to which partitions that share blobs stay in one task, even if other tasks have less to do.

Below this size, requests cost more than bytes.
"""
_TASKS_PER_CORE = 2
_PAGE = 256
_CONCURRENCY = 64


class CompactionInput(NamedTuple):
    """What a partition's next compaction will read, estimated from the first page of its index."""

    tp: TopicPartition
    bytes: int
    blobs: tuple[str, ...]


class CompactTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over the compactions of several partitions."""

    runs: int = 0
    records: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    merges: int = 0
    """How often small compacted blobs were merged into one."""
    blob_reads: int = 0
    """The number of requests for a blob's bytes."""
    ahead: tuple[TopicPartition, ...] = ()
    """The partitions that may have more to compact."""
    damaged: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()


class CompactionSummary(msgspec.Struct, frozen=True, kw_only=True):
    rounds: int
    tasks: int
    partitions: int
    """The number of partitions that had something to compact at the beginning."""
    total: CompactTotals


def compact(spark: SparkSession, settings: Settings, options: Mapping[str, Any]) -> StepResult:
    """Run the step `compact`. A partition that fails or is damaged is reported and stops no other."""
    started = time.monotonic()
    summary = compact_lagging(spark, settings)
    total = summary.total
    return StepResult(
        name="compact",
        seconds=time.monotonic() - started,
        rows=[
            ("partitions", f"{summary.partitions:,}"),
            ("blobs written", f"{total.runs:,}"),
            ("records", f"{total.records:,}"),
            ("read", f"{format_size(total.bytes_read)} in {total.blob_reads:,} requests"),
            ("written", format_size(total.bytes_written)),
            ("rounds", f"{summary.rounds:,}"),
            ("merges", f"{total.merges:,}"),
        ],
        failures=[*(f"damaged: {what}" for what in total.damaged), *total.failures],
    )


def compact_lagging(spark: SparkSession, settings: Settings, *, rounds_max: int = ROUNDS_MAX) -> CompactionSummary:
    """Compact until no compaction is worthwhile any more, for at most `rounds_max` rounds."""
    check_reachable(settings)
    bins = spark.sparkContext.defaultParallelism * _TASKS_PER_CORE
    inputs = run(settings, lambda log: find_inputs(log, compactor_options(settings)))
    partitions, tasks, done, rounds = len(inputs), 0, [], 0
    while inputs and rounds < rounds_max:
        groups = assign_tasks(inputs, bins)
        results = run_tasks(spark, groups, partial(_compact, settings))
        ahead = [tp for each in results for tp in each.ahead]
        done.append(_sum(results))
        rounds, tasks = rounds + 1, tasks + len(groups)
        found = [LaggingPartition(tp, 0, begun=False) for tp in ahead]
        inputs = run(settings, partial(_read_inputs, options=compactor_options(settings), found=found))
    return CompactionSummary(rounds=rounds, tasks=tasks, partitions=partitions, total=_sum(done))


async def find_inputs(log: Log, options: CompactorOptions) -> list[CompactionInput]:
    """Return every partition that has something to compact."""
    return await _read_inputs(log, options=options, found=[each async for each in lagging_partitions(log)])


def assign_tasks(inputs: Sequence[CompactionInput], bins: int) -> list[list[TopicPartition]]:
    """Return the partitions in at most `bins` tasks of about equal bytes.

    Partitions that share blobs stay together, as neighbours in a task, up to an even part of all bytes, or
    `TOGETHER_BYTES_MAX` if that is more.
    """
    bytes_max = max(TOGETHER_BYTES_MAX, sum(each.bytes for each in inputs) // max(1, bins))
    groups = [part for group in _sharers(inputs) for part in _cut(group, bytes_max)]
    groups.sort(key=lambda group: -_bytes(group))
    heap: list[tuple[int, int]] = [(0, number) for number in range(min(bins, len(groups)))]
    tasks: list[list[TopicPartition]] = [[] for _ in heap]
    for group in groups:
        size, number = heapq.heappop(heap)
        tasks[number] += [each.tp for each in group]
        heapq.heappush(heap, (size + _bytes(group), number))
    return tasks


def _sharers(inputs: Sequence[CompactionInput]) -> list[list[CompactionInput]]:
    """Return groups that share no blob with each other; within a group, in the order of their first blobs."""
    parent = list(range(len(inputs)))

    def root(number: int) -> int:
        while parent[number] != number:
            parent[number] = number = parent[parent[number]]
        return number

    first: dict[str, int] = {}
    for number, each in enumerate(inputs):
        for blob in each.blobs:
            parent[root(number)] = root(first.setdefault(blob, number))
    groups: dict[int, list[CompactionInput]] = {}
    for number, each in enumerate(inputs):
        groups.setdefault(root(number), []).append(each)
    return [sorted(group, key=lambda each: (each.blobs[:1], each.tp)) for group in groups.values()]


def _cut(group: Sequence[CompactionInput], bytes_max: int) -> list[list[CompactionInput]]:
    parts: list[list[CompactionInput]] = []
    size = 0
    for each in group:
        if not parts or size + each.bytes > bytes_max:
            parts.append([])
            size = 0
        parts[-1].append(each)
        size += each.bytes
    return parts


def _bytes(group: Iterable[CompactionInput]) -> int:
    """Return the bytes of a group, at least 1 for each partition, so that those without bytes are spread, too."""
    return sum(each.bytes + 1 for each in group)


async def _read_inputs(
    log: Log, *, options: CompactorOptions, found: Sequence[LaggingPartition]
) -> list[CompactionInput]:
    async def read(partition: LaggingPartition) -> CompactionInput | None:
        try:
            return await _read_input(log, options, partition)
        except (TopicNotFound, PartitionNotInitialized):
            return None  # deleted meanwhile
        except LlogError:
            return CompactionInput(partition.tp, 0, ())  # the compactor will meet the same error and report it

    inputs = await gather_bounded(read, found, _CONCURRENCY)
    return [each for each in inputs if each is not None]


async def _read_input(log: Log, options: CompactorOptions, found: LaggingPartition) -> CompactionInput | None:
    """Return None if there are too few entries to compact, as in most partitions of a busy log, most of the time."""
    keys = await find_keys(log, found.tp)
    cursor, _ = await read_cursor(log, found.tp, keys)
    record = await log.meta.get(keys.control)
    pending = decode(Control, record.value, record.key).pending if record else None
    page = await log.meta.range(keys.entry(cursor), prefix_end(keys.index), _PAGE)
    entries = [decode(IndexEntry, each.value, each.key) for each in page]
    waiting = [entry for entry in entries if entry.kind is Kind.WAL]
    known = {entry.data_uri for entry in waiting}
    waiting += [entry for entry in (pending.entries if pending else ()) if entry.data_uri not in known]
    size = sum(entry.byte_length for entry in waiting)
    few = len(page) < _PAGE and len(waiting) < options.min_entries and size < options.max_bytes // 4
    if few and not found.begun and not any(is_inline(entry.data_uri) for entry in waiting):
        return None
    blobs = dict.fromkeys(entry.data_uri for entry in waiting if not is_inline(entry.data_uri))
    return CompactionInput(found.tp, min(size, options.max_bytes), tuple(blobs))


def _compact(settings: Settings, tps: Sequence[TopicPartition]) -> CompactTotals:
    """Compact the partitions of one task, on an executor."""
    from pyspark import TaskContext

    context = TaskContext.get()
    # A retried task meets the claims of its own first attempt, which last as long as the dead executor's session.
    first = context is None or context.attemptNumber() == 0

    async def work(log: Log) -> CompactTotals:
        reads_before = _blob_reads(log)
        results = await Compactor(log, compactor_options(settings)).compact_many(tps, claim=first)
        runs = [each for each in results if each.end_offset is not None]
        named = [(f"{each.topic}/{each.partition}", each) for each in results]
        return CompactTotals(
            runs=len(runs),
            records=sum(each.records for each in runs),
            bytes_read=sum(each.bytes_read for each in results),
            bytes_written=sum(each.bytes_written for each in runs),
            merges=sum(each.merges for each in results),
            blob_reads=_blob_reads(log) - reads_before,
            ahead=tuple(TopicPartition(each.topic, each.partition) for each in runs if each.error is None),
            damaged=first_failures(f"{name}: {what}" for name, each in named for what in each.damaged),
            failures=first_failures(f"{name}: {each.error}" for name, each in named if each.error),
        )

    return run(settings, work)


def _blob_reads(log: Log) -> int:
    """Return the number of reads that the blob store has counted so far."""
    counts = getattr(log.blobs, "counts", None)
    return sum(counts.count.get(name, 0) for name in ("get", "range_get")) if counts is not None else 0


def _sum(parts: Sequence[CompactTotals]) -> CompactTotals:
    return CompactTotals(
        runs=sum(each.runs for each in parts),
        records=sum(each.records for each in parts),
        bytes_read=sum(each.bytes_read for each in parts),
        bytes_written=sum(each.bytes_written for each in parts),
        merges=sum(each.merges for each in parts),
        blob_reads=sum(each.blob_reads for each in parts),
        damaged=first_failures(what for each in parts for what in each.damaged),
        failures=first_failures(what for each in parts for what in each.failures),
    )
