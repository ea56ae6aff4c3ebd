"""The network between a machine and its metadata store fails: the broker there answers errors, not lies, and goes on
afterwards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx

from devtools.servers.weed import S3Server
from llog.errors import OutcomeUnknown, StoreUnavailable
from tests.faults.chaos import suffering
from tests.faults.cluster import LIMIT_S, Broker, Cluster, Metadata, many_machines
from tests.faults.proxy import Proxy

QUIET = "quiet"
DELAY_S = 0.05
POLLS = 100
CUTS: tuple[Callable[[Proxy], None], ...] = (Proxy.hang, Proxy.hold_answers, Proxy.refuse)


class Asker:
    """Asks one broker, and waits as long as it takes."""

    def __init__(self, broker: Broker) -> None:
        assert broker.address is not None
        self._client = httpx.AsyncClient(
            base_url=broker.address, timeout=LIMIT_S, limits=httpx.Limits(max_connections=None), trust_env=False
        )

    async def __aenter__(self) -> Asker:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def get(self, path: str) -> httpx.Response:
        return await self._client.get(path)

    async def until_ready(self) -> None:
        async with asyncio.timeout(LIMIT_S):
            while (await self.get("/ready")).status_code != 200:
                await asyncio.sleep(0.1)

    async def produce(self, record: str) -> httpx.Response:
        item = {"topic": QUIET, "partition": 0, "records": [record]}
        return await self._client.post("/produce", json={"topic_partitions": [item]})

    async def append(self, record: str) -> None:
        answer = await self.produce(record)
        assert answer.status_code == 200, answer.text
        assert "error" not in answer.json()["topic_partitions"][0], answer.text

    async def consume(self, offset: int, max_wait_ms: int = 0) -> httpx.Response:
        item = {"topic": QUIET, "partition": 0, "fetch_offset": offset}
        return await self._client.post("/consume", json={"topic_partitions": [item], "max_wait_ms": max_wait_ms})

    async def records(self) -> list[Any]:
        answer = await self.consume(1)
        assert answer.status_code == 200, answer.text
        return [record["payload"] for record in answer.json()["topic_partitions"][0]["records"]]


async def check_refusals(asker: Asker, end: int) -> None:
    """Whatever needs the metadata store is answered with an error; `end` is where the records that it knew of end."""
    ready, health, produced, consumed, waited, topics = await asyncio.gather(
        asker.get("/ready"),
        asker.get("/health"),
        asker.produce("by the one that is cut off"),
        asker.consume(1),
        asker.consume(end, max_wait_ms=500),
        asker.get("/topics"),
    )
    for answer in (ready, health):
        assert answer.status_code == 503, answer.text
        assert "metadata store" in answer.json()["detail"]
    for answer in (produced, consumed, waited, topics):
        assert answer.status_code == 503, answer.text
        assert answer.json()["code"] in (StoreUnavailable.code, OutcomeUnknown.code)
    assert consumed.json()["code"] == waited.json()["code"] == StoreUnavailable.code


async def test_brokers_that_are_cut_off_from_their_metadata_store_answer_errors_and_no_lies(
    metadata: Metadata, s3_server: S3Server, tmp_path: Path
) -> None:
    async with AsyncExitStack() as stack:
        proxies = [await stack.enter_async_context(Proxy("127.0.0.1", metadata.port)) for _ in CUTS]
        cluster = Cluster(many_machines(metadata, s3_server), tmp_path)
        for proxy in proxies:
            cluster.add_broker(**metadata.through(proxy.port))
        cluster.add_broker()
        cluster.add_upkeep("compactor", **metadata.through(proxies[1].port))
        for kind in ("compactor", "collector"):
            cluster.add_upkeep(kind)
        chaos = await stack.enter_async_context(suffering(cluster, tmp_path))
        *askers, other = [await stack.enter_async_context(Asker(broker)) for broker in cluster.brokers]
        for asker in askers:
            await asker.append("before")
        await chaos.more()
        for proxy, cut in zip(proxies, CUTS, strict=True):
            cut(proxy)
        chaos.say("three brokers are cut off")
        await other.append("meanwhile")
        await asyncio.gather(*(check_refusals(asker, len(CUTS) + 1) for asker in askers))
        await chaos.more()
        for proxy in proxies:
            proxy.heal()
        chaos.say("all are healed")
        for asker in askers:
            await asker.until_ready()
            assert (await asker.records())[: len(CUTS) + 1] == ["before"] * len(CUTS) + ["meanwhile"]
            await asker.append("after")
        await chaos.more()


async def test_a_broker_asks_a_slow_metadata_store_no_more_often_than_it_must(
    metadata: Metadata, s3_server: S3Server, tmp_path: Path
) -> None:
    async with Proxy("127.0.0.1", metadata.port) as proxy:
        cluster = Cluster(many_machines(metadata, s3_server), tmp_path)
        broker = cluster.add_broker(**metadata.through(proxy.port))
        async with cluster, Asker(broker) as asker:
            proxy.slow_down(DELAY_S)
            assert (await asyncio.gather(asker.produce("first"), asker.get("/ready")))[1].json() == {"status": "ready"}
            assert (await asker.get("/health")).json() == {"status": "ok"}

            asked = proxy.requests
            answers = await asyncio.gather(*(asker.produce(f"{number}") for number in range(200)))
            starts = [answer.json()["topic_partitions"][0]["start_offset"] for answer in answers]
            assert sorted(starts) == list(range(2, 202))
            assert proxy.requests - asked <= 100, "appends that come together share their round trips"

            asked = proxy.requests
            polls = [asyncio.create_task(asker.consume(202, max_wait_ms=60_000)) for _ in range(POLLS)]
            while (await asker.get("/metrics")).json()["llog_waiting_requests"] < POLLS:
                await asyncio.sleep(0.05)
            assert proxy.requests - asked <= 10 * POLLS, "a poll looks at its partition, and then waits"
            asked, began = proxy.requests, asyncio.get_running_loop().time()
            await asyncio.sleep(2)
            waited_s = asyncio.get_running_loop().time() - began
            assert proxy.requests - asked <= 20 * waited_s, "polls that wait ask for nothing"
            asked = proxy.requests
            await asker.produce("last")
            for poll in polls:
                (item,) = (await poll).json()["topic_partitions"]
                assert [record["payload"] for record in item["records"]] == ["last"]
            assert proxy.requests - asked <= 2 * POLLS, "one look tells all of them"
