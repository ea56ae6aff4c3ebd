"""Who owns what only one process may hold: directories by their id and lock, buckets by a lease."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from llog.base.lockfile import directory_id, take_lock
from llog.errors import LogOwned, OwnerUnavailable, StaleReads, StoreUnavailable
from llog.log.owners import ROCKSDB_OWNERSHIP, Owners
from llog.runtime import SystemRuntime
from llog.stores.memory.meta import MemoryMeta, MemoryMetaStore
from llog.stores.meta import FreshReads

A, B = "http://a:1", "http://b:1"
LIMIT_S = 60
Process = Callable[..., tuple[Owners, MemoryMetaStore]]


@pytest.fixture
def server() -> MemoryMeta:
    return MemoryMeta()


@pytest.fixture
async def process(server: MemoryMeta) -> AsyncIterator[Process]:
    made: list[Owners] = []

    def made_process(address: str | None = None) -> tuple[Owners, MemoryMetaStore]:
        store = MemoryMetaStore(server)
        made.append(Owners(store, SystemRuntime(), address=address, is_broker=True, renew_ms=10))
        return made[-1], store

    yield made_process
    for each in made:
        await each.close()


def answer_from(store: MemoryMetaStore, old: MemoryMetaStore) -> None:
    """Reads of the store are answered from an old state, as by a server that was paused, and cannot be confirmed."""

    def confirm() -> None:
        raise StaleReads("from an old state")

    async def begin_reads() -> FreshReads:
        return FreshReads(confirm)

    store.get = old.get  # type: ignore[method-assign]
    store.begin_reads = begin_reads  # type: ignore[method-assign]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.01)


async def test_of_many_that_take_a_bucket_at_once_exactly_one_owns_it(process: Process) -> None:
    processes = [process(f"http://broker:{number}")[0] for number in range(8)]
    taken = await asyncio.gather(*(each.take("keyed/x", "x") for each in processes), return_exceptions=True)
    (owner,) = [each for each, result in zip(processes, taken, strict=True) if result is None]
    refusals = [result for result in taken if result is not None]
    assert all(isinstance(each, LogOwned) and each.address == owner.address for each in refusals)
    assert [each.holds("keyed/x") for each in processes].count(True) == 1


async def test_a_bucket_is_free_when_its_owner_closes_or_dies(process: Process, server: MemoryMeta) -> None:
    (first, _), (second, second_store), (third, _) = process(A), process(B), process()
    await first.take("keyed/x", "x")
    await first.release("keyed/x")
    await second.take("keyed/x", "x")
    with pytest.raises(LogOwned, match="through the broker at http://b:1"):
        await third.take("keyed/x", "x")
    await second.close()
    server.expire(second_store)
    await third.take("keyed/x", "x")


async def test_an_owner_whose_session_ended_takes_its_lease_again_unless_another_has_it(
    process: Process, server: MemoryMeta
) -> None:
    (first, store), (second, _) = process(A), process(B)
    await first.take("keyed/x", "x")
    server.expire(store)
    async with asyncio.timeout(LIMIT_S):
        while await second.find("keyed/x") is None:
            await asyncio.sleep(0.01)
    assert first.holds("keyed/x")

    server.expire(store)
    await second.take("keyed/x", "x")  # before the first looks again
    await until(lambda: not first.holds("keyed/x"))
    with pytest.raises(LogOwned) as refused:
        await first.take("keyed/x", "x")
    assert refused.value.address == B


async def test_a_broker_that_was_restarted_at_its_address_is_not_sent_to_itself(process: Process) -> None:
    (before, _), (after, _) = process(A), process(A)
    await before.take("keyed/x", "x")
    with pytest.raises(OwnerUnavailable, match="has not ended yet"):
        await after.take("keyed/x", "x")


async def test_a_log_has_one_directory_however_many_are_offered_at_once(process: Process, tmp_path: Path) -> None:
    processes = [process(f"http://broker:{number}")[0] for number in range(8)]
    directories = [tmp_path / str(number) for number in range(8)]
    settled = await asyncio.gather(
        *(
            each.settle(ROCKSDB_OWNERSHIP, "tables", where, "LLOG_ROCKSDB_DIR")
            for each, where in zip(processes, directories, strict=True)
        ),
        return_exceptions=True,
    )
    (home,) = [where for where, result in zip(directories, settled, strict=True) if result is None]
    assert await processes[0].home(ROCKSDB_OWNERSHIP) == directory_id(home)
    refusals = [each for each in settled if each is not None]
    assert all(isinstance(each, LogOwned) and each.address == f"http://broker:{home.name}" for each in refusals)
    assert [where.exists() for where in directories].count(True) == 1


async def test_an_old_answer_does_not_make_a_second_home(process: Process, server: MemoryMeta, tmp_path: Path) -> None:
    (first, first_store), (second, store) = process(A), process(B)
    old = MemoryMetaStore(server.copy(lambda key: True))
    await first.settle(ROCKSDB_OWNERSHIP, "tables", tmp_path / "a", "LLOG_ROCKSDB_DIR")
    await first.close()
    server.expire(first_store)
    answer_from(store, old)
    with pytest.raises(StaleReads):
        await second.settle(ROCKSDB_OWNERSHIP, "tables", tmp_path / "b", "LLOG_ROCKSDB_DIR")
    assert not second.holds(ROCKSDB_OWNERSHIP)


async def test_an_old_lease_of_its_own_makes_no_owner(process: Process, server: MemoryMeta) -> None:
    (first, store), (second, _) = process(A), process(B)
    await first.take("keyed/x", "x")
    old = MemoryMetaStore(server.copy(lambda key: True))
    await first.release("keyed/x")
    await second.take("keyed/x", "x")
    answer_from(store, old)
    with pytest.raises(StaleReads):
        await first.take("keyed/x", "x")
    assert not first.holds("keyed/x")


async def test_who_comes_second_while_the_first_opens_its_directory_is_sent_there(
    process: Process, tmp_path: Path
) -> None:
    (first, _), (second, _) = process(A), process(B)
    await first.settle(ROCKSDB_OWNERSHIP, "tables", tmp_path / "a", "LLOG_ROCKSDB_DIR")
    with pytest.raises(LogOwned) as refused:
        await second.settle(ROCKSDB_OWNERSHIP, "tables", tmp_path / "b", "LLOG_ROCKSDB_DIR")
    assert refused.value.address == A
    await first.release(ROCKSDB_OWNERSHIP)  # it did not get the lock
    with pytest.raises(OwnerUnavailable):
        await second.settle(ROCKSDB_OWNERSHIP, "tables", tmp_path / "b", "LLOG_ROCKSDB_DIR")


async def test_who_cannot_make_the_directory_does_not_keep_others_from_theirs(process: Process, tmp_path: Path) -> None:
    (first, _), (second, _) = process(A), process(B)
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(StoreUnavailable):
        await first.settle(ROCKSDB_OWNERSHIP, "tables", tmp_path / "file" / "a", "LLOG_ROCKSDB_DIR")
    assert not first.holds(ROCKSDB_OWNERSHIP)
    await second.settle(ROCKSDB_OWNERSHIP, "tables", tmp_path / "b", "LLOG_ROCKSDB_DIR")


async def test_another_directory_is_refused_with_the_owners_address_while_it_runs_and_without_later(
    process: Process, server: MemoryMeta, tmp_path: Path
) -> None:
    (first, store), (second, _) = process(A), process(B)
    await first.settle(ROCKSDB_OWNERSHIP, "tables", tmp_path / "a", "LLOG_ROCKSDB_DIR")
    await first.publish(ROCKSDB_OWNERSHIP)
    with pytest.raises(LogOwned) as refused:
        await second.settle(ROCKSDB_OWNERSHIP, "tables", tmp_path / "b", "LLOG_ROCKSDB_DIR")
    assert refused.value.address == A
    assert not (tmp_path / "b").exists()
    await first.close()
    server.expire(store)
    with pytest.raises(OwnerUnavailable, match=str(directory_id(tmp_path / "a"))):
        await second.settle(ROCKSDB_OWNERSHIP, "tables", tmp_path / "b", "LLOG_ROCKSDB_DIR")


async def test_the_directory_that_was_moved_may_be_owned_where_it_is_now(process: Process, tmp_path: Path) -> None:
    (first, store), (second, _) = process(A), process(B)
    await first.settle(ROCKSDB_OWNERSHIP, "tables", tmp_path / "a", "LLOG_ROCKSDB_DIR")
    await first.close()
    await store.close()
    (tmp_path / "a").rename(tmp_path / "moved")
    await second.settle(ROCKSDB_OWNERSHIP, "tables", tmp_path / "moved", "LLOG_ROCKSDB_DIR")


async def test_who_has_the_lock_puts_its_lease_over_that_of_the_process_before(
    process: Process, server: MemoryMeta
) -> None:
    """Killed a moment ago, that has a session still; its lock went with it."""
    (killed, _), (owner, store) = process(A), process(B)
    await killed.publish(ROCKSDB_OWNERSHIP)
    await killed.close()
    await owner.publish(ROCKSDB_OWNERSHIP)
    found = await owner.find(ROCKSDB_OWNERSHIP)
    assert found is not None
    assert found.address == B
    server.expire(store)  # paused for longer than its session
    async with asyncio.timeout(LIMIT_S):
        while await owner.find(ROCKSDB_OWNERSHIP) is None:
            await asyncio.sleep(0.01)


async def test_a_copy_of_the_directory_on_another_machine_does_not_make_a_second_owner(
    process: Process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = process(A)
    monkeypatch.setattr("llog.log.owners.boot_id", lambda: "another machine")
    second, _ = process(B)
    await first.settle(ROCKSDB_OWNERSHIP, "tables", tmp_path, "LLOG_ROCKSDB_DIR")
    await first.publish(ROCKSDB_OWNERSHIP)
    with pytest.raises(LogOwned) as refused:
        await second.settle(ROCKSDB_OWNERSHIP, "tables", tmp_path, "LLOG_ROCKSDB_DIR")
    assert refused.value.address == A


async def test_a_store_that_is_out_of_reach_does_not_keep_the_lock_holder_from_its_work(process: Process) -> None:
    owner, store = process(A)
    reach = store.get

    async def broken(key: str) -> None:
        raise StoreUnavailable("out of reach")

    store.get = broken  # type: ignore[method-assign]
    await owner.publish(ROCKSDB_OWNERSHIP)
    assert owner.holds(ROCKSDB_OWNERSHIP)
    store.get = reach  # type: ignore[method-assign]
    async with asyncio.timeout(LIMIT_S):
        while await owner.find(ROCKSDB_OWNERSHIP) is None:
            await asyncio.sleep(0.01)


def test_the_refusal_of_a_lock_has_the_address_of_the_broker_that_holds_it(tmp_path: Path) -> None:
    lock = take_lock(tmp_path, "tables", address=A)
    try:
        with pytest.raises(LogOwned, match="at http://a:1") as refused:
            take_lock(tmp_path, "tables")
        assert refused.value.address == A
    finally:
        os.close(lock)


async def test_a_lost_directory_is_replaced_once_it_was_forgotten(
    process: Process, server: MemoryMeta, tmp_path: Path
) -> None:
    (first, store), (second, _) = process(A), process(B)
    await first.settle(ROCKSDB_OWNERSHIP, "tables", tmp_path / "lost", "LLOG_ROCKSDB_DIR")
    await first.publish(ROCKSDB_OWNERSHIP)
    with pytest.raises(LogOwned):
        await second.forget(ROCKSDB_OWNERSHIP, "tables")
    await first.close()
    server.expire(store)
    await second.forget(ROCKSDB_OWNERSHIP, "tables")
    await second.settle(ROCKSDB_OWNERSHIP, "tables", tmp_path / "new", "LLOG_ROCKSDB_DIR")
    assert await second.home(ROCKSDB_OWNERSHIP) == directory_id(tmp_path / "new")
