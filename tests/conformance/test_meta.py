"""What every metadata store promises, asked of each adapter. Another adapter is one more line in `ADAPTERS`."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from devtools.servers.oxia import OxiaMissing, OxiaServer, oxia_server
from devtools.servers.postgres import PostgresServer
from llog.errors import InvalidArgument, StoreUnavailable, VersionMismatch
from llog.stores.memory.meta import MemoryMeta, MemoryMetaStore
from llog.stores.meta import (
    ABSENT,
    KEY_BYTES_MAX,
    VALUE_BYTES_MAX,
    MetaEntry,
    MetaStore,
    Put,
    prefix_end,
    scan,
    scan_keys,
)
from llog.stores.oxia.store import OxiaMetaStore
from llog.stores.postgres.address import PostgresAddress
from llog.stores.postgres.store import PostgresMetaStore
from llog.stores.sqlite.store import SqliteMetaStore

SESSION_TIMEOUT_MS = 1000
PARTITION = "t/partitions/0000000000/"
"""Keys below it are of one partition, for which a store promises more."""


class Adapter(Protocol):
    """Opens clients of one shared store, and can kill one's session without closing it."""

    def open(self, session_timeout_ms: int = 60_000) -> MetaStore: ...

    async def kill_holder_of(self, key: str) -> None:
        """Lets a client put `key` as ephemeral, then ends that client as a crash would."""


