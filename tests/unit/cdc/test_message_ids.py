"""Message ids grow and are unique, whatever the clock does and however often the store is opened."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llog.cdc.message_ids import EPOCH_MS, MessageIds
from llog.engines.rocksdb.keys import COUNTERS, MESSAGE_ID
from llog.engines.rocksdb.store import RocksStore
from tests.unit.world import START_MS, ManualRuntime

NOW = START_MS + 100_000_000_000


def taken(ids: MessageIds, store: RocksStore, count: int, now_ms: int) -> list[int]:
    given_ids = list(chain.from_iterable(ids.take(count, now_ms)))
    changes = store.changes()
    ids.put(changes)
    store.write(changes, sync=False)
    return given_ids


def test_an_id_is_its_time_its_node_and_a_sequence(tmp_path: Path) -> None:
    store = RocksStore.open(tmp_path)
    ids = MessageIds(store, ManualRuntime())
    [first] = ids.take(3, NOW)
    assert list(first) == [((NOW - EPOCH_MS) << 22 | ids.node << 12) + sequence for sequence in range(3)]
    assert {(each >> 22) + EPOCH_MS for each in first} == {NOW}
    store.close()


def test_ids_go_on_after_a_restart_with_a_clock_that_went_back(tmp_path: Path) -> None:
    store = RocksStore.open(tmp_path)
    ids = MessageIds(store, ManualRuntime(1))
    before = taken(ids, store, 5, NOW)
    store.close()
    store = RocksStore.open(tmp_path)
    again = MessageIds(store, ManualRuntime(2))
    after = taken(again, store, 5, NOW - 3_600_000)
    assert again.node == ids.node
    assert after == [before[-1] + place for place in range(1, 6)]
    store.close()


def test_an_id_of_changes_that_were_given_up_is_in_no_store(tmp_path: Path) -> None:
    store = RocksStore.open(tmp_path)
    ids = MessageIds(store, ManualRuntime())
    ids.take(5, NOW)
    assert store.get(COUNTERS, MESSAGE_ID) is None
    store.close()


def test_ids_that_do_not_fit_into_the_rest_of_a_ms_begin_the_next_one(tmp_path: Path) -> None:
    store = RocksStore.open(tmp_path)
    ids = MessageIds(store, ManualRuntime())
    [fits], [one_too_many], [rest] = ids.take(4095, NOW), ids.take(2, NOW), ids.take(4094, NOW)
    assert one_too_many[0] == fits[0] + (1 << 22)
    assert rest[-1] == one_too_many[0] + 4095
    assert ids.take(1, NOW)[0][0] == one_too_many[0] + (1 << 22)
    store.close()


def test_a_clock_before_the_epoch_gives_ids_above_zero(tmp_path: Path) -> None:
    store = RocksStore.open(tmp_path)
    ids = MessageIds(store, ManualRuntime())
    assert taken(ids, store, 1, 0)[0] > 0
    store.close()


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RocksStore]:
    """One store that all examples go on with."""
    store = RocksStore.open(tmp_path_factory.mktemp("ids"))
    yield store
    store.close()


@given(calls=st.lists(st.tuples(st.integers(1, 10_000), st.integers(-5, 5)), max_size=20))
def test_ids_always_grow_and_keep_their_node(kept: RocksStore, calls: list[tuple[int, int]]) -> None:
    ids = MessageIds(kept, ManualRuntime())
    last, now = ids.last, NOW
    for count, step in calls:
        now += step
        ranges = ids.take(count, now)
        assert sum(map(len, ranges)) == count
        assert len(ranges) == 1 or count > 4096
        for each in ranges:
            assert each[0] > last
            assert {each[0] >> 12 & 1023, each[-1] >> 12 & 1023} == {ids.node}
            assert each[0] >> 22 == each[-1] >> 22
            last = each[-1]
    changes = kept.changes()
    ids.put(changes)
    kept.write(changes, sync=False)
