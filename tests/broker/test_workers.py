"""`llog serve --workers`: several processes on one port, which look like one broker from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from llog.broker.workers.directory import PREFIX
from llog.broker.workers.metrics import REPORT_TYPE
from llog.history.recorder import HistoryRecorder
from tests.broker.test_process import LIMIT_S, LLOG, Load, Running, _children_of, _is_alive, read_recorded, running

GROUP = {"topic": "t", "group_id": "g"}


class Workers(Running):
    """A broker with workers, and a client for each of them. What is asked of all is asked through the first."""

    _addresses: list[str] | None = None

    def at(self, number: int) -> httpx.Client:
        if self._addresses is None:
            self._addresses = [each["address"] for each in self.client.get("/metrics").json()["workers"]]
        return httpx.Client(base_url=self._addresses[number], timeout=LIMIT_S)

    def described(self, through: int = 0) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.metrics(through)["workers"]
        return found

    def metrics(self, through: int = 0) -> dict[str, Any]:
        with self.at(through) as client:
            found: dict[str, Any] = client.get("/metrics").json()
        return found

    def count(self, name: str, **labels: str) -> float:
        found = self.metrics().get(name, 0)
        if not isinstance(found, list):
            return float(found)
        return float(sum(each["value"] for each in found if labels.items() <= each.items()))

    def pids(self) -> list[int]:
        return [each["pid"] for each in self.described()]


@contextmanager
def workers(directory: Path, number: int = 2, **environment: str) -> Iterator[Workers]:
    started = Workers(directory, "serve", "--workers", str(number), environment=environment)
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.end()
        started.client.close()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def produce(client: httpx.Client, *records: str, **more: Any) -> dict[str, Any]:
    item = {"topic": "t", "partition": 0, "records": records, **more}
    response = client.post("/produce", json={"topic_partitions": [item]})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()["topic_partitions"][0]
    return found


def consume(client: httpx.Client, offset: int = 1, **asked: Any) -> list[str]:
    item = {"topic": "t", "partition": 0, "fetch_offset": offset}
    response = client.post("/consume", json={"topic_partitions": [item], **asked})
    assert response.status_code == 200, response.text
    return [each["payload"] for each in response.json()["topic_partitions"][0]["records"]]


def private_directories(pid: int) -> list[Path]:
    """Return the supervisors' directories that this process's workers were started with."""
    found = set()
    for child in _children_of(pid):
        for argument in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0"):
            if PREFIX.encode() in argument:
                found.add(Path(argument.decode()).parent)
    return sorted(found)


# --- starting and ending


def test_workers_share_a_port_whose_address_is_printed_once(tmp_path: Path) -> None:
    with workers(tmp_path, 3) as broker:
        assert broker.errors.count("listening on") == 1
        assert broker.errors.count("this is a new log") == 1
        described = broker.described()
        assert [each["up"] for each in described] == [True, True, True]
        assert len({each["pid"] for each in described} | {broker.process.pid}) == 4

        def ask(_: int) -> int:
            with httpx.Client(base_url=broker.client.base_url, timeout=LIMIT_S) as client:
                return client.get("/topics").status_code

        with ThreadPoolExecutor(8) as pool:
            assert set(pool.map(ask, range(100))) == {200}
        assert broker.count("llog_requests_total", route="GET /topics", status="200") == 100
        answered = [requests_of(broker.at(number)) for number in range(3)]
        assert sum(answered) == 100
        assert min(answered) > 0, "the kernel spreads connections over all workers"
        for path in ("/health", "/ready", "/openapi.json"):
            assert broker.client.get(path).status_code == 200


def requests_of(client: httpx.Client) -> int:
    """Return how many times the worker itself was asked for /topics."""
    with client:
        report = client.get("/metrics", headers={"accept": REPORT_TYPE}).json()["samples"]
    names = [family[0] for family in report["families"]]
    return sum(
        value
        for family, labels, value, _ in report["values"]
        if names[family] == "llog_requests_total" and ["route", "GET /topics"] in labels
    )


def test_workers_end_under_load_without_losing_an_answer(tmp_path: Path) -> None:
    with HistoryRecorder(tmp_path / "history.jsonl") as recorder:
        with workers(tmp_path) as broker:
            told_at_start, children = broker.errors, _children_of(broker.process.pid)
            (directory,) = private_directories(broker.process.pid)
            load = Load(broker, recorder, threads=8)
            load.wait_for(200)
            assert broker.end() == 0
            load.join()
            assert broker.errors == told_at_start
            assert not any(map(_is_alive, children))
            assert not directory.exists()
        with running(tmp_path, "serve") as single:
            assert read_recorded(single, recorder) == load.acknowledged


def test_a_sigterm_to_every_process_of_a_broker_cuts_nobody_off(tmp_path: Path) -> None:
    with workers(tmp_path) as broker, ThreadPoolExecutor(4) as pool:
        produce(broker.client, "a")
        family = [broker.process.pid, *_children_of(broker.process.pid)]
        waits = [pool.submit(consume, broker.at(each), 2, max_wait_ms=60_000) for each in (0, 1)]
        until(lambda: broker.count("llog_waiting_requests") == 2)
        for pid in family:  # as systemd does
            os.kill(pid, signal.SIGTERM)
        assert broker.process.wait(LIMIT_S) == 0
        assert [each.result() for each in waits] == [[], []]


def test_waits_do_not_keep_workers_from_ending(tmp_path: Path) -> None:
    with workers(tmp_path) as broker, ThreadPoolExecutor(4) as pool:
        produce(broker.client, "a")
        clients = [broker.at(number) for number in (0, 1)]
        waits = [pool.submit(consume, client, 2, max_wait_ms=60_000, min_bytes=1) for client in clients]
        until(lambda: broker.count("llog_waiting_requests") == 2)
        assert broker.end(signal.SIGINT) == 0
        assert [each.result() for each in waits] == [[], []]


def test_a_worker_that_dies_is_restarted_and_one_line_says_so(tmp_path: Path) -> None:
    with workers(tmp_path) as broker:
        told_at_start, pids = broker.errors, broker.pids()
        os.kill(pids[1], signal.SIGKILL)
        until(lambda: broker.described()[1]["pid"] not in (None, pids[1]))
        assert broker.pids()[0] == pids[0]
        added = broker.errors.removeprefix(told_at_start)
        assert added == "llog: worker 1 ended with code 137; it is restarted in 1 s\n"
        produce(broker.at(1), "after")
        assert consume(broker.at(0)) == ["after"]
        assert broker.end() == 0


def test_a_worker_that_dies_again_and_again_ends_the_broker_with_an_error(tmp_path: Path) -> None:
    with workers(tmp_path) as broker:
        deadline = time.monotonic() + LIMIT_S
        while broker.process.poll() is None:
            assert time.monotonic() < deadline
            for child in _children_of(broker.process.pid):
                try:
                    command = Path(f"/proc/{child}/cmdline").read_bytes()
                    if b"llog.cli.worker" in command and b"1.json" in command and b"leash" not in command:
                        os.kill(child, signal.SIGKILL)
                except (FileNotFoundError, ProcessLookupError):
                    continue
            time.sleep(0.02)
        assert broker.process.returncode == 1
        assert "llog: worker 1 ended 5 times in a row within 30 s of its start" in broker.errors


def test_no_worker_outlives_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    with workers(tmp_path) as broker:
        children = _children_of(broker.process.pid)
        (directory,) = private_directories(broker.process.pid)
        assert len(children) >= 4, "two workers and their watchers"
        broker.process.kill()
        broker.process.wait()
        until(lambda: not any(map(_is_alive, children)))
    with workers(tmp_path) as broker:
        assert not directory.exists(), "the next supervisor removes what the one that was killed has left"


@pytest.mark.parametrize(
    ("environment", "arguments", "said"),
    [
        ({}, ["--meta", "memory://", "--blobs", "memory://", "serve", "--workers", "2"], "LLOG_META is memory://"),
        ({"LLOG_BROKER_FORWARD_TIMEOUT_MS": "0"}, ["serve", "--workers", "2"], "LLOG_BROKER_FORWARD_TIMEOUT_MS is 0"),
        ({"LLOG_WORKERS": "2"}, ["up"], "`llog serve --workers 2`"),
        ({"LLOG_WORKERS": "0"}, ["serve"], "LLOG_WORKERS"),
        ({"LLOG_RUN_INFO": "A"}, ["serve", "--workers", "2"], "worker 0: LLOG_RUN_INFO has"),
    ],
)
def test_settings_that_do_not_go_with_workers_are_refused_with_the_reason(
    tmp_path: Path, environment: dict[str, str], arguments: list[str], said: str
) -> None:
    ended = subprocess.run(
        [*LLOG, *arguments, *(["--port", "0"])],
        cwd=tmp_path,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert ended.returncode == 2, ended.stderr
    assert said in ended.stderr


# --- one log


def test_what_one_worker_appended_another_serves_without_the_blob_store(tmp_path: Path) -> None:
    with workers(tmp_path) as broker:
        one, other = broker.at(0), broker.at(1)
        for number in range(10):
            produce(one, f"{number}")
        until(lambda: broker.count("llog_tail_shared_batches_total") == 10)
        assert consume(other) == [f"{number}" for number in range(10)]
        assert broker.count("llog_tail_shared_hits_total") == 10
        gets = ("get", "range_get")
        assert sum(broker.count("llog_store_operations_total", store="blobs", operation=each) for each in gets) == 0


def test_a_tail_directory_that_is_named_is_the_one_that_workers_share(tmp_path: Path) -> None:
    with workers(tmp_path, LLOG_TAIL_CACHE_DIR=str(tmp_path / "tail")) as broker:
        produce(broker.at(0), "a")
        until(lambda: broker.count("llog_tail_shared_batches_total") == 1)
        assert consume(broker.at(1)) == ["a"]
        assert broker.count("llog_tail_shared_hits_total") == 1
        assert list((tmp_path / "tail").iterdir())
        assert broker.end() == 0
    assert (tmp_path / "tail").is_dir(), "what the operator named stays"


def test_a_long_poll_in_one_worker_wakes_on_an_append_through_another(tmp_path: Path) -> None:
    with workers(tmp_path) as broker:
        produce(broker.at(0), "a")
        found: list[str] = []
        waiting = threading.Thread(target=lambda: found.extend(consume(broker.at(1), 2, max_wait_ms=60_000)))
        waiting.start()
        until(lambda: broker.count("llog_waiting_requests") == 1)
        produce(broker.at(0), "b")
        waiting.join(LIMIT_S)
        assert found == ["b"]


def test_a_producer_keeps_its_guarantees_through_any_worker(tmp_path: Path) -> None:
    with workers(tmp_path, 3) as broker, ExitStack() as stack:
        clients = [stack.enter_context(broker.at(number)) for number in range(3)]

        def send(sequence: int, through: int) -> dict[str, Any]:
            return produce(clients[through], f"{sequence}", producer_id="p", sequence=sequence)

        for sequence in range(12):
            first = send(sequence, sequence % 3)
            assert first["start_offset"] == sequence + 1
            again = [send(sequence, (sequence + each) % 3) for each in (0, 1, 2)]
            assert all(each == first | {"repeated": True} for each in again)
        with ThreadPoolExecutor(9) as pool:
            answers = [*pool.map(lambda through: send(12, through % 3), range(9))]
        assert {each["start_offset"] for each in answers} == {13}
        assert sum("repeated" not in each for each in answers) == 1
        refused = produce(clients[0], "x", producer_id="p", sequence=99)
        assert refused["error"]["code"] == "out_of_order_sequence"
        assert consume(clients[1]) == [f"{sequence}" for sequence in range(13)]


# --- engines with one owner


@pytest.mark.parametrize("engine", ["disk", "rocksdb"])
def test_topics_with_an_owner_are_served_by_one_worker_for_all(tmp_path: Path, engine: str) -> None:
    with workers(tmp_path) as broker, ExitStack() as stack:
        clients = [stack.enter_context(broker.at(number)) for number in range(2)]
        assert broker.client.post("/topics", json={"name": "t", "engine": engine}).status_code == 201
        for number, client in enumerate(clients):
            assert produce(client, f"{number}")["start_offset"] == number + 1
        for client in clients:
            assert consume(client) == ["0", "1"]
            assert client.get("/topics/t").json()["bounds"][0]["next_offset"] == 3
        taken = [client.post("/topics/consume", json={**GROUP, "start": "Earliest", "limit": 1}) for client in clients]
        assert [each.json()["messages"][0]["offset"] for each in taken] == [1, 2]
        answer = clients[0].get("/topics/t/partitions/0/records", params={"offset": 1})
        assert answer.status_code == 200
        assert "llog-owner" not in answer.headers, "clients know only the address that the workers share"
        assert broker.count("llog_forwarded_requests_total") > 0
        assert broker.count("llog_forward_errors_total") == 0


def test_tables_are_served_by_one_worker_for_all(tmp_path: Path) -> None:
    def rows(client: httpx.Client, text: str) -> Any:
        response = client.post("/sql", json={"sql": text})
        assert response.status_code == 200, response.text
        return response.json()["results"][-1].get("rows")

    expected = [[0, "by 0"], [1, "by 1"]]
    with workers(tmp_path) as broker:
        rows(broker.at(1), "CREATE TABLE items (id INT PRIMARY KEY, name TEXT)")
        for number in range(2):
            rows(broker.at(number), f"INSERT INTO items VALUES ({number}, 'by {number}')")
        for number in range(2):
            assert rows(broker.at(number), "SELECT id, name FROM items ORDER BY id") == expected
    with workers(tmp_path) as broker:  # the tables are there when the workers start
        for number in range(2):
            assert rows(broker.at(number), "SELECT id, name FROM items ORDER BY id") == expected
        assert broker.errors.count("\n") == 1, broker.errors


def test_a_keyed_log_is_served_by_one_worker_for_all(tmp_path: Path) -> None:
    with workers(tmp_path, LLOG_KEYED=f"file://{tmp_path}/keyed") as broker, ExitStack() as stack:
        clients = [stack.enter_context(broker.at(number)) for number in range(2)]
        for number in range(6):
            sent = {"records": [{"key": "k", "value": f"{number}"}]}
            response = clients[number % 2].post("/keyed/append", json=sent)
            assert response.status_code == 200, response.text
        for client in clients:
            found = client.get("/keyed/scan", params={"key": "k"}).json()["records"]
            assert [each["value"] for each in found] == [f"{number}" for number in range(6)]


@pytest.mark.parametrize("engine", ["disk", "rocksdb"])
def test_what_a_worker_owned_is_served_on_after_its_death(tmp_path: Path, engine: str) -> None:
    with workers(tmp_path, LLOG_SESSION_TIMEOUT_MS="3s") as broker:
        pids = broker.pids()
        assert broker.client.post("/topics", json={"name": "t", "engine": engine}).status_code == 201
        produce(broker.client, "a")
        owner = broker.client.get("/topics/t").json()["owner"]["pid"]
        survivor = 1 - pids.index(owner)
        os.kill(owner, signal.SIGKILL)
        other = broker.at(survivor)

        def is_served() -> bool:
            item = {"topic": "t", "partition": 0, "fetch_offset": 1}
            answer = other.post("/consume", json={"topic_partitions": [item]}).json()["topic_partitions"][0]
            return [each["payload"] for each in answer.get("records", [])] == ["a"]

        until(is_served)
        until(lambda: all(each["up"] for each in broker.described(survivor)))
        for number in range(2):
            assert "start_offset" in produce(broker.at(number), "b")


def test_another_broker_reaches_the_owner_through_the_address_that_workers_share(tmp_path: Path) -> None:
    elsewhere = {f"LLOG_{each}_DIR": str(tmp_path / "elsewhere" / each.lower()) for each in ("SEGMENTS", "ROCKSDB")}
    with workers(tmp_path, 3) as broker, running(tmp_path, "serve", environment=elsewhere) as other:
        assert broker.client.post("/topics", json={"name": "t", "engine": "disk"}).status_code == 201
        produce(broker.client, "first")
        address = str(broker.client.base_url).rstrip("/")
        assert other.client.get("/topics/t").json()["owner"]["address"] == address

        def send(number: int) -> dict[str, Any]:
            with httpx.Client(base_url=other.client.base_url, timeout=LIMIT_S) as client:
                return produce(client, f"{number}")

        with ThreadPoolExecutor(16) as pool:
            answers = [*pool.map(send, range(48))]
        assert sorted(each["start_offset"] for each in answers) == [*range(2, 50)]
        assert broker.count("llog_forwarded_requests_total") > 0, "some came to a worker that is not the owner"


# --- metrics


def test_metrics_of_all_come_from_any_worker_and_never_fall(tmp_path: Path) -> None:
    with workers(tmp_path) as broker:
        for number in (0, 1, 1):
            produce(broker.at(number), "x")
        text = [client.get("/metrics/prometheus").text for client in (broker.at(0), broker.at(1))]
        for each in text:
            assert "\nllog_produced_records_total 3\n" in each
            assert "\nllog_workers 2\n" in each
            assert '\nllog_worker_up{worker="1"} 1\n' in each
            assert 'process_resident_memory_bytes{worker="0"}' in each
            assert each.count("\nprocess_cpu_seconds_total ") == 1
        assert broker.count("llog_batch_queue_wait_seconds_count") == 3
        pids = broker.pids()
        os.kill(pids[1], signal.SIGSTOP)
        try:
            found = broker.metrics()
            assert [each["up"] for each in found["workers"]] == [True, False]
            assert found["llog_worker_up"][1] == {"worker": "1", "value": 0}
            assert found["llog_produced_records_total"] == 3, "its counters are those of its last answer"
            assert [each["worker"] for each in found["process_open_fds"]] == ["0"]
        finally:
            os.kill(pids[1], signal.SIGCONT)
        os.kill(pids[1], signal.SIGKILL)
        until(lambda: broker.described()[1]["pid"] not in (None, pids[1]))
        assert broker.count("llog_produced_records_total") == 3
        produce(broker.at(1), "y")
        assert broker.count("llog_produced_records_total") == 4
        assert broker.count("llog_topic_produced_records_total", topic="t") == 4
