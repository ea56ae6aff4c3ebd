"""Lost index entries come back on proof, and on nothing less."""

from __future__ import annotations

import random

import pytest

from llog.batch.columns import columns_of, stamp
from llog.batch.shared import pack
from llog.engines.object.collector import Collector, CollectorOptions
from llog.engines.object.compaction.compactor import Compactor, CompactorOptions
from llog.engines.object.pending import pending_puts
from llog.engines.object.repair.index import Proof, RepairPlan, apply_repair, plan_repairs
from llog.engines.object.retention import trim
from llog.engines.object.verify import verify
from llog.engines.object.writer import Writer
from llog.log.keys import WAL
from llog.log.records import CompactionCursor, IndexEntry, Kind, encode
from llog.model import Record
from llog.runtime import uuid7
from tests.unit.world import TP, Crash, Faults, World


async def lose(world: World, *end_offsets: int) -> dict[int, IndexEntry]:
    """The entries whose keys are gone now, by their ends."""
    entries = {span.end_offset: span.entry for span in await world.index()}
    for end_offset in end_offsets:
        assert await world.meta.delete((await world.keys()).entry(end_offset))
    return {end_offset: entries[end_offset] for end_offset in end_offsets}


async def planned(world: World) -> RepairPlan:
    [plan] = await plan_repairs(world.log, [TP])
    return plan


async def repaired(world: World) -> RepairPlan:
    """The plan, applied."""
    plan = await planned(world)
    assert await apply_repair(world.log, plan) == len(plan.entries)
    return plan


async def filled(world: World, *sizes: int, apart_ms: int = 1000) -> list[str]:
    """As many appends, of so many records each; the payloads, which name their offsets."""
    payloads: list[str] = []
    for size in sizes:
        start = (await world.control()).next_offset
        some = [f"{start + each}" for each in range(size)]
        await world.append(*some)
        payloads += some
        world.runtime.now += apart_ms
    return payloads


async def put_orphan(world: World, count: int, *, next_offset: int, age_ms: int = 0) -> str:
    """An upload that was never committed."""
    now = world.runtime.now - age_ms
    columns = stamp(columns_of([Record(payload=b"orphan")] * count), now)
    parts, _ = pack([(TP, "orders", columns)], writer="w", created_at_ms=now, next_offsets=[next_offset])
    name = WAL + uuid7(now, world.runtime.random())
    await world.blobs.put(name, parts)
    return name


async def test_without_a_gap_there_is_nothing_to_do(world: World) -> None:
    await filled(world, 1, 2, 3)
    assert await plan_repairs(world.log, [TP]) == []


async def test_a_lost_entry_comes_back_as_it_was(world: World) -> None:
    payloads = await filled(world, 2, 3, 1, 2)
    lost = await lose(world, 5)
    plan = await planned(world)
    [new] = plan.entries
    assert (new.start_offset, new.end_offset, new.proof) == (3, 5, Proof.ONLY_CANDIDATE)
    assert new.entry == lost[5]
    assert plan.open_gaps == ()
    assert (await world.meta.get((await world.keys()).entry(5))) is None  # nothing is done before it is asked for
    assert await apply_repair(world.log, plan) == 1
    assert await world.payloads() == payloads
    assert (await verify(world.log, TP)).problems == []
    assert await apply_repair(world.log, plan) == 0


async def test_several_lost_entries_come_back_in_the_order_that_their_writers_knew(world: World) -> None:
    payloads = await filled(world, 1, 2, 2, 1, 2, 1)
    lost = await lose(world, 3, 5, 6)
    plan = await repaired(world)
    assert {new.end_offset: new.entry for new in plan.entries} == lost
    assert await world.payloads() == payloads


