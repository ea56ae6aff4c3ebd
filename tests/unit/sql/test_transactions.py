"""Transactions over tables: whole or not at all, one at a time, and seen as such."""

from __future__ import annotations

import threading
from pathlib import Path

import pyarrow as pa
import pytest

from llog.cdc.events import Op
from llog.errors import ConstraintViolation, ResultTooLarge, SqlError, TransactionConflict, TransactionFailed
from llog.sql.workers.duckdb_server import DuckDBOptions
from tests.unit.sql.tables_world import World, everything, told


def test_a_transaction_is_written_as_a_whole_in_the_order_of_its_statements(world: World) -> None:
    world.values("app.m", (1, "a", 1))
    told(world)
    other = world.tables.session("other")
    world.tables.begin(world.session)
    world.values("app.m", (2, "b", 2))
    world.run("UPDATE app.m SET n = n + 1")
    world.run("DELETE FROM app.m WHERE id = 1")
    world.run("INSERT INTO app.m VALUES (1, 'again', 0)")
    world.tables.insert(world.session, "app.m", pa.table({"id": [3]}))
    world.run("INSERT INTO app.m VALUES (1, 'up', 0) ON CONFLICT DO UPDATE SET name = excluded.name")
    mine = [(1, "up", 0), (2, "b", 3), (3, "anon", None)]
    assert world.rows("SELECT * FROM app.m ORDER BY id") == mine
    assert world.rows("SELECT * FROM app.m", session=other) == [(1, "a", 1)]
    assert told(world) == []
    world.tables.commit(world.session)
    assert world.rows("SELECT * FROM app.m ORDER BY id", session=other) == mine
    first, second, *rest = told(world)
    assert first == (Op.INSERT, [(2, "b", 2)], None)
    assert (second[0], sorted(second[1]), sorted(second[2] or [])) == (
        Op.UPDATE,
        [(1, "a", 2), (2, "b", 3)],
        [(1, "a", 1), (2, "b", 2)],
    )
    assert rest == [
        (Op.DELETE, [(1, "a", 2)], None),
        (Op.INSERT, [(1, "again", 0)], None),
        (Op.INSERT, [(3, "anon", None)], None),
        (Op.UPDATE, [(1, "up", 0)], [(1, "again", 0)]),
    ]
    assert everything(world) == mine
    world.reopen()
    assert everything(world) == mine


def test_a_rollback_leaves_nothing(world: World) -> None:
    world.values("app.m", (1, "a", 1))
    told(world)
    world.tables.begin(world.session)
    world.run("DELETE FROM app.m")
    world.tables.rollback(world.session)
    world.tables.begin(world.session)
    world.values("app.m", (2, "a", 1))
    world.session.close()
    assert told(world) == []
    assert everything(world) == [(1, "a", 1)]


def test_a_failed_statement_fails_its_transaction(world: World) -> None:
    world.tables.begin(world.session)
    world.values("app.m", (1, "a", 1))
    with pytest.raises(ConstraintViolation):
        world.values("app.m", (1, "a", 1))
    assert world.session.transaction is not None
    assert world.session.transaction.failed
    with pytest.raises(TransactionFailed):
        world.values("app.m", (2, "a", 1))
    with pytest.raises(TransactionFailed):
        world.rows("SELECT 1 FROM app.m")
    with pytest.raises(TransactionFailed):
        world.tables.commit(world.session)
    assert not world.session.in_transaction
    assert told(world) == []
    assert everything(world) == []
    with pytest.raises(SqlError, match="no transaction"):
        world.tables.commit(world.session)


