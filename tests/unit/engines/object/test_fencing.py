from __future__ import annotations

import asyncio

import pytest

from llog.engines.object.fencing import fence, unfence
from llog.engines.object.writer import Writer
from llog.errors import OutcomeUnknown, PartitionFenced, PartitionNotInitialized, TopicNotFound
from llog.log.records import LogState, encode
from llog.model import TopicPartition
from tests.unit.world import TP, LostAnswers, Stall, World


async def test_a_fenced_partition_takes_no_appends_until_it_is_unfenced(world: World) -> None:
    await world.append("a")
    await fence(world.log, TP)
    await fence(world.log, TP)
    with pytest.raises(PartitionFenced):
        await world.append("b")
    assert await world.payloads() == ["a"]
    await world.append("x", tp=TopicPartition(TP.topic, 1))
    await unfence(world.log, TP)
    await unfence(world.log, TP)
    await world.append("c")
    assert await world.payloads() == ["a", "c"]


async def test_fencing_leaves_the_newest_index_entry_to_the_next_writer(world: World) -> None:
    await world.append("a")
    await fence(world.log, TP)
    await unfence(world.log, TP)
    assert (await world.control()).pending is not None
    assert await world.shape() == []
    await world.append("b")
    assert [(start, end) for start, end, _ in await world.shape()] == [(1, 1)]


async def test_an_append_under_way_does_not_commit_after_the_fence(world: World) -> None:
    stall = Stall(lambda operation, key: operation == "put_many")
    appending = asyncio.create_task(world.append("late", writer=Writer(world.process(stall))))
    await stall.stalled.wait()
    await fence(world.log, TP)
    stall.go.set()
    with pytest.raises(PartitionFenced):
        await appending
    assert await world.payloads() == []


async def test_fencing_loses_no_append_that_wins_the_race(world: World) -> None:
    stall = Stall(lambda operation, key: operation == "put")
    fencing = asyncio.create_task(fence(world.process(stall), TP))
    await stall.stalled.wait()
    await world.append("a")
    stall.go.set()
    await fencing
    assert await world.payloads() == ["a"]
    assert (await world.control()).log_state is LogState.FENCED


async def test_a_fence_whose_answer_was_lost_is_settled(world: World) -> None:
    lost = LostAnswers(OutcomeUnknown("lost"), lambda operation, key: operation == "put", done=True)
    await fence(world.process(lost), TP)
    assert (await world.control()).log_state is LogState.FENCED


async def test_deleted_and_unknown_partitions_are_refused(world: World) -> None:
    with pytest.raises(PartitionNotInitialized):
        await fence(world.log, TopicPartition(TP.topic, 99))
    keys, control = await world.reader.control(TP)
    await world.change_control(log_state=LogState.DELETED)
    for change in (fence, unfence):
        with pytest.raises(PartitionNotInitialized):
            await change(world.log, TP)
    await world.meta.put(keys.control, encode(control))
    await world.catalog.delete(TP.topic)
    with pytest.raises(TopicNotFound):
        await unfence(world.log, TP)
