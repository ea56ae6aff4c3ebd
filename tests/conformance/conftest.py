"""Stores of one PostgreSQL schema, which each test has for itself."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from uuid import uuid4

import pytest

from devtools.servers.postgres import PostgresServer
from llog.stores.postgres.address import PostgresAddress
from llog.stores.postgres.store import PostgresMetaStore

Open = Callable[[], PostgresMetaStore]


@pytest.fixture
def server(postgres: PostgresServer) -> PostgresServer:
    """The server that all share; a module whose tests stop theirs has its own fixture of this name."""
    return postgres


@pytest.fixture
def schema() -> str:
    return f"s_{uuid4().hex}"


@pytest.fixture
async def open_store(server: PostgresServer, schema: str) -> AsyncIterator[Open]:
    """Opens as many stores of the schema as a test wants."""
    opened: list[PostgresMetaStore] = []

    def open_one() -> PostgresMetaStore:
        address = PostgresAddress.parse(server.url(schema))
        opened.append(PostgresMetaStore(address, password=server.password, session_timeout_ms=60_000))
        return opened[-1]

    yield open_one
    for store in opened:
        await store.close()
