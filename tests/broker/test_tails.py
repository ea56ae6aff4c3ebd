"""Topics and partitions that are followed as server-sent events."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from llog.broker.http.events import TAILS_MAX
from llog.engines.object.retention import trim
from llog.log.catalog import Catalog
from llog.model import TopicPartition
from tests.broker.events import LIMIT_S, Events
from tests.broker.serving import Served
from tests.broker.test_process import running

PARTITION = "/topics/t/partitions/0/tail"
TOPIC = "/topics/t/tail"


async def create(served: Served, partitions: int) -> None:
    response = await served.client.post("/topics", json={"name": "t", "partitions": partitions})
    assert response.status_code == 201, response.text


async def values(events: Events, number: int) -> list[Any]:
    return [data["value"] for _, data in await events.records(number)]


async def refused(served: Served, target: str, status: int, code: str, last: str | None = None) -> None:
    response = await served.client.get(target, headers={} if last is None else {"last-event-id": last})
    assert (response.status_code, response.json()["code"]) == (status, code), response.text


async def test_a_partition_is_followed_from_its_end_by_default(served: Served) -> None:
    await served.produce("t", "old")
    async with Events(served, PARTITION) as events:
        assert await events.next() == {"retry": "1000", "id": "1"}
        await served.produce("t", {"value": '{"n": 1}', "key": "k", "timestamp": 5, "headers": [["h", "v"]]}, "text")
        (id, data), (_, second) = await events.records(2)
        assert id == "2"
        assert data == {
            "partition": 0,
            "offset": 2,
            "timestamp": 5,
            "key": "k",
            "value": {"n": 1},
            "headers": [["h", "v"]],
        }
        assert second["value"] == "text"


async def test_a_partition_is_followed_from_where_the_client_says(served: Served) -> None:
    await served.produce("t", "a", "b", "c")
    for query, wanted in {"offset=2": ["b", "c"], "offset=earliest": ["a", "b", "c"], "last=1": ["c"]}.items():
        async with Events(served, f"{PARTITION}?{query}") as events:
            assert await values(events, len(wanted)) == wanted


async def test_a_client_that_comes_back_loses_nothing_and_sees_nothing_twice(served: Served) -> None:
    await served.produce("t", "a", "b", "c")
    async with Events(served, f"{PARTITION}?offset=earliest") as events:
        ((_, _), (last, _)) = await events.records(2)
    async with Events(served, f"{PARTITION}?offset=earliest", last) as events:
        assert await values(events, 1) == ["c"]
    async with Events(served, PARTITION) as events:
        begun = await events.next()
    assert begun is not None
    await served.produce("t", "while it was away")
    async with Events(served, PARTITION, begun["id"]) as events:
        assert await values(events, 1) == ["while it was away"]
    assert served.broker.metrics.tails == 0


async def test_all_partitions_of_a_topic_are_followed_and_gone_on_with(served: Served) -> None:
    await create(served, 3)
    for partition in range(3):
        await served.produce("t", *(f"{partition}-{n}" for n in range(4)), partition=partition)
    seen: list[str] = []
    last = None
    while len(seen) < 12:
        async with Events(served, f"{TOPIC}?offset=earliest", last) as events:
            for id, data in await events.records(min(5, 12 - len(seen))):
                last = id
                assert data["value"] == f"{data['partition']}-{data['offset'] - 1}"
                seen.append(data["value"])
    assert sorted(seen) == [f"{partition}-{n}" for partition in range(3) for n in range(4)]
    assert last == "4,4,4"
    async with Events(served, TOPIC) as events:
        await events.next()
        await served.produce("t", "new", partition=2)
        assert await events.records(1) == [("4,4,5", {**(await only_record(served, 2, 5)), "partition": 2})]


async def only_record(served: Served, partition: int, offset: int) -> dict[str, Any]:
    response = await served.client.get(f"/topics/t/partitions/{partition}/records?offset={offset}")
    (record,) = response.json()["records"]
    return dict(record)


async def test_partitions_that_are_added_are_followed_too(served: Served) -> None:
    await create(served, 1)
    async with Events(served, f"{TOPIC}?heartbeat_ms=100") as events:
        await events.next()
        await Catalog(served.log).add_partitions("t", 3)
        await served.produce("t", "to the new one", partition=2)
        await served.produce("t", "to the old one", partition=0)
        assert sorted(await values(events, 2)) == ["to the new one", "to the old one"]
    async with Events(served, TOPIC, "1") as events:
        assert await values(events, 1) == ["to the new one"]


async def test_a_busy_partition_does_not_keep_others_from_being_followed(served: Served) -> None:
    await create(served, 2)
    for _ in range(40):
        await served.produce("t", "x" * 60_000, partition=0)
    await served.produce("t", "y", partition=1)
    async with Events(served, f"{TOPIC}?offset=earliest") as events:
        found = [data["partition"] for _, data in await events.records(41)]
    assert found.index(1) < 20


async def test_what_retention_removed_is_a_gap_and_the_rest_follows(served: Served) -> None:
    await served.produce("t", "a", "b", "c", "d")
    await trim(served.log, TopicPartition("t", 0), 3)
    async with Events(served, PARTITION, "1") as events:
        await events.next()
        gap = await events.next()
        assert gap is not None
        assert (gap["event"], gap["id"]) == ("gap", "2")
        assert json.loads(gap["data"]) == {"partition": 0, "start_offset": 2, "end_offset": 2}
        assert await values(events, 2) == ["c", "d"]


async def test_json_with_line_ends_stays_one_line_of_its_event(served: Served) -> None:
    await served.produce("t", '{\r\n  "a":\n1}', "text\nof two lines")
    async with Events(served, f"{PARTITION}?offset=1") as events:
        assert await values(events, 2) == [{"a": 1}, "text\nof two lines"]
    async with Events(served, f"{PARTITION}?offset=1&values=text") as events:
        assert await values(events, 1) == ['{\r\n  "a":\n1}']


async def test_a_tail_says_that_it_lives_and_ends_with_the_broker(served: Served) -> None:
    await served.produce("t", "a")
    async with Events(served, f"{PARTITION}?heartbeat_ms=100") as events:
        assert await events.next() == {"retry": "1000", "id": "1"}
        for _ in range(2):
            assert await events.next() == {"": "still here"}
        served.broker.stopping.set()
        while await events.next() is not None:
            pass


async def test_a_client_that_takes_nothing_is_not_read_ahead_for(served: Served) -> None:
    count = 300
    for _ in range(count):
        await served.produce("t", "x" * 20_000)
    async with Events(served, f"{PARTITION}?offset=1") as events:
        assert await values(events, 1)
        events.may_take.clear()
        await asyncio.sleep(0.2)
        before = served.broker.metrics.consumed_records
        await asyncio.sleep(0.2)
        assert served.broker.metrics.consumed_records == before < count / 2
        events.may_take.set()
        assert len(await values(events, count - 1)) == count - 1


async def test_a_topic_that_is_deleted_ends_its_tails_with_a_problem(served: Served) -> None:
    await served.produce("t", "a")
    async with Events(served, f"{PARTITION}?heartbeat_ms=100") as events:
        await events.next()
        assert (await served.client.delete("/topics/t")).status_code == 204
        event = await events.next()
        while event == {"": "still here"}:
            event = await events.next()
        assert event is not None
        assert (event["event"], json.loads(event["data"])["code"]) == ("problem", "topic_not_found")
        assert await events.next() is None


async def test_a_topic_that_was_created_again_ends_its_tails_with_a_problem(served: Served) -> None:
    await served.produce("t", "a")
    async with Events(served, f"{PARTITION}?heartbeat_ms=100") as events:
        await events.next()
        events.may_take.clear()
        assert (await served.client.delete("/topics/t")).status_code == 204
        await served.produce("t", "b", "c")
        events.may_take.set()
        event = await events.next()
        while event == {"": "still here"}:
            event = await events.next()
        assert event is not None
        assert (event["event"], json.loads(event["data"])["code"]) == ("problem", "topic_not_found")


async def test_what_cannot_be_followed_is_refused_before_the_stream_begins(served: Served) -> None:
    await served.produce("t", "a")
    await refused(served, "/topics/u/tail", 404, "topic_not_found")
    await refused(served, "/topics/u/partitions/0/tail", 404, "topic_not_found")
    await refused(served, "/topics/t/partitions/1/tail", 404, "partition_not_initialized")
    await refused(served, f"{PARTITION}?offset=3", 416, "offset_out_of_range")
    await refused(served, PARTITION, 416, "offset_out_of_range", last="9")
    for query in ("offset=0", "offset=x", "heartbeat_ms=1", "unknown=1", "offset=1&last=1", "values=x"):
        await refused(served, f"{PARTITION}?{query}", 400, "invalid_argument")
    await refused(served, f"{TOPIC}?offset=1", 400, "invalid_argument")
    for last in ("x", "-1", "1,1", "1,", str(1 << 63), "1" * 10_000):
        await refused(served, PARTITION, 400, "invalid_argument", last=last)
        await refused(served, TOPIC, 400, "invalid_argument", last=last)


async def test_a_topic_with_too_many_partitions_is_followed_by_partition(served: Served) -> None:
    await create(served, 257)
    await refused(served, TOPIC, 400, "invalid_argument")
    async with Events(served, PARTITION) as events:
        assert await events.next() == {"retry": "1000", "id": "0"}


async def test_there_is_an_end_to_how_many_may_follow(served: Served) -> None:
    await served.produce("t", "a")
    served.broker.metrics.tails = TAILS_MAX
    await refused(served, PARTITION, 429, "overloaded")
    assert (await served.client.head(PARTITION)).status_code == 200


@pytest.mark.parametrize("engine", ["object", "disk", "rocksdb"])
def test_topics_of_every_engine_are_followed_until_the_broker_ends(tmp_path: Path, engine: str) -> None:
    with running(tmp_path, "serve") as server:
        server.client.post("/topics", json={"name": "t", "engine": engine, "partitions": 2})
        server.client.post("/topics/t/records", json={"records": [{"key": f"{n}", "value": n} for n in range(9)]})
        with server.client.stream("GET", f"{TOPIC}?offset=earliest", timeout=LIMIT_S) as response:
            lines = response.iter_lines()
            found: list[int] = []
            while len(found) < 9:
                line = next(lines)
                if line.startswith("data: "):
                    found.append(json.loads(line.removeprefix("data: "))["value"])
            assert sorted(found) == list(range(9))
            server.process.terminate()
            assert list(lines)[-1] == ""
        assert server.process.wait(LIMIT_S) == 0
        assert "Traceback" not in server.errors
