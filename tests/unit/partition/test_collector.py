from __future__ import annotations

import asyncio
import random

import pytest

from llog.batch.columns import Columns, columns_of
from llog.errors import BlobCollected, BlobNotFound
from llog.model import Record, TopicPartition
from llog.partition.catalog import Catalog
from llog.partition.collector import (
    Collector,
    CollectorOptions,
    Listing,
    Waiting,
    is_candidate,
    partitions,
    raise_floors,
    raise_sink_floors,
    references,
    sink_references,
    sweep,
    threshold,
    unreferenced,
)
from llog.partition.compactor import Compactor
from llog.partition.keys import LOG_ID, SINK_BLOBS, WAL, sink_key
from llog.partition.log import tie_together
from llog.partition.pins import alive_pins, pin, release, renew
from llog.partition.records import Kind, Manifest, Sink, decode, encode
from llog.partition.retention import trim
from llog.partition.sink import SinkUploader, Upload, forget_sink, publish
from llog.partition.snapshot import take_snapshot
from llog.partition.verify import orphans, verify
from llog.partition.writer import Group, Writer, index_puts
from llog.runtime import uuid7
from llog.stores.blobs import BlobInfo
from tests.unit.partition.world import START_MS, TP, Interleaved, Stall, World

HOUR = 3_600_000
DAY = 24 * HOUR
OTHER = TopicPartition(TP.topic, 1)


def names(world: World) -> list[str]:
    return [name for name in world.blob_server.names if not name.startswith(LOG_ID)]


def columns(*payloads: str) -> Columns:
    return columns_of([Record(payload=payload.encode()) for payload in payloads])


async def sink_record(world: World, sink: str) -> Sink:
    found = await world.meta.get(sink_key(sink))
    assert found is not None
    return decode(Sink, found.value, found.key)


async def compacted(world: World, *, tp: TopicPartition = TP) -> None:
    """Leaves the WAL blobs of the partition unreferenced."""
    await Compactor(world.log).compact_once(tp, force=True)


# --- what goes, and what stays


async def test_blobs_go_once_compaction_has_replaced_them_and_the_grace_is_over(world: World) -> None:
    for number in range(4):
        await world.append(f"a{number}")
    old = names(world)
    await compacted(world)
    collector = Collector(world.log)
    assert (await collector.collect_once()).candidates == 0
    world.runtime.now += HOUR + 1
    result = await collector.collect_once()
    assert (result.listed, result.candidates, result.referenced, result.deleted) == (5, 5, 1, 4)
    assert result.deleted_bytes > 0
    assert not set(old) & set(names(world))
    assert await world.payloads() == ["a0", "a1", "a2", "a3"]
    assert (await collector.collect_once()).deleted == 0


async def test_a_shared_blob_stays_until_its_last_partition_has_let_go(world: World) -> None:
    groups = [Group(topic=TP.topic, partition=number, records=[Record(payload=b"x")]) for number in (0, 1)]
    await world.writer.append(groups)
    [shared] = names(world)
    await compacted(world)
    world.runtime.now += HOUR + 1
    assert (await Collector(world.log).collect_once()).deleted == 0
    assert await world.payloads(OTHER) == ["x"]
    await compacted(world, tp=OTHER)
    assert (await Collector(world.log).collect_once()).deleted == 1
    assert shared not in names(world)


async def test_pending_breadcrumb_and_index_each_keep_their_blob(world: World) -> None:
    await world.append("indexed")
    await world.append("pending")
    stall = Stall(lambda operation, key: operation == "put" and key.endswith("meta/compaction") and seen(key))
    visits: list[str] = []

    def seen(key: str) -> bool:
        visits.append(key)
        return len(visits) == 2  # the blob is written, the breadcrumb still says WRITING_BLOB

    compacting = asyncio.create_task(Compactor(world.process(stall)).compact_once(TP, force=True))
    await stall.stalled.wait()
    world.runtime.now += DAY
    result = await Collector(world.log).collect_once()
    assert (result.candidates, result.referenced, result.deleted) == (3, 3, 0)
    stall.go.set()
    await compacting
    assert await world.payloads() == ["indexed", "pending"]


async def test_names_that_are_not_ours_are_never_touched(world: World) -> None:
    await tie_together(world.log)
    stamp = uuid7(START_MS - DAY, random.Random(1))
    foreign = [
        f"llog/notes/{stamp}",
        f"{WAL}{stamp}.bak",
        f"{WAL}readme.txt",
        f"{WAL}nested/{stamp}",
        f"other/{stamp}",
        f"llog/t/partitions/x/data/compacted/{stamp}",
    ]
    for name in foreign:
        await world.blobs.put(name, [b"x"])
    orphan = [f"{WAL}{stamp}", f"llog/gone/partitions/3/data/compacted/{stamp}", f"{SINK_BLOBS}forgotten/{stamp}"]
    for name in orphan:
        await world.blobs.put(name, [b"x"])
    world.runtime.now += DAY
    assert (await Collector(world.log).collect_once()).deleted == len(orphan)
    assert set(foreign) <= set(world.blob_server.names)
    assert any(name.startswith(LOG_ID) for name in world.blob_server.names)