async def test_a_lost_entry_of_a_compacted_blob_comes_back_as_it_was(world: World) -> None:
    payloads = await filled(world, 2, 3, 1, 2)
    await Compactor(world.log).compact_once(TP)
    payloads += await filled(world, 1, 1)
    [(end_offset, lost)] = (await lose(world, 6)).items()
    assert lost.kind is Kind.COMPACTED
    [new] = (await repaired(world)).entries
    assert (new.start_offset, new.end_offset, new.proof, new.entry) == (1, end_offset, Proof.COMPACTED, lost)
    assert await world.payloads() == payloads
    await world.check_index()


async def test_a_compacted_blob_that_overlaps_an_entry_behind_a_leftover_is_not_taken(world: World) -> None:
    payloads = await filled(world, 2, 2, 3, 3, 2, 2)
    keys = await world.keys()
    await filled(world, 1)
    appended = {span.end_offset: span.entry for span in await world.index()}
    # A run from 1 to 7 put its blob, but was given up.
    assert (await Compactor(world.log, CompactorOptions(max_offsets=7)).compact_once(TP, force=True)).end_offset == 7
    for end_offset in (2, 4, 7):
        await world.meta.put(keys.entry(end_offset), encode(appended[end_offset]))
    await world.meta.put(keys.cursor, encode(CompactionCursor(1)))
    # The runs that count are those from 1 to 4 and from 5 to 14; a stalled writer puts an entry inside the latter.
    for max_offsets, end_offset in ((4, 4), (10, 14)):
        compactor = Compactor(world.log, CompactorOptions(max_offsets=max_offsets))
        assert (await compactor.compact_once(TP, force=True)).end_offset == end_offset
    await world.meta.put(keys.entry(10), encode(appended[10]))
    lost = await lose(world, 4)
    [new] = (await repaired(world)).entries
    assert (new.start_offset, new.end_offset, new.entry) == (1, 4, lost[4])
    assert (await world.payloads())[:14] == payloads


async def test_what_retention_removes_after_the_plan_does_not_come_back(world: World) -> None:
    payloads = await filled(world, 2, 3, 1, 2)
    await lose(world, 2)
    plan = await planned(world)
    assert len(plan.entries) == 1
    await trim(world.log, TP, 6)
    assert await apply_repair(world.log, plan) == 0
    assert [start for start, _, _ in await world.shape()] == [6]
    assert await world.payloads() == payloads[5:]


