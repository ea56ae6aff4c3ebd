"""`llog.connect()` as PEP 249 wants it. The database is a stand-in: what SQL means is tested where it is made."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import llog
import llog.client as dbapi
from llog import errors
from llog.client.connection import Connection
from llog.client.exceptions import to_dbapi_exception
from llog.sql.wire import param_in, param_out
from tests.sql_stand_in import StandIn, standing_in


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[StandIn]:
    return standing_in(monkeypatch)


@pytest.fixture
def connection(tmp_path: Path, opened: list[StandIn]) -> Iterator[Connection]:
    with llog.connect(data_dir=tmp_path) as made:
        yield made


def test_the_module_says_what_the_standard_asks_for() -> None:
    assert (dbapi.apilevel, dbapi.threadsafety, dbapi.paramstyle) == ("2.0", 2, "qmark")
    assert dbapi.connect is llog.connect
    for name in ("DataError", "OperationalError", "IntegrityError", "InternalError", "ProgrammingError"):
        assert issubclass(getattr(dbapi, name), dbapi.DatabaseError)
        assert getattr(Connection, name) is getattr(dbapi, name)
    assert issubclass(dbapi.NotSupportedError, dbapi.DatabaseError)
    assert issubclass(dbapi.DatabaseError, dbapi.Error)
    assert issubclass(dbapi.InterfaceError, dbapi.Error)
    assert not issubclass(dbapi.InterfaceError, dbapi.DatabaseError)
    assert not issubclass(dbapi.Warning, dbapi.Error)
    assert dbapi.DateFromTicks(0) == dbapi.Date(1970, 1, 1)
    assert dbapi.TimestampFromTicks(1.5) == dbapi.Timestamp(1970, 1, 1, 0, 0, 1, 500_000)
    assert dbapi.TimeFromTicks(61) == dbapi.Time(0, 1, 1)
    assert dbapi.Binary(b"x") == b"x"


def test_rows_are_fetched_one_by_one_some_at_a_time_and_all(connection: Connection) -> None:
    cursor = connection.cursor()
    assert cursor.execute("SELECT range AS n FROM range(10)") is cursor
    assert cursor.rowcount == 10
    assert cursor.fetchone() == (0,)
    assert cursor.fetchmany() == [(1,)]
    assert cursor.fetchmany(3) == [(2,), (3,), (4,)]
    assert next(cursor) == (5,)
    assert cursor.fetchall() == [(6,), (7,), (8,), (9,)]
    assert cursor.fetchone() is None
    assert cursor.fetchmany(5) == cursor.fetchall() == []
    assert list(connection.execute("SELECT 1 WHERE false")) == []


def test_more_rows_than_are_made_at_once_come_in_order(connection: Connection) -> None:
    assert [n for (n,) in connection.execute("SELECT range FROM range(10000)")] == list(range(10_000))


def test_the_description_names_columns_and_their_types(connection: Connection) -> None:
    cursor = connection.cursor()
    assert cursor.description is None
    cursor.execute("SELECT 1 AS a, 'x' AS b, 'x'::BLOB AS c, now() AS d, 1.5::DECIMAL(9,2) AS e, 2 AS a")
    assert cursor.description is not None
    assert [column[0] for column in cursor.description] == ["a", "b", "c", "d", "e", "a"]
    kinds = [dbapi.NUMBER, dbapi.STRING, dbapi.BINARY, dbapi.DATETIME, dbapi.NUMBER, dbapi.NUMBER]
    for column, kind in zip(cursor.description, kinds, strict=True):
        assert len(column) == 7
        assert column[1] == kind
        assert [each for each in (dbapi.STRING, dbapi.BINARY, dbapi.NUMBER, dbapi.DATETIME) if each == column[1]] == [
            kind
        ]
    assert cursor.description[4][4:6] == (9, 2)
    row = cursor.fetchone()
    assert row is not None
    assert (row[0], row[1], row[2], row[4], row[5]) == (1, "x", b"x", Decimal("1.50"), 2)


def test_parameters_go_by_order_and_by_name(connection: Connection) -> None:
    assert connection.execute("SELECT ?, ?", (1, "a")).fetchone() == (1, "a")
    assert connection.execute("SELECT $a", {"a": b"\xff"}).fetchone() == (b"\xff",)


def test_many_rows_of_parameters_may_come_from_an_iterator(connection: Connection) -> None:
    connection.execute("CREATE TABLE t (id INTEGER, name VARCHAR)")
    cursor = connection.executemany("INSERT INTO t VALUES (?, ?)", ((n, str(n)) for n in range(5)))
    assert cursor.rowcount == 5
    assert cursor.description is None
    assert connection.execute("SELECT count(*), max(name) FROM t").fetchall() == [(5, "4")]


@pytest.mark.parametrize(
    "rows",
    [
        pa.table({"id": [1, 2], "name": ["a", None]}),
        pa.record_batch({"id": [1, 2], "name": ["a", None]}),
        pd.DataFrame({"id": [1, 2], "name": ["a", None]}, index=[7, 8]),
        [{"id": 1, "name": "a"}, {"id": 2, "name": None}],
    ],
    ids=["table", "batch", "pandas", "dictionaries"],
)
def test_tables_of_other_libraries_are_inserted(connection: Connection, rows: Any) -> None:
    connection.execute("CREATE TABLE t (id BIGINT, name VARCHAR)")
    assert connection.insert("t", rows) == 2
    assert connection.execute("SELECT * FROM t ORDER BY id").fetchall() == [(1, "a"), (2, None)]


def test_what_has_no_columns_is_not_inserted(connection: Connection) -> None:
    with pytest.raises(dbapi.ProgrammingError, match="not a str"):
        connection.insert("t", "rows")


def test_several_statements_have_several_results(connection: Connection) -> None:
    cursor = connection.execute("SELECT 1 AS a; BEGIN; COMMIT; SELECT 2 AS b")
    assert cursor.fetchall() == [(1,)]
    assert cursor.nextset()
    with pytest.raises(dbapi.InterfaceError, match="BEGIN returns no rows"):
        cursor.fetchone()
    assert cursor.nextset()
    assert cursor.nextset()
    assert cursor.arrow().to_pylist() == [{"b": 2}]
    assert cursor.nextset() is None
    with pytest.raises(dbapi.InterfaceError):
        cursor.fetchall()


def test_a_transaction_is_begun_by_hand_and_ends_with_its_block(connection: Connection) -> None:
    assert connection.autocommit
    connection.commit()  # nothing is open: nothing happens
    connection.rollback()
    connection.begin()
    assert connection.in_transaction
    connection.commit()
    assert not connection.in_transaction
    with connection.transaction():
        assert connection.in_transaction
    assert not connection.in_transaction
    with pytest.raises(dbapi.ProgrammingError), connection.transaction():
        connection.execute("FAIL")
    assert not connection.in_transaction
    with pytest.raises(dbapi.NotSupportedError, match="begin"):
        connection.autocommit = False


def test_leaving_the_block_of_a_connection_closes_it(tmp_path: Path, opened: list[StandIn]) -> None:
    with llog.connect(data_dir=tmp_path) as connection:
        cursor = connection.execute("SELECT 1")
        connection.begin()
    assert opened[0].sessions[0].closed
    assert opened[0].closed
    for use in (connection.cursor, lambda: cursor.execute("SELECT 1"), cursor.fetchone, connection.begin):
        with pytest.raises(dbapi.InterfaceError, match="closed"):
            use()
    connection.close()


def test_a_closed_cursor_leaves_its_connection_open(connection: Connection) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")
    with pytest.raises(dbapi.InterfaceError, match="closed"):
        cursor.fetchone()
    assert connection.execute("SELECT 1").fetchone() == (1,)


def test_connections_of_one_process_share_the_log_until_the_last_is_closed(
    tmp_path: Path, opened: list[StandIn]
) -> None:
    first, second = llog.connect(data_dir=tmp_path), llog.connect(data_dir=tmp_path)
    first.execute("CREATE TABLE t (id INTEGER)")
    assert second.execute("SELECT count(*) FROM t").fetchone() == (0,)
    assert len(opened) == 1
    first.close()
    assert not opened[0].closed
    assert second.execute("SELECT count(*) FROM t").fetchone() == (0,)
    second.close()
    assert opened[0].closed
    with llog.connect(data_dir=tmp_path) as third:
        third.execute("SELECT 1")
    assert len(opened) == 2


def test_threads_may_share_a_connection(connection: Connection) -> None:
    connection.execute("CREATE TABLE t (id INTEGER)")

    def insert(start: int) -> None:
        for n in range(start, start + 20):
            connection.execute("INSERT INTO t VALUES (?)", [n])

    threads = [threading.Thread(target=insert, args=(n * 20,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert connection.execute("SELECT count(DISTINCT id) FROM t").fetchone() == (80,)


def test_an_error_of_llog_is_the_cause_of_the_one_that_is_raised(connection: Connection) -> None:
    with pytest.raises(dbapi.ProgrammingError) as raised:
        connection.execute("FAIL loudly")
    assert isinstance(raised.value.__cause__, errors.InvalidArgument)
    assert raised.value.code == "invalid_argument"
    assert str(raised.value) == "FAIL loudly"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (errors.ConstraintViolation("x"), dbapi.IntegrityError),
        (errors.TableNotFound("x"), dbapi.ProgrammingError),
        (errors.LogOwned("x"), dbapi.OperationalError),
        (errors.StoreUnavailable("x"), dbapi.OperationalError),
        (errors.CorruptBatch("x"), dbapi.InternalError),
        (errors.RecordTooLarge("x"), dbapi.DataError),
        (errors.MissingExtra("x"), dbapi.NotSupportedError),
    ],
)
def test_errors_have_their_place_in_the_hierarchy(error: errors.LlogError, kind: type[Exception]) -> None:
    found = to_dbapi_exception(error)
    assert type(found) is kind
    assert found.code == error.code


def test_the_place_and_the_hint_of_an_error_in_sql_are_kept() -> None:
    found = to_dbapi_exception(errors.SqlError("no such thing", line=3, column=7, hint="do this"))
    assert type(found) is dbapi.ProgrammingError
    assert (found.line, found.column, found.hint) == (3, 7, "do this")


def test_settings_that_are_none_and_addresses_that_are_none_are_refused() -> None:
    with pytest.raises(dbapi.ProgrammingError, match="nonsense"):
        llog.connect(nonsense="1")
    with pytest.raises(dbapi.ProgrammingError, match="http://host:port"):
        llog.connect("somewhere")
    with pytest.raises(dbapi.ProgrammingError, match="data_dir"):
        llog.connect("http://127.0.0.1:1", data_dir="x")


def test_a_broker_that_is_not_there_is_an_operational_error() -> None:
    with (
        llog.connect("http://127.0.0.1:1") as connection,
        pytest.raises(dbapi.OperationalError, match=r"127\.0\.0\.1:1"),
    ):
        connection.execute("SELECT 1")


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        7,
        2**70,
        -(2**127),
        1.5,
        float("inf"),
        "x",
        b"\xff",
        Decimal("1.50"),
        datetime(2026, 1, 31, 12, tzinfo=UTC),
        datetime(2026, 1, 31).date(),
        datetime(2026, 1, 31, 12, 1).time(),
        timedelta(days=-2, seconds=3, microseconds=1),
        UUID(int=7),
        {"a": [1]},
        [1, {"base64": "x"}],
    ],
    ids=repr,
)
def test_a_parameter_comes_to_a_broker_as_it_was(value: Any) -> None:
    assert param_in(param_out(value)) == value


@pytest.mark.parametrize(
    ("scalar", "value"),
    [
        (np.int64(3), 3),
        (np.float32(1.5), 1.5),
        (np.bool_(True), True),
        (np.str_("x"), "x"),
        (np.datetime64("2026-01-31T12:00:00.000001", "ns"), datetime(2026, 1, 31, 12, 0, 0, 1)),
    ],
    ids=repr,
)
def test_a_scalar_of_numpy_is_the_value_that_it_stands_for(tmp_path: Path, scalar: Any, value: Any) -> None:
    assert param_in(param_out(scalar)) == value
    with llog.connect(data_dir=tmp_path) as connection:
        assert connection.execute("SELECT ?", [scalar]).fetchall() == [(value,)]
        assert connection.execute("SELECT $x", {"x": scalar}).fetchall() == [(value,)]


@pytest.mark.parametrize("value", [object(), {1, 2}, np.array([1, 2])], ids=lambda value: type(value).__name__)
def test_what_is_no_value_is_no_parameter(value: Any) -> None:
    with pytest.raises(errors.InvalidArgument, match=type(value).__name__):
        param_out(value)


# --- on the real database


def test_rows_events_and_acknowledgements_go_through_one_connection(tmp_path: Path) -> None:
    with llog.connect(data_dir=tmp_path) as connection:
        connection.execute("CREATE TABLE app.t (id INTEGER PRIMARY KEY, name VARCHAR NOT NULL)")
        connection.execute("CREATE TOPIC app.changes; ALTER TOPIC app.changes ADD SOURCE app.t ON INSERT")
        connection.begin()
        connection.execute("INSERT INTO app.t VALUES (?, ?)", (1, "a"))
        with pytest.raises(dbapi.IntegrityError):
            connection.execute("INSERT INTO app.t VALUES (?, ?)", (1, "b"))
        connection.rollback()
        assert connection.execute("SELECT count(*) FROM app.t").fetchone() == (0,)
        with connection.transaction():
            connection.executemany("INSERT INTO app.t VALUES (?, ?)", [(1, "a"), (2, "b")])
        assert connection.insert("app.t", pd.DataFrame({"id": [3], "name": ["c"]})) == 1
        with connection.consumer("app.changes", group="g", auto_ack=False, timeout=0.0) as consumer:
            found = list(consumer)
            assert [message.json() for message in found] == [{"id": 1}, {"id": 2}, {"id": 3}]
            assert connection.ack("app.changes", "g", found[1].offset, member=consumer.member) == {0: 3}
    with llog.connect(data_dir=tmp_path) as connection:
        rows = connection.execute("SELECT last_acked_offset FROM system.topic_offsets WHERE \"group\" = 'g'").fetchall()
        assert rows == [(2,)]
        with pytest.raises(dbapi.ProgrammingError) as raised:
            connection.execute("SELECT *\nFORM app.t")
        assert raised.value.line == 2


def test_another_process_is_told_who_has_the_log(tmp_path: Path) -> None:
    with llog.connect(data_dir=tmp_path) as connection:
        connection.execute("CREATE TABLE app.t (id INTEGER PRIMARY KEY)")
        program = (
            "import llog, llog.client\n"
            "try:\n"
            f"    llog.connect(data_dir={str(tmp_path)!r}).execute('SELECT * FROM app.t')\n"
            "except llog.client.OperationalError as error:\n"
            "    print(error.code, error)\n"
        )
        said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert said.startswith("log_owned")
    assert str(os.getpid()) in said


def test_a_time_that_python_cannot_hold_is_an_error_of_the_standard(connection: Connection) -> None:
    cursor = connection.execute("SELECT 1, TIMESTAMP '12000-01-01' AS far")
    with pytest.raises(dbapi.DataError, match=r"'far'.*VARCHAR"):
        cursor.fetchall()
    assert connection.execute("SELECT DATE '12000-01-01'").arrow().num_rows == 1
