from __future__ import annotations

import asyncio

import pytest

from llog.engines.object import retention
from llog.engines.object.compaction.compactor import Compactor
from llog.engines.object.pending import pending_puts
from llog.engines.object.retention import retain, trim
from llog.engines.object.writer import Writer
from llog.engines.upkeep import retain_all
from llog.errors import InvalidArgument, OffsetOutOfRange, PartitionNotInitialized
from llog.log.engine import AppendGroup, RetentionResult
from llog.log.records import Kind, LogState
from llog.model import Record, TimestampType, TopicPartition
from tests.unit.world import TP, Interleaved, Stall, World

APPENDED = TopicPartition("appended", 0)


async def by_age(world: World, retention_ms: int, tp: TopicPartition = TP) -> RetentionResult:
    return await retain(world.log, tp, retention_ms=retention_ms, retention_bytes=None, now_ms=world.runtime.now_ms())


async def by_bytes(world: World, retention_bytes: int) -> RetentionResult:
    return await retain(world.log, TP, retention_ms=None, retention_bytes=retention_bytes, now_ms=0)


async def append_hourly(world: World, count: int, tp: TopicPartition = TP) -> None:
    for number in range(count):
        await world.append(f"a{number}", f"b{number}", tp=tp)
        world.runtime.now += 1000


async def test_what_is_older_than_the_age_goes_and_the_rest_stays(world: World) -> None:
    await append_hourly(world, 5)
    result = await by_age(world, 3000)
    assert (result.old_start, result.new_start, result.records) == (1, 5, 4)
    assert result.bytes > 0
    assert await world.payloads() == ["a2", "b2", "a3", "b3", "a4", "b4"]
    assert [start for start, _, _ in await world.shape()] == [5, 7]
    assert (await by_age(world, 3000)).records == 0


async def test_everything_may_go_the_pending_append_included(world: World) -> None:
    await append_hourly(world, 3)
    assert (await by_age(world, 0)).new_start == 7
    assert await world.reader.bounds(TP) == (7, 7)
    assert (await world.control()).pending is None
    assert await world.shape() == []
    assert (await world.append("next")).start_offset == 7
    assert await world.payloads() == ["next"]


async def test_age_is_by_create_or_append_time_as_the_topic_says(world: World) -> None:
    await world.catalog.create(APPENDED.topic, 1, timestamp_type=TimestampType.APPEND)
    old = [Record(payload=b"x", timestamp=world.runtime.now - 1_000_000)]
    for tp in (TP, APPENDED):
        await world.writer.append([AppendGroup(topic=tp.topic, partition=0, records=old)])
    assert (await by_age(world, 1000)).new_start == 2
    assert (await by_age(world, 1000, APPENDED)).new_start == 1


async def test_a_late_record_lives_as_long_as_those_before_it(world: World) -> None:
    await world.append("new")
    late = [Record(payload=b"late", timestamp=1)]
    await world.writer.append([AppendGroup(topic=TP.topic, partition=0, records=late)])
    assert (await by_age(world, 1000)).new_start == 1


async def test_by_bytes_the_piece_that_crosses_the_limit_is_kept(world: World) -> None:
    await append_hourly(world, 5)
    size = (await world.index())[0].entry.byte_length
    assert (await by_bytes(world, 5 * size)).new_start == 1
    assert (await by_bytes(world, 4 * size + 1)).new_start == 1
    result = await by_bytes(world, 4 * size)
    assert (result.new_start, result.bytes) == (3, size)
    assert (await by_bytes(world, 2 * size - 1)).new_start == 7
    assert (await by_bytes(world, 1)).new_start == 9
    assert (await by_bytes(world, 0)).new_start == 11


async def test_a_leftover_inside_a_compacted_range_does_not_count_twice(world: World) -> None:
    await append_hourly(world, 2)
    pending = (await world.control()).pending
    await append_hourly(world, 2)
    await Compactor(world.log).compact_once(TP, force=True)
    keys = await world.keys()
    await world.meta.put_many(pending_puts(keys, pending))
    assert await world.shape() == [(3, 4, Kind.WAL), (1, 8, Kind.COMPACTED)]
    await world.append("c")
    compacted = (await world.index())[1].entry.byte_length
    newest = (await world.control()).pending
    assert newest is not None
    kept = newest.entries[0].byte_length + compacted
    assert (await by_bytes(world, kept)).new_start == 1
    assert (await by_bytes(world, kept - compacted)).new_start == 9


async def test_a_long_index_is_walked_in_pages(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "_PAGE", 3)
    await append_hourly(world, 10)
    size = (await world.index())[0].entry.byte_length
    assert (await by_bytes(world, 4 * size)).new_start == 13
    assert (await by_age(world, 2000)).new_start == 17


