"""Sessions beside each other: threads for all of them, callers that go away, topics that others delete, values at the
edge.
"""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from llog.config import Settings
from llog.engines.upkeep import clean_all
from llog.errors import ConstraintViolation, LlogError, OffsetOutOfRange, SqlError, TableNotFound
from llog.log.engine import AppendGroup
from llog.log.opening import opened_log
from llog.log.producers import Producer
from llog.model import Record
from llog.sql.database import Database
from llog.sql.json_values import json_rows
from llog.sql.session import DatabaseSession

LONG = "SELECT count(*) FROM range(10000000000000) r WHERE (r.range * 7) % 11 = 3"


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    settings = Settings(data_dir=str(tmp_path))
    async with opened_log(settings) as log:
        database = Database(log, settings)
        await database.start()
        yield database
        await database.close()


@pytest.fixture
async def session(database: Database) -> AsyncIterator[DatabaseSession]:
    opened = database.session()
    await opened.execute("CREATE TABLE t (id BIGINT PRIMARY KEY, v VARCHAR)")
    yield opened
    await opened.close()


async def rows(session: DatabaseSession, text: str, params: Any = ()) -> list[tuple[Any, ...]]:
    table = (await session.execute(text, params))[-1].table
    assert table is not None
    return list(json_rows(table))


