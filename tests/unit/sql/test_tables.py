"""Tables: definitions, types, the bytes of rows, queries, and what SQL from outside cannot reach."""

from __future__ import annotations

import datetime
import decimal
import json
import struct
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import msgspec
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llog.errors import ConstraintViolation, CorruptBatch, ResultTooLarge, SqlError, TableExists, TableNotFound
from llog.sql.tables.rows import RowCodec, arrow_type
from llog.sql.workers.duckdb_server import DuckDBOptions
from tests.unit.sql.tables_world import World, statement


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path / "db")
    yield made
    made.close()


def test_a_table_is_there_after_reopening_with_its_rows_and_rules(world: World) -> None:
    assert world.create(
        "CREATE TABLE app.m (id BIGINT PRIMARY KEY, name VARCHAR NOT NULL DEFAULT 'x', n INTEGER CHECK (n < 10))"
    )
    world.run("INSERT INTO app.m VALUES (1, 'a', 1), (2, 'b', NULL)")
    world.reopen()
    found = world.tables.definition("APP.M")
    assert (found.name, found.primary_key, found.checked) == ("app.m", ("id",), True)
    assert [(each.name, each.type, each.nullable, each.default) for each in found.columns] == [
        ("id", "BIGINT", False, None),
        ("name", "VARCHAR", False, "'x'"),
        ("n", "INTEGER", True, None),
    ]
    assert world.rows("SELECT * FROM app.m ORDER BY id") == [(1, "a", 1), (2, "b", None)]
    with pytest.raises(ConstraintViolation, match="CHECK"):
        world.run("INSERT INTO app.m VALUES (3, 'a', 11)")


def test_a_table_dropped_and_created_anew_is_empty(world: World) -> None:
    world.create("CREATE TABLE app.m (id BIGINT PRIMARY KEY)")
    world.values("app.m", (1,), (2,))
    world.router.has_routes = lambda table, op: False  # type: ignore[method-assign]
    assert world.tables.drop(statement("DROP TABLE app.m"))
    assert not world.tables.drop(statement("DROP TABLE IF EXISTS app.m"))
    with pytest.raises(TableNotFound):
        world.rows("SELECT * FROM app.m")
    world.create("CREATE TABLE app.m (id VARCHAR PRIMARY KEY)")
    assert world.rows("SELECT * FROM app.m") == []
    world.values("app.m", ("one",))
    world.reopen()
    assert world.rows("SELECT * FROM app.m") == [("one",)]


def test_a_table_with_routes_is_not_dropped(world: World) -> None:
    world.create("CREATE TABLE app.m (id BIGINT PRIMARY KEY)")
    with pytest.raises(SqlError, match="source of a topic"):
        world.tables.drop(statement("DROP TABLE app.m"))
    assert world.rows("SELECT count(*) FROM app.m") == [(0,)]


def test_names_that_exist_are_refused_whatever_their_case(world: World) -> None:
    world.create("CREATE TABLE app.m (id BIGINT PRIMARY KEY)")
    with pytest.raises(TableExists):
        world.create("CREATE TABLE app.M (id BIGINT PRIMARY KEY)")
    assert not world.create("CREATE TABLE IF NOT EXISTS app.m (other BIGINT PRIMARY KEY)")
    with pytest.raises(TableNotFound, match=r"did you mean app\.m"):
        world.tables.definition("app.mm")


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ("id BIGINT", "no primary key"),
        ("id BIGINT PRIMARY KEY, e ENUM ('a')", "type ENUM"),
        ("id BIGINT PRIMARY KEY, s STRUCT(a INTEGER)", "type STRUCT"),
        ("id BIGINT PRIMARY KEY, m MAP(VARCHAR, INTEGER)", "type MAP"),
        ("id BIGINT PRIMARY KEY, i INTERVAL", "type INTERVAL"),
        ("id BIGINT PRIMARY KEY, l TIMESTAMP[]", "TIMESTAMP\\[\\]"),
        ("id DOUBLE PRIMARY KEY", "a primary key cannot contain"),
        ("Id DOUBLE, PRIMARY KEY (id)", "a primary key cannot contain"),
        ("id BIGINT PRIMARY KEY, b BIGINT GENERATED ALWAYS AS (id * 2)", "generated"),
        ("id BIGINT PRIMARY KEY, b BIGINT REFERENCES app.other (id)", "FOREIGN KEY"),
        ("id BIGINT PRIMARY KEY, b NOTYPE", "NOTYPE"),
    ],
)
def test_tables_that_could_not_be_kept_are_refused_and_leave_nothing(world: World, columns: str, said: str) -> None:
    world.create("CREATE TABLE app.other (id BIGINT PRIMARY KEY)")
    with pytest.raises(SqlError, match=said):
        world.create(f"CREATE TABLE app.m ({columns})")
    assert list(world.tables.definitions()) == ["app.other"]
    world.create("CREATE TABLE app.m (id BIGINT PRIMARY KEY)")
    assert world.rows("SELECT * FROM app.m") == []


