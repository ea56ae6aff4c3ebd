"""A RocksDB whose files are damaged: iterators end there without a word, and must not be taken at it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from llog.engines.rocksdb.keys import LOGS, record_key
from llog.errors import CorruptBatch
from tests.unit.engines.rocksdb.tools import World, damage

RECORDS = 3000


@pytest.fixture
def damaged(tmp_path: Path) -> World:
    """A world of which one block in the middle, of some ten records, is damaged."""
    world = World(tmp_path / "rocksdb")
    random_bytes = random.Random(7).randbytes
    world.append(*(random_bytes(300) for _ in range(RECORDS)))
    world.reopen()  # which moves the records from the write-ahead log to a file
    world.close()
    damage(world.directory)
    world.open()
    return world


def test_all_before_and_behind_the_damage_can_be_read_and_the_rest_is_told(damaged: World) -> None:
    logs, lost = damaged.logs, []
    offset = 1
    while offset <= RECORDS:
        try:
            runs = logs.read("t", 0, offset, 1 << 20)
        except CorruptBatch:
            lost.append(offset)
            offset += 1
            continue
        assert runs[0][0] == offset
        offset = runs[-1][0] + runs[-1][1].count
    assert 1 <= len(lost) <= 20
    assert RECORDS // 3 < lost[0] < RECORDS * 2 // 3
    for each in lost:
        with pytest.raises(CorruptBatch, match="Restore the directory from a copy"):
            damaged.store.get(LOGS, record_key("t", 0, each))
    damaged.close()


@pytest.mark.parametrize("backwards", [False, True])
def test_a_scan_over_the_damage_fails_and_does_not_end_early(damaged: World, backwards: bool) -> None:
    start, stop = record_key("t", 0, 1), record_key("t", 0, RECORDS + 1)
    with pytest.raises(CorruptBatch):
        damaged.store.items(LOGS, start, stop, backwards=backwards)
    assert len(damaged.store.items(LOGS, start, stop, 10, backwards=backwards)) == 10
    damaged.close()


def test_nothing_is_removed_on_the_word_of_a_damaged_file(damaged: World) -> None:
    with pytest.raises(CorruptBatch):
        damaged.logs.compact("t", 0, delete_retention_ms=0, force=True)
    assert damaged.logs.bounds("t", 0) == (1, RECORDS + 1)
    damaged.close()
