"""What a write makes that is missing, and what it does not."""

from __future__ import annotations

import pytest

from llog.config import Settings
from llog.errors import ConfigurationError
from tests.broker.serving import Served


async def _codes(served: Served, *partitions: int, topic: str = "t") -> list[str]:
    """How each of these partitions was written to, in one request."""
    items = [{"topic": topic, "partition": partition, "records": ["x"]} for partition in partitions]
    answer = (await served.client.post("/produce", json={"topic_partitions": items})).json()
    return [each["error"]["code"] if "error" in each else "appended" for each in answer["topic_partitions"]]


async def _partitions(served: Served, topic: str = "t") -> int | None:
    found: int | None = (await served.client.get(f"/topics/{topic}")).json().get("partitions")
    return found


async def test_lazily_a_write_makes_up_to_64_partitions_more_than_there_are() -> None:
    served = Served()
    assert await _codes(served, 64, 1000) == ["topic_not_found", "topic_not_found"]
    assert await _partitions(served) is None
    assert await _codes(served, 64, 63, 0) == ["partition_not_initialized", "appended", "appended"]
    assert await _partitions(served) == 64
    assert await _codes(served, 128, 127) == ["partition_not_initialized", "appended"]
    assert await _partitions(served) == 128
    refused = await served.produce("t", "x", partition=999)
    assert "it has 128, counted from 0. A write adds at most 64 beyond those" in refused["error"]["detail"]
    await served.close()


async def test_by_a_number_new_topics_get_as_many_and_do_not_grow() -> None:
    served = Served(auto_create="4")
    assert await _codes(served, 1) == ["appended"]
    assert await _partitions(served) == 4
    assert await _codes(served, 3, 4) == ["appended", "partition_not_initialized"]
    assert await _partitions(served) == 4
    assert await _codes(served, 9, 2, topic="wide") == ["appended", "appended"]
    assert await _partitions(served, "wide") == 10
    assert await _codes(served, 0, 199, topic="wider") == ["appended", "appended"]
    assert await _partitions(served, "wider") == 200
    await served.close()


async def test_with_off_a_write_makes_nothing() -> None:
    served = Served(auto_create="off")
    assert await _codes(served, 0) == ["topic_not_found"]
    assert await _partitions(served) is None
    await served.client.post("/topics", json={"name": "t", "partitions": 2})
    assert await _codes(served, 0, 1, 2) == ["appended", "appended", "partition_not_initialized"]
    assert await _partitions(served) == 2
    await served.client.delete("/topics/t")
    assert await _codes(served, 0) == ["topic_not_found"]
    await served.close()


@pytest.mark.parametrize("value", ["", "on", "0", "-1", "100001", "1e3", "٣", "9" * 5000])
def test_a_policy_that_there_is_not_is_refused(value: str) -> None:
    with pytest.raises(ConfigurationError, match=r"LLOG_AUTO_CREATE is .*: write lazy, off, or a number"):
        Settings(auto_create=value)