EVERY_TYPE: dict[str, tuple[str, list[Any]]] = {
    "bo": ("BOOLEAN", [True, False]),
    "i1": ("TINYINT", [-128, 127]),
    "i2": ("SMALLINT", [-(2**15), 2**15 - 1]),
    "i4": ("INTEGER", [-(2**31), 2**31 - 1]),
    "i8": ("BIGINT", [-(2**63), 2**63 - 1]),
    "u1": ("UTINYINT", [0, 255]),
    "u2": ("USMALLINT", [0, 2**16 - 1]),
    "u4": ("UINTEGER", [0, 2**32 - 1]),
    "u8": ("UBIGINT", [0, 2**64 - 1]),
    "hu": ("HUGEINT", [decimal.Decimal(-(10**37)), decimal.Decimal(10**38 - 1)]),
    "f4": ("REAL", [-0.0, 1.5]),
    "f8": ("DOUBLE", [float("inf"), 5e-324]),
    "d1": ("DECIMAL(38, 10)", [decimal.Decimal("9" * 28 + "." + "9" * 10), decimal.Decimal("-0.0000000001")]),
    "d2": ("DECIMAL(4, 1)", [decimal.Decimal("-999.9"), decimal.Decimal("0.0")]),
    "te": ("VARCHAR", ["", "nul \0, snow ☃, and 🎈"]),
    "bl": ("BLOB", [b"", bytes(range(256))]),
    "da": ("DATE", [datetime.date(1, 1, 1), datetime.date(9999, 12, 31)]),
    "ti": ("TIME", [datetime.time(), datetime.time(23, 59, 59, 999999)]),
    "ts": ("TIMESTAMP", [datetime.datetime(1, 1, 1), datetime.datetime(9999, 12, 31, 23, 59, 59, 999999)]),
    "tz": ("TIMESTAMPTZ", [datetime.datetime(1969, 12, 31, 23, 59, 59, 999999, datetime.UTC)] * 2),
    "ms": ("TIMESTAMP_MS", [datetime.datetime(2024, 2, 29, 1, 2, 3, 4000)] * 2),
    "uu": ("UUID", ["00000000-0000-0000-0000-000000000000", "ffffffff-ffff-ffff-ffff-ffffffffffff"]),
    "js": ("JSON", ['{"a": [1, 2.50, null]}', '"text"']),
    "li": ("INTEGER[]", [[], [1, None, 3]]),
    "ll": ("VARCHAR[][]", [[["a"], None, []], [["☃"]]]),
}


def _every_type(world: World) -> list[tuple[Any, ...]]:
    columns = ", ".join(f"{name} {kind}" for name, (kind, _) in EVERY_TYPE.items())
    world.create(f"CREATE TABLE app.all (id INTEGER PRIMARY KEY, {columns})")
    values = [values for _, values in EVERY_TYPE.values()]
    return [(0, *(each[0] for each in values)), (1, *(each[1] for each in values)), (2, *(None for _ in values))]


