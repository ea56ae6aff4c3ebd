"""`llog compactor` as a process: how it starts and ends, and that others finish what a killed one began."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.broker.test_process import LIMIT_S, LLOG, Running, running

QUICK = {
    "LLOG_COMPACTOR_IDLE_SLEEP_MS": "50",
    "LLOG_COMPACTOR_IDLE_JITTER_MS": "10",
    "LLOG_COMPACTOR_DISCOVERY_INTERVAL_MS": "100",
    "LLOG_COMPACTOR_LINGER_MS": "0",
    "LLOG_SESSION_TIMEOUT_MS": "1000",
    "LLOG_INLINE_MAX_BYTES": "0",
}


def _llog(directory: Path, *arguments: str, environment: Mapping[str, str] = QUICK) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*LLOG, *arguments],
        cwd=directory,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


def _described(directory: Path) -> dict[str, Any]:
    shown = _llog(directory, "inspect", "t", "--json")
    assert shown.returncode == 0, shown.stderr
    [found] = json.loads(shown.stdout)
    assert isinstance(found, dict)
    return found


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _value(compactor: Running, name: str, **labels: str) -> float:
    found = compactor.client.get("/metrics").json().get(name, [])
    return float(sum(each["value"] for each in found if labels.items() <= each.items()))


def _compacted(compactor: Running) -> float:
    return _value(compactor, "llog_compactor_runs_total", outcome="compacted")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_compacts_beside_a_broker_until_it_is_told_to_end(tmp_path: Path, number: int) -> None:
    with (
        running(tmp_path, "serve", environment=QUICK) as broker,
        _started(broker, tmp_path) as compactor,
    ):
        for n in range(20):
            broker.produce(f"{n}")
        _wait(lambda: _compacted(compactor) > 0)
        assert compactor.client.get("/health").json() == {"status": "ok"}
        assert compactor.client.get("/ready").json() == {"status": "ready"}
        text = compactor.client.get("/metrics", headers={"accept": "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"}).text
        assert 'llog_compactor_info{id="' in text
        told_at_start = compactor.errors
        assert compactor.end(number) == 0
        assert compactor.errors == told_at_start
        described = _described(tmp_path)
        assert (described["claim"], described["compaction"]) == (None, None)
        assert [each["payload"] for each in broker.consume()] == ["first", *(f"{n}" for n in range(20))]


def test_a_killed_compactor_is_followed_by_another(tmp_path: Path) -> None:
    with running(tmp_path, "serve", environment=QUICK) as broker:
        records = ["first"]
        with _started(broker, tmp_path) as first, _started(broker, tmp_path) as second:
            for life in range(6):
                for n in range(30):
                    records.append(f"{life}-{n}")
                    broker.produce(records[-1])
                first.end(signal.SIGKILL)
                before = _compacted(second)
                for n in range(3):
                    records.append(f"{life}-after-{n}")
                    broker.produce(records[-1])
                _wait(lambda before=before: _compacted(second) > before)  # type: ignore[misc]
                first.client.close()
                first = Running(tmp_path, "compactor", environment=QUICK)
            first.end()
        assert [each["payload"] for each in broker.consume()] == records
    verified = _llog(tmp_path, "verify", "t")
    assert verified.returncode == 0, verified.stdout + verified.stderr


def test_once_leaves_nothing_to_do_and_exits(tmp_path: Path) -> None:
    with running(tmp_path, "serve", environment=QUICK) as broker:
        for n in range(10):
            broker.produce(f"{n}")
    done = _llog(tmp_path, "compactor", "--once", "--json")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["runs"], summary["records"], summary["failed"]) == (1, 9, 0)
    again = _llog(tmp_path, "compactor", "--once")
    assert again.returncode == 0, again.stderr
    assert again.stdout.startswith("compacted 0 runs")


def test_mistakes_are_one_clear_line(tmp_path: Path) -> None:
    missing = _llog(tmp_path, "compactor")
    assert missing.returncode != 0
    assert "there is no log" in missing.stderr
    assert missing.stderr.count("\n") == 1
    with running(tmp_path, "serve", environment=QUICK) as broker, socket.create_server(("127.0.0.1", 0)) as taken:
        broker.produce("a")
        port = str(taken.getsockname()[1])
        refused = _llog(tmp_path, "compactor", "--port", port)
    assert refused.returncode == 2
    assert f"port {port} of 127.0.0.1 is in use" in refused.stderr
    assert "LLOG_COMPACTOR_PORT" in refused.stderr
    wrong = _llog(tmp_path, "compactor", "--once", environment={"LLOG_COMPACTOR_TARGETS": "t:x"})
    assert wrong.returncode == 2
    assert "LLOG_COMPACTOR_TARGETS" in wrong.stderr
    assert _llog(tmp_path, "compactor", "--json").returncode == 2


def test_up_has_the_metrics_of_broker_and_compactor(tmp_path: Path) -> None:
    with running(tmp_path, "up", "--interval", "100ms", environment=QUICK) as server:
        for n in range(10):
            server.produce(f"{n}")
        _wait(lambda: _compacted(server) > 0)
        found = server.client.get("/metrics").json()
        assert found["llog_produced_records_total"] == 10
        assert found["llog_compactor_workers"] == 4
        assert server.end() == 0
    assert _described(tmp_path)["claim"] is None


def _started(broker: Running, directory: Path) -> Any:
    """Return a compactor for the log of the broker, which has a topic from now on."""
    if not broker.client.get("/topics").json()["topics"]:
        broker.produce("first")
    return running(directory, "compactor", environment=QUICK)
