"""What bounds statements: memory and time, of queries, of long texts and of routes' expressions; and the processes that
they run in.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest

from llog.config import Settings
from llog.errors import SqlError, SqlMemoryExceeded, SqlWorkerEnded, StatementTimeout
from llog.log.opening import opened_log
from llog.sql.database import Database
from llog.sql.json_values import json_rows
from llog.sql.session import DatabaseSession
from llog.sql.workers.process import call_in_worker, zygote

ENDLESS = "levenshtein(repeat('a', 60000), repeat('b', 60000))"
"""Many seconds in one call, which DuckDB does not interrupt."""
LARGE = "len(list_sort(range(10000000)))"
"""Hundreds of MiB that DuckDB does not count."""
SMALL_MEMORY = 64 << 20


class World:
    def __init__(self, database: Database) -> None:
        self.database = database
        self.session = database.session()
        self.execute = self.session.execute

    async def rows(self, text: str, params: Any = ()) -> list[tuple[Any, ...]]:
        table = (await self.execute(text, params))[-1].table
        assert table is not None
        return list(json_rows(table))

    async def timed_out(self, text: str, session: DatabaseSession | None = None) -> None:
        """This statement has little time. All others have more, since a machine may be slow."""
        threads = self.database.threads
        usual, threads.timeout_ms = threads.timeout_ms, 500
        with pytest.raises(StatementTimeout, match=r"500ms .*LLOG_SQL_TIMEOUT_MS"):
            await (session or self.session).execute(text)
        threads.timeout_ms = usual


@asynccontextmanager
async def opened(directory: Path, **settings: Any) -> AsyncIterator[World]:
    given = Settings(data_dir=str(directory), **settings)
    async with opened_log(given) as log:
        database = Database(log, given)
        world = World(database)
        await world.execute("CREATE TABLE t (id BIGINT PRIMARY KEY, v VARCHAR)")
        yield world
        await world.session.close()
        await database.close()


async def test_memory_that_duckdb_does_not_count_is_bounded_too(tmp_path: Path) -> None:
    async with opened(tmp_path, sql_memory_max_bytes=SMALL_MEMORY) as world:
        for text in (f"SELECT {LARGE}", f"SELECT {LARGE} FROM (SELECT count(*) FROM t)"):
            with pytest.raises(SqlMemoryExceeded) as caught:
                await world.execute(text)
            assert caught.value.code == "sql_memory"
            assert "LLOG_SQL_MEMORY_MAX_BYTES" in caught.value.hint
        await world.execute("INSERT INTO t VALUES (1, 'a')")
        assert await world.rows("SELECT * FROM t") == [(1, "a")]


async def test_memory_for_reading_a_long_text_is_bounded(tmp_path: Path) -> None:
    text = f"SELECT 1 IN ({','.join(['1111111'] * 120_000)})"
    async with opened(tmp_path, sql_memory_max_bytes=SMALL_MEMORY) as world:
        with pytest.raises(SqlMemoryExceeded) as caught:
            await world.execute(text)
        assert "LLOG_SQL_MEMORY_MAX_BYTES" in caught.value.hint


def test_a_parser_that_aborts_is_out_of_memory() -> None:
    """Python aborts if it runs out of memory while it handles a MemoryError."""
    with pytest.raises(SqlMemoryExceeded):
        call_in_worker(os.abort, memory_max_bytes=SMALL_MEMORY)


def test_a_parser_that_is_killed_has_ended() -> None:
    with pytest.raises(SqlWorkerEnded):
        call_in_worker(signal.raise_signal, signal.SIGKILL, memory_max_bytes=SMALL_MEMORY)


@pytest.mark.parametrize("source", ["", " FROM t"])
async def test_a_statement_that_nothing_interrupts_ends_when_its_time_is_over(tmp_path: Path, source: str) -> None:
    async with opened(tmp_path) as world:
        await world.execute("INSERT INTO t VALUES (1, 'a')")
        await world.timed_out(f"SELECT {ENDLESS}{source}")
        assert await world.rows("SELECT * FROM t") == [(1, "a")]


async def test_a_long_text_is_not_read_for_longer_than_statements_may_run(tmp_path: Path) -> None:
    values = ",".join(f"{number:015}" for number in range(120_000))
    async with opened(tmp_path) as world:
        await world.timed_out(f"SELECT 1 IN ({values})")


async def test_a_long_statement_does_what_a_short_one_does(tmp_path: Path) -> None:
    values = ",".join(map(str, range(20_000)))
    async with opened(tmp_path) as world:
        await world.execute(f"INSERT INTO t SELECT x, 'a' FROM range(3) r(x) WHERE x IN ({values})")
        await world.execute(f"UPDATE t SET v = 'b' WHERE id > 0 AND id IN ({values})")
        assert await world.rows("SELECT * FROM t ORDER BY id") == [(0, "a"), (1, "b"), (2, "b")]
        with pytest.raises(SqlError) as caught:
            await world.execute(f"SELECT *\nFROM t\nWHERE idd IN ({values})")
        assert (caught.value.line, caught.value.column) == (3, 7)
        with pytest.raises(SqlError) as caught:
            await world.execute(f"SELECT *\nFORM t WHERE id IN ({values})")
        assert caught.value.line == 2


async def test_the_expression_of_a_route_is_bounded_in_time(tmp_path: Path) -> None:
    async with opened(tmp_path) as world:
        where = "levenshtein(repeat('a', id::INTEGER), repeat('b', id::INTEGER)) >= 0"
        await world.execute(f"CREATE TOPIC x; ALTER TOPIC x ADD SOURCE t ON INSERT WHERE {where}")
        await world.timed_out("INSERT INTO t VALUES (60000, 'a')")
        assert await world.rows("SELECT count(*) FROM t") == [(0,)]
        await world.execute("INSERT INTO t VALUES (6, 'a')")
        assert await world.rows("SELECT count(*) FROM TOPIC x") == [(1,)]


async def test_the_expression_of_a_route_is_bounded_in_memory(tmp_path: Path) -> None:
    async with opened(tmp_path, sql_memory_max_bytes=SMALL_MEMORY) as world:
        await world.execute("CREATE TOPIC x; ALTER TOPIC x ADD SOURCE t ON INSERT WHERE len(repeat('x', id)) > 0")
        with pytest.raises(SqlMemoryExceeded):
            await world.execute("INSERT INTO t VALUES (300000000, 'a')")
        assert await world.rows("SELECT count(*) FROM t") == [(0,)]
        await world.execute("INSERT INTO t VALUES (6, 'a')")
        assert await world.rows("SELECT count(*) FROM TOPIC x") == [(1,)]


async def test_the_expression_of_a_route_is_bounded_in_length(tmp_path: Path) -> None:
    async with opened(tmp_path) as world:
        await world.execute("CREATE TOPIC x")
        with pytest.raises(SqlError, match="10,000 are allowed"):
            await world.execute(f"ALTER TOPIC x ADD SOURCE t ON INSERT WHERE id IN ({'1,' * 5000}1)")


async def test_a_transaction_outlives_the_process_that_another_statement_cost(tmp_path: Path) -> None:
    async with opened(tmp_path) as world:
        other = world.database.session()
        await world.execute("INSERT INTO t VALUES (1, 'a'), (2, 'b')")
        await world.execute("BEGIN")
        await world.execute("UPDATE t SET v = 'c' WHERE id = 1")
        await world.timed_out(f"SELECT {ENDLESS} FROM t", other)
        await world.execute("DELETE FROM t WHERE id = 2")
        await world.execute("COMMIT")
        await other.close()
        assert await world.rows("SELECT * FROM t") == [(1, "c")]


def workers() -> set[int]:
    """The processes that were forked from the zygote of this one."""
    running = zygote._running
    if running is None:
        return set()
    return {int(each) for each in Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()}


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_process_that_dies_fails_what_it_ran_and_is_replaced(tmp_path: Path) -> None:
    others = workers()
    async with opened(tmp_path) as world:
        await world.execute("INSERT INTO t VALUES (1, 'a')")
        [worker] = workers() - others
        running = asyncio.ensure_future(world.execute(f"SELECT {ENDLESS} FROM t"))
        await until(lambda: _ticks(worker) > 100)
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(SqlWorkerEnded) as caught:
            await running
        assert caught.value.code == "sql_worker_ended"
        assert "LLOG_SQL_MEMORY_MAX_BYTES" in caught.value.hint
        assert await world.rows("SELECT * FROM t") == [(1, "a")]
        await until(lambda: len(workers() - others) == 1)
        [worker] = workers() - others
        os.kill(worker, signal.SIGKILL)
        mirror = (await world.database.require_tables()).tables._mirror
        await until(lambda: mirror._client.has_ended)
        assert await world.rows("SELECT * FROM t") == [(1, "a")]
    await until(lambda: workers() == others)


def _ticks(pid: int) -> int:
    """Of the processor's time that a process has had, 100 in a second; negative when it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return -1
    return -1 if fields[0] == "Z" else int(fields[11])