def test_every_type_comes_back_as_it_was_from_duckdb_and_from_bytes(world: World) -> None:
    rows = _every_type(world)
    places = ", ".join("?" * len(rows[0]))
    for row in rows:
        world.run(f"INSERT INTO app.all VALUES ({places})", list(row))
    assert world.rows("SELECT * FROM app.all ORDER BY id") == rows
    world.reopen()
    assert world.rows("SELECT * FROM app.all ORDER BY id") == rows
    assert struct.pack("<d", world.rows("SELECT f4 FROM app.all WHERE id = 0")[0][0]) == struct.pack("<d", -0.0)


def test_every_type_comes_back_as_it_was_from_arrow(world: World) -> None:
    rows = _every_type(world)
    codec = world.tables.definition("app.all").codec
    table = pa.table(
        [pa.array(each, kind) for each, kind in zip(zip(*rows, strict=True), codec.kinds, strict=True)], codec.names
    )
    assert world.tables.insert(world.session, "app.all", table) == 3
    assert world.rows("SELECT * FROM app.all ORDER BY id") == rows
    world.reopen()
    assert world.rows("SELECT * FROM app.all ORDER BY id") == rows


_EXACT = decimal.Context(prec=50)
_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "BOOLEAN": st.booleans(),
    "TINYINT": st.integers(-128, 127),
    "UBIGINT": st.integers(0, 2**64 - 1),
    "BIGINT": st.integers(-(2**63), 2**63 - 1),
    "DOUBLE": st.floats(),
    "FLOAT": st.floats(width=32),
    "VARCHAR": st.text(),
    "BLOB": st.binary(),
    "DATE": st.dates(),
    "TIME": st.times(),
    "TIMESTAMP": st.datetimes(),
    "HUGEINT": st.integers(-(10**38) + 1, 10**38 - 1).map(decimal.Decimal),
    "DECIMAL(38,10)": st.integers(-(10**38) + 1, 10**38 - 1).map(
        lambda each: decimal.Decimal(each).scaleb(-10, _EXACT)
    ),
    "VARCHAR[]": st.lists(st.none() | st.text(max_size=3), max_size=3),
}


@given(st.data())
def test_rows_round_trip_bit_by_bit(data: st.DataObject) -> None:
    kinds = data.draw(st.lists(st.sampled_from(sorted(_VALUES)), min_size=1, max_size=6))
    count = data.draw(st.integers(0, 5))
    codec = RowCodec([("id", "BIGINT"), *((f"c{place}", kind) for place, kind in enumerate(kinds))], ["id"])
    columns = [pa.array(range(count), pa.int64())] + [
        pa.array(data.draw(st.lists(st.none() | _VALUES[kind], min_size=count, max_size=count)), arrow_type(kind))
        for kind in kinds
    ]
    table = codec.table(columns)
    keys, values = codec.encode([each.combine_chunks() for each in table.columns], b"k/")
    assert len(set(keys)) == count
    again = codec.decode(values, "t")
    assert again.schema == table.schema
    # NaN differs from itself and -0.0 does not from 0.0: their bytes tell
    assert [_bits(each) for each in again.columns] == [_bits(each) for each in table.columns]
    tail = codec.table([each.combine_chunks().slice(1) for each in table.columns])
    assert codec.encode([each.combine_chunks() for each in tail.columns], b"k/") == (keys[1:], values[1:])


def _bits(column: pa.ChunkedArray) -> list[Any]:
    if pa.types.is_floating(column.type):
        return [None if each is None else struct.pack("<d", each) for each in column.to_pylist()]
    return list(column.to_pylist())


@given(st.lists(st.tuples(st.text(), st.binary(), st.integers(-5, 5)), unique=True, max_size=20))
def test_different_primary_keys_have_different_bytes(keys: list[tuple[str, bytes, int]]) -> None:
    codec = RowCodec([("a", "VARCHAR"), ("b", "BLOB"), ("c", "BIGINT")], ["a", "b", "c"])
    columns = [pa.array([each[place] for each in keys], codec.kinds[place]) for place in range(3)]
    assert len(set(codec.encode(columns, b"")[0])) == len(keys)


