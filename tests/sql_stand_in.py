"""A database of the same shape as the real one that keeps nothing: DuckDB in memory, and statements that wait or fail
if told to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import duckdb
import pyarrow as pa
import pytest

from llog.cli.sql.script import split
from llog.client import embedded
from llog.config import Settings
from llog.errors import InvalidArgument
from llog.log.log import Log
from llog.sql.result import Names, Result


class StandIn:
    """`sessions` are all that were opened. `WAIT` waits until it is cancelled, after which `cancelled` is set."""

    def __init__(self) -> None:
        self.connection = duckdb.connect()
        self.sessions: list[StandInSession] = []
        self.waiting = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.closed = False

    def session(self, *, member: str | None = None) -> StandInSession:
        self.sessions.append(StandInSession(self, member))
        return self.sessions[-1]

    async def close(self) -> None:
        self.closed = True


def standing_in(monkeypatch: pytest.MonkeyPatch) -> list[StandIn]:
    """For every database that is opened in this process from now on: those that were."""
    made: list[StandIn] = []

    async def open_database(log: Log, settings: Settings) -> StandIn:
        made.append(StandIn())
        return made[-1]

    monkeypatch.setattr(embedded, "open_database", open_database)
    return made


class StandInSession:
    def __init__(self, database: StandIn, member: str | None) -> None:
        self.member = member
        self.in_transaction = False
        self.closed = False
        self._database = database

    async def execute(self, sql: str, params: Sequence[Any] | Mapping[str, Any] = ()) -> list[Result]:
        script = split(sql)
        return [await self._one(each.sql, params) for each in [*script.statements, script.rest] if each is not None]

    async def execute_many(self, sql: str, rows: Sequence[Sequence[Any]]) -> Result:
        self._database.connection.executemany(sql, [list(row) for row in rows])
        return Result("INSERT", None, len(rows))

    async def insert(self, table: str, data: pa.Table) -> Result:
        self._database.connection.register("rows", data)
        self._database.connection.execute(f"INSERT INTO {table} SELECT * FROM rows")
        return Result("INSERT", None, data.num_rows)

    async def names(self) -> Names:
        return Names({"chat.messages": ("id", "text")}, ("app.events",), ("ai",))

    async def close(self) -> None:
        self.closed = True
        self.in_transaction = False

    async def _one(self, sql: str, params: Sequence[Any] | Mapping[str, Any]) -> Result:
        word = sql.split()[0].upper()
        if word in ("BEGIN", "COMMIT", "ROLLBACK"):
            self.in_transaction = word == "BEGIN"
            return Result(word)
        if word == "WAIT":
            self._database.waiting.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self._database.cancelled.set()
                raise
        if word == "FAIL":
            raise InvalidArgument(sql)
        ran = self._database.connection.execute(sql, params)
        if word == "SELECT":
            return Result(word, ran.to_arrow_table())
        return Result(word, None, (ran.fetchone() or [0])[0])
