"""Tables on a RocksDB of their own, statements for them, and a router that remembers what it was told."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any, cast

import pyarrow as pa

from llog.cdc.changes import Change, FewRows, table_of
from llog.cdc.events import Op
from llog.cdc.router import Router
from llog.engines.rocksdb.keys import COUNTERS
from llog.engines.rocksdb.logs import RocksLogs, StagedWrites
from llog.engines.rocksdb.store import RocksStore
from llog.sql.parse.statements import TableStatement
from llog.sql.tables.tables import Tables
from llog.sql.tables.transactions import ExecuteResult, TableSession
from llog.sql.workers.duckdb_server import DuckDBOptions
from tests.unit.world import ManualRuntime

_TARGET = re.compile(
    r"\s*(CREATE TABLE|DROP TABLE|INSERT|UPDATE|DELETE)\s+(?:IF (?:NOT )?EXISTS\s+)?"
    r"(?:OR \w+\s+)?(?:INTO\s+|FROM\s+)?(?:IF (?:NOT )?EXISTS\s+)?([\w.]+)",
    re.IGNORECASE,
)
_READ = re.compile(r"(?:FROM|JOIN|USING)\s+(app\.\w+)", re.IGNORECASE)


class RecordingRouter:
    """Every change has a route. What is added is put in the WriteBatch, too, so that a test can tell whether it was
    written.
    """

    def __init__(self) -> None:
        self.told: list[Change] = []
        self.old = True
        self.error: Exception | None = None

    def has_routes(self, table: str, op: Op) -> bool:
        return table != "app.quiet"

    def needs_old(self, table: str) -> bool:
        return self.old

    def add(self, staged: StagedWrites, changes: Sequence[Change]) -> bool:
        staged.changes.put(COUNTERS, b"told", b"%d" % len(changes))
        if self.error is not None:
            raise self.error
        self.told += changes
        return False


def statement(sql: str, **given: Any) -> TableStatement:
    """As the grammar makes it of SQL whose tables are written `app.name`."""
    found = _TARGET.match(sql)
    kind, target = (found[1].upper(), found[2]) if found else ("SELECT", None)
    tables = dict.fromkeys(each for each in _READ.findall(sql) if each != "app.nowhere")
    numbers = count(1)
    sql = re.sub(r"\?", lambda _: f"${next(numbers)}", sql)
    given.setdefault("conflict", bool(re.search(r"ON CONFLICT|INSERT OR ", sql, re.IGNORECASE)))
    given.setdefault("returning", bool(re.search(r"\bRETURNING\b", sql, re.IGNORECASE)))
    given.setdefault("if_exists", bool(re.search(r"IF (NOT )?EXISTS", sql, re.IGNORECASE)))
    return TableStatement(kind=kind, sql=sql, target=target, tables=tuple(tables), **given)


class World:
    def __init__(self, directory: Path, *, recording: bool = True, options: DuckDBOptions | None = None) -> None:
        self.directory = directory
        self.recording = recording
        self.options = options
        self.runtime = ManualRuntime()
        self.open()

    def open(self) -> None:
        self.store = RocksStore.open(self.directory)
        self.logs = RocksLogs(self.store, self.runtime)
        self.router = RecordingRouter()
        self.tables = Tables(
            self.store,
            self.logs,
            self.runtime,
            options=self.options,
            lock_timeout_s=0.05,
            router=cast(Router, self.router) if self.recording else None,
        )
        self.session = self.tables.session("first")

    def close(self) -> None:
        self.session.close()
        self.tables.close()
        self.store.close()

    def reopen(self) -> None:
        self.close()
        self.open()

    def create(self, sql: str) -> bool:
        return self.tables.create(statement(sql))

    def run(self, sql: str, params: Any = None, session: TableSession | None = None, **given: Any) -> ExecuteResult:
        return self.tables.execute(session or self.session, statement(sql, **given), params)

    def values(self, table: str, *rows: tuple[Any, ...], columns: tuple[str, ...] = ()) -> ExecuteResult:
        """INSERT of plain values."""
        width = len(rows[0])
        listed = f" ({', '.join(columns)})" if columns else ""
        places = ", ".join(f"({', '.join('?' * width)})" for _ in rows)
        return self.run(
            f"INSERT INTO {table}{listed} VALUES {places}",
            [v for row in rows for v in row],
            values=rows,
            columns=columns,
        )

    def rows(self, sql: str, params: Any = None, session: TableSession | None = None) -> list[tuple[Any, ...]]:
        found = self.select(sql, params, session)
        return list(zip(*(column.to_pylist() for column in found.columns), strict=True))

    def select(self, sql: str, params: Any = None, session: TableSession | None = None, **extra: pa.Table) -> pa.Table:
        return self.tables.select(session or self.session, statement(sql), params, extra)


def told(world: World) -> list[tuple[Op, list[tuple[Any, ...]], list[tuple[Any, ...]] | None]]:
    """What the router was told, once."""

    def tuples(rows: pa.Table | FewRows) -> list[tuple[Any, ...]]:
        return [tuple(row.values()) for row in table_of(rows).to_pylist()]

    found = [(each.op, tuples(each.rows), None if each.old is None else tuples(each.old)) for each in world.router.told]
    world.router.told.clear()
    return found


def everything(world: World) -> list[tuple[Any, ...]]:
    """The table in the mirror, which must be what RocksDB has."""
    shown = world.rows("SELECT * FROM app.m ORDER BY ALL")
    kept = [row for page in world.tables._tables.pages(world.tables.definition("app.m")) for row in page.to_pylist()]
    assert sorted((tuple(row.values()) for row in kept), key=repr) == sorted(shown, key=repr)
    return shown
