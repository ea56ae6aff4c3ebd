"""Compaction: joins many small slices of shared blobs into one blob per run of a partition's offsets, behind one index
entry, and merges small blobs of that kind again (`merge.py`).

Offsets and records do not change. Any number of compactors may run at once, and any may finish what a dead one began:
the claim only saves double work, and safety does not depend on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Final, NamedTuple

import msgspec

from llog.base.concurrency import gather_bounded
from llog.engines.object.compaction.claims import Claims
from llog.engines.object.compaction.job import (
    Done,
    Job,
    Replan,
    Slice,
    begin,
    fetch,
    finish,
    shared_blob_name,
    shares_blob,
    write_shared_blob,
)
from llog.engines.object.compaction.merge import choose_merge
from llog.engines.object.compaction.plan import INDEX_PAGE, CompactorOptions, Plan, choose
from llog.engines.object.partition_keys import find_keys
from llog.errors import LlogError
from llog.log.catalog import OBJECT, Catalog
from llog.log.keys import PartitionKeys
from llog.log.log import Log
from llog.log.records import CompactionCursor, CompactionState, Control, IndexEntry, Topic, decode
from llog.model import TopicPartition
from llog.stores.counting import OperationCounts, measure
from llog.stores.meta import prefix_end

__all__ = [
    "CompactionResult",
    "Compactor",
    "CompactorOptions",
    "Lag",
    "LaggingPartition",
    "lagging_partitions",
]

_ATTEMPTS_MAX: Final = 100
_SPAN_OVERHEAD: Final = 1024
"""The bytes of memory that a slice takes besides its data."""
_LAGGING_PAGE: Final = 64
_MERGES_MAX: Final = 16
"""The most merges of a partition in one pass."""


class CompactionResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one run did. `end_offset` is None if there was nothing to do, or another compactor is doing it."""

    topic: str
    partition: int
    start_offset: int | None = None
    end_offset: int | None = None
    entries: int = 0
    """The number of index entries that became one; 0 if the compaction was resumed after its blob was written."""
    records: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    damaged: tuple[str, ...] = ()
    """Slices that cannot be read. They stay as they are, and the cursor has passed them."""
    more: bool = False
    """Whether another run may follow at once: this one ended before the end of the log did."""
    merges: int = 0
    """How often compacted entries were merged into one."""
    merged_entries: int = 0
    """The number of compacted entries that merges joined."""
    merged_bytes: int = 0
    """The bytes that merges wrote; they read about as many, which `bytes_read` does not include."""
    resumed_from: CompactionState | None = None
    """The state in which another compactor, or an earlier run, had left this compaction."""
    claimed_elsewhere: bool = False
    """Whether the partition was left to the compactor that has claimed it."""
    error: LlogError | None = None


class Lag(msgspec.Struct, frozen=True, kw_only=True):
    """The backlog of one partition. `entries` and `bytes` are extrapolated if there are many entries."""

    topic: str
    partition: int
    offsets: int
    entries: int
    bytes: int


class LaggingPartition(NamedTuple):
    tp: TopicPartition
    offsets: int
    begun: bool
    """Whether a compaction has begun and is not finished."""
    pending: bool = False
    """Whether the newest append has no index entry yet."""


