"""Members of consumer groups, and the operator who resets groups now and then.

A member takes a new name with every life, and after every failed consume, and acknowledges nothing under its old name:
records that the failed call may have claimed were never delivered, and an ACK under the same name would skip them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from llog.engines.routing import EngineReader
from llog.errors import LlogError, OffsetOutOfRange, StaleMember
from llog.groups.assignment import Membership
from llog.groups.dispatcher import Dispatcher
from llog.groups.groups import Groups
from llog.groups.options import ConsumeOptions, Start
from llog.groups.records import GroupMode
from llog.log.log import Log
from llog.model import TopicPartition
from llog.sim.group_history import Subscription
from llog.sim.outcome import Violation
from llog.sim.process import Process
from llog.sim.roles import PARTITIONS, STABLE, raise_unexpected

if TYPE_CHECKING:
    from llog.sim.world import World

_SHARED: Final = PARTITIONS[:2]
_FAR: Final = 10_000


class HeldRange(NamedTuple):
    """The offsets that one call delivered from one partition, and the member's name at that time."""

    subscription: Subscription
    member: str
    start: int
    end: int


class Member:
    """A member of a group in one process."""

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
        self.dispatcher = Dispatcher(log, self.reader)
        self.earliest = group.endswith("earliest")
        self.held: list[HeldRange] = []
        self._names = 0

    @property
    def name(self) -> str:
        return f"{self.me.name}.{self._names}"

    def take_new_name(self) -> None:
        """Take a new name, because a failed consume did not report what it claimed."""
        self._names += 1
        self.held.clear()

    async def consume(self, tp: TopicPartition, limit: int, membership: Membership | None = None) -> bool:
        """Claim from one partition; return whether there was something to do."""
        subscription, name = Subscription(self.group, tp), self.name
        self.history.intend_claim(self.me, subscription, name, membership.generation if membership else 0)
        visibility_ms = self.plan.visibility_ms
        partition = await self.groups.partition(self.group, tp)
        claims = await partition.claim(name, limit=limit, visibility_ms=visibility_ms, membership=membership)
        if claims is None:
            await self._begin()
            return True
        self.history.record_delivery(subscription, name, claims)
        for claim in claims:
            self.count("redeliveries" if claim.attempt > 1 else "deliveries")
        self.held += [HeldRange(subscription, name, claim.start, claim.end) for claim in claims]
        return bool(claims)

    async def _begin(self) -> None:
        """Give the group its first positions, partition 0 last: with that position, the group has begun."""
        for tp in reversed(_SHARED):
            subscription, bounds = Subscription(self.group, tp), await self.reader.bounds(tp)
            self.history.intend_begin(self.me, subscription, earliest=self.earliest)
            offset = bounds.log_start_offset if self.earliest else bounds.next_offset
            await (await self.groups.partition(self.group, tp)).begin(offset, mode=self.mode)
            self.history.check_begun(subscription)

    async def consume_all(self, limit: int) -> None:
        """Consume as SQL and HTTP do: read the claimed records, and give back those that do not fit."""
        name = self.name
        for tp in _SHARED:
            subscription = Subscription(self.group, tp)
            self.history.intend_claim(self.me, subscription, name)
            self.history.intend_give_back(self.me, subscription, name)
            self.history.intend_begin(self.me, subscription, earliest=self.earliest)
        call = ConsumeOptions(
            topic=STABLE,
            group=self.group,
            member=name,
            start=Start("earliest" if self.earliest else "latest"),
            limit=limit,
            wait_ms=self.draw.choice((0, 500)),
            visibility_ms=self.plan.visibility_ms,
            max_bytes=self.draw.choice((1, 30, 1 << 20)),
        )
        table = await self.dispatcher.consume(call)
        partitions, offsets = table["partition"].to_pylist(), table["offset"].to_pylist()
        for tp in _SHARED:
            subscription = Subscription(self.group, tp)
            self.history.check_begun(subscription)
            got = [offset for offset, partition in zip(offsets, partitions, strict=True) if partition == tp.partition]
            self.history.record_consumed(subscription, name, got)
            self.held += [HeldRange(subscription, name, offset, offset) for offset in got]

    async def ack(self, held: HeldRange, upto: int) -> None:
        """Acknowledge all offsets up to `upto` that the same name holds."""
        self.history.intend_ack(self.me, held.subscription, held.member, upto)
        since = self.history.moment
        await (await self.groups.partition(*held.subscription)).ack(held.member, upto)
        self.history.check_acked(self.me, held.subscription, held.member, upto, since)
        self.count("acks")
        self.held = [
            each
            for each in self.held
            if (each.subscription, each.member) != (held.subscription, held.member) or each.end > upto
        ]

    async def ack_too_much(self, tp: TopicPartition) -> None:
        bounds = await self.reader.bounds(tp)
        try:
            await (await self.groups.partition(self.group, tp)).ack(self.name, bounds.next_offset + _FAR)
        except OffsetOutOfRange:
            return
        raise Violation(f"I7: {self.name} of group {self.group} acknowledged {_FAR} records beyond the end of {tp}")

    async def put_back(self, held: HeldRange) -> None:
        self.held.remove(held)
        self.history.intend_give_back(self.me, held.subscription, held.member)
        partition = await self.groups.partition(*held.subscription)
        if self.draw.random() < 0.5:
            await partition.give_back(held.member, [(held.start, held.end)])
        else:
            delay_ms = self.draw.choice((0, self.plan.visibility_ms))
            await partition.release(held.member, held.start, delay_ms=delay_ms)

    async def work(self) -> None:
        """Acknowledge, put back or forget held records, in any order."""
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
                await self.ack_too_much(held.subscription.tp)
            else:
                await self.ack(held, draw.choice((held.end, draw.randint(held.start, held.end))))