def test_a_candidate_is_old_by_its_name_and_by_the_store() -> None:
    name = WAL + uuid7(1000, random.Random(1))
    assert is_candidate(BlobInfo(name, 1, 1000), 1001)
    assert not is_candidate(BlobInfo(name, 1, 1000), 1000)
    assert not is_candidate(BlobInfo(name, 1, 2000), 1500)


async def test_deleting_a_topic_makes_its_blobs_collectable(world: World) -> None:
    for _ in range(3):
        await world.append("a")
    await compacted(world)
    await world.append("b")
    await world.catalog.create("kept", 1)
    kept = TopicPartition("kept", 0)
    await world.append("k", tp=kept)
    await world.catalog.delete(TP.topic)
    await world.catalog.create(TP.topic, 1)
    world.writer = Writer(world.log)
    await world.append("new")
    world.runtime.now += HOUR + 1
    result = await Collector(world.log).collect_once()
    assert (result.candidates, result.deleted) == (7, 5)
    assert await world.payloads(kept) == ["k"]
    assert await world.payloads() == ["new"]


async def test_an_interrupted_topic_deletion_is_finished(world: World) -> None:
    await world.append("a")
    stall = Stall(lambda operation, key: operation == "put" and key.endswith("meta/control"))
    deleting = asyncio.create_task(Catalog(world.process(stall)).delete(TP.topic))
    await stall.stalled.wait()
    deleting.cancel()
    world.runtime.now += HOUR + 1
    assert (await Collector(world.log).collect_once()).deleted == 1
    assert names(world) == []


async def test_many_blobs_are_collected_in_small_chunks(world: World) -> None:
    for number in range(30):
        await world.append(f"a{number}")
        if number % 10 == 9:
            await compacted(world)
    for number in range(30, 35):
        await world.append(f"a{number}")
    world.runtime.now += HOUR + 1
    for page in (1, 7):
        found = [
            name async for chunk in unreferenced(world.log, threshold(world.log), Listing(), page) for name in chunk
        ]
        assert len(found) == len(set(found)) == 30
    result = await Collector(world.log, CollectorOptions(chunk_names=7)).collect_once()
    assert (result.candidates, result.referenced, result.deleted) == (38, 8, 30)
    assert await world.payloads() == [f"a{number}" for number in range(35)]


# --- stalled writers and floors


async def test_a_stalled_writer_cannot_commit_a_collected_blob(world: World) -> None:
    await world.append("first")
    stall = Stall(lambda operation, key: operation == "put_many")
    writer = Writer(world.process(stall))
    appending = asyncio.create_task(world.append("stalled", writer=writer))
    await stall.stalled.wait()
    [uploaded] = [name for name in names(world) if name not in await referenced(world)]
    world.runtime.now += HOUR + 1
    assert (await Collector(world.log).collect_once()).deleted == 1
    assert uploaded not in names(world)
    stall.go.set()
    await appending
    assert await world.payloads() == ["first", "stalled"]


async def referenced(world: World) -> set[str]:
    return {name async for name in references(world.log, await partitions(world.log))}


async def test_a_writer_whose_clock_is_far_behind_still_writes(world: World) -> None:
    await world.append("a")
    await raise_floors(world.log, await partitions(world.log), world.runtime.now + DAY)
    await world.append("b")
    await world.append("c", writer=Writer(world.log))
    world.runtime.now += HOUR + 1
    await Collector(world.log).collect_once()
    assert await world.payloads() == ["a", "b", "c"]


async def test_a_run_that_finds_no_garbage_disturbs_no_writer(world: World) -> None:
    await world.append("a")
    world.runtime.now += HOUR + 1
    before = await world.meta.get((await world.keys()).control)
    await Collector(world.log).collect_once()
    assert await world.meta.get((await world.keys()).control) == before