class _Task:
    """One partition's progress through a pass."""

    def __init__(self, tp: TopicPartition) -> None:
        self.result = CompactionResult(topic=tp.topic, partition=tp.partition)
        self.tp = tp
        self.keys: PartitionKeys | None = None
        self.is_claimed = False
        self.plan: Plan | None = None
        self.job: Job | None = None
        self.slices: list[Slice] = []
        self.shared_blob: str | None = None
        """The blob into which the run goes with those of other partitions."""

    @property
    def memory(self) -> int:
        spans = self.plan.spans if self.plan else ()
        return sum(span.entry.byte_length + _SPAN_OVERHEAD for span in spans)

    def set(self, **changes: object) -> None:
        self.result = msgspec.structs.replace(self.result, **changes)

    def count_slices(self) -> None:
        read = sum(len(part) for part in self.slices if not isinstance(part, LlogError))
        self.set(bytes_read=self.result.bytes_read + read)

    def done(self, job: Job, done: Done) -> None:
        if job.plan.merge:
            self.set(
                merges=self.result.merges + 1,
                merged_entries=self.result.merged_entries + done.entries,
                merged_bytes=self.result.merged_bytes + done.bytes_written,
            )
            return
        self.set(
            start_offset=job.breadcrumb.record.start_offset,
            end_offset=job.breadcrumb.record.end_offset,
            entries=done.entries,
            records=done.records,
            bytes_written=done.bytes_written,
            more=not job.plan.at_tail,
        )

    def resume(self, plan: Plan) -> None:
        if plan.breadcrumb is not None:
            self.set(resumed_from=plan.breadcrumb.record.state)