async def test_trim_is_exact_at_once(world: World) -> None:
    await append_hourly(world, 3)
    result = await trim(world.log, TP, 4)
    assert (result.old_start, result.new_start, result.records) == (1, 4, 3)
    assert await world.reader.bounds(TP) == (4, 7)
    assert await world.payloads() == ["b1", "a2", "b2"]
    with pytest.raises(OffsetOutOfRange) as refused:
        await world.reader.read(TP, 3)
    assert (refused.value.log_start_offset, refused.value.next_offset) == (4, 7)
    assert (await trim(world.log, TP, 2)).new_start == 4
    assert (await trim(world.log, TP, 7)).new_start == 7
    with pytest.raises(OffsetOutOfRange):
        await trim(world.log, TP, 8)
    with pytest.raises(InvalidArgument):
        await trim(world.log, TP, 0)


async def test_the_log_start_never_goes_back(world: World) -> None:
    await append_hourly(world, 4)
    stall = Stall(lambda operation, key: operation == "put")
    low = asyncio.create_task(trim(world.process(stall), TP, 3))
    await stall.stalled.wait()
    await trim(world.log, TP, 6)
    stall.go.set()
    assert (await low).new_start == 6
    assert (await world.reader.bounds(TP)).log_start_offset == 6


async def test_an_interrupted_trim_is_finished_by_the_next(world: World) -> None:
    await append_hourly(world, 4)
    await world.change_control(log_start_offset=5)
    assert (await trim(world.log, TP, 1)).records == 0
    assert [start for start, _, _ in await world.shape()] == [5]


async def test_a_topic_created_again_during_retention_keeps_its_records(world: World) -> None:
    await append_hourly(world, 4)
    stall = Stall(lambda operation, key: operation == "put")
    trimming = asyncio.create_task(trim(world.process(stall), TP, 6))
    await stall.stalled.wait()
    await world.catalog.delete(TP.topic)
    await world.catalog.create(TP.topic, 1)
    world.writer = Writer(world.log)
    await append_hourly(world, 4)
    stall.go.set()
    with pytest.raises(PartitionNotInitialized):
        await trimming
    assert await world.reader.bounds(TP) == (1, 9)


async def test_negative_limits_are_refused(world: World) -> None:
    with pytest.raises(InvalidArgument, match="retention_ms"):
        await by_age(world, -1)
    with pytest.raises(InvalidArgument, match="retention_bytes"):
        await by_bytes(world, -1)


async def test_each_topic_is_trimmed_by_its_own_settings_and_damage_stops_no_other(world: World) -> None:
    short = TopicPartition("short", 0)
    await world.catalog.create(short.topic, 2, retention_ms=1000)
    for tp in (TP, short, TopicPartition("short", 1)):
        await append_hourly(world, 1, tp)
    world.runtime.now += 10_000
    await world.meta.put((await world.keys(short)).control, b"damaged")
    results = await retain_all(world.log, world.writer)
    assert set(results) == {short, TopicPartition("short", 1)}
    assert not isinstance(results[short], RetentionResult)
    assert await world.payloads() == ["a0", "b0"]
    assert await world.payloads(TopicPartition("short", 1)) == []


async def test_a_fenced_partition_is_still_trimmed_and_a_deleted_one_is_not(world: World) -> None:
    await append_hourly(world, 1)
    await world.change_control(log_state=LogState.FENCED)
    assert (await by_age(world, 0)).new_start == 3
    await world.change_control(log_state=LogState.DELETED)
    with pytest.raises(PartitionNotInitialized):
        await by_age(world, 0)


@pytest.mark.parametrize("seed", range(10))
async def test_trimming_amid_appends_and_compaction_loses_nothing_above_the_start(world: World, seed: int) -> None:
    writer = Writer(world.process(Interleaved(seed)))
    compactor = Compactor(world.process(Interleaved(seed + 100)))
    trimmer = world.process(Interleaved(seed + 200))

    async def write() -> None:
        for number in range(20):
            await world.append(f"a{number + 1}", writer=writer)

    async def compact() -> None:
        for _ in range(5):
            await compactor.compact_once(TP, force=True)

    async def shorten() -> None:
        for _ in range(10):
            bounds = await world.reader.bounds(TP)
            await trim(trimmer, TP, (bounds.log_start_offset + bounds.next_offset) // 2)

    await asyncio.gather(write(), compact(), shorten())
    start, following = await world.reader.bounds(TP)
    assert following == 21
    assert await world.payloads() == [f"a{offset}" for offset in range(start, following)]