async def cancelled(task: asyncio.Future[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_transactions_that_wait_do_not_keep_the_one_that_has_the_lock_from_a_thread(
    database: Database, session: DatabaseSession
) -> None:
    sessions = [database.session() for _ in range(40)]
    await asyncio.gather(
        *(
            each.execute(f"BEGIN; INSERT INTO t VALUES ({n}, 'a'); UPDATE t SET v = 'b' WHERE id = {n}; COMMIT")
            for n, each in enumerate(sessions)
        )
    )
    assert await rows(session, "SELECT count(*), min(v) FROM t") == [(40, "b")]
    for each in sessions:
        await each.close()


async def test_long_queries_keep_nobody_from_changing_and_consuming_and_end_with_their_callers(
    database: Database, session: DatabaseSession
) -> None:
    sessions = [database.session() for _ in range(40)]
    running = [asyncio.ensure_future(each.execute(LONG)) for each in sessions]
    await session.execute("CREATE TOPIC t; ALTER TOPIC t ADD SOURCE t ON INSERT; INSERT INTO t VALUES (1, 'a')")
    (result,) = await session.execute("CONSUME FROM t GROUP 'g'")
    assert result.table is not None
    assert result.table.num_rows == 1
    for each in running:
        await cancelled(each)
    assert await rows(session, "SELECT count(*) FROM t") == [(1,)]
    for one in sessions:
        await one.close()


async def test_a_query_whose_caller_goes_leaves_no_error_that_nobody_looked_at(session: DatabaseSession) -> None:
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    running = asyncio.ensure_future(session.execute(LONG))
    await asyncio.sleep(0.1)
    await cancelled(running)
    del running
    await asyncio.sleep(0.1)
    gc.collect()
    assert told == []


@pytest.mark.parametrize(
    "statement", ["BEGIN", "BEGIN; INSERT INTO t VALUES (9, 'x'); COMMIT", "INSERT INTO t VALUES (9, upper('x'))"]
)
async def test_a_caller_that_goes_while_it_waits_leaves_no_transaction_open(
    database: Database, session: DatabaseSession, statement: str
) -> None:
    other = database.session()
    await session.execute("BEGIN")
    waiting = asyncio.ensure_future(other.execute(statement))
    await asyncio.sleep(0.1)
    waiting.cancel()
    await session.execute("ROLLBACK")
    await asyncio.gather(waiting, return_exceptions=True)
    assert not other.in_transaction
    await session.execute("INSERT INTO t VALUES (1, 'a')")
    await other.close()


async def test_a_caller_that_goes_twice_while_it_waits_leaves_no_transaction_open(
    database: Database, session: DatabaseSession
) -> None:
    other = database.session()
    await session.execute("BEGIN")
    waiting = asyncio.ensure_future(other.execute("BEGIN"))
    for _ in range(2):
        await asyncio.sleep(0.1)
        waiting.cancel()
    await asyncio.sleep(0.1)
    await session.execute("ROLLBACK")
    await asyncio.gather(waiting, return_exceptions=True)
    await asyncio.sleep(0.1)
    assert not other.in_transaction
    await session.execute("INSERT INTO t VALUES (1, 'a')")
    await other.close()


async def test_a_caller_of_many_rows_that_goes_while_it_waits_leaves_no_transaction_open(
    database: Database, session: DatabaseSession
) -> None:
    other = database.session()
    await session.execute("BEGIN")
    waiting = asyncio.ensure_future(other.execute_many("INSERT INTO t VALUES (?, upper(?))", [[1, "a"], [2, "b"]]))
    await asyncio.sleep(0.1)
    waiting.cancel()
    await session.execute("ROLLBACK")
    await asyncio.gather(waiting, return_exceptions=True)
    assert not other.in_transaction
    await other.close()


async def test_a_text_that_begins_a_transaction_and_fails_has_rolled_it_back(session: DatabaseSession) -> None:
    with pytest.raises(ConstraintViolation):
        await session.execute("BEGIN; INSERT INTO t VALUES (1, 'a'); INSERT INTO t VALUES (1, 'b'); COMMIT")
    assert not session.in_transaction
    assert await rows(session, "SELECT count(*) FROM t") == [(0,)]
    await session.execute("BEGIN")
    with pytest.raises(SqlError):
        await session.execute("SELECT nope FROM t")
    assert session.in_transaction  # it was there before
    await session.execute("ROLLBACK")


async def test_a_long_text_leaves_the_loop_to_others(session: DatabaseSession) -> None:
    text = "INSERT INTO t VALUES " + ", ".join(f"({n}, 'x')" for n in range(20_000))
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    beside = asyncio.ensure_future(others())
    prepared = await session._prepare(text)
    await cancelled(beside)
    assert len(prepared) == 1
    assert turns > 10


@pytest.mark.parametrize("engine", ["object", "rocksdb"])
async def test_a_route_goes_with_its_topic_whoever_deletes_that(
    database: Database, session: DatabaseSession, engine: str
) -> None:
    await session.execute(f"CREATE TOPIC x WITH (engine = '{engine}'); ALTER TOPIC x ADD SOURCE t ON INSERT")
    await database.catalog.delete("x")
    await session.execute(f"CREATE TOPIC x WITH (engine = '{engine}')")
    assert await rows(session, "SHOW ROUTES") == []
    await session.execute("DROP TABLE t")


async def test_a_parameter_may_be_cast(session: DatabaseSession) -> None:
    assert await rows(session, "SELECT ?::BIGINT + 1, ?::VARCHAR", ["1", 2]) == [(2, "2")]
    assert await rows(session, "SELECT $a::DATE", {"a": "2026-01-31"}) == [("2026-01-31",)]


async def test_a_misspelt_keyword_is_hinted_at(session: DatabaseSession) -> None:
    with pytest.raises(SqlError) as caught:
        await session.execute("SELECT * FROM t WHRE id = 1")
    assert caught.value.line == 1
    assert "WHERE" in (caught.value.hint or "")


async def test_records_of_a_topic_take_times_of_any_precision(session: DatabaseSession) -> None:
    await session.execute("CREATE TOPIC x")
    await session.execute(
        "INSERT INTO TOPIC x (payload, ts) SELECT 'a', TIMESTAMP '2026-01-31 12:00:00.123456';"
        "INSERT INTO TOPIC x (payload, ts) SELECT 'b', now()"
    )
    found = await rows(session, "SELECT ts FROM TOPIC x WHERE payload = 'a'")
    assert found == [("2026-01-31T12:00:00.123000Z",)]


async def test_infinite_times_have_a_name(session: DatabaseSession) -> None:
    query = "SELECT TIMESTAMP 'infinity', TIMESTAMPTZ '-infinity', DATE 'infinity', NULL::DATE, NULL::TIMESTAMP"
    assert await rows(session, query) == [("infinity", "-infinity", "infinity", None, None)]


async def test_an_ack_of_several_partitions_is_whole_or_nothing(session: DatabaseSession) -> None:
    await session.execute(
        "CREATE TOPIC x PARTITIONS 2; INSERT INTO TOPIC x (payload, partition) VALUES ('a', 0), ('b', 1)"
    )
    await session.execute("CONSUME FROM x GROUP 'g'")
    with pytest.raises(OffsetOutOfRange):
        await session.execute("ACK x GROUP 'g' UPTO (PARTITION 0 OFFSET 1, PARTITION 1 OFFSET 2)")
    assert await rows(session, "SELECT sum(outstanding) FROM system.topic_offsets") == [(2,)]


@pytest.mark.parametrize(
    "value", [[1, "x"], [1, {"a": 2}], {"a": None, "b": [1, "x", 2.5]}, [1, 2.5], [1, 2], ["a"], {}, []]
)
async def test_json_parameters_are_kept_as_they_are_by_every_statement(session: DatabaseSession, value: Any) -> None:
    await session.execute("CREATE TABLE j (id BIGINT PRIMARY KEY, v JSON)")
    await session.execute("INSERT INTO j VALUES (1, ?), (2, '0')", [value])
    await session.execute("UPDATE j SET v = ? WHERE id = 2", [value])
    await session.execute("INSERT INTO j VALUES (3, $v) ON CONFLICT DO NOTHING", {"v": value})
    await session.execute_many("INSERT INTO j SELECT ?, ?", [[4, value]])
    assert [json.loads(v) for (v,) in await rows(session, "SELECT v FROM j")] == [value] * 4


async def test_a_list_can_be_a_set_of_values(session: DatabaseSession) -> None:
    await session.execute("INSERT INTO t VALUES (1, 'a'), (2, 'b'), (3, 'c')")
    assert await rows(session, "SELECT id FROM t WHERE id IN (SELECT unnest(?)) ORDER BY id", [[1, 3]]) == [(1,), (3,)]


async def test_a_table_without_a_schema_is_in_main_everywhere(session: DatabaseSession) -> None:
    await session.insert("t", pa.table({"id": [1], "v": ["a"]}))
    assert [row[0] for row in await rows(session, "DESCRIBE t")] == ["id", "v"]
    assert await rows(session, "SELECT count(*) FROM main.t") == [(1,)]


@pytest.mark.parametrize(
    ("text", "line", "column"),
    [
        ("SELECT 1;\nSELECT id,\n  nope FROM t -- a comment", 3, 3),
        ("SELECT /* a comment */ '日本', nope FROM t", 1, 30),
        ("UPDATE t SET v = nope", 1, 18),
        ("DELETE FROM t WHERE nope > 1", 1, 21),
        ("UPDATE t SET v = 'a',\n nope = 1", 2, 2),
        ('INSERT INTO t (id, "no pe") VALUES (1, 2)', 1, 20),
        ("INSERT INTO t (id, nope) SELECT 1, 2", 1, 20),
        ("INSERT INTO t SELECT 'x', 'y'", 1, 22),
        ("INSERT INTO TOPIC x (payload)\n SELECT nope FROM TOPIC x", 2, 9),
        ("SELECT t.id, nope FROM system.topics, t", 1, 14),
        ("CREATE TABLE u (id BIGINT PRIMARY KEY, v NOPE)", 1, 42),
        ("SELECT 1; INSERT INTO t VALUES ('x', 'y')", 1, 11),
        ("SELECT 1;\nDELETE FROM t RETURNING nope", 2, 1),
    ],
)
async def test_what_duckdb_does_not_know_is_shown_where_it_was_written(
    session: DatabaseSession, text: str, line: int, column: int
) -> None:
    await session.execute("CREATE TOPIC x")
    with pytest.raises(SqlError) as caught:
        await session.execute(text)
    assert (caught.value.line, caught.value.column) == (line, column)
    assert "main." not in str(caught.value)
    assert "topic_1" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("SELECT * FORM t", "FROM"),
        ("INSERT INTO t VALUE (1, 'a')", "VALUES"),
        ("CREATE TABLE u (id BIGINT PRIMARY KEY, order INT)", "double quotes"),
        ("SHOW CONSUMER GROUP", "CONSUMER GROUPS"),
        ("CREATE SCHEMA app", "as soon as it has a table"),
    ],
)
async def test_a_hint_says_what_was_meant(session: DatabaseSession, text: str, hint: str) -> None:
    with pytest.raises(SqlError) as caught:
        await session.execute(text)
    assert caught.value.line == 1
    assert hint in caught.value.hint


