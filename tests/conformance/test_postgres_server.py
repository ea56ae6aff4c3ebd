"""The server that other suites rely on."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import ExitStack

import asyncpg
import psutil
import pytest

from devtools.servers.postgres import PostgresServer, postgres_server
from devtools.servers.weed import ServerError
from tests.conftest import unavailable


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with ExitStack() as stack:
        try:
            opened = stack.enter_context(postgres_server())
        except ServerError as error:
            unavailable(str(error))
        yield opened


async def connect(server: PostgresServer, password: str) -> asyncpg.Connection:
    return await asyncpg.connect(
        host=server.host, port=server.port, user=server.user, database=server.database, password=password, timeout=60
    )


async def test_it_asks_for_the_password(server: PostgresServer) -> None:
    with pytest.raises(asyncpg.InvalidPasswordError):
        await connect(server, "wrong")
    connection = await connect(server, server.password)
    assert await connection.fetchval("SELECT current_database()") == server.database
    await connection.close()


def test_data_survives_a_restart_and_a_kill(server: PostgresServer) -> None:
    server.sql("CREATE TABLE kept (n int); INSERT INTO kept VALUES (1)")
    server.restart()
    server.sql("INSERT INTO kept VALUES (2)")
    server.kill()
    with pytest.raises(ServerError):
        server.sql("SELECT 1")
    server.start()
    assert server.sql("SELECT sum(n) FROM kept") == "3"


async def test_a_paused_server_answers_when_it_is_resumed(server: PostgresServer) -> None:
    connection = await connect(server, server.password)
    server.pause()
    try:
        answer = asyncio.ensure_future(connection.fetchval("SELECT 1"))
        done, _ = await asyncio.wait([answer], timeout=0.5)
        assert not done
    finally:
        server.resume()
    assert await answer == 1
    await connection.close()


def test_no_process_is_left_and_no_file() -> None:
    with postgres_server() as server:
        processes = server._processes()
        assert processes
        assert os.geteuid() != 0 or not any(map(_runs_as_root, processes))
        server.pause()
    assert not [process for process in processes if process.is_running()]
    assert not server.directory.exists()


def _runs_as_root(process: psutil.Process) -> bool:
    try:
        return bool(process.uids().effective == 0)
    except psutil.NoSuchProcess:  # the server's own short-lived workers come and go
        return False
