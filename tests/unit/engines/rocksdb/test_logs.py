"""Partitions' logs in a RocksDB: appends that are staged, what is there after a restart, retention."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from llog.batch.columns import Columns
from llog.engines.rocksdb import reader as reading
from llog.engines.rocksdb.keys import COUNTERS, LOGS, ROWS, counter_key, record_key
from llog.engines.rocksdb.partition_state import PartitionState
from llog.engines.rocksdb.waiters import Partition
from llog.errors import (
    CorruptBatch,
    InconsistentReadState,
    InvalidArgument,
    LlogError,
    OffsetOutOfRange,
    PartitionNotInitialized,
    StoreUnavailable,
    WrongStore,
)
from llog.log.producers import Producer
from llog.model import TimestampType
from tests.unit.engines.rocksdb.tools import START_MS, World


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path / "rocksdb")
    yield made
    made.close()


def test_what_is_staged_and_left_without_a_commit_changes_nothing(world: World) -> None:
    world.append(b"a")
    with world.logs.stage() as staged:
        assert staged.append("t", 0, [b"b"], now_ms=1, what="t") == (2, 2, False)
        assert staged.append("t", 0, [b"c", b"d"], now_ms=1, what="t") == (3, 4, False)
        staged.changes.put(ROWS, b"row", b"1")
    with world.logs.stage() as staged:
        staged.append("t", 0, [b"b"], now_ms=1, what="t")
        with pytest.raises(InvalidArgument):
            staged.append("t", 0, [b"b"], keys=[], now_ms=1, what="t")
    assert world.logs.bounds("t", 0) == (1, 2)
    assert world.store.get(ROWS, b"row") is None
    assert world.append(b"e") == 2
    assert world.records() == {1: b"a", 2: b"e"}


def test_one_commit_carries_several_partitions_and_what_others_add(world: World) -> None:
    with world.logs.stage() as staged:
        staged.append("t", 0, [b"a"], now_ms=1, what="t")
        staged.append("t", 7, [b"b"], now_ms=1, what="t")
        staged.changes.put(ROWS, b"row", b"1")
        assert world.logs.bounds("t", 7) == (1, 1)
        staged.commit()
    assert (world.records(0), world.records(7)) == ({1: b"a"}, {1: b"b"})
    assert world.store.get(ROWS, b"row") == b"1"


def test_an_append_that_fails_leaves_those_staged_beside_it(world: World) -> None:
    with world.logs.stage() as staged:
        staged.append("t", 0, [b"a"], now_ms=1, what="t")
        with pytest.raises(PartitionNotInitialized):
            staged.append("nothing", 0, [b"b"], now_ms=1, what="nothing")
        staged.commit()
    assert world.records() == {1: b"a"}


def test_all_is_there_after_opening_again(world: World) -> None:
    world.append(b"a", b"b", producer=Producer(id="p", sequence=0, since=1))
    world.clock.now += 5
    world.append(b"c", timestamps=[START_MS + 1000])
    world.logs.trim("t", 0, 2)
    before = world.logs.state("t", 0)
    world.reopen()
    assert world.logs.state("t", 0) == before
    assert (before.last_offset, before.log_start_offset) == (3, 2)
    assert (before.append_ms, before.timestamp_ms) == (START_MS + 5, START_MS + 1000)
    assert world.append(b"a", b"b", producer=Producer(id="p", sequence=0, since=1)) == 1
    assert world.records() == {2: b"b", 3: b"c"}


def test_the_append_time_never_goes_back(world: World) -> None:
    world.append(b"a")
    world.clock.now -= 1000
    world.append(b"b")
    [(_, columns)] = world.logs.read("t", 0, 1, 1 << 20)
    assert columns.append_runs == ((2, START_MS),)


def test_the_newest_time_is_a_running_maximum_over_appends(world: World) -> None:
    for ms in (50, 30, 70, 60):
        world.append(b"x", timestamps=[ms])
    by = TimestampType.CREATE
    assert [world.logs.offset_for_time("t", 0, ms, by) for ms in (0, 50, 51, 70, 71)] == [1, 1, 3, 3, 5]


def test_a_removed_topic_is_gone_and_created_again_begins_anew(world: World) -> None:
    world.append(b"a")
    world.logs.remove("t")
    for call in (lambda: world.append(b"b"), lambda: world.logs.bounds("t", 0), lambda: world.logs.trim("t", 0, 1)):
        with pytest.raises(PartitionNotInitialized):
            call()
    world.logs.create("t", b"{}")
    assert world.append(b"new") == 1
    assert world.records() == {1: b"new"}


def test_a_topic_whose_records_are_there_already_is_not_created(world: World) -> None:
    world.append(b"of another log")
    with pytest.raises(WrongStore, match="LLOG_ROCKSDB_DIR"):
        world.logs.create("t", b"{}")
    world.logs.create("t~2", b"{}")


def test_topics_and_partitions_whose_names_begin_alike_are_kept_apart(world: World) -> None:
    world.logs.create("t.more", b"{}")
    world.append(b"one", partition=1)
    world.append(b"ten", partition=10)
    with world.logs.stage() as staged:
        staged.append("t.more", 1, [b"more"], now_ms=1, what="t.more")
        staged.commit()
    assert (world.records(1), world.records(10)) == ({1: b"one"}, {1: b"ten"})
    world.logs.remove("t")
    assert world.logs.bounds("t.more", 1) == (1, 2)


def test_a_trim_takes_the_records_out_of_the_store(world: World) -> None:
    world.append(*(b"%d" % number for number in range(10)))
    done = world.logs.trim("t", 0, 8)
    assert (done.records, done.new_start) == (7, 8)
    left = world.store.items(LOGS, record_key("t", 0, 0), record_key("t", 0, 99))
    assert [key for key, _ in left] == [record_key("t", 0, offset) for offset in (8, 9, 10)]
    with pytest.raises(OffsetOutOfRange):
        world.logs.read("t", 0, 7, 1)


@pytest.mark.parametrize("by", list(TimestampType))
def test_retention_by_age_is_exact(world: World, by: TimestampType) -> None:
    for minute in range(10):
        world.append(b"x", timestamps=[START_MS + minute * 60_000 - (0 if by is TimestampType.APPEND else 5_000)])
        world.clock.now += 60_000
    done = world.logs.retain("t", 0, retention_ms=3 * 60_000, retention_bytes=None, by=by)
    assert done.new_start == (8 if by is TimestampType.APPEND else 9)
    world.clock.now += 3_600_000
    assert world.logs.retain("t", 0, retention_ms=1000, retention_bytes=None, by=by).new_start == 11
    assert world.append(b"next") == 11


def test_retention_by_bytes_keeps_the_record_that_crosses_the_limit(world: World) -> None:
    world.append(*([b"x" * 48] * 10))
    by = TimestampType.CREATE
    assert world.logs.retain("t", 0, retention_ms=None, retention_bytes=1000, by=by).records == 0
    done = world.logs.retain("t", 0, retention_ms=None, retention_bytes=250, by=by)
    assert (done.new_start, done.bytes) == (8, 700)
    assert world.logs.retain("t", 0, retention_ms=None, retention_bytes=200, by=by).new_start == 9
    assert world.logs.retain("t", 0, retention_ms=None, retention_bytes=0, by=by).new_start == 11


def test_reads_are_bounded_and_batches_are_not_too_large(world: World) -> None:
    world.append(*([b"x" * 100_000] * 100))
    found = world.logs.read("t", 0, 1, 64 << 20)
    assert sum(columns.count for _, columns in found) == 100
    assert all(columns.count <= 22 for _, columns in found)
    assert sum(columns.count for _, columns in world.logs.read("t", 0, 1, 1_000_000)) in range(10, 13)
    assert sum(columns.count for _, columns in world.logs.read("t", 0, 1, 1)) == 1
    assert sum(columns.count for _, columns in world.logs.read("t", 0, 1, 0)) == 1
    assert sum(columns.count for _, columns in world.logs.read("t", 0, 1, 64 << 20, stop=34)) == 33


def test_large_records_behind_many_small_ones_are_not_read_by_the_thousand(world: World) -> None:
    world.append(*([b"x"] * 300))
    world.append(*([b"x" * 100_000] * 50))
    assert sum(columns.count for _, columns in world.logs.read("t", 0, 1, 1_000_000)) in range(309, 313)


def test_who_reads_what_is_being_trimmed_is_told_so(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.append(*[b"x"] * 5)
    found = read_before_it_is_told(world, monkeypatch, lambda: world.logs.trim("t", 0, 4))
    assert isinstance(found, OffsetOutOfRange)


def test_who_reads_what_is_being_compacted_gets_what_is_left(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.append(*[b"x"] * 5, keys=[b"k"] * 5)
    compact = partial(world.logs.compact, "t", 0, delete_retention_ms=0)
    assert read_before_it_is_told(world, monkeypatch, compact) == [5]


def read_before_it_is_told(
    world: World, monkeypatch: pytest.MonkeyPatch, change: Callable[[], object]
) -> list[int] | LlogError:
    """The first offsets of what another thread finds from offset 1 on, once the change is written and not yet in
    memory.
    """
    found: list[list[int] | LlogError] = []
    scanned = threading.Event()

    def read() -> None:
        try:
            found.append([start for start, _ in world.logs.read("t", 0, 1, 1000)])
        except LlogError as error:
            found.append(error)

    reader = threading.Thread(target=read)

    def scan(*given: Any) -> list[tuple[int, Columns]]:
        runs = reading.read(*given)
        scanned.set()
        return runs

    def publish(new: Mapping[Partition, PartitionState]) -> None:
        if reader.ident is None:
            reader.start()
            scanned.wait()
            reader.join(0.05)  # it is to look at what is in memory before that is changed
        publish_now(new)

    publish_now = world.logs.publish
    monkeypatch.setattr("llog.engines.rocksdb.logs.read", scan)
    monkeypatch.setattr(world.logs, "publish", publish)
    change()
    reader.join()
    return found[0]


def test_damage_is_told_and_what_lies_before_it_can_be_read(world: World) -> None:
    world.append(*([b"x" * 100_000] * 30))
    changes = world.store.changes()
    changes.put(LOGS, record_key("t", 0, 28), b"damaged")
    world.store.write(changes, sync=False)
    found = world.logs.read("t", 0, 1, 64 << 20)
    assert 1 <= found[-1][0] + found[-1][1].count <= 28
    with pytest.raises(CorruptBatch, match="t/0"):
        world.logs.read("t", 0, 28, 1)


def test_a_record_that_is_missing_is_no_gap(world: World) -> None:
    world.append(*[b"x"] * 6)
    changes = world.store.changes()
    changes.delete(LOGS, record_key("t", 0, 4))
    world.store.write(changes, sync=False)
    assert [(start, columns.count) for start, columns in world.logs.read("t", 0, 1, 1000)] == [(1, 3)]
    with pytest.raises(InconsistentReadState, match="offset 4"):
        world.logs.read("t", 0, 4, 1000)


def test_changes_of_a_store_that_was_closed_meanwhile_say_so(tmp_path: Path) -> None:
    world = World(tmp_path / "rocksdb")
    changes = world.store.changes()
    world.close()
    for each in (changes, world.store.changes()):
        with pytest.raises(StoreUnavailable, match="closed"):
            each.put(ROWS, b"row", b"1")


def test_a_damaged_counter_is_told(world: World) -> None:
    changes = world.store.changes()
    changes.put(COUNTERS, counter_key("t", 0), b"\x01damaged")
    world.store.write(changes, sync=False)
    with pytest.raises(InconsistentReadState, match="counter"):
        world.append(b"a")


async def test_those_who_wait_are_woken_from_another_thread(world: World) -> None:
    with world.logs.commit_event("t", 0) as event:
        await asyncio.to_thread(world.append, b"other", partition=1)
        await asyncio.sleep(0)
        assert not event.is_set()
        await asyncio.to_thread(world.append, b"a")
        await asyncio.wait_for(event.wait(), 10)
        event.clear()
        await asyncio.to_thread(world.logs.remove, "t")
        await asyncio.wait_for(event.wait(), 10)


async def test_those_who_wait_are_told_of_the_end(world: World) -> None:
    with world.logs.commit_event("t", 0) as event:
        world.close()
        await asyncio.wait_for(event.wait(), 10)
    with pytest.raises(StoreUnavailable):
        world.logs.bounds("t", 0)
    world.open()


def test_a_range_without_keys_is_told_without_a_long_way_over_deleted_ones(world: World) -> None:
    def put(*keys: int) -> None:
        changes = world.store.changes()
        changes.put_all(ROWS, [b"row/%04d" % key for key in keys], [b"1"] * len(keys))
        world.store.write(changes, sync=False)

    def is_empty(first: int, last: int) -> bool:
        return world.store.is_empty(ROWS, b"row/%04d" % first, b"row/%04d" % last)

    put(*range(1000, 3000))
    assert is_empty(0, 999) and is_empty(3000, 9999)  # noqa: PT018
    assert not is_empty(0, 1000) and not is_empty(2999, 9999) and not is_empty(1500, 1500)  # noqa: PT018
    for key in range(1000, 2990):
        changes = world.store.changes()
        changes.delete(ROWS, b"row/%04d" % key)
        world.store.write(changes, sync=False)
    assert is_empty(1500, 1510)
    assert not is_empty(1000, 2980), "it may be, which would take long to tell"
    put(1505)
    assert not is_empty(1500, 1510)
