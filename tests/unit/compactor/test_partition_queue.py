"""The queue of a compactor's workers: every partition waits once, and no two workers get the same one."""

from __future__ import annotations

import asyncio

from llog.compactor.partition_queue import PartitionQueue
from llog.model import TopicPartition

A, B, C = (TopicPartition("t", partition) for partition in range(3))


async def test_partitions_come_in_their_order_and_wait_once() -> None:
    queue = PartitionQueue()
    queue.add([A, B, A, C])
    assert await queue.take(2) == [A, B]
    assert await queue.take(2) == [C]


async def test_a_partition_that_a_worker_has_is_not_queued_again() -> None:
    queue = PartitionQueue()
    queue.add([A])
    assert await queue.take(1) == [A]
    queue.add([A, B])
    assert await queue.take(2) == [B]
    queue.give_back([A], again=[A])
    assert await queue.take(2) == [A]


async def test_a_drained_queue_waits_for_what_workers_may_give_back() -> None:
    queue = PartitionQueue()
    queue.add([A])
    queue.drain()
    assert await queue.take(1) == [A]
    other = asyncio.create_task(queue.take(1))
    await asyncio.sleep(0)
    assert not other.done()
    queue.give_back([A], again=[A])
    assert await other == [A]
    queue.give_back([A], again=[])
    assert await queue.take(1) == []


async def test_a_stop_wakes_all_workers_and_leaves_the_rest() -> None:
    queue = PartitionQueue()
    waiting = [asyncio.create_task(queue.take(1)) for _ in range(3)]
    await asyncio.sleep(0)
    queue.stop()
    assert await asyncio.gather(*waiting) == [[], [], []]
    queue.add([A])
    assert await queue.take(1) == []
