"""Changes of tables: what is written, what is told to the router, and that failures leave nothing behind."""

from __future__ import annotations

import datetime
import decimal
import uuid
from pathlib import Path
from typing import Any, Literal, cast

import duckdb
import pyarrow as pa
import pytest

from llog.cdc.events import Op
from llog.cdc.routes import Route
from llog.engines.rocksdb.keys import COUNTERS
from llog.errors import ConstraintViolation, LlogError, SqlError, StoreUnavailable, TableNotFound
from llog.sql.workers.duckdb_client import DuckDBCursor
from tests.unit.sql.tables_world import World, everything, statement, told

_OPS: tuple[Literal["INSERT", "UPDATE", "DELETE"], ...] = ("INSERT", "UPDATE", "DELETE")


def test_plain_values_are_written_and_told_without_duckdb(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(world.tables._mirror, "fetch", None)
        patched.setattr(world.tables._mirror, "catch_up", None)
        assert world.values("app.m", (1, "a", 10), (2, "b", None)).count == 2
        assert world.values("app.m", ("c", 3), columns=("NAME", "id")).count == 1
        assert world.tables.insert(world.session, "app.m", pa.table({"id": [4], "name": ["d"]})) == 1
    assert told(world) == [
        (Op.INSERT, [(1, "a", 10), (2, "b", None)], None),
        (Op.INSERT, [(3, "c", None)], None),
        (Op.INSERT, [(4, "d", None)], None),
    ]
    assert everything(world) == [(1, "a", 10), (2, "b", None), (3, "c", None), (4, "d", None)]


def test_rows_that_were_written_without_duckdb_are_all_read_in_the_end(world: World) -> None:
    for first in (0, 100, 200):
        for number in range(3):
            world.values("app.m", (first + number, f"n{number}", None))
        many = pa.table({"id": range(first + 10, first + 60), "name": ["many"] * 50})
        assert world.tables.insert(world.session, "app.m", many) == 50
    assert len(everything(world)) == 3 * 53
    world.values("app.m", (300, "late", 1))
    assert everything(world)[-1] == (300, "late", 1)


def test_values_of_another_type_are_cast_as_duckdb_casts_them(world: World) -> None:
    world.values("app.m", ("7", 5, 2.5), (8, "x", True))
    assert everything(world) == [(7, "5", 2), (8, "x", 1)]
    for wrong in ("x", 2**40, b"\x00"):
        with pytest.raises(SqlError):
            world.values("app.m", (9, "a", wrong))
    with pytest.raises(SqlError, match="2 values"):
        world.values("app.m", (9, "a"))
    with pytest.raises(SqlError):
        world.values("app.m", (9, "a", 1), (10, "b"))
    with pytest.raises(SqlError):
        world.values("app.m", (9,), columns=("nothing",))
    assert len(everything(world)) == 2


KINDS: list[tuple[str, list[Any]]] = [
    ("BOOLEAN", [True, 1, "true", "maybe"]),
    ("TINYINT", [1, 127, 128, True, 1.5, "12", "x", decimal.Decimal("2.5")]),
    ("UBIGINT", [0, 2**64 - 1, 2**64, -1, "5"]),
    ("HUGEINT", [10**37, 10**38 + 1, 2**127 - 1, 2**127, 1.5]),
    ("REAL", [0.1, 1e300, float("inf"), 1, "1.5"]),
    (
        "DOUBLE",
        [
            0.1,
            1,
            2**60 + 1,
            float("inf"),
            "1e3",
            *map(decimal.Decimal, ("1.1", "-0.3", "12345678901.2345", "1e400", "NaN", "0.1234567890123456789")),
        ],
    ),
    (
        "DECIMAL(5,2)",
        [decimal.Decimal("1.5"), decimal.Decimal("1.005"), decimal.Decimal("1000"), 7, 1.25, "3.14", 10**9],
    ),
    ("VARCHAR", ["", "a\0b", 5, 1.5, b"ab\xff", True, datetime.date(2024, 1, 2), decimal.Decimal("1.50")]),
    ("BLOB", [b"\0\xff", "abc", "\\xAA", "é"]),
    (
        "DATE",
        [datetime.date(2024, 2, 29), datetime.datetime(2024, 1, 1, 12), "2024-02-29", "2024-02-30", "2024-1-1", 5],
    ),
    ("TIME", [datetime.time(1, 2, 3), "01:02:03"]),
    (
        "TIMESTAMP",
        [
            datetime.datetime(2024, 1, 1, 1, 1, 1, 7),
            datetime.datetime(2024, 1, 1, tzinfo=datetime.timezone(datetime.timedelta(hours=2))),
            datetime.date(2024, 1, 1),
            "2024-01-01",
            "2024-01-01T10:00:00",
            "2024-01-01 10:00:00.123456",
            "2024-01-01 10:00:00Z",
            "2024-01-01 10:00:00+02:00",
            "2024-01-01 10:00:00.1234567",
            "2024-01-01 24:00:00",
            "nonsense",
            5,
        ],
    ),
    (
        "TIMESTAMPTZ",
        [
            datetime.datetime(2024, 1, 1),
            datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC),
            "2024-01-01 10:00:00+02:00",
            "2024-01-01 10:00:00",
            "2024-01-01",
        ],
    ),
    ("UUID", [uuid.UUID(int=5), str(uuid.UUID(int=6)).upper(), uuid.UUID(int=7).hex, "x"]),
    ("JSON", ['{"a":1}', "[1, 2]", "{", "", "1", "null", "NaN", '"\\ud800"', "1e999", "[" * 2000 + "]" * 2000]),
    ("INTEGER[]", [[1, None], [], [1.5], ["x"], 5]),
]


