"""What a power cut leaves of the records of groups in RocksDB, where claims are not synced."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from llog.engines.rocksdb.store import Changes, RocksStore
from llog.groups.store import RocksGroupStore
from tests.unit.groups.groups_room import VISIBILITY_MS, Room
from tests.unit.world import TP, World


class Cuts:
    """Every state in which a power cut could leave a RocksDB now: as of its last synced write, or of one since then."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._directory = directory
        self._patch = monkeypatch
        self._copies: list[Path] = []
        real = RocksStore.write

        def write(store: RocksStore, changes: Changes, *, sync: bool) -> None:
            real(store, changes, sync=sync)
            copy = directory / f"copy-{uuid.uuid4()}"
            shutil.copytree(store.directory, copy)
            self._copies = [copy] if sync else [*self._copies, copy]

        monkeypatch.setattr(RocksStore, "write", write)

    @contextmanager
    def opened(self) -> Iterator[RocksStore]:
        """In the place that the machine runs from."""
        with closing(RocksStore.open(self._directory / "now")) as store:
            yield store

    def states(self) -> Iterator[RocksStore]:
        """After the machine has started again."""
        self._patch.undo()
        self._patch.setattr("llog.groups.store.boot_id", lambda: "another")
        for copy in self._copies:
            with closing(RocksStore.open(copy)) as store:
                yield store


@pytest.fixture
async def world() -> World:
    made = World()
    await made.catalog.create(TP.topic, 4)
    return made


@pytest.fixture
def cuts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cuts:
    return Cuts(tmp_path, monkeypatch)


async def test_an_ack_drops_no_claim_of_others_that_a_power_cut_has_undone(world: World, cuts: Cuts) -> None:
    with cuts.opened() as store:
        room = Room(world, RocksGroupStore(store, world.runtime))
        group = await room.group()
        await room.fill(20)
        await group.begin(1)
        assert await room.claim("first", 1) == [(1, 1, 1)]
        assert (await group.ack("first", 1)).committed == 2
        assert await room.claim("a", 3) == [(2, 4, 1)]
        assert await room.claim("b", 3) == [(5, 7, 1)]
    positions = []
    for left in cuts.states():
        room = Room(world, RocksGroupStore(left, world.runtime))
        group = await room.group()
        positions.append((await group.ack("b", 7)).committed)
        world.runtime.now += VISIBILITY_MS
        (first, *_) = await room.claim("c", 100)
        assert first[:2] in [(2, 4), (2, 7), (2, 20)]
        assert (await group.ack("c", 20)).committed == 21
    assert positions == [2] * 3


async def test_what_was_not_handed_out_is_not_its_members_again_after_a_power_cut(world: World, cuts: Cuts) -> None:
    with cuts.opened() as store:
        room = Room(world, RocksGroupStore(store, world.runtime))
        group = await room.group()
        await room.fill(9)
        await group.begin(1)
        assert await room.claim("a", 6) == [(1, 6, 1)]
        await group.give_back("a", [(4, 6)])
    for left in cuts.states():
        room = Room(world, RocksGroupStore(left, world.runtime))
        assert await room.claim("a", 100) == [(4, 9, 1)]


async def test_a_group_that_is_restarted_without_a_power_cut_knows_what_it_knew(world: World, tmp_path: Path) -> None:
    with closing(RocksStore.open(tmp_path)) as store:
        room = Room(world, RocksGroupStore(store, world.runtime))
        group = await room.group()
        await room.fill(9)
        await group.begin(1)
        assert await room.claim("a", 3) == [(1, 3, 1)]
        assert await room.claim("b", 2) == [(4, 5, 1)]
    with closing(RocksStore.open(tmp_path)) as store:
        room = Room(world, RocksGroupStore(store, world.runtime))
        group = await room.group()
        assert (await group.ack("b", 7)).committed == 1
        assert (await group.ack("a", 3)).committed == 8, "an ACK may skip what nobody was given"


async def test_positions_that_are_only_acknowledged_go_on_after_a_power_cut(world: World, cuts: Cuts) -> None:
    with cuts.opened() as store:
        room = Room(world, RocksGroupStore(store, world.runtime))
        group = await room.group()
        await room.fill(9)
        await group.ack("a", 3)
    for left in cuts.states():
        group = await Room(world, RocksGroupStore(left, world.runtime)).group()
        assert (await group.ack("a", 7)).committed == 8
