from __future__ import annotations

import asyncio
import random

import msgspec
import pytest

from llog.engines.object import verify as verification
from llog.engines.object.collector import Collector, CollectorOptions
from llog.engines.object.compaction.compactor import Compactor
from llog.engines.object.pending import pending_puts
from llog.engines.object.retention import trim
from llog.engines.object.verify import count_orphans, verify
from llog.engines.object.writer import Writer
from llog.errors import TopicNotFound
from llog.log import findings
from llog.log.findings import ProblemKind
from llog.log.keys import WAL
from llog.log.pins import alive_pins
from llog.log.records import Compaction, CompactionCursor, CompactionState, IndexEntry, Kind, decode, encode
from llog.model import TopicPartition
from llog.runtime import uuid7
from tests.unit.world import START_MS, TP, Interleaved, World


async def problems(world: World) -> list[tuple[ProblemKind, int, int]]:
    report = await verify(world.log, TP)
    assert report.healthy == all(problem.harmless for problem in report.problems)
    return [(problem.kind, problem.start_offset, problem.end_offset) for problem in report.problems]


async def change_entry(world: World, end_offset: int, **changes: object) -> None:
    key = (await world.keys()).entry(end_offset)
    found = await world.meta.get(key)
    assert found is not None
    entry = msgspec.structs.replace(decode(IndexEntry, found.value, key), **changes)
    await world.meta.put(key, encode(entry))


async def append_three(world: World) -> None:
    for letter in "abc":
        await world.append(f"{letter}1", f"{letter}2")


async def test_a_healthy_partition_has_no_problems_and_is_counted(world: World) -> None:
    await append_three(world)
    await Compactor(world.log).compact_once(TP)
    await append_three(world)
    await trim(world.log, TP, 2)
    seen: list[int] = []
    report = await verify(world.log, TP, progress=seen.append)
    assert report.problems == []
    assert (report.topic, report.partition, report.records) == (TP.topic, TP.partition, 11)
    assert report.bytes == sum(span.entry.byte_length for span in await world.index()) + await pending_bytes(world)
    assert seen == sorted(seen)
    assert seen[-1] == 11
    assert await alive_pins(world.log) == []


async def pending_bytes(world: World) -> int:
    pending = (await world.control()).pending
    assert pending is not None
    return sum(entry.byte_length for entry in pending.entries)


async def test_an_empty_partition_is_healthy_and_a_missing_one_is_an_error(world: World) -> None:
    assert await problems(world) == []
    with pytest.raises(TopicNotFound):
        await verify(world.log, TopicPartition("nothing", 0))
    assert await alive_pins(world.log) == []


async def test_a_missing_entry_is_a_gap(world: World) -> None:
    await append_three(world)
    await world.meta.delete((await world.keys()).entry(2))
    assert await problems(world) == [(ProblemKind.GAP, 1, 2)]
    await world.meta.delete((await world.keys()).entry(4))
    assert await problems(world) == [(ProblemKind.GAP, 1, 4)]
    await world.change_control(pending=None)
    assert await problems(world) == [(ProblemKind.GAP, 1, 6)]


async def test_entries_that_reach_into_others_overlap(world: World) -> None:
    await append_three(world)
    await change_entry(world, 4, msg_count=3)
    found = await problems(world)
    assert (ProblemKind.OVERLAP, 2, 2) in found
    await change_entry(world, 4, kind=Kind.COMPACTED)
    assert (ProblemKind.OVERLAP, 2, 2) in await problems(world)


async def test_missing_and_damaged_blobs_and_wrong_counts_are_told_apart(world: World) -> None:
    await append_three(world)
    first, second = (span.entry.data_uri for span in await world.index())
    await world.blobs.delete_many([first])
    world.damage(second)
    assert await problems(world) == [(ProblemKind.MISSING_BLOB, 1, 2), (ProblemKind.CORRUPT, 3, 4)]
    assert (await verify(world.log, TP)).records == 2


async def test_a_record_count_that_differs_is_reported(world: World) -> None:
    await world.append("a")
    await world.append("b", "c")
    await world.append("d")
    entries = {span.end_offset: span.entry for span in await world.index()}
    await world.meta.put((await world.keys()).entry(1), encode(msgspec.structs.replace(entries[3], msg_count=1)))
    assert (ProblemKind.COUNT_MISMATCH, 1, 1) in await problems(world)


async def test_an_undecodable_entry_is_reported_with_the_gap_it_leaves(world: World) -> None:
    await append_three(world)
    await world.meta.put((await world.keys()).entry(2), b"garbage")
    assert await problems(world) == [(ProblemKind.CORRUPT, 2, 2), (ProblemKind.GAP, 1, 2)]