@pytest.mark.parametrize(("kind", "values"), KINDS, ids=[kind for kind, _ in KINDS])
def test_plain_values_become_what_duckdb_would_make_of_them(world: World, kind: str, values: list[Any]) -> None:
    world.create(f"CREATE TABLE app.v (id BIGINT PRIMARY KEY, v {kind})")
    world.create(f"CREATE TABLE app.checked (id BIGINT PRIMARY KEY, v {kind}, CHECK (id >= 0))")
    for place, value in enumerate(values):
        failed = []
        for table in ("app.v", "app.checked"):
            try:
                world.values(table, (place, value), (place + 100, None))
            except SqlError:
                failed.append(table)
        assert failed in ([], ["app.v", "app.checked"]), value
    plain, checked = (world.rows(f"SELECT * FROM {table} ORDER BY id") for table in ("app.v", "app.checked"))
    assert repr(plain) == repr(checked)  # NaN differs from itself
    world.reopen()
    assert repr(world.rows("SELECT * FROM app.v ORDER BY id")) == repr(checked)


def test_arrow_columns_that_would_lose_something_are_refused_by_name(world: World) -> None:
    world.create(
        "CREATE TABLE app.v (id BIGINT PRIMARY KEY, s SMALLINT, t TIMESTAMP, f REAL, d DECIMAL(4,1), j JSON, u UUID)"
    )

    def insert(**columns: Any) -> None:
        world.tables.insert(world.session, "app.v", pa.table({"id": [1], **columns}))

    for name, column in {
        "s": pa.array([40_000]),
        "S": pa.array(["x"]),
        "t": pa.array([5]),
        "f": pa.array([1e300]),
        "d": pa.array([decimal.Decimal("1.25")]),
        "j": pa.array(["{"]),
        "u": pa.array(["1"]),
    }.items():
        with pytest.raises(SqlError, match=f"'{name.lower()}' of table 'app.v'"):
            insert(**{name: column})
    with pytest.raises(SqlError, match="no column 'other'"):
        insert(other=pa.array([1]))
    with pytest.raises(SqlError, match="given twice"):
        world.tables.insert(world.session, "app.v", pa.table([pa.array([1])] * 2, ["id", "ID"]))
    with pytest.raises(TableNotFound):
        world.tables.insert(world.session, "app.nothing", pa.table({"id": [1]}))
    assert world.rows("SELECT count(*) FROM app.v") == [(0,)]
    insert(
        s=pa.array([7], pa.int64()),
        t=pa.array([datetime.date(2024, 1, 1)]),
        f=pa.array([float("inf")]),
        d=pa.array([3]),
        j=pa.array(["[]"]).dictionary_encode(),
        u=pa.array([uuid.UUID(int=3).bytes], pa.binary(16)),
    )
    assert world.rows("SELECT s, t, f, d, j, u FROM app.v") == [
        (7, datetime.datetime(2024, 1, 1), float("inf"), decimal.Decimal("3.0"), "[]", str(uuid.UUID(int=3)))
    ]