class Compactor:
    """Compacts the partitions of a log. `stages` counts the steps of its compactions, and their seconds."""

    def __init__(self, log: Log, options: CompactorOptions | None = None, claims: Claims | None = None) -> None:
        self.stages = OperationCounts()
        self._log = log
        self._options = options or CompactorOptions()
        self._claims = claims or Claims(log, self._options.holder)
        # A merge holds its run in memory, encoded and decoded, beside a wave of slices.
        merges_max = self._options.memory_bytes_max // 3 // (2 * self._options.max_bytes)
        self._merge_slots = asyncio.Semaphore(max(1, merges_max))

    async def compact_once(self, tp: TopicPartition, *, force: bool = False) -> CompactionResult:
        """Compact one run of the partition, resumed or new, and merge what is worth merging. `force` includes the
        newest append and a single entry.
        """
        task = _Task(tp)
        keys = await find_keys(self._log, tp)
        await self._compact_alone(task, keys, force)
        await self._merge(task, keys)
        return task.result

    async def compact_many(
        self,
        tps: Sequence[TopicPartition],
        *,
        claim: bool = True,
        merge_all: bool = False,
        stopping: Callable[[], bool] = lambda: False,
    ) -> list[CompactionResult]:
        """Compact one run of each partition, and read each shared blob once for every wave of slices. Where a run was
        compacted, also merge what is worth merging; with `merge_all`, everywhere.

        A partition's error is in its result and does not stop the others. With `claim`, skips partitions that other
        compactors have claimed. Once `stopping` returns True, finishes the runs that have begun, and begins no other.
        """
        tasks = {tp: _Task(tp) for tp in tps}
        waiting = list(tasks.values())
        wave: list[_Task] = []
        ending: asyncio.Task[None] | None = None
        size, limit = 0, self._options.memory_bytes_max * 2 // 3  # The next wave is read while this one is written.
        try:
            for first in range(0, len(waiting), self._options.concurrency):
                if stopping():
                    break
                chunk = waiting[first : first + self._options.concurrency]
                await self._each(chunk, lambda task: self._choose(task, claim, merge_all))
                for task in chunk:
                    if wave and size + task.memory > limit:
                        ending = await self._run_wave(wave, ending)
                        wave, size, limit = [], 0, self._options.memory_bytes_max // 3
                    wave.append(task)
                    size += task.memory
            if not stopping():
                ending = await self._run_wave(wave, ending)
            if ending is not None:
                await ending
        finally:
            if ending is not None:
                ending.cancel()
            await self._each([task for task in waiting if task.is_claimed], self._release)
        return [tasks[tp].result for tp in tps]

    async def lag(self, tp: TopicPartition) -> Lag:
        """Return the partition's backlog, from the control record, the cursor and one page of the index."""
        keys = await find_keys(self._log, tp)
        found = await _read_backlog(self._log, tp, keys)
        if found is None or found.offsets == 0:
            return Lag(topic=tp.topic, partition=tp.partition, offsets=0, entries=0, bytes=0)
        cursor, counter = found.cursor, found.cursor + found.offsets
        page = await self._log.meta.range(keys.entry(cursor), prefix_end(keys.index), INDEX_PAGE)
        entries = [decode(IndexEntry, entry.value, entry.key) for entry in page]
        covered = sum(entry.msg_count for entry in entries)
        size = sum(entry.byte_length for entry in entries)
        scale = (counter - cursor) / covered if covered and len(page) == INDEX_PAGE else 1
        return Lag(
            topic=tp.topic,
            partition=tp.partition,
            offsets=found.offsets,
            entries=round(len(entries) * scale),
            bytes=round(size * scale),
        )

    async def _compact_alone(
        self, task: _Task, keys: PartitionKeys, force: bool = False, stop_before: int | None = None
    ) -> None:
        for _ in range(_ATTEMPTS_MAX):
            with measure(self.stages, "choose"):
                plan = await choose(self._log, self._options, task.tp, keys, force=force, stop_before=stop_before)
            if plan is None:
                return
            task.resume(plan)
            with measure(self.stages, "begin"):
                job = await begin(self._log, plan)
            if job is None:
                continue
            with measure(self.stages, "fetch"):
                task.slices = (await fetch(self._log, [job], self._options.concurrency))[0]
            outcome = await self._finish(task, job)
            if isinstance(outcome, Replan):
                stop_before = outcome.stop_before
            elif not job.plan.merge:
                return

    async def _merge(self, task: _Task, keys: PartitionKeys) -> None:
        """Merge runs of compacted entries, unless a damaged slice or another compactor prevents it."""
        for _ in range(_MERGES_MAX):
            with measure(self.stages, "choose"):
                plan = await choose_merge(self._log, self._options, task.tp, keys)
            if plan is None:
                return
            async with self._merge_slots:
                with measure(self.stages, "begin"):
                    job = await begin(self._log, plan)
                if job is None:
                    return
                with measure(self.stages, "fetch"):
                    task.slices = (await fetch(self._log, [job], self._options.concurrency))[0]
                if not isinstance(await self._finish(task, job), Done):
                    return

    async def _finish(self, task: _Task, job: Job) -> Done | Replan | None:
        if not job.plan.merge:
            task.count_slices()
        outcome = await finish(self._log, self._options.codec, job, task.slices, self.stages)
        task.slices = []
        if isinstance(outcome, Done):
            task.done(job, outcome)
        elif isinstance(outcome, Replan) and outcome.damaged is not None:
            task.set(damaged=(*task.result.damaged, outcome.damaged))
        return outcome

    async def _run_wave(self, wave: Sequence[_Task], before: asyncio.Task[None] | None) -> asyncio.Task[None]:
        """Read the slices of a wave while the one before is written; return the task that writes this wave."""
        planned = [task for task in wave if task.plan is not None]
        sharing = [task for task in planned if task.plan is not None and shares_blob(task.plan)]
        if len(sharing) > 1:
            blob = shared_blob_name(self._log, [task.plan for task in sharing if task.plan is not None])
            for task in sharing:
                task.shared_blob = blob
        await self._each(planned, self._begin)
        begun = [task for task in wave if task.job is not None]
        with measure(self.stages, "fetch"):
            slices = await fetch(self._log, [task.job for task in begun if task.job], self._options.concurrency)
        for task, own in zip(begun, slices, strict=True):
            task.slices = own
        del slices
        if before is not None:
            await before
        return asyncio.create_task(self._end_wave(wave, begun))

    async def _end_wave(self, wave: Sequence[_Task], begun: Sequence[_Task]) -> None:
        sharing = [task for task in begun if task.shared_blob is not None and task.job is not None]
        if sharing:
            await self._write_shared_blob(sharing)
        await self._each([task for task in begun if task.job is not None], self._end)
        await self._each([task for task in wave if task.is_claimed], self._release)

    async def _write_shared_blob(self, sharing: Sequence[_Task]) -> None:
        """Put the blob that the breadcrumbs of these tasks name. After an error, the next compactor resumes them."""
        jobs = [task.job for task in sharing if task.job is not None]
        try:
            with measure(self.stages, "write"):
                jobs = await write_shared_blob(self._log, self._options.codec, jobs, [task.slices for task in sharing])
        except LlogError as error:
            for task in sharing:
                task.job = None
                task.set(error=error)
            return
        for task, job in zip(sharing, jobs, strict=True):
            task.job = job

    async def _choose(self, task: _Task, claim: bool, merge_all: bool) -> None:
        task.keys = await find_keys(self._log, task.tp)
        if claim:
            with measure(self.stages, "claim"):
                task.is_claimed = await self._claims.take(task.keys.claim)
            if not task.is_claimed:
                task.set(claimed_elsewhere=True)
                return
        with measure(self.stages, "choose"):
            task.plan = await choose(self._log, self._options, task.tp, task.keys)
        if task.plan is not None:
            task.resume(task.plan)
        elif merge_all:
            await self._merge(task, task.keys)

    async def _begin(self, task: _Task) -> None:
        assert task.plan is not None
        with measure(self.stages, "begin"):
            task.job = await begin(self._log, task.plan, task.shared_blob)
        task.plan = None

    async def _end(self, task: _Task) -> None:
        job, task.job = task.job, None
        assert job is not None
        assert task.keys is not None
        outcome = await self._finish(task, job)
        if isinstance(outcome, Replan):
            await self._compact_alone(task, task.keys, stop_before=outcome.stop_before)
        elif job.plan.merge:
            await self._compact_alone(task, task.keys)
        if task.result.end_offset is not None and task.result.error is None:
            await self._merge(task, task.keys)

    async def _release(self, task: _Task) -> None:
        task.is_claimed = False
        assert task.keys is not None
        await self._claims.release(task.keys.claim)

    async def _each(self, tasks: Sequence[_Task], step: Callable[[_Task], Awaitable[None]]) -> None:
        """Run the step for all tasks, some at a time; store an error in its task's result."""

        async def guarded(task: _Task) -> None:
            try:
                await step(task)
            except LlogError as error:
                task.set(error=error)

        await gather_bounded(guarded, tasks, self._options.concurrency)