class TrimAtTheFirstBlob(Faults):
    """Lets retention remove records while a plan is being made."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self.trimmed = 0

    async def before(self, operation: str, key: str) -> None:
        if operation == "get blob" and not self.trimmed:
            self.trimmed = 7
            await trim(self._world.log, TP, self.trimmed)


async def test_what_retention_removes_during_the_plan_is_no_gap(world: World) -> None:
    await filled(world, 2, 3, 1, 2)
    await Compactor(world.log).compact_once(TP)
    await filled(world, 1, 1)
    await lose(world, 6)
    faults = TrimAtTheFirstBlob(world)
    assert await plan_repairs(world.process(faults), [TP]) == []
    assert faults.trimmed


class CrashAfterDeleting(Faults):
    async def after(self, operation: str, key: str) -> None:
        if operation == "delete_range":
            raise Crash


async def test_the_breadcrumb_of_a_compaction_gives_its_entry_back(world: World) -> None:
    payloads = await filled(world, 2, 3, 1, 2)
    with pytest.raises(Crash):
        await Compactor(world.process(CrashAfterDeleting())).compact_once(TP)
    lost = await lose(world, 6)
    [new] = (await repaired(world)).entries
    assert (new.proof, new.entry) == (Proof.BREADCRUMB, lost[6])
    assert await world.payloads() == payloads
    await Compactor(world.log).compact_once(TP)
    await world.check_index()


async def test_a_leftover_inside_the_lost_compacted_range_is_no_obstacle(world: World) -> None:
    await filled(world, 1)
    zombie = pending_puts(await world.keys(), (await world.control()).pending)
    await filled(world, 3, 1, 2)
    await Compactor(world.log).compact_once(TP)
    lost = await lose(world, 5)
    await world.meta.put_many(zombie)
    [new] = (await repaired(world)).entries
    assert new.entry == lost[5]
    assert [problem.harmless for problem in (await verify(world.log, TP)).problems] == [True]


async def test_an_upload_that_may_have_been_it_is_listed_beside_it(world: World) -> None:
    await filled(world, 1, 2)
    orphan = await put_orphan(world, 2, next_offset=2)
    await filled(world, 2, 1)
    lost = await lose(world, 3)
    plan = await planned(world)
    assert plan.entries == ()
    [gap] = plan.open_gaps
    assert gap.reason == "several candidates fit"
    assert {each.blob for each in gap.candidates} == {orphan, lost[3].data_uri}


@pytest.mark.parametrize(("count", "next_offset"), [(3, 1), (2, 4)])
async def test_an_upload_that_cannot_have_been_it_is_no_candidate(world: World, count: int, next_offset: int) -> None:
    """It has too many records, or its writer knew of a later offset."""
    payloads = await filled(world, 1, 2)
    await put_orphan(world, count, next_offset=next_offset)
    payloads += await filled(world, 2, 1)
    await lose(world, 3)
    assert len((await repaired(world)).entries) == 1
    assert await world.payloads() == payloads


async def test_the_only_candidate_is_refused_where_the_maxima_speak_against_it(world: World) -> None:
    """The blob that had the records is gone with their entry; what is left was never committed."""
    await filled(world, 1, 1)
    await put_orphan(world, 1, next_offset=2, age_ms=10)
    world.runtime.now += 5000
    await filled(world, 1, apart_ms=0)
    world.runtime.now -= 4000  # a clock that is behind: the maximum behind the gap is that of the lost append
    await filled(world, 1, 1)
    lost = await lose(world, 3)
    await world.blobs.delete_many([lost[3].data_uri])
    plan = await planned(world)
    assert plan.entries == ()
    assert plan.open_gaps[0].reason == "no candidate fits"
    assert len(plan.open_gaps[0].candidates) == 1


async def test_what_a_compaction_has_left_behind_is_no_candidate(world: World) -> None:
    payloads = await filled(world, 1, 1, 1, 1, 1, apart_ms=0)
    await Compactor(world.log).compact_once(TP)
    payloads += await filled(world, 1, 1, 1, 1, apart_ms=0)
    lost = await lose(world, 7)
    plan = await repaired(world)
    assert [new.entry for new in plan.entries] == [lost[7]]
    assert await world.payloads() == payloads


async def test_of_two_uploads_with_the_same_records_either_may_have_been_compacted(world: World) -> None:
    await world.append("same")
    await world.append("other")
    await world.append("one more")
    await Compactor(world.log).compact_once(TP)
    await world.append("same")
    await world.append("last")
    await lose(world, 4)
    plan = await planned(world)
    assert plan.entries == ()
    assert len(plan.open_gaps[0].candidates) == 2


async def test_records_that_were_trimmed_may_be_the_only_candidate(world: World) -> None:
    await filled(world, 1, 1, 1, 1, 1)
    lost = await lose(world, 4)
    await world.blobs.delete_many([lost[4].data_uri])
    await trim(world.log, TP, 3)
    plan = await planned(world)
    assert plan.entries == ()
    assert plan.open_gaps[0].reason != "no candidate fits" or plan.open_gaps[0].candidates


async def test_lost_records_whose_first_were_trimmed_are_listed(world: World) -> None:
    await filled(world, 1, 3, 1, 1)
    lost = await lose(world, 4)
    await trim(world.log, TP, 4)
    [gap] = (await planned(world)).open_gaps
    assert (gap.start_offset, gap.end_offset) == (4, 4)
    assert "perhaps in the middle" in gap.reason
    assert lost[4].data_uri in {each.blob for each in gap.candidates}


async def test_a_blob_whose_header_is_damaged_may_have_been_it(world: World) -> None:
    await filled(world, 1, 2, 2, 1)
    lost = await lose(world, 3)
    for name in world.blob_server.names:
        if name != lost[3].data_uri:
            data, put_ms = world.blob_server.blobs[name]
            world.blob_server.blobs[name] = (data[:20] + b"?" + data[21:], put_ms)
            break
    [gap] = (await planned(world)).open_gaps
    assert "damaged headers" in gap.reason
    assert [each.blob for each in gap.candidates] == [lost[3].data_uri]


async def test_damaged_records_are_not_brought_back(world: World) -> None:
    await filled(world, 1, 2, 2, 1)
    lost = await lose(world, 3)
    world.damage(lost[3].data_uri)
    [gap] = (await planned(world)).open_gaps
    assert "are damaged" in gap.reason


async def test_an_entry_that_cannot_be_decoded_is_replaced(world: World) -> None:
    payloads = await filled(world, 1, 2, 2, 1)
    entries = {span.end_offset: span.entry for span in await world.index()}
    await world.meta.put((await world.keys()).entry(3), b"{")
    [new] = (await repaired(world)).entries
    assert new.entry == entries[3]
    assert await world.payloads() == payloads


async def test_compacted_blobs_of_older_versions_are_candidates_without_offsets(world: World) -> None:
    await filled(world, 2, 1, 1)
    await Compactor(world.log).compact_once(TP)
    [span, _] = await world.index()
    entry = span.entry
    data, put_ms = world.blob_server.blobs[entry.data_uri]
    plain = data[entry.byte_offset : entry.byte_offset + entry.byte_length]
    world.blob_server.blobs[entry.data_uri] = (plain, put_ms)
    await lose(world, 3)
    [gap] = (await planned(world)).open_gaps
    assert entry.data_uri in {each.blob for each in gap.candidates}
    for name in [name for name in world.blob_server.names if name.startswith(WAL)][:2]:
        await world.blobs.delete_many([name])
    [new] = (await repaired(world)).entries
    assert (new.proof, new.entry.kind, new.entry.byte_offset) == (Proof.ONLY_CANDIDATE, Kind.COMPACTED, 0)
    assert len(await world.payloads()) == 4


async def test_a_repair_never_gives_an_offset_other_records() -> None:
    put = left = 0
    for seed in range(60):
        world = World()
        await world.catalog.create(TP.topic, 4)
        draw = random.Random(seed)
        writers, payloads = [Writer(world.log) for _ in range(2)], list[str]()
        for number in range(draw.randint(6, 30)):
            some = [f"{number}.{each}" for each in range(draw.randint(1, 3))]
            await world.append(*some, writer=draw.choice(writers))
            payloads += some
            world.runtime.now += draw.choice((0, 0, 5, 1000))
            if draw.random() < 0.1:
                await Compactor(world.log, CompactorOptions(max_offsets=draw.choice((3, 100)))).compact_once(TP)
            if draw.random() < 0.1:
                counter = (await world.control()).next_offset
                await put_orphan(world, draw.randint(1, 3), next_offset=draw.randint(1, counter))
        before = {span.end_offset: span.entry for span in await world.index()}
        await lose(world, *draw.sample(sorted(before)[:-1], min(len(before) - 1, draw.randint(1, 3))))
        world.runtime.now += 1000 * 3_600_000
        await Collector(world.log, CollectorOptions(grace_ms=0)).collect_once()
        for plan in await plan_repairs(world.log, [TP]):
            put += await apply_repair(world.log, plan)
            left += len(plan.open_gaps)
            for new in plan.entries:
                whole = [entry for end, entry in before.items() if end == new.end_offset]
                assert whole == [new.entry]
            for gap in plan.open_gaps:
                lost = [before[end] for end in before if gap.start_offset <= end <= gap.end_offset]
                assert {entry.data_uri for entry in lost} <= {each.blob for each in gap.candidates}
            for end, entry in before.items():
                await world.meta.put((await world.keys()).entry(end), encode(entry))
        assert await world.payloads() == payloads
    assert put > 30
    assert left > 0
