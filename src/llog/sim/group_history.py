"""The checker of consumer groups, I7: sees every change of a group's record, and knows what each process intended.

A group's position passes an offset only if the offset was delivered to a member that acknowledged it, or if retention
removed it. A change that no process intended is a violation, and so is a delivery without a recorded claim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from llog.groups.assignment import Membership
from llog.groups.records import NOBODY, Claim, GroupMode, GroupRecord, Members, is_held
from llog.log.keys import GROUPS, MEMBERS, PartitionKeys, group_key
from llog.log.records import Control, decode
from llog.model import TopicPartition
from llog.sim.outcome import Violation
from llog.sim.process import Process
from llog.sim.stores import WatchedMeta


class Subscription(NamedTuple):
    """A group on one partition, which share one stored record."""

    group: str
    tp: TopicPartition

    def __str__(self) -> str:
        return f"group {self.group} on {self.tp}"


class Delivery(NamedTuple):
    """The delivery of an offset to a member: the moment of the claim, the moment of the delivery, and the deadline.

    Moments count changes and deliveries.
    """

    claimed: int
    got: int
    deadline_ms: int


class _Intents:
    """What one process intends to do to one subscription. It may still happen after the death of the process."""

    def __init__(self) -> None:
        self.claims: dict[str, int] = {}
        """The generation of each member's membership; 0 in a claimed group."""
        self.acks: dict[str, set[int]] = {}
        """The offsets up to which each member acknowledges, as long as there is no answer."""
        self.give_backs: set[str] = set()
        """Members that give back or release."""
        self.begins: set[bool] = set()
        """Whether each intended beginning is at the earliest record."""
        self.resets: set[int] = set()


