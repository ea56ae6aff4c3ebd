"""Several brokers on one log, each with the directories of its own machine: one owns, the others send requests on to
it.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pyarrow as pa
import pytest

from devtools.servers.postgres import PostgresServer
from llog.errors import LogOwned
from tests.broker.test_process import LIMIT_S, Running, running

ARROW = dict.fromkeys(("accept", "content-type"), "application/vnd.apache.arrow.stream")
Machine = Callable[..., Running]

on_each_store = pytest.mark.parametrize("machine", ["sqlite", "postgres"], indirect=True)


def of_each_engine(*on_postgres: str) -> pytest.MarkDecorator:
    """Both engines on SQLite, and these on PostgreSQL as well."""
    cases = [("sqlite", "disk"), ("sqlite", "rocksdb"), *(("postgres", engine) for engine in on_postgres)]
    return pytest.mark.parametrize(("machine", "engine"), cases, indirect=["machine"])


@pytest.fixture
def machine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Machine]:
    """Starts the broker of a machine. Metadata is in SQLite, unless the test says otherwise."""
    stores = {}
    if getattr(request, "param", "sqlite") == "postgres":
        server: PostgresServer = request.getfixturevalue("postgres")
        stores = server.environment(f"owners_{uuid4().hex}") | {"LLOG_BLOBS": f"file://{tmp_path}/blobs"}
    with ExitStack() as stack:

        def started(name: str, **settings: str) -> Running:
            directories = {f"LLOG_{each}_DIR": str(tmp_path / name / each.lower()) for each in ("SEGMENTS", "ROCKSDB")}
            return stack.enter_context(running(tmp_path, "serve", environment=stores | directories | settings))

        yield started


def address(broker: Running) -> str:
    return str(broker.client.base_url).rstrip("/")


def made(broker: Running, name: str, engine: str, **asked: object) -> httpx.Response:
    response = broker.client.post("/topics", json={"name": name, "engine": engine, **asked})
    assert response.status_code == 201, response.text
    return response


def produced(broker: Running, *items: tuple[str, str]) -> list[dict[str, Any]]:
    asked = [{"topic": topic, "partition": 0, "records": [value]} for topic, value in items]
    response = broker.client.post("/produce", json={"topic_partitions": asked})
    found: list[dict[str, Any]] = response.json()["topic_partitions"]
    return found


def consumed(broker: Running, *topics: str, offset: int = 1, **asked: object) -> dict[str, list[str]]:
    items = [{"topic": topic, "partition": 0, "fetch_offset": offset} for topic in topics]
    response = broker.client.post("/consume", json={"topic_partitions": items, **asked})
    assert response.status_code == 200, response.text
    return {
        item["topic"]: [each["payload"] for each in item["records"]] for item in response.json()["topic_partitions"]
    }


def sql(broker: Running, text: str) -> httpx.Response:
    return broker.client.post("/sql", json={"sql": text})


def rows(broker: Running, text: str) -> list[Any]:
    response = sql(broker, text)
    assert response.status_code == 200, response.text
    found: list[Any] = response.json()["results"][-1]["rows"]
    return found


def forwarded(broker: Running) -> int:
    return int(broker.client.get("/metrics").json()["llog_forwarded_requests_total"])


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def stream(*values: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    table = pa.table({"value": pa.array(values)})
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    content: bytes = sink.getvalue().to_pybytes()
    return content


@of_each_engine("disk", "rocksdb")
def test_every_broker_serves_the_topics_of_the_one_that_owns_them(machine: Machine, engine: str) -> None:
    owner, other = machine("1"), machine("2")
    made(owner, "t", engine)
    assert produced(owner, ("t", "a"))[0]["start_offset"] == 1
    assert produced(other, ("t", "b"))[0]["start_offset"] == 2
    posted = other.client.post("/topics/t/partitions/0/records", content=stream(b"c"), headers=ARROW)
    assert posted.json()["start_offset"] == 3
    assert consumed(other, "t") == consumed(owner, "t") == {"t": ["a", "b", "c"]}
    fetched = other.client.get("/topics/t/partitions/0/records", params={"offset": 2}, headers=ARROW)
    assert fetched.headers["llog-next-offset"] == "4"
    assert fetched.headers["llog-owner"] == address(owner)
    assert pa.ipc.open_stream(fetched.content).read_all()["value"].to_pylist() == [b"b", b"c"]
    assert other.client.get("/topics/t/partitions/0/offset", params={"timestamp_ms": 0}).json() == {"offset": 1}
    described = other.client.get("/topics/t").json()
    assert described["bounds"][0]["next_offset"] == 4
    assert described["owner"]["address"] == address(owner)
    group = {"topic": "t", "group_id": "g"}
    messages = other.client.post("/topics/consume", json={**group, "start": "Earliest"}).json()["messages"]
    assert [each["offset"] for each in messages] == [1, 2, 3]
    acked = other.client.post("/topics/ack", json={**group, "partition_id": 0, "upto_offset": 2})
    assert acked.status_code == 200, acked.text
    assert "g" in other.client.post("/groups/list", json={}).json()["groups"]
    assert forwarded(other) > 0
    assert forwarded(owner) == 0
    assert other.client.get("/topics/t/partitions/7/records", params={"offset": 1}).status_code == 404
    assert other.client.delete("/topics/t").status_code == 204
    assert owner.client.get("/topics/t").status_code == 404


@pytest.mark.parametrize("engine", ["disk", "rocksdb"])
def test_records_that_name_no_partition_reach_the_owner_of_their_topic(machine: Machine, engine: str) -> None:
    owner, other = machine("a"), machine("b")
    made(owner, "t", engine, partitions=3)
    sent = {"records": [{"key": f"{n}", "value": {"n": n}} for n in range(9)]}
    through = [broker.client.post("/topics/t/records", json=sent) for broker in (owner, other)]
    assert [response.status_code for response in through] == [200, 200], through[1].text
    first, second = (response.json()["records"] for response in through)
    assert [each["partition"] for each in second] == [each["partition"] for each in first]
    counts = [sum(each["partition"] == partition for each in first) for partition in range(3)]
    assert [each["offset"] for each in second] == [each["offset"] + counts[each["partition"]] for each in first]
    assert forwarded(other) == 1
    with other.client.stream("GET", "/topics/t/tail?offset=earliest") as response:
        assert response.headers["llog-owner"] == address(owner)
        events = (line for line in response.iter_lines() if line.startswith("data: "))
        assert sorted(json.loads(next(events)[6:])["value"]["n"] for _ in range(18)) == sorted([*range(9)] * 2)


def test_an_owner_answers_what_is_sent_on_to_it_whatever_its_role(machine: Machine) -> None:
    writer, reader = machine("1", LLOG_ROLE="write"), machine("2", LLOG_ROLE="read")
    made(writer, "t", "disk")
    produced(writer, ("t", "a"))
    assert consumed(reader, "t") == {"t": ["a"]}
    item = {"topic_partitions": [{"topic": "t", "partition": 0, "records": ["b"]}]}
    refused = reader.client.post("/produce", json=item)
    assert (refused.status_code, refused.json()["code"]) == (421, "wrong_role")


def test_a_poll_of_topics_of_several_owners_ends_with_the_first_record_of_any(machine: Machine) -> None:
    first, second, asked = machine("1"), machine("2"), machine("3")
    made(first, "one", "disk")
    made(second, "two", "disk")
    made(asked, "blobs", "object")
    everywhere = ("one", "two", "blobs")
    answers = produced(asked, *((topic, "a") for topic in everywhere))
    assert [each["start_offset"] for each in answers] == [1, 1, 1]
    assert consumed(asked, *everywhere) == {topic: ["a"] for topic in everywhere}
    for length, topic in enumerate(everywhere, start=1):
        found: list[dict[str, list[str]]] = []

        def poll(offset: int = length + 1, found: list[dict[str, list[str]]] = found) -> None:
            found.append(consumed(asked, *everywhere, offset=offset, max_wait_ms=60_000))

        polling = threading.Thread(target=poll)
        polling.start()
        until(lambda: int(asked.client.get("/metrics").json()["llog_waiting_requests"]) > 0)
        produced(first, (topic, "b"))
        polling.join(LIMIT_S)
        assert found == [{each: ["b"] if each == topic else [] for each in everywhere}]
        produced(first, *((each, "b") for each in everywhere if each != topic))


@on_each_store
def test_sql_is_run_by_the_owner_of_the_tables(machine: Machine) -> None:
    owner, other = machine("1"), machine("2")
    assert sql(owner, "CREATE TABLE t (id INT PRIMARY KEY, name TEXT)").status_code == 200
    assert sql(other, "INSERT INTO t VALUES (1, 'a')").status_code == 200
    assert rows(other, "SELECT id, name FROM t") == rows(owner, "SELECT id, name FROM t") == [[1, "a"]]
    table = other.client.post(
        "/sql", json={"sql": "SELECT id FROM t"}, headers={"accept": "application/vnd.apache.arrow.stream"}
    )
    assert pa.ipc.open_stream(table.content).read_all()["id"].to_pylist() == [1]
    refused = sql(other, "INSERT INTO t VALUES (1, 'b')")
    assert (refused.status_code, refused.json()["code"]) == (409, "constraint")
    names = other.client.post("/sql/names", json={})
    assert "t" in names.text
    other.client.post("/sql", content="SELECT 1", headers={"content-type": "application/sql"}).raise_for_status()
    page = {"content-type": "text/plain", "origin": "http://elsewhere"}
    assert other.client.post("/sql", content="SELECT 1", headers=page).status_code == 400


@on_each_store
def test_of_two_brokers_that_make_tables_at_once_one_has_them_all(machine: Machine) -> None:
    brokers = [machine("1"), machine("2")]
    answers: dict[int, httpx.Response] = {}

    def make(number: int) -> None:
        answers[number] = sql(brokers[number], f"CREATE TABLE t{number} (id INT PRIMARY KEY)")

    threads = [threading.Thread(target=make, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    for number, answer in answers.items():
        assert answer.status_code in (200, 421), answer.text
        if answer.status_code == 421:
            assert answer.headers["llog-owner"] == address(brokers[1 - number])
            sql(brokers[number], f"CREATE TABLE t{number} (id INT PRIMARY KEY)").raise_for_status()
    for broker in brokers:
        for number in (0, 1):
            sql(broker, f"INSERT INTO t{number} VALUES ({id(broker) % 1000003})").raise_for_status()
            assert len(rows(broker, f"SELECT id FROM t{number}")) >= 1
    assert len(rows(brokers[0], "SELECT id FROM t0")) == len(rows(brokers[1], "SELECT id FROM t1")) == 2


def test_without_forwarding_the_answer_names_the_owner(machine: Machine) -> None:
    owner, other = machine("1"), machine("2", LLOG_BROKER_FORWARD_TIMEOUT_MS="0")
    made(owner, "t", "disk")
    sql(owner, "CREATE TABLE rows (id INT PRIMARY KEY)").raise_for_status()
    produced(owner, ("t", "a"))
    for refused in (sql(other, "SELECT * FROM rows"), other.client.get("/topics/t")):
        assert refused.status_code == 421
        assert refused.headers["llog-owner"] == refused.json()["owner"] == address(owner)
        assert refused.json()["code"] == LogOwned.code
    (item,) = produced(other, ("t", "b"))
    assert item["error"]["owner"] == address(owner)
    assert forwarded(other) == 0


def test_a_forwarded_request_is_not_sent_on_once_more(machine: Machine) -> None:
    owner, other = machine("1"), machine("2")
    made(owner, "t", "disk")
    produced(owner, ("t", "a"))
    refused = other.client.get("/topics/t", headers={"llog-forwarded": "1"})
    assert (refused.status_code, refused.headers["llog-owner"]) == (421, address(owner))


def test_a_broker_on_every_address_says_that_it_cannot_be_reached(machine: Machine) -> None:
    owner, other = machine("1", LLOG_BROKER_BIND_HOST="0.0.0.0"), machine("2")
    made(owner, "t", "disk")
    produced(owner, ("t", "a"))
    refused = other.client.get("/topics/t")
    assert (refused.status_code, refused.json()["code"]) == (409, "log_owned")
    assert str(owner.process.pid) in refused.json()["detail"]
    assert "LLOG_BROKER_ADVERTISED_ADDRESS" in refused.json()["detail"]


@of_each_engine("rocksdb")
def test_what_is_on_a_machine_waits_for_a_broker_there(machine: Machine, engine: str, tmp_path: Path) -> None:
    owner, other = machine("1", LLOG_SESSION_TIMEOUT_MS="2s"), machine("2")
    made(owner, "t", engine)
    produced(owner, ("t", "a"))
    assert consumed(other, "t") == {"t": ["a"]}
    owner.process.send_signal(signal.SIGKILL)
    owner.process.wait(LIMIT_S)

    def answer() -> dict[str, Any]:
        found: dict[str, Any] = other.client.get("/topics/t").json()
        return found

    assert answer()["code"] == "owner_unavailable", "it cannot be reached"
    until(lambda: "no process that has the right one runs" in answer()["detail"])
    (item,) = produced(other, ("t", "b"))
    assert item["error"]["code"] == "owner_unavailable"
    assert not (tmp_path / "2").exists(), "nobody made a second one"
    again = machine("1")
    until(lambda: other.client.get("/topics/t").status_code == 200)
    assert produced(other, ("t", "c"))[0]["start_offset"] == 2
    assert consumed(again, "t") == {"t": ["a", "c"]}


@of_each_engine("disk")
def test_an_owner_that_was_paused_beyond_its_session_goes_on_as_the_one_owner(machine: Machine, engine: str) -> None:
    owner = machine("1", LLOG_SESSION_TIMEOUT_MS="2s")
    beside = machine("1", LLOG_BROKER_FORWARD_TIMEOUT_MS="1s")  # on the same machine, with the same directories
    made(owner, "t", engine)
    produced(owner, ("t", "a"))
    assert produced(beside, ("t", "b"))[0]["start_offset"] == 2
    owner.process.send_signal(signal.SIGSTOP)
    try:
        (item,) = produced(beside, ("t", "c"))
        assert item["error"]["code"] in ("outcome_unknown", "owner_unavailable")
        time.sleep(3)  # its session ends; the lock that it has does not
        (item,) = produced(beside, ("t", "c"))
        assert "error" in item, "there must be no second owner"
    finally:
        owner.process.send_signal(signal.SIGCONT)
    until(lambda: "error" not in produced(beside, ("t", "d"))[0])
    until(lambda: (beside.client.get("/topics/t").json().get("owner") or {}).get("address") == address(owner))
    assert consumed(owner, "t") == consumed(beside, "t")
    assert consumed(owner, "t")["t"][:2] == ["a", "b"]


def test_the_owner_logs_a_forwarded_request_under_the_ids_of_its_client(machine: Machine) -> None:
    logs = {"LLOG_ACCESS_LOG": "on", "LLOG_LOG_FORMAT": "json"}
    owner, other = machine("1", **logs), machine("2", **logs)
    made(owner, "t", "disk")
    trace_id, span_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    given = {"x-request-id": "r-1", "traceparent": f"00-{trace_id}-{span_id}-01"}
    item = {"topic": "t", "partition": 0, "records": ["x"]}
    assert other.client.post("/produce", json={"topic_partitions": [item]}, headers=given).status_code == 200
    new_id = other.client.get("/topics/t/partitions/0/records", params={"offset": 1}).headers["x-request-id"]

    def logged(broker: Running, path: str) -> list[tuple[str, str | None]]:
        lines = map(json.loads, broker.errors.splitlines())
        return [(line["request_id"], line.get("trace_id")) for line in lines if line.get("path") == path]

    for path, ids in (("/produce", ("r-1", trace_id)), ("/topics/t/partitions/0/records", (new_id, None))):
        until(lambda path=path, ids=ids: logged(other, path) == logged(owner, path) == [ids])  # type: ignore[misc]