async def test_values_of_classes_that_only_this_process_has_are_taken(tmp_path: Path) -> None:
    class Colour(StrEnum):
        RED = "red"

    async with opened(tmp_path) as world:
        given = [1, Colour.RED, memoryview(b"x"), [Colour.RED]]
        found = await world.rows("SELECT ?, ? || '!', ?, ?", given)
        assert found == [(1, "red!", "x", ["red"])]


_EMBEDDED = """
import os, sys
from pathlib import Path
import llog
def children(pid):
    return [int(each) for task in Path(f"/proc/{pid}/task").iterdir() for each in (task / "children").read_text().split()]
with llog.connect(data_dir=sys.argv[1]) as connection:
    connection.execute("CREATE TABLE t (id BIGINT PRIMARY KEY)")
    assert connection.execute("SELECT count(*) FROM t").fetchone() == (0,)
    zygotes = children(os.getpid())
    print(*zygotes, *(worker for each in zygotes for worker in children(each)), flush=True)
    if sys.argv[2] == "dies":
        os.kill(os.getpid(), 9)
print(*children(os.getpid()), flush=True)
"""  # noqa: E501


@pytest.mark.parametrize("how", ["closes", "dies"])
def test_no_process_outlives_the_connection_or_its_owner(tmp_path: Path, how: str) -> None:
    script = [sys.executable, "-c", _EMBEDDED, str(tmp_path / "log"), how]
    done = subprocess.run(script, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == (0 if how == "closes" else -signal.SIGKILL), done.stderr
    first, *after = done.stdout.splitlines()
    pids = [int(each) for each in first.split()]
    assert len(pids) == 2
    assert after == ([""] if how == "closes" else [])
    deadline = time.monotonic() + 60
    while any(_ticks(pid) >= 0 for pid in pids):
        assert time.monotonic() < deadline, pids
        time.sleep(0.02)
