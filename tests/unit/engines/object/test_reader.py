"""Reads: what a lookup costs, and what is found when index, pending append and blobs do not look as usual."""

from __future__ import annotations

import asyncio
from collections import Counter

import msgspec
import pytest

from llog.batch.columns import columns_of, records_of, stamp
from llog.batch.shared import pack
from llog.engines.object.blob_reads import BlobReads
from llog.engines.object.compaction.compactor import Compactor, CompactorOptions
from llog.engines.object.pending import pending_puts
from llog.engines.object.reader import Reader
from llog.engines.object.retention import trim
from llog.engines.object.snapshot import take_snapshot
from llog.engines.object.writer import UploadedGroup
from llog.engines.routing import EngineReader
from llog.errors import (
    CorruptBatch,
    InconsistentReadState,
    OffsetOutOfRange,
    PartitionNotInitialized,
    TopicNotFound,
)
from llog.log.engine import AppendGroup, AppendResult
from llog.log.keys import WAL
from llog.log.producers import Producer
from llog.log.records import Kind, encode
from llog.model import Record, TimestampType, TopicPartition
from llog.runtime import uuid7
from tests.unit.world import START_MS, TP, Faults, Interleaved, Stall, World


async def appended(world: World, count: int, records: int = 1) -> list[str]:
    payloads = []
    for number in range(count):
        payloads += [f"a{number}.{record}" for record in range(records)]
        await world.append(*payloads[-records:])
    return payloads


async def test_a_record_comes_back_as_it_was_appended(world: World) -> None:
    given = [
        Record(payload=b"v", key=b"k", timestamp=5, headers=(("h", b"x"), ("n", None))),
        Record(payload=None, key=b"k"),
        Record(payload=b""),
    ]
    await world.writer.append([AppendGroup(topic=TP.topic, partition=0, records=given)])
    found = [await world.reader.read_offset(TP, offset) for offset in (1, 2, 3)]
    assert found[0] == Record(payload=b"v", key=b"k", timestamp=5, headers=(("h", b"x"), ("n", None)), offset=1)
    assert found[1] == Record(payload=None, key=b"k", timestamp=START_MS, offset=2)
    assert found[2] == Record(payload=b"", timestamp=START_MS, offset=3)


async def test_a_point_read_costs_two_gets_a_ceiling_and_one_ranged_get(world: World) -> None:
    await appended(world, 20)
    world.meta.counts.count.clear()
    world.blobs.counts.count.clear()
    await world.reader.read_offset(TP, 7)
    assert world.meta.counts.count == {"get": 2, "ceiling": 1}
    assert world.blobs.counts.count == {"range_get": 1}
    length = (await world.index())[6].entry.byte_length
    assert world.blobs.counts.bytes["range_get"] == length


async def test_the_newest_append_is_read_through_pending(world: World) -> None:
    await appended(world, 1, 3)
    assert await world.shape() == []
    assert (await world.reader.read_offset(TP, 2)).payload == b"a0.1"
    assert [extent.end_offset for extent in await take_snapshot(world.log, TP, 1, 4)] == [3]


async def test_bounds_and_reads_outside_of_them(world: World) -> None:
    payloads = await appended(world, 4, 2)
    assert await world.reader.bounds(TP) == (1, 9)
    await trim(world.log, TP, 4)
    assert await world.reader.bounds(TP) == (4, 9)
    assert await world.payloads() == payloads[3:]
    assert await world.reader.read(TP, 9) == []
    for offset in (3, 10):
        with pytest.raises(OffsetOutOfRange) as raised:
            await world.reader.read(TP, offset)
        assert (raised.value.offset, raised.value.log_start_offset, raised.value.next_offset) == (offset, 4, 9)
    with pytest.raises(OffsetOutOfRange):
        await world.reader.read_offset(TP, 9)
    with pytest.raises(OffsetOutOfRange):
        await world.reader.read(TP, 0)


