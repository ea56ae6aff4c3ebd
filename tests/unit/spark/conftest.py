from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from llog.spark import process
from tests.spark.logs import LogOnDisk
from tests.unit.world import TP, World


@pytest.fixture
async def world() -> World:
    """A log with the topic `orders` of four partitions, on stores in memory."""
    world = World()
    await world.catalog.create(TP.topic, 4)
    return world


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[LogOnDisk]:
    """A log that the classes Spark calls can open by its address."""
    before = set(process._connections)
    yield LogOnDisk(tmp_path)
    for key in set(process._connections) - before:
        process._connections.pop(key).close()
