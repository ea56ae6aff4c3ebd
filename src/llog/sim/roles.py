"""The roles of simulated processes: each makes the calls of a broker, a job or Spark for ever, with random pauses.

A role ends only when it is killed. It accepts the errors that a caller has to expect; any other error is a finding.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from llog.engines.object.collector import Collector, CollectorOptions
from llog.engines.object.compaction.compactor import CompactionResult, Compactor, CompactorOptions
from llog.engines.object.entry_bytes import read_bytes
from llog.engines.object.fencing import fence, unfence
from llog.engines.object.reader import Reader, decode_range
from llog.engines.object.repair.clock import find_clock_damage, repair_clock
from llog.engines.object.repair.index import RepairPlan, apply_repair, plan_repairs
from llog.engines.object.retention import retain, trim
from llog.engines.object.snapshot import take_snapshot
from llog.engines.object.writer import Writer
from llog.errors import (
    BlobNotFound,
    Contention,
    LlogError,
    OffsetOutOfRange,
    OutcomeUnknown,
    OutOfOrderSequence,
    PartitionFenced,
    PartitionNotInitialized,
    StoreUnavailable,
    TopicExists,
    TopicNotFound,
    UnknownProducer,
)
from llog.log.catalog import Catalog
from llog.log.engine import AppendGroup, AppendResult, WriterOptions
from llog.log.log import Log
from llog.log.pins import pin, release
from llog.log.producers import Producer
from llog.model import Record, TopicPartition
from llog.sim.outcome import Violation
from llog.sim.plan import SimPlan
from llog.sim.process import Process
from llog.stores.meta import read_confirmed

if TYPE_CHECKING:
    from llog.sim.world import World

STABLE = "stable"
"""A topic of two partitions that is never deleted."""
FLEETING = "fleeting"
"""A topic of one partition that may be fenced, deleted and created again."""
PARTITIONS = (TopicPartition(STABLE, 0), TopicPartition(STABLE, 1), TopicPartition(FLEETING, 0))

_FAULT_ERRORS = (StoreUnavailable, OutcomeUnknown, Contention)
TOPIC_GONE = (TopicNotFound, PartitionNotInitialized, PartitionFenced)
_PIN_LEASE_MS = 60_000
ATTEMPTS_MAX = 25


class InFlight(msgspec.Struct, frozen=True):
    """An append that an idempotent producer has stored before it sends it."""

    tp: TopicPartition
    producer: Producer
    payloads: tuple[bytes, ...]


def raise_unexpected(error: LlogError, *allowed: type[LlogError]) -> None:
    """Accept an error that faults cause or the caller allows; raise any other."""
    if not isinstance(error, (*_FAULT_ERRORS, *allowed)):
        raise error


async def writer(world: World, me: Process, log: Log) -> None:
    """Append without repeating anything, sometimes several appends at a time."""
    draw = me.runtime.random()
    client = Writer(log, WriterOptions(attempts_max=ATTEMPTS_MAX, inline=world.plan.inline))
    number = 0
    while True:
        await me.runtime.sleep(draw.expovariate(1.0))
        number = await append_some(world, me, client, number, calls=draw.choice((1, 1, 1, 3)))


async def append_some(world: World, me: Process, client: Writer, number: int, *, calls: int) -> int:
    """Make some calls at a time with records that count from `number` on, and return the number that comes next."""
    draw = me.runtime.random()
    partitions = PARTITIONS[: world.plan.partitions]
    made: list[list[AppendGroup]] = []
    for _ in range(calls):
        groups = []
        for tp in draw.choices(partitions, k=draw.choice((1, 1, 2, 3))):
            records = [Record(payload=f"{me.name}.{number + i}".encode()) for i in range(draw.randint(1, 3))]
            number += len(records)
            groups.append(AppendGroup(topic=tp.topic, partition=tp.partition, records=records))
        made.append(groups)
    answers = await asyncio.gather(*(_append(client, groups) for groups in made))
    for groups, results in zip(made, answers, strict=True):
        for group, result in zip(groups, results, strict=True):
            _acknowledge(world, me, group, result)
    return number


async def _append(client: Writer, groups: list[AppendGroup]) -> list[AppendResult | LlogError]:
    try:
        return await client.append(groups)
    except LlogError as error:
        return [error] * len(groups)


def _acknowledge(world: World, me: Process, group: AppendGroup, result: AppendResult | LlogError) -> None:
    if isinstance(result, LlogError):
        raise_unexpected(result, *TOPIC_GONE)
        return
    payloads = [record.payload or b"" for record in group.records if isinstance(record, Record)]
    if result.end_offset - result.start_offset + 1 != len(payloads):
        raise Violation(f"I3: an append of {len(payloads)} records was answered {result}")
    world.history.acknowledged(
        me.name, group.topic, group.partition, result.start_offset, payloads, repeated=result.repeated
    )


async def producer(world: World, me: Process, log: Log) -> None:
    """Append idempotently: store each append before sending it, and send it until its outcome is known, also after a
    restart.
    """
    draw = me.runtime.random()
    while world.is_newest(me):
        await me.runtime.sleep(draw.expovariate(1.0))
        if not world.is_newest(me):
            return
        if me.role not in world.in_flight:
            tp = TopicPartition(STABLE, draw.randrange(2))
            sequence, since = world.sequences.get((me.role, tp), (0, 1))
            payloads = tuple(f"{me.name}.{tp}.{sequence}.{i}".encode() for i in range(draw.randint(1, 3)))
            identity = Producer(id=me.role, sequence=sequence, since=since)
            world.in_flight[me.role] = InFlight(tp, identity, payloads)
        await send(world, me, log)


async def send(world: World, me: Process, log: Log) -> None:
    """Make one attempt to get the append in flight acknowledged."""
    sent = world.in_flight[me.role]
    client = Writer(log, WriterOptions(attempts_max=ATTEMPTS_MAX, inline=world.plan.inline))
    records = [Record(payload=payload) for payload in sent.payloads]
    group = AppendGroup(topic=sent.tp.topic, partition=sent.tp.partition, records=records, producer=sent.producer)
    result = (await _append(client, [group]))[0]
    newest = world.is_newest(me) and world.in_flight.get(me.role) == sent
    if isinstance(result, LlogError):
        # A leftover process may repeat a sequence long after its successor has moved on.
        raise_unexpected(result, *(() if newest else (OutOfOrderSequence, UnknownProducer)))
        return
    _acknowledge(world, me, group, result)
    if newest:
        del world.in_flight[me.role]
        world.sequences[me.role, sent.tp] = (sent.producer.sequence + 1, result.end_offset + 1)


async def reader(world: World, me: Process, log: Log) -> None:
    draw = me.runtime.random()
    client = Reader(log)
    while True:
        await me.runtime.sleep(draw.expovariate(0.5))
        tp = draw.choice(PARTITIONS)
        try:
            bounds = await client.bounds(tp)
            offset = draw.randint(bounds.log_start_offset, bounds.next_offset)
            what = draw.randrange(8)
            if what == 0:
                await client.wait(tp, offset, 1.0)
            elif what >= 4:
                await _read_together(world, me, client)
            elif what == 1:
                await client.offset_for_time(tp, me.runtime.now_ms() - draw.randrange(100_000))
            elif what == 2 and offset < bounds.next_offset:
                record = await client.read_offset(tp, offset)
                world.history.read(*tp, offset, [record.payload])
            else:
                await _read(world, client, tp, offset, draw.choice((1, 1000, 1 << 20)))
        except LlogError as error:
            raise_unexpected(error, *TOPIC_GONE, OffsetOutOfRange)


async def _read_together(world: World, me: Process, client: Reader) -> None:
    """Read several partitions at once, some of them twice, so that reads share GETs; sometimes cancel one of them."""
    draw = me.runtime.random()
    asked = []
    for tp in PARTITIONS:
        start, following = await client.bounds(tp)
        # Near the end, where the partitions still share blobs.
        asked += [(tp, draw.randint(max(start, following - 2), following))] * draw.randint(1, 2)
    reads = [asyncio.ensure_future(_read(world, client, tp, offset, 1000)) for tp, offset in asked]
    if draw.random() < 0.3:
        await me.runtime.sleep(world.plan.faults.delay * 4 * draw.random())
        draw.choice(reads).cancel()
    for outcome in await asyncio.gather(*reads, return_exceptions=True):
        if isinstance(outcome, LlogError):
            raise_unexpected(outcome, *TOPIC_GONE, OffsetOutOfRange)
        elif isinstance(outcome, Exception):
            raise outcome


async def _read(world: World, client: Reader, tp: TopicPartition, offset: int, max_bytes: int) -> None:
    for batch in await client.read(tp, offset, max_bytes):
        world.history.read(*tp, batch.start_offset, batch.columns.values.to_pylist())


async def snapshot(world: World, me: Process, log: Log) -> None:
    """Pin, resolve, wait, and only then read, as the tasks of a Spark job do."""
    draw = me.runtime.random()
    while True:
        await me.runtime.sleep(draw.expovariate(0.2))
        tp = draw.choice(PARTITIONS)
        try:
            jumps, expires_ms = me.runtime.jumps, me.runtime.now_ms() + _PIN_LEASE_MS
            pin_id = await pin(log, me.name, _PIN_LEASE_MS)
            bounds = await Reader(log).bounds(tp)
            start = draw.randint(bounds.log_start_offset, bounds.next_offset)
            stop = draw.randint(start, bounds.next_offset)
            extents = list(await read_confirmed(log.meta, partial(take_snapshot, log, tp, start, stop)))
            for extent in extents:
                await me.runtime.sleep(draw.choice((0.1, 20.0)) * draw.random())
                try:
                    data = await read_bytes(log, extent)
                except BlobNotFound as error:
                    if me.runtime.now_ms() >= expires_ms or me.runtime.is_ahead or me.runtime.jumps != jumps:
                        break  # The lease may have ended, or was taken at a time that no correct clock shows.
                    raise Violation(f"I6: {me.name} has pinned {tp}, but {extent} is gone") from error
                columns = decode_range(tp, extent.start_offset, extent.end_offset, extent, data)
                world.history.read(*tp, extent.start_offset, columns.values.to_pylist())
            if draw.random() < 0.8:
                await release(log, pin_id)
        except LlogError as error:
            raise_unexpected(error, *TOPIC_GONE, OffsetOutOfRange)


async def compactor(world: World, me: Process, log: Log) -> None:
    draw = me.runtime.random()
    plan = world.plan
    partitions = PARTITIONS[: plan.partitions]
    short = me.role != "compactor-0" and draw.random() < 0.5  # Compactors with different settings run side by side.
    max_offsets = 2 if short else plan.max_offsets
    options = CompactorOptions(max_offsets=max_offsets, idle_ms=plan.idle_ms, concurrency=2)
    client = Compactor(log, merge_options(plan, options, draw.choice((2, 3, 100)), draw.choice((1, 2))))
    while True:
        await me.runtime.sleep(draw.expovariate(1 / plan.compact_every))
        try:
            if draw.random() < 0.4:
                results = await client.compact_many(partitions, claim=draw.random() < 0.7)
            else:
                results = [await client.compact_once(draw.choice(partitions), force=draw.random() < 0.2)]
        except LlogError as error:
            raise_unexpected(error, *TOPIC_GONE)
            continue
        for result in results:
            world.trace.count("merges", result.merges)
            check_compaction(world, result)


def merge_options(
    plan: SimPlan, options: CompactorOptions, entries_max: int = 100, growth: int = 1
) -> CompactorOptions:
    """Return the options with those of merges, in whose runs only the number of entries is limited."""
    return msgspec.structs.replace(
        options,
        merge_entries_min=plan.merge_entries_min,
        merge_entries_max=max(entries_max, plan.merge_entries_min),
        merge_growth=growth,
    )


def check_compaction(world: World, result: CompactionResult) -> None:
    if result.damaged and not world.history.damage.unmended:
        raise Violation(f"I1: a compactor found damage: {result.damaged}")
    if result.error is not None:
        raise_unexpected(result.error, *TOPIC_GONE)


async def retainer(world: World, me: Process, log: Log) -> None:
    draw = me.runtime.random()
    while True:
        await me.runtime.sleep(draw.expovariate(1 / world.plan.trim_every))
        tp = draw.choice(PARTITIONS[: world.plan.partitions])
        try:
            if draw.random() < 0.3:
                bounds = await Reader(log).bounds(tp)
                await trim(log, tp, draw.randint(bounds.log_start_offset, bounds.next_offset))
            else:
                await retain(
                    log,
                    tp,
                    retention_ms=world.plan.retention_ms,
                    retention_bytes=draw.choice((None, 500, 5_000)),
                    now_ms=me.runtime.now_ms(),
                )
        except LlogError as error:
            raise_unexpected(error, *TOPIC_GONE, OffsetOutOfRange)


async def collector(world: World, me: Process, log: Log) -> None:
    draw = me.runtime.random()
    options = CollectorOptions(
        grace_ms=world.plan.grace_ms,
        sink_open_ms=world.plan.sink_open_ms,
        producer_expiry_ms=world.plan.producer_expiry_ms,
    )
    client = Collector(log, options)
    while True:
        await me.runtime.sleep(draw.expovariate(1 / world.plan.collect_every))
        try:
            await client.collect_once()
        except LlogError as error:
            raise_unexpected(error)


async def repairer(world: World, me: Process, log: Log) -> None:
    """Put lost index entries back while everything else goes on."""
    draw = me.runtime.random()
    while True:
        await me.runtime.sleep(draw.expovariate(0.1))
        try:
            await repair(world, log, PARTITIONS)
        except LlogError as error:
            raise_unexpected(error)


async def repair(world: World, log: Log, tps: Sequence[TopicPartition]) -> list[RepairPlan]:
    """Plan and apply repairs; return the plans."""
    plans = await plan_repairs(log, tps)
    for plan in plans:
        world.trace.count("repaired entries", await apply_repair(log, plan))
        world.trace.count("gaps left open", len(plan.open_gaps))
    return plans


async def timekeeper(world: World, me: Process, log: Log) -> None:
    """Repair the damage of clocks at any time, also while a clock is wrong, even its own."""
    draw = me.runtime.random()
    while True:
        await me.runtime.sleep(draw.expovariate(0.2))
        try:
            damage = await find_clock_damage(log)
            if damage.is_repairable:
                await repair_clock(log, damage)
                world.trace.count("clock repairs")
        except LlogError as error:
            raise_unexpected(error)


async def deleter(world: World, me: Process, log: Log) -> None:
    draw = me.runtime.random()
    catalog = Catalog(log)
    while True:
        await me.runtime.sleep(draw.expovariate(0.03))
        try:
            await catalog.delete(FLEETING)
        except LlogError as error:
            raise_unexpected(error, TopicNotFound)
        await me.runtime.sleep(draw.expovariate(0.5))
        try:
            await catalog.create(FLEETING)
        except LlogError as error:
            raise_unexpected(error, TopicExists)


async def fencer(world: World, me: Process, log: Log) -> None:
    draw = me.runtime.random()
    while True:
        await me.runtime.sleep(draw.expovariate(0.1))
        try:
            await fence(log, PARTITIONS[2])
            await me.runtime.sleep(draw.expovariate(1.0))
            await unfence(log, PARTITIONS[2])
        except LlogError as error:
            raise_unexpected(error, *TOPIC_GONE)