def test_tables_first_used_late_in_a_transaction_are_seen_with_its_changes(world: World) -> None:
    world.create("CREATE TABLE app.late (id BIGINT PRIMARY KEY, v INTEGER)")
    world.create("CREATE TABLE app.later (id BIGINT PRIMARY KEY, v INTEGER)")
    world.values("app.m", (1, "a", 1), (2, "b", 2))
    world.values("app.late", (1, 100))
    world.reopen()
    other = world.tables.session("other")
    world.tables.begin(world.session)
    world.run("UPDATE app.m SET n = n + 1 WHERE id = 1")
    world.run("DELETE FROM app.m WHERE id = 2")
    world.run("INSERT INTO app.m VALUES (3, 'c', 3)")
    world.run("UPDATE app.late SET v = (SELECT sum(n) FROM app.m)")
    assert world.rows("SELECT * FROM app.later", session=other) == []
    world.run("INSERT INTO app.later SELECT id, v FROM app.late")
    world.tables.commit(world.session)
    assert world.rows("SELECT * FROM app.late", session=other) == [(1, 5)]
    assert world.rows("SELECT * FROM app.later", session=other) == [(1, 5)]
    assert everything(world) == [(1, "a", 2), (3, "c", 3)]


def test_a_commit_into_a_mirror_that_was_thrown_away_is_seen(world: World) -> None:
    world.values("app.m", (1, "a", 1))
    other = world.tables.session("other")
    world.tables.begin(world.session)
    world.run("UPDATE app.m SET n = 5")
    world.tables._mirror.reset()
    assert world.rows("SELECT n FROM app.m", session=other) == [(1,)]
    world.run("UPDATE app.m SET name = 'b'")
    world.tables.commit(world.session)
    assert world.rows("SELECT * FROM app.m", session=other) == [(1, "b", 5)]
    assert everything(world) == [(1, "b", 5)]


def test_one_transaction_at_a_time_and_the_error_says_who_waits_for_whom(world: World) -> None:
    other = world.tables.session("other")
    world.tables.begin(world.session)
    world.values("app.m", (1, "a", 1))
    world.runtime.now += 3000
    for change in (
        lambda: world.tables.begin(other),
        lambda: world.run("DELETE FROM app.m", session=other),
        lambda: world.tables.insert(other, "app.m", pa.table({"id": [9]})),
    ):
        with pytest.raises(
            TransactionConflict, match=r"session 'other' waited.*session 'first' has been doing so for 3\.0 s"
        ):
            change()
    assert world.rows("SELECT * FROM app.m", session=other) == []
    with pytest.raises(SqlError, match="open already"):
        world.tables.begin(world.session)
    world.tables.commit(world.session)
    assert world.run("DELETE FROM app.m", session=other).count == 1


def test_a_transaction_of_too_many_rows_is_refused(tmp_path: Path) -> None:
    world = World(tmp_path / "db", options=DuckDBOptions(max_rows=100))
    world.create("CREATE TABLE app.m (id BIGINT PRIMARY KEY)")
    world.tables.begin(world.session)
    world.run("INSERT INTO app.m SELECT * FROM range(100)")
    with pytest.raises(ResultTooLarge, match="fewer at a time"):
        world.run("INSERT INTO app.m VALUES (1000)")
    world.tables.rollback(world.session)
    assert world.rows("SELECT count(*) FROM app.m") == [(0,)]
    world.close()


def test_readers_and_writers_beside_each_other_see_whole_transactions(world: World) -> None:
    world.values("app.m", (0, "sum", 0))
    stop = threading.Event()
    problems: list[object] = []

    def read() -> None:
        session = world.tables.session("reader")
        while not stop.is_set():
            try:
                [(rows, total)] = world.rows(
                    "SELECT count(*) FILTER (id > 0), max(n) FILTER (id = 0) FROM app.m", session=session
                )
                if rows != total:
                    problems.append((rows, total))
            except Exception as error:
                problems.append(error)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for number in range(1, 16):
            world.tables.begin(world.session)
            world.values("app.m", (number, "row", number))
            world.run("UPDATE app.m SET n = n + 1 WHERE id = 0")
            world.tables.commit(world.session)
            if number % 5 == 0:
                world.tables._mirror.reset()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert problems == []
    assert len(everything(world)) == 16
