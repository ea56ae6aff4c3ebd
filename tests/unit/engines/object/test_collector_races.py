"""The collector while others move, add and drop references: no order of events costs a record."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from llog.batch.columns import Columns, columns_of
from llog.engines.object.collector import (
    Collector,
    CollectorOptions,
    list_partitions,
    sink_references,
    strike_off,
)
from llog.engines.object.compaction.compactor import Compactor, CompactorOptions
from llog.engines.object.retention import trim
from llog.engines.object.sink import SinkUploader, publish
from llog.engines.object.snapshot import take_snapshot
from llog.engines.object.verify import count_orphans, verify
from llog.engines.object.writer import Writer
from llog.errors import BlobCollected, OffsetOutOfRange
from llog.log.keys import sink_key
from llog.log.log import Log
from llog.log.pins import pin, release
from llog.log.records import Kind, Manifest, Sink, encode
from llog.model import Record
from tests.unit.world import TP, Faults, Interleaved, Stall, World

DAY = 86_400_000


def columns(*payloads: str) -> Columns:
    return columns_of([Record(payload=payload.encode()) for payload in payloads])


# --- references that move while they are read


class ActAt(Faults):
    """Does something else before the n-th store call, from 1."""

    def __init__(self, number: int, action: Callable[[], Awaitable[object]]) -> None:
        super().__init__()
        self._number, self._action = number, action

    async def before(self, operation: str, key: str) -> None:
        if len(self.calls) == self._number:
            await self._action()


async def marked(log: Log, blob: str) -> bool:
    candidates = {blob: 1}
    await strike_off(log, await list_partitions(log), candidates)
    return not candidates


CALLS = range(1, 17)
"""More than a mark of four partitions makes."""


@pytest.mark.parametrize("number", CALLS)
async def test_a_reference_that_moves_from_pending_to_the_index_is_met(world: World, number: int) -> None:
    await world.append("a")
    [blob] = world.blob_server.names

    async def index_and_clear() -> None:
        await Compactor(world.log, CompactorOptions(idle_ms=0)).compact_once(TP)
        assert (await world.control()).pending is None
        assert await world.shape() == [(1, 1, Kind.WAL)]

    assert await marked(world.process(ActAt(number, index_and_clear)), blob)


@pytest.mark.parametrize("number", CALLS)
async def test_a_reference_that_moves_from_the_breadcrumb_to_the_index_is_met(world: World, number: int) -> None:
    await world.append("a")
    wal = list(world.blob_server.names)
    stall = Stall(lambda operation, key: operation == "put" and len(world.blob_server.names) == 2)
    stuck = asyncio.create_task(Compactor(world.process(stall)).compact_once(TP, force=True))
    await stall.stalled.wait()
    stuck.cancel()
    [blob] = set(world.blob_server.names) - set(wal)

    async def finish() -> None:
        assert (await Compactor(world.log).compact_once(TP, force=True)).end_offset == 1

    assert await marked(world.process(ActAt(number, finish)), blob)


@pytest.mark.parametrize("number", CALLS)
async def test_a_reference_that_moves_from_a_manifest_to_a_partition_is_met(world: World, number: int) -> None:
    upload = await SinkUploader(world.log, "s").upload([(TP, columns("a"))])
    manifest = Manifest(blobs=(upload.blob,), since={str(TP): 1})
    await world.meta.put(sink_key("s"), encode(Sink(batch=0, manifest=manifest)))

    async def apply() -> None:
        await publish(world.log, "s", 0, [])
        assert [name async for name in sink_references(world.log)] == []

    assert await marked(world.process(ActAt(number, apply)), upload.blob)


# --- everything at once


@pytest.mark.parametrize("seed", range(20))
async def test_no_interleaving_deletes_what_is_readable(world: World, seed: int) -> None:
    """Writers, a sink, compactors, trimming, snapshots and two collectors without any grace, under a clock that
    jumps.
    """
    random_source = random.Random(seed)
    acknowledged: dict[int, str] = {}
    running = 0

    def process(number: int) -> Interleaved:
        return Interleaved(seed * 1000 + number, random_source.choice((2, 5, 12)))

    async def write(number: int) -> None:
        writer = Writer(world.process(process(number)))
        for count in range(12):
            payload = f"w{number}-{count}"
            acknowledged[(await world.append(payload, writer=writer)).start_offset] = payload

    async def write_sink() -> None:
        log = world.process(process(50))
        for batch in range(6):
            while True:
                upload = await SinkUploader(log, "s").upload([(TP, columns(f"s{batch}"))])
                for _ in range(random_source.randrange(20)):
                    await asyncio.sleep(0)
                try:
                    await publish(log, "s", batch, [upload])
                except BlobCollected:
                    continue
                break

    async def compact(number: int) -> None:
        compactor = Compactor(world.process(process(60 + number)))
        for _ in range(6):
            await compactor.compact_once(TP, force=True)

    async def shorten() -> None:
        log = world.process(process(70))
        for _ in range(3):
            for _ in range(random_source.randrange(100)):
                await asyncio.sleep(0)
            start, following = await world.reader.bounds(TP)
            await trim(log, TP, start + (following - start) // 3)

    async def read() -> None:
        log = world.process(process(80))
        for _ in range(6):
            pin_id = await pin(log, "reader", DAY)
            start, following = await world.reader.bounds(TP)
            snapshot = await take_snapshot(world.log, TP, start, following)
            for _ in range(random_source.randrange(60)):
                await asyncio.sleep(0)
            for extent in snapshot:
                await log.blobs.get_range(extent.data_uri, extent.byte_offset, extent.byte_length)
            await release(log, pin_id)

    async def collect(number: int) -> None:
        options = CollectorOptions(grace_ms=0, sink_open_ms=random_source.choice((0, 3, DAY)), chunk_names=5)
        collector = Collector(world.process(process(90 + number)), options)
        while running:
            world.runtime.now += random_source.randrange(3)
            await collector.collect_once()
            try:
                await world.payloads()
            except OffsetOutOfRange as error:
                if error.offset >= error.log_start_offset:  # otherwise it was trimmed meanwhile
                    raise

    async def until_done(work: object) -> None:
        nonlocal running
        try:
            await work  # type: ignore[misc]
        finally:
            running -= 1

    work = [write(0), write(1), write_sink(), compact(0), compact(1), shorten(), read()]
    running = len(work)
    await asyncio.gather(*map(until_done, work), collect(0), collect(1))

    start, following = await world.reader.bounds(TP)
    assert following == 1 + 24 + 6
    found = dict(zip(range(start, following), await world.payloads(), strict=True))
    assert all(found[offset] == payload for offset, payload in acknowledged.items() if offset >= start)
    sunk = [payload for payload in found.values() if payload.startswith("s")]
    assert len(sunk) == len(set(sunk))
    assert (await verify(world.log, TP)).healthy

    world.runtime.now += 2 * DAY
    await Collector(world.log).collect_once()
    assert (await count_orphans(world.log)).orphans == 0
    assert await world.payloads() == list(found.values())
