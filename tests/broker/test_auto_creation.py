"""What a write makes that is missing, and what it does not."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import cast

import pytest

from llog.batch.columns import columns_of
from llog.broker.auto_creation import AutoCreatingProducer, AutoCreation
from llog.broker.batching import BatchingProducer, Outcome, Part
from llog.broker.metrics import Metrics
from llog.config import Settings
from llog.errors import ConfigurationError, LlogError
from llog.log.engine import AppendResult
from llog.log.records import Topic
from llog.model import Record, TopicPartition
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


class _SlowCreation:
    """Creates partitions one request after the other, each when it is told to."""

    def __init__(self) -> None:
        self.steps = asyncio.Semaphore(0)

    async def create_missing(self, tps: Collection[TopicPartition]) -> dict[TopicPartition, Topic | LlogError]:
        await self.steps.acquire()
        return {tp: Topic(name=tp.topic, directory=tp.topic, partitions=2, created_ms=0) for tp in tps}


class _Appended:
    """Takes appends, and keeps the order in which they came."""

    def __init__(self) -> None:
        self.payloads: list[tuple[int, bytes | None]] = []

    def append(self, parts: Sequence[Part]) -> asyncio.Future[list[Outcome]]:
        self.payloads += [(part.tp.partition, part.columns.values[0].as_py()) for part in parts]
        answer: asyncio.Future[list[Outcome]] = asyncio.get_running_loop().create_future()
        answer.set_result(
            [AppendResult(topic=tp.topic, partition=tp.partition, start_offset=1, end_offset=1) for tp, *_ in parts]
        )
        return answer


async def test_a_request_does_not_overtake_one_that_still_waits_for_another_partition() -> None:
    creation, appended = _SlowCreation(), _Appended()
    producer = AutoCreatingProducer(cast(AutoCreation, creation), lambda _: cast(BatchingProducer, appended), Metrics())

    def send(payload: bytes, *partitions: int) -> asyncio.Task[list[Outcome]]:
        columns = columns_of([Record(payload=payload)])
        parts = [Part(TopicPartition("t", partition), columns) for partition in partitions]
        return asyncio.ensure_future(producer.append(parts))

    requests = [send(b"first", 0), send(b"second", 0, 1)]
    await asyncio.sleep(0)
    creation.steps.release()
    await requests[0]
    requests.append(send(b"third", 0))
    await asyncio.sleep(0.01)
    creation.steps.release()
    await asyncio.gather(*requests)
    assert [payload for partition, payload in appended.payloads if partition == 0] == [b"first", b"second", b"third"]
    assert [payload for partition, payload in appended.payloads if partition == 1] == [b"second"]
