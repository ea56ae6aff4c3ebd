"""A store below a prefix of another: it keeps the port's promises, and sees nothing of its neighbours."""

from __future__ import annotations

import asyncio

import pytest

from llog.errors import VersionMismatch
from llog.stores.memory.meta import MemoryMeta, MemoryMetaStore
from llog.stores.meta import ABSENT, MetaStore, Put, partition_prefix, prefix_end, scan
from llog.stores.prefixed import PrefixedMetaStore

NEIGHBOURS = ("a", "b/a", "b-", "b0", "bb", "c")
"""Prefixes around `b/`, with which the keys of no neighbour may be mixed up."""


@pytest.fixture
def server() -> MemoryMeta:
    return MemoryMeta()


@pytest.fixture
async def whole(server: MemoryMeta) -> MetaStore:
    store = MemoryMetaStore(server)
    for neighbour in NEIGHBOURS:
        await store.put(f"{neighbour}/k/5", b"theirs")
    await store.put("k/5", b"theirs")
    return store


async def test_every_read_sees_the_own_keys_only(whole: MetaStore) -> None:
    store = PrefixedMetaStore(whole, "b/")
    assert await store.get("k/5") is None
    for lookup in (store.floor, store.ceiling):
        for key in ("", "k/5", "zzz"):
            found = await lookup(key)
            assert found is None or found.key == "a/k/5"  # that of `b/a` is its own, too
    version = await store.put("k/5", b"mine", expected=ABSENT)
    assert (await whole.get("b/k/5")) == ("b/k/5", b"mine", version)
    assert await store.get_many(["k/5", "k/6"]) == [("k/5", b"mine", version), None]
    assert await store.floor("k/9") == await store.ceiling("k/1") == ("k/5", b"mine", version)
    assert await store.range("k/", prefix_end("k/"), 10) == [("k/5", b"mine", version)]
    assert await store.keys("", "\U0010ffff", 10) == ["a/k/5", "k/5"]
    assert [entry.key async for entry in scan(store, "k/", page=1)] == ["k/5"]


async def test_writes_touch_the_own_keys_only(whole: MetaStore) -> None:
    store = PrefixedMetaStore(whole, "b/")
    first, second = await store.put_many([Put("k/5", b"1", ABSENT), Put("k/5", b"2", ABSENT)])
    assert isinstance(first, int)
    assert isinstance(second, VersionMismatch)
    with pytest.raises(VersionMismatch):
        await store.delete("k/5", expected=first + 1)
    assert await store.delete("k/5", expected=first)
    assert not await store.delete("k/5")
    await store.put("k/6", b"")
    await store.delete_range("", "\U0010ffff")
    assert await store.keys("", "\U0010ffff", 10) == []
    left = [f"{each}/k/5" for each in NEIGHBOURS if each != "b/a"]
    assert await whole.keys("", "\U0010ffff", 10) == sorted([*left, "k/5"])


async def test_a_watch_wakes_for_the_own_keys_and_reads_are_vouched_for(whole: MetaStore, server: MemoryMeta) -> None:
    store = PrefixedMetaStore(whole, "b/")
    watch = store.watch("k/")
    await anext(watch)
    waiting = asyncio.ensure_future(anext(watch))
    await whole.put("a/k/6", b"")
    await watch.confirm()
    assert not waiting.done()
    await store.put("k/6", b"", ephemeral=True)
    await asyncio.wait_for(waiting, 30)
    reads = await store.begin_reads()
    await store.get("k/6")
    await reads.confirm()
    await store.check()
    await store.close()
    assert await MemoryMetaStore(server).get("b/k/6") is None


def test_a_prefix_leaves_a_key_in_its_partition() -> None:
    assert (
        partition_prefix("team/a/llog/t/partitions/0000000007/meta/control") == "team/a/llog/t/partitions/0000000007/"
    )
