"""Brokers that coordinate Kafka groups over one metadata store in memory, each with its own view of who coordinates."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from llog.groups.groups import Groups
from llog.kafka.error_codes import ErrorCode
from llog.kafka.groups.coordinator import GroupCoordinator
from llog.kafka.groups.group import INITIAL_DELAY_MS
from llog.kafka.groups.membership import Identity, JoinAnswer, SyncAnswer, SyncRequest
from llog.kafka.groups.offsets import Commit
from llog.kafka.nodes import Node
from llog.log.log import Log
from llog.model import TopicPartition
from tests.unit.kafka.group_members import join_request
from tests.unit.world import TP, World

T = TypeVar("T")
NODES = {number: Node(number, "127.0.0.1", 9000 + number) for number in (1, 2)}


class View:
    """A broker's view: which broker coordinates every group."""

    def __init__(self, me: int, coordinator: int | None) -> None:
        self.me = NODES[me]
        self.coordinator = coordinator

    def coordinator_of(self, group: str) -> Node | None:
        return None if self.coordinator is None else NODES[self.coordinator]


class Broker:
    """One broker, which believes that it coordinates every group until a test sets its view."""

    def __init__(self, world: World, number: int = 1, log: Log | None = None) -> None:
        self.world = world
        self.view = View(number, number)
        self.groups = Groups(log or world.process())
        self.coordinator = GroupCoordinator(self.groups, self.view)

    async def pass_time(self, ms: int) -> None:
        self.world.runtime.now += ms
        self.coordinator.tick()
        await settle()

    async def start(self, name: str = "g", members: int = 1) -> list[JoinAnswer]:
        """Members of a stable group; the first leads it."""
        waiting = [asyncio.create_task(self.coordinator.join(name, join_request())) for _ in range(members)]
        await settle()
        await self.pass_time(INITIAL_DELAY_MS)
        joined = [await each for each in waiting]
        assert {each.error for each in joined} == {ErrorCode.NONE}
        await asyncio.gather(*(self.sync(each, name) for each in joined))
        return joined

    async def sync(self, joined: JoinAnswer, name: str = "g") -> SyncAnswer:
        request = SyncRequest(
            Identity(joined.member_id),
            joined.generation,
            None,
            None,
            {each.member.member_id: b"assigned" for each in joined.members},
        )
        return await self.coordinator.sync(name, request)

    async def commit(
        self, joined: JoinAnswer | None, offset: int, tp: TopicPartition = TP, *, name: str = "g", metadata: str = ""
    ) -> ErrorCode:
        """Commit as this member, or as a consumer without a group."""
        member_id, generation = ("", -1) if joined is None else (joined.member_id, joined.generation)
        commits = {tp: Commit(offset, 5, metadata)}
        return (await self.coordinator.commit(name, Identity(member_id), generation, commits))[tp]

    def heartbeat(self, joined: JoinAnswer, name: str = "g") -> ErrorCode:
        return self.coordinator.heartbeat(name, Identity(joined.member_id), joined.generation)

    async def committed(self, tp: TopicPartition = TP, name: str = "g") -> int | None:
        found = await self.coordinator.fetch(name, [tp])
        assert not isinstance(found, ErrorCode)
        commit = found.get(tp)
        assert not isinstance(commit, ErrorCode)
        return None if commit is None else commit.offset


async def settle() -> None:
    """Let everything happen that waits for no clock."""
    for _ in range(50):
        await asyncio.sleep(0)


async def started(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    task = asyncio.create_task(work)
    await settle()
    return task
