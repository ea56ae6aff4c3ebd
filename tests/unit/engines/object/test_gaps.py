"""Where the index has a gap, the collector keeps what could fill it."""

from __future__ import annotations

import msgspec

from llog.engines.object.collector import Collector, CollectorOptions
from llog.engines.object.compaction.compactor import Compactor
from llog.engines.object.gaps import GAPS_MAX, SLACK_MS, GapFinder, Gaps
from llog.engines.object.retention import trim
from llog.log.keys import WAL, PartitionKeys
from llog.log.records import Control, IndexEntry, Kind, encode
from llog.model import TopicPartition
from llog.runtime import uuid7
from tests.unit.world import START_MS, TP, World

HOUR = 3_600_000
EAGER = CollectorOptions(grace_ms=0)
KEYS = PartitionKeys("orders", 0)


async def lose_entry(world: World, end_offset: int, tp: TopicPartition = TP) -> IndexEntry:
    """What the entry was whose key is gone now."""
    [span] = [span for span in await world.index(tp) if span.end_offset == end_offset]
    assert await world.meta.delete((await world.keys(tp)).entry(end_offset))
    return span.entry


async def filled(world: World, appends: int = 6, apart_ms: int = 10 * HOUR) -> None:
    for number in range(appends):
        await world.append(f"a{number}")
        world.runtime.now += apart_ms


async def test_a_blob_whose_index_entry_was_lost_survives_any_collection(world: World) -> None:
    await filled(world)
    lost = await lose_entry(world, 3)
    world.runtime.now += 1000 * HOUR
    for options in (EAGER, CollectorOptions()):
        result = await Collector(world.log, options).collect_once()
        assert (result.deleted, result.kept) == (0, 1)
        [gap] = result.gaps
        assert (gap.directory, gap.partition, gap.start_offset, gap.end_offset) == ("orders", 0, 3, 3)
        assert result.warning is not None
        assert "orders/0 offsets 3 to 3" in result.warning
    await world.meta.put((await world.keys()).entry(3), encode(lost))
    assert await world.payloads() == [f"a{number}" for number in range(6)]
    healed = await Collector(world.log, EAGER).collect_once()
    assert (healed.deleted, healed.gaps, healed.warning) == (0, (), None)


async def test_what_no_gap_can_have_lost_is_collected_although_there_is_one(world: World) -> None:
    await filled(world, appends=12)
    await Compactor(world.log).compact_once(TP, force=True)
    await filled(world, appends=4)
    await lose_entry(world, 14)
    orphan = WAL + uuid7(START_MS + 12 * 10 * HOUR + 5, world.runtime.random())
    await world.blobs.put(orphan, [b"an upload that was never committed"])
    world.runtime.now += 1
    result = await Collector(world.log, EAGER).collect_once()
    assert result.deleted == 12  # of the first appends, which were compacted long before
    assert orphan in world.blob_server.names  # stamped between the neighbours of the gap
    assert result.kept == 2


async def test_a_compacted_blob_whose_entry_was_lost_survives(world: World) -> None:
    await filled(world)
    await Compactor(world.log).compact_once(TP, force=True)
    lost = await lose_entry(world, 6)
    assert lost.kind is Kind.COMPACTED
    world.runtime.now += 1000 * HOUR
    await Collector(world.log, EAGER).collect_once()
    assert lost.data_uri in world.blob_server.names


async def test_the_gap_of_one_partition_keeps_no_compacted_blob_of_another(world: World) -> None:
    other = TopicPartition(TP.topic, 1)
    await filled(world)
    await world.append("b", tp=other)
    await world.append("b", tp=other)
    await lose_entry(world, 3)
    await Compactor(world.log).compact_once(other, force=True)
    [compacted] = [span.entry.data_uri for span in await world.index(other)]
    await trim(world.log, other, 3)
    world.runtime.now += 1000 * HOUR
    await Collector(world.log, EAGER).collect_once()
    assert compacted not in world.blob_server.names


async def test_a_gap_that_was_trimmed_keeps_nothing(world: World) -> None:
    await filled(world)
    lost = await lose_entry(world, 3)
    await trim(world.log, TP, 5)
    world.runtime.now += HOUR
    result = await Collector(world.log, EAGER).collect_once()
    assert result.gaps == ()
    assert lost.data_uri not in world.blob_server.names


