"""Two compactors, `llog compactor`, that are killed and paused again and again while a broker takes appends."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

import pytest

from devtools.servers.weed import S3Server
from llog.history.recorder import HistoryRecorder
from tests.broker.test_process import LIMIT_S, LLOG, Load, Running, read_recorded, running
from tests.faults.chaos import SEED
from tests.faults.cluster import BATCH_DELAY_MS, SESSION_MS, Metadata

ENVIRONMENT = {
    "LLOG_SESSION_TIMEOUT_MS": "1000",
    "LLOG_COMPACTOR_IDLE_SLEEP_MS": "20",
    "LLOG_COMPACTOR_IDLE_JITTER_MS": "20",
    "LLOG_COMPACTOR_LINGER_MS": "0",
    "LLOG_COMPACTOR_ERROR_SLEEP_MS": "50",
    "LLOG_COMPACTOR_ERROR_JITTER_MS": "50",
    "LLOG_COLLECT_INTERVAL_MS": "200",
    "LLOG_COLLECT_GRACE_MS": "500",
    "LLOG_INLINE_PARTITION_MAX_BYTES": "16384",  # so that appends go both ways
}


@pytest.fixture(autouse=True)
def _without_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLOG_FAULTS_SEED", raising=False)  # no setting of the programs


def test_nothing_is_lost_or_damaged_when_compactors_of_one_machine_die_and_sleep(tmp_path: Path) -> None:
    _suffer(tmp_path, ENVIRONMENT, faults=6)


def test_nothing_is_lost_or_damaged_when_compactors_on_servers_die_and_sleep(
    tmp_path: Path, metadata: Metadata, s3_server: S3Server
) -> None:
    bucket = f"compactors-{uuid.uuid4().hex}"
    s3_server.create_bucket(bucket)
    environment = {
        **ENVIRONMENT,
        **metadata.environment,
        "LLOG_BLOBS": f"s3://{bucket}/log",
        "LLOG_S3_ENDPOINT_URL": s3_server.endpoint,
        "LLOG_S3_REGION_NAME": s3_server.region,
        "LLOG_S3_ACCESS_KEY_ID": s3_server.access_key,
        "LLOG_S3_SECRET_ACCESS_KEY": s3_server.secret_key,
        "LLOG_SESSION_TIMEOUT_MS": f"{SESSION_MS}",
        "LLOG_BATCH_MAX_DELAY_MS": f"{BATCH_DELAY_MS}",
    }
    _suffer(tmp_path, environment, faults=3)


def _suffer(directory: Path, environment: Mapping[str, str], faults: int) -> None:
    """Kill and pause two compactors under load; in the end all must be as it was told, and whole."""
    rng = random.Random(SEED)
    pause_s = 2 * int(environment["LLOG_SESSION_TIMEOUT_MS"]) / 1000
    with HistoryRecorder(directory / "history.jsonl") as recorder:
        with running(directory, "serve", environment=environment) as broker:
            load = Load(broker, recorder)
            load.wait_for(10)
            compactors = [Running(directory, "compactor", environment=environment) for _ in range(2)]
            try:
                for _ in range(faults):
                    load.wait_for(load.acknowledged + rng.randint(50, 200))
                    number = rng.randrange(2)
                    if rng.random() < 0.5:
                        compactors[number].end(signal.SIGKILL)
                        compactors[number].client.close()
                        compactors[number] = Running(directory, "compactor", environment=environment)
                    else:
                        _pause(compactors[number], pause_s)
                _wait_for_work(compactors)
                for each in compactors:
                    assert "Traceback" not in each.errors, each.errors
                    assert each.end() == 0
            finally:
                for each in compactors:
                    each.process.kill()
                    each.process.wait()
                    each.client.close()
            assert broker.end() == 0
            load.join()
        with running(directory, "serve", environment=environment) as broker:
            assert read_recorded(broker, recorder) == load.acknowledged
    for command in (["compactor", "--once"], ["verify"]):
        ended = subprocess.run(
            [*LLOG, *command],
            cwd=directory,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr


def _pause(compactor: Running, seconds: float) -> None:
    """Stop the process for longer than its session and its claims last."""
    compactor.process.send_signal(signal.SIGSTOP)
    time.sleep(seconds)
    compactor.process.send_signal(signal.SIGCONT)


def _wait_for_work(compactors: list[Running]) -> None:
    """Return when compactors of this life have compacted, and one has collected."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        found = [each.client.get("/metrics").json() for each in compactors]
        runs = [each for one in found for each in one.get("llog_compactor_runs_total", [])]
        steps = [each for one in found for each in one.get("llog_compactor_steps_total", [])]
        compacted = any(each["outcome"] == "compacted" for each in runs)
        collected = any((each["step"], each["outcome"]) == ("collection", "done") for each in steps)
        if compacted and collected:
            return
        assert time.monotonic() < deadline, [each.errors for each in compactors]
        time.sleep(0.1)
