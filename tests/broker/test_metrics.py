"""What a broker's metrics say about requests, batches and stores, and that Prometheus' own tool accepts them."""

from __future__ import annotations

import asyncio
import subprocess
from typing import Any

import pytest

from devtools.docs import METRICS
from devtools.servers.downloads import UnobtainableError
from devtools.servers.prometheus import prometheus_program
from llog.errors import ConfigurationError
from tests.broker.serving import Served

DECLARED = {family.name: family for families in METRICS.values() for family in families}


async def _counted(served: Served) -> dict[str, Any]:
    found: dict[str, Any] = (await served.client.get("/metrics")).json()
    return found


def _labelled(samples: list[dict[str, Any]], *labels: str) -> dict[tuple[str, ...], float]:
    return {tuple(str(each[label]) for label in labels): each["value"] for each in samples}


async def _use(served: Served) -> None:
    """Make requests of every kind that counts something."""
    await served.produce("t", "abc", "de")
    await served.produce("t", {"value": "v", "key": "k"}, partition=1)
    item = {"topic": "t", "partition": 0, "records": ["x"], "producer_id": "p", "sequence": 0}
    await served.client.post("/produce", json={"topic_partitions": [item]})
    await served.consume("t", 1)
    await served.consume("missing", 1)
    await served.client.post("/topics/consume", json={"topic": "t", "group_id": "g", "start": "Earliest"})
    await served.client.post("/produce", content=b"{", headers={"content-type": "application/json"})