class GroupHistory:
    def __init__(self, meta: WatchedMeta, actor: Callable[[], str]) -> None:
        self._meta = meta
        self._actor = actor
        """The process whose call is taking effect."""
        self._runtimes: dict[str, Process] = {}
        self._intents: dict[tuple[str, Subscription], _Intents] = {}
        self._granted: dict[Subscription, dict[tuple[int, str], dict[tuple[int, int], int]]] = {}
        """Every claim that was ever recorded, by offset and member: deadline and attempt, and the moment."""
        self._delivered: dict[tuple[Subscription, str], dict[int, Delivery]] = {}
        self._moment = 0
        self._last_reset: dict[Subscription, int] = {}
        self._served: dict[Subscription, int] = {}
        """The highest generation that claimed or acknowledged."""
        self._generations: dict[tuple[str, str], list[tuple[str, ...]]] = {}
        """The members of each generation from 0 on, by group and directory."""

    # --- intents

    def intend_begin(self, me: Process, subscription: Subscription, *, earliest: bool) -> None:
        self._intents_of(me, subscription).begins.add(earliest)

    def intend_claim(self, me: Process, subscription: Subscription, member: str, generation: int = 0) -> None:
        self._intents_of(me, subscription).claims[member] = generation

    def intend_ack(self, me: Process, subscription: Subscription, member: str, upto: int) -> None:
        self._intents_of(me, subscription).acks.setdefault(member, set()).add(upto)

    def intend_give_back(self, me: Process, subscription: Subscription, member: str) -> None:
        self._intents_of(me, subscription).give_backs.add(member)

    def intend_reset(self, me: Process, subscription: Subscription, offset: int) -> None:
        self._intents_of(me, subscription).resets.add(offset)

    # --- answers

    def check_begun(self, subscription: Subscription) -> None:
        """Check the answer that the group has a position, or that nothing is left for a member."""
        if self._record(subscription) is None:
            raise Violation(f"I7: {subscription} has begun, but has no position: what comes now is passed over")

    def record_delivery(self, subscription: Subscription, member: str, claims: Iterable[Claim]) -> None:
        """Record the claims that a member got, and may acknowledge from now on."""
        self._moment += 1
        for claim in claims:
            for offset in range(claim.start, claim.end + 1):
                granted = self._granted.get(subscription, {}).get((offset, member), {})
                claimed = granted.get((claim.deadline_ms, claim.attempt))
                if claimed is None:
                    raise Violation(
                        f"I7: {member} of {subscription} was given offset {offset} by {claim}, never recorded"
                    )
                self._deliveries_to(subscription, member)[offset] = Delivery(claimed, self._moment, claim.deadline_ms)

    def record_consumed(self, subscription: Subscription, member: str, offsets: Sequence[int]) -> None:
        """Record the offsets that a member got from a call that returns no claims."""
        self._moment += 1
        for offset in offsets:
            granted = self._granted.get(subscription, {}).get((offset, member))
            if not granted:
                raise Violation(
                    f"I7: {member} of {subscription} was given offset {offset}, and no claim was ever recorded"
                )
            (deadline_ms, _), claimed = list(granted.items())[-1]
            self._deliveries_to(subscription, member)[offset] = Delivery(claimed, self._moment, deadline_ms)

    def check_acked(self, me: Process, subscription: Subscription, member: str, upto: int, since: int) -> None:
        """Check the answer to an ACK that was sent at the moment `since`."""
        self._intents_of(me, subscription).acks[member].discard(upto)
        got = self._deliveries_to(subscription, member)
        for offset, claim in self._outstanding(subscription).items():
            there = got.get(offset)
            if offset > upto or claim.member != member or there is None or there.got > since:
                continue
            if there.deadline_ms == claim.deadline_ms:
                raise Violation(f"I7: {member} of {subscription} acknowledged up to {upto}, but {claim} is outstanding")

    @property
    def moment(self) -> int:
        return self._moment

    def check_joined(self, group: str, directory: str, membership: Membership) -> None:
        """Check that each partition of the membership belongs to this member in its generation."""
        names = self._members(group, directory, membership.generation)
        if names is None or membership.member not in names:
            raise Violation(f"I7: {membership} of group {group} was never recorded")
        for partition in membership.partitions:
            if _assigned_member(names, partition) != membership.member:
                raise Violation(f"I7: partition {partition} is not that of {membership} in group {group}")

    # --- changes at the server

    def put(self, key: str, old: bytes | None, new: bytes) -> None:
        group, directory, last = key.removeprefix(GROUPS).split("/")
        if last == MEMBERS:
            before = Members() if old is None else decode(Members, old, key)
            self._members_put(group, directory, before, decode(Members, new, key))
            return
        subscription = Subscription(group, TopicPartition(directory, int(last)))
        self._record_put(
            subscription, None if old is None else decode(GroupRecord, old, key), decode(GroupRecord, new, key)
        )

    def removed(self, key: str) -> None:
        raise Violation(f"I7: {key} was deleted")

    def check_drained(self, subscription: Subscription) -> None:
        """Check, after everything was consumed and acknowledged, that the position is at the end."""
        record, (log_start, next_offset) = self._record(subscription), self._bounds(subscription)
        if record is None or max(record.committed, log_start) != next_offset:
            raise Violation(f"I7: {subscription} ends at {next_offset} and cannot be consumed further than {record}")

    # --- parts

    def _record_put(self, subscription: Subscription, old: GroupRecord | None, new: GroupRecord) -> None:
        log_start, next_offset = self._bounds(subscription)
        _check_shape(subscription, new, next_offset)
        self._moment += 1
        me = self._intents.get((self._actor(), subscription)) or _Intents()
        if new.offset in me.resets and not new.claims:
            self._last_reset[subscription] = self._moment
            return
        if old is None:
            if not me.begins or new.claims:
                raise Violation(f"I7: {subscription} began with {new}, which {self._actor()} did not intend")
            if me.begins == {True} and new.offset > log_start:
                raise Violation(f"I7: {subscription} began at {new.offset} instead of the log start {log_start}")
            return
        if new.committed < old.committed:
            raise Violation(f"I7: {subscription} went back from {old.committed} to {new.committed} without a reset")
        if new.generation < old.generation:
            raise Violation(f"I7: {subscription} went back from generation {old.generation} to {new.generation}")
        before, after = _by_offset(old), _by_offset(new)
        for offset, claim in before.items():
            if offset >= new.offset:
                self._check_given_back(subscription, me, offset, claim, None)
            elif offset not in after:
                self._check_done(subscription, old, me, log_start, offset, claim)
            elif after[offset] != claim:
                self._check_moved(subscription, new, me, offset, claim, after[offset])
        for offset in range(old.offset, new.offset):
            if offset not in after:
                self._check_done(subscription, old, me, log_start, offset, None)
            else:
                self._check_claimed(subscription, new, me, offset, after[offset], 0)
        for offset, claim in after.items():
            if offset < old.offset and offset not in before:
                raise Violation(
                    f"I7: {claim} of {subscription} has offset {offset}, which was acknowledged and not reset"
                )

    def _check_done(
        self,
        subscription: Subscription,
        old: GroupRecord,
        me: _Intents,
        log_start: int,
        offset: int,
        claim: Claim | None,
    ) -> None:
        """Check an offset that is no longer outstanding: retention removed it, or a member acknowledged it."""
        if offset < log_start:
            return
        for member, uptos in me.acks.items():
            if max(uptos, default=0) < offset:
                continue
            got = self._deliveries_to(subscription, member)
            if claim is not None:
                done = claim.member == member and offset in got
            else:
                # An ACK of records from before a reset may undo the reset: it looks like one that skips on purpose.
                last_reset = self._last_reset.get(subscription, 0)
                done = offset in got or any(
                    reached >= offset and delivery.claimed < last_reset for reached, delivery in got.items()
                )
            if done and (old.mode is not GroupMode.ASSIGNED or self._has_partition(subscription, member)):
                return
        held = "nobody had" if claim is None else f"{claim.member!r} had until {claim.deadline_ms}"
        raise Violation(
            f"I7: {subscription} passes offset {offset}, which {held}: {self._actor()} acknowledged {me.acks}, and no "
            "member that got the offset and may acknowledge it did"
        )

    def _check_moved(
        self, subscription: Subscription, new: GroupRecord, me: _Intents, offset: int, claim: Claim, after: Claim
    ) -> None:
        if after.member == NOBODY:
            self._check_given_back(subscription, me, offset, claim, after)
        elif after.attempt == claim.attempt and after.member == claim.member and after.deadline_ms < claim.deadline_ms:
            if new.mode is not GroupMode.ASSIGNED:
                raise Violation(f"I7: {claim} of {subscription} was shortened to {after}")
        else:
            self._check_claimed(subscription, new, me, offset, after, claim.attempt)
            runtime = self._runtimes[self._actor()].runtime
            # The clock of the process may have jumped, ahead or back, since it sent the claim.
            moments = (runtime.peek_ms(), runtime.latest_ms, runtime.shown_ms)
            held = all(is_held(claim.deadline_ms, ms) for ms in moments)
            if new.mode is not GroupMode.ASSIGNED and held:
                raise Violation(
                    f"I7: offset {offset} of {subscription} is held by {claim} and was given to {after.member}, too"
                )

    def _check_claimed(
        self, subscription: Subscription, new: GroupRecord, me: _Intents, offset: int, claim: Claim, attempts: int
    ) -> None:
        if claim.member not in me.claims or claim.attempt != attempts + 1:
            raise Violation(
                f"I7: {self._actor()} made {claim} of {subscription}, delivered {attempts} times before, which it did "
                "not intend"
            )
        granted = self._granted.setdefault(subscription, {}).setdefault((offset, claim.member), {})
        granted[claim.deadline_ms, claim.attempt] = self._moment
        if new.mode is GroupMode.ASSIGNED:
            generation = me.claims[claim.member]
            if generation < self._served.get(subscription, 0):
                raise Violation(
                    f"I7: {claim.member} claimed from {subscription} under generation {generation}, after "
                    f"{self._served[subscription]}"
                )
            self._served[subscription] = generation

    def _check_given_back(
        self, subscription: Subscription, me: _Intents, offset: int, claim: Claim, after: Claim | None
    ) -> None:
        """Check an offset that no member holds any more: released, the delivery counts; given back, it does not."""
        attempts = 0 if after is None else after.attempt
        if claim.member == NOBODY:
            allowed = bool(me.give_backs) and attempts == claim.attempt
        else:
            allowed = claim.member in me.give_backs and attempts in (claim.attempt - 1, claim.attempt)
        if not allowed:
            raise Violation(f"I7: {self._actor()} gave back offset {offset} of {subscription}, which {claim} has")

    def _has_partition(self, subscription: Subscription, member: str) -> bool:
        """Return whether the partition is this member's in the last served generation or a later one, which then counts
        as served.
        """
        names = self._generations.get((subscription.group, subscription.tp.topic), [])
        for generation in range(self._served.get(subscription, 0), len(names)):
            if _assigned_member(names[generation], subscription.tp.partition) == member:
                self._served[subscription] = generation
                return True
        return False

    def _members_put(self, group: str, directory: str, old: Members, new: Members) -> None:
        known = self._generations.setdefault((group, directory), [()])
        names = tuple(sorted(new.deadlines))
        if new.generation == old.generation + 1 == len(known):
            known.append(names)
        elif new.generation != old.generation or names != known[new.generation]:
            raise Violation(f"I7: the members of group {group} went from {old} to {new}")

    def _members(self, group: str, directory: str, generation: int) -> tuple[str, ...] | None:
        known = self._generations.get((group, directory), [])
        return known[generation] if generation < len(known) else None

    def _intents_of(self, me: Process, subscription: Subscription) -> _Intents:
        self._runtimes[me.name] = me
        return self._intents.setdefault((me.name, subscription), _Intents())

    def _deliveries_to(self, subscription: Subscription, member: str) -> dict[int, Delivery]:
        return self._delivered.setdefault((subscription, member), {})

    def _record(self, subscription: Subscription) -> GroupRecord | None:
        key = group_key(subscription.group, *subscription.tp)
        found = self._meta.value(key)
        return None if found is None else decode(GroupRecord, found, key)

    def _outstanding(self, subscription: Subscription) -> dict[int, Claim]:
        record = self._record(subscription)
        return {} if record is None else _by_offset(record)

    def _bounds(self, subscription: Subscription) -> tuple[int, int]:
        key = PartitionKeys(*subscription.tp).control
        found = self._meta.value(key)
        assert found is not None
        control = decode(Control, found, key)
        return control.log_start_offset, control.next_offset


def _check_shape(subscription: Subscription, record: GroupRecord, next_offset: int) -> None:
    """Check that no offset is in two claims, and that none beyond the end is claimed or passed."""
    lowest = 1
    for claim in record.claims:
        if not lowest <= claim.start <= claim.end:
            raise Violation(f"I7: {claim} of {subscription} overlaps another: {record}")
        lowest = claim.end + 1
    if not lowest <= record.offset <= next_offset:
        raise Violation(f"I7: {subscription} is beyond what was delivered or beyond the end {next_offset}: {record}")


def _by_offset(record: GroupRecord) -> dict[int, Claim]:
    """Return every outstanding offset as a claim of its own."""
    return {
        offset: replace(claim, start=offset, end=offset)
        for claim in record.claims
        for offset in range(claim.start, claim.end + 1)
    }


def _assigned_member(names: Sequence[str], partition: int) -> str | None:
    return names[partition % len(names)] if names else None