async def test_tables_whose_names_no_topic_could_have_are_described(session: DatabaseSession) -> None:
    await session.execute('CREATE TABLE "My Table" (id BIGINT PRIMARY KEY)')
    assert [row[0] for row in await rows(session, 'DESCRIBE "My Table"')] == ["id"]
    with pytest.raises(TableNotFound, match="my table"):
        await session.execute('DESCRIBE "My Tables"')


async def test_a_row_that_a_route_cannot_be_asked_of_is_refused_by_the_name_of_its_topic(
    session: DatabaseSession,
) -> None:
    await session.execute("CREATE TOPIC x; ALTER TOPIC x ADD SOURCE t ON INSERT WHERE v::INT > 5")
    with pytest.raises(SqlError, match=r"topic 'x' takes INSERT of main\.t WHERE v::INT > 5.*'abc'") as caught:
        await session.execute("INSERT INTO t VALUES (1, 'abc')")
    assert "llog_changed" not in str(caught.value)
    assert await rows(session, "SELECT * FROM t") == []


@pytest.mark.parametrize("clause", ["WHERE id = 'x'", "PARTITION BY (id, 'x'::INT)", "WHERE nope(id)"])
async def test_a_route_that_no_row_could_pass_is_refused(session: DatabaseSession, clause: str) -> None:
    await session.execute("CREATE TOPIC x PARTITIONS 2")
    with pytest.raises(SqlError, match=r"cannot be evaluated for rows of table 'main\.t'") as caught:
        await session.execute(f"ALTER TOPIC x ADD SOURCE t ON INSERT {clause}")
    assert "llog_changed" not in str(caught.value)


