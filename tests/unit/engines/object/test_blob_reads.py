"""Blob reads: which requests share a GET, and what becomes of those that share one when something goes wrong."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.store import MemoryStore

from llog.engines.object.blob_reads import GETS_MAX, BlobReads
from llog.errors import BlobNotFound, CorruptBatch, InvalidArgument, LlogError, StoreUnavailable
from llog.stores.blob_ranges import GAP_BYTES_MAX, JOINED_BYTES_MAX
from llog.stores.blobs import Buffer
from llog.stores.files import blobs as blobs_file
from llog.stores.files.blobs import FileBlobStore
from llog.stores.memory.blobs import MemoryBlobStore
from llog.stores.object.blobs import ObjectBlobStore
from llog.stores.object.requests import BucketLocation, Limits
from tests.unit.world import Crash, Faults, FaultyBlobs, Interleaved, LostAnswers, Stall

DATA = bytes(range(256)) * 8
ENDLESS_S = 1000.0
"""A wait for lookups that no test outlasts."""


async def blob_reads(faults: Faults | None = None, *, blob: bytes = DATA, **bounds: float) -> BlobReads:
    store = MemoryBlobStore()
    await store.put("a", [blob])
    await store.put("b", [blob])
    return BlobReads(FaultyBlobs(store, faults or Faults()), **{"lookup_wait_s": ENDLESS_S, **bounds})  # type: ignore[arg-type]


def gets(reads: BlobReads) -> list[str]:
    assert isinstance(reads.blobs, FaultyBlobs)
    return [name for operation, name in reads.blobs.faults.calls if operation == "get blob"]


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_ranges_of_one_turn_are_one_get_and_everybody_gets_their_own_bytes() -> None:
    reads = await blob_reads()
    found = await asyncio.gather(*(reads.get_ranges("a", [(at, 100), (at + 500, 7)]) for at in range(0, 800, 100)))
    assert found == [[DATA[at : at + 100], DATA[at + 500 : at + 507]] for at in range(0, 800, 100)]
    assert gets(reads) == ["a"]


async def test_equal_and_contained_ranges_share_a_get_that_is_under_way() -> None:
    stall = Stall(lambda operation, key: operation == "get blob")
    reads = await blob_reads(stall)
    first = asyncio.create_task(reads.get_ranges("a", [(100, 200)]))
    await stall.stalled.wait()
    others = [asyncio.create_task(reads.get_ranges("a", [each])) for each in ((100, 200), (150, 10), (299, 1))]
    await settle()
    assert gets(reads) == ["a"]
    stall.go.set()
    assert [(await task)[0] for task in (first, *others)] == [
        DATA[100:300],
        DATA[100:300],
        DATA[150:160],
        DATA[299:300],
    ]
    assert gets(reads) == ["a"]


async def test_nothing_is_kept_once_it_has_arrived() -> None:
    reads = await blob_reads()
    for _ in range(2):
        await reads.get_ranges("a", [(0, 10)])
    assert gets(reads) == ["a", "a"]


async def test_far_ranges_and_long_runs_are_gets_of_their_own() -> None:
    far = 16 + GAP_BYTES_MAX + 1
    reads = await blob_reads(blob=bytes(2 * JOINED_BYTES_MAX))
    await reads.get_ranges("a", [(0, 16), (far, 16)])
    assert gets(reads) == ["a", "a"]
    await reads.get_ranges("b", [(at, 1 << 20) for at in range(0, 2 * JOINED_BYTES_MAX, 1 << 20)])
    assert gets(reads)[2:] == ["b", "b"]


@pytest.mark.parametrize("seed", range(5))
async def test_ranges_wait_for_the_lookups_that_are_under_way(seed: int) -> None:
    reads = await blob_reads()
    draw = random.Random(seed)

    async def read(number: int) -> Buffer | LlogError:
        with reads.begin() as read:
            for _ in range(draw.randrange(30)):
                await asyncio.sleep(0)
            if number == 3:
                return b""  # a lookup that ends without a range
            return (await read.get_ranges("a", [(number, 1)]))[0]

    found = await asyncio.gather(*map(read, range(8)))
    assert found == [b"" if number == 3 else DATA[number : number + 1] for number in range(8)]
    assert gets(reads) == ["a"]


async def test_a_lookup_that_takes_long_does_not_hold_up_the_others() -> None:
    reads = await blob_reads(lookup_wait_s=0.0)
    with reads.begin():
        assert await reads.get_ranges("a", [(0, 4)]) == [DATA[:4]]


async def test_a_read_that_begins_later_is_not_waited_for() -> None:
    reads = await blob_reads()
    first = reads.begin()
    with reads.begin() as second:
        first.__enter__()
        waiting = asyncio.create_task(second.get_ranges("a", [(0, 4)]))
        await settle()
        with reads.begin():
            first.__exit__(None, None, None)
            assert await waiting == [DATA[:4]]


async def test_a_range_beyond_the_end_is_the_error_of_its_caller_alone() -> None:
    reads = await blob_reads()
    asked = [(0, 4), (len(DATA) - 1, 9), (8, 4), (-1, 4), (12, 0)]
    found = await asyncio.gather(*(reads.get_ranges("a", [each]) for each in asked))
    assert [found[0], found[2], found[4]] == [[DATA[:4]], [DATA[8:12]], [b""]]
    assert isinstance(found[1][0], CorruptBatch)
    assert isinstance(found[3][0], InvalidArgument)


async def test_an_error_of_the_store_is_everybody_s_and_the_next_request_asks_again() -> None:
    reads = await blob_reads(
        LostAnswers(StoreUnavailable("gone"), lambda operation, key: operation == "get blob", done=False)
    )
    found = await asyncio.gather(*(reads.get_ranges("a", [(at, 4), (at + 8, 4)]) for at in (0, 100)))
    assert [type(each) for both in found for each in both] == [StoreUnavailable] * 4
    assert await reads.get_ranges("a", [(0, 4)]) == [DATA[:4]]
    missing = await asyncio.gather(*(reads.get_ranges("c", [(at, 4)]) for at in (0, 100)))
    assert [type(each) for [each] in missing] == [BlobNotFound] * 2


async def test_what_is_no_error_of_llog_reaches_everybody() -> None:
    class Dying(Faults):
        async def before(self, operation: str, key: str) -> None:
            if operation == "get blob":
                raise Crash

    reads = await blob_reads(Dying())
    calls: list[Awaitable[object]] = [reads.get_ranges("a", [(at, 4)]) for at in (0, 100)]
    assert [type(each) for each in await asyncio.gather(*calls, return_exceptions=True)] == [Crash, Crash]


@pytest.mark.parametrize("cancelled", [0, 1])
async def test_a_cancelled_caller_does_not_disturb_the_others(cancelled: int) -> None:
    stall = Stall(lambda operation, key: operation == "get blob")
    reads = await blob_reads(stall)
    tasks = [asyncio.create_task(reads.get_ranges("a", [(0, 100)])) for _ in range(2)]
    tasks.append(asyncio.create_task(reads.get_ranges("a", [(200, 100)])))
    await stall.stalled.wait()
    tasks.pop(cancelled).cancel()
    stall.go.set()
    assert await asyncio.gather(*tasks) == [[DATA[:100]], [DATA[200:300]]]
    assert gets(reads) == ["a"]


async def test_a_get_that_nobody_waits_for_is_given_up_and_later_made_again() -> None:
    stall = Stall(lambda operation, key: operation == "get blob")
    reads = await blob_reads(stall, gets_max=1)
    tasks = [asyncio.create_task(reads.get_ranges("a", [each])) for each in ((0, 100), (200, 100))]
    await stall.stalled.wait()
    queued = asyncio.create_task(reads.get_ranges("b", [(0, 1)]))
    await settle()
    for task in (*tasks, queued):
        task.cancel()
    await asyncio.wait([*tasks, queued])
    assert await reads.get_ranges("a", [(0, 100)]) == [DATA[:100]]
    assert gets(reads) == ["a", "a"]


async def test_a_range_that_nobody_waits_for_is_never_fetched() -> None:
    reads = await blob_reads()
    with reads.begin():
        task = asyncio.create_task(reads.get_ranges("a", [(0, 100)]))
        await settle()
        task.cancel()
        await asyncio.wait([task])
    await settle()
    assert gets(reads) == []
    assert await reads.get_ranges("a", [(0, 100)]) == [DATA[:100]]


class UnderWay(Faults):
    """Counts the GETs that are under way."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0

    async def before(self, operation: str, key: str) -> None:
        if operation == "get blob":
            self.now += 1
            self.most = max(self.most, self.now)
            await settle()

    async def after(self, operation: str, key: str) -> None:
        self.now -= operation == "get blob"


