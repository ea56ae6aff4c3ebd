"""Viewers: brokers that append, and answer the reads of several clients at a time from their views.

A client reads at the end of a partition most of the time. What it is told to be absent is compared with what the
servers had when its request arrived.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from llog.batch.columns import Buffer
from llog.batch.format import peek
from llog.engines.object.reader import Reader
from llog.engines.object.views import Found, Read, View, Views
from llog.engines.object.writer import Writer
from llog.errors import LlogError, OffsetOutOfRange, PartitionNotInitialized, TopicNotFound
from llog.log.engine import WriterOptions
from llog.log.log import Log
from llog.model import TopicPartition
from llog.sim.outcome import Violation
from llog.sim.process import Process
from llog.sim.roles import ATTEMPTS_MAX, PARTITIONS, STABLE, TOPIC_GONE, append_some, raise_unexpected

if TYPE_CHECKING:
    from llog.sim.world import World

_CLIENTS = 3


async def viewer(world: World, me: Process, log: Log) -> None:
    views = Views(log, me.runtime.random().choice((0, 1_000, 20_000)), Reader(log))

    def keep(directory: str, partition: int, start_offset: int, parts: Sequence[Buffer]) -> None:
        views.note_append(directory, partition, start_offset + peek(b"".join(parts)).count)

    writer = Writer(log, WriterOptions(attempts_max=ATTEMPTS_MAX, on_commit=keep, inline=world.plan.inline))
    clients = [_read_for_ever(world, me, views) for _ in range(_CLIENTS)]
    await asyncio.gather(_append_for_ever(world, me, writer), *clients)


async def _append_for_ever(world: World, me: Process, writer: Writer) -> None:
    draw = me.runtime.random()
    number = 0
    while True:
        await me.runtime.sleep(draw.expovariate(0.5))
        number = await append_some(world, me, writer, number, calls=1)


async def _read_for_ever(world: World, me: Process, views: Views) -> None:
    draw = me.runtime.random()
    positions: dict[TopicPartition, int] = {}
    while True:
        await me.runtime.sleep(draw.expovariate(2.0))
        tp = draw.choice(PARTITIONS)
        before = world.history.partition_now(*tp)
        position = positions.get(tp, 1)
        found = await _look(me, views, tp, position, wait_s=draw.choice((0.0, 0.0, 3.0)))
        if isinstance(found, LlogError):
            if tp.topic == STABLE and isinstance(found, TopicNotFound | PartitionNotInitialized):
                raise Violation(f"I9: {me.name} was answered about {tp}, which always exists: {found}")
            raise_unexpected(found, *TOPIC_GONE)
            continue
        assert found.bounds is not None
        if not found.has_record(position):
            if before is not None:
                world.history.check_absence(tp, position, before, found)
            world.trace.count("answers without records")
            positions[tp] = min(max(position, found.bounds.log_start_offset), found.bounds.next_offset)
            continue
        try:
            for batch in await views.read(tp, found, position, 1 << 20):
                world.history.read(*tp, batch.start_offset, batch.columns.values.to_pylist())
                positions[tp] = batch.end_offset + 1
        except LlogError as error:
            raise_unexpected(error, *TOPIC_GONE, OffsetOutOfRange)


async def _look(me: Process, views: Views, tp: TopicPartition, position: int, wait_s: float) -> Found:
    """Return what a read is answered by, after a wait for records at the end."""
    arrived = views.now()
    while (left := arrived + wait_s - views.now()) > 0:
        found = (await views.look([Read(tp, position, is_satisfied_at_end=True)], arrived))[tp]
        if not isinstance(found, View) or not found.ends_at(position):
            return found
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        views.add_waiter(tp, position, waiter)
        await asyncio.wait([waiter], timeout=left)
        views.remove_waiter(tp, waiter)
    return (await views.look([Read(tp, position)], arrived))[tp]
