"""Compaction: many small slices of shared blobs become one blob per run of a partition's offsets, behind one index
entry.

Offsets and records stay as they are. Any number of compactors may run at once, die and be resumed by others: the claim
only saves them double work, and nothing's safety depends on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final, NamedTuple, TypeVar

import msgspec

from llog.engines.object.compaction.job import Again, Done, Job, Slice, begin, fetch, finish
from llog.engines.object.compaction.plan import INDEX_PAGE, CompactorOptions, Plan, choose
from llog.engines.object.partition_keys import find_keys
from llog.errors import LlogError, VersionMismatch
from llog.log.catalog import OBJECT, Catalog
from llog.log.keys import PartitionKeys
from llog.log.log import Log
from llog.log.records import CompactorClaim, Control, Cursor, IndexEntry, decode, encode
from llog.model import TopicPartition
from llog.stores.meta import ABSENT, after

__all__ = ["CompactionResult", "Compactor", "CompactorOptions", "Lag", "Lagging", "claimed", "lagging"]

_ATTEMPTS_MAX: Final = 100
_PIECE_OVERHEAD: Final = 1024
"""Bytes of memory that a slice costs besides its own."""
_LAGGING_PAGE: Final = 64

T = TypeVar("T")
R = TypeVar("R")


class CompactionResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one run did. Without an `end_offset` there was nothing to do, or somebody else is doing it."""

    topic: str
    partition: int
    start_offset: int | None = None
    end_offset: int | None = None
    entries: int = 0
    """Index entries that became one; 0 if a compaction was resumed after its blob was written."""
    records: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    damaged: tuple[str, ...] = ()
    """Slices that cannot be read: they stay as they are, and the cursor has passed them."""
    error: LlogError | None = None


class Lag(msgspec.Struct, frozen=True, kw_only=True):
    """What waits for compaction. `entries` and `bytes` are extrapolated where there are many."""

    topic: str
    partition: int
    offsets: int
    entries: int
    bytes: int


class Lagging(NamedTuple):
    tp: TopicPartition
    offsets: int
    begun: bool
    """A compaction was begun and is not finished."""


class _Task:
    """One partition's way through a pass."""

    def __init__(self, tp: TopicPartition) -> None:
        self.result = CompactionResult(topic=tp.topic, partition=tp.partition)
        self.tp = tp
        self.keys: PartitionKeys | None = None
        self.claim: int | None = None
        self.plan: Plan | None = None
        self.job: Job | None = None
        self.slices: list[Slice] = []

    @property
    def memory(self) -> int:
        pieces = self.plan.pieces if self.plan else ()
        return sum(piece.entry.byte_length + _PIECE_OVERHEAD for piece in pieces)

    def set(self, **changes: object) -> None:
        self.result = msgspec.structs.replace(self.result, **changes)

    def count_slices(self) -> None:
        read = sum(len(part) for part in self.slices if not isinstance(part, LlogError))
        self.set(bytes_read=self.result.bytes_read + read)

    def done(self, job: Job, done: Done) -> None:
        self.set(
            start_offset=job.crumb.record.start_offset,
            end_offset=job.crumb.record.end_offset,
            entries=done.entries,
            records=done.records,
            bytes_written=done.bytes_written,
        )