def claimed_group(world: World, number: int) -> str:
    """Return the name of a claimed group; groups begin at the earliest and at the latest record by turns."""
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
            raise_unexpected(error)
            member.take_new_name()
            continue
        try:
            await member.work()
        except LlogError as error:
            raise_unexpected(error)


async def assignee(world: World, me: Process, log: Log) -> None:
    """A member of an assigned group that joins, leaves, and is now and then too slow to stay."""
    member = Member(world, me, log, ASSIGNED, GroupMode.ASSIGNED)
    draw = me.runtime.random()
    while True:
        await me.runtime.sleep(draw.expovariate(3.0))
        try:
            membership = await member.groups.join(ASSIGNED, STABLE, member.name, session_ms=world.plan.visibility_ms)
            world.history.groups.check_joined(ASSIGNED, STABLE, membership)
            await me.runtime.sleep(draw.choice((0.0, 0.5)) * draw.random())
            for partition in membership.partitions:
                await member.consume(TopicPartition(STABLE, partition), draw.randint(1, 8), membership)
        except LlogError as error:
            raise_unexpected(error, StaleMember)
            world.trace.count("stale members" if isinstance(error, StaleMember) else "failed calls")
            member.take_new_name()
            continue
        try:
            await member.work()
            if draw.random() < 0.05:
                await member.groups.leave(ASSIGNED, STABLE, member.name)
        except LlogError as error:
            raise_unexpected(error, StaleMember)


async def operator(world: World, me: Process, log: Log) -> None:
    """Reset groups, back and forth, while their members work."""
    draw = me.runtime.random()
    reader = EngineReader(log)
    groups = Groups(log, reader)
    while all_groups(world):
        await me.runtime.sleep(draw.expovariate(0.15))
        subscription = Subscription(draw.choice(all_groups(world)), draw.choice(_SHARED))
        try:
            partition = await groups.partition(*subscription)
            if await partition.record() is None:
                continue
            bounds = await reader.bounds(subscription.tp)
            offset = draw.randint(bounds.log_start_offset, bounds.next_offset)
            world.history.groups.intend_reset(me, subscription, offset)
            await partition.reset(offset)
            world.trace.count("resets")
        except LlogError as error:
            raise_unexpected(error)


def all_groups(world: World) -> Sequence[str]:
    roles = world.plan.roles
    claimed = [claimed_group(world, number) for number in range(min(world.plan.groups, roles.get("consumer", 0)))]
    return [*claimed, *([ASSIGNED] if roles.get("assignee", 0) else [])]


async def drain(world: World, me: Process, log: Log) -> None:
    """Let one member consume and acknowledge everything that is left."""
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
            world.history.groups.check_drained(Subscription(group, tp))