async def test_unknown_and_deleted_partitions(world: World) -> None:
    with pytest.raises(TopicNotFound):
        await world.reader.bounds(TopicPartition("nope", 0))
    with pytest.raises(PartitionNotInitialized, match="has no partition 4"):
        await world.reader.bounds(TopicPartition(TP.topic, 4))
    await appended(world, 1)
    await world.catalog.delete(TP.topic)
    with pytest.raises(TopicNotFound):
        await world.reader.read(TP, 1)


async def test_a_read_stops_at_about_its_bytes_but_never_before_one_batch(world: World) -> None:
    await appended(world, 5, 2)
    assert [batch.end_offset for batch in await world.reader.read(TP, 2, max_bytes=1)] == [2]
    length = (await world.index())[0].entry.byte_length
    assert [batch.start_offset for batch in await world.reader.read(TP, 2, max_bytes=2 * length)] == [2, 3]
    assert [batch.start_offset for batch in await world.reader.read(TP, 1)] == [1, 3, 5, 7, 9]


class InFlight(Faults):
    """Counts the blobs that are being fetched at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0

    async def before(self, operation: str, key: str) -> None:
        if operation == "get blob":
            self.now += 1
            self.most = max(self.most, self.now)
            await asyncio.sleep(0)

    async def after(self, operation: str, key: str) -> None:
        self.now -= operation == "get blob"


async def test_a_reader_that_catches_up_pages_through_the_index_and_fetches_blobs_together(world: World) -> None:
    payloads = await appended(world, 500)
    faults = InFlight()
    batches = await Reader(world.process(faults)).read(TP, 1)
    assert [value.decode() for batch in batches for value in batch.columns.values.to_pylist()] == payloads
    operations = Counter(operation for operation, _ in faults.calls)
    assert {name: operations[name] for name in ("ceiling", "range", "get blob")} == {
        "ceiling": 1,
        "range": 6,
        "get blob": 500,
    }
    assert faults.most == 16


async def test_one_get_brings_all_that_a_page_of_the_index_wants_of_a_blob(world: World) -> None:
    await appended(world, 1)
    columns = stamp(columns_of([Record(payload=b"u")]), START_MS)
    group = (TP, (await world.keys()).directory, columns)
    parts, bodies = pack([group] * 20, writer="w", created_at_ms=START_MS)
    blob = WAL + uuid7(START_MS, world.runtime.random())
    await world.blobs.put(blob, parts)
    upload = UploadedGroup(TP, [(blob, body) for body in bodies], Producer(id="p", sequence=0, since=1))
    [result] = await world.writer.append_uploaded([upload])
    assert isinstance(result, AppendResult)
    await appended(world, 1)
    world.blobs.counts.count.clear()
    batches = await world.reader.read(TP, 1)
    assert [batch.start_offset for batch in batches] == list(range(1, 23))
    assert world.blobs.counts.count == {"range_get": 4}, (
        "the first append, two pages of the uploaded blob, the last append"
    )


async def appended_together(world: World, count: int) -> list[TopicPartition]:
    """Append `count` times to 8 partitions at once, and return them."""
    await world.catalog.create("many", 8)
    for number in range(count):
        groups = [
            AppendGroup(topic="many", partition=partition, records=[Record(payload=f"{number}.{partition}".encode())])
            for partition in range(8)
        ]
        assert all(isinstance(result, AppendResult) for result in await world.writer.append(groups))
    return [TopicPartition("many", partition) for partition in range(8)]


async def read_values(reader: Reader, tp: TopicPartition) -> list[str]:
    return [value.decode() for batch in await reader.read(tp, 1) for value in batch.columns.values.to_pylist()]


@pytest.mark.parametrize("count", [1, 2, 30])
@pytest.mark.parametrize("seed", range(3))
async def test_partitions_that_are_read_together_get_each_blob_once(world: World, count: int, seed: int) -> None:
    tps = await appended_together(world, count)
    faults = Interleaved(seed)
    log = world.process(faults)
    reader = Reader(log, BlobReads(log.blobs, lookup_wait_s=1000))
    found = await asyncio.gather(*(read_values(reader, tp) for tp in tps))
    assert found == [[f"{number}.{tp.partition}" for number in range(count)] for tp in tps]
    assert Counter(operation for operation, _ in faults.calls)["get blob"] == count


async def test_all_readers_of_a_log_share_their_gets(world: World) -> None:
    tps = await appended_together(world, 1)
    world.blobs.counts.count.clear()
    await asyncio.gather(*(EngineReader(world.log).read(tp, 1) for tp in tps))
    assert world.blobs.counts.count == {"range_get": 1}


async def test_two_equal_reads_are_one_get(world: World) -> None:
    await appended(world, 3)
    world.blobs.counts.count.clear()
    found = await asyncio.gather(*(world.reader.read_offset(TP, 2) for _ in range(2)))
    assert [record.payload for record in found] == [b"a1.0"] * 2
    assert world.blobs.counts.count == {"range_get": 1}


async def test_damage_in_a_shared_blob_concerns_the_partition_that_has_it(world: World) -> None:
    tps = await appended_together(world, 1)
    control = await world.control(tps[7])
    assert control.pending is not None
    uri = control.pending.entries[0].data_uri
    data, put_ms = world.blob_server.blobs[uri]
    world.blob_server.blobs[uri] = (data[:-9], put_ms)
    found = await asyncio.gather(*(read_values(world.reader, tp) for tp in tps), return_exceptions=True)
    assert found[:7] == [[f"0.{partition}"] for partition in range(7)]
    assert isinstance(found[7], CorruptBatch)


async def test_everybody_looks_again_if_a_shared_blob_vanishes_under_them(world: World) -> None:
    tps = await appended_together(world, 4)
    stall = Stall(lambda operation, key: operation == "get blob")
    reader = Reader(world.process(stall))
    tasks = [asyncio.create_task(read_values(reader, tp)) for tp in tps]
    await stall.stalled.wait()
    wal = list(world.blob_server.names)
    for tp in tps:
        await Compactor(world.log).compact_once(tp, force=True)
    await world.blobs.delete_many(wal)
    stall.go.set()
    assert await asyncio.gather(*tasks) == [[f"{number}.{tp.partition}" for number in range(4)] for tp in tps]


@pytest.mark.parametrize("run_bytes", [5 << 20, 9 << 20, 64 << 20])
@pytest.mark.parametrize("record_bytes", [100_000, 900_000, 3 << 20])
@pytest.mark.parametrize("max_bytes", [4 << 20, 8 << 20])
async def test_a_reader_that_catches_up_gets_large_pieces_of_compacted_blobs(
    world: World, run_bytes: int, record_bytes: int, max_bytes: int
) -> None:
    payloads = [world.runtime.random().randbytes(record_bytes) for _ in range((45 << 20) // record_bytes)]
    for payload in payloads:
        await world.writer.append([AppendGroup(topic=TP.topic, partition=0, records=[Record(payload=payload)])])
    compactor = Compactor(world.log, CompactorOptions(max_bytes=run_bytes))
    while (await compactor.compact_once(TP, force=True)).end_offset is not None:
        pass
    world.blobs.counts.count.clear()
    world.blobs.counts.bytes.clear()
    offset, (_, end) = 1, await world.reader.bounds(TP)
    found: list[bytes] = []
    while offset < end:
        batches = await world.reader.read(TP, offset, max_bytes)
        found += [value for batch in batches for value in batch.columns.values.to_pylist()]
        offset = batches[-1].end_offset + 1
    assert found == payloads
    fetched = world.blobs.counts.bytes["range_get"]
    assert fetched < 1.01 * sum(map(len, payloads))
    # A compacted blob may be smaller than this: then it is one GET.
    blobs = len(await world.index())
    assert world.blobs.counts.count["range_get"] <= max(blobs, fetched // (4 << 20))


async def test_a_read_fetches_nothing_beyond_its_end(world: World) -> None:
    payloads = [world.runtime.random().randbytes(1 << 20) for _ in range(12)]
    for payload in payloads:
        await world.writer.append([AppendGroup(topic=TP.topic, partition=0, records=[Record(payload=payload)])])
    await Compactor(world.log).compact_once(TP, force=True)
    world.blobs.counts.bytes.clear()
    found = [value async for batch in world.reader.iter_from(TP, 1, 3) for value in batch.columns.values.to_pylist()]
    assert found == payloads[:2]
    assert world.blobs.counts.bytes["range_get"] <= 4.1 * (1 << 20)


@pytest.mark.parametrize("damage", ["blob", "entry"])
async def test_damage_in_the_middle_ends_a_read_and_is_the_error_of_the_next(world: World, damage: str) -> None:
    payloads = await appended(world, 30)
    key, span = (await world.keys()).entry(20), (await world.index())[19]
    if damage == "blob":
        await world.blobs.delete_many([span.entry.data_uri])
    else:
        await world.meta.put(key, b"{")
    found: list[str] = []
    while len(found) < 19:
        for batch in await world.reader.read(TP, len(found) + 1):
            found += [value.decode() for value in batch.columns.values.to_pylist()]
    assert found == payloads[:19]
    with pytest.raises(InconsistentReadState):
        await world.reader.read(TP, 20)
    assert (await world.reader.read_offset(TP, 21)).payload == payloads[20].encode()


async def test_iterating_ends_where_it_is_told(world: World) -> None:
    await appended(world, 4, 3)
    found = [(batch.start_offset, batch.end_offset) async for batch in world.reader.iter_from(TP, 2, 8)]
    assert found == [(2, 3), (4, 6), (7, 7)]
    assert [batch async for batch in world.reader.iter_from(TP, 13)] == []


async def test_a_reader_falls_through_a_leftover_entry_whose_blob_is_gone(world: World) -> None:
    await world.append("a0")
    zombie = pending_puts(await world.keys(), (await world.control()).pending)
    [gone] = world.blob_server.names
    for number in range(1, 5):
        await world.append(f"a{number}")
    await Compactor(world.log).compact_once(TP)
    await world.blobs.delete_many([gone])
    await world.meta.put_many(zombie)
    assert await world.shape() == [(1, 1, Kind.WAL), (1, 4, Kind.COMPACTED), (5, 5, Kind.WAL)]
    assert (await world.reader.read_offset(TP, 1)).payload == b"a0"
    assert await world.payloads() == [f"a{number}" for number in range(5)]
    for start, stop in ((1, 6), (1, 3), (1, 2), (2, 6), (2, 5)):
        snapshot = await take_snapshot(world.log, TP, start, stop)
        ends = [(extent.start_offset, extent.end_offset) for extent in snapshot]
        assert ends == ([(1, 4), (5, 5)] if stop == 6 else [(1, 4)])


async def test_a_snapshot_keeps_a_damaged_extent_that_compaction_has_passed(world: World) -> None:
    await appended(world, 7)
    world.damage((await world.index())[2].entry.data_uri)
    for _ in range(2):
        await Compactor(world.log).compact_once(TP)
    assert await world.cursor() == 7
    for start, stop, expected in ((3, 4, [(3, 3)]), (2, 4, [(1, 2), (3, 3)]), (3, 8, [(3, 3), (4, 6), (7, 7)])):
        snapshot = await take_snapshot(world.log, TP, start, stop)
        assert [(extent.start_offset, extent.end_offset) for extent in snapshot] == expected


async def test_a_blob_that_vanishes_under_a_read_is_found_again_where_it_went(world: World) -> None:
    payloads = await appended(world, 5)
    stall = Stall(lambda operation, key: operation == "get blob")
    task = asyncio.create_task(Reader(world.process(stall)).read_offset(TP, 2))
    await stall.stalled.wait()
    wal = [span.entry.data_uri for span in await world.index()]
    await Compactor(world.log).compact_once(TP)
    await world.blobs.delete_many(wal)
    stall.go.set()
    assert (await task).payload == payloads[1].encode()


async def test_offsets_trimmed_under_a_read_are_out_of_range(world: World) -> None:
    await appended(world, 5)
    stall = Stall(lambda operation, key: operation == "get blob")
    task = asyncio.create_task(Reader(world.process(stall)).read_offset(TP, 2))
    await stall.stalled.wait()
    wal = [span.entry.data_uri for span in await world.index()]
    await trim(world.log, TP, 4)
    await world.blobs.delete_many(wal)
    stall.go.set()
    with pytest.raises(OffsetOutOfRange):
        await task


async def test_a_gap_is_an_error_and_never_skipped(world: World) -> None:
    await appended(world, 6)
    await world.meta.delete((await world.keys()).entry(3))
    with pytest.raises(InconsistentReadState, match="offset 3"):
        await world.reader.read_offset(TP, 3)
    with pytest.raises(InconsistentReadState, match="offset 3"):
        await world.payloads()
    with pytest.raises(InconsistentReadState, match="gap at offset 3"):
        await take_snapshot(world.log, TP, 1, 7)
    assert (await world.reader.read_offset(TP, 4)).payload == b"a3.0"


async def test_a_missing_blob_is_an_error(world: World) -> None:
    await appended(world, 3)
    await world.blobs.delete_many([(await world.index())[0].entry.data_uri])
    with pytest.raises(InconsistentReadState, match="offset 1 of orders/0"):
        await world.reader.read_offset(TP, 1)


async def test_damage_names_the_blob_and_the_offsets(world: World) -> None:
    await appended(world, 3, 2)
    uri = (await world.index())[1].entry.data_uri
    world.damage(uri)
    with pytest.raises(CorruptBatch, match=f"offsets 3 to 4 of orders/0 .*{uri}"):
        await world.reader.read_offset(TP, 3)
    assert (await world.reader.read_offset(TP, 5)).payload == b"a2.0"


async def test_a_batch_with_another_count_than_its_index_entry_is_an_error(world: World) -> None:
    await world.append("a")
    await world.append("b", "c")
    await world.append("d")
    entries = {span.end_offset: span.entry for span in await world.index()}
    await world.meta.put((await world.keys()).entry(1), encode(msgspec.structs.replace(entries[3], msg_count=1)))
    with pytest.raises(InconsistentReadState, match="holds 2 records where the index of orders/0 says 1"):
        await world.reader.read_offset(TP, 1)
    assert (await world.reader.read_offset(TP, 2)).payload == b"b"


async def test_a_blob_cut_short_names_itself(world: World) -> None:
    await appended(world, 2)
    uri = (await world.index())[0].entry.data_uri
    data, put_ms = world.blob_server.blobs[uri]
    world.blob_server.blobs[uri] = (data[:-20], put_ms)
    with pytest.raises(CorruptBatch, match=uri):
        await world.reader.read_offset(TP, 1)


@pytest.mark.parametrize("by", list(TimestampType))
async def test_offset_for_time_finds_the_first_record_at_or_after(world: World, by: TimestampType) -> None:
    start = START_MS if by is TimestampType.APPEND else 1000
    for number in range(9):
        world.runtime.now = START_MS + 100 * number
        records = [Record(payload=b"x", timestamp=1000 + 100 * number)] * 2
        await world.writer.append([AppendGroup(topic=TP.topic, partition=0, records=records)])
    assert await world.reader.offset_for_time(TP, 0, by) == 1
    for number in range(9):
        assert await world.reader.offset_for_time(TP, start + 100 * number, by) == 1 + 2 * number
        assert await world.reader.offset_for_time(TP, start + 100 * number - 99, by) == 1 + 2 * number
    assert await world.reader.offset_for_time(TP, start + 801, by) == 19


async def test_offset_for_time_takes_the_topic_s_own_kind_of_time(world: World) -> None:
    await world.catalog.create("appended", timestamp_type=TimestampType.APPEND)
    tp = TopicPartition("appended", 0)
    for number in range(3):
        world.runtime.now = START_MS + number
        await world.writer.append(
            [AppendGroup(topic=tp.topic, partition=0, records=[Record(payload=b"x", timestamp=5)])]
        )
    assert await world.reader.offset_for_time(tp, START_MS + 1) == 2
    assert await world.reader.offset_for_time(tp, START_MS + 1, TimestampType.CREATE) == 4


async def test_records_of_a_topic_of_append_time_show_it_and_not_the_time_they_were_given(world: World) -> None:
    await world.catalog.create("appended", timestamp_type=TimestampType.APPEND)
    tp = TopicPartition("appended", 0)
    given = [Record(payload=b"x", timestamp=5), Record(payload=b"y")]
    await world.writer.append([AppendGroup(topic=tp.topic, partition=0, records=given)])
    assert [(await world.reader.read_offset(tp, offset)).timestamp for offset in (1, 2)] == [START_MS] * 2
    batches = [*await world.reader.read(tp, 1), *[batch async for batch in world.reader.iter_from(tp, 1)]]
    times = [record.timestamp for batch in batches for record in records_of(batch.columns, batch.start_offset)]
    assert times == [START_MS] * 4


async def test_a_late_record_does_not_hide_what_came_before_it(world: World) -> None:
    for timestamp in (10, 50, 20, 60):
        await world.writer.append(
            [AppendGroup(topic=TP.topic, partition=0, records=[Record(payload=b"x", timestamp=timestamp)])]
        )
    for timestamp, offset in ((15, 2), (50, 2), (51, 4), (61, 5)):
        assert await world.reader.offset_for_time(TP, timestamp) == offset


async def test_offset_for_time_of_trimmed_and_empty_partitions(world: World) -> None:
    assert await world.reader.offset_for_time(TP, 0) == 1
    for number in range(4):
        await world.writer.append(
            [AppendGroup(topic=TP.topic, partition=0, records=[Record(payload=b"x", timestamp=number)] * 2)]
        )
    await trim(world.log, TP, 4)
    assert await world.reader.offset_for_time(TP, 0) == 4
    assert await world.reader.offset_for_time(TP, 2) == 5
    await trim(world.log, TP, 9)
    assert await world.reader.offset_for_time(TP, 0) == 9


async def test_a_wait_ends_with_an_append_of_another_process(world: World) -> None:
    await world.append("a")
    assert await world.reader.wait(TP, 1, 0)
    waiting = asyncio.create_task(world.reader.wait(TP, 2, 30))
    await asyncio.sleep(0)
    assert not waiting.done()
    await world.append("b")
    assert await waiting
    assert not await world.reader.wait(TP, 3, 0.001)


async def test_damage_beyond_the_end_of_a_range_does_not_concern_it(world: World) -> None:
    for payload in ("a", "b", "c"):
        await world.append(payload)
    spans = await world.index()
    world.damage((await world.control()).pending.entries[0].data_uri)  # type: ignore[union-attr]
    assert len(spans) == 2
    found = [batch.columns.values.to_pylist() async for batch in world.reader.iter_from(TP, 1, 3)]
    assert found == [[b"a"], [b"b"]]


async def test_records_before_damage_are_read_and_the_damage_is_told_where_it_begins(world: World) -> None:
    for payload in ("a", "b", "c"):
        await world.append(payload)
    lost = (await world.control()).pending.entries[0].data_uri  # type: ignore[union-attr]
    await world.blobs.delete_many([lost])
    batches = await world.reader.read(TP, 1)
    assert [batch.columns.values.to_pylist() for batch in batches] == [[b"a"], [b"b"]]
    with pytest.raises(InconsistentReadState, match=lost):
        await world.reader.read(TP, 3)
