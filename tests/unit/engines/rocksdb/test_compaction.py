"""Key compaction in a RocksDB: the newest record of each key stays, and nothing else is lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llog.model import TimestampType
from tests.unit.engines.rocksdb.tools import World

HOUR_MS = 3_600_000


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path / "rocksdb")
    yield made
    made.close()


def put(world: World, *pairs: tuple[bytes | None, bytes | None]) -> None:
    for key, value in pairs:
        world.append(value, keys=[key])


def test_the_newest_record_of_each_key_stays_at_its_offset(world: World) -> None:
    put(world, (b"a", b"1"), (b"b", b"2"), (b"a", b"3"), (None, b"4"), (b"c", b"5"), (b"b", b"6"))
    done = world.logs.compact("t", 0, delete_retention_ms=HOUR_MS)
    assert (done.removed, done.passes, done.through) == (2, 1, 7)
    assert done.bytes_before - done.bytes_after == 2 * 54
    assert world.records() == {3: b"3", 4: b"4", 5: b"5", 6: b"6"}
    assert world.logs.bounds("t", 0) == (1, 7)
    assert [start for start, _ in world.logs.read("t", 0, 1, 1000)] == [3]
    assert world.logs.read("t", 0, 1, 1000, stop=3) == []
    world.reopen()
    assert world.records() == {3: b"3", 4: b"4", 5: b"5", 6: b"6"}
    assert world.append(b"next", keys=[b"a"]) == 7


def test_batches_are_cut_at_gaps(world: World) -> None:
    put(world, *((b"%d" % (number % 4), b"%d" % number) for number in range(5)), (b"2", b"5"), (b"0", b"6"))
    world.logs.compact("t", 0, delete_retention_ms=HOUR_MS)
    found = [(start, columns.values.to_pylist()) for start, columns in world.logs.read("t", 0, 1, 1000)]
    assert found == [(2, [b"1"]), (4, [b"3"]), (6, [b"5", b"6"])]


def test_a_deletion_stays_until_it_is_old_enough_and_takes_what_it_deletes_at_once(world: World) -> None:
    put(world, (b"a", b"1"), (b"a", None), (b"b", b"3"))
    world.logs.compact("t", 0, delete_retention_ms=HOUR_MS)
    assert world.records() == {2: None, 3: b"3"}
    world.clock.now += HOUR_MS + 1
    world.logs.compact("t", 0, delete_retention_ms=HOUR_MS, force=True)
    assert world.records() == {3: b"3"}


def test_the_last_record_stays_though_it_is_an_old_deletion(world: World) -> None:
    put(world, (b"a", b"1"), (b"a", None))
    world.clock.now += 2 * HOUR_MS
    world.logs.compact("t", 0, delete_retention_ms=HOUR_MS)
    assert world.records() == {2: None}
    assert world.logs.bounds("t", 0) == (1, 3)
    put(world, (b"b", b"3"))
    world.logs.compact("t", 0, delete_retention_ms=HOUR_MS, force=True)
    assert world.records() == {3: b"3"}


def test_what_is_not_worth_it_is_left_alone_unless_forced(world: World) -> None:
    put(world, *((b"%d" % number, b"old") for number in range(10)))
    assert world.logs.compact("t", 0, delete_retention_ms=0).passes == 1
    put(world, (b"0", b"new"))
    assert world.logs.compact("t", 0, delete_retention_ms=0).passes == 0
    assert world.logs.compact("t", 0, delete_retention_ms=0, force=True).removed == 1
    assert world.logs.compact("t", 0, delete_retention_ms=0).passes == 0


def test_more_keys_than_fit_are_done_in_several_passes(world: World) -> None:
    for turn in range(3):
        put(world, *((b"%d" % number, b"%d" % turn + bytes(400_000)) for number in range(6)))
    done = world.logs.compact("t", 0, delete_retention_ms=0, keys_max=1)
    assert done.passes > 1
    assert done.removed == 12
    assert world.records() == dict.fromkeys(range(13, 19), b"2" + bytes(400_000))


def test_lookups_by_time_and_retention_go_on_over_gaps(world: World) -> None:
    for number in range(20):
        world.append(b"x" * 47, keys=[b"a" if number < 15 else b"%d" % (number % 5)])
        world.clock.now += 60_000
    world.logs.compact("t", 0, delete_retention_ms=0)
    assert list(world.records()) == [15, 16, 17, 18, 19, 20]
    start = world.clock.now - 20 * 60_000
    assert world.logs.offset_for_time("t", 0, start, TimestampType.CREATE) == 15
    assert world.logs.offset_for_time("t", 0, start + 17 * 60_000, TimestampType.APPEND) == 18
    by = TimestampType.CREATE
    assert world.logs.retain("t", 0, retention_ms=None, retention_bytes=600, by=by).new_start == 1
    done = world.logs.retain("t", 0, retention_ms=None, retention_bytes=350, by=by)
    assert (done.new_start, done.bytes) == (17, 200)
    assert world.logs.retain("t", 0, retention_ms=60_000, retention_bytes=None, by=by).new_start == 20


operation = st.tuples(st.sampled_from([b"a", b"b", b"c", b"d"]), st.none() | st.binary(max_size=3)) | st.sampled_from(
    ["compact", "trim", "reopen"]
)


@settings(max_examples=25, deadline=None)
@given(operations=st.lists(operation, max_size=40))
def test_the_newest_value_of_every_key_is_never_lost(
    tmp_path_factory: pytest.TempPathFactory, operations: list[tuple[bytes, bytes | None] | str]
) -> None:
    world = World(tmp_path_factory.mktemp("compaction") / "rocksdb")
    expected: dict[bytes, tuple[int, bytes | None]] = {}
    appended = 0
    for each in operations:
        if each == "compact":
            world.logs.compact("t", 0, delete_retention_ms=HOUR_MS, force=True, keys_max=2)
        elif each == "trim":
            start = world.logs.bounds("t", 0).log_start_offset
            world.logs.trim("t", 0, min(start + 1, appended + 1))
        elif each == "reopen":
            world.reopen()
        else:
            assert not isinstance(each, str)
            key, value = each
            appended = world.append(value, keys=[key])
            expected[key] = appended, value
        start, stop = world.logs.bounds("t", 0)
        assert stop == appended + 1
        kept = {offset: value for offset, value in expected.values() if offset >= start}
        found = world.records()
        assert kept.items() <= found.items()
        if each == "compact":
            assert found == kept
    world.close()


def test_what_comes_while_it_is_compacted_is_left_alone(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    put(world, (b"a", b"1"), (b"a", b"2"))
    scan = world.store.values

    def scan_after_an_append(family: str, start: bytes, stop: bytes) -> Iterator[bytes]:
        put(world, (b"a", b"3"), (b"b", None))
        return scan(family, start, stop)

    monkeypatch.setattr(world.store, "values", scan_after_an_append)
    world.logs.compact("t", 0, delete_retention_ms=0)
    monkeypatch.undo()
    assert world.records() == {2: b"2", 3: b"3", 4: None, 5: b"3", 6: None}
    world.clock.now += 1
    world.logs.compact("t", 0, delete_retention_ms=0)
    assert world.records() == {5: b"3", 6: None}


def test_a_read_goes_on_to_what_came_meanwhile_if_all_it_was_after_is_compacted(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(world, (b"a", b"1"), (b"a", b"2"))
    scan = world.store.values

    def scan_after_a_compaction(family: str, start: bytes, stop: bytes) -> Iterator[bytes]:
        monkeypatch.undo()
        put(world, (b"a", b"3"))
        world.logs.compact("t", 0, delete_retention_ms=0, force=True)
        return scan(family, start, stop)

    monkeypatch.setattr(world.store, "values", scan_after_a_compaction)
    assert [start for start, _ in world.logs.read("t", 0, 1, 1000)] == [3]