def test_an_empty_arrow_table_changes_nothing(world: World) -> None:
    assert world.tables.insert(world.session, "app.m", pa.table({"id": pa.array([], pa.int64())})) == 0
    assert told(world) == []


@pytest.mark.parametrize("through_duckdb", [False, True])
def test_rows_that_break_a_rule_leave_nothing_behind(world: World, through_duckdb: bool) -> None:
    world.values("app.m", (1, "a", 1))
    told(world)
    rows: dict[str, list[tuple[Any, ...]]] = {
        "there": [(5, "x", 1), (1, "b", 1)],
        "twice": [(5, "x", 1), (6, "y", 1), (5, "z", 1)],
        "null": [(5, "x", 1), (6, None, 1)],
        "null key": [(None, "x", 1)],
    }

    def insert(*each: tuple[Any, ...]) -> None:
        if through_duckdb:
            places = ", ".join("(?, ?, ?)" for _ in each)
            world.run(f"INSERT INTO app.m VALUES {places}", [value for row in each for value in row])
        else:
            world.values("app.m", *each)

    for each in rows.values():
        with pytest.raises(ConstraintViolation):
            insert(*each)
    with pytest.raises(ConstraintViolation):
        world.run("UPDATE app.m SET name = NULL")
    assert told(world) == []
    assert everything(world) == [(1, "a", 1)]
    world.values("app.m", (5, "fine", 1))


def test_the_error_names_the_key_that_is_there(world: World) -> None:
    world.values("app.m", (1, "a", 1))
    with pytest.raises(ConstraintViolation, match=r"id: 1 is already in table 'app\.m'"):
        world.values("app.m", (2, "a", 1), (1, "a", 1))


def test_unique_columns_are_checked_on_every_way_in(world: World) -> None:
    world.create("CREATE TABLE app.u (id BIGINT PRIMARY KEY, mail VARCHAR UNIQUE)")
    world.values("app.u", (1, "a"))
    with pytest.raises(ConstraintViolation):
        world.values("app.u", (2, "a"))
    with pytest.raises(ConstraintViolation):
        world.tables.insert(world.session, "app.u", pa.table({"id": [2, 3], "mail": ["b", "a"]}))
    world.reopen()
    with pytest.raises(ConstraintViolation):
        world.tables.insert(world.session, "app.u", pa.table({"id": [2], "mail": ["a"]}))
    assert world.tables.insert(world.session, "app.u", pa.table({"id": [2], "mail": ["b"]})) == 1
    assert world.rows("SELECT * FROM app.u ORDER BY id") == [(1, "a"), (2, "b")]


def test_defaults_are_filled_in(world: World) -> None:
    world.create(
        "CREATE TABLE app.d (id BIGINT PRIMARY KEY, at1 TIMESTAMP DEFAULT now(), at2 TIMESTAMPTZ DEFAULT "
        "current_timestamp,"
        " s VARCHAR DEFAULT 'it''s', n INTEGER DEFAULT -5, b BOOLEAN DEFAULT true, d DECIMAL(5,2) DEFAULT 1.5,"
        " u UUID DEFAULT gen_random_uuid(), e BIGINT DEFAULT 2 + 3, j JSON DEFAULT '{}', x VARCHAR)"
    )
    world.values("app.d", (1,), (2,), columns=("id",))
    world.tables.insert(world.session, "app.d", pa.table({"id": [3], "n": pa.array([None], pa.int32())}))
    world.run("INSERT INTO app.d (id) VALUES (4)")
    now = datetime.datetime.fromtimestamp(world.runtime.now_ms() / 1000, datetime.UTC)
    rows = world.rows("SELECT id, at1, at2, s, n, b, d, e, j, x FROM app.d ORDER BY id")
    rest = ("it's", -5, True, decimal.Decimal("1.50"), 5, "{}", None)
    assert rows[:2] == [(each, now.replace(tzinfo=None), now, *rest) for each in (1, 2)]
    assert rows[2][4] is None
    assert rows[3][3:] == rest
    assert len(set(world.rows("SELECT u FROM app.d"))) == 4


