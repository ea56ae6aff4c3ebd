"""Random changes, also within transactions, leave the tables that SQLite has after the same statements."""

from __future__ import annotations

import sqlite3
import tempfile
from itertools import chain
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llog.cdc.changes import table_of
from llog.cdc.events import Op
from llog.errors import ConstraintViolation
from tests.unit.sql.tables_world import World

_KEYS = st.integers(0, 7)
_NUMBERS = st.none() | st.integers(-3, 3)
_TEXTS = st.sampled_from(["", "a", "b", "it's", "☃"])
_NEW = st.tuples(_KEYS, _NUMBERS, _TEXTS)
_TABLES = st.sampled_from(["app.one", "app.two"])

_WHERES = st.sampled_from(
    [
        "id = ?",
        "n > ? OR n IS NULL",
        "id % 3 = ?",
        "length(s) = ?",
        "n = (SELECT max(n) FROM app.one WHERE id <> ?)",
        "id > ?",
    ]
)
_SETS = st.sampled_from(
    [
        "n = n + 1",
        "n = CASE WHEN n IS NULL THEN id ELSE -n END, s = s || 'x'",
        "s = upper(s)",
        "n = (SELECT count(*) FROM app.two)",
        "s = coalesce(s, '') || id",
        "n = NULL",
    ]
)
_CONFLICTS = st.sampled_from(
    ["", " ON CONFLICT (id) DO UPDATE SET n = coalesce(n, 0) + 1, s = excluded.s", " ON CONFLICT (id) DO NOTHING"]
)


@st.composite
def _statements(draw: st.DrawFn) -> tuple[str, list[Any], dict[str, Any]]:
    kind = draw(st.sampled_from(["plain", "insert", "select", "update", "delete", "replace"]))
    table = draw(_TABLES)
    if kind in ("plain", "insert", "replace"):
        rows = draw(st.lists(_NEW, min_size=1, max_size=3))
        places = ", ".join("(?, ?, ?)" for _ in rows)
        flat = [value for row in rows for value in row]
        if kind == "plain":
            return f"INSERT INTO {table} VALUES {places}", flat, {"values": tuple(rows)}
        if kind == "replace":
            return f"INSERT OR REPLACE INTO {table} VALUES {places}", flat, {}
        return f"INSERT INTO {table} VALUES {places}{draw(_CONFLICTS)}", flat, {}
    if kind == "select":
        other = draw(_TABLES)
        where = draw(_WHERES)
        moved = draw(st.sampled_from(["id + 4", "id % 3"]))
        conflict = draw(_CONFLICTS)
        return (
            f"INSERT INTO {table} SELECT {moved}, n, s || '+' FROM {other} WHERE {where} ORDER BY id{conflict}",
            [draw(st.integers(0, 4))],
            {},
        )
    where = draw(_WHERES)
    if kind == "update":
        return f"UPDATE {table} SET {draw(_SETS)} WHERE {where}", [draw(st.integers(0, 4))], {}
    return f"DELETE FROM {table} WHERE {where}", [draw(st.integers(0, 4))], {}


@st.composite
def _transactions(draw: st.DrawFn) -> list[Any]:
    within = st.sampled_from(["look", "reset"]) | _statements() | _statements() | _statements()
    before = draw(st.sampled_from([[], [], ["reset"], ["reopen"]]))
    return [
        *before,
        "begin",
        *draw(st.lists(within, min_size=2, max_size=6)),
        draw(st.sampled_from(["commit", "commit", "rollback"])),
    ]


_FIRST: list[Any] = [
    ("INSERT INTO app.one VALUES (0, 1, 'a'), (1, NULL, 'b'), (2, 2, '')", [], {}),
    ("INSERT INTO app.two VALUES (3, 0, 'c')", [], {}),
]
_ALONE = (st.sampled_from(["reset", "reopen", "look"]) | _statements()).map(lambda step: [step])
_STEPS = st.lists(_transactions() | _transactions() | _ALONE, min_size=1, max_size=8).map(
    lambda blocks: [*_FIRST, *chain.from_iterable(blocks)]
)
_CREATE = "CREATE TABLE {} (id BIGINT PRIMARY KEY, n BIGINT, s VARCHAR NOT NULL)"


class _Both:
    """llog and SQLite, and the table that the events tell of."""

    def __init__(self, directory: Path) -> None:
        self.world = World(directory)
        self.lite = sqlite3.connect(":memory:", isolation_level=None)
        self.lite.execute("ATTACH ':memory:' AS app")
        for table in ("app.one", "app.two"):
            self.lite.execute(_CREATE.format(table))
            self.world.create(_CREATE.format(table))
        self.told: dict[str, dict[int, tuple[Any, ...]]] = {"app.one": {}, "app.two": {}}

    def step(self, step: str | tuple[str, list[Any], dict[str, Any]]) -> None:
        world, inside = self.world, self.world.session.in_transaction
        if isinstance(step, tuple):
            self.change(*step)
        elif step == "begin" and not inside:
            self.lite.execute("BEGIN")
            world.tables.begin(world.session)
        elif step in ("commit", "rollback") and inside:
            self.lite.execute(step.upper())
            (world.tables.commit if step == "commit" else world.tables.rollback)(world.session)
        elif step == "reset":
            world.tables._mirror.reset()
        elif step == "reopen":
            if inside:
                self.lite.execute("ROLLBACK")
            self.hear()
            world.reopen()
        elif step == "look":
            self.compare()

    def change(self, sql: str, params: list[Any], given: dict[str, Any]) -> None:
        world = self.world
        try:
            expected = self.lite.execute(sql, params).rowcount
        except sqlite3.IntegrityError:
            expected = None
        try:
            found = world.run(sql, params, **given).count
        except ConstraintViolation:
            found = None
        assert found == expected, (sql, params)
        if found is None and world.session.in_transaction:
            # a failed statement fails the whole transaction here
            world.tables.rollback(world.session)
            self.lite.execute("ROLLBACK")

    def hear(self) -> None:
        for change in self.world.router.told:
            table = self.told[change.table.name]
            rows = [tuple(row.values()) for row in table_of(change.rows).to_pylist()]
            old = rows if change.op is Op.DELETE else None
            if change.op is Op.UPDATE:
                assert change.old is not None
                old = [tuple(row.values()) for row in change.old.to_pylist()]
            for row in old or []:
                assert table.pop(row[0]) == row
            for row in rows if change.op is not Op.DELETE else []:
                assert row[0] not in table
                table[row[0]] = row
        self.world.router.told.clear()

    def compare(self) -> None:
        for table in ("app.one", "app.two"):
            query = f"SELECT * FROM {table} ORDER BY id"
            assert self.world.rows(query) == self.lite.execute(query).fetchall()

    def finish(self) -> None:
        if self.world.session.in_transaction:
            self.lite.execute("COMMIT")
            self.world.tables.commit(self.world.session)
        self.compare()
        self.hear()
        self.world.reopen()
        self.compare()
        for table, rows in self.told.items():
            assert sorted(rows.values()) == self.lite.execute(f"SELECT * FROM {table} ORDER BY id").fetchall()


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(_STEPS)
def test_random_changes_leave_what_sqlite_has_and_events_tell_all_of_it(steps: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        both = _Both(Path(directory) / "db")
        try:
            for step in steps:
                both.step(step)
            both.finish()
        finally:
            both.world.close()