@given(st.binary(max_size=30))
def test_damaged_rows_are_said_to_be(damage: bytes) -> None:
    codec = RowCodec([("a", "BIGINT"), ("d", "DECIMAL(4,1)"), ("t", "VARCHAR")], ["a"])
    try:
        found = codec.decode([damage], "app.m")
    except CorruptBatch:
        return
    assert found.num_rows == 1
    found.validate(full=True)


@given(
    st.text(max_size=12)
    | st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists).map(json.dumps)
)
def test_json_that_is_taken_without_duckdb_is_json_for_duckdb(text: str) -> None:
    try:
        msgspec.json.decode(text.encode("utf-8", "surrogatepass"))
        text.encode()
    except (ValueError, RecursionError):
        return
    assert duckdb.execute("SELECT CAST(? AS JSON)", [text]).fetchone() == (text,)


def test_a_query_sees_rows_that_were_inserted_past_duckdb(world: World) -> None:
    world.create("CREATE TABLE app.m (id BIGINT PRIMARY KEY, name VARCHAR)")
    assert world.rows("SELECT * FROM app.m") == []
    world.values("app.m", (1, "a"))
    world.values("app.m", (2, "b"), (3, None))
    assert world.rows("SELECT id, name FROM app.m ORDER BY id") == [(1, "a"), (2, "b"), (3, None)]
    assert world.rows("SELECT a.id FROM app.m a JOIN app.m b ON a.id = b.id + ?", [2]) == [(3,)]
    assert world.rows("SELECT id FROM app.m WHERE name = $name", {"name": "b"}) == [(2,)]


def test_extra_tables_are_known_to_one_statement_only(world: World) -> None:
    world.create("CREATE TABLE app.m (id BIGINT PRIMARY KEY)")
    world.values("app.m", (1,))
    found = world.select(
        "SELECT m.id, t.v FROM app.m m JOIN topic_0 t ON t.id = m.id", topic_0=pa.table({"id": [1], "v": ["x"]})
    )
    assert found.to_pylist() == [{"id": 1, "v": "x"}]
    with pytest.raises(SqlError, match="topic_0"):
        world.select("SELECT * FROM topic_0")


def test_errors_of_queries_say_what_and_where(world: World) -> None:
    world.create("CREATE TABLE app.m (id BIGINT PRIMARY KEY, user_id VARCHAR)")
    with pytest.raises(SqlError) as caught:
        world.rows("SELECT usr_id FROM app.m")
    assert "usr_id" in caught.value.message
    assert "user_id" in caught.value.hint
    assert "       ^" in caught.value.shown
    with pytest.raises(SqlError):
        world.rows("SELECT ? FROM app.m", [])
    with pytest.raises(SqlError):
        world.rows("SELECT '\ud800' FROM app.m")


def test_what_arrow_cannot_carry_is_an_error_of_sql(world: World) -> None:
    with pytest.raises(SqlError, match="total string size"), world.tables._mirror.translating_errors():
        raise OSError("Arrow Appender: the maximum total string size is exceeded")


def test_results_are_bounded(tmp_path: Path) -> None:
    world = World(tmp_path / "db", options=DuckDBOptions(max_rows=100, max_bytes=10_000))
    assert len(world.rows("SELECT * FROM range(100)")) == 100
    with pytest.raises(ResultTooLarge, match="LIMIT"):
        world.rows("SELECT * FROM range(101)")
    with pytest.raises(ResultTooLarge):
        world.rows("SELECT repeat('x', 20000)")
    assert world.rows("SELECT 1") == [(1,)]
    world.close()


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT * FROM read_text('/etc/hostname')",
        "SELECT * FROM '/etc/hostname'",
        "SELECT * FROM glob('/etc/*')",
        "COPY (SELECT 1) TO '/tmp/out.csv'",
        "ATTACH '/tmp/other.duckdb'",
        "INSTALL httpfs",
        "LOAD httpfs",
        "SET enable_external_access = true",
        "SET threads = 7",
        "RESET lock_configuration",
        "SELECT * FROM secret",
    ],
)
def test_sql_reaches_neither_files_nor_settings_nor_variables(world: World, sql: str) -> None:
    secret = pa.table({"a": [1]})
    assert secret.num_rows == 1
    with pytest.raises(SqlError):
        world.rows(sql)


