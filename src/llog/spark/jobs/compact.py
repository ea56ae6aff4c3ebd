"""Compaction of all partitions with lag, in rounds.

The driver reads where each partition's next records lie, puts partitions that share blobs into one task, and each task
runs the compactor, with claims, so that other compactors may run beside it. A round takes one run of each partition;
the next one goes on with those that got ahead.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from llog.base.units import format_size
from llog.config import Settings
from llog.engines.object.compaction.compactor import Compactor, Lagging, lagging
from llog.engines.object.compaction.plan import CompactorOptions, read_cursor
from llog.engines.object.partition_keys import find_keys
from llog.errors import LlogError, PartitionNotInitialized, TopicNotFound
from llog.log.log import Log
from llog.log.opening import compactor_options
from llog.log.records import Control, IndexEntry, Kind, decode
from llog.model import TopicPartition
from llog.spark.jobs.results import StepResult, some
from llog.spark.jobs.tasks import check_reachable, run_tasks
from llog.spark.process import run
from llog.stores.meta import after

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROUNDS_MAX = 1000
TOGETHER_BYTES_MAX = 64 << 20
"""Sharers of blobs are kept in one task up to this size, however idle the others are: below it, requests cost more than
bytes.
"""
_TASKS_PER_CORE = 2
_PAGE = 256
_CONCURRENCY = 64


class Share(NamedTuple):
    """What a partition's next run will read, judged by the first page of its index."""

    tp: TopicPartition
    bytes: int
    blobs: tuple[str, ...]


class Compacted(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over runs."""

    runs: int = 0
    records: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    blob_reads: int = 0
    """Requests for a blob's bytes."""
    ahead: tuple[TopicPartition, ...] = ()
    """Partitions that may have another run to do."""
    damaged: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()


class CompactionSummary(msgspec.Struct, frozen=True, kw_only=True):
    rounds: int
    tasks: int
    partitions: int
    """With something to compact when this began."""
    total: Compacted


def compact(spark: SparkSession, settings: Settings, options: Mapping[str, Any]) -> StepResult:
    """The step `compact`. A partition that fails or is damaged is told and stops no other."""
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
        ],
        failures=[*(f"damaged: {what}" for what in total.damaged), *total.failures],
    )


def compact_lagging(spark: SparkSession, settings: Settings, *, rounds_max: int = ROUNDS_MAX) -> CompactionSummary:
    """Compacts until no partition has anything that is worth it, for at most so many rounds."""
    check_reachable(settings)
    bins = spark.sparkContext.defaultParallelism * _TASKS_PER_CORE
    shares = run(settings, lambda log: find_shares(log, compactor_options(settings)))
    partitions, tasks, done, rounds = len(shares), 0, [], 0
    while shares and rounds < rounds_max:
        groups = assign(shares, bins)
        results = run_tasks(spark, groups, partial(_compact, settings))
        ahead = [tp for each in results for tp in each.ahead]
        done.append(_sum(results))
        rounds, tasks = rounds + 1, tasks + len(groups)
        shares = run(settings, partial(_shares, options=compactor_options(settings), found=_again(ahead)))
    return CompactionSummary(rounds=rounds, tasks=tasks, partitions=partitions, total=_sum(done))


async def find_shares(log: Log, options: CompactorOptions) -> list[Share]:
    """Every partition that has something to compact."""
    return await _shares(log, options=options, found=[each async for each in lagging(log)])


