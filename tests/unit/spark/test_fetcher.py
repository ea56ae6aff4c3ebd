"""What a task reads, when the log changed after it was planned."""

from __future__ import annotations

import logging

import pytest

from llog.engines.object.collector import Collector, CollectorOptions
from llog.engines.object.compaction.compactor import Compactor
from llog.engines.object.retention import trim
from llog.engines.object.writer import Writer
from llog.errors import DataLoss
from llog.log.pins import alive_pins, pin
from llog.spark.fetcher import PIN_LEASE_MS, fetch_ranges
from llog.spark.planner import LocatedRange, plan_tasks
from llog.spark.source_log import Range
from tests.unit.world import TP, World


async def plan_ranges(world: World, start: int, stop: int) -> list[LocatedRange]:
    topics = {TP.topic: await world.catalog.get(TP.topic)}
    tasks = await plan_tasks(
        world.log,
        [Range(TP, start, stop)],
        topics,
        pin=None,
        task_bytes_max=1 << 30,
        min_tasks=1,
        fail_on_data_loss=True,
    )
    return [located for task in tasks for located in task.ranges]


async def fetch_values(
    world: World, ranges: list[LocatedRange], *, fail: bool = True, pin_id: str | None = None
) -> dict[int, str]:
    found: dict[int, str] = {}
    async for _, batch in fetch_ranges(world.log, ranges, pin=pin_id, fail_on_data_loss=fail):
        for index, value in enumerate(batch.columns.values.to_pylist()):
            assert batch.start_offset + index not in found
            found[batch.start_offset + index] = value.decode()
    return found


async def compact_and_collect(world: World) -> None:
    await Compactor(world.log).compact_once(TP, force=True)
    world.runtime.now += 10_000_000
    await Collector(world.log, CollectorOptions(grace_ms=0)).collect_once()


async def test_blobs_that_were_compacted_away_after_the_plan_are_looked_up_again(world: World) -> None:
    await world.append("a", "b")
    await world.append("c", "d")
    ranges = await plan_ranges(world, 2, 5)
    await compact_and_collect(world)
    assert not await world.blobs.head(ranges[0].extents[0].data_uri)
    assert await fetch_values(world, ranges) == {2: "b", 3: "c", 4: "d"}


async def test_records_of_a_topic_created_again_are_not_taken_for_those_that_were_planned(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    await world.append("old")
    ranges = await plan_ranges(world, 1, 2)
    await world.catalog.delete(TP.topic)
    await compact_nothing_but_collect(world)
    await world.catalog.create(TP.topic, 4)
    await world.append("new", writer=Writer(world.log))
    with pytest.raises(DataLoss, match=r"1 records of orders/0, offsets 1 to 1, are gone by deletion"):
        await fetch_values(world, ranges)
    with caplog.at_level(logging.WARNING, "llog.spark"):
        assert await fetch_values(world, ranges, fail=False) == {}
    assert "gone by deletion" in caplog.text


@pytest.mark.parametrize("payloads", [(), ("new",)])
async def test_a_topic_that_is_created_again_and_ends_before_the_plan_is_a_loss(
    world: World, payloads: tuple[str, ...]
) -> None:
    await world.append("a", "b", "c", "d")
    ranges = await plan_ranges(world, 3, 5)
    await world.catalog.delete(TP.topic)
    await compact_nothing_but_collect(world)
    await world.catalog.create(TP.topic, 4)
    if payloads:
        await world.append(*payloads, writer=Writer(world.log))
    with pytest.raises(DataLoss, match=r"2 records of orders/0, offsets 3 to 4, are gone by deletion"):
        await fetch_values(world, ranges)
    assert await fetch_values(world, ranges, fail=False) == {}


async def compact_nothing_but_collect(world: World) -> None:
    world.runtime.now += 10_000_000
    await Collector(world.log, CollectorOptions(grace_ms=0)).collect_once()


async def test_records_that_retention_took_after_the_plan_are_told_from_damage(world: World) -> None:
    await world.append("a")
    await world.append("b")
    await world.append("c")
    ranges = await plan_ranges(world, 1, 4)
    await trim(world.log, TP, 2)
    await compact_nothing_but_collect(world)
    with pytest.raises(DataLoss, match=r"offsets 1 to 1, are gone by retention"):
        await fetch_values(world, ranges)
    assert await fetch_values(world, ranges, fail=False) == {2: "b", 3: "c"}


@pytest.mark.parametrize("vanished", [True, False])
async def test_a_blob_that_vanished_or_is_damaged_is_named_or_skipped_alone(
    world: World, caplog: pytest.LogCaptureFixture, vanished: bool
) -> None:
    await world.append("a", "b")
    await world.append("c", "d")
    ranges = await plan_ranges(world, 1, 5)
    name = ranges[0].extents[0].data_uri
    if vanished:
        await world.blobs.delete_many([name])
    else:
        world.damage(name)
    with pytest.raises(DataLoss, match=rf"2 records of orders/0, offsets 1 to 2, are damaged: .*{name}"):
        await fetch_values(world, ranges)
    with caplog.at_level(logging.WARNING, "llog.spark"):
        assert await fetch_values(world, ranges, fail=False) == {3: "c", 4: "d"}
    assert len(caplog.records) == 1
    assert name in caplog.text


async def test_a_task_renews_the_pin_it_reads_under(world: World) -> None:
    await world.append("a")
    pin_id = await pin(world.log, "test", PIN_LEASE_MS)
    ranges = await plan_ranges(world, 1, 2)
    world.runtime.now += PIN_LEASE_MS - 1
    assert await fetch_values(world, ranges, pin_id=pin_id) == {1: "a"}
    [(_, record)] = await alive_pins(world.log)
    assert record.expires_ms == world.runtime.now + PIN_LEASE_MS