def test_time_zones_are_utc_whatever_the_machine_says(world: World) -> None:
    assert world.rows("SELECT current_setting('TimeZone')") == [("UTC",)]


def test_a_statement_can_be_interrupted(world: World) -> None:
    caught: list[BaseException] = []
    begun = threading.Event()

    def work() -> None:
        world.session.cursor()
        begun.set()
        try:
            world.rows("SELECT count(*) FROM range(10000000000) a(x) WHERE x % 7 = (x * x) % 11")
        except SqlError as error:
            caught.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    while thread.is_alive():
        world.session.interrupt()
        thread.join(0.01)
    assert len(caught) == 1
    assert world.rows("SELECT 1") == [(1,)]


def test_a_mirror_that_is_thrown_away_is_loaded_anew(world: World) -> None:
    world.create("CREATE TABLE app.m (id BIGINT PRIMARY KEY, j JSON, h HUGEINT)")
    world.run("INSERT INTO app.m VALUES (1, '[1]', 170141183460469231731687303715884105727)")
    before = world.rows("SELECT * FROM app.m")
    world.tables._mirror.reset()
    world.values("app.m", (2, "{}", 5))
    assert world.rows("SELECT * FROM app.m ORDER BY id")[:1] == before
    assert world.rows("SELECT count(*), max(h)::VARCHAR FROM app.m") == [(2, "170141183460469231731687303715884105727")]


