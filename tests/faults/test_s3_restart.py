"""The S3 server is stopped under load and comes back: calls end with a clear answer, and work goes on."""

from __future__ import annotations

import asyncio

from devtools.servers.weed import Weed
from llog.errors import OutcomeUnknown, StoreUnavailable
from llog.stores.blobs_object import ObjectBlobStore
from llog.stores.object_answers import Limits

BUCKET = "restarted"


async def test_a_server_that_stalls_and_comes_back_loses_nothing_and_claims_nothing(weed: Weed) -> None:
    server = weed.server
    server.create_bucket(BUCKET)
    store = ObjectBlobStore.s3(
        BUCKET,
        endpoint=server.endpoint,
        region=server.region,
        access_key_id=server.access_key,
        secret_access_key=server.secret_key,
        limits=Limits(timeout_s=0.5, attempts=2, backoff_s=0.05, retry_s=1.0),
    )
    acknowledged: list[str] = []
    failures: list[Exception] = []
    is_over = asyncio.Event()

    async def work(worker: int) -> None:
        number = 0
        while not is_over.is_set():
            name = f"{worker}/{number:06}"
            number += 1
            try:
                await store.put(name, [name.encode(), b"!" * 1000])
                acknowledged.append(name)
                assert bytes(await store.get(name))[: len(name)] == name.encode()
            except (OutcomeUnknown, StoreUnavailable) as error:
                failures.append(error)

    async def more_than(found: list[str], count: int) -> None:
        while len(found) <= count:
            await asyncio.sleep(0.01)

    workers = [asyncio.create_task(work(worker)) for worker in range(4)]
    async with asyncio.timeout(60):
        for _ in range(2):
            await more_than(acknowledged, len(acknowledged) + 20)
            failed = len(failures)
            weed.pause()
            try:
                while len(failures) < failed + 4:
                    await asyncio.sleep(0.01)
            finally:
                weed.resume()
        await more_than(acknowledged, len(acknowledged) + 20)
        is_over.set()
        await asyncio.gather(*workers)

    for error in failures:
        assert BUCKET in str(error) or "blob" in str(error)
        assert server.secret_key not in str(error)
    for name in acknowledged:
        assert bytes(await store.get(name)) == name.encode() + b"!" * 1000
    listed = {info.name async for page in store.list("") for info in page}
    assert set(acknowledged) <= listed
    assert len(listed - set(acknowledged)) <= len(failures)
    await store.close()
