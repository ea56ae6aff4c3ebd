"""Compaction under crashes, twins, zombies and lost answers: nothing is lost, and whoever comes next finishes it."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

import pytest

from llog.engines.object.collector import Collector, CollectorOptions
from llog.engines.object.compaction.compactor import CompactionResult, Compactor, CompactorOptions
from llog.engines.object.pending import pending_puts
from llog.engines.object.retention import trim
from llog.engines.object.writer import Writer
from llog.errors import LlogError, OutcomeUnknown, StoreUnavailable
from llog.log.keys import WAL
from llog.log.records import Compaction, CompactionState, Kind, decode
from llog.model import TopicPartition
from tests.unit.world import TP, Crash, CrashAt, Faults, Interleaved, LostAnswers, Stall, World

FEW = CompactorOptions(max_offsets=4)


async def filled(count: int = 6) -> tuple[World, list[str]]:
    world = World()
    await world.catalog.create(TP.topic, 4)
    payloads = [f"a{number}" for number in range(count)]
    for payload in payloads:
        await world.append(payload)
    return world, payloads


async def calls_of_a_compaction() -> int:
    world, _ = await filled()
    faults = Faults()
    await Compactor(world.process(faults)).compact_once(TP)
    return len(faults.calls)


async def breadcrumb(world: World) -> Compaction | None:
    key = (await world.keys()).compaction
    found = await world.meta.get(key)
    return None if found is None else decode(Compaction, found.value, key)


@pytest.mark.parametrize("done", [False, True])
async def test_a_compaction_that_dies_at_any_store_call_is_finished_by_another(done: bool) -> None:
    calls = await calls_of_a_compaction()
    assert calls > 10
    states = set()
    for number in range(1, calls + 1):
        world, payloads = await filled()
        with pytest.raises(Crash):
            await Compactor(world.process(CrashAt(number, done=done))).compact_once(TP)
        assert await world.payloads() == payloads
        left = await breadcrumb(world)
        states.add(left and left.state)
        await Compactor(world.process()).compact_once(TP)
        assert await world.payloads() == payloads
        assert await world.cursor() == 6
        assert await world.shape() == [(1, 5, Kind.COMPACTED), (6, 6, Kind.WAL)]
        await world.check_index()
        if left is not None:
            assert (await world.index())[0].entry.data_uri == left.blob
    assert states == {None, *CompactionState}


@pytest.mark.parametrize("done", [False, True])
async def test_a_pass_over_many_partitions_that_dies_at_any_store_call_is_finished_by_another(done: bool) -> None:
    tps = [TP, TopicPartition("orders", 1)]
    for number in range(1, 60):
        world, payloads = await filled(4)
        for payload in payloads:
            await world.append(payload, tp=tps[1])
        process = world.process(CrashAt(number, done=done))
        crashed = True
        try:
            await Compactor(process).compact_many(tps)
            crashed = False
        except Crash:
            await process.meta.close()  # its session ends, and its claims with it
        await Compactor(world.process()).compact_many(tps)
        for tp in tps:
            assert await world.payloads(tp) == payloads
            assert await world.cursor(tp) == 4
            await world.check_index(tp)
        if not crashed:
            return
    pytest.fail("the pass makes more store calls than this test disturbs")


@pytest.mark.parametrize("error", [OutcomeUnknown("lost"), StoreUnavailable("away")], ids=lambda error: error.code)
async def test_a_store_error_at_any_call_leaves_a_compaction_that_can_be_finished(error: LlogError) -> None:
    done = isinstance(error, OutcomeUnknown)
    for number in range(1, await calls_of_a_compaction() + 1):
        world, payloads = await filled()
        faults = LostAnswers(error, lambda operation, key: True, done=done, number=number)
        with suppress(type(error)):
            await Compactor(world.process(faults)).compact_once(TP)
        await Compactor(world.process()).compact_once(TP)
        assert await world.payloads() == payloads
        assert await world.cursor() == 6
        await world.check_index()


@pytest.mark.parametrize("compactors", [2, 3])
async def test_racing_compactors_lose_nothing(compactors: int) -> None:
    for seed in range(60):
        world, payloads = await filled(12)
        source = random.Random(seed)

        async def compact(seed: int, most: int, world: World = world) -> None:
            compactor = Compactor(world.process(Interleaved(seed)), CompactorOptions(max_offsets=most))
            for _ in range(4):
                await compactor.compact_once(TP)

        await asyncio.gather(*(compact(source.random().__hash__(), 2 + source.randrange(5)) for _ in range(compactors)))
        assert await world.payloads() == payloads
        while (await Compactor(world.log).compact_once(TP, force=True)).end_offset is not None:
            pass
        assert await world.cursor() == 13
        assert await world.payloads() == payloads
        await world.check_index()


async def test_compactors_race_writers_retention_collectors_and_crashes() -> None:
    for seed in range(40):
        world, payloads = await filled(6)
        source = random.Random(seed)
        acknowledged: dict[int, str] = dict(enumerate(payloads, 1))

        async def write(
            name: str, seed: int, world: World = world, acknowledged: dict[int, str] = acknowledged
        ) -> None:
            writer = Writer(world.process(Interleaved(seed)))
            for number in range(6):
                result = await world.append(f"{name}{number}", writer=writer)
                acknowledged[result.start_offset] = f"{name}{number}"

        async def compact(seed: int, world: World = world, source: random.Random = source) -> None:
            faults: Faults = Interleaved(seed, 6)
            for _ in range(5):
                if source.random() < 0.5:
                    faults = CrashAt(source.randrange(1, 25), done=source.random() < 0.5)
                try:
                    result = await Compactor(world.process(faults), FEW).compact_once(TP, force=source.random() < 0.3)
                    assert result.damaged == ()
                except Crash:
                    faults = Interleaved(seed, 6)

        async def retain(seed: int, world: World = world, source: random.Random = source) -> None:
            for before in (2, 5, 8):
                for _ in range(source.randrange(60)):
                    await asyncio.sleep(0)
                if (await world.reader.bounds(TP)).next_offset >= before:
                    await trim(world.process(Interleaved(seed)), TP, before)

        async def collect(seed: int, world: World = world) -> None:
            collector = Collector(world.process(Interleaved(seed)), CollectorOptions(grace_ms=0))
            for _ in range(6):
                world.runtime.now += 1
                await collector.collect_once()

        await asyncio.gather(
            *(write("w", seed), write("v", seed + 1), compact(seed), compact(seed + 7), retain(seed), collect(seed))
        )
        await world.append("end")
        acknowledged[(await world.reader.bounds(TP)).next_offset - 1] = "end"
        while (await Compactor(world.log).compact_once(TP, force=True)).end_offset is not None:
            pass
        start, stop = await world.reader.bounds(TP)
        assert stop == 20
        assert await world.payloads() == [acknowledged[offset] for offset in range(start, stop)]
        assert await world.cursor() == 20
        assert await breadcrumb(world) is None


async def died_at(operation: str, key_part: str) -> tuple[World, list[str], Compaction]:
    """A compaction that died right after its first such store call."""
    world, payloads = await filled()
    faults = Faults()
    await Compactor(world.process(faults), FEW).compact_once(TP)
    matching = [operation == done and key_part in key for done, key in faults.calls]
    world, payloads = await filled()
    with pytest.raises(Crash):
        await Compactor(world.process(CrashAt(matching.index(True) + 1, done=True)), FEW).compact_once(TP)
    left = await breadcrumb(world)
    assert left is not None
    return world, payloads, left


async def stalled(
    world: World, matches: str, key_part: str, max_offsets: int = 4
) -> tuple[Stall, asyncio.Task[CompactionResult]]:
    """A compactor that has stopped before its first such store call."""
    stall = Stall(lambda operation, key: operation == matches and key_part in key)
    options = CompactorOptions(max_offsets=max_offsets)
    task = asyncio.create_task(Compactor(world.process(stall), options).compact_once(TP))
    await stall.stalled.wait()
    return stall, task


@pytest.mark.parametrize(
    ("operation", "key_part"),
    [
        ("put", "meta/compaction"),
        ("get", "meta/compaction-cursor"),
        ("get blob", "wal-shared"),
        ("put blob", "compacted"),
        ("put", "/index/"),
        ("delete_range", "/index/"),
        ("put", "meta/compaction-cursor"),
        ("delete", "meta/compaction"),
    ],
)
async def test_a_zombie_compactor_changes_nothing_after_others_went_on(operation: str, key_part: str) -> None:
    world, payloads = await filled(12)
    stall, zombie = await stalled(world, operation, key_part)
    while (await Compactor(world.log, CompactorOptions(max_offsets=5)).compact_once(TP)).end_offset is not None:
        pass
    payloads += ["b", "c", "d"]
    for payload in payloads[-3:]:
        await world.append(payload)
    await Compactor(world.log).compact_once(TP)
    before = await world.shape(), await world.cursor()
    assert await world.cursor() == 15
    stall.go.set()
    await zombie
    assert (await world.shape(), await world.cursor()) == before
    assert await world.payloads() == payloads
    await world.check_index()


async def test_runs_chosen_before_others_ended_never_overlap() -> None:
    world, payloads = await filled(12)
    first, long = await stalled(world, "put", "meta/compaction", max_offsets=6)
    await Compactor(world.log, FEW).compact_once(TP)
    second, next_run = await stalled(world, "put", "meta/compaction")
    # One chose 1 to 6 before 1 to 4 was compacted, the other 5 to 8 after: neither may delete what the other published.
    for stall, task in ((first, long), (second, next_run)):
        stall.go.set()
        await task
        assert await world.payloads() == payloads
        await world.check_index()


async def test_an_overtaken_compactor_leaves_the_next_breadcrumb_alone() -> None:
    world, payloads = await filled(12)
    puts = iter(range(10))
    stall = Stall(lambda operation, key: (operation, key[-11:]) == ("put", "/compaction") and next(puts) == 1)
    overtaken = asyncio.create_task(Compactor(world.process(stall), FEW).compact_once(TP))
    await stall.stalled.wait()
    await Compactor(world.log, FEW).compact_once(TP)
    second, next_run = await stalled(world, "put blob", "compacted")
    left = await breadcrumb(world)
    assert left is not None
    assert left.start_offset == 5
    stall.go.set()
    await overtaken
    assert await breadcrumb(world) == left
    second.go.set()
    await next_run
    assert await world.payloads() == payloads
    await world.check_index()


async def test_a_stalled_twin_cannot_publish_a_run_that_was_given_up() -> None:
    world, payloads = await filled(6)
    stall, twin = await stalled(world, "put", "/index/")
    left = await breadcrumb(world)
    assert left is not None
    assert left.state is CompactionState.WRITING_COMPACTED_INDEX
    # The log start passes the run, but its entries are still there.
    await world.change_control(log_start_offset=5)
    await Compactor(world.log).compact_once(TP)
    assert await breadcrumb(world) is None
    await world.blobs.delete_many([left.blob])
    stall.go.set()
    await twin
    assert all(span.entry.data_uri != left.blob for span in await world.index())
    assert await world.payloads() == payloads[4:]


async def test_a_run_that_was_published_before_retention_passed_it_is_finished() -> None:
    world, payloads, left = await died_at("put", "/index/")
    assert left.state is CompactionState.WRITING_COMPACTED_INDEX
    assert (await world.shape())[3] == (1, 4, Kind.COMPACTED)
    await world.change_control(log_start_offset=6)
    await Compactor(world.log).compact_once(TP)
    assert await breadcrumb(world) is None
    assert await world.payloads() == payloads[5:]
    assert (await world.shape())[0] == (1, 4, Kind.COMPACTED)


async def test_a_run_whose_entries_were_trimmed_is_given_up() -> None:
    for state in ("put blob", "put"):
        world, payloads = await filled(6)
        stall, twin = await stalled(world, state, "compacted" if state == "put blob" else "/index/")
        await trim(world.log, TP, 6)
        stall.go.set()
        await twin
        await Compactor(world.log).compact_once(TP)
        assert await breadcrumb(world) is None
        assert await world.payloads() == payloads[5:]


async def test_the_blob_is_named_before_it_exists() -> None:
    world, _ = await filled()
    stall, task = await stalled(world, "put blob", "compacted")
    left = await breadcrumb(world)
    assert left is not None
    assert await world.blobs.head(left.blob) is None
    stall.go.set()
    await task
    assert await world.blobs.head(left.blob) is not None


async def test_a_blob_that_a_twin_has_put_is_taken_as_it_is() -> None:
    world, payloads = await filled()
    stall, twin = await stalled(world, "put blob", "compacted")
    await Compactor(world.log, FEW).compact_once(TP)
    stall.go.set()
    await twin
    assert len([name for name in world.blob_server.names if not name.startswith(WAL)]) == 1
    assert await world.payloads() == payloads


async def test_a_damaged_blob_of_a_dead_compactor_is_not_published() -> None:
    for damage in (True, False):
        world, payloads, left = await died_at("put blob", "compacted")
        assert left.state is CompactionState.WRITING_BLOB
        if damage:
            world.damage(left.blob)
        await Compactor(world.log, FEW).compact_once(TP)
        assert ((await world.index())[0].entry.data_uri == left.blob) is not damage
        assert await world.payloads() == payloads


async def test_a_breadcrumb_whose_entry_changed_is_cleared_and_its_run_chosen_again() -> None:
    world, payloads, left = await died_at("put", "meta/compaction")
    keys = await world.keys()
    [highest] = list(await world.meta.range(keys.entry(4), keys.entry(5), 2))
    await world.meta.put(highest.key, highest.value)
    await Compactor(world.log, FEW).compact_once(TP)
    assert (await world.index())[0].entry.data_uri != left.blob
    assert await world.payloads() == payloads
    await world.check_index()


async def test_a_zombie_writer_s_entry_inside_a_running_compaction_is_harmless() -> None:
    world = World()
    await world.catalog.create(TP.topic, 1)
    await world.append("a0")
    zombie = pending_puts(await world.keys(), (await world.control()).pending)
    payloads = ["a0", *(f"a{number}" for number in range(1, 7))]
    for payload in payloads[1:]:
        await world.append(payload)
    stall, task = await stalled(world, "put", "meta/compaction-cursor")
    await world.meta.put_many(zombie)
    stall.go.set()
    await task
    assert await world.payloads() == payloads
    await Compactor(world.log).compact_once(TP)
    assert await world.payloads() == payloads
    assert await world.cursor() == 7


async def test_a_topic_deleted_under_a_compaction_leaves_no_breadcrumb() -> None:
    for operation, part in (("put", "meta/compaction"), ("get blob", "wal-shared"), ("put", "compaction-cursor")):
        world, _ = await filled()
        keys = await world.keys()
        stall, task = await stalled(world, operation, part)
        await world.catalog.delete(TP.topic)
        stall.go.set()
        with suppress(LlogError):
            await task
        assert await world.meta.get(keys.compaction) is None
        assert await world.meta.get(keys.cursor) is None
