"""Consuming by the members of assigned groups."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from llog.errors import GroupConflict, InvalidArgument, StaleMember
from llog.groups.group_partition import GroupPartition
from tests.unit.groups.dispatcher_world import ENGINES, World, numbers, opened_world, places


@pytest.fixture(params=ENGINES)
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    async with opened_world(request.param, tmp_path) as made:
        yield made


async def test_assigned_members_have_partitions_of_their_own_and_share_anew_when_one_dies(world: World) -> None:
    await world.create(partitions=4)
    for partition in range(4):
        await world.append("1", "2", partition=partition)
    assigned: dict[str, Any] = {"mode": "assigned", "visibility_ms": 10_000}
    a = await world.consume("a", **assigned)
    assert {p for p, _ in places(a)} == {0, 1, 2, 3}
    b = await world.consume("b", **assigned)
    hers = {p for p, _ in places(b)}
    assert len(hers) == 2
    assert {p for p, _ in places(await world.consume("a", **assigned))} == set(), "a was given its own again"
    with pytest.raises(StaleMember):
        await world.dispatcher.ack("t", "g", dict.fromkeys(hers, 2), "a")
    for partition in hers:
        await world.ack(1, "b", partition)
    world.clock.ahead_ms = 6_000
    await world.consume("a", **assigned)
    world.clock.ahead_ms = 12_000
    rest = await world.consume("a", **assigned)
    assert {(p, o) for p, o in places(rest) if p in hers} == {(p, 2) for p in hers}


async def test_an_assigned_member_that_waits_takes_over_from_one_that_died(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llog.groups.dispatcher.LOOK_AGAIN_S", 60.0)
    await world.create(partitions=2)
    for member in ("a", "dead"):
        await world.consume(member, mode="assigned", visibility_ms=1_000)
    waiting = asyncio.ensure_future(world.consume("a", mode="assigned", visibility_ms=1_000, wait_ms=30_000))
    await world.append("x", partition=1)
    assert places(await asyncio.wait_for(waiting, 20)) == [(1, 1)]


async def test_a_member_that_waits_for_what_it_released_sleeps_until_then(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.create()
    await world.append(*numbers(1, 6))
    assert await world.offsets("a", mode="assigned", limit=2) == [1, 2]
    assert await world.dispatcher.release("t", "g", 0, 1, member="a", delay_ms=500)
    real, claims = GroupPartition.claim, 0

    async def claim(self: GroupPartition, *arguments: Any, **options: Any) -> Any:
        nonlocal claims
        claims += 1
        return await real(self, *arguments, **options)

    monkeypatch.setattr(GroupPartition, "claim", claim)
    assert await world.offsets("a", mode="assigned", wait_ms=30_000, limit=2) == [1, 2]
    assert claims < 10, "it looked again and again"


async def test_a_member_whose_partitions_change_under_it_looks_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.create()
    await world.append("x")
    real, stale = GroupPartition.claim, [StaleMember("others came")]

    async def claim(self: GroupPartition, *arguments: Any, **options: Any) -> Any:
        if stale:
            raise stale.pop()
        return await real(self, *arguments, **options)

    monkeypatch.setattr(GroupPartition, "claim", claim)
    assert await world.offsets("a", mode="assigned") == [1]


async def test_an_assigned_group_needs_names_and_is_not_mixed_with_a_claimed_one(world: World) -> None:
    await world.create()
    await world.append("a")
    with pytest.raises(InvalidArgument, match="name yours"):
        await world.consume("", mode="assigned")
    await world.consume("a", mode="assigned")
    with pytest.raises(GroupConflict):
        await world.consume("b")