def test_a_big_table_is_loaded_in_pages(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llog.sql.tables.definitions.PAGE_ROWS", 7)
    world.create("CREATE TABLE app.m (id BIGINT PRIMARY KEY, v VARCHAR)")
    for count in (6, 7, 8, 20):
        world.run("DELETE FROM app.m")
        world.tables.insert(world.session, "app.m", pa.table({"id": list(range(count))}))
        world.tables._mirror.reset()
        assert world.rows("SELECT count(*), count(DISTINCT id), max(id) FROM app.m") == [(count, count, count - 1)]


def test_rows_that_wait_for_a_reader_do_not_pile_up(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llog.sql.tables.mirror._PENDING_ROWS_MAX", 5)
    world.create("CREATE TABLE app.m (id BIGINT PRIMARY KEY)")
    for each in range(4):
        world.values("app.m", (each,))
    assert len(world.tables._mirror.tables_with_pending_rows()) == 1
    world.values("app.m", (4,))
    assert world.tables._mirror.tables_with_pending_rows() == []
    assert world.rows("SELECT count(*) FROM app.m") == [(5,)]


def test_a_table_loaded_again_by_a_late_query_is_no_obstacle_to_a_new_one(world: World) -> None:
    world.router.has_routes = lambda table, op: False  # type: ignore[method-assign]
    world.create("CREATE TABLE app.m (id BIGINT PRIMARY KEY)")
    old = world.tables.definition("app.m")
    world.tables.drop(statement("DROP TABLE app.m"))
    world.tables._mirror.catch_up([old])
    world.create("CREATE TABLE app.m (other VARCHAR PRIMARY KEY)")
    world.values("app.m", ("x",))
    assert world.rows("SELECT other FROM app.m") == [("x",)]


def test_rows_written_while_a_table_is_loaded_are_there_once(world: World) -> None:
    world.create("CREATE TABLE app.m (id BIGINT PRIMARY KEY, v VARCHAR)")
    world.values("app.m", (1, "a"))
    world.tables._mirror.reset()
    mirror, pages = world.tables._mirror, world.tables._tables.pages

    def slow(definition: Any) -> Iterator[pa.Table]:
        world.values("app.m", (2, "before the scan"))
        yield from pages(definition)
        world.values("app.m", (3, "after the scan"))

    mirror._pages = slow
    assert world.rows("SELECT * FROM app.m ORDER BY id") == [(1, "a"), (2, "before the scan"), (3, "after the scan")]


def _routes(world: World) -> None:
    world.create(
        "CREATE TABLE app.m (id BIGINT PRIMARY KEY, user_id VARCHAR, price DECIMAL(5,2), made TIMESTAMP, doc JSON, "
        "u UUID)"
    )


def test_filters_and_keys_of_routes_are_asked_of_the_given_rows(world: World) -> None:
    _routes(world)
    codec = world.tables.definition("app.m").codec
    rows = codec.table(
        [
            pa.array([1, 2, 3], pa.int64()),
            pa.array(["a", None, "c"]),
            pa.array([decimal.Decimal("1.50"), None, decimal.Decimal("9.99")], codec.kinds[2]),
            pa.array([datetime.datetime(2024, 1, 1)] * 3, codec.kinds[3]),
            pa.array(['{"kind": "x"}', '{"kind": "y"}', None]),
            pa.array([str(uuid.UUID(int=each)) for each in range(3)]),
        ]
    )
    select = world.tables.evaluator.select

    def asked(where: str | None, key: str | None) -> tuple[list[int], list[str | None] | None]:
        numbers, keys = select("app.m", rows, where, key)
        return numbers.tolist(), None if keys is None else keys.to_pylist()

    assert asked(None, None) == ([0, 1, 2], None)
    assert asked("id >= 2", None) == ([1, 2], None)
    assert asked("user_id = 'a' OR app.m.id = 3", "m.user_id") == ([0, 2], ["a", "c"])
    assert asked(None, "user_id") == ([0, 1, 2], ["a", None, "c"])
    assert asked(None, "app.m.id") == ([0, 1, 2], ["1", "2", "3"])
    assert asked(None, "price") == ([0, 1, 2], ["1.50", None, "9.99"])
    assert asked(None, "user_id, id") == ([0, 1, 2], ["a\x1f1", "\x1f2", "c\x1f3"])
    assert asked("doc->>'kind' = 'y'", "lower(user_id)") == ([1], [None])
    assert asked(f"u = UUID '{uuid.UUID(int=1)}'", "u") == ([1], [str(uuid.UUID(int=1))])
    assert asked("user_id IS NULL AND price > 0", None) == ([], None)


@pytest.mark.parametrize(
    ("where", "key", "said"),
    [
        ("usr_id = 'a'", None, "user_id"),
        (None, "usr_id", "user_id"),
        ("count(*) > 1", None, "a single row"),
        ("id IN (SELECT 1)", None, "a single row"),
        ("EXISTS (SELECT 1 FROM app.m)", None, "a single row"),
        ("row_number() OVER () = 1", None, "a single row"),
        ("id = ?", None, "a single row"),
        ("user_id", None, "not BOOLEAN"),
        ("true, false", None, "more than one"),
        ("id > 0 LIMIT 1", None, "not an expression"),
        ("id > 0; DROP TABLE app.m", None, "not an expression"),
        ("id > 0 FROM app.m", None, "not an expression"),
        ("id >", None, "not an expression"),
        ("no_such_function(id)", None, "no_such_function"),
        ("other.id = 1", None, "other"),
        (None, "sum(id)", "a single row"),
        (None, "id +", "not an expression"),
    ],
)
def test_expressions_that_do_not_fit_a_table_are_refused(
    world: World, where: str | None, key: str | None, said: str
) -> None:
    _routes(world)
    with pytest.raises(SqlError) as caught:
        world.tables.check_route("app.m", where, key)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("where", "key"),
    [
        ("user_id LIKE 'a%' -- why", "hash(user_id) % 8"),
        (None, "user_id, date_trunc('day', made)"),
        ("m.price > 1", None),
        (None, None),
    ],
)
def test_expressions_that_fit_are_taken(world: World, where: str | None, key: str | None) -> None:
    _routes(world)
    world.tables.check_route("app.m", where, key)