def test_updates_tell_the_rows_as_they_are_and_as_they_were(world: World) -> None:
    world.values("app.m", (1, "a", 1), (2, "b", 2), (3, "c", 3))
    told(world)
    assert world.run("UPDATE app.m SET n = n * 10, name = name || '!' WHERE id >= ?", [2]).count == 2
    [(op, new, old)] = told(world)
    assert op is Op.UPDATE
    assert sorted(zip(new, old or [], strict=True)) == [((2, "b!", 20), (2, "b", 2)), ((3, "c!", 30), (3, "c", 3))]
    assert world.run("UPDATE app.m SET n = 0 WHERE id = 99").count == 0
    assert told(world) == []
    world.router.old = False
    world.run("UPDATE app.m SET n = 0 WHERE id = 1")
    assert told(world) == [(Op.UPDATE, [(1, "a", 0)], None)]
    assert everything(world) == [(1, "a", 0), (2, "b!", 20), (3, "c!", 30)]


def test_deletes_tell_the_rows_that_are_gone(world: World) -> None:
    world.values("app.m", (1, "a", 1), (2, "b", 2))
    told(world)
    assert world.run("DELETE FROM app.m WHERE name = 'b'").count == 1
    assert told(world) == [(Op.DELETE, [(2, "b", 2)], None)]
    assert everything(world) == [(1, "a", 1)]


def test_an_upsert_tells_insertions_from_updates(world: World) -> None:
    world.values("app.m", (1, "a", 1))
    told(world)
    sql = (
        "INSERT INTO app.m VALUES (1, 'x', 5), (2, 'y', 6) ON CONFLICT DO UPDATE SET n = excluded.n + app.m.n "
        "RETURNING id, n"
    )
    done = world.run(sql)
    assert done.count == 2
    assert done.rows is not None
    assert sorted(map(tuple, (row.values() for row in done.rows.to_pylist()))) == [(1, 6), (2, 6)]
    assert told(world) == [(Op.INSERT, [(2, "y", 6)], None), (Op.UPDATE, [(1, "a", 6)], [(1, "a", 1)])]
    world.run("INSERT OR IGNORE INTO app.m VALUES (1, 'z', 0), (3, 'new', 0)")
    assert told(world) == [(Op.INSERT, [(3, "new", 0)], None)]
    world.run("INSERT OR REPLACE INTO app.m VALUES (1, 'z', 0)")
    assert told(world) == [(Op.UPDATE, [(1, "z", 0)], [(1, "a", 6)])]
    assert everything(world) == [(1, "z", 0), (2, "y", 6), (3, "new", 0)]


def test_many_bound_rows_go_through_duckdb_at_once(world: World) -> None:
    rows = tuple((each, f"name {each}", each) for each in range(1200))
    upsert = "INSERT INTO app.m VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET n = app.m.n + excluded.n RETURNING id"
    for _ in range(2):
        done = world.run(upsert, values=rows)
        assert done.count == 1200
        assert done.rows is not None
        assert sorted(done.rows.column("id").to_pylist()) == list(range(1200))
    assert world.rows("SELECT sum(n), count(*) FROM app.m") == [(sum(range(1200)) * 2, 1200)]


