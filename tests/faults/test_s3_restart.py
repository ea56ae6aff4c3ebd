"""The S3 server is stopped under load and comes back: calls end with a clear answer, and work goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Sized
from pathlib import Path

from devtools.servers.weed import Weed
from llog.engines.object.reader import Reader
from llog.engines.object.writer import Writer
from llog.engines.registry import all_engines
from llog.errors import LlogError, OutcomeUnknown, StoreUnavailable
from llog.history.checker import check_history
from llog.history.recorded import RecordedAppender, RecordedReader
from llog.history.recorder import HistoryRecorder
from llog.log.catalog import Catalog
from llog.log.engine import AppendGroup, AppendResult
from llog.log.log import Log
from llog.log.producers import Producer
from llog.model import Record, TopicPartition
from llog.runtime import SystemRuntime
from llog.stores.object.blobs import ObjectBlobStore
from llog.stores.object.requests import Limits
from llog.stores.sqlite.store import SqliteMetaStore

BUCKET = "restarted"
LIMIT_S = 300


def impatient(weed: Weed) -> ObjectBlobStore:
    """A blob store that soon gives up."""
    server = weed.server
    server.create_bucket(BUCKET)
    return ObjectBlobStore.s3(
        BUCKET,
        endpoint=server.endpoint,
        region=server.region,
        access_key_id=server.access_key,
        secret_access_key=server.secret_key,
        limits=Limits(timeout_s=0.5, attempts=2, backoff_s=0.05, retry_s=1.0),
    )


async def stall_twice(weed: Weed, acknowledged: Sized, failures: Sized) -> None:
    """Stops the server under load until calls have failed, twice; returns when they go well again."""
    for _ in range(2):
        await more(acknowledged, 21)
        weed.pause()
        try:
            await more(failures, 4)
        finally:
            weed.resume()
    await more(acknowledged, 21)


async def more(found: Sized, count: int) -> None:
    """Returns when this many have been added."""
    wanted = len(found) + count
    while len(found) < wanted:
        await asyncio.sleep(0.01)


async def test_a_server_that_stalls_and_comes_back_loses_nothing_and_claims_nothing(weed: Weed) -> None:
    store = impatient(weed)
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

    workers = [asyncio.create_task(work(worker)) for worker in range(4)]
    async with asyncio.timeout(LIMIT_S):
        await stall_twice(weed, acknowledged, failures)
        is_over.set()
        await asyncio.gather(*workers)

    for error in failures:
        assert BUCKET in str(error) or "blob" in str(error)
        assert weed.server.secret_key not in str(error)
    for name in acknowledged:
        assert bytes(await store.get(name)) == name.encode() + b"!" * 1000
    listed = {info.name async for page in store.list("") for info in page}
    assert set(acknowledged) <= listed
    assert len(listed - set(acknowledged)) <= len(failures)
    await store.close()


class Workers:
    """Idempotent producers and a reader of one partition, who record what they do and repeat what has failed."""

    def __init__(self, log: Log, recorder: HistoryRecorder) -> None:
        self.reader = RecordedReader(recorder, Reader(log))
        self.acknowledged: list[AppendResult] = []
        self.failures: list[LlogError] = []
        self.is_over = asyncio.Event()
        self._appender = RecordedAppender(recorder, Writer(log))

    async def write(self, name: str, tp: TopicPartition) -> None:
        sequence = 0
        while not self.is_over.is_set():
            group = AppendGroup(
                topic=tp.topic,
                partition=tp.partition,
                records=[Record(payload=f"{name} {sequence} {number}".encode()) for number in range(2)],
                producer=Producer(id=name, sequence=sequence, since=1),
            )
            try:
                [result] = await self._appender.append([group])
            except (OutcomeUnknown, StoreUnavailable) as error:
                result = error
            if isinstance(result, AppendResult):
                self.acknowledged.append(result)
                sequence += 1
            else:
                self.failures.append(result)

    async def follow(self, tp: TopicPartition) -> None:
        offset = 1
        while not self.is_over.is_set():
            try:
                for batch in await self.reader.read(tp, offset):
                    offset = batch.end_offset + 1
                await self.reader.wait(tp, offset, 0.1)
            except StoreUnavailable as error:
                self.failures.append(error)


async def test_a_log_whose_blobs_are_out_of_reach_for_a_while_keeps_its_promises(weed: Weed, tmp_path: Path) -> None:
    meta = await asyncio.to_thread(SqliteMetaStore.open, tmp_path / "meta.sqlite")
    log = Log(meta, impatient(weed), SystemRuntime(), all_engines())
    await Catalog(log).create("t", 1)
    tp = TopicPartition("t", 0)
    with HistoryRecorder(tmp_path / "history.jsonl") as recorder:
        workers = Workers(log, recorder)
        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
            for number in range(3):
                tasks.create_task(workers.write(f"writer-{number}", tp))
            tasks.create_task(workers.follow(tp))
            await stall_twice(weed, workers.acknowledged, workers.failures)
            workers.is_over.set()
        assert [batch async for batch in workers.reader.iter_from(tp, 1)]
    report = check_history([tmp_path / "history.jsonl"])
    assert report.clean, report
    assert report.partitions[0].acknowledged == 2 * len(workers.acknowledged)
    await log.meta.close()
    await log.blobs.close()