@pytest.mark.parametrize("stale", [(1,), (2,), (1, 2), (1, 2, 3)])
@pytest.mark.parametrize("collected", [False, True])
async def test_leftovers_inside_a_compacted_range_are_harmless(
    world: World, stale: tuple[int, ...], collected: bool
) -> None:
    puts = []
    for number in range(4):
        await world.append(f"a{number}")
        puts.append(pending_puts(await world.keys(), (await world.control()).pending))
    await Compactor(world.log).compact_once(TP, force=True)
    if collected:
        world.runtime.now += 10
        assert (await Collector(world.log, CollectorOptions(grace_ms=0)).collect_once()).deleted == 4
    for offset in stale:
        await world.meta.put_many(puts[offset - 1])
    await world.append("b")
    report = await verify(world.log, TP)
    assert report.healthy
    assert [(problem.kind, problem.start_offset) for problem in report.problems] == [
        (ProblemKind.STALE_ENTRY, offset) for offset in stale
    ]
    assert report.records == 5


async def test_control_cursor_and_breadcrumb_are_checked_against_one_another(world: World) -> None:
    await append_three(world)
    keys = await world.keys()
    await world.meta.put(keys.cursor, encode(CompactionCursor(99)))
    assert await problems(world) == [(ProblemKind.CURSOR, 99, 99)]
    await world.meta.delete(keys.cursor)
    assert await problems(world) == [(ProblemKind.CURSOR, 1, 6)]
    await world.meta.put(keys.cursor, encode(CompactionCursor(1)))
    breadcrumb = Compaction(
        state=CompactionState.WRITING_BLOB,
        start_offset=1,
        end_offset=2,
        blob=keys.compacted(uuid7(START_MS, random.Random(1))),
        expected_version=1,
    )
    await world.meta.put(keys.compaction, encode(breadcrumb))
    assert await problems(world) == []
    later = msgspec.structs.replace(breadcrumb, state=CompactionState.DELETING_OLD)
    await world.meta.put(keys.compaction, encode(later))
    assert await problems(world) == [(ProblemKind.BREADCRUMB, 1, 2)]
    await world.meta.put(keys.compaction, encode(msgspec.structs.replace(breadcrumb, end_offset=7)))
    assert await problems(world) == [(ProblemKind.BREADCRUMB, 1, 7)]
    await world.meta.delete(keys.compaction)
    await world.change_control(next_offset=9)
    assert await problems(world) == [(ProblemKind.CONTROL, 5, 6), (ProblemKind.GAP, 7, 8)]


async def test_running_maxima_that_fall_are_reported(world: World) -> None:
    await append_three(world)
    await change_entry(world, 4, max_append_ms=1)
    assert await problems(world) == [(ProblemKind.TIME_ORDER, 3, 4)]


async def test_problems_beyond_the_limit_are_counted(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "PROBLEMS_MAX", 2)
    monkeypatch.setattr(verification, "_PAGE", 2)
    for number in range(6):
        await world.append(f"a{number}")
    await world.blobs.delete_many([span.entry.data_uri for span in await world.index()])
    report = await verify(world.log, TP)
    assert (len(report.problems), report.problems_left_out, report.records) == (2, 3, 1)
    assert not report.healthy


@pytest.mark.parametrize("seed", range(10))
async def test_a_log_in_use_verifies_clean(world: World, seed: int) -> None:
    for number in range(10):
        await world.append(f"a{number}")
    writer = Writer(world.process(Interleaved(seed)))
    compactor = Compactor(world.process(Interleaved(seed + 100)))
    collector = Collector(world.process(Interleaved(seed + 200)), CollectorOptions(grace_ms=0))

    async def write() -> None:
        for number in range(10):
            await world.append(f"b{number}", writer=writer)

    async def maintain() -> None:
        for number in range(4):
            world.runtime.now += 10
            await compactor.compact_once(TP, force=True)
            await collector.collect_once()
            await trim(world.log, TP, 1 + number)

    reports, _, _ = await asyncio.gather(verify(world.process(Interleaved(seed + 300)), TP), write(), maintain())
    assert reports.healthy
    assert (await verify(world.log, TP)).healthy


async def test_orphans_are_the_blobs_that_nothing_names(world: World) -> None:
    await append_three(world)
    assert (await count_orphans(world.log)).orphans == 0
    await world.blobs.put(WAL + uuid7(START_MS, random.Random(1)), [b"12345"])
    counts = await count_orphans(world.log)
    assert (counts.blobs, counts.orphans, counts.orphan_bytes) == (4, 1, 5)