def test_rows_that_conflict_in_a_unique_column_are_applied_one_by_one(world: World) -> None:
    world.create("CREATE TABLE app.u (id BIGINT PRIMARY KEY, mail VARCHAR UNIQUE, n INTEGER)")
    rows = ((1, "a", 1), (2, "a", 2), (3, "b", 3))
    world.run("INSERT INTO app.u VALUES (?, ?, ?) ON CONFLICT DO NOTHING", values=rows)
    assert world.rows("SELECT * FROM app.u ORDER BY id") == [(1, "a", 1), (3, "b", 3)]
    moved = "ON CONFLICT (mail) DO UPDATE SET mail = excluded.mail || '!', n = excluded.n"
    world.run(f"INSERT INTO app.u VALUES (4, 'a', 4), (5, 'a!', 5), (6, 'a', 6) {moved}")
    assert world.rows("SELECT * FROM app.u ORDER BY id") == [(1, "a!!", 5), (3, "b", 3), (6, "a", 6)]


def test_long_statements_are_run_if_they_are_plain_values_and_refused_otherwise(world: World) -> None:
    world.create("CREATE TABLE app.u (id BIGINT PRIMARY KEY, mail VARCHAR UNIQUE)")
    rows = tuple((each, "x" * 100 + str(each)) for each in range(3000))
    sql = f"INSERT INTO app.u VALUES {', '.join(map(repr, rows))}"
    assert world.run(sql, values=rows).count == 3000
    with pytest.raises(SqlError, match="characters"):
        world.run(sql + " RETURNING id", values=rows)


def test_returning_is_evaluated_over_the_changed_rows(world: World) -> None:
    world.run("INSERT INTO app.m VALUES (1, 'a', 1), (2, 'b', 2)")
    done = world.run("UPDATE app.m AS t SET n = n + 1 WHERE id = 2 RETURNING t.id * 10 AS big, upper(name), n")
    assert done.rows is not None
    assert [tuple(row.values()) for row in done.rows.to_pylist()] == [(20, "B", 3)]
    done = world.run("DELETE FROM app.m WHERE id = 1 RETURNING *")
    assert done.rows is not None
    assert done.rows.to_pylist() == [{"id": 1, "name": "a", "n": 1}]
    with pytest.raises(SqlError, match="parameter"):
        world.run("DELETE FROM app.m RETURNING id + ?", [1])
    with pytest.raises(SqlError, match="nothing"):
        world.run("DELETE FROM app.m RETURNING nothing")
    assert everything(world) == [(2, "b", 3)]


@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE app.m SET id = id + 1",
        "UPDATE app.m SET name = 'x', ID = 4 WHERE id = 1",
        "INSERT INTO app.m VALUES (1, 'x', 1) ON CONFLICT DO UPDATE SET id = 7",
    ],
)
def test_primary_keys_are_not_updated(world: World, sql: str) -> None:
    world.values("app.m", (1, "a", 1))
    with pytest.raises(SqlError) as caught:
        world.run(sql)
    assert "DELETE" in caught.value.hint
    assert everything(world) == [(1, "a", 1)]


def test_changes_may_read_other_tables(world: World) -> None:
    world.create("CREATE TABLE app.other (id BIGINT PRIMARY KEY, v INTEGER)")
    world.values("app.other", (1, 10), (2, 20))
    world.run("INSERT INTO app.m SELECT id, 'from other', v FROM app.other")
    world.run("UPDATE app.m SET n = o.v + 1 FROM app.other o WHERE o.id = m.id AND o.id = 2")
    world.run("DELETE FROM app.m USING app.other o WHERE o.id = m.id AND o.v = 10")
    assert everything(world) == [(2, "from other", 21)]


def test_a_row_that_matches_twice_is_changed_and_told_once(world: World) -> None:
    world.create("CREATE TABLE app.other (id BIGINT PRIMARY KEY, v INTEGER)")
    world.values("app.other", (1, 10), (2, 10))
    world.values("app.m", (1, "a", 1))
    told(world)
    assert world.run("UPDATE app.m SET n = o.v FROM app.other o").count == 1
    assert told(world) == [(Op.UPDATE, [(1, "a", 10)], [(1, "a", 1)])]
    assert world.run("DELETE FROM app.m USING app.other o").count == 1
    assert told(world) == [(Op.DELETE, [(1, "a", 10)], None)]


