"""One seed: builds the world, runs it under faults, heals it, and checks what is left."""

from __future__ import annotations

import asyncio
import gc
import random
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from llog.cdc import relay
from llog.engines.object.collector import Collector, CollectorOptions
from llog.engines.object.compaction.compactor import Compactor, CompactorOptions
from llog.engines.object.partition_keys import find_keys
from llog.engines.object.reader import Reader
from llog.engines.object.repair.clock import find_clock_damage, repair_clock
from llog.engines.registry import all_engines
from llog.kafka.groups import coordinator as kafka_groups
from llog.log.catalog import Catalog
from llog.log.keys import LOG_ID, PartitionKeys
from llog.log.log import Log, check_format, tie_together
from llog.model import TopicPartition
from llog.sim import brokers, consumers, coordinators, outbox, owners, roles, spread, viewers
from llog.sim.driver import SINK, batch_size, driver
from llog.sim.history import History
from llog.sim.loop import SimLoop
from llog.sim.meta_store import SHARDS, OldState, SimMetaStore
from llog.sim.outbox import SimOutbox
from llog.sim.outcome import Outcome, Trace, Violation
from llog.sim.plan import (
    STEPS,
    SimPlan,
    draw_plan,
    with_brokers,
    with_clock_jumps,
    with_coordinators,
    with_inline_appends,
    with_merges,
    with_old_servers,
    with_owners,
    with_viewers,
)
from llog.sim.process import Process, WallClock
from llog.sim.roles import FLEETING, STABLE, InFlight
from llog.sim.stores import BLOBS, META, Faults, Network, SimBlobStore, WatchedMeta
from llog.stores.memory.blobs import MemoryBlobs

Role = Callable[["World", Process, Log], Awaitable[None]]

ROLES: Final[dict[str, Role]] = {
    "writer": roles.writer,
    "producer": roles.producer,
    "reader": roles.reader,
    "snapshot": roles.snapshot,
    "compactor": roles.compactor,
    "retainer": roles.retainer,
    "collector": roles.collector,
    "spread": spread.spread_collector,
    "repairer": roles.repairer,
    "deleter": roles.deleter,
    "fencer": roles.fencer,
    "driver": driver,
    "consumer": consumers.consumer,
    "assignee": consumers.assignee,
    "operator": consumers.operator,
    "outbox": outbox.outbox,
    "timekeeper": roles.timekeeper,
    "broker": brokers.broker,
    "owner": owners.owner,
    "tenant": owners.tenant,
    "viewer": viewers.viewer,
    "coordinator": coordinators.coordinator,
}
_SESSION_SECONDS: Final = 10.0
_HEAL_STEPS_MAX: Final = 400_000
_LATER_SECONDS: Final = 100 * 86_400
"""How long the healer waits: past every lease and every open sink."""
_JUMPS_MS: Final = (2 * 3_600_000, 400 * 86_400_000)
"""One jump within a ceiling's bound, and one further than the healer waits."""
_ROUNDS_MAX: Final = 500
_PAUSED_MAX: Final = 8
_DAMAGE_MAX: Final = 4


def run_seed(seed: int, *, steps: int = STEPS, adjust: Callable[[SimPlan], SimPlan] | None = None) -> Outcome:
    """Simulate this seed: `steps` callbacks under faults, then healing, then the checks at rest.

    `adjust` may change the drawn plan, to test one part harder.
    """
    world = World(seed, steps, adjust)
    # Garbage collection would finish generators of killed processes at a moment that no seed decides.
    collecting = gc.isenabled()
    gc.disable()
    loggers = (relay.logger, kafka_groups.logger)
    quiet = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True  # They log every fault.
    violation = None
    try:
        world.loop.run(world.live())
    except Exception as error:
        violation = describe_error(world.first_finding() or error)
    finally:
        trace = world.trace
        digest, last = trace.digest(), tuple(trace.last)
        world.loop.close()
        for logger, was_disabled in zip(loggers, quiet, strict=True):
            logger.disabled = was_disabled
        if collecting:
            gc.enable()
    return Outcome(seed=seed, violation=violation, digest=digest, counts=dict(trace.counts), last=last)


def describe_error(error: BaseException) -> str:
    return str(error) if isinstance(error, Violation) else f"{type(error).__name__}: {error}"


