"""SQL through a broker that is a process of its own: the connection, the command, and how waits end with the broker."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import llog
import llog.client as dbapi
from llog.client.connection import Connection
from tests.broker.test_process import LIMIT_S, LLOG, Running, running


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Running]:
    with running(tmp_path, "serve") as started:
        yield started


@pytest.fixture
def connection(broker: Running) -> Iterator[Connection]:
    with llog.connect(str(broker.client.base_url)) as made:
        yield made


def _llog(directory: Path, *arguments: str, code: int = 0, stdin: str = "") -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*LLOG, *arguments], cwd=directory, input=stdin, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == code, (done.stdout, done.stderr)
    return done


def test_values_come_back_as_they_went(connection: Connection) -> None:
    connection.execute(
        "CREATE TABLE app.t (id BIGINT PRIMARY KEY, d DECIMAL(9,2), b BLOB, ts TIMESTAMPTZ, name VARCHAR, j JSON)"
    )
    row = (2**62, Decimal("1.50"), b"\xff\x00", datetime(2026, 1, 31, 12, tzinfo=UTC), "it's; ü", '{"a":1}')
    assert connection.execute("INSERT INTO app.t VALUES (?, ?, ?, ?, ?, ?)", row).rowcount == 1
    assert connection.execute("SELECT * FROM app.t").fetchall() == [row]
    assert connection.executemany("INSERT INTO app.t (id) VALUES (?)", [(n,) for n in range(100)]).rowcount == 100
    upsert = "INSERT INTO app.t (id, name) VALUES (?, ?) ON CONFLICT (id) DO UPDATE SET name = excluded.name"
    assert connection.executemany(upsert, [(9, "a"), (9, "b"), (9, "c")]).rowcount == 3
    assert connection.execute("SELECT name FROM app.t WHERE id = 9").fetchall() == [("c",)]
    assert connection.insert("app.t", pa.table({"id": range(1000, 1500)})) == 500
    assert connection.execute("SELECT count(*) FROM app.t").fetchone() == (601,)


def test_errors_come_back_as_they_were(connection: Connection) -> None:
    with pytest.raises(dbapi.ProgrammingError) as raised:
        connection.execute("SELECT 1;\nSELECT * FORM nowhere")
    assert raised.value.line == 2
    with pytest.raises(dbapi.ProgrammingError, match=r"\n  SELECT nothing\n +\^"):
        connection.execute("SELECT nothing")
    with pytest.raises(dbapi.ProgrammingError) as raised:
        connection.execute("SELECT * FROM app.nowhere")
    assert "nowhere" in str(raised.value)
    connection.execute("CREATE TABLE app.t (id INTEGER PRIMARY KEY)")
    connection.execute("INSERT INTO app.t VALUES (1)")
    with pytest.raises(dbapi.IntegrityError):
        connection.execute("INSERT INTO app.t VALUES (1)")
    with pytest.raises(dbapi.OperationalError) as refused:
        connection.execute("SELECT len(repeat('x', 2000000000))")
    assert refused.value.code == "sql_memory"
    assert "LLOG_SQL_MEMORY_MAX_BYTES" in (refused.value.hint or "")


def test_a_transaction_is_one_request(connection: Connection) -> None:
    connection.execute("CREATE TABLE app.t (id INTEGER PRIMARY KEY)")
    with pytest.raises(dbapi.ProgrammingError, match="one request"):
        connection.begin()
    cursor = connection.execute("BEGIN; INSERT INTO app.t VALUES (1); SELECT count(*) AS n FROM app.t; COMMIT")
    kinds = [cursor.rowcount]
    while cursor.nextset():
        kinds.append(cursor.rowcount)
    assert kinds == [0, 1, 1, 0]
    with pytest.raises(dbapi.IntegrityError):
        connection.execute("BEGIN; INSERT INTO app.t VALUES (2); INSERT INTO app.t VALUES (1); COMMIT")
    assert connection.execute("SELECT count(*) FROM app.t").fetchone() == (1,)


def test_what_a_connection_consumed_it_can_acknowledge(connection: Connection) -> None:
    connection.execute("CREATE TABLE app.t (id INTEGER PRIMARY KEY)")
    connection.execute("CREATE TOPIC app.changes; ALTER TOPIC app.changes ADD SOURCE app.t ON INSERT")
    connection.executemany("INSERT INTO app.t VALUES (?)", [(n,) for n in range(3)])
    rows = connection.execute("CONSUME FROM app.changes GROUP 'g' LIMIT 10").arrow().to_pylist()
    assert [json.loads(row["payload"]) for row in rows] == [{"id": 0}, {"id": 1}, {"id": 2}]
    connection.execute(f"ACK app.changes GROUP 'g' UPTO OFFSET {rows[-1]['offset']}")
    assert connection.execute("CONSUME FROM app.changes GROUP 'g'").fetchall() == []
    connection.execute("INSERT INTO app.t VALUES (9)")
    with connection.consumer("app.changes", group="g", timeout=0.0) as consumer:
        assert [message.json() for message in consumer] == [{"id": 9}]


def test_an_ack_of_what_others_hold_is_warned_of(broker: Running, connection: Connection, tmp_path: Path) -> None:
    connection.execute("CREATE TOPIC t")
    connection.execute("INSERT INTO TOPIC t (payload) VALUES ('a'), ('b'), ('c')")
    connection.execute("CONSUME FROM t GROUP 'g' MEMBER 'w1' LIMIT 1")
    warning = "acknowledged nothing: of t/0, offset 1 is held by 'w1'"
    cursor = connection.execute("ACK t GROUP 'g' UPTO OFFSET 1")
    assert cursor.messages == [(dbapi.Warning, warning)]
    assert cursor.fetchall() == [("t", "g", 0, 1)]
    assert cursor.execute("ACK t GROUP 'g' MEMBER 'w1' UPTO OFFSET 1").messages == []
    shown = _llog(tmp_path, "sql", "--url", str(broker.client.base_url), "-c", "ACK t GROUP 'g' UPTO OFFSET 1")
    assert "warning" not in shown.stderr

    def sql(text: str, **asked: str) -> dict[str, Any]:
        [result] = broker.client.post("/sql", json={"sql": text, **asked}).json()["results"]
        found: dict[str, Any] = result
        return found

    crashed, alive = (sql("CONSUME FROM t GROUP 'g' LIMIT 1")["member"] for _ in range(2))
    assert "warnings" not in sql("ACK t GROUP 'g' UPTO OFFSET 3", member=alive)
    assert "without a name" in sql("ACK t GROUP 'g' UPTO OFFSET 3", member=alive)["warnings"][0]
    shown = _llog(tmp_path, "sql", "--url", str(broker.client.base_url), "-c", "ACK t GROUP 'g' UPTO OFFSET 3")
    assert "warning: acknowledged nothing: of t/0, offset 2 is held by a member without a name" in shown.stderr
    assert sql("ACK t GROUP 'g' UPTO OFFSET 3")["rows"] == [["t", "g", 0, 4]], f"an ACK without a name is for {crashed}"


def test_the_command_goes_through_the_broker_that_owns_the_log(broker: Running, tmp_path: Path) -> None:
    url = str(broker.client.base_url)
    script = "CREATE TABLE app.t (id INTEGER PRIMARY KEY);\nBEGIN;\nINSERT INTO app.t VALUES (1);\nCOMMIT;\n"
    assert "CREATE TABLE" in _llog(tmp_path, "sql", "--url", url, stdin=script).stderr
    found = _llog(tmp_path, "sql", "--url", url, "--json", "-c", "SELECT * FROM app.t")
    assert json.loads(found.stdout) == {"id": 1}
    error = _llog(tmp_path, "sql", "-c", "SELECT * FROM app.t", code=1).stderr
    assert "--url" in error
    assert str(broker.process.pid) in error
    wrong = _llog(tmp_path, "sql", "--url", url, code=2, stdin="SELECT 1;\n\nSELECT FROM WHERE;").stderr
    assert "stdin, line 3" in wrong


def test_groups_are_listed_moved_and_deleted_through_the_broker_that_owns_their_topic(
    broker: Running, connection: Connection, tmp_path: Path
) -> None:
    connection.execute("CREATE TOPIC app.changes PARTITIONS 2")
    connection.execute(
        "INSERT INTO TOPIC app.changes (partition, payload) VALUES (0, '1'), (0, '2'), (0, '3'), (1, '4')"
    )
    connection.execute("CONSUME FROM app.changes GROUP 'g' MEMBER 'm' PARTITION 0 LIMIT 2")
    assert "--url" in _llog(tmp_path, "groups", "describe", "g", code=1).stderr

    def groups(*arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        return _llog(tmp_path, "groups", *arguments, "--url", str(broker.client.base_url), code=code)

    [listed] = json.loads(groups("list", "--json").stdout)
    assert listed == {
        "group": "g",
        "topics": ["app.changes"],
        "partitions": 2,
        "lag": 4,
        "outstanding": 2,
        "members": ["m"],
    }
    [share, _] = json.loads(groups("describe", "g", "--json").stdout)
    assert (share["offset"], share["next_offset"], share["lag"], share["holders"]) == (1, 4, 3, ["m"])
    assert "in use by 'm'" in groups("delete", "g", "--yes", code=2).stderr
    assert groups("reset", "g", "app.changes", "--to", "latest").stdout.splitlines() == [
        "group g is at offset 4 of app.changes/0",
        "group g is at offset 2 of app.changes/1",
    ]
    assert "9" in groups("reset", "g", "app.changes", "--partition", "0", "--to", "9", code=2).stderr
    assert groups("delete", "g", "--yes").stdout == "deleted group g: 2 positions\n"
    assert "no group 'g'" in groups("describe", "g", code=2).stderr
    assert json.loads(groups("list", "--json").stdout) == []


def test_a_wait_does_not_hold_up_the_end_of_the_broker(broker: Running, connection: Connection) -> None:
    connection.execute("CREATE TOPIC app.quiet")
    ends: list[BaseException] = []

    def wait() -> None:
        try:
            connection.execute("CONSUME FROM app.quiet GROUP 'g' WAIT '60 seconds'")
        except dbapi.Error as error:
            ends.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    while "sql" not in broker.client.get("/metrics").text or waiting.ident is None:
        pass
    assert broker.end() == 0
    waiting.join(LIMIT_S)
    assert not waiting.is_alive()


def test_an_interrupt_cancels_a_statement_of_the_command(tmp_path: Path) -> None:
    _llog(tmp_path, "sql", "-c", "CREATE TOPIC app.quiet")
    command = "SELECT 1 AS ready; CONSUME FROM app.quiet WAIT '60 seconds'"
    with subprocess.Popen(
        [*LLOG, "sql", "--json", "-c", command], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b'{"ready":1}\n'
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT_S) == 130
    _llog(tmp_path, "sql", "-c", "SELECT * FROM TOPIC app.quiet")


def test_a_broker_ends_although_a_statement_does_not(broker: Running, connection: Connection) -> None:
    connection.execute("CREATE TABLE app.t (id INTEGER PRIMARY KEY)")
    endless = "SELECT levenshtein(repeat('a', 3000000), repeat('b', 3000000)) FROM app.t"
    body = {"sql": f"INSERT INTO app.t VALUES (1); {endless}"}
    answers: list[int] = []
    asking = threading.Thread(target=lambda: answers.append(broker.client.post("/sql", json=body).status_code))
    asking.start()
    while connection.execute("SELECT count(*) FROM app.t").fetchone() == (0,):
        pass
    assert broker.end(signal.SIGTERM) == 0
    asking.join(LIMIT_S)
    assert answers == [503]
