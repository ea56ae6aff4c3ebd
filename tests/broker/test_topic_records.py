"""Records that name no partition: the broker chooses one by the key, or keeps records without a key together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from llog.broker.partitioner import STICKY_BYTES
from llog.engines.object.fencing import fence
from llog.log.catalog import Catalog
from llog.model import TopicPartition, partition_for_key
from tests.broker.serving import Served
from tests.broker.test_process import running


async def post(served: Served, *records: object, topic: str = "t", **more: object) -> httpx.Response:
    return await served.client.post(f"/topics/{topic}/records", json={"records": list(records), **more})


async def posted(served: Served, *records: object, topic: str = "t", **more: object) -> list[tuple[int, int]]:
    response = await post(served, *records, topic=topic, **more)
    assert response.status_code == 200, response.text
    assert response.json()["topic"] == topic
    return [(each["partition"], each["offset"]) for each in response.json()["records"]]


async def produce(served: Served, *items: dict[str, Any]) -> list[dict[str, Any]]:
    response = await served.client.post("/produce", json={"topic_partitions": list(items)})
    assert response.status_code == 200, response.text
    answers: list[dict[str, Any]] = response.json()["topic_partitions"]
    return answers


async def create(served: Served, partitions: int, **more: object) -> None:
    response = await served.client.post("/topics", json={"name": "t", "partitions": partitions, **more})
    assert response.status_code == 201, response.text


async def payloads(served: Served, partition: int = 0, topic: str = "t") -> list[Any]:
    return [each["payload"] for each in (await served.consume(topic, 1, partition))["records"]]


async def test_a_record_with_a_key_goes_where_kafka_would_put_it(served: Served) -> None:
    await create(served, 5)
    keys = [f"customer-{n}" for n in range(40)]
    found = await posted(served, *({"key": key, "value": key} for key in keys))
    assert [partition for partition, _ in found] == [partition_for_key(key.encode(), 5) for key in keys]
    for key, (partition, offset) in zip(keys, found, strict=True):
        assert (await payloads(served, partition))[offset - 1] == key


async def test_keys_of_any_bytes_and_numbers_are_keys_as_their_bytes_are(served: Served) -> None:
    await create(served, 7)
    keys: list[object] = ["", {"base64": "AP8="}, 42]
    found = await posted(served, *({"key": key, "value": "v"} for key in keys))
    assert [partition for partition, _ in found] == [partition_for_key(key, 7) for key in (b"", b"\x00\xff", b"42")]


async def test_records_without_a_key_stay_together_until_their_partition_has_had_its_share(served: Served) -> None:
    await create(served, 3)
    first = await posted(served, "a", {"value": {"b": 1}})
    again = await posted(served, "c")
    (partition,) = {partition for partition, _ in first}
    assert again == [(partition, 3)]
    assert await posted(served, "x" * STICKY_BYTES) == [(partition, 4)]
    turns = [(await posted(served, "x" * STICKY_BYTES))[0] for _ in range(3)]
    assert turns == [((partition + 1) % 3, 1), ((partition + 2) % 3, 1), (partition, 5)]


async def test_a_request_may_have_records_with_and_without_keys_in_any_order(served: Served) -> None:
    await create(served, 4)
    sent = [{"value": f"{n}", "key": f"k{n}" if n % 2 else None} for n in range(20)]
    found = await posted(served, *sent)
    for record, (partition, offset) in zip(sent, found, strict=True):
        assert (await payloads(served, partition))[offset - 1] == record["value"]
    offsets: dict[int, list[int]] = {}
    for partition, offset in found:
        offsets.setdefault(partition, []).append(offset)
    assert all(each == sorted(each) for each in offsets.values())
    assert len({partition for record, (partition, _) in zip(sent, found, strict=True) if record["key"] is None}) == 1


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        ('"text"', "text"),
        ('{"a": [1, 2.50, null],  "b": "ü"}', '{"a": [1, 2.50, null],  "b": "ü"}'),
        ("[1, 2]", "[1, 2]"),
        ("1.0", "1.0"),
        ("12345678901234567890123", "12345678901234567890123"),
        ("true", "true"),
        ("{}", "{}"),
        ('{"base64": "AP8="}', {"base64": "AP8="}),
        ('{"base64": "AP8=", "more": 1}', '{"base64": "AP8=", "more": 1}'),
        ('{"base64": 7}', '{"base64": 7}'),
        ("null", None),
    ],
)
async def test_a_value_is_stored_as_its_json_text_unless_it_is_text_or_bytes(
    served: Served, value: str, stored: object
) -> None:
    body = f'{{"records": [{{"key": "k", "value": {value}}}]}}'
    response = await served.client.post(
        "/topics/t/records", content=body.encode(), headers={"content-type": "application/json"}
    )
    assert response.status_code == 200, response.text
    assert await payloads(served) == [stored]


async def test_a_record_has_everything_that_a_record_of_produce_has(served: Served) -> None:
    await posted(served, {"base64": "AP8=", "key": "k", "timestamp": 5, "headers": [["a", "b"], ["c", None]]})
    (record,) = (await served.consume("t", 1))["records"]
    assert record == {
        "offset": 1,
        "payload": {"base64": "AP8="},
        "key": "k",
        "timestamp": 5,
        "headers": [["a", "b"], ["c", None]],
    }


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b'{"records": []}',
        b'{"records": [7]}',
        b'{"records": [{}]}',
        b'{"records": [{"value": "a", "base64": "AP8="}]}',
        b'{"records": [{"value": {"base64": "?"}}]}',
        b'{"records": [{"value": "\\ud800"}]}',
        b'{"records": [{"value": {"a": "\xff"}}]}',
        b'{"records": [{"value": 1, "key": {"a": 1}}]}',
        b'{"records": [{"value": ' + b"[" * 100_000 + b"]" * 100_000 + b"}]}",
        b'{"records": ["a"], "partition": -1}',
        b'{"records": ["a"], "sequence": 0}',
        b'{"records": ["a"], "unknown": 0}',
        b'{"records": ["a"], "producer_id": "p", "sequence": 0}',
    ],
)
async def test_what_is_malformed_is_refused_and_appends_nothing(served: Served, body: bytes) -> None:
    await create(served, 2)
    kind = {"content-type": "application/json"}
    response = await served.client.post("/topics/t/records", content=body, headers=kind)
    assert (response.status_code, response.json()["code"]) == (400, "invalid_argument"), response.text
    assert await payloads(served, 0) + await payloads(served, 1) == []


async def test_a_topic_name_that_is_none_is_refused(served: Served) -> None:
    response = await post(served, "a", topic="a b")
    assert (response.status_code, response.json()["code"]) == (400, "invalid_argument")


@pytest.mark.parametrize(("policy", "partitions"), [("lazy", 1), ("3", 3)])
async def test_a_missing_topic_is_created_as_the_policy_says(policy: str, partitions: int) -> None:
    served = Served(auto_create=policy)
    await posted(served, {"key": "k", "value": "v"})
    assert (await served.client.get("/topics/t")).json()["partitions"] == partitions
    assert await payloads(served, partition_for_key(b"k", partitions)) == ["v"]
    await served.close()


async def test_without_auto_creation_a_missing_topic_is_not_found() -> None:
    served = Served(auto_create="off")
    response = await post(served, "a")
    assert (response.status_code, response.json()["code"]) == (404, "topic_not_found")
    (item,) = await produce(served, {"topic": "t", "records": ["a"]})
    assert item["error"]["code"] == "topic_not_found"
    await served.close()


async def test_keys_go_by_the_partitions_that_were_added_once_the_broker_has_looked_again() -> None:
    served = Served(tail_staleness_ms=0)
    await create(served, 1)
    await posted(served, {"key": "k", "value": "before"})
    await Catalog(served.log).add_partitions("t", 64)
    keys = [f"{n}" for n in range(20)]
    found = await posted(served, *({"key": key, "value": "after"} for key in keys))
    assert [partition for partition, _ in found] == [partition_for_key(key.encode(), 64) for key in keys]
    await served.close()


async def test_records_of_a_partition_that_refuses_them_have_its_error_beside_those_that_were_appended(
    served: Served,
) -> None:
    await create(served, 2)
    await fence(served.log, TopicPartition("t", 1))
    keys = [f"{n}" for n in range(10)]
    response = await post(served, *({"key": key, "value": key} for key in keys))
    assert response.status_code == 200
    assert response.json()["error"]["code"] == "partition_fenced"
    for key, record in zip(keys, response.json()["records"], strict=True):
        assert record["partition"] == partition_for_key(key.encode(), 2)
        assert record.get("error", {}).get("code") == ("partition_fenced" if record["partition"] else None)
    assert len(await payloads(served, 0)) == sum("offset" in record for record in response.json()["records"])


async def test_a_request_of_which_nothing_was_appended_has_the_status_of_its_error(served: Served) -> None:
    await create(served, 1)
    await fence(served.log, TopicPartition("t", 0))
    response = await post(served, "a", "b")
    assert (response.status_code, response.json()["code"]) == (409, "partition_fenced")
    (item,) = await produce(served, {"topic": "t", "records": ["a", "b"]})
    assert (item["error"]["code"], "records" in item) == ("partition_fenced", False)


async def test_a_store_that_is_out_of_order_is_503_with_the_time_to_wait(served: Served) -> None:
    await create(served, 2)
    served.blobs.broken = True
    response = await post(served, "a")
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    sent = {"topic_partitions": [{"topic": "t", "records": ["a"]}]}
    assert (await served.client.post("/produce", json=sent)).status_code == 503


async def test_a_producer_that_names_its_partition_is_appended_once(served: Served) -> None:
    await create(served, 2)
    sent: dict[str, Any] = {"partition": 1, "producer_id": "p", "sequence": 0}
    first = await post(served, "a", {"value": [1]}, **sent)
    again = await post(served, "a", {"value": [1]}, **sent)
    assert first.json() == {"topic": "t", "records": [{"partition": 1, "offset": 1}, {"partition": 1, "offset": 2}]}
    assert again.json() == first.json() | {"repeated": True}
    assert await payloads(served, 1) == ["a", "[1]"]


async def test_items_of_produce_may_leave_out_the_partition(served: Served) -> None:
    await create(served, 3)
    keyed = [{"value": f"{n}", "key": f"{n}"} for n in range(6)]
    first, second, third, fourth = await produce(
        served,
        {"topic": "t", "partition": 2, "records": ["named"]},
        {"topic": "t", "records": keyed},
        {"topic": "other", "records": ["loose"]},
        {"topic": "t", "records": ["numbered"], "producer_id": "p", "sequence": 0},
    )
    assert first == {"topic": "t", "partition": 2, "start_offset": 1, "end_offset": 1}
    assert list(second) == ["topic", "records"]
    for sent, record in zip(keyed, second["records"], strict=True):
        assert record["partition"] == partition_for_key(sent["key"].encode(), 3)
        assert (await payloads(served, record["partition"]))[record["offset"] - 1] == sent["value"]
    assert third == {"topic": "other", "records": [{"partition": 0, "offset": 1}]}
    assert (fourth["topic"], fourth["error"]["code"]) == ("t", "invalid_argument")


@pytest.mark.parametrize("engine", ["object", "disk", "rocksdb"])
def test_topics_of_every_engine_take_them(tmp_path: Path, engine: str) -> None:
    with running(tmp_path, "serve") as server:
        made = server.client.post("/topics", json={"name": "t", "engine": engine, "partitions": 4})
        assert made.status_code == 201, made.text
        sent = [{"key": f"{n}", "value": {"n": n}} for n in range(12)]
        response = server.client.post("/topics/t/records", json={"records": sent})
        assert response.status_code == 200, response.text
        for record, found in zip(sent, response.json()["records"], strict=True):
            assert found["partition"] == partition_for_key(str(record["key"]).encode(), 4)
            item = {"topic": "t", "partition": found["partition"], "fetch_offset": found["offset"]}
            answer = server.client.post("/consume", json={"topic_partitions": [item]}).json()
            assert json.loads(answer["topic_partitions"][0]["records"][0]["payload"]) == record["value"]
        assert server.end() == 0
