"""Small appends are inline: readable by every reader, bounded, and moved into blobs in the end."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from llog.batch.columns import columns_of, stamp
from llog.batch.format import Codec, encode
from llog.batch.format import decode as decode_batch
from llog.engines.object.collector import Collector, CollectorOptions
from llog.engines.object.compaction.compactor import Compactor, CompactorOptions
from llog.engines.object.entry_bytes import read_bytes
from llog.engines.object.reader import decode_range
from llog.engines.object.repair.index import apply_repair, plan_repairs
from llog.engines.object.retention import retain, trim
from llog.engines.object.snapshot import take_snapshot
from llog.engines.object.spill import spill_inline
from llog.engines.object.verify import verify
from llog.engines.object.writer import Writer
from llog.errors import CorruptBatch, OutcomeUnknown
from llog.log.engine import AppendGroup, WriterOptions
from llog.log.findings import ProblemKind
from llog.log.inline import AppendCounts, InlineLimits, batch_bytes_max, from_inline, inline_bytes, is_inline, to_inline
from llog.log.keys import COMPACTED_SHARED, LOG_FORMAT, WAL
from llog.log.log import check_format
from llog.log.pins import pin
from llog.log.records import Kind, LogFormat, decode
from llog.log.records import encode as encode_record
from llog.model import Record, TopicPartition
from tests.unit.world import TP, Crash, CrashAt, Faults, LostAnswers, Stall, World

LIMITS = InlineLimits(group_bytes_max=1000, flush_bytes_max=1500, partition_bytes_max=2000)
OTHER, THIRD = TopicPartition(TP.topic, 1), TopicPartition(TP.topic, 2)
IDLE_MS = 60_000


def inline_writer(world: World, limits: InlineLimits = LIMITS, counts: AppendCounts | None = None) -> Writer:
    return Writer(world.log, WriterOptions(inline=limits, counts=counts))


def blobs(world: World) -> list[str]:
    return [name for name in world.blob_server.names if name.startswith("llog/")]


async def test_a_small_append_puts_no_blob_and_is_read_from_pending_and_from_its_entry(world: World) -> None:
    writer = inline_writer(world)
    await world.append("a", "b", writer=writer)
    assert await world.payloads() == ["a", "b"]
    await world.append("c", writer=writer)
    assert await world.payloads() == ["a", "b", "c"]
    assert blobs(world) == []
    assert [is_inline(span.entry.data_uri) for span in await world.index()] == [True]
    assert await world.reader.offset_for_time(TP, world.runtime.now) == 1
    assert (await verify(world.log, TP)).healthy


async def test_a_large_group_takes_the_whole_call_into_one_blob(world: World) -> None:
    groups = [
        AppendGroup(topic=TP.topic, partition=0, records=[Record(payload=b"small")]),
        AppendGroup(topic=TP.topic, partition=1, records=[Record(payload=b"x" * 2000)]),
    ]
    await inline_writer(world).append(groups)
    assert len(blobs(world)) == 1
    assert not inline_bytes(await world.control())
    assert await world.payloads() == ["small"]


async def test_many_small_groups_that_exceed_a_flush_go_into_a_blob(world: World) -> None:
    groups = [
        AppendGroup(topic=TP.topic, partition=partition, records=[Record(payload=b"x" * 500)]) for partition in range(3)
    ]
    await inline_writer(world).append(groups)
    assert len(blobs(world)) == 1


async def test_a_full_partition_uses_blobs_until_compaction_has_emptied_it(world: World) -> None:
    counts = AppendCounts()
    writer = inline_writer(world, counts=counts)
    for number in range(12):
        await world.append(str(number) * 200, writer=writer)
    control = await world.control()
    assert control.inline_full
    assert 0 < inline_bytes(control) <= LIMITS.partition_bytes_max
    assert (counts.inline, counts.blob, counts.full) == (counts.inline, 12 - counts.inline, 12 - counts.inline)
    assert counts.inline == sum(is_inline(span.entry.data_uri) for span in await world.index())
    assert counts.inline_bytes == control.inline_total

    compactor = Compactor(world.log, CompactorOptions(max_offsets=3))
    await compactor.compact_once(TP)
    assert 0 < inline_bytes(await world.control()) < control.inline_total
    await world.append("not yet", writer=writer)
    assert not is_inline((await world.control()).pending.entries[0].data_uri)  # type: ignore[union-attr]

    while (await compactor.compact_once(TP)).end_offset is not None:
        pass
    assert inline_bytes(await world.control()) == 0
    await world.append("one more, by the record that the writer knew", writer=writer)
    await world.append("again", writer=writer)
    control = await world.control()
    assert control.pending is not None
    assert is_inline(control.pending.entries[0].data_uri)
    assert not control.inline_full
    assert (await verify(world.log, TP)).healthy


async def test_a_writer_that_lost_its_cas_judges_the_partition_again(world: World) -> None:
    stall = Stall(lambda operation, key: operation == "put_many" and key.endswith("control"))
    late = Writer(world.process(stall), WriterOptions(inline=LIMITS))
    task = asyncio.create_task(world.append("late" * 50, writer=late))
    await stall.stalled.wait()
    writer = inline_writer(world)
    while not (await world.control()).inline_full:
        await world.append("x" * 300, writer=writer)
    stall.go.set()
    await task
    control = await world.control()
    assert inline_bytes(control) <= LIMITS.partition_bytes_max
    assert control.pending is not None
    assert not is_inline(control.pending.entries[0].data_uri)
    assert (await world.payloads())[-1] == "late" * 50


@pytest.mark.parametrize("done", [False, True])
async def test_an_inline_append_whose_answer_was_lost_appears_once(world: World, done: bool) -> None:
    faults = LostAnswers(
        OutcomeUnknown("lost"), lambda operation, key: operation == "put_many" and key.endswith("control"), done=done
    )
    await world.append("once", writer=Writer(world.process(faults), WriterOptions(inline=LIMITS)))
    assert await world.payloads() == ["once"]


async def test_compaction_turns_inline_entries_into_a_blob(world: World) -> None:
    writer = inline_writer(world)
    for name in "abc":
        await world.append(name, writer=writer)
    await Compactor(world.log).compact_once(TP, force=True)
    assert await world.shape() == [(1, 3, Kind.COMPACTED)]
    assert len(blobs(world)) == 1
    assert inline_bytes(await world.control()) == 0
    assert await world.payloads() == ["a", "b", "c"]
    await world.check_index()


@pytest.mark.parametrize("done", [False, True])
async def test_a_compaction_of_inline_entries_that_is_resumed_counts_once(done: bool) -> None:
    number, is_over = 0, False
    while not is_over:
        number += 1
        world = World()
        await world.catalog.create(TP.topic, 1)
        writer = inline_writer(world)
        for name in "abcd":
            await world.append(name, writer=writer)
        try:
            options = CompactorOptions(max_offsets=2)
            await Compactor(world.process(CrashAt(number, done=done)), options).compact_once(TP)
            is_over = True
        except Crash:
            pass
        await Compactor(world.log).compact_once(TP)
        control = await world.control()
        left = sum(s.entry.byte_length for s in await world.index() if is_inline(s.entry.data_uri))
        assert control.pending is not None
        newest = control.pending.entries[0]
        if await world.meta.get((await world.keys()).entry(4)) is None:
            left += newest.byte_length
        assert inline_bytes(control) == left
        assert await world.payloads() == ["a", "b", "c", "d"]


async def test_an_idle_inline_append_does_not_stay_in_the_metadata_store(world: World) -> None:
    await world.append("alone", writer=inline_writer(world))
    compactor = Compactor(world.log, CompactorOptions(idle_ms=IDLE_MS))
    world.runtime.now += IDLE_MS - 1
    assert (await compactor.compact_once(TP)).end_offset is None
    world.runtime.now += 1
    assert (await compactor.compact_once(TP)).end_offset == 1
    assert await world.shape() == [(1, 1, Kind.COMPACTED)]
    control = await world.control()
    assert control.pending is None
    assert inline_bytes(control) == 0
    assert await world.payloads() == ["alone"]


async def test_inline_records_linger_unless_they_are_many_bytes(world: World) -> None:
    options = CompactorOptions(linger_ms=10 * IDLE_MS, idle_ms=IDLE_MS, linger_inline_bytes_max=150)
    compactor = Compactor(world.log, options)
    await world.append("alone", writer=inline_writer(world))
    world.runtime.now += IDLE_MS
    assert (await compactor.compact_once(TP)).end_offset is None
    world.runtime.now += 9 * IDLE_MS
    assert (await compactor.compact_once(TP)).end_offset == 1
    for name in "abc":
        await world.append(name, writer=inline_writer(world))
    assert (await compactor.compact_once(TP)).end_offset is None
    for name in "de":
        await world.append(name, writer=inline_writer(world))
    assert (await compactor.compact_once(TP)).end_offset == 5


async def test_retention_deletes_inline_records_with_their_entries(world: World) -> None:
    writer = inline_writer(world)
    for name in "abc":
        await world.append(name, writer=writer)
    await trim(world.log, TP, 2)
    control = await world.control()
    assert control.inline_compacted == control.inline_total // 3
    await retain(world.log, TP, retention_ms=0, retention_bytes=None, now_ms=world.runtime.now + 1)
    assert inline_bytes(await world.control()) == 0
    assert await world.index() == []
    assert await world.payloads() == []


async def test_the_collector_meets_no_reference_in_an_inline_entry(world: World) -> None:
    writer = inline_writer(world)
    await world.append("a", writer=writer)
    await world.append("b", writer=writer)
    await world.append("x" * 3000, writer=writer)
    result = await Collector(world.log, CollectorOptions(grace_ms=0)).collect_once()
    assert result.deleted == 0
    assert await world.payloads() == ["a", "b", "x" * 3000]


async def test_a_snapshot_carries_inline_records_or_leads_to_their_copies(world: World) -> None:
    writer = inline_writer(world)
    for name in ("a", "b", "x" * 3000, "c"):
        await world.append(name, writer=writer)
    pin_id = await pin(world.log, "test")
    snapshot = await take_snapshot(world.log, TP, 1, 5)
    assert [is_inline(extent.data_uri) for extent in snapshot] == [True, True, False, True]
    await spill_inline(world.log, [(snapshot, (await world.keys()).directory)])
    assert snapshot.inline_bytes == 0
    await trim(world.log, TP, 5)
    world.runtime.now += 50_000
    await Collector(world.log, CollectorOptions(grace_ms=0)).collect_once()
    found = []
    for extent in snapshot:
        data = await read_bytes(world.log, extent)
        columns = decode_range(TP, extent.start_offset, extent.end_offset, extent, data)
        found += columns.values.to_pylist()
    assert found == [b"a", b"b", b"x" * 3000, b"c"]
    await world.meta.delete(f"llog/pins/{pin_id}")
    await Collector(world.log, CollectorOptions(grace_ms=0)).collect_once()
    assert not [name for name in blobs(world) if name.startswith(WAL)]


async def test_a_lost_inline_entry_is_not_replaced_by_a_record_that_fits(world: World) -> None:
    writer = inline_writer(world)
    for name in "abc":
        await world.append(name, writer=writer)
    # An orphan of the same shape: a blob whose writer died before its commit.
    dying = Writer(world.process(CrashAt(3, done=True)))
    with pytest.raises(Crash):
        await world.append("z", writer=dying)
    assert len(blobs(world)) == 1
    await world.meta.delete((await world.keys()).entry(2))
    [plan] = await plan_repairs(world.log, [TP])
    assert plan.entries == ()
    assert "may have held their records themselves" in plan.open_gaps[0].reason


async def test_verify_reports_damaged_inline_bytes_and_a_total_that_is_too_low(world: World) -> None:
    writer = inline_writer(world)
    for name in "abc":
        await world.append(name, writer=writer)
    key = (await world.keys()).entry(2)
    [_, second] = await world.index()
    batch = bytearray(from_inline(second.entry.data_uri))
    batch[-1] ^= 1
    changed = msgspec.structs.replace(second.entry, data_uri=to_inline(bytes(batch)), inline_total=3)
    await world.meta.put(key, encode_record(changed))
    report = await verify(world.log, TP)
    assert {problem.kind for problem in report.problems} == {ProblemKind.CORRUPT, ProblemKind.INLINE_TOTAL}
    with pytest.raises(CorruptBatch, match="the index entry itself"):
        await world.reader.read(TP, 2)


async def test_the_first_inline_append_raises_the_format_of_the_log(world: World) -> None:
    await check_format(world.log)
    await world.append("x")
    found = await world.meta.get(LOG_FORMAT)
    assert found is not None
    assert decode(LogFormat, found.value, found.key).number == 1
    await world.append("y", writer=inline_writer(world))
    found = await world.meta.get(LOG_FORMAT)
    assert found is not None
    assert decode(LogFormat, found.value, found.key) == LogFormat(number=2, needs="0.1.0")
    await check_format(world.log)


def test_damaged_base64_is_a_corrupt_batch() -> None:
    with pytest.raises(CorruptBatch):
        from_inline(to_inline(b"batch")[:-1] + "!")


@pytest.mark.parametrize("codec", list(Codec))
def test_a_batch_is_never_larger_than_the_size_by_which_it_is_judged(codec: Codec) -> None:
    for count in (1, 2, 7, 64):
        for size in (0, 1, 9, 100):
            records = [
                Record(payload=b"v" * size, key=b"k" * size, timestamp=n, headers=(("h", b"x" * size),))
                for n in range(count)
            ]
            columns = columns_of(records)
            stamped = columns._replace(append_runs=((count, 1),))
            assert sum(map(len, encode(stamped, codec))) <= batch_bytes_max(columns)


def test_inline_records_are_stored_as_the_documentation_says() -> None:
    batch = b"".join(encode(stamp(columns_of([Record(payload=b"hello")]), 1_700_000_000_000)))
    documented = "data:;base64,TExCMXeXRFQBAAAAAAAAAABo5c+LAQAAAGjlz4sBAAAAAAAABQAAAGhlbGxvAAAA"
    assert to_inline(batch) == documented
    assert documented in (Path(__file__).parents[4] / "docs/format.md").read_text()
    assert decode_batch(from_inline(documented)).values.to_pylist() == [b"hello"]


async def shared_compaction(world: World, faults: Faults | None = None) -> None:
    options = CompactorOptions(idle_ms=IDLE_MS)
    await Compactor(world.process(faults), options).compact_many([TP, OTHER, THIRD])


async def filled_idle_world() -> World:
    world = World()
    await world.catalog.create(TP.topic, 3)
    writer = inline_writer(world)
    for tp in (TP, OTHER, THIRD):
        await world.append(f"of {tp}", f"more of {tp}", tp=tp, writer=writer)
    world.runtime.now += IDLE_MS
    return world


async def check_moved(world: World) -> None:
    for tp in (TP, OTHER, THIRD):
        assert await world.payloads(tp) == [f"of {tp}", f"more of {tp}"]
        assert await world.shape(tp) == [(1, 2, Kind.COMPACTED)]
        assert inline_bytes(await world.control(tp)) == 0
        await world.check_index(tp)
        assert (await verify(world.log, tp)).healthy


async def test_idle_inline_records_of_many_partitions_move_together_into_one_blob() -> None:
    world = await filled_idle_world()
    await shared_compaction(world)
    assert [name.startswith(COMPACTED_SHARED) for name in blobs(world)] == [True]
    await check_moved(world)
    world.runtime.now += IDLE_MS
    await trim(world.log, TP, 3)
    await Collector(world.log, CollectorOptions(grace_ms=0)).collect_once()
    assert len(blobs(world)) == 1, "the other partitions are still in it"
    for tp in (OTHER, THIRD):
        await trim(world.log, tp, 3)
    await Collector(world.log, CollectorOptions(grace_ms=0)).collect_once()
    assert blobs(world) == []


@pytest.mark.parametrize("done", [False, True])
async def test_a_shared_compaction_that_dies_anywhere_is_finished_partition_by_partition(done: bool) -> None:
    number, is_over = 0, False
    while not is_over:
        number += 1
        world = await filled_idle_world()
        try:
            await shared_compaction(world, CrashAt(number, done=done))
            is_over = True
        except Crash:
            pass
        for tp in (THIRD, TP, OTHER):
            while (await Compactor(world.log, CompactorOptions(idle_ms=IDLE_MS)).compact_once(tp)).end_offset:
                pass
        await check_moved(world)


async def test_a_lost_entry_of_a_shared_blob_is_put_back() -> None:
    world = await filled_idle_world()
    await shared_compaction(world)
    [span] = await world.index(OTHER)
    await world.meta.delete((await world.keys(OTHER)).entry(2))
    world.runtime.now += 10 * 86_400_000
    await Collector(world.log, CollectorOptions(grace_ms=0)).collect_once()
    [plan] = await plan_repairs(world.log, [OTHER])
    await apply_repair(world.log, plan)
    [again] = await world.index(OTHER)
    assert (again.start_offset, again.end_offset, again.entry.data_uri) == (1, 2, span.entry.data_uri)
    assert await world.payloads(OTHER) == [f"of {OTHER}", f"more of {OTHER}"]
