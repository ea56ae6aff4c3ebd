from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

import msgspec
import pytest

from llog.engines.object.clocks import Window, collection_window
from llog.engines.object.collector import (
    Collector,
    CollectorOptions,
    Listing,
    StampRange,
    Waiting,
    is_candidate,
    list_partitions,
    list_unreferenced,
    raise_floors,
    raise_sink_floors,
    references,
    sweep,
)
from llog.engines.object.compaction.compactor import Compactor
from llog.engines.object.pending import pending_puts
from llog.engines.object.retention import trim
from llog.engines.object.snapshot import take_snapshot
from llog.engines.object.writer import Writer
from llog.errors import BlobNotFound
from llog.log.catalog import Catalog
from llog.log.engine import AppendGroup
from llog.log.keys import LOG_ID, SINK_BLOBS, WAL, sink_key
from llog.log.log import tie_together
from llog.log.pins import alive_pins, pin, release
from llog.log.records import IndexEntry, Kind, Sink, decode, encode
from llog.model import Record, TopicPartition
from llog.runtime import SystemRuntime, uuid7
from llog.stores.blobs import BlobInfo
from llog.stores.files.blobs import FileBlobStore
from tests.unit.world import START_MS, TP, Stall, World

HOUR = 3_600_000
DAY = 24 * HOUR
OTHER = TopicPartition(TP.topic, 1)


def names(world: World) -> list[str]:
    return [name for name in world.blob_server.names if not name.startswith(LOG_ID)]


def at(limit: int) -> Window:
    """A collection that leaves alone what is not below this."""
    return Window(limit, START_MS, limit + DAY)


async def sink_record(world: World, sink: str) -> Sink:
    found = await world.meta.get(sink_key(sink))
    assert found is not None
    return decode(Sink, found.value, found.key)


async def compacted(world: World, *, tp: TopicPartition = TP) -> None:
    """Leaves the WAL blobs of the partition unreferenced."""
    await Compactor(world.log).compact_once(tp, force=True)


# --- what goes, and what stays


async def test_a_collection_removes_what_killed_puts_have_left_in_the_store(world: World, tmp_path: Path) -> None:
    log = world.log._replace(blobs=FileBlobStore(tmp_path), runtime=SystemRuntime())
    for name, age_ms in ((".tmp-killed", DAY + HOUR), (".tmp-under-way", HOUR)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, ns=(0, (log.runtime.now_ms() - age_ms) * 1_000_000))
    await Collector(log).collect_once()
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [".tmp-under-way"]
    await log.blobs.close()


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
    groups = [AppendGroup(topic=TP.topic, partition=number, records=[Record(payload=b"x")]) for number in (0, 1)]
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
    assert is_candidate(BlobInfo(name, 1, 1000), at(1001))
    assert not is_candidate(BlobInfo(name, 1, 1000), at(1000))
    assert not is_candidate(BlobInfo(name, 1, 2000), at(1500))


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
            name
            async for chunk in list_unreferenced(world.log, await collection_window(world.log, HOUR), Listing(), page)
            for name in chunk
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
    return {name async for name in references(world.log, await list_partitions(world.log))}


async def test_a_writer_whose_clock_is_far_behind_still_writes(world: World) -> None:
    await world.append("a")
    await raise_floors(world.log, await list_partitions(world.log), at(world.runtime.now + DAY))
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
    everything = await list_partitions(world.log)
    await world.meta.put(sink_key("s"), encode(Sink()))
    for limit, expected in ((5000, 5000), (3000, 5000), (6000, 6000)):
        assert await raise_floors(world.log, everything, at(limit)) == expected + DAY
        assert (await world.control()).blob_floor_ms == expected
        assert await raise_sink_floors(world.log, at(limit)) == {"s": StampRange(expected, None)}
        assert (await sink_record(world, "s")).blob_floor_ms == expected
    stall = Stall(lambda operation, key: operation == "put")
    low = asyncio.create_task(raise_floors(world.process(stall), everything[:1], at(7000)))
    await stall.stalled.wait()
    await raise_floors(world.log, everything[:1], at(9000))
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
    pin_id = await pin(world.log, "reader", 3 * DAY)
    snapshot = await take_snapshot(world.log, TP, 1, 4)
    await compacted(world)
    world.runtime.now += HOUR + 1
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
    await world.append("b")
    keys = await world.keys()
    world.runtime.now += HOUR + 1
    looks: list[str] = []

    def marking(operation: str, key: str) -> bool:
        if (operation, key) == ("get", keys.control):
            looks.append(key)
        return len(looks) == 2  # the first look is the sweep's

    stall = Stall(marking)
    collecting = asyncio.create_task(Collector(world.process(stall)).collect_once())
    await stall.stalled.wait()
    await pin(world.log, "reader")
    snapshot = await take_snapshot(world.log, TP, 1, 3)
    await compacted(world)
    stall.go.set()
    assert (await collecting).waiting == 2
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


# --- leftover index entries


async def leave_stale_entry(world: World) -> None:
    """A writer that stalled before it put an index entry, and put it after the range was compacted."""
    await world.append("a")
    await world.append("b")
    pending = (await world.control()).pending
    await world.append("c")
    await compacted(world)
    await world.meta.put_many(pending_puts(await world.keys(), pending))
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
    await world.meta.put_many(pending_puts(await world.keys(), pending))
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


async def test_an_entry_that_reaches_out_of_the_compacted_range_is_not_swept(world: World) -> None:
    await world.append("a")
    await world.append("b", "c")
    await world.append("d")
    keys = await world.keys()
    found = await world.meta.get(keys.entry(3))
    assert found is not None
    entry = msgspec.structs.replace(decode(IndexEntry, found.value, found.key), kind=Kind.COMPACTED, msg_count=2)
    await world.meta.put(keys.entry(4), encode(entry))
    assert await sweep(world.log, TP) == 0
    assert len(await world.shape()) == 3


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