def assign(shares: Sequence[Share], bins: int) -> list[list[TopicPartition]]:
    """The partitions in at most `bins` tasks of about equal bytes, largest groups of sharers first.

    Sharers stay together up to an even part of the bytes, or `TOGETHER_BYTES_MAX` if that is more; in a task they are
    neighbours.
    """
    part = max(TOGETHER_BYTES_MAX, sum(share.bytes for share in shares) // max(1, bins))
    groups = [piece for group in _sharers(shares) for piece in _cut(group, part)]
    groups.sort(key=lambda group: -_bytes(group))
    heap: list[tuple[int, int]] = [(0, number) for number in range(min(bins, len(groups)))]
    tasks: list[list[TopicPartition]] = [[] for _ in heap]
    for group in groups:
        size, number = heapq.heappop(heap)
        tasks[number] += [share.tp for share in group]
        heapq.heappush(heap, (size + _bytes(group), number))
    return tasks


def _sharers(shares: Sequence[Share]) -> list[list[Share]]:
    """Groups of which none shares a blob with another; within one, by the first blob."""
    parent = list(range(len(shares)))

    def root(number: int) -> int:
        while parent[number] != number:
            parent[number] = number = parent[parent[number]]
        return number

    first: dict[str, int] = {}
    for number, share in enumerate(shares):
        for blob in share.blobs:
            parent[root(number)] = root(first.setdefault(blob, number))
    groups: dict[int, list[Share]] = {}
    for number, share in enumerate(shares):
        groups.setdefault(root(number), []).append(share)
    return [sorted(group, key=lambda share: (share.blobs[:1], share.tp)) for group in groups.values()]


def _cut(group: Sequence[Share], bytes_max: int) -> list[list[Share]]:
    pieces: list[list[Share]] = []
    size = 0
    for share in group:
        if not pieces or size + share.bytes > bytes_max:
            pieces.append([])
            size = 0
        pieces[-1].append(share)
        size += share.bytes
    return pieces


def _bytes(group: Iterable[Share]) -> int:
    """Never nothing, so that partitions without bytes are spread, too."""
    return sum(share.bytes + 1 for share in group)


def _again(tps: Sequence[TopicPartition]) -> list[Lagging]:
    return [Lagging(tp, 0, begun=False) for tp in tps]


async def _shares(log: Log, *, options: CompactorOptions, found: Sequence[Lagging]) -> list[Share]:
    gate = asyncio.Semaphore(_CONCURRENCY)

    async def one(each: Lagging) -> Share | None:
        async with gate:
            try:
                return await _share(log, options, each)
            except (TopicNotFound, PartitionNotInitialized):
                return None  # deleted meanwhile
            except LlogError:
                return Share(each.tp, 0, ())  # the compactor will meet it, too, and tell

    shares = []
    for start in range(0, len(found), _CONCURRENCY):
        shares += await asyncio.gather(*map(one, found[start : start + _CONCURRENCY]))
    return [share for share in shares if share is not None]


async def _share(log: Log, options: CompactorOptions, found: Lagging) -> Share | None:
    """None if there are too few entries for a run: most partitions of a busy log, most of the time."""
    keys = await find_keys(log, found.tp)
    cursor, _ = await read_cursor(log, found.tp, keys)
    record = await log.meta.get(keys.control)
    pending = decode(Control, record.value, record.key).pending if record else None
    page = await log.meta.range(keys.entry(cursor), after(keys.index), _PAGE)
    entries = [decode(IndexEntry, each.value, each.key) for each in page]
    waiting = [entry for entry in entries if entry.kind is Kind.WAL]
    known = {entry.data_uri for entry in waiting}
    waiting += [entry for entry in (pending.entries if pending else ()) if entry.data_uri not in known]
    size = sum(entry.byte_length for entry in waiting)
    few = len(page) < _PAGE and len(waiting) < options.min_entries and size < options.max_bytes // 4
    if few and not found.begun:
        return None
    return Share(found.tp, min(size, options.max_bytes), tuple(dict.fromkeys(entry.data_uri for entry in waiting)))


def _compact(settings: Settings, tps: Sequence[TopicPartition]) -> Compacted:
    """One task's partitions, on an executor."""
    from pyspark import TaskContext

    context = TaskContext.get()
    # The claims that a retried task meets are its own, of the executor that died: they last as long as its session.
    first = context is None or context.attemptNumber() == 0

    async def work(log: Log) -> Compacted:
        reads_before = _blob_reads(log)
        results = await Compactor(log, compactor_options(settings)).compact_many(tps, claim=first)
        runs = [each for each in results if each.end_offset is not None]
        named = [(f"{each.topic}/{each.partition}", each) for each in results]
        return Compacted(
            runs=len(runs),
            records=sum(each.records for each in runs),
            bytes_read=sum(each.bytes_read for each in results),
            bytes_written=sum(each.bytes_written for each in runs),
            blob_reads=_blob_reads(log) - reads_before,
            ahead=tuple(TopicPartition(each.topic, each.partition) for each in runs if each.error is None),
            damaged=some(f"{name}: {what}" for name, each in named for what in each.damaged),
            failures=some(f"{name}: {each.error}" for name, each in named if each.error),
        )

    return run(settings, work)


def _blob_reads(log: Log) -> int:
    """What the store has counted so far; every adapter does."""
    counts = getattr(log.blobs, "counts", None)
    return counts.count.get("get", 0) if counts is not None else 0


def _sum(parts: Sequence[Compacted]) -> Compacted:
    return Compacted(
        runs=sum(each.runs for each in parts),
        records=sum(each.records for each in parts),
        bytes_read=sum(each.bytes_read for each in parts),
        bytes_written=sum(each.bytes_written for each in parts),
        blob_reads=sum(each.blob_reads for each in parts),
        damaged=some(what for each in parts for what in each.damaged),
        failures=some(what for each in parts for what in each.failures),
    )
