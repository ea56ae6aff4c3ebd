from __future__ import annotations

import pytest

from tests.unit.world import TP, World


@pytest.fixture
async def world() -> World:
    """A log with the topic `orders` of four partitions, on stores in memory."""
    world = World()
    await world.catalog.create(TP.topic, 4)
    return world
