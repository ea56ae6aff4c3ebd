"""The S3 server is stopped under load and comes back: calls end with a clear answer, and work goes on."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from devtools.servers.weed import S3Server, ServerError, weed_server
from llog.errors import OutcomeUnknown, StoreUnavailable
from llog.stores.blobs_object import ObjectBlobStore
from llog.stores.object_answers import Limits
from tests.conftest import unavailable

BUCKET = "restarted"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[S3Server]:
    """One of its own: nobody else may meet a stopped server."""
    with ExitStack() as stack:
        try:
            started = stack.enter_context(weed_server(tmp_path / "weed"))
        except ServerError as error:
            unavailable(str(error))
        yield started


def process_of(directory: Path) -> int:
    """The server's own process: it is the one that was told to keep its data below `directory`."""
    for entry in Path("/proc").iterdir():
        try:
            arguments = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
        except OSError:
            continue
        if (
            arguments
            and arguments[0].endswith(b"weed")
            and any(a.startswith(f"-dir={directory}".encode()) for a in arguments)
        ):
            return int(entry.name)
    raise AssertionError(f"no server has its data in {directory}")


async def test_a_server_that_stalls_and_comes_back_loses_nothing_and_claims_nothing(
    server: S3Server, tmp_path: Path
) -> None:
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
    process = process_of(tmp_path / "weed")
    async with asyncio.timeout(60):
        for _ in range(2):
            await more_than(acknowledged, len(acknowledged) + 20)
            failed = len(failures)
            os.kill(process, signal.SIGSTOP)
            try:
                while len(failures) < failed + 4:
                    await asyncio.sleep(0.01)
            finally:
                os.kill(process, signal.SIGCONT)
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