async def test_times_of_records_may_be_text(session: DatabaseSession) -> None:
    await session.execute("CREATE TOPIC x")
    await session.execute(
        "INSERT INTO TOPIC x (ts, payload) VALUES ('2024-01-02', 'a'), ('2024-01-02T00:00:00+02:00', 'b')"
    )
    assert await rows(session, "SELECT epoch_ms(ts) FROM TOPIC x") == [(1704153600000,), (1704146400000,)]
    with pytest.raises(SqlError, match="must be a time like"):
        await session.execute("INSERT INTO TOPIC x (ts, payload) VALUES ('soon', 'a')")


async def test_headers_of_records_are_a_column(database: Database, session: DatabaseSession) -> None:
    await session.execute("CREATE TOPIC x")
    records = [
        Record(payload=b"1", headers=(("trace", b"a"), ("trace", None))),
        Record(payload=b"2"),
        Record(payload=b"3", headers=(("raw", b"\xff"),)),
    ]
    await database.appender.append([AppendGroup(topic="x", partition=0, records=records)])
    expected = [
        ([{"key": "trace", "value": "a"}, {"key": "trace", "value": None}],),
        (None,),
        ([{"key": "raw", "value": "/w=="}],),
    ]
    assert await rows(session, "SELECT headers FROM TOPIC x ORDER BY offset") == expected
    assert await rows(session, "SELECT headers[1].value AS v FROM TOPIC x WHERE offset = 1") == [("a",)]
    [consumed] = await session.execute("CONSUME FROM x GROUP 'g'")
    assert consumed.table is not None
    assert list(json_rows(consumed.table.select(["headers"]))) == expected