async def test_gets_are_bounded_by_number_and_by_bytes() -> None:
    far = GAP_BYTES_MAX + 4096
    for bounds, most in (({"gets_max": 3}, 3), ({"bytes_max": 4000}, 4), ({"bytes_max": 10}, 1)):
        faults = UnderWay()
        reads = await blob_reads(faults, blob=bytes(20 * far), **bounds)
        found = await reads.get_ranges("a", [(number * far, 1000) for number in range(20)])
        assert found == [bytes(1000)] * 20
        assert faults.most == most
        assert faults.now == 0


async def many_reads(reads: BlobReads) -> list[asyncio.Task[list[Buffer | LlogError]]]:
    """Begin more reads than any store makes at the same time."""
    far = GAP_BYTES_MAX + 4096
    await reads.blobs.put("far", [bytes(200 * far)])
    tasks = [asyncio.create_task(reads.get_ranges("far", [(number * far, 8)])) for number in range(200)]
    await settle()
    return tasks


async def test_a_put_to_a_bucket_does_not_wait_for_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = MemoryStore()
    store = ObjectBlobStore(BucketLocation("s3", "bucket", "", None, "none"), lambda *_: bucket, Limits())
    await store.put("mark", [b"x"])
    store.require("mark")
    go, under_way = asyncio.Event(), 0
    shipped = obstore.get_range_async

    async def wait_and_get(*args: Any, **named: Any) -> Any:
        nonlocal under_way
        under_way += 1
        await go.wait()
        return await shipped(*args, **named)

    monkeypatch.setattr(obstore, "get_range_async", wait_and_get)
    tasks = await many_reads(BlobReads(store))
    assert under_way == GETS_MAX
    monkeypatch.setattr(store, "_required_seen_at", -1e9)
    await store.put("new", [b"x"])  # it looks for the mark first, with a request that is not a put
    assert under_way == GETS_MAX
    go.set()
    assert await asyncio.gather(*tasks) == [[bytes(8)]] * 200
    await store.close()