def kill_holder(script: str, *arguments: str) -> None:
    """Run a process that holds a key until it is killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", script, *arguments, str(SESSION_TIMEOUT_MS)], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()


class MemoryAdapter:
    def __init__(self, directory: Path) -> None:
        self.server = MemoryMeta()

    def open(self, session_timeout_ms: int = 60_000) -> MetaStore:
        return MemoryMetaStore(self.server)

    async def kill_holder_of(self, key: str) -> None:
        store = MemoryMetaStore(self.server)
        await store.put(key, b"held", ephemeral=True)
        self.server.expire(store)


_HOLDER = """
import asyncio, sys
from llog.stores.sqlite.store import SqliteMetaStore
from llog.stores.oxia.store import OxiaMetaStore
async def main():
    store = SqliteMetaStore.open(sys.argv[1], session_timeout_ms=int(sys.argv[3]))
    await store.put(sys.argv[2], b"held", ephemeral=True)
    print("held", flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


class SqliteAdapter:
    def __init__(self, directory: Path) -> None:
        self.path = directory / "meta.db"

    def open(self, session_timeout_ms: int = 60_000) -> MetaStore:
        return SqliteMetaStore.open(self.path, session_timeout_ms=session_timeout_ms)

    async def kill_holder_of(self, key: str) -> None:
        kill_holder(_HOLDER, str(self.path), key)


_POSTGRES_HOLDER = """
import asyncio, sys
from llog.stores.postgres.address import PostgresAddress
from llog.stores.postgres.store import PostgresMetaStore
async def main():
    url, password, timeout = sys.argv[1], sys.argv[2], int(sys.argv[4])
    store = PostgresMetaStore(PostgresAddress.parse(url), password=password, session_timeout_ms=timeout)
    await store.put(sys.argv[3], b"held", ephemeral=True)
    print("held", flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


_OXIA_HOLDER = """
import asyncio, sys
from llog.stores.oxia.store import OxiaMetaStore
async def main():
    store = OxiaMetaStore(sys.argv[1].split(","), sys.argv[2], session_timeout_ms=int(sys.argv[4]))
    await store.put(sys.argv[3], b"held", ephemeral=True)
    print("held", flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


class PostgresAdapter:
    def __init__(self, directory: Path, server: PostgresServer) -> None:
        self.server = server
        self.address = PostgresAddress.parse(server.url(f"s_{uuid4().hex}"))

    def open(self, session_timeout_ms: int = 60_000) -> MetaStore:
        return PostgresMetaStore(self.address, password=self.server.password, session_timeout_ms=session_timeout_ms)

    async def kill_holder_of(self, key: str) -> None:
        kill_holder(_POSTGRES_HOLDER, str(self.address), self.server.password, key)


class OxiaAdapter:
    def __init__(self, directory: Path, server: OxiaServer) -> None:
        self.server = server
        server.wipe()

    def open(self, session_timeout_ms: int = 60_000) -> MetaStore:
        return OxiaMetaStore(self.server.addresses, self.server.namespace, session_timeout_ms=session_timeout_ms)

    async def kill_holder_of(self, key: str) -> None:
        kill_holder(_OXIA_HOLDER, ",".join(self.server.addresses), self.server.namespace, key)


ADAPTERS: dict[str, Callable[..., Adapter]] = {
    "memory": MemoryAdapter,
    "sqlite": SqliteAdapter,
    "postgres": PostgresAdapter,
    "oxia": OxiaAdapter,
    "oxia-one-shard": OxiaAdapter,
}
SERVERS = {"postgres": "postgres", "oxia": "oxia", "oxia-one-shard": "oxia_with_one_shard"}
"""The fixtures that adapters take besides a directory."""


def server_of(name: str, request: pytest.FixtureRequest) -> tuple[Any, ...]:
    return (request.getfixturevalue(SERVERS[name]),) if name in SERVERS else ()


@pytest.fixture(scope="session")
def oxia_with_one_shard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OxiaServer]:
    with ExitStack() as stack:
        try:
            server = stack.enter_context(oxia_server(tmp_path_factory.mktemp("oxia"), shards=1))
        except OxiaMissing as error:
            pytest.skip(str(error))
        yield server


@pytest.fixture(params=ADAPTERS)
def adapter(request: pytest.FixtureRequest, tmp_path: Path) -> Adapter:
    return ADAPTERS[request.param](tmp_path, *server_of(request.param, request))


@pytest.fixture
async def store(adapter: Adapter) -> AsyncIterator[MetaStore]:
    opened = adapter.open()
    yield opened
    await opened.close()


async def eventually(look: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(20):
        while not await look():
            await asyncio.sleep(0.01)


# --- conditional writes


async def test_a_put_is_read_back_with_its_version(store: MetaStore) -> None:
    assert await store.get("a") is None
    version = await store.put("a", b"1")
    assert await store.get("a") == MetaEntry("a", b"1", version)


async def test_a_write_that_returned_is_seen_through_every_other_store_object(adapter: Adapter) -> None:
    one, other = adapter.open(), adapter.open()
    for number in range(20):
        version = await one.put("a", b"%d" % number)
        assert await other.get("a") == MetaEntry("a", b"%d" % number, version)
    await one.close()
    await other.close()


async def test_an_expected_version_that_does_not_hold_changes_nothing(store: MetaStore) -> None:
    version = await store.put("a", b"1")
    with pytest.raises(VersionMismatch, match="'a'"):
        await store.put("a", b"2", expected=version + 1)
    with pytest.raises(VersionMismatch):
        await store.put("a", b"2", expected=ABSENT)
    with pytest.raises(VersionMismatch):
        await store.put("b", b"2", expected=version)
    assert await store.range("", "z", 10) == [MetaEntry("a", b"1", version)]
    assert await store.put("a", b"2", expected=version) > version


async def test_sixteen_tasks_incrementing_one_key_lose_nothing(adapter: Adapter) -> None:
    stores = [adapter.open(), adapter.open()]
    await stores[0].put("n", b"0")

    async def increment(store: MetaStore) -> None:
        done = 0
        while done < 10:
            entry = await store.get("n")
            assert entry is not None
            with suppress(VersionMismatch):
                await store.put("n", b"%d" % (int(entry.value) + 1), expected=entry.version)
                done += 1
            await asyncio.sleep(0)

    await asyncio.gather(*(increment(stores[task % 2]) for task in range(16)))
    entry = await stores[0].get("n")
    assert entry is not None
    assert entry.value == b"160"
    for each in stores:
        await each.close()


async def test_one_of_sixteen_tasks_creates_an_absent_key(adapter: Adapter) -> None:
    stores = [adapter.open(), adapter.open()]
    results = await asyncio.gather(
        *(stores[task % 2].put("a", b"%d" % task, expected=ABSENT) for task in range(16)), return_exceptions=True
    )
    won = [task for task, result in enumerate(results) if isinstance(result, int)]
    assert len(won) == 1
    assert all(isinstance(result, VersionMismatch) for task, result in enumerate(results) if task not in won)
    entry = await stores[0].get("a")
    assert entry == MetaEntry("a", b"%d" % won[0], results[won[0]])  # type: ignore[arg-type]
    for each in stores:
        await each.close()


async def test_put_many_stops_at_no_mismatch_and_keeps_the_order_within_a_partition(store: MetaStore) -> None:
    a, b, c = (PARTITION + name for name in "abc")
    old = await store.put(b, b"old")
    results = await store.put_many(
        [Put(a, b"1", ABSENT), Put(b, b"2", old + 100), Put(c, b"3"), Put(a, b"4", ABSENT), Put(a, b"5")]
    )
    assert [type(result) for result in results] == [int, VersionMismatch, int, VersionMismatch, int]
    versions = [result for result in results if isinstance(result, int)]
    assert versions == sorted(set(versions))
    assert min(versions) > old
    entries = await store.range("", "z", 10)
    assert entries == [MetaEntry(a, b"5", versions[2]), MetaEntry(b, b"old", old), MetaEntry(c, b"3", versions[1])]


async def test_put_many_over_several_partitions_gives_each_put_its_own_result(store: MetaStore) -> None:
    keys = [f"t/partitions/{number:010}/{name}" for number in range(50) for name in ("x", "y")]
    taken = keys[::3]
    await store.put_many([Put(key, b"taken") for key in taken])
    results = await store.put_many([Put(key, key.encode(), ABSENT) for key in keys])
    assert [isinstance(result, VersionMismatch) for result in results] == [key in taken for key in keys]
    for entry, key, result in zip(await store.get_many(keys), keys, results, strict=True):
        assert entry is not None
        if not isinstance(result, VersionMismatch):
            assert entry == MetaEntry(key, key.encode(), result)
    assert [entry.key for entry in await store.range("t/", prefix_end("t/"), 1000)] == sorted(keys)


async def test_put_many_takes_thousands_and_none(store: MetaStore) -> None:
    assert await store.put_many([]) == []
    results = await store.put_many([Put(f"k/{number:05}", b"%d" % number, ABSENT) for number in range(3000)])
    assert [result for result in results if isinstance(result, VersionMismatch)] == []
    assert [int(entry.value) async for entry in scan(store, "k/")] == list(range(3000))
    again = await store.put_many([Put(f"k/{number:05}", b"", ABSENT) for number in range(3000)])
    assert all(isinstance(result, VersionMismatch) for result in again)


async def test_delete_tells_whether_the_key_was_there_and_respects_versions(store: MetaStore) -> None:
    version = await store.put("a", b"1")
    with pytest.raises(VersionMismatch):
        await store.delete("a", expected=version + 1)
    with pytest.raises(VersionMismatch):
        await store.delete("a", expected=ABSENT)
    assert await store.get("a") is not None
    assert await store.delete("a", expected=version) is True
    assert await store.delete("a", expected=version) is False
    assert await store.delete("a") is False
    assert await store.get("a") is None


async def test_versions_are_never_reused_after_a_delete(adapter: Adapter) -> None:
    seen: list[int] = []
    for _ in range(3):
        store = adapter.open()
        for _ in range(3):
            seen.append(await store.put(PARTITION + "a", b"1", expected=ABSENT))
            assert await store.delete(PARTITION + "a")
            seen.append(await store.put(PARTITION + "b", b"1"))
            await store.delete_range("", "z")
        await store.close()
    assert seen == sorted(set(seen))


async def test_writes_called_in_one_go_are_applied_in_the_order_of_the_calls(store: MetaStore) -> None:
    first, gone, second, _, third = await asyncio.gather(
        store.put("a", b"1", expected=ABSENT),
        store.delete("a"),
        store.put("a", b"2", expected=ABSENT),
        store.delete_range("a", "b"),
        store.put("a", b"3", expected=ABSENT),
    )
    assert gone is True
    assert first < second < third
    assert await store.get("a") == MetaEntry("a", b"3", third)


# --- order


async def test_floor_and_ceiling_around_every_boundary(store: MetaStore) -> None:
    assert await store.floor("m") is None
    assert await store.ceiling("m") is None
    for key in ("i/10", "i/20", "i/30"):
        await store.put(key, key.encode())

    async def around(key: str) -> tuple[str | None, str | None]:
        floor, ceiling = await store.floor(key), await store.ceiling(key)
        return floor and floor.key, ceiling and ceiling.key

    assert await around("i/10") == ("i/10", "i/10")
    assert await around("i/11") == ("i/10", "i/20")
    assert await around("i/20") == ("i/20", "i/20")
    assert await around("i/20\x00") == ("i/20", "i/30")
    assert await around("i/09") == (None, "i/10")
    assert await around("i/31") == ("i/30", None)
    assert await around("") == (None, "i/10")
    await store.delete("i/20")
    assert await around("i/20") == ("i/10", "i/30")


async def test_ranges_over_zero_padded_numbers_are_in_their_order(store: MetaStore) -> None:
    numbers = [0, 1, 9, 10, 99, 100, 12345678901234567890]
    for number in reversed(numbers):
        await store.put(f"i/{number:020}", b"%d" % number)
    await store.put("h/x", b"")
    await store.put("j/x", b"")
    entries = await store.range("i/", prefix_end("i/"), 100)
    assert [int(entry.value) for entry in entries] == numbers
    assert [int(key[2:]) for key in await store.keys("i/", prefix_end("i/"), 3)] == numbers[:3]
    assert [int(key[2:]) for key in await store.keys(f"i/{9:020}", f"i/{100:020}", 100)] == [9, 10, 99]
    assert await store.keys("i/5", "i/5", 10) == []
    assert await store.keys("j", "i", 10) == []


@pytest.mark.parametrize("count", [0, 1, 6, 7, 8, 14, 700])
async def test_scan_pages_through_everything_once(store: MetaStore, count: int) -> None:
    keys = [f"s/{number:05}" for number in range(count)]
    await store.put_many([Put(key, key.encode()) for key in keys])
    await store.put("s0", b"not below the prefix")
    assert [entry.key async for entry in scan(store, "s/", page=7)] == keys
    assert [key async for key in scan_keys(store, "s/", page=7)] == keys
    assert [(entry.key, entry.value) async for entry in scan(store, "s/")] == [(key, key.encode()) for key in keys]


async def test_delete_range_takes_the_start_and_leaves_the_end(store: MetaStore) -> None:
    for key in "abcde":
        await store.put(key, b"")
    await store.delete_range("b", "d")
    assert await store.keys("", "z", 10) == ["a", "d", "e"]
    await store.delete_range("x", "z")
    await store.delete_range("d", "a")
    assert await store.keys("", "z", 10) == ["a", "d", "e"]


async def test_a_long_range_of_a_partition_is_one_snapshot(adapter: Adapter) -> None:
    reader, writer = adapter.open(), adapter.open()
    keys = [f"{PARTITION}{number:05}" for number in range(4000)]
    await writer.put_many([Put(key, b"0") for key in keys])

    async def rewrite() -> None:
        for generation in range(1, 6):
            await writer.put_many([Put(key, b"%d" % generation) for key in keys])

    writing = asyncio.create_task(rewrite())
    while not writing.done():
        entries = await reader.range(PARTITION, prefix_end(PARTITION), 5000)
        assert len({entry.value for entry in entries}) == 1
        await asyncio.sleep(0)
    await writing
    await reader.close()
    await writer.close()


# --- keys and values


@pytest.mark.parametrize("size", [0, 1, 1 << 20, VALUE_BYTES_MAX])
async def test_values_from_nothing_to_the_largest(store: MetaStore, size: int) -> None:
    value = os.urandom(size)
    version = await store.put("a", value)
    assert await store.get("a") == MetaEntry("a", value, version)
    assert await store.range("a", "b", 1) == [MetaEntry("a", value, version)]


async def test_keys_of_every_character_sort_as_their_utf8_bytes(store: MetaStore) -> None:
    characters = [chr(code) for code in range(32, 127)] + list(
        "\x00\x01\x1f\x7f\x80é߿ࠀ€\ud7ff\ue000�\uffff𐀀😀\U0010ffff"
    )
    keys = [f"k/{character}" for character in characters]
    for key in keys:
        await store.put(key, key.encode(), expected=ABSENT)
    for key in keys:
        entry = await store.get(key)
        assert entry is not None
        assert entry.value == key.encode()
        with pytest.raises(VersionMismatch):
            await store.put(key, b"", expected=ABSENT)
    stored = await store.keys("k/", prefix_end("k/"), 1000)
    assert [key.encode() for key in stored] == sorted(key.encode() for key in keys)
    assert [key async for key in scan_keys(store, "k/", page=1)] == stored


async def test_keys_and_values_beyond_their_bounds_are_refused(store: MetaStore) -> None:
    longest = "é" * (KEY_BYTES_MAX // 2)
    await store.put(longest, b"")
    for key in (longest + "x", "x" * (KEY_BYTES_MAX + 1), "\ud800"):
        with pytest.raises(InvalidArgument):
            await store.put(key, b"")
        with pytest.raises(InvalidArgument):
            await store.put_many([Put("fine", b""), Put(key, b"")])
        with pytest.raises(InvalidArgument):
            await store.get(key)
        with pytest.raises(InvalidArgument):
            await store.delete(key)
    with pytest.raises(InvalidArgument, match="big"):
        await store.put("big", bytes(VALUE_BYTES_MAX + 1))
    with pytest.raises(InvalidArgument, match="limit"):
        await store.range("", "z", 0)
    with pytest.raises(InvalidArgument):
        await store.ceiling("\ud800")
    assert await store.keys("", "\U0010ffff", 10) == [longest]
    assert await store.keys(longest + "\x00", "\U0010ffff", 10) == []


# --- sessions


async def test_ephemeral_keys_vanish_when_their_store_is_closed(adapter: Adapter) -> None:
    holder, other = adapter.open(), adapter.open()
    await holder.put("lasting", b"")
    await holder.put("claim", b"", ephemeral=True, expected=ABSENT)
    await other.put("theirs", b"", ephemeral=True)
    with pytest.raises(VersionMismatch):
        await other.put("claim", b"", ephemeral=True, expected=ABSENT)
    await holder.close()
    assert await other.keys("", "z", 10) == ["lasting", "theirs"]
    await other.put("claim", b"", ephemeral=True, expected=ABSENT)
    await other.close()


async def test_an_ephemeral_key_lives_as_long_as_its_store(adapter: Adapter) -> None:
    session_timeout_ms = 5 * SESSION_TIMEOUT_MS  # a slow disk may keep a heartbeat waiting for longer than one
    holder, other = adapter.open(session_timeout_ms), adapter.open()
    await holder.put("claim", b"", ephemeral=True)
    await asyncio.sleep(1.2 * session_timeout_ms / 1000)
    assert await other.get("claim") is not None
    await other.put("x", b"")
    assert await other.get("claim") is not None
    await holder.close()
    await other.close()


async def test_an_ephemeral_key_that_another_store_put_again_is_no_longer_the_first_ones(adapter: Adapter) -> None:
    holder, other = adapter.open(), adapter.open()
    await holder.put("a", b"", ephemeral=True)
    await holder.put("b", b"", ephemeral=True)
    await other.put("a", b"lasting")
    await other.put("b", b"", ephemeral=True)
    await holder.close()
    assert await other.keys("", "z", 10) == ["a", "b"]
    await other.close()
    last = adapter.open()
    assert await last.keys("", "z", 10) == ["a"]
    await last.close()


async def test_ephemeral_keys_of_a_killed_client_vanish_from_every_read(adapter: Adapter) -> None:
    store = adapter.open()
    await store.put("c/1", b"")
    await adapter.kill_holder_of("c/2")

    async def gone() -> bool:
        return await store.get("c/2") is None

    await eventually(gone)
    assert await store.keys("", "z", 10) == ["c/1"]
    assert [entry.key for entry in await store.range("", "z", 10)] == ["c/1"]
    floor = await store.floor("c/3")
    assert floor is not None
    assert floor.key == "c/1"
    assert await store.ceiling("c/2") is None
    assert await store.delete("c/2") is False
    await store.put("c/2", b"mine", expected=ABSENT)
    await store.close()


# --- watches


async def test_a_watch_yields_at_once_and_after_changes_of_any_store_object(adapter: Adapter) -> None:
    store, other = adapter.open(), adapter.open()
    await store.put("w/1", b"")
    watch = store.watch("w/")
    await anext(watch)

    async def delivered(change: Awaitable[Any], look: Callable[[], Awaitable[bool]]) -> None:
        """A watch may yield without a change, but sooner or later it does after one."""
        await change
        async with asyncio.timeout(20):
            await anext(watch)
            while not await look():
                await anext(watch)

    async def keys_are(*keys: str) -> bool:
        return await store.keys("w/", prefix_end("w/"), 10) == list(keys)

    await delivered(store.put("w/2", b""), lambda: keys_are("w/1", "w/2"))
    await delivered(other.put("w/3", b""), lambda: keys_are("w/1", "w/2", "w/3"))
    await delivered(other.delete("w/3"), lambda: keys_are("w/1", "w/2"))
    await delivered(other.delete_range("w/2", "w/9"), lambda: keys_are("w/1"))
    await delivered(other.put("w/4", b"", ephemeral=True), lambda: keys_are("w/1", "w/4"))
    await delivered(other.close(), lambda: keys_are("w/1"))
    await delivered(adapter.kill_holder_of("w/5"), lambda: keys_are("w/1"))
    await store.close()


async def test_a_waiting_watch_wakes_and_one_wait_that_was_given_up_does_not_end_it(adapter: Adapter) -> None:
    store, other = adapter.open(), adapter.open()
    watches = [store.watch("w/") for _ in range(5)]
    for watch in watches:
        await anext(watch)
    given_up = asyncio.ensure_future(anext(watches[0]))
    await asyncio.sleep(0.05)
    given_up.cancel()
    await asyncio.wait([given_up])

    waiting = [asyncio.ensure_future(anext(watch)) for watch in watches]
    await asyncio.sleep(0.05)
    await other.put("w/1", b"")
    async with asyncio.timeout(20):
        await asyncio.gather(*waiting)
    await store.close()
    await other.close()


async def test_a_confirmed_watch_has_delivered_every_change_before_the_confirmation(adapter: Adapter) -> None:
    store, other = adapter.open(), adapter.open()
    watch = store.watch("w/")
    await anext(watch)
    for number in range(20):
        waiting = asyncio.ensure_future(anext(watch))
        await asyncio.sleep(0)
        await other.put(f"w/{number % 3}", b"%d" % number)
        await watch.confirm()
        async with asyncio.timeout(20):
            await waiting
    await watch.confirm()
    await store.close()
    with pytest.raises(StoreUnavailable):
        await watch.confirm()
    await other.close()


async def test_a_change_that_nobody_waited_for_is_ready_once_the_watch_is_confirmed(adapter: Adapter) -> None:
    store, other = adapter.open(), adapter.open()
    watch = store.watch("w/")
    await anext(watch)
    await other.put("w/1", b"")
    await watch.confirm()
    async with asyncio.timeout(20):
        await anext(watch)
    await store.close()
    await other.close()


async def test_an_item_names_all_keys_that_changed_or_says_that_any_may_have(adapter: Adapter) -> None:
    store, other = adapter.open(), adapter.open()
    watch = store.watch("w/")
    assert watch.take() is None, "anything may have happened before the watch"
    await watch.confirm()
    watch.take()
    assert watch.take() == frozenset()
    for number in range(5):
        await other.put_many([Put(f"w/{number}", b""), Put(f"w/{number}/x", b""), Put("v/1", b"")])
        await watch.confirm()
        changes = watch.take()
        assert changes is None or changes == {f"w/{number}", f"w/{number}/x"}
        assert watch.take() == frozenset()
    await other.delete_range("w/1", "w/2")
    await watch.confirm()
    changes = watch.take()
    assert changes is None or changes == {"w/1", "w/1/x"}
    await store.close()
    await other.close()


async def test_reads_of_a_server_in_charge_are_confirmed(adapter: Adapter) -> None:
    store, other = adapter.open(), adapter.open()
    reads = await store.begin_reads()
    for number in range(5):
        await other.put(f"{PARTITION}{number}", b"")
        await store.keys("", "z", 10)
        await store.get("alone")
        await reads.confirm()
    await (await store.begin_reads()).confirm()
    await store.close()
    with pytest.raises(StoreUnavailable):
        await reads.confirm()
    await other.close()


async def test_closing_the_store_ends_its_watches(store: MetaStore) -> None:
    watch = store.watch("w/")

    async def follow() -> None:
        async for _ in watch:
            pass

    waiting = asyncio.ensure_future(follow())
    await asyncio.sleep(0.02)
    await store.close()
    async with asyncio.timeout(20):
        with pytest.raises(StoreUnavailable):
            await waiting


# --- closing and counting


async def test_every_call_after_close_is_refused_and_closing_again_is_no_error(adapter: Adapter) -> None:
    store = adapter.open()
    await store.put("a", b"")
    await store.close()
    await store.close()
    calls: list[Callable[[], Awaitable[Any]]] = [
        lambda: store.get("a"),
        lambda: store.put("a", b""),
        lambda: store.put_many([Put("a", b"")]),
        lambda: store.delete("a"),
        lambda: store.delete_range("a", "b"),
        lambda: store.floor("a"),
        lambda: store.floor_many(["a/partitions/0/a"]),
        lambda: store.ceiling("a"),
        lambda: store.range("a", "b", 1),
        lambda: store.keys("a", "b", 1),
    ]
    for call in calls:
        with pytest.raises(StoreUnavailable, match="closed"):
            await call()
    with pytest.raises(StoreUnavailable, match="closed"):
        store.watch("a")
    again = adapter.open()
    assert await again.keys("", "z", 10) == ["a"]
    await again.close()


async def test_operations_are_counted_by_name(store: MetaStore) -> None:
    await store.put("a", b"123")
    await store.put_many([Put("b", b"12"), Put("c", b"3")])
    await store.get("a")
    await store.range("", "z", 10)
    counts = store.counts  # type: ignore[attr-defined]
    assert counts.count == {"put": 1, "put_many": 1, "get": 1, "range": 1}
    assert counts.bytes == {"put": 3, "put_many": 3, "get": 3, "range": 6}
    assert counts.errors == {}


# --- against a model


class MetaMachine(RuleBasedStateMachine):
    """Any sequence of calls answers as a plain dict would."""

    make: Callable[[Path], Adapter]

    KEYS = st.sampled_from(["", "a", "a/", "a/1", "a/10", "a/2", "a0", "b", "\x00", "é", "😀"])
    VALUES = st.binary(max_size=8)
    EXPECTED = st.sampled_from(["any", "absent", "current", "stale"])

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.directory = tempfile.TemporaryDirectory()
        self.adapter = self.make(Path(self.directory.name))
        self.store = self.adapter.open()
        self.model: dict[str, MetaEntry] = {}
        self.ephemeral: set[str] = set()
        self.highest: dict[str, int] = {}
        """The highest version that each key ever had."""

    def run(self, call: Awaitable[Any]) -> Any:
        return self.loop.run_until_complete(call)

    def expected(self, key: str, kind: str) -> int | None:
        current = self.model[key].version if key in self.model else ABSENT
        return {"any": None, "absent": ABSENT, "current": current, "stale": self.highest.get(key, 0) + 7}[kind]

    def apply(self, key: str, value: bytes, expected: int | None, result: int | VersionMismatch) -> None:
        current = self.model[key].version if key in self.model else ABSENT
        if expected is None or expected == current:
            assert isinstance(result, int)
            assert result > self.highest.get(key, ABSENT)
            self.highest[key] = result
            self.model[key] = MetaEntry(key, value, result)
            self.ephemeral.discard(key)
        else:
            assert isinstance(result, VersionMismatch)

    @rule(key=KEYS, value=VALUES, kind=EXPECTED, ephemeral=st.booleans())
    def put(self, key: str, value: bytes, kind: str, ephemeral: bool) -> None:
        expected = self.expected(key, kind)
        try:
            result = self.run(self.store.put(key, value, expected=expected, ephemeral=ephemeral))
        except VersionMismatch as error:
            result = error
        self.apply(key, value, expected, result)
        if ephemeral and isinstance(result, int):
            self.ephemeral.add(key)

    @rule(puts=st.lists(st.tuples(KEYS, VALUES, EXPECTED), max_size=6))
    def put_many(self, puts: list[tuple[str, bytes, str]]) -> None:
        calls = [Put(key, value, self.expected(key, kind)) for key, value, kind in puts]
        for call, result in zip(calls, self.run(self.store.put_many(calls)), strict=True):
            self.apply(call.key, call.value, call.expected, result)

    @rule(key=KEYS, kind=EXPECTED)
    def delete(self, key: str, kind: str) -> None:
        expected = self.expected(key, kind)
        there = key in self.model
        matches = expected is None or not there or expected == self.model[key].version
        try:
            assert self.run(self.store.delete(key, expected=expected)) is there
            assert matches
            self.model.pop(key, None)
            self.ephemeral.discard(key)
        except VersionMismatch:
            assert not matches

    @rule(start=KEYS, end=KEYS)
    def delete_range(self, start: str, end: str) -> None:
        self.run(self.store.delete_range(start, end))
        for key in [key for key in self.model if start <= key < end]:
            del self.model[key]
            self.ephemeral.discard(key)

    @rule(key=KEYS)
    def lookups(self, key: str) -> None:
        keys = sorted(self.model)
        floor = next((self.model[each] for each in reversed(keys) if each <= key), None)
        ceiling = next((self.model[each] for each in keys if each >= key), None)
        assert self.run(self.store.get(key)) == self.model.get(key)
        assert self.run(self.store.floor(key)) == floor
        assert self.run(self.store.ceiling(key)) == ceiling

    @rule(start=KEYS, end=KEYS, limit=st.integers(1, 5))
    def ranges(self, start: str, end: str, limit: int) -> None:
        keys = [key for key in sorted(self.model) if start <= key < end][:limit]
        assert self.run(self.store.keys(start, end, limit)) == keys
        assert self.run(self.store.range(start, end, limit)) == [self.model[key] for key in keys]

    @precondition(lambda self: self.model)
    @rule()
    def reopen(self) -> None:
        self.run(self.store.close())
        self.store = self.adapter.open()
        for key in self.ephemeral:
            del self.model[key]
        self.ephemeral.clear()

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        stored = self.run(self.store.range("", "\U0010ffff", 100))
        assert stored == [self.model[key] for key in sorted(self.model)]

    def teardown(self) -> None:
        self.run(self.store.close())
        self.loop.close()
        self.directory.cleanup()


@pytest.mark.parametrize("name", ADAPTERS)
def test_any_sequence_of_calls_answers_as_a_dict_would(name: str, request: pytest.FixtureRequest) -> None:
    server = server_of(name, request)
    machine = type("Machine", (MetaMachine,), {"make": staticmethod(lambda path: ADAPTERS[name](path, *server))})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=30, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


async def test_get_many_gives_each_key_its_entry_or_none(store: MetaStore) -> None:
    assert await store.get_many([]) == []
    await store.put_many([Put(f"k/{number:05}", b"%d" % number) for number in range(0, 2000, 2)])
    await store.put("gone", b"")
    await store.delete("gone")
    await store.put("mine", b"", ephemeral=True)
    keys = ["mine", "gone", *(f"k/{number:05}" for number in reversed(range(2000))), "k/00002"]
    found = await store.get_many(keys)
    assert found == [await store.get(key) for key in keys]
    assert [None if entry is None else entry.value for entry in found[-4:]] == [b"2", None, b"0", b"2"]
    with pytest.raises(InvalidArgument):
        await store.get_many(["fine", "x" * (KEY_BYTES_MAX + 1)])


async def test_floor_many_gives_each_key_of_many_partitions_what_floor_gives(store: MetaStore) -> None:
    assert await store.floor_many([]) == []
    prefixes = [f"t/partitions/{partition:010}/" for partition in range(40)]
    await store.put_many([Put(f"{prefix}p/{number:03}", b"%d" % number) for prefix in prefixes for number in (1, 5)])
    await store.put_many([Put(f"{prefix}meta", b"m") for prefix in prefixes])
    keys = [f"{prefix}{rest}" for prefix in prefixes for rest in ("meta", "p/009", "p/005", "p/004", "p/001", "meta")]
    found = await store.floor_many(keys)
    assert found == [await store.floor(key) for key in keys]
    values = [None if entry is None else entry.value for entry in found]
    assert values == [b"m", b"5", b"5", b"1", b"1", b"m"] * 40


async def test_floor_many_answers_a_partition_in_the_order_of_its_keys(store: MetaStore) -> None:
    """Whoever reads a counter first and then what the counter counts never misses what was counted."""
    prefix = "t/partitions/0000000000/"
    await store.put(prefix + "counter", b"0")
    is_over = False

    async def write() -> None:
        nonlocal is_over
        for number in range(1, 101):
            await store.put_many([Put(f"{prefix}p/{number:03}", b""), Put(prefix + "counter", b"%d" % number)])
        is_over = True

    writing = asyncio.create_task(write())
    while not is_over:
        counter, newest = await store.floor_many([prefix + "counter", prefix + "p/999"])
        assert counter is not None
        assert newest is not None
        assert int(counter.value) <= (int(newest.key[-3:]) if "/p/" in newest.key else 0)
        await asyncio.sleep(0)
    await writing
