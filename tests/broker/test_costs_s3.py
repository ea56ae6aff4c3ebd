"""The bill of a broker whose blobs are in a bucket, and `llog cost`, which shows it."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from devtools.servers.weed import S3Server
from tests.broker.test_process import LIMIT_S, LLOG, Running

CONSUME = {"topic": "t", "group_id": "g", "start": "Earliest"}


@pytest.fixture(params=[1, 2])
def broker(request: pytest.FixtureRequest, s3_server: S3Server, tmp_path: Path) -> Iterator[Running]:
    s3_server.create_bucket("costs")
    environment = {
        "LLOG_META": f"sqlite://{tmp_path}/meta.sqlite",
        "LLOG_BLOBS": f"s3://costs/{tmp_path.name}",
        "LLOG_S3_ENDPOINT_URL": s3_server.endpoint,
        "LLOG_S3_REGION_NAME": s3_server.region,
        "LLOG_S3_ACCESS_KEY_ID": s3_server.access_key,
        "LLOG_S3_SECRET_ACCESS_KEY": s3_server.secret_key,
        "LLOG_BATCH_MAX_DELAY_MS": "50",
    }
    running = Running(tmp_path, "serve", "--workers", str(request.param), environment=environment)
    yield running
    running.process.terminate()
    assert running.process.wait(LIMIT_S) == 0


def _billing(broker: Running) -> dict[str, Any]:
    """Return the bill once the bucket has been listed, which happens in the background."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        found: dict[str, Any] = broker.client.get("/metrics").json()["s3"]["billing"]
        if found["objects"] is not None:
            return found
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _use(broker: Running) -> None:
    for number in range(3):
        item = {"topic": "t", "partition": 0, "records": ["x" * 1000], "producer_id": "p", "sequence": number}
        assert broker.client.post("/produce", json={"topic_partitions": [item]}).status_code == 200
    assert broker.client.post("/topics/consume", json=CONSUME).json()["messages"]


def test_the_bill_has_the_requests_that_were_made_and_the_blobs_in_the_bucket(broker: Running) -> None:
    _use(broker)
    billing = _billing(broker)
    requests = billing["requests"]
    assert requests["put"] >= 3
    assert requests["list"] >= 1, "the scan of the bucket counts as well"
    expected = requests["put"] / 1000 * 0.005 + requests["list"] / 1000 * 0.005
    expected += (requests["get"] + requests["range_get"]) / 10_000 * 0.004
    assert billing["request_cost"] == pytest.approx(expected)
    assert billing["objects"] >= 4, "three blobs and the log's mark"
    assert billing["stored_bytes"] > 3 * 1000 / 2
    assert billing["stored_gb"] == pytest.approx(billing["stored_bytes"] / (1 << 30))
    assert billing["storage_cost_month"] == pytest.approx(billing["stored_gb"] * 0.023)
    assert [each["name"] for each in billing["topics"]] == ["t"]
    assert [each["name"] for each in billing["producers"]] == ["p"]
    assert [each["name"] for each in billing["groups"]] == ["g"]
    text = broker.client.get("/metrics/prometheus").text
    assert 'llog_s3_request_cost_dollars_total{operation="put"}' in text
    assert "llog_s3_storage_month_cost_dollars" in text


def test_llog_cost_shows_the_bill_and_what_other_batches_would_cost(broker: Running, tmp_path: Path) -> None:
    _use(broker)
    _billing(broker)
    command = [*LLOG, "cost", "--url", str(broker.client.base_url)]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=LIMIT_S).stdout
    for word in ("range_get", "storage", "total", "now (50ms, 8MiB)", "250ms", "1s", "16MiB", "TOPIC", "PRODUCER"):
        assert word in shown
    done = subprocess.run([*command, "--json"], cwd=tmp_path, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    puts = {each["flush"]: each["puts_month"] for each in found["alternatives"]}
    assert puts["now (50ms, 8MiB)"] > puts["250ms"] > puts["1s"] > 0
    assert puts["16MiB"] == puts["now (50ms, 8MiB)"], "batches this small do not fill up"


def test_llog_cost_says_that_local_files_cost_nothing(tmp_path: Path) -> None:
    local = Running(tmp_path, "serve")
    done = subprocess.run(
        [*LLOG, "cost", "--url", str(local.client.base_url)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "local files" in done.stderr
    local.process.terminate()
    assert local.process.wait(LIMIT_S) == 0
