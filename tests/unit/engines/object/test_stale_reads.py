"""Reads that a server answers from an old state: what they do not show is not taken for missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from llog.batch.columns import columns_of
from llog.engines.disk.options import SegmentOptions
from llog.engines.disk.segment_pool import SegmentPool
from llog.engines.disk.topics import DiskTopics
from llog.engines.object.clocks import collection_window
from llog.engines.object.collection_tasks import (
    enumerate_partitions,
    raise_floors_of,
    read_pins,
    referenced_names,
    sink_referenced_names,
)
from llog.engines.object.collector import Collector, CollectorOptions
from llog.engines.object.compaction.compactor import Compactor
from llog.engines.object.fencing import fence, unfence
from llog.engines.object.gaps import Gaps
from llog.engines.object.reader import Reader
from llog.engines.object.repair.index import plan_repairs
from llog.engines.object.sink import SinkUploader, publish
from llog.engines.object.snapshot import take_snapshot
from llog.engines.object.verify import verify
from llog.engines.object.writer import Writer
from llog.engines.registry import all_engines
from llog.engines.routing import EngineReader
from llog.errors import LlogError, OffsetOutOfRange, OutOfOrderSequence, PartitionNotInitialized, StaleReads
from llog.groups.groups import Groups
from llog.groups.records import GroupMode
from llog.log.catalog import DISK, Catalog
from llog.log.engine import AppendGroup, AppendResult
from llog.log.keys import GROUPS, PINS, SINKS, TOPICS, PartitionKeys, sink_key
from llog.log.pins import pin, release
from llog.log.producers import Producer
from llog.log.records import Control, LogState, Manifest, Sink, decode, encode
from llog.model import Record, TopicPartition
from llog.stores.meta import prefix_end
from tests.unit.world import TP, World

NOW = CollectorOptions(grace_ms=0)
MINUTE = 60_000


async def test_the_collector_deletes_nothing_when_it_missed_a_pin(world: World) -> None:
    log, meta = world.stale_process()
    await world.append("a")
    await world.append("b")
    meta.pause(PINS)
    pin_id = await pin(world.log, "reader")
    snapshot = await take_snapshot(world.log, TP, 1, 3)
    await Compactor(world.log).compact_once(TP, force=True)
    world.runtime.now += MINUTE
    collector = Collector(log, NOW)
    for _ in range(2):
        with pytest.raises(StaleReads):
            await collector.collect_once()
    assert {extent.data_uri for extent in snapshot} <= set(world.blob_server.names)
    meta.wake()
    # What the stale runs saw of the pins is not remembered: the blobs wait for the pin that they missed.
    assert (await collector.collect_once()).waiting == 2
    await release(world.log, pin_id)
    assert (await collector.collect_once()).deleted == 2


async def test_the_collector_deletes_nothing_when_it_missed_a_topic(world: World) -> None:
    log, meta = world.stale_process()
    meta.pause(TOPICS)
    late = TopicPartition("late", 0)
    await world.catalog.create("late")
    await world.append("a", tp=late)
    world.runtime.now += MINUTE
    with pytest.raises(StaleReads):
        await Collector(log, NOW).collect_once()
    assert await world.payloads(late) == ["a"]
    meta.wake()
    await Collector(log, NOW).collect_once()
    assert await world.payloads(late) == ["a"]


async def test_each_part_of_a_spread_collection_confirms_what_it_has_read(world: World) -> None:
    log, meta = world.stale_process()
    run, keys = await collection_window(log, 0), PartitionKeys("late", 0)
    meta.pause("llog/")
    await world.catalog.create("late")
    with pytest.raises(StaleReads):
        await enumerate_partitions(log)
    with pytest.raises(StaleReads):
        await read_pins(log, run)
    with pytest.raises(StaleReads):
        await raise_floors_of(log, [keys], run)
    for names in (referenced_names(log, [keys], Gaps()), sink_referenced_names(log)):
        with pytest.raises(StaleReads):
            _ = [name async for name in names]


async def test_a_deleted_topic_is_not_swept_while_its_partitions_were_not_seen(world: World) -> None:
    log, meta = world.stale_process()
    keys = PartitionKeys("late", 0)
    meta.pause(keys.prefix)
    await world.catalog.create("late")
    with pytest.raises(StaleReads):
        await Catalog(log).delete("late")
    meta.wake()
    await world.catalog.finish_deletions()
    found = await world.meta.get(keys.control)
    assert found is not None
    assert decode(Control, found.value, found.key).log_state is LogState.DELETED


async def test_a_manifest_is_not_cleared_when_its_topic_was_not_seen(world: World) -> None:
    log, meta = world.stale_process()
    meta.pause(TOPICS)
    late = TopicPartition("late", 0)
    await world.catalog.create("late")
    upload = await SinkUploader(world.log, "s").upload([(late, columns_of([Record(payload=b"a")]))])
    manifest = Manifest(blobs=(upload.blob,), since={str(late): 1})
    await world.meta.put(sink_key("s"), encode(Sink(batch=0, manifest=manifest)))
    with pytest.raises(StaleReads):
        await publish(log, "s", 0, [])
    meta.wake()
    assert (await publish(log, "s", 0, [])).repeated
    assert await world.payloads(late) == ["a"]


async def test_a_sink_that_was_not_seen_is_not_taken_for_a_finished_one(world: World) -> None:
    log, meta = world.stale_process()
    meta.pause(SINKS)
    upload = await SinkUploader(world.log, "s").upload([(TP, columns_of([Record(payload=b"a")]))])
    with pytest.raises(StaleReads):
        await publish(log, "s", 0, [upload])
    meta.wake()
    await publish(log, "s", 0, [upload])
    assert await world.payloads() == ["a"]


async def test_a_fence_that_was_lifted_is_not_taken_for_one_that_holds(world: World) -> None:
    log, meta = world.stale_process()
    await fence(world.log, TP)
    meta.pause((await world.keys()).prefix)
    await unfence(world.log, TP)
    with pytest.raises(StaleReads):
        await fence(log, TP)
    assert (await world.control()).log_state is LogState.OPEN


async def test_an_append_is_not_refused_by_an_old_control_record(world: World) -> None:
    log, meta = world.stale_process()
    await _send(world.writer, 0)
    meta.pause((await world.keys()).prefix)
    await _send(world.writer, 1)
    writer = Writer(log)
    assert isinstance(await _send(writer, 2), StaleReads)
    meta.wake()
    assert isinstance(await _send(writer, 2), AppendResult)
    refused = await _send(writer, 5)
    assert isinstance(refused, OutOfOrderSequence)


async def _send(writer: Writer, sequence: int) -> AppendResult | LlogError:
    producer = Producer(id="p", sequence=sequence, since=1)
    [result] = await writer.append(
        [AppendGroup(topic=TP.topic, partition=0, records=[Record(payload=b"%d" % sequence)], producer=producer)]
    )
    return result


async def test_a_read_is_not_refused_by_an_old_control_record(world: World) -> None:
    log, meta = world.stale_process()
    meta.pause((await world.keys()).prefix)
    await world.append("a", "b", "c")
    with pytest.raises(StaleReads):
        await Reader(log).read(TP, 3)
    with pytest.raises(StaleReads):
        await take_snapshot(log, TP, 1, 3)
    meta.wake()
    with pytest.raises(OffsetOutOfRange):
        await Reader(log).read(TP, 9)


async def test_old_index_entries_are_not_reported_as_damage(world: World) -> None:
    log, meta = world.stale_process()
    for payload in ("a", "b", "c"):
        await world.append(payload)
    meta.pause((await world.keys()).index)
    await Compactor(world.log).compact_once(TP, force=True)
    world.runtime.now += MINUTE
    await Collector(world.log, NOW).collect_once()
    with pytest.raises(StaleReads):
        await Reader(log).read(TP, 1)
    with pytest.raises(StaleReads):
        await verify(log, TP)
    with pytest.raises(StaleReads):
        await plan_repairs(log, [TP])
    meta.wake()
    assert (await verify(log, TP)).healthy


async def test_an_acknowledgement_is_not_taken_for_done_in_an_old_state(world: World) -> None:
    log, meta = world.stale_process()
    await world.append("a", "b", "c")
    group = await Groups(world.log, EngineReader(world.log)).partition("g", TP)
    await group.begin(1, mode=GroupMode.CLAIMED)
    await group.claim("m", limit=3, visibility_ms=MINUTE)
    await group.ack("m", 3)
    meta.pause(GROUPS)
    await group.reset(1)
    await group.claim("m", limit=3, visibility_ms=MINUTE)
    late = await Groups(log, EngineReader(log)).partition("g", TP)
    with pytest.raises(StaleReads):
        await late.ack("m", 3)
    meta.wake()
    await late.ack("m", 3)
    assert await group.position() == 4


async def test_the_files_of_a_disk_topic_that_an_old_state_does_not_show_are_kept(world: World, tmp_path: Path) -> None:
    log, meta = world.stale_process()
    segments = SegmentPool(tmp_path, SegmentOptions(), world.runtime)
    engines = all_engines(segments)
    fresh, log = world.log._replace(engines=engines), log._replace(engines=engines)
    meta.pause(TOPICS)
    late = TopicPartition("late", 0)
    await Catalog(fresh).create("late", engine=DISK)
    place = await DiskTopics(fresh, segments).find(late)
    with pytest.raises(StaleReads):
        await DiskTopics(log, segments).confirm(late, place)
    assert place.path.is_dir()
    await Catalog(fresh).delete("late")
    meta.wake()
    with pytest.raises(PartitionNotInitialized):
        await DiskTopics(log, segments).confirm(late, place)
    await segments.close()


async def test_an_old_state_without_the_partition_does_not_delete_the_index_of_an_open_one(world: World) -> None:
    log, stale = world.stale_process()
    keys = PartitionKeys((await Catalog(world.log).get(TP.topic)).directory, TP.partition)
    await world.append("a")
    await world.append("b")
    before = await world.meta.keys(keys.index, prefix_end(keys.index), 10)
    control = await world.meta.get(keys.control)
    assert before
    assert control is not None
    await world.meta.delete(keys.control)
    stale.pause(keys.control)
    await world.meta.put(keys.control, control.value)
    with pytest.raises(StaleReads):
        await Catalog(log).delete(TP.topic)
    assert await world.meta.keys(keys.index, prefix_end(keys.index), 10) == before
    stale.wake()
    await Catalog(log).finish_deletions()
    assert await world.meta.keys(keys.index, prefix_end(keys.index), 10) == []
