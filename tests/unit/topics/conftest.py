"""Consumer groups, with their records in either store."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from llog.rocks.store import RocksStore
from llog.topics.group_stores import MetaGroups, RocksGroups
from tests.unit.partition.world import TP, World
from tests.unit.topics.groups_room import Room


@pytest.fixture(params=["meta", "rocksdb"])
async def room(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Room]:
    world = World()
    await world.catalog.create(TP.topic, 4)
    if request.param == "meta":
        yield Room(world, MetaGroups(world.meta))
        return
    store = RocksStore.open(tmp_path)
    yield Room(world, RocksGroups(store, world.runtime))
    store.close()
