"""Records of a partition as JSON, as people read them with curl."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from llog.broker.http.arrow import MEDIA_TYPE
from llog.broker.routes.partition_records import JSON_RECORDS
from llog.engines.object.retention import trim
from llog.model import TopicPartition
from tests.broker.serving import Served
from tests.broker.test_process import running

PATH = "/topics/t/partitions/0/records"


async def get(served: Served, **query: object) -> dict[str, Any]:
    asked: Any = query
    response = await served.client.get(PATH, params=asked)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/json"
    found: dict[str, Any] = response.json()
    return found


async def offsets(served: Served, **query: object) -> list[int]:
    return [each["offset"] for each in (await get(served, **query))["records"]]


async def test_without_parameters_the_records_are_read_from_the_log_start(served: Served) -> None:
    await served.produce("t", "gone", {"value": "text", "key": "k", "timestamp": 5, "headers": [["h", "v"]]})
    await trim(served.log, TopicPartition("t", 0), 2)
    assert await get(served) == {
        "topic": "t",
        "partition": 0,
        "log_start_offset": 2,
        "next_offset": 3,
        "next_fetch_offset": 3,
        "records": [{"offset": 2, "timestamp": 5, "key": "k", "value": "text", "headers": [["h", "v"]]}],
    }


async def test_values_that_are_json_are_shown_as_json_unless_text_is_wanted(served: Served) -> None:
    texts = ['{"a": [1, 2.50]}', "42", "plain", '"quoted"', "nan", "[1,"]
    await served.produce("t", *texts, {"base64": "AP8="}, {"value": None, "key": "k"})
    shown = [each["value"] for each in (await get(served))["records"]]
    assert shown == [{"a": [1, 2.5]}, 42, "plain", "quoted", "nan", "[1,", {"base64": "AP8="}, None]
    as_text = [each["value"] for each in (await get(served, values="text"))["records"]]
    assert as_text == [*texts, {"base64": "AP8="}, None]


async def test_what_is_posted_as_json_comes_back_as_it_was(served: Served) -> None:
    values = [{"n": 1, "nested": {"list": [1, None, True]}}, [1, 2], 7, 1.5, True, "text", None]
    await served.client.post("/topics/t/records", json={"records": [{"key": "k", "value": each} for each in values]})
    assert [each["value"] for each in (await get(served))["records"]] == values


async def test_a_page_ends_at_its_limit_and_the_next_begins_behind_it(served: Served) -> None:
    await served.produce("t", *(f"{n}" for n in range(5)))
    await served.produce("t", *(f"{n}" for n in range(5)))
    first = await get(served, limit=7)
    assert ([each["offset"] for each in first["records"]], first["next_fetch_offset"]) == ([*range(1, 8)], 8)
    assert await offsets(served, offset=8, limit=7) == [8, 9, 10]
    assert await offsets(served, offset=2, stop=4, limit=7) == [2, 3]
    assert await offsets(served, offset=3, limit=1) == [3]
    arrow = await served.client.get(PATH, params={"offset": 2, "limit": 6}, headers={"accept": MEDIA_TYPE})
    assert arrow.headers["llog-next-fetch-offset"] == "8"


async def test_a_page_without_a_limit_has_a_bounded_number_of_records(served: Served) -> None:
    await served.produce("t", *["x"] * (JSON_RECORDS + 5))
    assert len(await offsets(served)) == JSON_RECORDS
    assert len(await offsets(served, limit=JSON_RECORDS + 5)) == JSON_RECORDS + 5


async def test_the_last_records_and_both_ends_can_be_asked_for(served: Served) -> None:
    await served.produce("t", *(f"{n}" for n in range(5)))
    assert await offsets(served, last=2) == [4, 5]
    assert await offsets(served, last=100) == [1, 2, 3, 4, 5]
    assert await offsets(served, offset="earliest", limit=1) == [1]
    latest = await get(served, offset="latest")
    assert (latest["records"], latest["next_fetch_offset"]) == ([], 6)


async def test_a_wait_at_the_end_is_ended_by_the_next_record(served: Served) -> None:
    await served.produce("t", "a")
    waiting = asyncio.ensure_future(offsets(served, offset="latest", max_wait_ms=60_000))
    while not served.broker.metrics.waiting:
        await asyncio.sleep(0.001)
    await served.produce("t", "b")
    assert await waiting == [2]


@pytest.mark.parametrize("accept", ["application/json", "*/*", "text/html, */*;q=0.8", "application/*"])
async def test_who_does_not_ask_for_arrow_gets_json(served: Served, accept: str) -> None:
    await served.produce("t", "a")
    response = await served.client.get(PATH, headers={"accept": accept})
    assert response.json()["records"][0]["value"] == "a"


@pytest.mark.parametrize("engine", ["disk", "rocksdb"])
def test_topics_of_every_engine_are_read(tmp_path: Path, engine: str) -> None:
    with running(tmp_path, "serve") as server:
        server.client.post("/topics", json={"name": "t", "engine": engine, "partitions": 1})
        server.client.post("/topics/t/records", json={"records": [{"value": {"n": n}} for n in range(5)]})
        found = server.client.get(PATH, params={"last": 2}).json()
        assert [(each["offset"], each["value"]) for each in found["records"]] == [(4, {"n": 3}), (5, {"n": 4})]
        assert server.end() == 0