async def test_an_arrow_within_a_function_reads_json_wherever_it_stands(session: DatabaseSession) -> None:
    await session.execute("CREATE TABLE s.d (id BIGINT PRIMARY KEY, j JSON, n BIGINT); CREATE TOPIC x")
    await session.execute("ALTER TOPIC x ADD SOURCE s.d ON INSERT WHERE json_array_length(j->'a') > 1")
    many = "INSERT INTO s.d (id, j) VALUES (?, ?) ON CONFLICT DO UPDATE SET n = json_array_length(excluded.j->'a')"
    await session.execute_many(many, [(1, '{"a":[1]}'), (2, '{"a":[1,2]}')])
    await session.execute_many(many, [(2, '{"a":[1,2,3]}')])
    assert await rows(session, "SELECT key FROM TOPIC x") == [("2",)]
    returning = "UPDATE s.d SET n = json_array_length(j->'a') WHERE id = 1 RETURNING s.d.n, upper(j->'a') AS a"
    assert await rows(session, returning) == [(1, "[1]")]
    assert await rows(session, "SELECT id, n FROM s.d ORDER BY id") == [(1, 1), (2, 3)]


@pytest.mark.parametrize(
    "conflict",
    [
        "ON CONFLICT (id) DO UPDATE SET v = excluded.v",
        "ON CONFLICT (id) DO UPDATE SET v = t.v || excluded.v",
        "ON CONFLICT (id) DO UPDATE SET v = excluded.v WHERE excluded.v > 'a'",
        "ON CONFLICT DO NOTHING",
    ],
)
async def test_many_rows_are_upserted_as_if_one_by_one(session: DatabaseSession, conflict: str) -> None:
    await session.execute("CREATE TABLE u (id BIGINT PRIMARY KEY, v VARCHAR)")
    given = [(9, "b"), (8, "x"), ("9", "c"), (7, "y"), (9, "a"), (8, "z")]
    for row in given:
        await session.execute(f"INSERT INTO u AS t VALUES (?, ?) {conflict}", row)
    await session.execute_many(f"INSERT INTO t VALUES (?, ?) {conflict}", given)
    stored = await rows(session, "SELECT * FROM t ORDER BY id")
    assert stored == await rows(session, "SELECT * FROM u ORDER BY id")
    await session.execute("DELETE FROM t")
    flat = [value for row in given for value in row]
    await session.execute(f"INSERT INTO t VALUES {', '.join(['(?, ?)'] * len(given))} {conflict}", flat)
    assert await rows(session, "SELECT * FROM t ORDER BY id") == stored


@pytest.mark.parametrize("places", [("?", "?", "?"), ("$id", "$v", "$v")])
async def test_an_upsert_of_many_rows_may_have_parameters_beside_them(
    session: DatabaseSession, places: tuple[str, str, str]
) -> None:
    upsert = "INSERT INTO t VALUES ({}, {}) ON CONFLICT (id) DO UPDATE SET v = t.v || {}".format(*places)
    given = [(9, "a", "a"), (9, "b", "b"), (8, "c", "c"), (9, "d", "d")]
    named = places[0] == "$id"
    many = [{"id": row[0], "v": row[1]} if named else row for row in given]
    assert (await session.execute_many(upsert, many)).changed == 4
    assert await rows(session, "SELECT * FROM t ORDER BY id") == [(8, "c"), (9, "abd")]


async def test_a_query_whose_keys_repeat_is_upserted_in_its_order(session: DatabaseSession) -> None:
    await session.execute("INSERT INTO t VALUES (1, 'old')")
    changed = await session.execute(
        "WITH s AS (SELECT $2 AS k, r.range AS n FROM range(3) r) INSERT INTO t AS x (id, v) "
        "SELECT k + n % 2, 'n' || n FROM s ORDER BY n ON CONFLICT (id) DO UPDATE SET v = x.v || $1 || excluded.v "
        "RETURNING id",
        ["+", 1],
    )
    assert [each.changed for each in changed] == [3]
    assert await rows(session, "SELECT * FROM t ORDER BY id") == [(1, "old+n0+n2"), (2, "n1")]