async def test_leftovers_inside_a_compacted_range_are_no_gap(world: World) -> None:
    await filled(world)
    stale = await world.index()
    await Compactor(world.log).compact_once(TP, force=True)
    for span in stale[2:4]:
        await world.meta.put((await world.keys()).entry(span.end_offset), encode(span.entry))
    world.runtime.now += 1000 * HOUR
    result = await Collector(world.log, EAGER).collect_once()
    assert result.gaps == ()
    assert result.deleted == 6


def entry(append_ms: int, count: int = 1) -> IndexEntry:
    return IndexEntry(
        kind=Kind.WAL,
        data_uri="b",
        byte_length=1,
        msg_count=count,
        encoding="e",
        append_ms=append_ms,
        timestamp_min=append_ms,
        timestamp_max=append_ms,
        max_append_ms=append_ms,
    )


def test_a_gap_reaches_from_one_neighbour_to_the_other() -> None:
    finder = GapFinder(KEYS, Control(next_offset=21, max_append_ms=900 * HOUR))
    finder.add(3, entry(100 * HOUR, 2))
    finder.add(10, entry(200 * HOUR, 3))
    finder.add(15, entry(400 * HOUR, 5))
    found = [(gap.start_offset, gap.end_offset, gap.from_ms, gap.to_ms) for gap in finder.gaps()]
    assert found == [
        (1, 1, 0, 100 * HOUR + SLACK_MS),
        (4, 7, 100 * HOUR - SLACK_MS, 200 * HOUR + SLACK_MS),
        (16, 20, 400 * HOUR - SLACK_MS, 900 * HOUR + SLACK_MS),
    ]


def test_the_maximum_behind_a_gap_counts_where_a_clock_ran_ahead() -> None:
    finder = GapFinder(KEYS, Control(next_offset=7, max_append_ms=9_000))
    finder.add(2, entry(100, 2))
    finder.add(6, msgspec.structs.replace(entry(200, 2), max_append_ms=9_000))
    [gap] = finder.gaps()
    assert (gap.from_ms, gap.to_ms) == (100 - SLACK_MS, 9_000 + SLACK_MS)


def test_a_clock_that_ran_ahead_around_a_gap_hides_nothing() -> None:
    finder = GapFinder(KEYS, Control(next_offset=9, max_append_ms=9_000 * HOUR))
    for end, append_ms in ((2, 9_000 * HOUR), (6, 9_000 * HOUR), (7, 100 * HOUR), (8, 101 * HOUR)):
        finder.add(end, msgspec.structs.replace(entry(append_ms, 2 if end < 7 else 1), max_append_ms=9_000 * HOUR))
    [gap] = finder.gaps()
    assert (gap.start_offset, gap.end_offset) == (3, 4)
    assert (gap.from_ms, gap.to_ms) == (99 * HOUR, 9_001 * HOUR)


def test_blobs_that_a_floor_stamped_far_ahead_of_their_records_are_kept_for_a_gap() -> None:
    source = World().runtime.random()
    finder = GapFinder(KEYS, Control(next_offset=7, max_append_ms=12 * HOUR))
    finder.add(2, entry(10 * HOUR, 2))
    finder.add(6, msgspec.structs.replace(entry(12 * HOUR, 2), data_uri=WAL + uuid7(900 * HOUR, source)))
    gaps = Gaps()
    gaps.add(finder.gaps())
    assert gaps.keeps(WAL + uuid7(900 * HOUR, source)), "the lost entry may have been stamped by the same floor"
    assert not gaps.keeps(WAL + uuid7(902 * HOUR, source))


def test_a_late_compaction_widens_no_gap() -> None:
    finder = GapFinder(KEYS, Control(next_offset=7, max_append_ms=12 * HOUR))
    name = KEYS.compacted(uuid7(900 * HOUR, World().runtime.random()))
    finder.add(2, msgspec.structs.replace(entry(10 * HOUR, 2), kind=Kind.COMPACTED, data_uri=name))
    finder.add(6, entry(12 * HOUR, 2))
    [gap] = finder.gaps()
    assert gap.to_ms == 13 * HOUR


def test_thousands_of_gaps_are_told_as_few_that_cover_them() -> None:
    finder = GapFinder(KEYS, Control(next_offset=10_000))
    for end in range(2, 10_000, 2):
        finder.add(end, entry(end * HOUR))
    found = finder.gaps()
    assert len(found) == GAPS_MAX
    assert (found[-1].start_offset, found[-1].end_offset) == (199, 9_999)
    gaps = Gaps()
    gaps.add(found)
    assert all(gaps.keeps(WAL + uuid7(end * HOUR, World().runtime.random())) for end in range(2, 10_000, 1000))