async def test_promtool_finds_nothing_to_improve(served: Served) -> None:
    try:
        promtool = prometheus_program("promtool")
    except UnobtainableError as error:
        pytest.skip(f"promtool is not on PATH, and Debian's package cannot be had: {error}")
    await _use(served)
    text = (await served.client.get("/metrics/prometheus")).text
    done = await asyncio.to_thread(
        subprocess.run, [promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


async def test_every_metric_is_declared_with_its_labels_and_so_is_in_the_docs(served: Served) -> None:
    await _use(served)
    text = (await served.client.get("/metrics/prometheus")).text
    kinds = dict(line.removeprefix("# TYPE ").split() for line in text.splitlines() if line.startswith("# TYPE "))
    assert kinds == {name: DECLARED[name].kind for name in kinds}
    counted = await _counted(served)
    for name in kinds:
        samples = counted.get(name, counted.get(f"{name}_count"))
        labels = {*samples[0]} - {"value"} if isinstance(samples, list) else set()
        assert labels == {*DECLARED[name].labels}, name


async def test_metrics_answers_prometheus_in_its_format_and_others_in_json(served: Served) -> None:
    asked = await served.client.get("/metrics", headers={"accept": "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"})
    assert asked.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "# TYPE llog_connections gauge" in asked.text
    plain = await served.client.get("/metrics")
    assert plain.headers["content-type"] == "application/json"


async def test_the_broker_and_its_batch_settings_are_described() -> None:
    served = Served(role="all", batch_max_bytes=1 << 20, batch_max_delay_ms=250, client_identifier="b-1")
    counted = await _counted(served)
    assert counted["broker"].items() >= {"name": "b-1", "role": "both", "meta": "memory", "blobs": "memory"}.items()
    assert counted["batch"].items() >= {"batch_max_bytes": 1 << 20, "batch_max_delay_seconds": 0.25}.items()
    assert counted["llog_batch_max_delay_seconds"] == 0.25
    (info,) = counted["llog_broker_info"]
    assert (info["name"], info["value"]) == ("b-1", 1)
    await served.close()


async def test_requests_that_fail_their_checks_are_counted_by_route(served: Served) -> None:
    await served.client.post("/produce", content=b"{", headers={"content-type": "application/json"})
    await served.produce("no/name", "x")
    await served.client.post("/consume", json={})
    await served.consume("missing", 1)
    failures = (await _counted(served))["llog_request_validation_failures_total"]
    assert _labelled(failures, "route") == {("POST /produce",): 2, ("POST /consume",): 1}


async def test_a_flush_is_counted_by_its_reason_and_requests_by_their_wait() -> None:
    served = Served(batch_max_bytes=1000, batch_max_delay_ms=30)
    await served.produce("t", "waits for the delay")
    await served.produce("t", "x" * 2000)
    counted = await _counted(served)
    assert _labelled(counted["llog_flushes_total"], "reason") == {("delay",): 1, ("bytes",): 1}
    assert counted["llog_batch_queue_wait_seconds_count"] == 2
    assert counted["llog_batch_queue_wait_seconds_sum"] >= 0.029
    assert counted["llog_flush_duration_seconds_count"] == 2
    assert (counted["llog_batch_queue_requests"], counted["llog_batch_queue_bytes"]) == (0, 0)
    await served.close()


async def test_what_waits_for_a_batch_is_a_depth(served: Served) -> None:
    await served.produce("t", "first")
    served.blobs.gate.clear()
    calls = [asyncio.ensure_future(served.produce("t", "under way"))]
    while len(served.blobs.puts) < 2:
        await asyncio.sleep(0)
    calls += [asyncio.ensure_future(served.produce("t", "waits")) for _ in range(3)]
    while (await _counted(served))["llog_batch_queue_requests"] < 3:
        await asyncio.sleep(0)
    counted = await _counted(served)
    assert counted["llog_batch_queue_bytes"] > 3 * len("waits")
    assert counted["llog_flushes_in_flight"] == 1
    served.blobs.gate.set()
    await asyncio.gather(*calls)
    assert (await _counted(served))["llog_batch_queue_requests"] == 0


async def test_a_batch_that_cannot_be_written_is_an_error_of_a_flush(served: Served) -> None:
    await served.produce("t", "first")
    served.blobs.broken = True
    await served.produce("t", "lost")
    counted = await _counted(served)
    assert (counted["llog_flush_errors_total"], counted["llog_flush_duration_seconds_count"]) == (1, 1)


async def test_blobs_are_counted_with_the_size_that_they_have_in_the_store(served: Served) -> None:
    await served.produce("t", "x" * 5000)
    counted = await _counted(served)
    (name,) = served.blobs.puts
    info = await served.blobs.head(name)
    assert (counted["llog_blob_bytes_sum"], counted["llog_blob_bytes_count"]) == (info.size, 1)


async def test_operations_of_both_stores_have_counts_bytes_and_latencies(served: Served) -> None:
    await served.produce("t", "abc")
    other = Served(beside=served)  # which has nothing in its tail
    await other.consume("t", 1)
    counted = await _counted(served)
    operations = _labelled(counted["llog_store_operations_total"], "store", "operation")
    assert operations["blobs", "put"] == operations["blobs", "range_get"] == 1
    assert operations["meta", "put_many"] >= 1
    latencies = _labelled(counted["llog_store_operation_duration_seconds_count"], "store", "operation")
    assert latencies == operations
    sizes = _labelled(counted["llog_store_bytes_total"], "store", "operation")
    assert sizes["blobs", "put"] > sizes["blobs", "range_get"] > 0
    await other.close()


async def test_records_and_bytes_are_counted_by_topic(served: Served) -> None:
    await served.produce("a", "abc", "de")
    await served.produce("b", "x")
    await served.consume("a", 2)
    counted = await _counted(served)
    assert _labelled(counted["llog_topic_produced_records_total"], "topic") == {("a",): 2, ("b",): 1}
    assert _labelled(counted["llog_topic_produced_bytes_total"], "topic") == {("a",): 5, ("b",): 1}
    assert _labelled(counted["llog_topic_consumed_records_total"], "topic") == {("a",): 1, ("b",): 0}
    assert _labelled(counted["llog_topic_consumed_bytes_total"], "topic") == {("a",): 2, ("b",): 0}


async def test_the_lag_of_groups_is_counted_by_topic() -> None:
    served = Served(group_lag_interval_ms=1)
    await served.produce("t", "a", "b", "c")
    await served.produce("t", "d", partition=1)
    asked = {"topic": "t", "group_id": "g", "start": "Earliest", "partition_id": 0, "limit": 2}
    await served.client.post("/topics/consume", json=asked)
    await _counted(served)  # which reads the lag again for the next answer

    async def lag(family: str) -> dict[tuple[str, ...], float]:
        return _labelled((await _counted(served))[family], "group", "topic")

    while (await lag("llog_group_outstanding_records")) != {("g", "t"): 2}:
        await asyncio.sleep(0.002)
    assert await lag("llog_group_lag_records") == {("g", "t"): 4}
    await served.client.post("/topics/ack", json={"topic": "t", "group_id": "g", "partition_id": 0, "upto_offset": 2})
    while (await lag("llog_group_lag_records")) != {("g", "t"): 2}:
        await asyncio.sleep(0.002)
    await served.close()


async def test_a_group_lag_that_is_turned_off_asks_no_store() -> None:
    served = Served(group_lag_interval_ms=0)
    assert "llog_group_lag_failures_total" not in await _counted(served)
    await served.close()


async def test_a_run_is_described_by_its_names_and_numbers() -> None:
    served = Served(run_info="scenario=six-clients, clients=6,rate=")
    counted = await _counted(served)
    assert counted["run"] == {"scenario": "six-clients", "clients": "6", "rate": ""}
    assert _labelled(counted["llog_run_shape"], "name") == {("clients",): 6}
    assert _labelled(counted["llog_run_info"], "name", "text")["scenario", "six-clients"] == 1
    await served.close()


@pytest.mark.parametrize(
    "text", ["scenario", "Scenario=x", "=x", "a=" + "x" * 201, ",".join(f"n{number}=1" for number in range(21))]
)
async def test_a_run_that_is_not_described_as_it_should_be_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="LLOG_RUN_INFO"):
        Served(run_info=text)
