"""A collection that is spread over processes, as on Spark: a driver leads, and tasks read in processes of their own.

The reads are those of Spark's driver and executors; Spark's joins are sets here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from llog.engines.object import collection_tasks
from llog.engines.object.clocks import collection_window
from llog.engines.object.collector import (
    CommittableStamps,
    StampRange,
    Waiting,
    is_candidate,
    may_be_named,
    strike_off_kept,
)
from llog.engines.object.gaps import Gap, Gaps
from llog.errors import LlogError, StoreUnavailable
from llog.log.keys import ROOT, PartitionKeys
from llog.log.log import Log
from llog.sim.process import Process
from llog.sim.roles import raise_unexpected

if TYPE_CHECKING:
    from llog.sim.world import World

T = TypeVar("T")
_TASK_SECONDS_MAX = 15.0


async def spread_collector(world: World, me: Process, log: Log) -> None:
    draw = me.runtime.random()
    waiting = Waiting()
    while True:
        await me.runtime.sleep(draw.expovariate(1 / world.plan.collect_every))
        try:
            await _collect(world, log, waiting)
        except LlogError as error:
            raise_unexpected(error)


async def _collect(world: World, log: Log, waiting: Waiting) -> None:
    run = await collection_window(log, world.plan.grace_ms)
    waiting.begin_run()
    names = {info.name: info.size async for page in log.blobs.list(ROOT) for info in page if is_candidate(info, run)}
    if not names:
        return
    enumerated = await collection_tasks.enumerate_partitions(log)
    shares = [share for share in (enumerated[::2], enumerated[1::2]) if share]
    raises = [partial(collection_tasks.raise_floors_of, share=share, run=run) for share in shares]
    ceiling = max(await _in_tasks(world, raises), default=0)
    sinks = await collection_tasks.raise_all_sink_floors(log, run, world.plan.sink_open_ms)
    bounds = CommittableStamps(StampRange(run.old_ms, ceiling), sinks)
    names = {name: size for name, size in names.items() if not may_be_named(name, bounds)}
    [in_sinks] = await _in_tasks(world, [_names_in_sinks])
    gaps = Gaps(world.plan.grace_ms)
    named = set(in_sinks)
    for in_share, found in await _in_tasks(world, [partial(_names_in, share=share) for share in shares]):
        named |= in_share
        gaps.add(list(found))
    names = {name: size for name, size in names.items() if name not in named}
    strike_off_kept(names, gaps)
    free = waiting.free(names, await collection_tasks.read_pins(log, run))
    if free:
        await log.blobs.delete_many(free)


async def _names_in_sinks(log: Log) -> set[str]:
    return {name async for name in collection_tasks.sink_referenced_names(log)}


async def _names_in(log: Log, share: list[PartitionKeys]) -> tuple[set[str], tuple[Gap, ...]]:
    gaps = Gaps()
    return {name async for name in collection_tasks.referenced_names(log, share, gaps)}, gaps.found


async def _in_tasks(world: World, works: Sequence[Callable[[Log], Awaitable[T]]]) -> list[T]:
    """Run each work in a process of its own and return the results; the error or the loss of one is raised here."""
    return list(await asyncio.gather(*(_in_task(world, work) for work in works)))


async def _in_task(world: World, work: Callable[[Log], Awaitable[T]]) -> T:
    reported: asyncio.Future[T | LlogError] = asyncio.get_running_loop().create_future()

    async def task(_: Process, log: Log) -> None:
        try:
            result: T | LlogError = await work(log)
        except LlogError as error:
            result = error
        if not reported.done():
            reported.set_result(result)

    world.start_task(task)
    done, _ = await asyncio.wait([reported], timeout=_TASK_SECONDS_MAX)
    if not done:
        raise StoreUnavailable("simulated: an executor was lost")
    result = reported.result()
    if isinstance(result, LlogError):
        raise result
    return result