async def test_a_replaced_row_keeps_columns_that_are_not_named(session: DatabaseSession) -> None:
    await session.execute("CREATE TABLE w (id BIGINT PRIMARY KEY, a BIGINT DEFAULT 7, b BIGINT)")
    await session.execute("INSERT INTO w VALUES (1, 0, 0)")
    many = "INSERT OR REPLACE INTO w (id, b) VALUES (?, ?)"
    assert (await session.execute_many(many, [(1, 1), (2, 2), (1, 3), (2, 4)])).changed == 4
    assert await rows(session, "SELECT * FROM w ORDER BY id") == [(1, 0, 3), (2, 7, 4)]
    with pytest.raises(SqlError, match="BY NAME"):
        await session.execute("INSERT OR REPLACE INTO w BY NAME SELECT 1 AS id, r.range AS b FROM range(2) r")
    by_name = (
        "INSERT INTO w BY NAME SELECT 1 AS id, r.range AS b FROM range(9) r ON CONFLICT (id) DO UPDATE SET b "
        "= excluded.b"
    )
    await session.execute(by_name)
    nothing = "INSERT INTO w SELECT 1, 1, 1 WHERE false ON CONFLICT DO UPDATE SET b = 1 RETURNING id, b"
    [result] = await session.execute(nothing)
    assert result.table is not None
    assert (result.changed, result.table.column_names) == (0, ["id", "b"])
    assert await rows(session, "SELECT * FROM w WHERE id = 1") == [(1, 0, 8)]


async def test_events_of_an_upsert_tell_of_every_change_of_a_row(session: DatabaseSession) -> None:
    await session.execute("CREATE TOPIC x; ALTER TOPIC x ADD SOURCE t ON INSERT, UPDATE WITH (payload = 'full')")
    await session.execute_many(
        "INSERT INTO t VALUES (?, ?) ON CONFLICT (id) DO UPDATE SET v = excluded.v", [(9, "a"), (9, "b"), (9, "c")]
    )
    told = await rows(session, "SELECT op, payload->>'v' FROM TOPIC x ORDER BY offset")
    assert told == [("INSERT", "a"), ("UPDATE", "b"), ("UPDATE", "c")]


@pytest.mark.parametrize("engine", ["rocksdb", "disk"])
@pytest.mark.parametrize("payload", ["key", "full"])
async def test_a_deleted_row_is_a_deletion_for_key_compaction(
    database: Database, session: DatabaseSession, engine: str, payload: str
) -> None:
    await session.execute(
        f"CREATE TOPIC x WITH (engine = '{engine}', cleanup = 'compact', delete_retention_seconds = 0);"
        f"ALTER TOPIC x ADD SOURCE t ON INSERT, UPDATE, DELETE WITH (payload = '{payload}')"
    )
    await session.execute("INSERT INTO t VALUES (1, 'a'), (2, 'b'); DELETE FROM t WHERE id = 1")
    await session.execute("INSERT INTO t VALUES (3, 'c')")
    events = "SELECT key, op, payload->>'id' FROM TOPIC x ORDER BY offset"
    told = [("1", "INSERT", "1"), ("2", "INSERT", "2"), ("1", "DELETE", "1"), ("3", "INSERT", "3")]
    async with asyncio.timeout(60):
        while await rows(session, events) != told:
            await asyncio.sleep(0.01)  # the relay has not moved them on
        while await rows(session, events) != [told[1], told[3]]:
            [cleaned] = (await clean_all(database.log, topic="x")).values()
            assert not isinstance(cleaned, LlogError), cleaned


