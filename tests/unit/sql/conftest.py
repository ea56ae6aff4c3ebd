"""Tables with one that is there already."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.sql.tables_world import World


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path / "db")
    made.create("CREATE TABLE app.m (id BIGINT PRIMARY KEY, name VARCHAR NOT NULL DEFAULT 'anon', n INTEGER)")
    yield made
    made.close()