async def lagging_partitions(
    log: Log, *, min_offsets: int = 1, topics: Sequence[Topic] | None = None
) -> AsyncIterator[LaggingPartition]:
    """Iterate over the partitions with at least `min_offsets` offsets to compact, or a compaction to resume; of all
    object topics, or of those that the caller has found.

    Costs one metadata read for every partition.
    """
    for topic in await Catalog(log).topics(OBJECT) if topics is None else topics:
        for first in range(0, topic.partitions, _LAGGING_PAGE):
            partitions = range(first, min(first + _LAGGING_PAGE, topic.partitions))

            async def one(
                partition: int, topic_name: str = topic.name, directory: str = topic.directory
            ) -> _Backlog | None:
                return await _read_backlog(
                    log, TopicPartition(topic_name, partition), PartitionKeys(directory, partition)
                )

            for partition, found in zip(partitions, await gather_bounded(one, partitions, _LAGGING_PAGE), strict=True):
                if found is not None and (found.begun or found.offsets >= min_offsets):
                    tp = TopicPartition(topic.name, partition)
                    yield LaggingPartition(tp, found.offsets, found.begun, found.pending)


class _Backlog(NamedTuple):
    cursor: int
    offsets: int
    begun: bool
    pending: bool


async def _read_backlog(log: Log, tp: TopicPartition, keys: PartitionKeys) -> _Backlog | None:
    """Read the backlog from the keys below the partition's `meta/`, in one request; return None if the partition does
    not exist.
    """
    prefix = keys.prefix + "meta/"
    found = {entry.key: entry for entry in await log.meta.range(prefix, prefix_end(prefix), 16)}
    if keys.control not in found or keys.cursor not in found:
        return None
    control = decode(Control, found[keys.control].value, keys.control)
    cursor = max(decode(CompactionCursor, found[keys.cursor].value, keys.cursor).offset, control.log_start_offset)
    offsets = max(0, control.next_offset - cursor)
    return _Backlog(cursor, offsets, keys.compaction in found, control.pending is not None)
