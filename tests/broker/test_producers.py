"""Producers over HTTP: an item that is sent again is appended once, and every refusal says why."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest

from llog.broker.http.arrow import MEDIA_TYPE
from tests.broker.serving import Served
from tests.broker.test_process import running


def item(*records: str, sequence: int | None = 0, id: str | None = "p", **more: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"topic": "t", "partition": 0, "records": list(records), **more}
    if id is not None:
        found["producer_id"] = id
    if sequence is not None:
        found["sequence"] = sequence
    return found


async def produce(served: Served, *items: dict[str, Any]) -> list[dict[str, Any]]:
    response = await served.client.post("/produce", json={"topic_partitions": list(items)})
    assert response.status_code == 200, response.text
    answers: list[dict[str, Any]] = response.json()["topic_partitions"]
    return answers


async def produce_arrow(served: Served, *records: str, **query: Any) -> httpx.Response:
    table = pa.table({"value": pa.array(records, pa.string())})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    headers = {"content-type": MEDIA_TYPE}
    body = sink.getvalue().to_pybytes()
    return await served.client.post("/topics/t/partitions/0/records", params=query, content=body, headers=headers)


async def payloads(served: Served) -> list[str]:
    return [each["payload"] for each in (await served.consume("t", 1))["records"]]


async def test_an_item_that_is_sent_again_gets_its_offsets_again(served: Served) -> None:
    first = {"topic": "t", "partition": 0, "start_offset": 1, "end_offset": 2}
    assert await produce(served, item("a", "b")) == [first]
    assert await produce(served, item("a", "b")) == [first | {"repeated": True}]
    assert await produce(served, item("b", sequence=1)) == [first | {"start_offset": 2, "repeated": True}]
    assert await produce(served, item("c", sequence=2)) == [first | {"start_offset": 3, "end_offset": 3}]
    assert await payloads(served) == ["a", "b", "c"]


async def test_records_that_are_sent_again_as_arrow_get_their_offsets_again(served: Served) -> None:
    first = {"topic": "t", "partition": 0, "start_offset": 1, "end_offset": 2}
    assert (await produce_arrow(served, "a", "b", producer_id="p", sequence=0)).json() == first
    again = await produce_arrow(served, "a", "b", producer_id="p", sequence=0)
    assert again.status_code == 200
    assert again.json() == first | {"repeated": True}
    third = await produce_arrow(served, "c", producer_id="p", producer_epoch=1, sequence=0)
    assert third.json() == first | {"start_offset": 3, "end_offset": 3}
    assert await payloads(served) == ["a", "b", "c"]


async def test_a_producer_is_the_same_whether_it_sends_json_or_arrow(served: Served) -> None:
    await produce(served, item("a", "b", id="null"))
    again = await produce_arrow(served, "a", "b", producer_id="null", sequence=0)
    assert again.json() == {"topic": "t", "partition": 0, "start_offset": 1, "end_offset": 2, "repeated": True}
    assert (await produce_arrow(served, "c", producer_id="null", sequence=2)).json()["start_offset"] == 3


@pytest.mark.parametrize(
    ("query", "status", "code"),
    [
        ({"producer_id": "p", "sequence": 9}, 409, "out_of_order_sequence"),
        ({"producer_id": "new", "sequence": 1}, 409, "unknown_producer"),
        ({"producer_id": "fenced", "producer_epoch": 2, "sequence": 0}, 409, "producer_fenced"),
        ({"producer_id": "p"}, 400, "invalid_argument"),
        ({"sequence": 2}, 400, "invalid_argument"),
        ({"producer_epoch": 1}, 400, "invalid_argument"),
        ({"producer_id": "", "sequence": 2}, 400, "invalid_argument"),
        ({"producer_id": "x" * 201, "sequence": 0}, 400, "invalid_argument"),
        ({"producer_id": "p", "sequence": -1}, 400, "invalid_argument"),
        ({"producer_id": "p", "sequence": 1 << 53}, 400, "invalid_argument"),
        ({"producer_id": "p", "sequence": "two"}, 400, "invalid_argument"),
        ({"producer": "p", "sequence": 2}, 400, "invalid_argument"),
    ],
)
async def test_a_wrong_producer_refuses_records_as_arrow(
    served: Served, query: dict[str, Any], status: int, code: str
) -> None:
    await produce(served, item("a", "b"), item("f", id="fenced", producer_epoch=3))
    refused = await produce_arrow(served, "x", **query)
    assert (refused.status_code, refused.json()["code"]) == (status, code)
    assert await payloads(served) == ["a", "b", "f"]


async def test_what_waits_for_a_batch_shares_one_blob_and_one_cas(served: Served) -> None:
    await served.produce("t", "first")
    served.blobs.gate.clear()
    calls = [asyncio.ensure_future(produce(served, item("under way", id="x")))]
    while len(served.blobs.puts) < 2:
        await asyncio.sleep(0)
    calls += [
        asyncio.ensure_future(produce(served, item(f"{n}", id=f"{n}"), item(f"{n}", id=f"{n}"))) for n in range(20)
    ]
    calls += [asyncio.ensure_future(produce(served, item(f"plain {n}", id=None, sequence=None))) for n in range(5)]
    await asyncio.sleep(0.05)
    served.blobs.gate.set()
    answers = await asyncio.gather(*calls)
    assert len(served.blobs.puts) == 3
    found = await payloads(served)
    assert found == ["first", "under way", *(f"{n}" for n in range(20)), *(f"plain {n}" for n in range(5))]
    for n, (first, again) in enumerate(answers[1:21]):
        assert found[first["start_offset"] - 1] == f"{n}"
        assert again == first | {"repeated": True}


async def test_a_retry_while_the_first_attempt_is_under_way_gets_the_same_offsets(served: Served) -> None:
    await served.produce("t", "first")
    served.blobs.gate.clear()
    calls = [asyncio.ensure_future(produce(served, item("a", "b")))]
    while len(served.blobs.puts) < 2:
        await asyncio.sleep(0)
    calls += [asyncio.ensure_future(produce(served, item("a", "b"))) for _ in range(3)]
    await asyncio.sleep(0.05)
    served.blobs.gate.set()
    found = [answer for (answer,) in await asyncio.gather(*calls)]
    assert {(answer["start_offset"], answer["end_offset"]) for answer in found} == {(2, 3)}
    assert [answer.get("repeated", False) for answer in found] == [False, True, True, True]
    assert await payloads(served) == ["first", "a", "b"]


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (item("x", sequence=9), "out_of_order_sequence"),
        (item("x", "y", sequence=1), "out_of_order_sequence"),
        (item("x", sequence=1, id="new"), "unknown_producer"),
        (item("x", sequence=None), "invalid_argument"),
        (item("x", id=None), "invalid_argument"),
        (item("x", id=None, sequence=None, producer_epoch=1), "invalid_argument"),
        (item("x", "y", sequence=(1 << 53) - 1), "invalid_argument"),
        (item("x", producer_epoch=2, id="fenced"), "producer_fenced"),
    ],
)
async def test_a_wrong_item_is_refused_alone(served: Served, sent: dict[str, Any], code: str) -> None:
    await produce(served, item("a", "b"), item("f", id="fenced", producer_epoch=3))
    refused, good = await produce(served, sent, item("c", sequence=2))
    assert refused["error"]["code"] == code
    assert good["start_offset"] == 4
    assert await payloads(served) == ["a", "b", "f", "c"]


@pytest.mark.parametrize(
    "wrong", [{"producer_id": ""}, {"producer_id": "x" * 201}, {"sequence": -1}, {"sequence": "0"}]
)
async def test_malformed_fields_refuse_the_request(served: Served, wrong: dict[str, Any]) -> None:
    response = await served.client.post("/produce", json={"topic_partitions": [item("a") | wrong]})
    assert response.status_code == 400
    assert response.json()["code"] == "invalid_argument"


async def test_a_higher_epoch_takes_over(served: Served) -> None:
    await produce(served, item("a"))
    assert (await produce(served, item("b", producer_epoch=1)))[0]["start_offset"] == 2
    (refused,) = await produce(served, item("c", sequence=1))
    assert refused["error"]["code"] == "producer_fenced"


@pytest.mark.parametrize("engine", ["disk", "rocksdb"])
def test_topics_of_other_engines_refuse_producers_and_say_what_to_do(engine: str, tmp_path: Path) -> None:
    with running(tmp_path, "serve") as server:
        created = server.client.post("/topics", json={"name": "t", "engine": engine})
        assert created.status_code == 201, created.text
        items = [item("a"), item("b", id=None, sequence=None)]
        refused, good = server.client.post("/produce", json={"topic_partitions": items}).json()["topic_partitions"]
        assert refused["error"]["code"] == "idempotence_unsupported"
        assert "without a producer id" in refused["error"]["detail"]
        assert good["start_offset"] == 1
        assert server.end() == 0


async def test_repeated_records_are_not_counted_as_produced(served: Served) -> None:
    await produce(served, item("a", "b"))
    await produce(served, item("a", "b"))
    assert served.broker.metrics.produced_records == 2


async def test_a_topic_that_is_created_again_takes_the_same_sequences_again(served: Served) -> None:
    await produce(served, item("a"))
    await served.client.delete("/topics/t")
    assert (await served.client.post("/topics", json={"name": "t"})).status_code == 201
    assert await produce(served, item("b")) == [{"topic": "t", "partition": 0, "start_offset": 1, "end_offset": 1}]
    assert await payloads(served) == ["b"]