class Compactor:
    def __init__(self, log: Log, options: CompactorOptions | None = None) -> None:
        self._log = log
        self._options = options or CompactorOptions()

    async def compact_once(self, tp: TopicPartition, *, force: bool = False) -> CompactionResult:
        """One run of one partition, resumed or new. `force` compacts the newest append and a single entry, too."""
        task = _Task(tp)
        await self._alone(task, await find_keys(self._log, tp), force)
        return task.result

    async def compact_many(self, tps: Sequence[TopicPartition], *, claim: bool = True) -> list[CompactionResult]:
        """One run of each partition, reading each shared blob once for every wave of slices.

        A partition's error is in its result and stops no other. With `claim`, those that others have claimed are left
        to them.
        """
        tasks = {tp: _Task(tp) for tp in tps}
        waiting = list(tasks.values())
        wave: list[_Task] = []
        ending: asyncio.Task[None] | None = None
        size, limit = 0, self._options.memory_bytes_max * 2 // 3  # the next wave is read while this one is written
        try:
            for first in range(0, len(waiting), self._options.concurrency):
                chunk = waiting[first : first + self._options.concurrency]
                await self._each(chunk, lambda task: self._choose(task, claim))
                for task in chunk:
                    if wave and size + task.memory > limit:
                        ending = await self._run_wave(wave, ending)
                        wave, size, limit = [], 0, self._options.memory_bytes_max // 3
                    wave.append(task)
                    size += task.memory
            ending = await self._run_wave(wave, ending)
            await ending
        finally:
            if ending is not None:
                ending.cancel()
            await self._each([task for task in waiting if task.claim is not None], self._release)
        return [tasks[tp].result for tp in tps]

    async def lag(self, tp: TopicPartition) -> Lag:
        """How much waits for compaction, told from the control record, the cursor and one page of the index."""
        keys = await find_keys(self._log, tp)
        found = await _lag_of(self._log, tp, keys)
        if found is None or found.offsets == 0:
            return Lag(topic=tp.topic, partition=tp.partition, offsets=0, entries=0, bytes=0)
        cursor, counter = found.cursor, found.cursor + found.offsets
        page = await self._log.meta.range(keys.entry(cursor), after(keys.index), INDEX_PAGE)
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

    async def _alone(
        self, task: _Task, keys: PartitionKeys, force: bool = False, stop_before: int | None = None
    ) -> None:
        for _ in range(_ATTEMPTS_MAX):
            plan = await choose(self._log, self._options, task.tp, keys, force=force, stop_before=stop_before)
            if plan is None:
                return
            job = await begin(self._log, plan)
            if job is None:
                continue
            task.slices = (await fetch(self._log, [job], self._options.concurrency))[0]
            outcome = await self._finish(task, job)
            if not isinstance(outcome, Again):
                return
            stop_before = outcome.stop_before

    async def _finish(self, task: _Task, job: Job) -> Done | Again | None:
        task.count_slices()
        outcome = await finish(self._log, self._options.codec, job, task.slices)
        task.slices = []
        if isinstance(outcome, Done):
            task.done(job, outcome)
        elif isinstance(outcome, Again) and outcome.damaged is not None:
            task.set(damaged=(*task.result.damaged, outcome.damaged))
        return outcome

    async def _run_wave(self, wave: Sequence[_Task], before: asyncio.Task[None] | None) -> asyncio.Task[None]:
        """Reads the slices of a wave while the one before is written; writing this one is the task returned."""
        await self._each([task for task in wave if task.plan is not None], self._begin)
        begun = [task for task in wave if task.job is not None]
        slices = await fetch(self._log, [task.job for task in begun if task.job], self._options.concurrency)
        for task, own in zip(begun, slices, strict=True):
            task.slices = own
        del slices
        if before is not None:
            await before
        return asyncio.create_task(self._end_wave(wave, begun))

    async def _end_wave(self, wave: Sequence[_Task], begun: Sequence[_Task]) -> None:
        await self._each(begun, self._end)
        await self._each([task for task in wave if task.claim is not None], self._release)

    async def _choose(self, task: _Task, claim: bool) -> None:
        task.keys = await find_keys(self._log, task.tp)
        if claim:
            task.claim = await _claim(self._log, task.keys, self._options.holder)
            if task.claim is None:
                return
        task.plan = await choose(self._log, self._options, task.tp, task.keys)

    async def _begin(self, task: _Task) -> None:
        assert task.plan is not None
        task.job = await begin(self._log, task.plan)
        task.plan = None

    async def _end(self, task: _Task) -> None:
        job, task.job = task.job, None
        assert job is not None
        assert task.keys is not None
        outcome = await self._finish(task, job)
        if isinstance(outcome, Again):
            await self._alone(task, task.keys, stop_before=outcome.stop_before)

    async def _release(self, task: _Task) -> None:
        version, task.claim = task.claim, None
        assert task.keys is not None
        assert version is not None
        await _release(self._log, task.keys, version)

    async def _each(self, tasks: Sequence[_Task], step: Callable[[_Task], Awaitable[None]]) -> None:
        """The step for all, some at a time; an error ends up in the task's result."""

        async def guarded(task: _Task) -> None:
            try:
                await step(task)
            except LlogError as error:
                task.set(error=error)

        await _gather(guarded, tasks, self._options.concurrency)


@asynccontextmanager
async def claimed(log: Log, keys: PartitionKeys, holder: str = "") -> AsyncIterator[bool]:
    """Claims the partition's compaction for the block; False if somebody else has it. It ends with the session, too."""
    version = await _claim(log, keys, holder)
    try:
        yield version is not None
    finally:
        if version is not None:
            await _release(log, keys, version)


async def lagging(log: Log, *, min_offsets: int = 1) -> AsyncIterator[Lagging]:
    """Partitions with at least so many offsets to compact or a compaction to resume: one metadata read for each there
    is.
    """
    for topic in await Catalog(log).topics(OBJECT):
        for first in range(0, topic.partitions, _LAGGING_PAGE):
            partitions = range(first, min(first + _LAGGING_PAGE, topic.partitions))

            async def one(
                partition: int, topic_name: str = topic.name, directory: str = topic.directory
            ) -> _Offsets | None:
                return await _lag_of(log, TopicPartition(topic_name, partition), PartitionKeys(directory, partition))

            for partition, found in zip(partitions, await _gather(one, partitions, _LAGGING_PAGE), strict=True):
                if found is not None and (found.begun or found.offsets >= min_offsets):
                    yield Lagging(TopicPartition(topic.name, partition), found.offsets, found.begun)


class _Offsets(NamedTuple):
    cursor: int
    offsets: int
    begun: bool


async def _lag_of(log: Log, tp: TopicPartition, keys: PartitionKeys) -> _Offsets | None:
    """From everything below the partition's `meta/`, in one read; None if it is not there."""
    prefix = keys.prefix + "meta/"
    found = {entry.key: entry for entry in await log.meta.range(prefix, after(prefix), 16)}
    if keys.control not in found or keys.cursor not in found:
        return None
    control = decode(Control, found[keys.control].value, keys.control)
    cursor = max(decode(Cursor, found[keys.cursor].value, keys.cursor).offset, control.log_start_offset)
    return _Offsets(cursor, max(0, control.sequence_counter - cursor), keys.compaction in found)


async def _claim(log: Log, keys: PartitionKeys, holder: str) -> int | None:
    try:
        return await log.meta.put(keys.claim, encode(CompactorClaim(holder=holder)), expected=ABSENT, ephemeral=True)
    except VersionMismatch:
        return None


async def _release(log: Log, keys: PartitionKeys, version: int) -> None:
    """A claim that cannot be released now ends with its session."""
    try:
        await log.meta.delete(keys.claim, expected=version)
    except LlogError:
        pass


async def _gather(step: Callable[[T], Awaitable[R]], items: Sequence[T], concurrency: int) -> list[R]:
    gate = asyncio.Semaphore(concurrency)

    async def gated(item: T) -> R:
        async with gate:
            return await step(item)

    return list(await asyncio.gather(*(gated(item) for item in items)))