def test_a_write_that_fails_leaves_nothing_behind(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.values("app.m", (1, "a", 1))
    told(world)

    def fails(*_: Any, **__: Any) -> None:
        raise StoreUnavailable("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(world.store, "write", fails)
        with pytest.raises(StoreUnavailable):
            world.run("UPDATE app.m SET n = 5")
        with pytest.raises(StoreUnavailable):
            world.values("app.m", (2, "b", 2))
        with pytest.raises(StoreUnavailable):
            world.create("CREATE TABLE app.more (id BIGINT PRIMARY KEY)")
    assert everything(world) == [(1, "a", 1)]
    assert list(world.tables.definitions()) == ["app.m"]
    assert world.create("CREATE TABLE app.more (id BIGINT PRIMARY KEY)")
    world.values("app.m", (2, "b", 2))
    assert everything(world) == [(1, "a", 1), (2, "b", 2)]


def test_a_route_that_fails_takes_the_change_with_it(world: World) -> None:
    world.values("app.m", (1, "a", 1))
    counted = world.store.get(COUNTERS, b"told")
    world.router.error = LlogError("no such topic")
    with pytest.raises(LlogError, match="no such topic"):
        world.run("UPDATE app.m SET n = 5")
    with pytest.raises(LlogError, match="no such topic"):
        world.values("app.m", (2, "b", 2))
    world.router.error = None
    assert everything(world) == [(1, "a", 1)]
    assert world.store.get(COUNTERS, b"told") == counted


def test_a_mirror_that_cannot_commit_is_loaded_anew(world: World) -> None:
    world.values("app.m", (1, "a", 1))
    world.tables.begin(world.session)
    world.run("UPDATE app.m SET n = 5")
    transaction = world.session.transaction
    assert transaction is not None

    class Failing:
        def end(self, sql: str) -> None:
            raise duckdb.TransactionException("injected")

    transaction._cursor = cast(DuckDBCursor, Failing())
    generation = world.tables._mirror.generation
    world.tables.commit(world.session)
    assert world.tables._mirror.generation == generation + 1
    assert everything(world) == [(1, "a", 5)]


def test_parameters_are_values_and_never_sql(world: World) -> None:
    evil = "x'); DROP TABLE app.m; --"
    world.values("app.m", (1, evil, 1))
    world.run("UPDATE app.m SET name = name || ? WHERE name = ?", ["'", evil])
    assert everything(world) == [(1, evil + "'", 1)]


def test_changes_and_their_events_are_in_the_logs_together(tmp_path: Path) -> None:
    world = World(tmp_path / "db", recording=False)
    world.create("CREATE TABLE app.m (id BIGINT PRIMARY KEY, name VARCHAR, n INTEGER)")
    world.logs.create("t", b"{}")
    routes = world.tables.router.routes
    changes = world.store.changes()
    made = [
        Route(
            topic="app.t",
            directory="t",
            engine="rocksdb",
            partitions=1,
            table="app.m",
            op=op,
            payload="diff",
            where="n > 0",
        )
        for op in _OPS
    ]
    routes.put(changes, made)
    world.store.write(changes, sync=True)
    routes.reload()
    world.values("app.m", (1, "a", 1), (2, "b", 0))
    world.run("UPDATE app.m SET n = n + 1")
    with pytest.raises(ConstraintViolation):
        world.values("app.m", (3, "c", 1), (1, "c", 1))
    world.run("DELETE FROM app.m WHERE id = 1")
    assert world.logs.bounds("t", 0).next_offset == 5
    with pytest.raises(SqlError, match="source of a topic"):
        world.tables.drop(statement("DROP TABLE app.m"))
    world.close()


def test_statements_know_whether_a_table_is_there(world: World) -> None:
    with pytest.raises(TableNotFound, match=r"did you mean app\.m"):
        world.run("INSERT INTO app.mm VALUES (1)")
    with pytest.raises(TableNotFound):
        world.tables.select(world.session, statement("SELECT * FROM app.gone"))
