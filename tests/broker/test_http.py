"""The HTTP surface: what it takes, what it refuses, and how it says so."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from llog.broker.http.answers import error_answer, item_error, items_answer
from llog.engines.object.fencing import fence
from llog.errors import StoreUnavailable
from llog.model import TopicPartition
from llog.stores.memory.meta import MemoryMetaStore
from tests.broker.serving import Served


def _problem(response: Any, status: int, code: str) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    found: dict[str, Any] = response.json()
    assert (found["status"], found["code"]) == (status, code)
    return found


async def test_every_shape_of_record_comes_back_as_it_was_sent(served: Served) -> None:
    headers = [["a", "text"], ["b", {"base64": "/w=="}], ["c", None]]
    full = {"value": "v", "key": {"base64": "/w=="}, "timestamp": 5, "headers": headers}
    answer = await served.produce("t", "ä text", {"base64": "/wA="}, full, {"value": None, "key": "k"}, "")
    assert (answer["start_offset"], answer["end_offset"]) == (1, 5)
    found = await served.consume("t", 1)
    assert (found["high_watermark"], found["next_fetch_offset"]) == (5, 6)
    records = found["records"]
    assert [each["offset"] for each in records] == [1, 2, 3, 4, 5]
    assert [each["payload"] for each in records] == ["ä text", {"base64": "/wA="}, "v", None, ""]
    assert [each["key"] for each in records] == [None, None, {"base64": "/w=="}, "k", None]
    assert records[2]["timestamp"] == 5
    assert records[0]["timestamp"] > 5
    assert [each["headers"] for each in records] == [[], [], headers, [], []]


async def test_one_request_writes_many_partitions_and_makes_those_that_are_missing(served: Served) -> None:
    items = [{"topic": "t", "partition": p, "records": [f"{p}"]} for p in (0, 3, 1)]
    response = await served.client.post("/produce", json={"topic_partitions": items})
    assert [each["start_offset"] for each in response.json()["topic_partitions"]] == [1, 1, 1]
    described = (await served.client.get("/topics/t")).json()
    assert described["partitions"] == 4
    assert [each["next_offset"] for each in described["bounds"]] == [2, 2, 1, 2]
    assert len(served.blobs.puts) == 1


@pytest.mark.parametrize(("engine", "setting"), [("disk", "LLOG_SEGMENTS_DIR"), ("rocksdb", "LLOG_ROCKSDB_DIR")])
async def test_a_topic_of_an_engine_that_the_broker_lacks_is_refused_with_its_setting(
    served: Served, engine: str, setting: str
) -> None:
    refused = await served.client.post("/topics", json={"name": "t", "engine": engine})
    assert setting in _problem(refused, 501, "configuration")["detail"]


async def test_items_of_one_partition_keep_their_order(served: Served) -> None:
    items = [{"topic": "t", "partition": 0, "records": [f"{n}"]} for n in range(20)]
    for _ in range(2):  # the partition is new, then known
        await served.client.post("/produce", json={"topic_partitions": items})
    payloads = [each["payload"] for each in (await served.consume("t", 1))["records"]]
    assert payloads == [f"{n}" for n in range(20)] * 2


@pytest.mark.parametrize(
    ("item", "code"),
    [
        ({"topic": "no/name", "partition": 0, "records": ["x"]}, "invalid_argument"),
        ({"topic": "t", "partition": 0, "records": [{"key": "k"}]}, "invalid_argument"),
        ({"topic": "t", "partition": 0, "records": [{"value": "v", "base64": ""}]}, "invalid_argument"),
        ({"topic": "t", "partition": 0, "records": [{"value": "v", "timestamp": 1 << 63}]}, "invalid_argument"),
        ({"topic": "t", "partition": 64, "records": ["x"]}, "topic_not_found"),
        ({"topic": "fenced", "partition": 0, "records": ["x"]}, "partition_fenced"),
    ],
)
async def test_an_item_that_fails_has_its_error_and_stops_no_other(
    served: Served, item: dict[str, Any], code: str
) -> None:
    await served.produce("fenced", "before")
    await fence(served.log, TopicPartition("fenced", 0))
    good = {"topic": "good", "partition": 0, "records": ["x"]}
    response = await served.client.post("/produce", json={"topic_partitions": [item, good]})
    assert response.status_code == 200
    failed, appended = response.json()["topic_partitions"]
    assert failed["error"]["code"] == code
    assert "start_offset" not in failed
    assert appended["start_offset"] == 1


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[",
        b"{}",
        b'{"topic_partitions": []}',
        b'{"topic_partitions": [{"topic": "t", "partition": 0, "records": []}]}',
        b'{"topic_partitions": [{"topic": "t", "partition": -1, "records": ["x"]}]}',
        b'{"topic_partitions": [{"topic": "t", "partition": 0, "records": ["x"], "acks": 1}]}',
        b'{"topic_partitions": [{"topic": "t", "partition": 0, "records": [{"base64": "?"}]}]}',
        b'{"topic_partitions": [{"topic": "t", "partition": 0, "records": [{"value": "v", "vlaue": 1}]}]}',
        b'{"topic_partitions": [{"topic": "t", "partition": 0, "records": ["\xff"]}]}',
        b'{"topic_partitions": [{"topic": "t", "partition": 0, "records": ["\\ud800"]}]}',
        b'{"topic_partitions": ' + b"[" * 100_000,
    ],
)
async def test_a_malformed_request_is_refused_and_appends_nothing(served: Served, body: bytes) -> None:
    response = await served.client.post("/produce", content=body, headers={"content-type": "application/json"})
    _problem(response, 400, "invalid_argument")
    assert (await served.client.get("/topics")).json() == {"topics": []}


async def test_a_form_of_a_web_page_is_refused(served: Served) -> None:
    response = await served.client.post("/produce", content=b"{}", headers={"content-type": "text/plain"})
    assert "application/json" in _problem(response, 400, "invalid_argument")["detail"]


async def test_a_body_over_the_limit_is_refused_before_it_is_read() -> None:
    served = Served(request_max_bytes=1024)
    read = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal read
        for _ in range(100):
            read += 100
            yield b"x" * 100

    declared = {"content-type": "application/json", "content-length": "10000"}
    response = await served.client.post("/produce", content=body(), headers=declared)
    _problem(response, 413, "request_too_large")
    assert read == 0
    response = await served.client.post("/produce", content=body(), headers={"content-type": "application/json"})
    _problem(response, 413, "request_too_large")
    assert 1024 < read < 1500
    assert served.broker.metrics.buffered_bytes == 0
    await served.close()


async def test_requests_beyond_the_buffer_are_told_to_come_again() -> None:
    served = Served(batch_max_buffer_bytes=8192, batch_max_bytes=1024)
    served.blobs.gate.clear()
    first = asyncio.ensure_future(served.produce("t", "x" * 3000))
    while not served.blobs.puts:
        await asyncio.sleep(0)
    item = {"topic": "t", "partition": 0, "records": ["y" * 3000]}
    response = await served.client.post("/produce", json={"topic_partitions": [item]})
    _problem(response, 429, "overloaded")
    assert int(response.headers["retry-after"]) > 0
    served.blobs.gate.set()
    assert (await first)["start_offset"] == 1
    assert (await served.produce("t", "y" * 3000))["start_offset"] == 2
    assert served.broker.metrics.buffered_bytes == 0
    await served.close()


async def test_topics_are_made_listed_described_and_deleted(served: Served) -> None:
    asked = {"name": "t", "partitions": 2, "retention_ms": 5, "timestamp_type": "append"}
    response = await served.client.post("/topics", json=asked)
    assert response.status_code == 201
    assert response.json().items() >= asked.items()
    _problem(await served.client.post("/topics", json=asked), 409, "topic_exists")
    _problem(await served.client.post("/topics", json={"name": "a b"}), 400, "invalid_argument")
    assert [each["name"] for each in (await served.client.get("/topics")).json()["topics"]] == ["t"]
    assert (await served.client.delete("/topics/t")).status_code == 204
    _problem(await served.client.delete("/topics/t"), 404, "topic_not_found")
    _problem(await served.client.get("/topics/t"), 404, "topic_not_found")


async def test_a_write_after_a_deletion_makes_the_topic_again(served: Served) -> None:
    await served.produce("t", "old", "older")
    await served.consume("t", 1)
    assert (await served.client.delete("/topics/t")).status_code == 204
    assert (await served.produce("t", "new"))["start_offset"] == 1
    assert [each["payload"] for each in (await served.consume("t", 1))["records"]] == ["new"]


async def test_a_failing_store_is_told_and_nothing_is_acknowledged(served: Served) -> None:
    await served.produce("t", "before")
    assert (await served.client.get("/health")).json() == {"status": "ok"}
    served.blobs.broken = True
    assert "out of order" in _problem(await served.client.get("/health"), 503, "store_unavailable")["detail"]
    assert (await served.produce("t", "lost"))["error"]["code"] == "store_unavailable"
    lost = {"topic": "t", "partition": 0, "records": ["lost"]}
    refused = await served.client.post("/produce", json={"topic_partitions": [lost]})
    assert "out of order" in _problem(refused, 503, "store_unavailable")["detail"]
    mixed = await served.client.post("/produce", json={"topic_partitions": [lost, lost | {"topic": "no topic"}]})
    codes = [item["error"]["code"] for item in mixed.json()["topic_partitions"]]
    assert (mixed.status_code, codes) == (200, ["store_unavailable", "invalid_argument"])
    other = Served(beside=served)
    assert (await other.consume("t", 1))["error"]["code"] == "store_unavailable"
    await other.close()
    served.blobs.broken = False
    assert (await served.produce("t", "after"))["start_offset"] == 2
    assert [each["payload"] for each in (await served.consume("t", 1))["records"]] == ["before", "after"]


async def test_unknown_paths_and_verbs_are_problems_too(served: Served) -> None:
    _problem(await served.client.get("/nope"), 404, "not_found")
    response = await served.client.put("/produce")
    _problem(response, 405, "method_not_allowed")
    assert "POST" in response.headers["allow"]


async def test_both_forms_of_the_metrics_say_the_same(served: Served) -> None:
    await served.produce("t", "abc", "de")
    await served.consume("t", 1)
    await served.consume("missing", 1)
    await served.client.post("/produce", content=b"{", headers={"content-type": "application/json"})
    counted = (await served.client.get("/metrics")).json()
    assert counted["llog_produced_records_total"] == counted["llog_consumed_records_total"] == 2
    assert counted["llog_produced_bytes_total"] == counted["llog_consumed_bytes_total"] == 5
    assert {"route": "POST /produce", "status": "400", "value": 1} in counted["llog_requests_total"]
    assert {"code": "topic_not_found", "value": 1} in counted["llog_errors_total"]
    assert counted["llog_batch_bytes_count"] == 1
    assert any(
        each["store"] == "blobs" and each["operation"] == "put" for each in counted["llog_store_operations_total"]
    )
    lines = (await served.client.get("/metrics/prometheus")).text.splitlines()
    assert "llog_produced_records_total 2" in lines
    assert 'llog_requests_total{route="POST /produce",status="400"} 1' in lines
    assert 'llog_batch_bytes_bucket{le="+Inf"} 1' in lines
    assert lines.count("# TYPE llog_batch_bytes histogram") == 1


async def test_an_answer_is_one_json_document_whatever_the_bytes(served: Served) -> None:
    await served.produce("t", '\x00\u2028"\\', {"base64": "7aCA"})
    response = await served.client.post(
        "/consume", json={"topic_partitions": [{"topic": "t", "partition": 0, "fetch_offset": 1}]}
    )
    records = json.loads(response.content)["topic_partitions"][0]["records"]
    assert [each["payload"] for each in records] == ['\x00\u2028"\\', {"base64": "7aCA"}]


async def test_a_topic_of_many_partitions_is_described_in_few_reads(served: Served) -> None:
    assert (await served.client.post("/topics", json={"name": "t", "partitions": 1000})).status_code == 201
    await served.produce("t", "x", partition=999)
    assert isinstance(served.log.meta, MemoryMetaStore)
    before = sum(served.log.meta.counts.count.values())
    bounds = (await served.client.get("/topics/t")).json()["bounds"]
    assert sum(served.log.meta.counts.count.values()) - before < 10
    assert [each["partition"] for each in bounds] == list(range(1000))
    assert [each["next_offset"] for each in bounds] == [1] * 999 + [2]


@pytest.mark.parametrize("kind", [StoreUnavailable, *StoreUnavailable.__subclasses__()])
def test_a_store_that_is_away_is_503_whatever_its_error_is_called(kind: type[StoreUnavailable]) -> None:
    for answer in (error_answer(kind("away")), items_answer([{"error": item_error(kind("away"))}])):
        assert answer.status_code == 503
        assert "retry-after" in answer.headers
