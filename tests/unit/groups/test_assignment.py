"""Members of assigned groups, and what each has."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llog.errors import InvalidArgument, OutcomeUnknown, StaleMember
from llog.groups import assignment
from llog.groups.assignment import Assignments, member_partitions, partition_holder
from llog.log.keys import members_key
from llog.log.records import Topic
from tests.unit.world import TP, Faults, Interleaved, LostAnswers, World

SESSION_MS = 9000


@given(st.sets(st.text(max_size=3), min_size=1, max_size=8), st.integers(1, 30))
def test_every_partition_has_one_member_and_shares_differ_by_one_at_most(members: set[str], partitions: int) -> None:
    shares = {member: list(member_partitions(members, member, partitions)) for member in members}
    assert sorted(p for each in shares.values() for p in each) == list(range(partitions))
    assert max(map(len, shares.values())) - min(map(len, shares.values())) <= 1
    assert all(partition_holder(members, p) == member for member, each in shares.items() for p in each)


def test_without_members_nobody_has_a_partition() -> None:
    assert partition_holder((), 0) is None


class Group:
    def __init__(self, world: World, topic: Topic) -> None:
        self.world, self.topic = world, topic

    def process(self, faults: Faults | None = None) -> Assignments:
        return Assignments(self.world.process(faults))

    async def join(self, member: str) -> tuple[int, tuple[int, ...]]:
        joined = await self.process().join("g", self.topic, member, SESSION_MS)
        return joined.generation, joined.partitions

    async def heartbeat(self, member: str) -> tuple[int, tuple[int, ...]]:
        joined = await self.process().heartbeat("g", self.topic, member, SESSION_MS)
        return joined.generation, joined.partitions


@pytest.fixture
async def group() -> Group:
    world = World()
    return Group(world, await world.catalog.create(TP.topic, 4))


async def test_partitions_move_when_members_come_and_go(group: Group) -> None:
    assert await group.join("b") == (1, (0, 1, 2, 3))
    assert await group.join("a") == (2, (0, 2))
    assert await group.heartbeat("b") == (2, (1, 3))
    assert await group.join("c") == (3, (2,))
    assert await group.join("a") == (3, (0, 3))
    await group.process().leave("g", group.topic, "a")
    assert await group.heartbeat("b") == (4, (0, 2))
    await group.process().leave("g", group.topic, "a")
    assert await group.heartbeat("c") == (4, (1, 3))
    with pytest.raises(StaleMember, match="Join again"):
        await group.heartbeat("a")


async def test_a_silent_member_is_dropped_by_whoever_comes(group: Group) -> None:
    await group.join("a")
    group.world.runtime.now += SESSION_MS // 2
    await group.join("b")
    group.world.runtime.now += SESSION_MS // 2
    assert await group.heartbeat("b") == (3, (0, 1, 2, 3))
    with pytest.raises(StaleMember):
        await group.heartbeat("a")
    assert await group.join("a") == (4, (0, 2))


async def test_a_late_heartbeat_counts_as_long_as_nobody_noticed(group: Group) -> None:
    await group.join("a")
    group.world.runtime.now += 2 * SESSION_MS
    assert await group.heartbeat("a") == (1, (0, 1, 2, 3))
    group.world.runtime.now += SESSION_MS - 1
    assert await group.join("b") == (2, (1, 3))


async def test_a_heartbeat_soon_after_another_writes_nothing(group: Group) -> None:
    await group.join("a")
    faults = Faults()
    process = group.process(faults)
    for _ in range(3):
        await process.heartbeat("g", group.topic, "a", SESSION_MS)
        group.world.runtime.now += SESSION_MS // 10
    assert [operation for operation, _ in faults.calls] == ["get"] * 3
    group.world.runtime.now += SESSION_MS // 10
    await process.heartbeat("g", group.topic, "a", SESSION_MS)
    assert faults.calls[-1] == ("put", members_key("g", TP.topic))


async def test_a_clock_that_went_back_does_not_keep_the_dead_alive(group: Group) -> None:
    await group.join("a")
    group.world.runtime.now -= 100 * SESSION_MS
    await group.join("a")
    group.world.runtime.now += SESSION_MS
    assert await group.join("b") == (2, (0, 1, 2, 3))


async def test_the_generation_goes_on_after_all_have_left(group: Group) -> None:
    await group.join("a")
    await group.process().leave("g", group.topic, "a")
    assert await group.join("b") == (3, (0, 1, 2, 3))


@pytest.mark.parametrize("seed", range(5))
async def test_all_who_join_at_once_are_members(group: Group, seed: int) -> None:
    names = [f"m{number}" for number in range(6)]
    processes = [group.process(Interleaved(seed * 10 + number)) for number in range(6)]
    joined = await asyncio.gather(
        *(each.join("g", group.topic, name, SESSION_MS) for each, name in zip(processes, names, strict=True))
    )
    assert sorted(each.generation for each in joined) == [1, 2, 3, 4, 5, 6]
    members = await group.process().members("g", group.topic)
    assert (members.generation, sorted(members.deadlines)) == (6, names)


@pytest.mark.parametrize("done", [True, False])
async def test_a_lost_answer_makes_no_second_generation(group: Group, done: bool) -> None:
    def lost() -> Assignments:
        error = OutcomeUnknown("the answer was lost")
        return group.process(LostAnswers(error, lambda operation, key: operation == "put", done=done))

    assert (await lost().join("g", group.topic, "a", SESSION_MS)).generation == 1
    await lost().leave("g", group.topic, "a")
    assert (await group.process().members("g", group.topic)).generation == 2


async def test_there_are_only_so_many_members(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assignment, "MEMBERS_MAX", 2)
    await group.join("a")
    await group.join("b")
    with pytest.raises(InvalidArgument, match="2 members"):
        await group.join("c")
    with pytest.raises(InvalidArgument, match="from 1 to"):
        await group.process().join("g", group.topic, "a", 0)


async def test_a_member_alive_until_a_time_farther_ahead_than_any_session_is_dropped(group: Group) -> None:
    now = group.world.runtime.now
    group.world.runtime.now += 400 * 86_400_000
    await group.join("ahead")
    group.world.runtime.now = now
    assert await group.join("b") == (2, (0, 1, 2, 3))
