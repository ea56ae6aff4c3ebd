"""`llog serve` and `llog up` as processes: how they start, how they end, and what survives."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from llog.history.checker import check_history
from llog.history.recorded_http import RecordedBroker
from llog.history.recorder import HistoryRecorder
from tests.conftest import unavailable

LLOG = [sys.executable, "-m", "llog.cli.main"]
LIMIT_S = 300


class Running:
    def __init__(
        self,
        directory: Path,
        *arguments: str,
        files_max: int | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._arguments = arguments
        self._errors = directory / f"stderr-{time.monotonic_ns()}"
        with self._errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [*LLOG, *arguments, "--port", "0"],
                cwd=directory,
                stderr=errors,
                env={**os.environ, **(environment or {})},
            )
            if files_max is not None:
                resource.prlimit(self.process.pid, resource.RLIMIT_NOFILE, (files_max, files_max))
        self.client = httpx.Client(base_url=self._address(), timeout=LIMIT_S)

    @property
    def errors(self) -> str:
        return self._errors.read_text()

    def wait_for(self, text: str) -> str:
        deadline = time.monotonic() + LIMIT_S
        while text not in self.errors:
            assert self.process.poll() is None, self.errors
            assert time.monotonic() < deadline, self.errors
            time.sleep(0.02)
        return self.errors

    def _address(self) -> str:
        self.wait_for("end it with" if "up" in self._arguments else "listening on")
        while not self.errors.endswith("\n"):
            time.sleep(0.01)
        line = next(line for line in self.errors.splitlines() if "listening on" in line)
        return str(re.findall(r"http://[^\s\"]+", line)[-1])

    def produce(self, *records: str) -> dict[str, Any]:
        item = {"topic": "t", "partition": 0, "records": records}
        response = self.client.post("/produce", json={"topic_partitions": [item]})
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()["topic_partitions"][0]
        return found

    def consume(self, offset: int = 1, **asked: object) -> list[dict[str, Any]]:
        item = {"topic": "t", "partition": 0, "fetch_offset": offset, "partition_max_bytes": 16 << 20}
        body = {"topic_partitions": [item], "max_bytes": 16 << 20, **asked}
        found: list[dict[str, Any]] = self.client.post("/consume", json=body).json()["topic_partitions"][0]["records"]
        return found

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(LIMIT_S)


@contextmanager
def running(
    directory: Path, *arguments: str, files_max: int | None = None, environment: Mapping[str, str] | None = None
) -> Iterator[Running]:
    started = Running(directory, *arguments, files_max=files_max, environment=environment)
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.process.kill()
            started.process.wait()
        started.client.close()


class Load:
    """Writes from several threads, and records it."""

    def __init__(self, server: Running, recorder: HistoryRecorder, threads: int = 4) -> None:
        self.acknowledged = 0
        self._recorder = recorder
        self._lock = threading.Lock()
        self._address = str(server.client.base_url)
        self._threads = [threading.Thread(target=self._write, args=(number,)) for number in range(threads)]
        for thread in self._threads:
            thread.start()

    def _write(self, writer: int) -> None:
        with httpx.Client(base_url=self._address, timeout=LIMIT_S) as client:
            broker = RecordedBroker(self._recorder, client, via=self._address)
            for number in range(1_000_000):
                item = {"topic": "t", "partition": 0, "records": [f"{writer}-{number}"]}
                try:
                    answer = broker.produce([item]).json()["topic_partitions"][0]
                except (httpx.HTTPError, json.JSONDecodeError):
                    return
                assert "error" not in answer
                with self._lock:
                    self.acknowledged += 1

    def wait_for(self, count: int) -> None:
        deadline = time.monotonic() + LIMIT_S
        while self.acknowledged < count:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(LIMIT_S)


def read_recorded(server: Running, recorder: HistoryRecorder) -> int:
    """Reads the topic to its end and asserts that the recorded history is right; returns the number of records."""
    broker = RecordedBroker(recorder, server.client, via=str(server.client.base_url))
    offset, end = 1, 2
    while offset < end:
        item = {"topic": "t", "partition": 0, "fetch_offset": offset}
        answer = broker.consume([item]).json()["topic_partitions"][0]
        offset, end = answer["next_fetch_offset"], answer["high_watermark"] + 1
    report = check_history([recorder.path])
    assert report.clean, report
    return offset - 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_everything_acknowledged_is_there_after_an_end_under_load(tmp_path: Path, number: int) -> None:
    with HistoryRecorder(tmp_path / "history.jsonl") as recorder:
        with running(tmp_path, "serve") as server:
            told_at_start = server.errors
            load = Load(server, recorder)
            load.wait_for(100)
            assert server.end(number) == (-number if number == signal.SIGKILL else 0)
            load.join()
            assert server.errors == told_at_start
        with running(tmp_path, "serve") as server:
            found = read_recorded(server, recorder)
            assert server.produce("one more")["start_offset"] == found + 1
    if number != signal.SIGKILL:
        assert found == load.acknowledged, "something was appended that nobody was told of"


def test_waits_do_not_keep_a_broker_from_ending(tmp_path: Path) -> None:
    with running(tmp_path, "serve") as server:
        server.produce("a")
        found: list[object] = []
        waiter = threading.Thread(target=lambda: found.append(server.consume(2, max_wait_ms=60_000)))
        waiter.start()
        time.sleep(0.3)
        assert server.end() == 0
        waiter.join(LIMIT_S)
        assert found == [[]]


def test_two_brokers_serve_one_log(tmp_path: Path) -> None:
    with running(tmp_path, "serve") as one, running(tmp_path, "serve") as other:
        one.produce("by one")
        found: list[Any] = []
        waiter = threading.Thread(target=lambda: found.extend(one.consume(2, max_wait_ms=60_000)))
        waiter.start()
        assert other.produce("by other")["start_offset"] == 2
        waiter.join(LIMIT_S)
        assert [each["payload"] for each in found] == ["by other"]


def test_at_the_limit_of_open_files_health_is_answered_and_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLOG_REQUEST_TIMEOUT_MS", "1h")  # nobody goes before the test has seen them all
    with running(tmp_path, "serve", files_max=256) as server, ExitStack() as idle:
        told_at_start = server.errors
        address = server.client.base_url.host, server.client.base_url.port
        for _ in range(600):
            idle.enter_context(socket.create_connection(address, timeout=LIMIT_S))
        server.wait_for("ulimit -n")
        for _ in range(20):
            with httpx.Client(base_url=server.client.base_url, timeout=LIMIT_S) as client:
                assert client.get("/health").json() == {"status": "ok"}
        with httpx.Client(base_url=server.client.base_url, timeout=LIMIT_S) as client:
            refused = client.get("/topics")
            assert (refused.status_code, refused.json()["code"]) == (503, "too_many_connections")
            assert "retry-after" in refused.headers
            counted = client.get("/metrics").json()
            assert 128 <= counted["llog_connections"] < 256
            assert counted["llog_connections_refused_total"] > 0
        assert server.errors.removeprefix(told_at_start).count("\n") == 1, server.errors
        idle.close()
        deadline = time.monotonic() + LIMIT_S
        while server.client.get("/metrics").json()["llog_connections"] > 1:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert server.produce("after")["start_offset"] == 1
        assert server.end() == 0


def test_a_taken_port_is_one_clear_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [*LLOG, "serve", "--port", str(port)]
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S)
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    assert f"port {port} of 127.0.0.1 is in use" in ended.stderr


def test_a_broker_without_its_packages_says_what_to_install(tmp_path: Path) -> None:
    program = "import sys; sys.modules['uvicorn'] = None; from llog.cli.main import main; main(['serve'])"
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert ended.returncode == 2
    assert 'pip install "leaderless-log[broker]"' in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_up_compacts_in_its_own_process_and_starts_no_other(tmp_path: Path) -> None:
    with running(tmp_path, "up", "--interval", "200ms") as server:
        for n in range(10):
            server.produce(f"{n}")
        _wait_for_compaction(tmp_path)
        assert [each["payload"] for each in server.consume()] == [f"{n}" for n in range(10)]
        assert _children_of(server.process.pid) == []
        assert server.end() == 0


def test_every_command_that_up_prints_works_whichever_comes_first(tmp_path: Path) -> None:
    if find_spec("pyspark") is None:
        unavailable("Spark is not installed")
    with running(tmp_path, "up") as server:
        assert httpx.get(_opened(server)).json() == {"topics": []}
        commands = _commands(server)
        assert list(commands) == ["curl", "Python", "SQL", "Spark"]
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        for user in reversed(commands):
            shown = _pasted(commands[user], elsewhere)
            assert shown.returncode == 0, (user, shown.stderr)
            assert '"error"' not in shown.stdout
        assert [each["name"] for each in httpx.get(_opened(server)).json()["topics"]] == ["hello"]
        for user in ("Python", "SQL", "Spark"):
            shown = _pasted(commands[user], elsewhere)
            assert "from curl" in shown.stdout, (user, shown.stderr)
        assert server.end() == 0


@pytest.mark.parametrize(
    ("environment", "users"),
    [
        ({"LLOG_ROLE": "write"}, ["curl"]),
        ({"LLOG_ROLE": "read"}, ["curl", "Spark"]),
        ({"LLOG_AUTO_CREATE": "off"}, ["curl", "Python", "SQL", "Spark"]),
    ],
)
def test_up_prints_only_what_its_settings_allow(
    tmp_path: Path, environment: Mapping[str, str], users: list[str]
) -> None:
    with running(tmp_path, "up", environment=environment) as server:
        commands = _commands(server)
        assert list(commands) == users
        shown = _pasted(commands["curl"], tmp_path)
        assert shown.returncode == 0, shown.stderr
        assert "error" not in shown.stdout
        assert json.loads(shown.stdout).keys() <= {"topics", "topic_partitions"}


def _opened(server: Running) -> str:
    """The address that `up` offers to open."""
    return next(line.split()[1] for line in server.errors.splitlines() if line.startswith("  open "))


def _commands(server: Running) -> dict[str, str]:
    """What `up` offers to try, by the kind of user."""
    lines = server.errors.splitlines()
    offered = lines[lines.index("try, in another terminal:") + 1 : lines.index("end it with Ctrl-C")]
    return {heading.strip(" :"): command.strip() for heading, command in pairwise(offered) if heading.endswith(":")}


def _pasted(command: str, directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, shell=True, capture_output=True, text=True, timeout=LIMIT_S, cwd=directory)


def test_up_with_a_pipeline_compacts_by_it_and_ends_it(tmp_path: Path) -> None:
    if find_spec("pyspark") is None:
        unavailable("Spark is not installed")
    with running(tmp_path, "up", "--pipeline", "--interval", "1s") as server:
        for n in range(10):
            server.produce(f"{n}")
        server.wait_for("STEP")  # the pipeline's own summary of a round
        _wait_for_compaction(tmp_path)
        assert [each["payload"] for each in server.consume()] == [f"{n}" for n in range(10)]
        family = _children_of(server.process.pid)
        assert len(family) >= 3, "the watcher, the pipeline and its JVM"
        assert server.end() == 0
        deadline = time.monotonic() + LIMIT_S
        while any(map(_is_alive, family)):
            assert time.monotonic() < deadline, "the pipeline outlived `llog up`"
            time.sleep(0.1)


def test_a_pipeline_without_spark_is_one_line_that_says_what_to_install(tmp_path: Path) -> None:
    program = "import sys; sys.modules['pyspark'] = None; from llog.cli.main import main; main(['up', '--pipeline'])"
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert ended.returncode == 2
    assert 'pip install "leaderless-log[spark]"' in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_up_goes_on_without_a_pipeline_that_cannot_run(tmp_path: Path) -> None:
    if find_spec("pyspark") is None:
        unavailable("Spark is not installed")
    with running(tmp_path, "--meta", "memory://", "--blobs", "memory://", "up", "--pipeline") as server:
        server.wait_for("the upkeep continues without Spark")
        assert server.produce("a")["start_offset"] == 1
        assert server.end() == 0


def _wait_for_compaction(directory: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while True:
        command = [*LLOG, "inspect", "t", "--json"]
        shown = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=LIMIT_S)
        if "COMPACTED" in shown.stdout:
            return
        assert time.monotonic() < deadline, shown
        time.sleep(0.3)


def _children_of(pid: int) -> list[int]:
    """All that descend from it now."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] != "Z":
                parents[int(entry.name)] = int(fields[1])
    found = [pid]
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    return found[1:]


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
