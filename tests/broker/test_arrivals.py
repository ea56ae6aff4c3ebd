"""Requests that wait for records: one append wakes all of them with one look, and no others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from llog.broker.arrivals import Arrivals
from llog.engines.object.reader import Reader
from llog.engines.object.views import Read, Views
from llog.engines.routing import EngineReader
from llog.model import TopicPartition
from llog.stores.memory.meta import MemoryMetaStore
from tests.broker.serving import Served

LIMIT_S = 300
T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.001)


def arrivals_of(served: Served) -> Arrivals:
    """Arrivals of another process on the same stores: no append goes through it."""
    views = Views(served.log, 1000, Reader(served.log))
    return Arrivals(EngineReader(served.log), views, served.broker.metrics, served.broker.stopping)


def asked(served: Served, operation: str) -> int:
    """How often the metadata store was asked so."""
    assert isinstance(served.log.meta, MemoryMetaStore)
    return int(dict(served.log.meta.counts.count).get(operation, 0))


async def settled() -> None:
    """Lets everything run that can run now."""
    for _ in range(100):
        await asyncio.sleep(0)


async def test_one_append_wakes_all_who_wait_for_its_partition_with_one_look_and_no_others(served: Served) -> None:
    count = 300
    for partition in (0, 1):
        await served.produce("t", "first", partition=partition)
    here = [asyncio.ensure_future(served.consume("t", 2, max_wait_ms=60_000)) for _ in range(count)]
    there = [asyncio.ensure_future(served.consume("t", 2, partition=1, max_wait_ms=60_000)) for _ in range(count)]
    await until(lambda: served.broker.metrics.waiting == 2 * count)
    reads = asked(served, "get_many")
    await served.produce("t", "second")
    found: list[dict[str, Any]] = await asyncio.gather(*here)
    assert [[each["payload"] for each in answer["records"]] for answer in found] == [["second"]] * count
    assert asked(served, "get_many") - reads < 10
    assert served.broker.metrics.waiting == count
    await served.produce("t", "end", partition=1)
    await asyncio.gather(*there)


async def test_members_of_groups_share_their_watches_too(served: Served) -> None:
    count = 50
    await served.produce("t", "first")
    call = {"topic": "t", "start": {"Offset": 2}, "wait_ms": 60_000}
    waiting = [asyncio.ensure_future(served.client.post("/topics/consume", json=call)) for _ in range(count)]
    await until(lambda: served.broker.metrics.waiting == count)
    assert asked(served, "watch") == 1
    await served.produce("t", "second")
    answers = await asyncio.gather(*waiting)
    assert [answer.json()["messages"][0]["payload"] for answer in answers] == ["second"] * count


async def test_one_who_wants_an_earlier_offset_does_not_wait_for_the_later_one_of_another(served: Served) -> None:
    await served.produce("t", "a", "b")
    arrivals = arrivals_of(served)
    later = asyncio.ensure_future(arrivals.wait(T0, 5, LIMIT_S))
    await settled()
    assert await arrivals.wait(T0, 2, LIMIT_S)
    assert not later.done()
    await served.produce("t", "c", "d", "e")
    assert await later


async def test_one_who_comes_while_others_are_woken_is_woken_by_the_next_append(served: Served) -> None:
    await served.produce("t", "a")
    arrivals = arrivals_of(served)
    first = asyncio.ensure_future(arrivals.wait(T0, 2, LIMIT_S))
    came: list[asyncio.Future[bool]] = []
    first.add_done_callback(lambda _: came.append(asyncio.ensure_future(arrivals.wait(T0, 3, LIMIT_S))))
    await settled()
    await served.produce("t", "b")
    assert await first
    await settled()
    await served.produce("t", "c")
    assert await came[0]


async def test_a_wait_for_several_partitions_ends_with_the_first_and_leaves_nothing_behind(served: Served) -> None:
    for partition in (0, 1):
        await served.produce("t", "a", partition=partition)
    views = Views(served.log, 1000, Reader(served.log))
    arrivals = Arrivals(EngineReader(served.log), views, served.broker.metrics, served.broker.stopping)
    await views.look([Read(T0, 2), Read(T1, 2)], views.now())
    waiting = asyncio.ensure_future(arrivals.first([(T0, 2), (T1, 2)], LIMIT_S))
    gone = asyncio.ensure_future(arrivals.first([(T0, 2), (T1, 2)], LIMIT_S))
    assert not await arrivals.wait(T0, 2, 0.01), "the time is up"
    gone.cancel()
    await served.produce("t", "b", partition=1)
    await waiting
    assert (await views.look([Read(T1, 2)], 0))[T1].has_record(2)  # type: ignore[union-attr]
    await asyncio.gather(gone, return_exceptions=True)
    assert (views._waiters, served.broker.metrics.waiting) == ({}, 0)
    await views.close()
