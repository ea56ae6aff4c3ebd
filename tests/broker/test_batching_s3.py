"""Batches of a broker whose blobs are in a bucket, where every PUT costs money."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from devtools.servers.weed import S3Server
from llog.broker.app import Broker
from llog.config import Secret, Settings
from llog.log.log import Log
from llog.log.opening import opened_log
from llog.stores.object.blobs import ObjectBlobStore

CLIENTS = 6
PAUSE_S = 0.02


class Served(NamedTuple):
    log: Log
    client: httpx.AsyncClient
    puts_before: int
    """The blobs that were put when the log was opened."""

    @property
    def puts(self) -> int:
        return _count_puts(self.log) - self.puts_before

    async def produce(self, topic: str, *records: str) -> dict[str, Any]:
        items = [{"topic": topic, "partition": 0, "records": records}]
        response = await self.client.post("/produce", json={"topic_partitions": items})
        item: dict[str, Any] = response.json()["topic_partitions"][0]
        return item


def _count_puts(log: Log) -> int:
    assert isinstance(log.blobs, ObjectBlobStore)
    return log.blobs.counts.count.get("put", 0)


Serve = Callable[..., AbstractAsyncContextManager[Served]]


@pytest.fixture
def serve(s3_server: S3Server, tmp_path: Path) -> Serve:
    s3_server.create_bucket("batching")

    @asynccontextmanager
    async def serve(**settings: Any) -> AsyncIterator[Served]:
        complete = Settings(
            meta=f"sqlite://{tmp_path}/meta.sqlite",
            blobs=f"s3://batching/{tmp_path.name}",
            s3_endpoint_url=s3_server.endpoint,
            s3_region_name=s3_server.region,
            s3_access_key_id=s3_server.access_key,
            s3_secret_access_key=Secret(s3_server.secret_key),
            **{"inline_max_bytes": 0, **settings},
        )
        async with opened_log(complete) as log:
            broker = Broker(log, complete)
            transport = httpx.ASGITransport(app=broker.app())
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=None) as client:
                yield Served(log, client, _count_puts(log))
                await broker.close()

    return serve


async def test_clients_that_write_all_the_time_are_a_handful_of_puts(serve: Serve) -> None:
    loop = asyncio.get_running_loop()
    async with serve() as served:
        await served.produce("t", "first")
        before, began = served.puts, loop.time()
        requests = 0

        async def write() -> None:
            nonlocal requests
            while loop.time() < began + 3:
                assert "error" not in await served.produce("t", "x")
                requests += 1
                await asyncio.sleep(PAUSE_S)

        await asyncio.gather(*(write() for _ in range(CLIENTS)))
        # Two in a second, however fast the store is, and however long this took.
        puts_max = 2 * (loop.time() - began) + 1
        assert requests >= CLIENTS
        assert 1 <= served.puts - before <= puts_max


async def test_records_wait_for_the_delay_or_for_a_full_batch(serve: Serve) -> None:
    async with serve(batch_max_delay_ms=60_000, batch_max_bytes=1000) as served:
        waiting = [asyncio.ensure_future(served.produce("t", f"{number}")) for number in range(5)]
        done, _ = await asyncio.wait(waiting, timeout=0.2)
        assert not done
        assert served.puts == 0
        last = await served.produce("t", "x" * 1000)
        assert "error" not in last
        await asyncio.gather(*waiting)
        assert served.puts <= 2  # the request that filled the batch may have had to go alone


async def test_a_delay_of_zero_puts_at_once(serve: Serve) -> None:
    async with serve(batch_max_delay_ms=0) as served:
        for number in range(3):
            assert (await served.produce("t", "x"))["start_offset"] == number + 1
        assert served.puts == 3


async def test_topics_without_blobs_wait_for_nobody(serve: Serve) -> None:
    async with serve(batch_max_delay_ms=60_000) as served:
        created = await served.client.post("/topics", json={"name": "files", "engine": "disk"})
        assert created.status_code == 201
        waiting = asyncio.ensure_future(served.produce("t", "waits"))
        assert (await served.produce("files", "at once"))["start_offset"] == 1
        items = [{"topic": name, "partition": 0, "records": ["both"]} for name in ("files", "t")]
        both = asyncio.ensure_future(served.client.post("/produce", json={"topic_partitions": items}))
        while (await served.client.get("/topics/files")).json()["bounds"][0]["next_offset"] < 3:
            await asyncio.sleep(0.01)
        assert served.puts == 0
        assert not waiting.done()
        assert not both.done()


async def test_small_requests_are_no_puts_at_all(serve: Serve) -> None:
    async with serve(inline_max_bytes=16 << 10) as served:
        answers = [await served.produce("t", f"{number}") for number in range(5)]
        assert [answer["start_offset"] for answer in answers] == [1, 2, 3, 4, 5]
        assert served.puts == 0
        metrics = (await served.client.get("/metrics")).json()
        ways = {each["way"]: each["value"] for each in metrics["llog_appends_total"]}
        assert ways == {"inline": 5, "blob": 0}
