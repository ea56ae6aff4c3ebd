"""From offsets to tasks: every record once, in order, in as few tasks as the limits allow."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llog.engines.object.retention import trim
from llog.errors import ConfigurationError, DataLoss, InvalidArgument
from llog.log.engine import Bounds
from llog.log.records import Topic
from llog.model import TopicPartition
from llog.spark.limits import cut_by_bytes, cut_by_records
from llog.spark.offsets import resolve_offsets, selected_partitions, selected_topics, within_bounds
from llog.spark.options import EARLIEST, LATEST, OffsetSpec, Selection
from llog.spark.planner import ReadTask, plan_tasks, read_bounds
from llog.spark.source_log import Range
from llog.spark.stored_log import StoredLog
from tests.unit.world import START_MS, TP, World

OTHER = TopicPartition(TP.topic, 1)


async def plan(world: World, *ranges: Range, size: int = 1 << 30, tasks: int = 1, fail: bool = True) -> list[ReadTask]:
    topics = {TP.topic: await world.catalog.get(TP.topic)}
    return await plan_tasks(
        world.log, ranges, topics, pin=None, task_bytes_max=size, min_tasks=tasks, fail_on_data_loss=fail
    )


def offsets(tasks: list[ReadTask]) -> list[tuple[TopicPartition, int]]:
    found = [
        (located.tp, offset)
        for task in tasks
        for located in task.ranges
        for offset in range(located.start, located.stop)
    ]
    for task in tasks:
        for located in task.ranges:
            assert located.extents[0].start_offset <= located.start < located.stop <= located.extents[-1].end_offset + 1
    return sorted(found)


async def test_small_runs_share_a_task_and_every_record_is_planned_once(world: World) -> None:
    for _ in range(3):
        await world.append("a", "b", "c")
        await world.append("d", "e", tp=OTHER)
    tasks = await plan(world, Range(TP, 2, 9), Range(OTHER, 1, 7), Range(TopicPartition(TP.topic, 2), 1, 1))
    assert len(tasks) == 1
    assert offsets(tasks) == [(TP, n) for n in range(2, 9)] + [(OTHER, n) for n in range(1, 7)]


async def test_a_partition_is_cut_between_its_extents_where_it_is_too_large_for_a_task(world: World) -> None:
    for _ in range(6):
        await world.append("x" * 1000, "y" * 1000)
    tasks = await plan(world, Range(TP, 1, 13), size=4500)
    assert len(tasks) == 3
    assert offsets(tasks) == [(TP, n) for n in range(1, 13)]
    assert all((task.ranges[0].stop - task.ranges[0].start) == 4 for task in tasks)


@pytest.mark.parametrize("wanted", [1, 2, 5, 10, 40])
async def test_there_are_as_many_tasks_as_asked_for_if_there_are_as_many_records(world: World, wanted: int) -> None:
    await world.append(*map(str, range(10)))
    await world.append(*map(str, range(5)), tp=OTHER)
    tasks = await plan(world, Range(TP, 1, 11), Range(OTHER, 1, 6), tasks=wanted)
    assert len(tasks) == min(wanted, 15)
    assert offsets(tasks) == [(TP, n) for n in range(1, 11)] + [(OTHER, n) for n in range(1, 6)]


async def test_retention_while_a_read_is_planned_is_a_loss_that_can_be_gone_without(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(4):
        await world.append("a", "b", "c")
    await trim(world.log, TP, 7)
    with pytest.raises(DataLoss, match="3 records of orders/0 from offset 4 on are gone by retention: it starts at 7"):
        await plan(world, Range(TP, 4, 10))
    with caplog.at_level(logging.WARNING, "llog.spark"):
        tasks = await plan(world, Range(TP, 4, 10), fail=False)
    assert offsets(tasks) == [(TP, 7), (TP, 8), (TP, 9)]
    assert "3 records" in caplog.text


async def test_a_topic_that_is_created_again_while_it_is_planned_is_not_taken_for_the_old_one(world: World) -> None:
    old = await world.catalog.get(TP.topic)
    await world.catalog.delete(TP.topic)
    await world.catalog.create(TP.topic, 4)
    await world.append("new")
    with pytest.raises(DataLoss, match="deleted while its read was planned"):
        await plan_tasks(
            world.log,
            [Range(TP, 1, 2)],
            {TP.topic: old},
            pin=None,
            task_bytes_max=1,
            min_tasks=1,
            fail_on_data_loss=False,
        )


def test_what_lies_outside_the_bounds_is_lost_and_named(caplog: pytest.LogCaptureFixture) -> None:
    bounds = Bounds(10, 20)
    assert within_bounds(Range(TP, 10, 20), bounds, fail_on_data_loss=True) == (TP, 10, 20)
    with pytest.raises(
        DataLoss, match=r"7 records of orders/0 from offset 3 on are gone by retention: it starts at 10"
    ):
        within_bounds(Range(TP, 3, 15), bounds, fail_on_data_loss=True)
    with pytest.raises(DataLoss, match=r"offset 25 of orders/0 is beyond its next offset 20"):
        within_bounds(Range(TP, 12, 25), bounds, fail_on_data_loss=True)
    with caplog.at_level(logging.WARNING, "llog.spark"):
        assert within_bounds(Range(TP, 3, 25), bounds, fail_on_data_loss=False) == (TP, 10, 20)
        assert within_bounds(Range(TP, 1, 4), bounds, fail_on_data_loss=False) == (TP, 10, 10)
        assert within_bounds(Range(TP, 30, 40), bounds, fail_on_data_loss=False) == (TP, 20, 20)
    assert len(caplog.records) == 4


async def test_positions_by_offset_by_time_and_by_rule(world: World) -> None:
    await world.append("a", "b")
    world.runtime.now += 60_000
    await world.append("c")
    bounds = await read_bounds(world.log, [TP, OTHER])

    async def resolve(position: OffsetSpec, *, start: bool = True) -> list[int]:
        return list((await resolve_offsets(StoredLog(world.log), position, bounds, is_start=start)).values())

    assert await resolve(OffsetSpec(everywhere=EARLIEST)) == [1, 1]
    assert await resolve(OffsetSpec(everywhere=LATEST)) == [4, 1]
    assert await resolve(OffsetSpec(offsets={str(TP): 0, str(OTHER): LATEST})) == [1, 1]
    assert await resolve(OffsetSpec(offsets={str(TP): 3, str(OTHER): EARLIEST})) == [3, 1]
    assert await resolve(OffsetSpec(ago_ms=30_000)) == [3, 1]
    later = START_MS + 1
    assert await resolve(OffsetSpec(timestamp_ms=later, latest_if_missing=True)) == [3, 1]
    assert await resolve(OffsetSpec(timestamp_ms=later), start=False) == [3, 1]
    with pytest.raises(InvalidArgument, match="no record of orders/1 has the starting timestamp"):
        await resolve(OffsetSpec(timestamp_ms=later))
    with pytest.raises(ConfigurationError, match=r"missing are \['orders/1'\], not read are \['orders/9'\]"):
        await resolve(OffsetSpec(offsets={str(TP): 1, "orders/9": 1}))


async def test_which_partitions_are_read(world: World) -> None:
    await world.catalog.create("other", 1)
    found = await selected_topics(StoredLog(world.log), Selection(pattern="o.*r"))
    assert selected_partitions(Selection(pattern="o.*r"), found) == [TopicPartition("other", 0)]
    assert await selected_topics(StoredLog(world.log), Selection(pattern="none")) == {}
    assigned = Selection(assigned=(OTHER, TopicPartition(TP.topic, 4)))
    with pytest.raises(ConfigurationError, match="partition 4 of topic 'orders', which has 4"):
        selected_partitions(assigned, await selected_topics(StoredLog(world.log), assigned))
    assert selected_partitions(assigned, dict[str, Topic]()) == []


@given(st.dictionaries(st.integers(0, 30), st.integers(0, 1000), max_size=20), st.integers(1, 2000))
def test_a_cut_by_records_keeps_the_limit_and_passes_no_partition_over(waiting: dict[int, int], limit: int) -> None:
    starts = {TopicPartition("t", p): 5 for p in waiting}
    ends = {TopicPartition("t", p): 5 + count for p, count in waiting.items()}
    cut = cut_by_records(starts, ends, limit)
    assert all(starts[tp] <= cut[tp] <= ends[tp] for tp in ends)
    assert all(cut[tp] > starts[tp] for tp in ends if ends[tp] > starts[tp])
    busy = sum(count > 0 for count in waiting.values())
    assert sum(cut[tp] - starts[tp] for tp in ends) <= max(limit, busy)
    if sum(waiting.values()) <= limit:
        assert cut == ends


async def test_a_cut_by_bytes_takes_about_its_share_of_each_partition_and_at_least_one_record(world: World) -> None:
    for _ in range(10):
        await world.append(*["x" * 100] * 10)
    await world.append("y" * 1000, tp=OTHER)
    starts, ends = {TP: 1, OTHER: 1}, {TP: 101, OTHER: 2}

    async def cut(limit: int) -> dict[TopicPartition, int]:
        return await cut_by_bytes(world.log, starts, ends, limit, fail_on_data_loss=True)

    assert await cut(1 << 20) == ends
    assert await cut(1) == {TP: 2, OTHER: 2}
    half = await cut(6500)
    assert half[OTHER] == 2
    assert 40 <= half[TP] <= 60
    await trim(world.log, TP, 11)
    with pytest.raises(DataLoss, match="10 records of orders/0 from offset 1 on are gone by retention"):
        await cut(6500)


async def test_a_cut_by_bytes_goes_at_once_to_the_end_of_a_partition_of_which_nothing_is_left(world: World) -> None:
    for _ in range(10):
        await world.append(*["x" * 100] * 10)
        await world.append(*["y" * 100] * 10, tp=OTHER)
    await trim(world.log, TP, 101)
    starts, ends = {TP: 1, OTHER: 1}, {TP: 101, OTHER: 101}
    cut = await cut_by_bytes(world.log, starts, ends, 3000, fail_on_data_loss=False)
    assert cut[TP] == 101
    assert 10 <= cut[OTHER] <= 40
