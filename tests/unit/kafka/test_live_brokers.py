"""Brokers see one another come and go, and send clients to the same places."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from llog.kafka.live_brokers import LiveBroker, LiveBrokers
from llog.log.keys import live_broker_key
from llog.log.log import Log
from llog.runtime import SystemRuntime
from llog.stores.memory.blobs import MemoryBlobs, MemoryBlobStore
from llog.stores.memory.meta import MemoryMeta, MemoryMetaStore


@asynccontextmanager
async def running(meta: MemoryMeta, port: int, zone: str = "") -> AsyncIterator[LiveBrokers]:
    """A broker of its own session, which ends with the block."""
    store = MemoryMetaStore(meta)
    log = Log(store, MemoryBlobStore(MemoryBlobs(), uri="memory://kafka"), SystemRuntime(), {})
    me = LiveBroker(host="127.0.0.1", port=port, zone=zone, address=f"http://127.0.0.1:{port}")
    brokers = LiveBrokers(log, me, refresh_s=0.05)
    await brokers.start()
    task = asyncio.ensure_future(brokers.run())
    try:
        yield brokers
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await store.close()


async def seen(brokers: LiveBrokers, count: int) -> None:
    async with asyncio.timeout(60):
        while len(brokers.nodes) != count:
            await asyncio.sleep(0.01)


async def test_brokers_see_one_another_come_and_go() -> None:
    meta = MemoryMeta()
    async with running(meta, 1) as one:
        async with running(meta, 2) as two:
            await seen(one, 2)
            assert one.nodes == two.nodes
            assert {node.port for node in one.nodes} == {1, 2}
            assert one.owner("http://127.0.0.1:2") == two.me
        await seen(one, 1)
        assert one.nodes == (one.me,)


async def test_all_brokers_send_clients_to_the_same_places_and_use_every_broker() -> None:
    meta = MemoryMeta()
    async with running(meta, 1) as one, running(meta, 2) as two, running(meta, 3) as three:
        for each in (one, two, three):
            await seen(each, 3)
        leaders = [one.leader_of("topic", number) for number in range(300)]
        assert leaders == [two.leader_of("topic", number) for number in range(300)]
        assert one.coordinator_of("group") == three.coordinator_of("group")
        assert min(Counter(leader.id for leader in leaders).values()) > 50


async def test_only_what_a_broker_served_moves_when_it_goes() -> None:
    meta = MemoryMeta()
    async with running(meta, 1) as one, running(meta, 2):
        async with running(meta, 3) as three:
            await seen(one, 3)
            before = [one.leader_of("topic", number) for number in range(300)]
            gone = three.me
        await seen(one, 2)
        after = [one.leader_of("topic", number) for number in range(300)]
        assert all(now == was for was, now in zip(before, after, strict=True) if was != gone)


async def test_clients_stay_in_their_zone_if_it_has_a_broker() -> None:
    meta = MemoryMeta()
    async with running(meta, 1, "a") as one, running(meta, 2, "b") as two:
        await seen(one, 2)
        assert {one.leader_of("topic", number, "b") for number in range(20)} == {two.me}
        assert one.near("b") == two.me
        assert one.near("a") is None
        assert one.near("elsewhere") is None
        assert {one.leader_of("topic", number, "elsewhere").port for number in range(20)} == {1, 2}


async def test_a_broker_whose_session_was_lost_puts_its_key_again() -> None:
    meta = MemoryMeta()
    async with running(meta, 1) as one, running(meta, 2) as two:
        await seen(two, 2)
        watcher = MemoryMetaStore(meta)
        await watcher.delete(live_broker_key(one.me.id))
        async with asyncio.timeout(60):
            while await watcher.get(live_broker_key(one.me.id)) is None:
                await asyncio.sleep(0.01)
        await seen(two, 2)
        await watcher.close()
