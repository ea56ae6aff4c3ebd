"""Topics over HTTP: what of them can be changed, and how appends to them are stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llog.model import partition_for_key
from tests.broker.serving import Served
from tests.broker.test_process import running


async def create(served: Served, **options: object) -> dict[str, Any]:
    response = await served.client.post("/topics", json={"name": "t", **options})
    assert response.status_code == 201, response.text
    found: dict[str, Any] = response.json()
    return found


async def code_of_append(served: Served, partition: int = 0) -> str | None:
    answer = await served.produce("t", "a", partition=partition)
    code: str | None = answer.get("error", {}).get("code")
    return code


async def test_a_change_leaves_alone_what_it_does_not_name(served: Served) -> None:
    created = await create(served, retention_ms=1000, retention_bytes=5, partitions=2)
    changed = await served.client.patch("/topics/t", json={"retention_ms": 2000})
    assert changed.json() == created | {"retention_ms": 2000}
    lifted = await served.client.patch("/topics/t", json={"retention_bytes": None, "partitions": 4})
    assert lifted.json() == changed.json() | {"retention_bytes": None, "partitions": 4}
    assert (await served.client.patch("/topics/t", json={})).json() == lifted.json()
    found = (await served.client.get("/topics/t")).json()
    assert (found["retention_ms"], found["retention_bytes"], len(found["bounds"])) == (2000, None, 4)
    assert (await served.produce("t", "a", partition=3))["start_offset"] == 1


async def test_keys_go_by_the_partitions_that_were_added_at_once(served: Served) -> None:
    async def partitions_of(keys: list[str]) -> list[int]:
        records = [{"key": key, "value": key} for key in keys]
        response = await served.client.post("/topics/t/records", json={"records": records})
        return [each["partition"] for each in response.json()["records"]]

    keys = [f"{n}" for n in range(20)]
    await create(served)
    assert await partitions_of(keys) == [0] * 20
    await served.client.patch("/topics/t", json={"partitions": 8})
    assert await partitions_of(keys) == [partition_for_key(key.encode(), 8) for key in keys]
    await served.client.delete("/topics/t")
    assert await partitions_of(keys) == [0] * 20
    assert (await served.client.get("/topics/t")).json()["partitions"] == 1


@pytest.mark.parametrize(
    ("change", "status", "code"),
    [
        ({"retention_ms": -1}, 400, "invalid_argument"),
        ({"partitions": None}, 400, "invalid_argument"),
        ({"partitions": 1, "retention_ms": 7}, 400, "invalid_argument"),
        ({"cleanup": "compact", "partitions": 3}, 400, "invalid_argument"),
        ({"engine": "disk"}, 400, "invalid_argument"),
        ({"name": "u"}, 400, "invalid_argument"),
    ],
)
async def test_a_change_that_cannot_be_changes_nothing(
    served: Served, change: dict[str, Any], status: int, code: str
) -> None:
    created = await create(served, partitions=2)
    response = await served.client.patch("/topics/t", json=change)
    assert (response.status_code, response.json()["code"]) == (status, code)
    found = (await served.client.get("/topics/t")).json()
    assert {name: found[name] for name in created} == created


async def test_a_missing_topic_is_not_changed_and_not_fenced(served: Served) -> None:
    for response in (
        await served.client.patch("/topics/t", json={"partitions": 2}),
        await served.client.post("/topics/t/fence"),
        await served.client.post("/topics/t/unfence"),
    ):
        assert (response.status_code, response.json()["code"]) == (404, "topic_not_found")


async def test_a_fenced_topic_takes_no_appends_until_it_is_unfenced(served: Served) -> None:
    await create(served, partitions=3)
    await served.produce("t", "before")
    for _ in range(2):
        response = await served.client.post("/topics/t/fence")
        assert response.json() == {"topic": "t", "partitions": [0, 1, 2], "state": "fenced"}
    assert [await code_of_append(served, partition) for partition in range(3)] == ["partition_fenced"] * 3
    assert [each["payload"] for each in (await served.consume("t", 1))["records"]] == ["before"]
    response = await served.client.post("/topics/t/unfence", params={"partition": 1})
    assert response.json() == {"topic": "t", "partitions": [1], "state": "open"}
    codes = [await code_of_append(served, partition) for partition in range(3)]
    assert codes == ["partition_fenced", None, "partition_fenced"]
    await served.client.post("/topics/t/unfence")
    assert [await code_of_append(served, partition) for partition in range(3)] == [None] * 3


async def test_only_the_partition_that_is_named_is_fenced(served: Served) -> None:
    await create(served, partitions=2)
    await served.client.post("/topics/t/fence", params={"partition": 1})
    assert [await code_of_append(served, partition) for partition in range(2)] == [None, "partition_fenced"]


@pytest.mark.parametrize(
    ("query", "status", "code"),
    [
        ("partition=2", 404, "partition_not_initialized"),
        ("partition=-1", 400, "invalid_argument"),
        ("partition=x", 400, "invalid_argument"),
        ("partitions=0", 400, "invalid_argument"),
    ],
)
async def test_a_fence_that_cannot_be_is_refused(served: Served, query: str, status: int, code: str) -> None:
    await create(served, partitions=2)
    response = await served.client.post(f"/topics/t/fence?{query}")
    assert (response.status_code, response.json()["code"]) == (status, code)
    assert await code_of_append(served) is None


async def test_no_web_page_can_fence_behind_its_visitors_back(served: Served) -> None:
    await create(served)
    for headers in ({"origin": "https://page.example"}, {"sec-fetch-site": "cross-site", "content-type": "text/plain"}):
        assert (await served.client.post("/topics/t/fence", headers=headers)).status_code == 400
    assert await code_of_append(served) is None
    allowed = {"origin": "http://localhost", "content-type": "application/json"}
    assert (await served.client.post("/topics/t/fence", headers=allowed)).status_code == 200


@pytest.mark.parametrize("engine", ["disk", "rocksdb"])
def test_topics_of_engines_with_an_owner_are_changed_but_not_fenced(tmp_path: Path, engine: str) -> None:
    with running(tmp_path, "serve") as server:
        assert server.client.post("/topics", json={"name": "t", "engine": engine}).status_code == 201
        changed = server.client.patch("/topics/t", json={"cleanup": "compact", "retention_ms": 5, "partitions": 2})
        assert changed.status_code == 200, changed.text
        found = server.client.get("/topics/t").json()
        assert (found["cleanup"], found["retention_ms"], len(found["bounds"])) == ("compact", 5, 2)
        refused = server.client.post("/topics/t/fence")
        assert (refused.status_code, refused.json()["code"]) == (409, "wrong_engine")
        assert server.end() == 0
