"""Compacted entries that are small are merged, and nothing that others do meanwhile loses a record."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from llog.batch import multi_batch
from llog.engines.object.collector import Collector, CollectorOptions, sweep_partition
from llog.engines.object.compaction.compactor import CompactionResult, Compactor, CompactorOptions
from llog.engines.object.compaction.merge import MergeLimits, choose_run, limits_of
from llog.engines.object.reader import EntrySpan
from llog.engines.object.repair.index import Proof, apply_repair, plan_repairs
from llog.engines.object.retention import trim
from llog.engines.object.snapshot import take_snapshot
from llog.engines.object.verify import verify
from llog.errors import InconsistentReadState
from llog.log.findings import ProblemKind
from llog.log.records import Compaction, CompactionCursor, CompactionState, IndexEntry, Kind, Topic, decode, encode
from tests.unit.world import TP, Crash, CrashAt, Faults, Stall, World

UNMERGED = CompactorOptions(merge_entries_min=1_000)
TWO = CompactorOptions(merge_entries_min=2, merge_entries_max=2, merge_growth=1)
ALL = CompactorOptions(merge_entries_min=2, merge_growth=1)
COMPACTED = Kind.COMPACTED


async def compacted(world: World, count: int = 3) -> list[str]:
    """Append as often, each time two records that become a compacted entry of their own."""
    payloads = []
    for number in range(count):
        payloads += [f"a{number}", f"b{number}"]
        await world.append(*payloads[-2:])
        await Compactor(world.log, UNMERGED).compact_once(TP, force=True)
    assert await world.shape() == [(2 * n + 1, 2 * n + 2, COMPACTED) for n in range(count)]
    return payloads


async def breadcrumb(world: World) -> Compaction | None:
    found = await world.meta.get((await world.keys()).compaction)
    return None if found is None else decode(Compaction, found.value, found.key)


async def merge_from(world: World) -> int:
    found = await world.meta.get((await world.keys()).cursor)
    assert found is not None
    return decode(CompactionCursor, found.value, found.key).merge_from


async def stalled(
    world: World, operation: str, key_part: str, options: CompactorOptions
) -> tuple[Stall, asyncio.Task[CompactionResult]]:
    """A compactor that has stopped before its first such store call."""
    stall = Stall(lambda called, key: called == operation and key_part in key)
    task = asyncio.create_task(Compactor(world.process(stall), options).compact_once(TP))
    await stall.stalled.wait()
    return stall, task


async def test_eight_small_compacted_entries_become_one(world: World) -> None:
    payloads = await compacted(world, 7)
    assert (await Compactor(world.log).compact_once(TP)).merges == 0, "seven are too few"
    payloads += ["c", "d"]
    await world.append("c", "d")
    result = await Compactor(world.log).compact_once(TP, force=True)
    assert (result.end_offset, result.merges, result.merged_entries) == (16, 1, 8)
    assert await world.shape() == [(1, 16, COMPACTED)]
    assert (await world.payloads(), await world.cursor()) == (payloads, 17)
    assert (await verify(world.log, TP)).healthy
    await world.check_index()


async def test_the_blobs_of_merged_entries_are_collected(world: World) -> None:
    payloads = await compacted(world)
    await Compactor(world.log, ALL).compact_once(TP)
    world.runtime.now += 10_000
    await Collector(world.log, CollectorOptions(grace_ms=1000)).collect_once()
    [(_, _, entry)] = await world.index()
    assert [name for name in world.blob_server.names if "compacted" in name] == [entry.data_uri]
    assert await world.payloads() == payloads


async def test_a_merge_keeps_batches_that_are_large_enough_apart(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multi_batch, "PART_BYTES", 300)
    for number in range(8):
        await world.append(*[f"{number}-{each}" * 50 for each in range(2)])
        if number % 4 == 3:
            await Compactor(world.log, UNMERGED).compact_once(TP, force=True)
    before = [part for span in await world.index() for part in span.entry.parts]
    assert len(before) == 8
    payloads = await world.payloads()
    await Compactor(world.log, ALL).compact_once(TP)
    [(_, _, entry)] = await world.index()
    assert list(entry.parts) == before
    assert await world.payloads() == payloads
    assert (await verify(world.log, TP)).healthy


async def test_a_pass_over_partitions_merges_where_it_has_compacted(world: World) -> None:
    payloads = await compacted(world)
    [result] = await Compactor(world.log, ALL).compact_many([TP])
    assert result.merges == 0, "nothing was compacted, so nothing is looked for"
    [result] = await Compactor(world.log, TWO).compact_many([TP], merge_all=True)
    assert (result.end_offset, result.merges) == (None, 2)
    await world.append("c")
    await world.append("d")
    await world.append("e")
    [result] = await Compactor(world.log, ALL).compact_many([TP])
    assert (result.end_offset, result.merges, result.merged_entries) == (8, 1, 2)
    assert await world.payloads() == [*payloads, "c", "d", "e"]


@pytest.mark.parametrize("done", [False, True])
async def test_a_merge_that_dies_at_any_store_call_is_finished_by_another(done: bool) -> None:
    faults, whole = Faults(), World()
    await whole.catalog.create(TP.topic)
    await compacted(whole)
    await Compactor(whole.process(faults), ALL).compact_once(TP)
    states = set()
    for number in range(1, len(faults.calls) + 1):
        world = World()
        await world.catalog.create(TP.topic)
        payloads = await compacted(world)
        with pytest.raises(Crash):
            await Compactor(world.process(CrashAt(number, done=done)), ALL).compact_once(TP)
        assert await world.payloads() == payloads
        left = await breadcrumb(world)
        states.add(left and left.state)
        await Compactor(world.log, ALL).compact_once(TP)
        assert await world.payloads() == payloads
        assert (await world.shape(), await world.cursor()) == ([(1, 6, COMPACTED)], 7)
        await world.check_index()
    assert states == {None, *CompactionState} - {CompactionState.UPDATING_CURSOR}


async def test_a_merge_that_another_overtook_is_given_up(world: World) -> None:
    payloads = await compacted(world)
    keys = await world.keys()
    # One compactor has chosen the last two entries, and another merges the first two before it begins.
    await world.meta.put(keys.cursor, encode(CompactionCursor(7, merge_from=3)))
    stall, late = await stalled(world, "put", "meta/compaction", TWO)
    await world.meta.put(keys.cursor, encode(CompactionCursor(7)))
    short = msgspec.structs.replace(TWO, merge_offsets_max=4)
    assert (await Compactor(world.log, short).compact_once(TP)).merged_entries == 2
    assert await world.shape() == [(1, 4, COMPACTED), (5, 6, COMPACTED)]
    stall.go.set()
    assert (await late).merges == 0
    assert await world.payloads() == payloads
    await world.check_index()


@pytest.mark.parametrize(
    ("operation", "key_part"),
    [
        ("put", "meta/compaction"),
        ("put blob", "compacted"),
        ("put", "/index/"),
        ("delete_range", "/index/"),
        ("delete", "meta/compaction"),
    ],
)
async def test_a_zombie_merge_changes_nothing_after_others_went_on(world: World, operation: str, key_part: str) -> None:
    payloads = await compacted(world)
    stall, zombie = await stalled(world, operation, key_part, TWO)
    for _ in range(3):
        await Compactor(world.log, ALL).compact_once(TP)
    payloads += ["c", "d"]
    await world.append("c", "d")
    await Compactor(world.log, ALL).compact_once(TP, force=True)
    before = await world.shape(), await world.cursor()
    assert before == ([(1, 8, COMPACTED)], 9)
    stall.go.set()
    await zombie
    assert (await world.shape(), await world.cursor()) == before
    assert await world.payloads() == payloads
    await world.check_index()


async def test_a_merge_whose_run_was_trimmed_is_given_up(world: World) -> None:
    await compacted(world)
    stall, late = await stalled(world, "put blob", "compacted", ALL)
    await trim(world.log, TP, 7)
    await Compactor(world.log, ALL).compact_once(TP)
    stall.go.set()
    await late
    assert (await world.shape(), await breadcrumb(world)) == ([], None)


async def test_a_damaged_entry_is_not_merged_and_the_cursor_stays(world: World) -> None:
    await compacted(world)
    world.damage((await world.index())[1].entry.data_uri)
    result = await Compactor(world.log, ALL).compact_once(TP)
    assert result.merges == 0
    assert "offsets 3 to 4 of orders/0" in result.damaged[0]
    assert (len(await world.index()), await world.cursor(), await breadcrumb(world)) == (3, 7, None)


async def test_a_merge_waits_for_the_repair_of_its_highest_entry(world: World) -> None:
    payloads = await compacted(world)
    keys = await world.keys()
    stall, task = await stalled(world, "put", "/index/", ALL)
    await world.meta.delete(keys.entry(6))
    stall.go.set()
    with pytest.raises(InconsistentReadState, match="has lost the entry that ends at 6, which was being merged"):
        await task
    [plan] = await plan_repairs(world.log, [TP])
    assert [(new.start_offset, new.end_offset, new.proof) for new in plan.entries] == [(1, 6, Proof.BREADCRUMB)]
    assert await apply_repair(world.log, plan) == 1
    await Compactor(world.log, ALL).compact_once(TP)
    assert await world.shape() == [(1, 6, COMPACTED)]
    assert await world.payloads() == payloads
    await world.check_index()


async def test_a_repair_that_comes_after_a_merge_takes_its_entry_back(world: World) -> None:
    payloads = await compacted(world)
    keys = await world.keys()
    lost = await world.meta.get(keys.entry(4))
    assert lost is not None
    await world.meta.delete(keys.entry(4))
    [late] = await plan_repairs(world.log, [TP])
    [plan] = await plan_repairs(world.log, [TP])
    assert await apply_repair(world.log, plan) == 1
    await Compactor(world.log, ALL).compact_once(TP)
    assert await apply_repair(world.log, late) == 0
    assert await world.shape() == [(1, 6, COMPACTED)]
    assert await world.payloads() == payloads


async def leave_inside(world: World, end_offset: int) -> None:
    """Put an entry that was merged long ago back, as a repair that died before it looked again would."""
    before = await world.meta.get((await world.keys()).entry(end_offset))
    assert before is not None
    await Compactor(world.log, ALL).compact_once(TP)
    world.runtime.now += 10_000
    await Collector(world.log, CollectorOptions(grace_ms=1000)).collect_once()
    await world.meta.put(before.key, before.value)
    assert decode(IndexEntry, before.value, before.key).data_uri not in world.blob_server.blobs


async def test_an_entry_inside_a_merged_one_disturbs_nobody_and_is_swept(world: World) -> None:
    payloads = await compacted(world, 4)
    await leave_inside(world, 4)
    assert await world.payloads() == payloads
    for stop in range(2, 10):
        extents = list(await take_snapshot(world.log, TP, 1, stop))
        assert [(each.start_offset, each.end_offset) for each in extents] == [(1, 8)]
    report = await verify(world.log, TP)
    assert {problem.kind for problem in report.problems} == {ProblemKind.STALE_ENTRY}
    await world.append("x", "y")
    await Compactor(world.log, ALL).compact_once(TP, force=True)
    assert await world.payloads() == [*payloads, "x", "y"]
    await sweep_partition(world.log, await world.keys())
    await Compactor(world.log, ALL).compact_once(TP)
    assert await world.shape() == [(1, 10, COMPACTED)]
    assert await world.payloads() == [*payloads, "x", "y"]


async def test_an_entry_is_not_merged_while_another_one_covers_it(world: World) -> None:
    payloads = await compacted(world, 4)
    keys = await world.keys()
    third = await world.meta.get(keys.entry(6))
    assert third is not None
    await world.meta.put(keys.cursor, encode(CompactionCursor(9, merge_from=5)))
    await Compactor(world.log, TWO).compact_once(TP)
    assert await world.shape() == [(1, 2, COMPACTED), (3, 4, COMPACTED), (5, 8, COMPACTED)]
    # The blob is still there, and the entry follows the second one.
    await world.meta.put(keys.entry(6), third.value)
    await world.meta.put(keys.cursor, encode(CompactionCursor(9, merge_from=3)))
    assert (await Compactor(world.log, TWO).compact_once(TP)).merges == 0
    await sweep_partition(world.log, keys)
    await world.meta.put(keys.cursor, encode(CompactionCursor(9)))
    await Compactor(world.log, ALL).compact_once(TP)
    assert await world.shape() == [(1, 8, COMPACTED)]
    assert await world.payloads() == payloads


async def test_a_lost_merged_entry_comes_back_over_what_a_stalled_repair_left_inside_it(world: World) -> None:
    payloads = await compacted(world)
    await leave_inside(world, 4)
    await world.meta.delete((await world.keys()).entry(6))
    [plan] = await plan_repairs(world.log, [TP])
    assert [(new.start_offset, new.end_offset, new.proof) for new in plan.entries] == [(1, 6, Proof.COMPACTED)]
    assert await apply_repair(world.log, plan) == 1
    assert await world.payloads() == payloads


async def test_merges_do_not_look_again_at_what_is_large_enough(world: World) -> None:
    await compacted(world, 4)
    size = (await world.index())[0].entry.byte_length
    options = msgspec.structs.replace(TWO, max_bytes=2 * size)
    assert (await Compactor(world.log, options).compact_once(TP)).merges == 2
    assert await world.shape() == [(1, 4, COMPACTED), (5, 8, COMPACTED)]
    assert await merge_from(world) == 5, "the last entry may still get neighbours"
    await world.append("c")
    await Compactor(world.log, UNMERGED).compact_once(TP, force=True)
    assert (await world.cursor(), await merge_from(world)) == (10, 5)


# --- what is worth merging

ANY = MergeLimits(entries_min=8, entries_max=1000, growth=4, bytes_max=1000, offsets_max=10**9, append_ms_max=None)


def spans(*sizes: int, every_ms: int = 1) -> list[EntrySpan]:
    """Compacted entries of one record each."""
    return [
        EntrySpan(
            number,
            number,
            IndexEntry(
                kind=COMPACTED,
                data_uri="x",
                byte_length=size,
                msg_count=1,
                encoding="",
                append_ms=number * every_ms,
                timestamp_min=0,
                timestamp_max=0,
            ),
        )
        for number, size in enumerate(sizes, 1)
    ]


def chosen(entries: list[EntrySpan], limits: MergeLimits = ANY) -> tuple[int, int] | None:
    run = choose_run(entries, limits).run
    return (run[0].start_offset, run[-1].end_offset) if run else None


def test_a_run_is_much_larger_than_its_largest_entry() -> None:
    assert chosen(spans(*[10] * 7)) is None
    assert chosen(spans(*[10] * 8)) == (1, 8)
    assert chosen(spans(80, *[10] * 7)) is None
    assert chosen(spans(80, *[10] * 8)) == (2, 9), "the large entry is not written again for a tenth of its size"


def test_a_run_is_no_larger_than_a_blob_should_be() -> None:
    assert chosen(spans(*[100] * 20)) == (1, 10)
    assert chosen(spans(*[300] * 20)) is None


def test_a_run_has_no_gaps_and_no_slices() -> None:
    found = spans(*[10] * 20)
    del found[7]
    assert chosen(found) == (9, 20)
    found = spans(*[10] * 20)
    found[7] = found[7]._replace(entry=msgspec.structs.replace(found[7].entry, kind=Kind.WAL))
    assert chosen(found) == (9, 20)


def test_a_merged_entry_holds_a_tenth_of_what_a_topic_keeps() -> None:
    def limits(**retention: int) -> MergeLimits:
        topic = Topic(name="t", partitions=1, directory="t~1", **retention)  # type: ignore[arg-type]
        return limits_of(CompactorOptions(), topic)

    assert limits().append_ms_max is None
    assert limits(retention_ms=1000).append_ms_max == 100
    assert limits(retention_bytes=1000).bytes_max == 100
    assert limits().bytes_max == limits(retention_bytes=1 << 40).bytes_max == CompactorOptions().max_bytes
    assert chosen(spans(*[1] * 30, every_ms=10), ANY._replace(append_ms_max=100)) == (1, 11)


def test_entries_at_the_beginning_that_can_begin_no_run_are_not_looked_at_again() -> None:
    assert choose_run([], ANY).merge_from == 0
    assert choose_run(spans(900, 300, 10, 10), ANY).merge_from == 3, "a run with 300 bytes would be too large"
    assert choose_run(spans(900, 200, 10, 10), ANY).merge_from == 2
    assert choose_run(spans(10, 10), ANY).merge_from == 1


@pytest.mark.parametrize("retention_days", [None, 7])
def test_a_month_of_an_append_a_minute_is_a_few_blobs(retention_days: int | None) -> None:
    # The appends of about ten minutes are compacted at a time, of 1 KiB each.
    topic = Topic(name="t", partitions=1, directory="t~1", retention_ms=retention_days and retention_days * 86_400_000)
    limits = limits_of(CompactorOptions(), topic)
    index: list[EntrySpan] = []
    written = appended = 0
    [model] = spans(10 << 10)
    for number in range(30 * 144):
        start, append_ms = 10 * number + 1, 600_000 * number
        entry = msgspec.structs.replace(model.entry, append_ms=append_ms, msg_count=10)
        appended += entry.byte_length
        index.append(EntrySpan(start, start + 9, entry))
        if topic.retention_ms is not None:
            while index[0].entry.append_ms < append_ms - topic.retention_ms:
                del index[0]
        while run := choose_run(index, limits).run:
            first = index.index(run[0])
            size = sum(span.entry.byte_length for span in run)
            joined = msgspec.structs.replace(run[-1].entry, byte_length=size)
            written += size
            index[first : first + len(run)] = [EntrySpan(run[0].start_offset, run[-1].end_offset, joined)]
    assert len(index) <= 50
    assert written <= 6 * appended, "a record is written again a few times at most"