class World:
    def __init__(self, seed: int, steps: int, adjust: Callable[[SimPlan], SimPlan] | None = None) -> None:
        self._source = random.Random(seed)
        self._steps = steps
        self._jump_source = random.Random(f"clock jumps of seed {seed}")
        self._old_source = random.Random(f"old servers of seed {seed}")
        drawn = with_clock_jumps(draw_plan(self._source), self._jump_source)
        drawn = with_old_servers(drawn, self._old_source)
        drawn = with_owners(drawn, random.Random(f"owners of seed {seed}"))
        drawn = with_inline_appends(drawn, random.Random(f"inline appends of seed {seed}"))
        drawn = with_brokers(drawn, random.Random(f"brokers of seed {seed}"))
        drawn = with_viewers(drawn, random.Random(f"viewers of seed {seed}"))
        drawn = with_merges(drawn, random.Random(f"merges of seed {seed}"))
        drawn = with_coordinators(drawn, random.Random(f"coordinators of seed {seed}"))
        self.plan = adjust(drawn) if adjust else drawn
        self.loop = SimLoop(self._fork(), steps_max=steps + _HEAL_STEPS_MAX)  # type: ignore[abstract]
        self.trace = Trace(self.loop.time)
        self._meta = WatchedMeta()
        self._clock = WallClock(self.loop)
        self._blobs = MemoryBlobs(self._clock.now_ms)
        self._network = Network(self.loop, self._fork(), Faults(), self.trace)
        self.outbox = SimOutbox(STABLE)
        self.database = owners.SimDatabase(self._network)
        self.directories = owners.SimDirectories()
        limits = self.plan.inline
        self.history = History(self._meta, self._blobs, self.outbox, lambda: self._network.actor, limits)
        self._lives: dict[str, int] = {}
        self._running: dict[Process, SimMetaStore] = {}
        self._findings: list[BaseException] = []
        # State that outlives a process: what producers have in flight, and the checkpoint of the sink's driver.
        self.in_flight: dict[str, InFlight] = {}
        self.sequences: dict[tuple[str, TopicPartition], tuple[int, int]] = {}
        self.published = -1
        self.clients = brokers.Clients()

    def is_newest(self, process: Process) -> bool:
        """Return whether no successor of this process has been started."""
        return self._lives[process.role] == process.life

    def start_task(self, work: Callable[[Process, Log], Awaitable[None]]) -> None:
        """Run `work` in a process of its own, which is never restarted."""
        process, log = self._process("task")
        self.loop.spawn(self._run_process(process, lambda: work(process, log)), process)

    async def live(self) -> None:
        await self._create_log()
        self._meta.watcher = self.history
        self._network.faults = self.plan.faults
        for name, count in self.plan.roles.items():
            for number in range(count):
                self._start(f"{name}-{number}")
        nemeses = [
            self.loop.spawn(self._crash_some(), self.loop.world),
            self.loop.spawn(self._stall_some(), self.loop.world),
            self.loop.spawn(self._damage_some(), self.loop.world),
            self.loop.spawn(self._fill_some(), self.loop.world),
            self.loop.spawn(self._jump_some(self._jump_source), self.loop.world),
            self.loop.spawn(self._wake_some(self._old_source), self.loop.world),
        ]
        while self.loop.steps < self._steps:
            await asyncio.sleep(1.0)
            self._check_findings()
        for nemesis in nemeses:
            nemesis.cancel()
        await self._heal()

    # --- processes

    async def _create_log(self) -> None:
        self._meta.watcher = self.history
        _, log = self._process("founder")
        await check_format(log)
        await tie_together(log)
        await Catalog(log).create(STABLE, 2)
        await Catalog(log).create(FLEETING)

    def _start(self, role: str) -> None:
        process, log = self._process(role)
        work = ROLES[role.rpartition("-")[0]]
        self.trace.add(f"{process.name} starts")
        self.loop.spawn(self._run_process(process, lambda: work(self, process, log)), process)

    def _process(self, role: str, skew_ms: int | None = None) -> tuple[Process, Log]:
        life = self._lives[role] = self._lives.get(role, 0) + 1
        if skew_ms is None:
            skew_ms = self._source.randint(-self.plan.skew_ms_max, self.plan.skew_ms_max)
        process = Process(self._clock, role, life, self._fork(), skew_ms)
        meta = SimMetaStore(self._network, self._meta, process.name)
        self._running[process] = meta
        blobs = SimBlobStore(self._network, self._blobs, self.history, process.name)
        return process, Log(meta, blobs, process.runtime, all_engines())

    async def _run_process(self, process: Process, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except Exception as error:
            self.trace.add(f"{process.name} found: {type(error).__name__}: {error}")
            if not self.history.damage.explains(error):
                self._findings.append(error)
                return
            self.trace.count("met damage")
            self.loop.call_world(1.0, lambda: self._restart(process))

    async def _crash_some(self) -> None:
        while True:
            await asyncio.sleep(self._source.expovariate(1 / self.plan.crash_every))
            victim = self._source.choice(list(self._running))
            self._kill(victim)
            self.trace.count("crashes")
            if victim.role != "task":
                await asyncio.sleep(self._source.random() * 5)
                self._start(victim.role)

    async def _stall_some(self) -> None:
        while True:
            await asyncio.sleep(self._source.expovariate(1 / self.plan.stall_every))
            victim = self._source.choice(list(self._running))
            seconds = self._source.choice((1.0, 10.0, 60.0)) * self._source.random()
            self.trace.add(f"{victim.name} stalls for {seconds:.3f} s")
            self.trace.count("stalls")
            self.loop.stall(victim, seconds)
            if seconds > _SESSION_SECONDS:
                self._expire_later(self._running[victim])
                if victim.role != "task" and self.is_newest(victim) and self._source.random() < 0.5:
                    self._start(victim.role)  # The stalled process will come back beside its successor.

    async def _fill_some(self) -> None:
        """Let one store, or both, run out of room for a while."""
        while True:
            await asyncio.sleep(self._source.expovariate(1 / self.plan.full_every))
            self._network.full = set(self._source.choice(((META,), (BLOBS,), (META, BLOBS))))
            seconds = self._source.choice((1.0, 20.0)) * self._source.random()
            self.trace.add(f"no room for {' and '.join(sorted(self._network.full))} for {seconds:.3f} s")
            await asyncio.sleep(seconds)
            self._network.full = set()

    async def _jump_some(self, source: random.Random) -> None:
        """Set a clock ahead by hours or years for a moment: that of one process, or the one that all are set by."""
        while True:
            await asyncio.sleep(source.expovariate(1 / self.plan.jump_every))
            victim = source.choice(list(self._running))
            clock = self._clock if source.random() < 0.3 else victim.runtime
            self.trace.add(f"the clock of {victim.name if clock is victim.runtime else 'everybody'} jumps")
            self.trace.count("clock jumps")
            clock.jump(source.choice(_JUMPS_MS))
            await asyncio.sleep(source.choice((1.0, 10.0)) * source.random())
            clock.jump(0)

    async def _wake_some(self, source: random.Random) -> None:
        """Pause servers, which lose their leadership; wake one of them, which answers the reads of all processes of a
        role for a moment.
        """
        paused: deque[OldState] = deque(maxlen=_PAUSED_MAX)
        while True:
            await asyncio.sleep(source.expovariate(1 / self.plan.old_every))
            paused.append(OldState(self._meta, source.choice(((0,), (1,), range(SHARDS)))))
            roles = {process.role for process in self._running if process.role.startswith(self.plan.old_readers)}
            if not roles:
                continue
            role, old = source.choice(sorted(roles)), source.choice(paused)
            seconds = source.choice((0.2, 2.0, 20.0)) * source.random()
            self.trace.add(f"a server that was paused answers {role} for {seconds:.3f} s")
            self._network.old[role] = old
            await asyncio.sleep(seconds)
            del self._network.old[role]

    async def _damage_some(self) -> None:
        damage = self.history.damage
        for _ in range(_DAMAGE_MAX):
            await asyncio.sleep(self._source.expovariate(1 / self.plan.damage_every))
            keys = self.history.needed_entries()
            if keys and self._source.random() < 0.7:
                key = self._source.choice(keys)
                damage.lose_entry(key)
                self.trace.add(f"{key} is lost")
                self.trace.count("lost entries")
            else:
                self.trace.add(f"{damage.damage_blob(self._source)} is damaged")
                self.trace.count("damaged blobs")

    def _restart(self, process: Process) -> None:
        """Restart a process that ended by itself, as a supervisor would."""
        if process in self._running:
            self._kill(process)
            if process.role != "task":
                self._start(process.role)

    def _kill(self, process: Process) -> None:
        self.trace.add(f"{process.name} crashes")
        self.loop.kill(process)
        self._expire_later(self._running.pop(process))

    def _expire_later(self, store: SimMetaStore) -> None:
        self.loop.call_world(_SESSION_SECONDS, lambda: self._meta.expire(store.client))

    def first_finding(self) -> BaseException | None:
        if self.loop.errors:
            return Violation(f"a callback failed: {self.loop.errors[0]}")
        return next(iter((*self._network.failures, *self._findings)), None)

    def _check_findings(self) -> None:
        found = self.first_finding()
        if found is not None:
            raise found

    def _fork(self) -> random.Random:
        return random.Random(self._source.getrandbits(64))

    # --- the end

    async def _heal(self) -> None:
        """End all faults, wait until every lease has ended, repair and finish all work, and check the result."""
        self.trace.add("healing")
        for process in list(self._running):
            self._kill(process)
        self._clock.jump(0)
        self._network.old.clear()
        await asyncio.sleep(_LATER_SECONDS)  # Messages under way arrive; sessions and leases end.
        self._check_findings()
        self._network.faults = Faults()
        self._network.full = set()
        process, log = self._process("repairer")
        mending = self.loop.spawn(self._run_process(process, lambda: self._mend(log)), process)
        await asyncio.wait([mending])
        self._check_findings()
        process, log = self._process("healer", 0)
        healing = self.loop.spawn(self._run_process(process, lambda: self._finish(process, log)), process)
        await asyncio.wait([healing])
        self._check_findings()

    async def _mend(self, log: Log) -> None:
        """Repair the damage. Where a repair has no proof, choose among its candidates as an operator would."""
        damage = self.history.damage
        damage.mend_blobs()
        damage.end()
        partitions = [TopicPartition(t.name, p) for t in await Catalog(log).topics() for p in range(t.partitions)]
        plans = await roles.repair(self, log, partitions)
        listed = {each.blob for plan in plans for gap in plan.open_gaps for each in gap.candidates}
        more = any(gap.candidates_left_out for plan in plans for gap in plan.open_gaps)
        for key, blob in self.history.lost_entries().items():
            if blob not in listed and not more:
                raise Violation(f"R1: blob {blob} holds what {key} has lost, but is not among the candidates")
            self._meta.put_back(key, damage.entries[key])

    async def _finish(self, process: Process, log: Log) -> None:
        await self._finish_callers()
        await process.runtime.sleep(_LATER_SECONDS)  # Whatever the callers left open counts as given up.
        await repair_clock(log, await find_clock_damage(log))
        options = roles.merge_options(self.plan, CompactorOptions(max_offsets=self.plan.max_offsets))
        compactor = Compactor(log, options)
        partitions = [TopicPartition(t.name, p) for t in await Catalog(log).topics() for p in range(t.partitions)]
        for tp in partitions:
            await _repeat_until_idle(partial(_compact_once, self, compactor, tp))
        collector = Collector(log, CollectorOptions(grace_ms=1000))
        await _repeat_until_idle(lambda: _collect_once(collector))
        reader = Reader(log)
        for tp in partitions:
            keys = await find_keys(log, tp)
            self.history.check_partition(keys.prefix)
            self.history.check_no_inline(keys.prefix)
            await self._check_readable(reader, tp, keys)
        marks = [name for name in self._blobs.names if name.startswith(LOG_ID)]
        self.history.check_blobs(marks)
        for batch in range(self.published + 1):
            self.history.check_sink(SINK, batch, batch_size(batch))

    async def _finish_callers(self) -> None:
        """Restart producers and the sink's driver until they have finished, and drain the outbox and the groups."""
        for role in sorted(self.in_flight):
            process, log = self._process(role)
            task = self.loop.spawn(self._run_process(process, partial(roles.send, self, process, log)), process)
            await asyncio.wait([task])
            self._check_findings()
            if role in self.in_flight:
                raise Violation(f"I8: {role} cannot learn what became of {self.in_flight[role]}")
        if self.plan.roles["driver"]:
            process, log = self._process("driver-0")
            task = self.loop.spawn(self._run_process(process, lambda: driver(self, process, log)), process)
            await asyncio.wait([task])
            self._check_findings()
        process, log = self._process("broker-0")
        task = self.loop.spawn(self._run_process(process, partial(brokers.finish, self, process, log)), process)
        await asyncio.wait([task])
        self._check_findings()
        process, log = self._process("drainer", 0)
        await outbox.drain(self, process, log)
        await consumers.drain(self, process, log)

    async def _check_readable(self, reader: Reader, tp: TopicPartition, keys: PartitionKeys) -> None:
        bounds = await reader.bounds(tp)
        payloads: list[bytes | None] = []
        async for batch in reader.iter_from(tp, bounds.log_start_offset):
            payloads += batch.columns.values.to_pylist()
        self.history.check_acknowledged(keys.prefix, bounds.log_start_offset, payloads)


async def _compact_once(world: World, compactor: Compactor, tp: TopicPartition) -> bool:
    result = await compactor.compact_once(tp, force=True)
    roles.check_compaction(world, result)
    return result.end_offset is not None or result.merges > 0


async def _collect_once(collector: Collector) -> bool:
    result = await collector.collect_once()
    return result.deleted > 0 or result.waiting > 0


async def _repeat_until_idle(work: Callable[[], Awaitable[bool]]) -> None:
    """Repeat the work until it reports twice in a row that nothing was left to do."""
    quiet = 0
    for _ in range(_ROUNDS_MAX):
        quiet = 0 if await work() else quiet + 1
        if quiet == 2:
            return
    raise Violation("work that should end does not")
