"""The compactor service: finds the partitions of a log that lag, and compacts them for as long as its process runs.

One task looks at all partitions in turn and queues those with something to compact; workers take them from the queue,
some neighbours at a time, since those share blobs. Retention and collection run beside them on schedules of their own.
Any number of services, and `llog compact` or a Spark pipeline besides, may work on one log: claims keep them from doing
the same work twice, and nothing is lost if they do.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from llog.base.concurrency import run_until
from llog.broker.maintenance import Maintenance, Pause, Step, describe_failure, repeat_steps
from llog.compactor.metrics import Backlog, CompactorMetrics
from llog.compactor.partition_queue import PartitionQueue
from llog.config import Settings
from llog.config.settings import parse_targets
from llog.engines.object.compaction.claims import Claims
from llog.engines.object.compaction.compactor import CompactionResult, Compactor, LaggingPartition, lagging_partitions
from llog.errors import PartitionNotInitialized, StoreUnavailable
from llog.log.catalog import OBJECT, Catalog
from llog.log.keys import upkeep_claim
from llog.log.log import Log
from llog.log.opening import compactor_options
from llog.log.records import Topic
from llog.model import TopicPartition

_TOGETHER_MAX: Final = 64
"""The most partitions that a worker compacts at a time."""
_REQUESTS_MAX: Final = 64
"""About how many requests to the stores all workers make at once."""
_STOP_S: Final = 30.0
"""How long the runs under way may take once the service stops."""


class ServiceOptions(msgspec.Struct, frozen=True, kw_only=True):
    """When the service looks for work, and how much of it is done at once."""

    workers: int = 4
    targets: tuple[tuple[str, int | None], ...] = ()
    """The topics, or partitions of topics, that come first."""
    discovery_ms: int = 30_000
    idle: Pause = Pause(30_000, 3000)
    """The pause between two looks at all partitions."""
    error: Pause = Pause(30_000, 3000)
    """The pause after a look that failed, and that of a partition whose compaction failed."""
    retain_ms: int = 60_000
    collect_ms: int = 600_000
    linger_ms: int = 600_000
    """How long a few small appends wait for more."""
    look_again_ms: int = 120_000
    """How long a partition that had nothing to compact is left alone, unless it grows."""
    stop_s: float = _STOP_S


def service_options(settings: Settings) -> ServiceOptions:
    return ServiceOptions(
        workers=settings.compactor_workers,
        targets=tuple(parse_targets(settings.compactor_targets)),
        discovery_ms=settings.compactor_discovery_interval_ms,
        idle=Pause(settings.compactor_idle_sleep_ms, settings.compactor_idle_jitter_ms),
        error=Pause(settings.compactor_error_sleep_ms, settings.compactor_error_jitter_ms),
        retain_ms=settings.retain_interval_ms,
        collect_ms=settings.collect_interval_ms,
        linger_ms=settings.compactor_linger_ms,
    )


class _Rest(NamedTuple):
    """A partition that is left alone for some time; with `offsets`, only as long as it has this many to compact."""

    until_ms: int
    offsets: int | None = None

    def covers(self, found: LaggingPartition, now_ms: int) -> bool:
        if now_ms >= self.until_ms:
            return False
        return self.offsets is None or (not found.begun and found.offsets == self.offsets)


class CompactorService:
    """Compacts, retains and collects one log. With `is_owner`, beside a broker, also what only the owner of disk topics
    and of RocksDB can do.

    `report` gets what people should know, one line at a time.
    """

    def __init__(
        self,
        log: Log,
        settings: Settings,
        report: Callable[[str], None],
        options: ServiceOptions | None = None,
        *,
        is_owner: bool = False,
    ) -> None:
        self._log = log
        self._options = options or service_options(settings)
        self._report_line = report
        self._is_owner = is_owner
        chosen = compactor_options(settings)
        workers = self._options.workers
        self._claims = Claims(log, chosen.holder)
        self._compactor = Compactor(
            log,
            msgspec.structs.replace(
                chosen,
                concurrency=max(1, _REQUESTS_MAX // workers),
                memory_bytes_max=chosen.memory_bytes_max // workers,
                linger_ms=self._options.linger_ms,
            ),
            self._claims,
        )
        self._maintenance = Maintenance(log, settings, self._report)
        self.metrics = CompactorMetrics(chosen.holder, workers, self._claims, self._compactor.stages)
        self.failures = 0
        """How many lines were reported."""
        self._queue = PartitionQueue()
        self._topics: Sequence[Topic] | None = None
        self._discovered_ms = 0
        self._resting: dict[TopicPartition, _Rest] = {}
        self._offsets: dict[TopicPartition, int] = {}
        """The offsets to compact of the partitions in the queue, when they were found."""
        self._problem: str | None = None
        self._missing_targets: set[str] = set()

    async def run(self, stopping: asyncio.Event) -> None:
        """Work until `stopping` is set; then finish the runs that have begun, and give all claims back."""
        workers = [asyncio.create_task(self._work()) for _ in range(self._options.workers)]
        upkeep = asyncio.create_task(repeat_steps(self._log.runtime, self._steps(), self._report))
        try:
            await self._search(stopping)
            upkeep.cancel()  # a collection may take long, and may end anywhere
            self._queue.stop()
            _, late = await asyncio.wait(workers, timeout=self._options.stop_s)
            if late:
                self._report("a compaction takes too long to be finished; another compactor will resume it")
        finally:
            self._queue.stop()
            for task in (upkeep, *workers):
                task.cancel()
            await asyncio.gather(upkeep, *workers, return_exceptions=True)
            await self._claims.release_all()

    async def run_once(self) -> None:
        """Compact everything that is worth it, retain and collect; then give all claims back."""
        try:
            await self.search_once()
            self._queue.drain()
            await asyncio.gather(*(self._work() for _ in range(self._options.workers)))
            for step in self._steps():
                try:
                    await step.do()
                except Exception as error:  # the next step must run
                    self._report(f"{step.name} failed: {describe_failure(error)}")
        finally:
            await self._claims.release_all()

    async def check(self) -> None:
        """Raise `StoreUnavailable` if the last look at all partitions failed."""
        if self._problem is not None:
            raise StoreUnavailable(self._problem)

    def describe(self) -> dict[str, object]:
        """Return what the service is and how it is set up, for people."""
        options = self._options
        return {
            "id": self.metrics.id,
            "workers": options.workers,
            "targets": [topic if partition is None else f"{topic}:{partition}" for topic, partition in options.targets],
            "discovery_interval_ms": options.discovery_ms,
            "idle_sleep_ms": options.idle.ms,
            "error_sleep_ms": options.error.ms,
            "retain_interval_ms": options.retain_ms,
            "collect_interval_ms": options.collect_ms,
            "linger_ms": options.linger_ms,
        }

    async def search_once(self) -> None:
        """Look at all partitions, and queue those that may have something to compact."""
        await self._discover()
        assert self._topics is not None
        runtime, backlog, due = self._log.runtime, Backlog(), list[TopicPartition]()
        now_ms, seen = runtime.now_ms(), set[TopicPartition]()
        async for each in lagging_partitions(self._log, topics=self._topics):
            backlog.add(each)
            seen.add(each.tp)
            rest = self._resting.get(each.tp)
            if rest is None or not rest.covers(each, now_ms):
                due.append(each.tp)
                self._offsets[each.tp] = each.offsets
        self.metrics.backlog = backlog
        self._resting = {tp: rest for tp, rest in self._resting.items() if tp in seen}
        self._offsets = {tp: offsets for tp, offsets in self._offsets.items() if tp in seen}
        if due:  # Two compactors that begin at different places meet seldom.
            first = runtime.random().randrange(len(due))
            due = due[first:] + due[:first]
        self._queue.add(sorted(due, key=lambda tp: not self._is_target(tp)))
        self.metrics.queued = len(self._queue)

    async def _search(self, stopping: asyncio.Event) -> None:
        """Look at all partitions again and again until `stopping` is set."""
        runtime = self._log.runtime
        while not stopping.is_set():
            pause = self._options.idle
            try:
                await self.search_once()
                self._problem = None
            except Exception as error:  # even a bug must not stop the process
                self._problem = f"partitions cannot be looked at: {describe_failure(error)}"
                self._report(f"{self._problem}; it is tried again later")
                pause = self._options.error
            await run_until(stopping, runtime.sleep(pause.draw_s(runtime)))

    async def _discover(self) -> None:
        """Read the catalog, unless that was done a moment ago."""
        runtime = self._log.runtime
        age_ms = runtime.now_ms() - self._discovered_ms
        if self._topics is not None and 0 <= age_ms < self._options.discovery_ms:
            return
        try:
            self._topics = await Catalog(self._log).topics(OBJECT)
        except BaseException:
            self.metrics.discoveries["failed"] += 1
            raise
        self._discovered_ms = self.metrics.discovered_at_ms = runtime.now_ms()
        self.metrics.discoveries["done"] += 1
        self.metrics.partitions = sum(topic.partitions for topic in self._topics)
        self._note_missing_targets({topic.name: topic.partitions for topic in self._topics})

    def _note_missing_targets(self, partitions: Mapping[str, int]) -> None:
        """Note, once each, the targets that do not exist: they may be created later, or be mistakes."""
        for topic, partition in self._options.targets:
            name = topic if partition is None else f"{topic}:{partition}"
            if partitions.get(topic, 0) > (partition or 0) or name in self._missing_targets:
                continue
            self._missing_targets.add(name)
            self._report_line(f"LLOG_COMPACTOR_TARGETS names {name!r}, and no object topic has such a partition yet")

    def _is_target(self, tp: TopicPartition) -> bool:
        return (tp.topic, None) in self._options.targets or tuple(tp) in self._options.targets

    async def _work(self) -> None:
        """Compact what is in the queue until it is stopped or drained."""
        while tps := await self._queue.take(_TOGETHER_MAX):
            self.metrics.queued = len(self._queue)
            self.metrics.busy_workers += 1
            again: list[TopicPartition] = []
            try:
                results = await self._compactor.compact_many(tps, stopping=lambda: self._queue.is_stopped)
                again = [tp for tp, result in zip(tps, results, strict=True) if self._settle(tp, result)]
                self._report_failures(results)
            except Exception as error:  # even a bug must not stop the process
                self._report(f"compaction of {tps[0]} and {len(tps) - 1} others: {describe_failure(error)}")
                for tp in tps:
                    self._rest_after_error(tp)
            finally:
                self.metrics.busy_workers -= 1
                self._queue.give_back(tps, again)

    def _settle(self, tp: TopicPartition, result: CompactionResult) -> bool:
        """Count what became of a partition; return whether its next run can follow."""
        if _is_gone(result):
            outcome = "gone"
        elif result.error is not None:
            outcome = "failed"
            self._rest_after_error(tp)
        elif result.claimed_elsewhere:
            outcome = "claimed"
        elif result.end_offset is not None:
            outcome = "compacted"
        elif self._queue.is_stopped:
            return False  # perhaps it was never looked at
        else:
            outcome = "nothing"
            until_ms = self._log.runtime.now_ms() + self._options.look_again_ms
            if tp in self._offsets:
                self._resting[tp] = _Rest(until_ms, self._offsets[tp])
        self.metrics.count_run(outcome, result)
        return outcome == "compacted" and result.more

    def _report_failures(self, results: Sequence[CompactionResult]) -> None:
        """Report every failure once: a store that is out of order fails all partitions in the same way."""
        failed: dict[str, list[str]] = {}
        for result in results:
            errors = [] if result.error is None or _is_gone(result) else [str(result.error)]
            for what in (*result.damaged, *errors):
                failed.setdefault(what, []).append(f"{result.topic}/{result.partition}")
        for what, names in failed.items():
            others = f" and {len(names) - 1} other partitions" if len(names) > 1 else ""
            self._report(f"compaction of {names[0]}{others}: {what}")

    def _rest_after_error(self, tp: TopicPartition) -> None:
        pause_s = self._options.error.draw_s(self._log.runtime)
        self._resting[tp] = _Rest(self._log.runtime.now_ms() + round(pause_s * 1000))

    def _steps(self) -> list[Step]:
        own = self._maintenance.steps_of_owner() if self._is_owner else []
        shared = [
            Step("retention", Pause(self._options.retain_ms), self._retain),
            Step("collection", Pause(self._options.collect_ms), self._collect),
        ]
        return [
            *(step._replace(do=self._counted(step.name, step.do)) for step in own),
            *(step._replace(do=self._counted(step.name, self._for_all(step))) for step in shared),
        ]

    def _for_all(self, step: Step) -> Callable[[], Awaitable[bool]]:
        """Return the step, which one compactor service at a time does for all."""

        async def do() -> bool:
            if not await self._claims.keep(upkeep_claim(step.name)):
                return False
            await step.do()
            return True

        return do

    def _counted(self, name: str, do: Callable[[], Awaitable[object]]) -> Callable[[], Awaitable[None]]:
        async def counted() -> None:
            outcome, start = "failed", time.perf_counter()
            try:
                outcome = "claimed" if await do() is False else "done"
            finally:
                self.metrics.count_step(name, outcome, time.perf_counter() - start)

        return counted

    async def _retain(self) -> None:
        records, size = await self._maintenance.retain(OBJECT)
        self.metrics.trimmed_records += records
        self.metrics.trimmed_bytes += size

    async def _collect(self) -> None:
        result = await self._maintenance.collect()
        self.metrics.deleted_blobs += result.deleted
        self.metrics.deleted_bytes += result.deleted_bytes

    def _report(self, line: str) -> None:
        self.failures += 1
        self._report_line(line)


def _is_gone(result: CompactionResult) -> bool:
    """Return whether the partition was deleted since it was discovered."""
    return isinstance(result.error, PartitionNotInitialized)