async def test_a_table_that_becomes_a_source_is_not_dropped_meanwhile(
    database: Database, session: DatabaseSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    await session.execute("CREATE TOPIC x")
    tables = (await database.require_tables()).tables
    checked, loop, dropping = tables.check_route, asyncio.get_running_loop(), list[asyncio.Future[Any]]()

    def slowly(*given: Any) -> None:
        checked(*given)
        future = asyncio.run_coroutine_threadsafe(database.session().execute("DROP TABLE t"), loop)
        dropping.append(asyncio.wrap_future(future, loop=loop))
        wait([future], timeout=0.2)

    monkeypatch.setattr(tables, "check_route", slowly)
    await session.execute("ALTER TOPIC x ADD SOURCE t ON INSERT")
    with pytest.raises(SqlError, match="is the source of a topic"):
        await dropping[0]


async def test_a_statement_that_is_run_with_many_parameters_fails_at_its_place(session: DatabaseSession) -> None:
    with pytest.raises(SqlError) as caught:
        await session.execute_many("UPDATE t SET v = nope\nWHERE id = ?", [(1,), (2,)])
    assert (caught.value.line, caught.value.column) == (1, 18)
    assert not session.in_transaction


async def test_a_keyword_where_no_name_can_stand_is_not_said_to_be_one(session: DatabaseSession) -> None:
    with pytest.raises(SqlError) as caught:
        await session.execute("DELETE FROM t LIMIT 1")
    assert caught.value.hint == ""


async def test_memory_for_sql_is_a_setting_that_the_error_names(tmp_path: Path) -> None:
    settings = Settings(data_dir=str(tmp_path), sql_memory_max_bytes=64 << 20)
    async with opened_log(settings) as log:
        database = Database(log, settings)
        opened = database.session()
        with pytest.raises(SqlError) as caught:
            await opened.execute("SELECT list(repeat('x', 100000) || i) FROM range(10000) r(i)")
        assert "LLOG_SQL_MEMORY_MAX_BYTES" in caught.value.hint
        await opened.close()
        await database.close()


@pytest.mark.parametrize("number", [1, 20])
async def test_a_primary_key_may_be_spelled_otherwise_than_its_columns(session: DatabaseSession, number: int) -> None:
    await session.execute("CREATE TABLE s (Id BIGINT, Kind VARCHAR, PRIMARY KEY (ID, kind)); CREATE TOPIC s")
    await session.execute("ALTER TOPIC s ADD SOURCE s ON INSERT WITH (payload = 'key')")
    await session.execute("INSERT INTO s VALUES " + ", ".join(f"({n}, 'a')" for n in range(number)))
    found = await rows(session, "CONSUME FROM s GROUP 'g'")
    assert len(found) == number
    assert '[0,"a"]' in found[0]
    assert '{"Id":0,"Kind":"a"}' in found[0]


async def test_events_that_nobody_can_tell_of_are_shown_and_settled(
    database: Database, session: DatabaseSession
) -> None:
    await session.execute("CREATE TOPIC x WITH (engine = 'object'); ALTER TOPIC x ADD SOURCE t ON INSERT")
    held = await database.require_tables()
    producer = Producer(id=f"outbox/{await held.relay._store.name()}", sequence=0, since=1)
    records = [Record(payload=b"of another life")]
    await database.appender.append([AppendGroup(topic="x", partition=0, records=records, producer=producer)])
    await session.execute("INSERT INTO t VALUES (1, 'a'), (2, 'b')")
    async with asyncio.timeout(30):
        while (await rows(session, "SELECT problem FROM system.routes")) == [(None,)]:
            await asyncio.sleep(0.01)
    assert "SETTLE OUTBOX PARTITION 0" in (await rows(session, "SELECT problem FROM system.routes"))[0][0]
    await session.execute("ALTER TOPIC x SETTLE OUTBOX PARTITION ? AS MISSING", [0])
    async with asyncio.timeout(30):
        while (await rows(session, "SELECT count(*) FROM TOPIC x")) != [(3,)]:
            await asyncio.sleep(0.01)
    assert await rows(session, "SELECT problem FROM system.routes") == [(None,)]
    with pytest.raises(SqlError, match="wait to be settled"):
        await session.execute("ALTER TOPIC x SETTLE OUTBOX PARTITION 0 AS APPENDED")
