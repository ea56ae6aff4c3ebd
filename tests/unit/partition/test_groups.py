from __future__ import annotations

import asyncio

import pytest

from llog.errors import InvalidArgument, OffsetOutOfRange, TopicNotFound
from llog.model import TopicPartition
from llog.partition import groups
from llog.partition.groups import GroupLag
from llog.partition.retention import trim
from tests.unit.partition.world import TP, Interleaved, Stall, World

OTHER = TopicPartition(TP.topic, 1)


async def test_a_committed_position_is_found_again_per_group_and_partition(world: World) -> None:
    await world.append("a", "b", "c")
    assert await groups.position(world.log, "g", TP) is None
    assert await groups.commit(world.log, "g", TP, 3) == 3
    assert await groups.position(world.log, "g", TP) == 3
    assert await groups.position(world.log, "other", TP) is None
    assert await groups.position(world.log, "g", OTHER) is None


async def test_a_commit_never_goes_back(world: World) -> None:
    await world.append("a", "b", "c")
    await groups.commit(world.log, "g", TP, 3)
    assert await groups.commit(world.log, "g", TP, 2) == 3
    assert await groups.position(world.log, "g", TP) == 3


async def test_a_late_commit_of_a_stalled_consumer_takes_nothing_back(world: World) -> None:
    await world.append("a", "b", "c")
    stall = Stall(lambda operation, key: operation == "put")
    late = asyncio.create_task(groups.commit(world.process(stall), "g", TP, 2))
    await stall.stalled.wait()
    await groups.commit(world.log, "g", TP, 4)
    stall.go.set()
    assert await late == 4
    assert await groups.position(world.log, "g", TP) == 4


@pytest.mark.parametrize("seed", range(5))
async def test_racing_commits_leave_the_highest(world: World, seed: int) -> None:
    await world.append(*"abcdefgh")
    consumers = [world.process(Interleaved(seed * 10 + number)) for number in range(8)]
    await asyncio.gather(*(groups.commit(log, "g", TP, number + 2) for number, log in enumerate(consumers)))
    assert await groups.position(world.log, "g", TP) == 9


async def test_positions_outside_the_log_are_refused(world: World) -> None:
    await world.append("a")
    for change in (groups.commit, groups.reset):
        with pytest.raises(OffsetOutOfRange):
            await change(world.log, "g", TP, 3)
        with pytest.raises(InvalidArgument):
            await change(world.log, "g", TP, 0)
    with pytest.raises(TopicNotFound):
        await groups.commit(world.log, "g", TopicPartition("nothing", 0), 1)
    with pytest.raises(InvalidArgument, match="group name"):
        await groups.commit(world.log, "g/h", TP, 1)


async def test_reset_may_go_back(world: World) -> None:
    await world.append("a", "b")
    await groups.commit(world.log, "g", TP, 3)
    await groups.reset(world.log, "g", TP, 1)
    assert await groups.position(world.log, "g", TP) == 1


async def test_all_groups_are_listed_once(world: World) -> None:
    await world.append("a")
    await world.append("a", tp=OTHER)
    for group in ("b", "a", "a.b", "a-b"):
        await groups.commit(world.log, group, TP, 2)
        await groups.commit(world.log, group, OTHER, 1)
    assert sorted(await groups.groups(world.log)) == ["a", "a-b", "a.b", "b"]


async def test_lag_counts_what_is_still_there_to_read(world: World) -> None:
    await world.append("a", "b", "c", "d")
    await world.append("a", tp=OTHER)
    await groups.commit(world.log, "g", TP, 2)
    await groups.commit(world.log, "g", OTHER, 2)
    await groups.commit(world.log, "h", TP, 1)
    await trim(world.log, TP, 4)
    assert await groups.lag(world.log, "g") == [
        GroupLag(topic=TP.topic, partition=0, offset=2, next_offset=5, lag=1),
        GroupLag(topic=TP.topic, partition=1, offset=2, next_offset=2, lag=0),
    ]


async def test_a_topic_created_again_starts_its_groups_anew(world: World) -> None:
    await world.append("a", "b", "c")
    await groups.commit(world.log, "g", TP, 4)
    await world.catalog.delete(TP.topic)
    assert await groups.lag(world.log, "g") == []
    await world.catalog.create(TP.topic, 1)
    assert await groups.position(world.log, "g", TP) is None
    assert await groups.commit(world.log, "g", TP, 1) == 1
