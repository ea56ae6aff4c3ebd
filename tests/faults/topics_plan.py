"""Changes of a table that are the same whenever they are planned, and a process that makes them: `python -m
tests.faults.topics_plan`.

Every writer has ids of its own and makes its units one after the other; a unit is there as a whole or not at all. So
the number of a writer's events tells how far it came, and the process goes on from there when it is started again.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate
from typing import Literal, NamedTuple

import pyarrow as pa

import llog
from llog.client import Connection, IntegrityError

SPAN = 100_000
"""Ids of a writer: from its number times this."""
SETUP = """
CREATE TABLE app.rows (id BIGINT PRIMARY KEY, tenant VARCHAR NOT NULL, n BIGINT, s VARCHAR);
CREATE TOPIC app.whole;
CREATE TOPIC app.keys PARTITIONS 3;
CREATE TOPIC app.diffs PARTITIONS 2 WITH (engine = 'object');
ALTER TOPIC app.whole ADD SOURCE app.rows ON INSERT, UPDATE, DELETE WITH (payload = 'full');
ALTER TOPIC app.keys ADD SOURCE app.rows ON INSERT, UPDATE, DELETE WHERE n % 3 = 0 PARTITION BY (tenant) WITH (payload = 'key');
ALTER TOPIC app.diffs ADD SOURCE app.rows ON INSERT, UPDATE, DELETE WITH (payload = 'diff');
"""  # noqa: E501

_INSERT = "INSERT INTO app.rows VALUES (?, ?, ?, ?)"
_LIVE_MAX = 400


class Row(NamedTuple):
    id: int
    tenant: str
    n: int | None
    s: str | None


class Change(NamedTuple):
    op: str
    row: Row
    """As it is after the change; a deleted one as it was."""


class Statement(NamedTuple):
    how: Literal["execute", "many", "arrow", "refused"]
    sql: str
    params: list[tuple[object, ...]]
    chunks: tuple[tuple[Change, ...], ...]
    """The changes; those of one chunk come in any order."""


class Unit(NamedTuple):
    end: Literal["alone", "commit", "rollback"]
    statements: tuple[Statement, ...]

    @property
    def chunks(self) -> list[tuple[Change, ...]]:
        """Of the changes that stay."""
        if self.end == "rollback":
            return []
        return [chunk for statement in self.statements for chunk in statement.chunks]

    @property
    def size(self) -> int:
        """How many changes stay."""
        return sum(len(chunk) for chunk in self.chunks)


def plan(seed: int, writer: int, changes: int) -> list[Unit]:
    """Units that make at least so many changes."""
    planner = _Planner(random.Random(f"{seed}/{writer}"), writer * SPAN)
    units: list[Unit] = []
    count = 0
    while count < changes:
        units.append(planner.unit())
        count += units[-1].size
    return units


def ends(units: list[Unit]) -> list[int]:
    """How many changes there are after no unit, after the first, and so on."""
    return [0, *accumulate(unit.size for unit in units)]


class _Planner:
    def __init__(self, rng: random.Random, first: int) -> None:
        self._rng = rng
        self._next = first
        self._rows: dict[int, Row] = {}

    def unit(self) -> Unit:
        chosen = self._rng.random()
        if chosen < 0.04 and self._rows:
            return Unit("alone", (self._refused(),))
        if chosen < 0.75:
            return Unit("alone", (self._statement(),))
        before = dict(self._rows)
        statements = [self._statement() for _ in range(self._rng.randint(2, 4))]
        if chosen < 0.92:
            return Unit("commit", tuple(statements))
        if self._rows and self._rng.random() < 0.5:
            statements.append(self._refused())
        self._rows = before
        return Unit("rollback", tuple(statements))

    def _statement(self) -> Statement:
        rng = self._rng
        kinds = ["insert", "insert", "upsert", "update", "updates", "range", "range", "delete", "deletes"]
        kind = rng.choice(kinds if self._rows else ["insert"])
        if len(self._rows) > _LIVE_MAX and "insert" in kind:
            kind = "deletes"
        match kind:
            case "insert":
                return self._insert()
            case "upsert":
                return self._upsert()
            case "update":
                return self._updates("execute", 1)
            case "updates":
                return self._updates("many", rng.randint(2, 3))
            case "range":
                low, high = self._range(rng.randint(1, 60))
                changed = tuple(
                    self._put("UPDATE", row._replace(n=None if row.n is None else row.n + 1, s=f"{row.s or ''}+"[-40:]))
                    for row in self._between(low, high)
                )
                sql = "UPDATE app.rows SET n = n + 1, s = right(coalesce(s, '') || '+', 40) WHERE id BETWEEN ? AND ?"
                return Statement("execute", sql, [(low, high)], (changed,))
            case _:
                low, high = self._range(1 if kind == "delete" else 40)
                gone = tuple(Change("DELETE", self._rows.pop(row.id)) for row in self._between(low, high))
                return Statement("execute", "DELETE FROM app.rows WHERE id BETWEEN ? AND ?", [(low, high)], (gone,))

    def _insert(self) -> Statement:
        how = self._rng.choice(["execute", "many", "arrow"])
        count = 1 if how == "execute" else self._rng.randint(2, 60)
        rows = [self._new() for _ in range(count)]
        inserted = tuple(self._put("INSERT", row) for row in rows)
        chunks = tuple((change,) for change in inserted)  # in the order in which they were given
        return Statement(
            "arrow" if how == "arrow" else "many" if how == "many" else "execute", _INSERT, [*rows], chunks
        )

    def _upsert(self) -> Statement:
        rng = self._rng
        there = [self._any()._replace(n=self._n(), s=self._s()), self._new(), self._new()]
        sql = (
            "INSERT INTO app.rows VALUES (?, ?, ?, ?), (?, ?, ?, ?), (?, ?, ?, ?) "
            "ON CONFLICT (id) DO UPDATE SET n = excluded.n, s = excluded.s"
        )
        rng.shuffle(there)
        changes = tuple(self._put("UPDATE" if row.id in self._rows else "INSERT", row) for row in there)
        return Statement("execute", sql, [tuple(value for row in there for value in row)], (changes,))

    def _updates(self, how: Literal["execute", "many"], count: int) -> Statement:
        rows = [self._any()._replace(n=self._n(), s=self._s()) for _ in range(count)]
        chunks = tuple((self._put("UPDATE", row),) for row in rows)
        return Statement(
            how, "UPDATE app.rows SET n = ?, s = ? WHERE id = ?", [(row.n, row.s, row.id) for row in rows], chunks
        )

    def _refused(self) -> Statement:
        """The last row is there already, so that none of them is inserted."""
        rows = [self._any()._replace(id=self._next + 1), self._any()]
        return Statement("refused", _INSERT, [*rows], ())

    def _put(self, op: str, row: Row) -> Change:
        self._rows[row.id] = row
        return Change(op, row)

    def _new(self) -> Row:
        self._next += self._rng.randint(1, 2)
        return Row(self._next, self._rng.choice(["ann", "bob", "cyd", "dan", "eve"]), self._n(), self._s())

    def _any(self) -> Row:
        return self._rows[self._rng.choice(list(self._rows))]

    def _range(self, width: int) -> tuple[int, int]:
        low = self._any().id
        return low, low + width - 1

    def _between(self, low: int, high: int) -> list[Row]:
        return [self._rows[each] for each in range(low, high + 1) if each in self._rows]

    def _n(self) -> int | None:
        choices: list[int | None] = [None, *range(-3, 9)]
        return self._rng.choice(choices)

    def _s(self) -> str | None:
        return self._rng.choice([None, "", "it's", 'a "quote"', "☃", "x" * self._rng.randint(1, 200)])


def make(connection: Connection, unit: Unit) -> None:
    """Returns when the unit is there, or, if it is to leave nothing, when it has failed as it should."""
    if unit.end == "alone":
        _run(connection, unit.statements[0])
        return
    connection.begin()
    for statement in unit.statements:
        _run(connection, statement)
    if unit.end == "commit":
        connection.commit()
    else:
        connection.execute("ROLLBACK")


def _run(connection: Connection, statement: Statement) -> None:
    match statement.how:
        case "execute":
            changed = connection.execute(statement.sql, statement.params[0]).rowcount
        case "many":
            changed = connection.executemany(statement.sql, statement.params).rowcount
        case "arrow":
            columns = [list(column) for column in zip(*statement.params, strict=True)]
            kinds = [pa.int64(), pa.string(), pa.int64(), pa.string()]
            arrays = [pa.array(column, kind) for column, kind in zip(columns, kinds, strict=True)]
            changed = connection.insert("app.rows", pa.table(arrays, names=[*Row._fields]))
        case "refused":
            try:
                connection.executemany(statement.sql, statement.params)
            except IntegrityError:
                return
            raise AssertionError(f"{statement} was not refused")
    expected = sum(len(chunk) for chunk in statement.chunks)
    assert changed == expected, (statement, changed)


def _made(connection: Connection) -> dict[int, int]:
    """How many events each writer has."""
    sql = f"SELECT CAST(key AS BIGINT) // {SPAN} AS writer, count(*) FROM TOPIC app.whole GROUP BY 1"
    return dict(connection.execute(sql).fetchall())


def _write(connection: Connection, writer: int, units: Iterator[tuple[int, Unit]]) -> None:
    for number, unit in units:
        make(connection, unit)
        os.write(1, b"%d %d\n" % (writer, number + 1))


def main(directory: str, seed: int, writers: int, changes: int) -> None:
    """Tells how many changes there are at the start, then each unit that was acknowledged; at the end it waits to be
    killed.
    """
    connections = [llog.connect(data_dir=directory) for _ in range(writers)]
    made = _made(connections[0])
    threads = []
    for writer, connection in enumerate(connections):
        units, there = plan(seed, writer, changes), made.get(writer, 0)
        start = bisect_left(ends(units), there)
        if ends(units)[start] != there:
            os.write(1, b"half %d %d\n" % (writer, there))
            os._exit(3)
        os.write(1, b"from %d %d\n" % (writer, there))
        rest = iter([*enumerate(units)][start:])
        threads.append(threading.Thread(target=_write, args=(connection, writer, rest), daemon=True))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.write(1, b"end\n")
    signal.pause()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]))