async def test_floors_never_go_back(world: World) -> None:
    everything = await partitions(world.log)
    await world.meta.put(sink_key("s"), encode(Sink()))
    for limit, expected in ((5000, 5000), (3000, 5000), (6000, 6000)):
        await raise_floors(world.log, everything, limit)
        assert (await world.control()).blob_floor_ms == expected
        assert await raise_sink_floors(world.log, limit) == {"s": expected}
        assert (await sink_record(world, "s")).blob_floor_ms == expected
    stall = Stall(lambda operation, key: operation == "put")
    low = asyncio.create_task(raise_floors(world.process(stall), everything[:1], 7000))
    await stall.stalled.wait()
    await raise_floors(world.log, everything[:1], 9000)
    stall.go.set()
    await low
    assert (await world.control()).blob_floor_ms == 9000


async def test_a_topic_created_after_the_listing_is_marked(world: World) -> None:
    """Between listing and last mark a new topic appears whose writer is slow: what it commits is seen or refused."""
    stamp = WAL + uuid7(START_MS - DAY, random.Random(1))
    await world.blobs.put(stamp, [b"x"])
    world.runtime.now += HOUR + 1
    stall = Stall(lambda operation, key: operation == "put" and key.endswith("meta/control"))
    collecting = asyncio.create_task(Collector(world.process(stall)).collect_once())
    await stall.stalled.wait()
    await world.catalog.create("late", 1)
    late = TopicPartition("late", 0)
    await world.append("l", tp=late)
    stall.go.set()
    assert (await collecting).deleted == 1
    assert await world.payloads(late) == ["l"]


# --- pins


async def test_a_pin_holds_back_what_its_reader_may_have_resolved(world: World) -> None:
    for number in range(3):
        await world.append(f"a{number}")
    pin_id = await pin(world.log, "reader")
    snapshot = await take_snapshot(world.log, TP, 1, 4)
    await compacted(world)
    world.runtime.now += HOUR + 1
    assert await renew(world.log, pin_id, 3 * DAY) is False
    pin_id = await pin(world.log, "reader", 3 * DAY)
    collector = Collector(world.log)
    result = await collector.collect_once()
    assert (result.deleted, result.waiting) == (0, 3)
    for extent in snapshot:
        await world.blobs.get(extent.data_uri)
    await release(world.log, pin_id)
    assert (await collector.collect_once()).deleted == 3
    with pytest.raises(BlobNotFound):
        await world.blobs.get(snapshot[0].data_uri)


async def test_a_name_waits_only_for_the_pins_it_met_first(world: World) -> None:
    await world.append("a")
    await compacted(world)
    first = await pin(world.log, "first", 3 * DAY)
    world.runtime.now += HOUR + 1
    collector = Collector(world.log)
    assert (await collector.collect_once()).waiting == 1
    second = await pin(world.log, "second", 3 * DAY)
    assert (await collector.collect_once()).waiting == 1
    await release(world.log, first)
    assert [pin_id for pin_id, _ in await alive_pins(world.log)] == [second]
    assert (await collector.collect_once()).deleted == 1


async def test_a_pin_taken_while_the_mark_runs_counts(world: World) -> None:
    """Its reader resolved a reference that the mark no longer met."""
    await world.append("a")
    world.runtime.now += HOUR + 1
    await world.blobs.put(WAL + uuid7(START_MS - DAY, random.Random(1)), [b"garbage"])
    floors = Stall(lambda operation, key: operation == "put" and key.endswith("meta/control"))
    await world.append("b")
    pin_first = asyncio.create_task(Collector(world.process(floors), CollectorOptions(grace_ms=0)).collect_once())
    await floors.stalled.wait()
    await pin(world.log, "reader")
    snapshot = await take_snapshot(world.log, TP, 1, 3)
    await compacted(world)
    floors.go.set()
    await pin_first
    for extent in snapshot:
        await world.blobs.get(extent.data_uri)


async def test_an_abandoned_pin_holds_nothing_back_for_ever(world: World) -> None:
    await world.append("a")
    await compacted(world)
    world.runtime.now += HOUR + 1
    await pin(world.log, "killed")
    collector = Collector(world.log)
    assert (await collector.collect_once()).waiting == 1
    world.runtime.now += HOUR
    assert (await collector.collect_once()).deleted == 1


def test_waiting_names_are_bounded_and_forgotten_when_gone() -> None:
    waiting = Waiting(2)
    pins = frozenset({"p"})
    assert waiting.free(["a", "b", "c"], pins) == []
    waiting.begin_run()
    later = frozenset({"q"})
    assert waiting.free(["a", "b", "c"], later) == ["a", "b"]
    waiting.begin_run()
    waiting.begin_run()
    assert waiting.free(["c"], frozenset({"r"})) == []


# --- sinks


async def uploaded(world: World, sink: str, *payloads: str) -> Upload:
    return await SinkUploader(world.log, sink).upload([(TP, columns(*payloads))])


