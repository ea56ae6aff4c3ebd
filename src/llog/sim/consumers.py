"""Members of consumer groups, and the operator who resets them now and then.

A member takes a new name with every life, and after every consume that failed, and acknowledges nothing under the old
one any more: what that call may have claimed was never delivered, and an ACK under the same name would pass over it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from llog.engines.routing import EngineReader
from llog.errors import LlogError, OffsetOutOfRange, StaleMember
from llog.groups.assignment import Membership
from llog.groups.consumption import ConsumeCall, Consuming, Start
from llog.groups.groups import Groups
from llog.groups.records import GroupMode
from llog.log.log import Log
from llog.model import TopicPartition
from llog.sim.group_history import Place
from llog.sim.process import Process
from llog.sim.roles import PARTITIONS, STABLE, met
from llog.sim.violation import Violation

if TYPE_CHECKING:
    from llog.sim.world import World

_SHARED: Final = PARTITIONS[:2]
_FAR: Final = 10_000


class Held(NamedTuple):
    """What one call delivered in one partition, and under which name."""

    place: Place
    member: str
    start: int
    end: int


class Member:
    """One member at work."""

    def __init__(self, world: World, me: Process, log: Log, group: str, mode: GroupMode) -> None:
        self.history = world.history.groups
        self.count = world.trace.count
        self.plan = world.plan
        self.me = me
        self.draw = me.runtime.random()
        self.group = group
        self.mode = mode
        self.reader = EngineReader(log)
        self.groups = Groups(log, self.reader)
        self.consuming = Consuming(log, self.reader)
        self.earliest = group.endswith("earliest")
        self.held: list[Held] = []
        self._names = 0

    @property
    def name(self) -> str:
        return f"{self.me.name}.{self._names}"

    def failed(self) -> None:
        """A consume did not tell what it claimed."""
        self._names += 1
        self.held.clear()

    async def consume(self, tp: TopicPartition, limit: int, membership: Membership | None = None) -> bool:
        """Claims from one partition; whether there was something."""
        place, name = Place(self.group, tp), self.name
        self.history.claims(self.me, place, name, membership.generation if membership else 0)
        visibility_ms = self.plan.visibility_ms
        claims = await self.groups.claim(
            self.group, tp, name, limit=limit, visibility_ms=visibility_ms, membership=membership
        )
        if claims is None:
            await self._begin()
            return True
        self.history.delivered(place, name, claims)
        for claim in claims:
            self.count("redeliveries" if claim.attempt > 1 else "deliveries")
        self.held += [Held(place, name, claim.start, claim.end) for claim in claims]
        return bool(claims)

    async def _begin(self) -> None:
        """Gives the group its first positions, partition 0 last: with that one, it has begun."""
        for tp in reversed(_SHARED):
            place, bounds = Place(self.group, tp), await self.reader.bounds(tp)
            self.history.begins(self.me, place, earliest=self.earliest)
            offset = bounds.log_start_offset if self.earliest else bounds.next_offset
            await self.groups.begin(self.group, tp, offset, mode=self.mode)
            self.history.has_begun(place)

    async def consume_all(self, limit: int) -> None:
        """As SQL and HTTP do: reads what it claims, and gives back what does not fit."""
        name = self.name
        for tp in _SHARED:
            place = Place(self.group, tp)
            self.history.claims(self.me, place, name)
            self.history.gives_back(self.me, place, name)
            self.history.begins(self.me, place, earliest=self.earliest)
        call = ConsumeCall(
            topic=STABLE,
            group=self.group,
            member=name,
            start=Start("earliest" if self.earliest else "latest"),
            limit=limit,
            wait_ms=self.draw.choice((0, 500)),
            visibility_ms=self.plan.visibility_ms,
            max_bytes=self.draw.choice((1, 30, 1 << 20)),
        )
        table = await self.consuming.consume(call)
        partitions, offsets = table["partition"].to_pylist(), table["offset"].to_pylist()
        for tp in _SHARED:
            place = Place(self.group, tp)
            self.history.has_begun(place)
            got = [offset for offset, partition in zip(offsets, partitions, strict=True) if partition == tp.partition]
            self.history.consumed(place, name, got)
            self.held += [Held(place, name, offset, offset) for offset in got]

    async def ack(self, held: Held, upto: int) -> None:
        """Cumulative: whatever the same name got below is done, too."""
        self.history.acks(self.me, held.place, held.member, upto)
        since = self.history.moment
        await self.groups.ack(self.group, held.place.tp, held.member, upto)
        self.history.acked(self.me, held.place, held.member, upto, since)
        self.count("acks")
        self.held = [
            each for each in self.held if (each.place, each.member) != (held.place, held.member) or each.end > upto
        ]

    async def ack_too_much(self, tp: TopicPartition) -> None:
        bounds = await self.reader.bounds(tp)
        try:
            await self.groups.ack(self.group, tp, self.name, bounds.next_offset + _FAR)
        except OffsetOutOfRange:
            return
        raise Violation(f"I7: {self.name} of group {self.group} acknowledged {_FAR} records beyond the end of {tp}")

    async def put_back(self, held: Held) -> None:
        self.held.remove(held)
        self.history.gives_back(self.me, held.place, held.member)
        tp = held.place.tp
        if self.draw.random() < 0.5:
            await self.groups.give_back(self.group, tp, held.member, [(held.start, held.end)])
        else:
            await self.groups.release(
                self.group, tp, held.member, held.start, delay_ms=self.draw.choice((0, self.plan.visibility_ms))
            )

    async def work(self) -> None:
        """Something with what it holds, in any order: processes and acknowledges it, puts it back, or forgets it."""
        draw = self.draw
        await self.me.runtime.sleep(draw.choice((0.1, 1.0, 1.5 * self.plan.visibility_ms / 1000)) * draw.random())
        for _ in range(draw.choice((0, 1, 1, 2))):
            if not self.held:
                return
            held = draw.choice(self.held)
            what = draw.random()
            if what < 0.1:
                await self.put_back(held)
            elif what < 0.15:
                self.held.remove(held)
            elif what < 0.2:
                await self.ack_too_much(held.place.tp)
            else:
                await self.ack(held, draw.choice((held.end, draw.randint(held.start, held.end))))


def claimed_group(world: World, number: int) -> str:
    """Groups that begin at the earliest record, and such that begin at the latest."""
    which = number % world.plan.groups
    return f"claimed-{which}-{('earliest', 'latest')[which % 2]}"


ASSIGNED: Final = "assigned-earliest"


async def consumer(world: World, me: Process, log: Log) -> None:
    """A member of a claimed group."""
    group = claimed_group(world, int(me.role.rpartition("-")[2]))
    member = Member(world, me, log, group, GroupMode.CLAIMED)
    draw = me.runtime.random()
    while True:
        await me.runtime.sleep(draw.expovariate(3.0))
        try:
            if draw.random() < 0.4:
                await member.consume_all(draw.randint(1, 8))
            else:
                await member.consume(draw.choice(_SHARED), draw.randint(1, 8))
        except LlogError as error:
            met(error)
            member.failed()
            continue
        try:
            await member.work()
        except LlogError as error:
            met(error)


async def assignee(world: World, me: Process, log: Log) -> None:
    """A member of an assigned group, that joins, leaves, and is now and then too slow to stay."""
    member = Member(world, me, log, ASSIGNED, GroupMode.ASSIGNED)
    draw = me.runtime.random()
    while True:
        await me.runtime.sleep(draw.expovariate(3.0))
        try:
            membership = await member.groups.join(ASSIGNED, STABLE, member.name, session_ms=world.plan.visibility_ms)
            world.history.groups.joined(ASSIGNED, STABLE, membership)
            await me.runtime.sleep(draw.choice((0.0, 0.5)) * draw.random())
            for partition in membership.partitions:
                await member.consume(TopicPartition(STABLE, partition), draw.randint(1, 8), membership)
        except LlogError as error:
            met(error, StaleMember)
            world.trace.count("stale members" if isinstance(error, StaleMember) else "failed calls")
            member.failed()
            continue
        try:
            await member.work()
            if draw.random() < 0.05:
                await member.groups.leave(ASSIGNED, STABLE, member.name)
        except LlogError as error:
            met(error, StaleMember)


async def operator(world: World, me: Process, log: Log) -> None:
    """Resets groups, back and forth, while their members are at work."""
    draw = me.runtime.random()
    reader = EngineReader(log)
    groups = Groups(log, reader)
    while all_groups(world):
        await me.runtime.sleep(draw.expovariate(0.15))
        place = Place(draw.choice(all_groups(world)), draw.choice(_SHARED))
        try:
            if await groups.record(*place) is None:
                continue
            bounds = await reader.bounds(place.tp)
            offset = draw.randint(bounds.log_start_offset, bounds.next_offset)
            world.history.groups.resets(me, place, offset)
            await groups.reset(*place, offset)
            world.trace.count("resets")
        except LlogError as error:
            met(error)


def all_groups(world: World) -> Sequence[str]:
    roles = world.plan.roles
    claimed = [claimed_group(world, number) for number in range(min(world.plan.groups, roles.get("consumer", 0)))]
    return [*claimed, *([ASSIGNED] if roles.get("assignee", 0) else [])]


async def drain(world: World, me: Process, log: Log) -> None:
    """At the end, one member gets all that is left, and acknowledges it."""
    for group in all_groups(world):
        mode = GroupMode.ASSIGNED if group == ASSIGNED else GroupMode.CLAIMED
        member = Member(world, me, log, group, mode)
        membership = None
        if mode is GroupMode.ASSIGNED:
            membership = await member.groups.join(group, STABLE, member.name, session_ms=world.plan.visibility_ms)
        for tp in _SHARED:
            while await member.consume(tp, _FAR, membership):
                for held in list(member.held):
                    await member.ack(held, held.end)
            world.history.groups.check_drained(Place(group, tp))
