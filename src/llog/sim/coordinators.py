"""Brokers that coordinate a group of Kafka clients, each of which believes for a while that it alone does so.

The members of a broker end with it. They know no records: what counts is who may commit, and what is found again.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Final

import msgspec

from llog.groups.groups import Groups
from llog.kafka.error_codes import ErrorCode
from llog.kafka.groups.coordinator import GroupCoordinator
from llog.kafka.groups.membership import AssignmentProtocol, Identity, JoinAnswer, JoinRequest, SyncRequest
from llog.kafka.groups.offsets import Commit
from llog.kafka.nodes import Node
from llog.log.log import Log
from llog.model import TopicPartition
from llog.sim.kafka_history import KAFKA_GROUP
from llog.sim.outcome import Violation
from llog.sim.process import Process
from llog.sim.roles import STABLE

if TYPE_CHECKING:
    from llog.sim.world import World

_MEMBERS: Final = 2
_SHARED: Final = (TopicPartition(STABLE, 0), TopicPartition(STABLE, 1))
_SESSION_MS: Final = 3_000
_REBALANCE_MS: Final = 2_000
_OFFSETS: Final = 1_000
_PROTOCOLS: Final = (AssignmentProtocol("range", b""),)
_EXPECTED: Final = frozenset(
    {
        ErrorCode.NONE,
        ErrorCode.COORDINATOR_NOT_AVAILABLE,
        ErrorCode.NOT_COORDINATOR,
        ErrorCode.UNKNOWN_MEMBER_ID,
        ErrorCode.ILLEGAL_GENERATION,
        ErrorCode.REBALANCE_IN_PROGRESS,
    }
)
"""What a member has to bear. It joins again, or anew."""


class _Doubtful:
    """A view of the live brokers that is often wrong: it names this broker, or another one."""

    def __init__(self, me: Process) -> None:
        self.me = Node(me.life, me.name, 1)
        self.is_me = True

    def coordinator_of(self, group: str) -> Node | None:
        return self.me if self.is_me else Node(0, "another", 1)

    async def change_for_ever(self, me: Process) -> None:
        draw = me.runtime.random()
        while True:
            await me.runtime.sleep(draw.expovariate(0.1 if self.is_me else 1.0))
            self.is_me = not self.is_me


async def coordinator(world: World, me: Process, log: Log) -> None:
    view = _Doubtful(me)
    broker = GroupCoordinator(Groups(log), view)
    members = [Member(world, me, broker, number).live() for number in range(_MEMBERS)]
    await asyncio.gather(broker.run(), view.change_for_ever(me), *members)


class Member:
    """A consumer of one broker."""

    def __init__(self, world: World, me: Process, broker: GroupCoordinator, number: int) -> None:
        self._history = world.history.kafka
        self._count = world.trace.count
        self._me = me
        self._broker = broker
        self._draw = me.runtime.random()
        self._name = f"{me.name}.{number}"
        self._names = (f"{self._name}#{number}" for number in itertools.count())
        self._id = ""
        self._late: asyncio.Task[bool] | None = None

    async def live(self) -> None:
        """Join again and again, and leave now and then."""
        while True:
            await self._me.runtime.sleep(self._draw.expovariate(1.0))
            if self._late is not None and self._late.done():
                self._late.result()
                self._late = None
            joined = await self._join()
            if joined is not None:
                await self._work(joined, await self._sync(joined))
            if self._id and self._draw.random() < 0.1:
                self._broker.leave(KAFKA_GROUP, [Identity(self._id)])
                self._id = ""

    async def _join(self) -> JoinAnswer | None:
        request = JoinRequest(
            Identity(self._id), self._name, "", _SESSION_MS, _REBALANCE_MS, "consumer", _PROTOCOLS, needs_known_id=True
        )
        answer = await self._broker.join(KAFKA_GROUP, request)
        if answer.error is ErrorCode.MEMBER_ID_REQUIRED:
            answer = await self._broker.join(KAFKA_GROUP, request._replace(member=Identity(answer.member_id)))
        if not self._is_fine(answer.error):
            return None
        self._id = answer.member_id
        self._history.joined(self._me.name, answer.generation)
        self._count("kafka generations" if answer.members else "kafka joins")
        return answer

    async def _sync(self, joined: JoinAnswer) -> list[TopicPartition]:
        ids = [each.member.member_id for each in joined.members]
        dealt: dict[str, list[int]] = {member_id: [] for member_id in ids}
        for tp in _SHARED if ids else ():
            dealt[self._draw.choice(ids)].append(tp.partition)
        assignments = {member_id: msgspec.json.encode(partitions) for member_id, partitions in dealt.items()}
        request = SyncRequest(Identity(self._id), joined.generation, "consumer", "range", assignments)
        answer = await self._broker.sync(KAFKA_GROUP, request)
        if not self._is_fine(answer.error):
            return []
        mine = [_SHARED[number] for number in msgspec.json.decode(answer.assignment or b"[]", type=list[int])]
        for tp in mine:
            self._history.assigned(self._id, joined.generation, tp)
        return mine

    async def _work(self, joined: JoinAnswer, mine: list[TopicPartition]) -> None:
        """Fetch and commit until the member has to join again."""
        while self._id:
            await self._me.runtime.sleep(self._draw.choice((0.1, 0.3, 1.0, 4.0)) * self._draw.random())
            if self._draw.random() < 0.5:
                await self._fetch(self._draw.choice(_SHARED))
            if mine and self._late is None and self._draw.random() < 0.3:
                self._late = asyncio.ensure_future(self._commit_late(joined, self._draw.choice(mine)))
            if mine and not await self._commit(joined, self._draw.choice(mine)):
                return
            if not self._is_fine(self._broker.heartbeat(KAFKA_GROUP, Identity(self._id), joined.generation)):
                return
            if self._draw.random() < 0.05:
                return

    async def _fetch(self, tp: TopicPartition) -> None:
        since = self._history.moment(tp)
        found = await self._broker.fetch(KAFKA_GROUP, [tp])
        if isinstance(found, ErrorCode):
            self._is_fine(found)
            return
        commit = found.get(tp)
        assert not isinstance(commit, ErrorCode), commit
        self._history.check_fetched(tp, commit, since)
        self._count("kafka fetches")

    async def _commit_late(self, joined: JoinAnswer, tp: TopicPartition) -> bool:
        """Commit without waiting for the answer, as clients do before they join again."""
        await self._me.runtime.sleep(3 * self._draw.random())
        return await self._commit(joined, tp)

    async def _commit(self, joined: JoinAnswer, tp: TopicPartition) -> bool:
        name, offset = next(self._names), self._draw.randrange(_OFFSETS)
        since = self._history.send(name, tp, offset, joined.generation)
        identity = Identity(self._id)
        results = await self._broker.commit(KAFKA_GROUP, identity, joined.generation, {tp: Commit(offset, -1, name)})
        if not self._is_fine(results[tp]):
            return False
        self._history.check_stored(name, since)
        self._count("kafka commits")
        return True

    def _is_fine(self, error: ErrorCode) -> bool:
        """Return whether there was no error; forget the member's id after one that makes the member join anew."""
        if error not in _EXPECTED:
            raise Violation(f"I11: {self._name} was answered {error!r}")
        if error in (ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.NOT_COORDINATOR):
            self._id = ""
        if error:
            self._count(f"kafka {error.name.lower()}")
        return not error
