"""Consumer groups, with their records in either store."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from llog.engines.rocksdb.store import RocksStore
from llog.groups.store import MetaGroupStore, RocksGroupStore
from tests.unit.groups.groups_room import Room
from tests.unit.world import TP, World


@pytest.fixture(params=["meta", "rocksdb"])
async def room(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Room]:
    world = World()
    await world.catalog.create(TP.topic, 4)
    if request.param == "meta":
        yield Room(world, MetaGroupStore(world.meta))
        return
    store = RocksStore.open(tmp_path)
    yield Room(world, RocksGroupStore(store, world.runtime))
    store.close()