async def test_a_put_to_a_directory_does_not_wait_for_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileBlobStore(tmp_path)
    go = threading.Event()
    shipped = blobs_file._read_range

    def wait_and_read(*args: Any) -> Buffer:
        assert go.wait(600)
        return shipped(*args)

    monkeypatch.setattr(blobs_file, "_read_range", wait_and_read)
    tasks = await many_reads(BlobReads(store))
    try:
        await store.put("new", [b"x"])
        assert not any(task.done() for task in tasks)
    finally:
        go.set()
    assert await asyncio.gather(*tasks) == [[bytes(8)]] * 200
    await store.close()


@pytest.mark.parametrize("seed", range(20))
async def test_any_interleaving_gives_everybody_what_the_blob_has(seed: int) -> None:
    draw = random.Random(seed)
    reads = await blob_reads(Interleaved(seed), gets_max=2, bytes_max=500)

    async def read() -> None:
        for _ in range(5):
            with reads.begin() as read:
                for _ in range(draw.randrange(8)):
                    await asyncio.sleep(0)
                blob = draw.choice("ab")
                ranges = [(draw.randrange(1000), draw.randrange(300)) for _ in range(draw.randrange(1, 4))]
                found = await read.get_ranges(blob, ranges)
                assert found == [DATA[start : start + length] for start, length in ranges]

    tasks = [asyncio.create_task(read()) for _ in range(10)]
    for task in tasks[:4]:
        for _ in range(draw.randrange(20)):
            await asyncio.sleep(0)
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [each for each in results if not isinstance(each, asyncio.CancelledError)] == [None] * len(
        [task for task in tasks if not task.cancelled()]
    )
    assert (reads._ranges, reads._round, reads._lookups, reads._awaited) == ({}, [], set(), set())