async def test_an_open_upload_is_spared_and_can_still_be_committed_after_the_grace(world: World) -> None:
    upload = await uploaded(world, "s", "a")
    world.runtime.now += 20 * HOUR
    assert (await Collector(world.log).collect_once()).deleted == 0
    await publish(world.log, "s", 0, [upload])
    assert await world.payloads() == ["a"]


async def test_an_upload_of_a_dead_batch_goes_and_cannot_be_committed(world: World) -> None:
    upload = await uploaded(world, "s", "a")
    world.runtime.now += DAY + 1
    assert (await Collector(world.log).collect_once()).deleted == 1
    with pytest.raises(BlobCollected):
        await publish(world.log, "s", 0, [upload])
    assert await world.payloads() == []


async def test_an_attempt_that_lost_goes_once_its_batch_is_finished(world: World) -> None:
    loser, winner = await uploaded(world, "s", "a"), await uploaded(world, "s", "a")
    await publish(world.log, "s", 0, [winner])
    world.runtime.now += HOUR + 1
    following = await uploaded(world, "s", "b")
    result = await Collector(world.log).collect_once()
    assert result.deleted == 1
    assert loser.blob not in names(world)
    await publish(world.log, "s", 1, [following])
    assert await world.payloads() == ["a", "b"]


async def test_a_manifest_keeps_its_blobs_however_old(world: World) -> None:
    upload = await uploaded(world, "s", "a")
    manifest = Manifest(blobs=(upload.blob,), since={str(TP): 1})
    record = await sink_record(world, "s")
    await world.meta.put(sink_key("s"), encode(Sink(batch=0, manifest=manifest, touched_ms=record.touched_ms)))
    world.runtime.now += 30 * DAY
    assert [name async for name in sink_references(world.log)] == [upload.blob]
    assert (await Collector(world.log).collect_once()).deleted == 0
    await publish(world.log, "s", 0, [])
    assert await world.payloads() == ["a"]


async def test_what_a_forgotten_sink_left_goes(world: World) -> None:
    upload = await uploaded(world, "s", "a")
    await forget_sink(world.log, "s")
    world.runtime.now += HOUR + 1
    assert (await Collector(world.log).collect_once()).deleted == 1
    assert upload.blob not in names(world)


# --- leftover index entries


async def leave_stale_entry(world: World) -> None:
    """A writer that stalled before it put an index entry, and put it after the range was compacted."""
    await world.append("a")
    await world.append("b")
    pending = (await world.control()).pending
    await world.append("c")
    await compacted(world)
    await world.meta.put_many(index_puts(await world.keys(), pending))
    assert await world.shape() == [(2, 2, Kind.WAL), (1, 3, Kind.COMPACTED)]


async def test_a_leftover_inside_a_compacted_range_is_swept_and_its_blob_goes(world: World) -> None:
    await leave_stale_entry(world)
    await world.append("d")
    world.runtime.now += HOUR + 1
    assert (await Collector(world.log).collect_once()).deleted == 3
    assert await world.shape() == [(1, 3, Kind.COMPACTED)]
    assert await world.payloads() == ["a", "b", "c", "d"]


async def test_a_leftover_below_the_log_start_is_swept(world: World) -> None:
    await world.append("a")
    pending = (await world.control()).pending
    await world.append("b")
    await trim(world.log, TP, 2)
    await world.meta.put_many(index_puts(await world.keys(), pending))
    assert await sweep(world.log, TP) == 1
    assert await world.payloads() == ["b"]


async def test_sweeping_a_healthy_partition_removes_nothing(world: World) -> None:
    for number in range(6):
        await world.append(f"a{number}", f"b{number}")
        if number == 2:
            await compacted(world)
    await trim(world.log, TP, 4)
    before = await world.shape()
    assert await sweep(world.log, TP) == 0
    assert await world.shape() == before


async def test_an_entry_that_changed_while_it_is_swept_stays(world: World) -> None:
    await leave_stale_entry(world)
    stall = Stall(lambda operation, key: operation == "delete")
    sweeping = asyncio.create_task(sweep(world.process(stall), TP))
    await stall.stalled.wait()
    stale = (await world.keys()).entry(2)
    found = await world.meta.get(stale)
    assert found is not None
    await world.meta.put(stale, found.value)
    stall.go.set()
    assert await sweeping == 0
    assert await world.meta.get(stale) is not None


# --- everything at once


@pytest.mark.parametrize("seed", range(30))
async def test_no_interleaving_deletes_what_is_readable(world: World, seed: int) -> None:
    """Writers, a sink, compactors, trimming, snapshots and two collectors without any grace, under a clock that jumps."""
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
            await world.payloads()

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
    assert (await orphans(world.log)).orphans == 0
    assert await world.payloads() == list(found.values())
