"""The checker of consumer groups, I7: sees every change of a group's record, and knows what each process was about to
do.

An offset is passed by a group's position only if it was delivered to a member and that member acknowledged it, or if
retention took it. A change that nobody was about to make is a finding, and so is a delivery that no record has.
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
from llog.sim.process import Process
from llog.sim.stores import WatchedMeta
from llog.sim.violation import Violation


class Place(NamedTuple):
    """A group's record of one partition."""

    group: str
    tp: TopicPartition

    def __str__(self) -> str:
        return f"group {self.group} on {self.tp}"


class Delivery(NamedTuple):
    """That a member got an offset. Moments count changes and deliveries."""

    claimed: int
    got: int
    deadline_ms: int


class _Intents:
    """What one process has set out to do at one place. It may still happen after its death."""

    def __init__(self) -> None:
        self.claims: dict[str, int] = {}
        """By member, the generation of its membership; 0 in a claimed group."""
        self.acks: dict[str, set[int]] = {}
        """By member, up to where, as long as it was not answered."""
        self.backs: set[str] = set()
        """Members that give back or release."""
        self.begins: set[bool] = set()
        """Whether at the earliest record."""
        self.resets: set[int] = set()


class GroupHistory:
    def __init__(self, meta: WatchedMeta, actor: Callable[[], str]) -> None:
        self._meta = meta
        self._actor = actor
        """The process whose call is taking effect."""
        self._runtimes: dict[str, Process] = {}
        self._intents: dict[tuple[str, Place], _Intents] = {}
        self._granted: dict[Place, dict[tuple[int, str], dict[tuple[int, int], int]]] = {}
        """By offset and member, every claim that was ever recorded: deadline and attempt, and the moment."""
        self._delivered: dict[tuple[Place, str], dict[int, Delivery]] = {}
        self._moment = 0
        self._last_reset: dict[Place, int] = {}
        self._served: dict[Place, int] = {}
        """The highest generation that claimed or acknowledged."""
        self._generations: dict[tuple[str, str], list[tuple[str, ...]]] = {}
        """By group and directory: who the members were, generation by generation, from 0."""

    # --- what is about to be done

    def begins(self, me: Process, place: Place, *, earliest: bool) -> None:
        self._of(me, place).begins.add(earliest)

    def claims(self, me: Process, place: Place, member: str, generation: int = 0) -> None:
        self._of(me, place).claims[member] = generation

    def acks(self, me: Process, place: Place, member: str, upto: int) -> None:
        self._of(me, place).acks.setdefault(member, set()).add(upto)

    def gives_back(self, me: Process, place: Place, member: str) -> None:
        self._of(me, place).backs.add(member)

    def resets(self, me: Process, place: Place, offset: int) -> None:
        self._of(me, place).resets.add(offset)

    # --- answers

    def has_begun(self, place: Place) -> None:
        """A member was told that the group has a position, or that there is nothing for it."""
        if self._record(place) is None:
            raise Violation(f"I7: {place} has begun, but has no position: what comes now is passed over")

    def delivered(self, place: Place, member: str, claims: Iterable[Claim]) -> None:
        """A member was given what it may acknowledge from now on."""
        self._moment += 1
        for claim in claims:
            for offset in range(claim.start, claim.end + 1):
                granted = self._granted.get(place, {}).get((offset, member), {})
                claimed = granted.get((claim.deadline_ms, claim.attempt))
                if claimed is None:
                    raise Violation(f"I7: {member} of {place} was given offset {offset} by {claim}, never recorded")
                self._got(place, member)[offset] = Delivery(claimed, self._moment, claim.deadline_ms)

    def consumed(self, place: Place, member: str, offsets: Sequence[int]) -> None:
        """As `delivered`, where records were handed out and the claims not told."""
        self._moment += 1
        for offset in offsets:
            granted = self._granted.get(place, {}).get((offset, member))
            if not granted:
                raise Violation(f"I7: {member} of {place} was given offset {offset}, and no claim was ever recorded")
            (deadline_ms, _), claimed = list(granted.items())[-1]
            self._got(place, member)[offset] = Delivery(claimed, self._moment, deadline_ms)

    def acked(self, me: Process, place: Place, member: str, upto: int, since: int) -> None:
        """An ACK was answered that was sent at the moment `since`."""
        self._of(me, place).acks[member].discard(upto)
        got = self._got(place, member)
        for offset, claim in self._outstanding(place).items():
            there = got.get(offset)
            if offset > upto or claim.member != member or there is None or there.got > since:
                continue
            if there.deadline_ms == claim.deadline_ms:
                raise Violation(f"I7: {member} of {place} acknowledged up to {upto}, but {claim} is outstanding")

    @property
    def moment(self) -> int:
        return self._moment

    def joined(self, group: str, directory: str, membership: Membership) -> None:
        """Within a generation, each partition has one member: the one that all can tell from who the members are."""
        names = self._members(group, directory, membership.generation)
        if names is None or membership.member not in names:
            raise Violation(f"I7: {membership} of group {group} was never recorded")
        for partition in membership.partitions:
            if _dealt(names, partition) != membership.member:
                raise Violation(f"I7: partition {partition} is not that of {membership} in group {group}")

    # --- changes at the server

    def put(self, key: str, old: bytes | None, new: bytes) -> None:
        group, directory, last = key.removeprefix(GROUPS).split("/")
        if last == MEMBERS:
            before = Members() if old is None else decode(Members, old, key)
            self._members_put(group, directory, before, decode(Members, new, key))
            return
        place = Place(group, TopicPartition(directory, int(last)))
        self._record_put(place, None if old is None else decode(GroupRecord, old, key), decode(GroupRecord, new, key))

    def removed(self, key: str) -> None:
        raise Violation(f"I7: {key} was deleted")

    def check_drained(self, place: Place) -> None:
        """At rest, after somebody consumed and acknowledged for as long as there was something."""
        record, (log_start, next_offset) = self._record(place), self._bounds(place)
        if record is None or max(record.committed, log_start) != next_offset:
            raise Violation(f"I7: {place} ends at {next_offset} and cannot be consumed further than {record}")

    # --- parts

    def _record_put(self, place: Place, old: GroupRecord | None, new: GroupRecord) -> None:
        log_start, next_offset = self._bounds(place)
        _check_shape(place, new, next_offset)
        self._moment += 1
        me = self._intents.get((self._actor(), place)) or _Intents()
        if new.offset in me.resets and not new.claims:
            self._last_reset[place] = self._moment
            return
        if old is None:
            if not me.begins or new.claims:
                raise Violation(f"I7: {place} began with {new}, which {self._actor()} was not about to do")
            if me.begins == {True} and new.offset > log_start:
                raise Violation(f"I7: {place} began at {new.offset} instead of the log start {log_start}")
            return
        if new.committed < old.committed:
            raise Violation(f"I7: {place} went back from {old.committed} to {new.committed} without a reset")
        if new.generation < old.generation:
            raise Violation(f"I7: {place} went back from generation {old.generation} to {new.generation}")
        before, after = _by_offset(old), _by_offset(new)
        for offset, claim in before.items():
            if offset >= new.offset:
                self._check_given_back(place, me, offset, claim, None)
            elif offset not in after:
                self._check_done(place, old, me, log_start, offset, claim)
            elif after[offset] != claim:
                self._check_moved(place, new, me, offset, claim, after[offset])
        for offset in range(old.offset, new.offset):
            if offset not in after:
                self._check_done(place, old, me, log_start, offset, None)
            else:
                self._check_claimed(place, new, me, offset, after[offset], 0)
        for offset, claim in after.items():
            if offset < old.offset and offset not in before:
                raise Violation(f"I7: {claim} of {place} has offset {offset}, which was acknowledged and not reset")

    def _check_done(
        self, place: Place, old: GroupRecord, me: _Intents, log_start: int, offset: int, claim: Claim | None
    ) -> None:
        """The offset is no longer outstanding, and counts as acknowledged."""
        if offset < log_start:
            return
        for member, uptos in me.acks.items():
            if max(uptos, default=0) < offset:
                continue
            got = self._got(place, member)
            if claim is not None:
                done = claim.member == member and offset in got
            else:
                # An ACK of what came before a reset may undo the reset: nobody can tell it from one that skips on
                # purpose.
                last_reset = self._last_reset.get(place, 0)
                done = offset in got or any(
                    reached >= offset and delivery.claimed < last_reset for reached, delivery in got.items()
                )
            if done and (old.mode is not GroupMode.ASSIGNED or self._has_partition(place, member)):
                return
        held = "nobody had" if claim is None else f"{claim.member!r} had until {claim.deadline_ms}"
        raise Violation(
            f"I7: {place} passes offset {offset}, which {held}: {self._actor()} acknowledged {me.acks}, and nobody "
            "who was given it "
            "and may say so did"
        )

    def _check_moved(
        self, place: Place, new: GroupRecord, me: _Intents, offset: int, claim: Claim, after: Claim
    ) -> None:
        if after.member == NOBODY:
            self._check_given_back(place, me, offset, claim, after)
        elif after.attempt == claim.attempt and after.member == claim.member and after.deadline_ms < claim.deadline_ms:
            if new.mode is not GroupMode.ASSIGNED:
                raise Violation(f"I7: {claim} of {place} was shortened to {after}")
        else:
            self._check_claimed(place, new, me, offset, after, claim.attempt)
            runtime = self._runtimes[self._actor()].runtime
            # Its clock may have jumped back since the claim was sent.
            held = all(is_held(claim.deadline_ms, ms) for ms in (runtime.now_ms(), runtime.latest_ms))
            if new.mode is not GroupMode.ASSIGNED and held:
                raise Violation(
                    f"I7: offset {offset} of {place} is held by {claim} and was given to {after.member}, too"
                )

    def _check_claimed(
        self, place: Place, new: GroupRecord, me: _Intents, offset: int, claim: Claim, attempts: int
    ) -> None:
        if claim.member not in me.claims or claim.attempt != attempts + 1:
            raise Violation(
                f"I7: {self._actor()} made {claim} of {place}, delivered {attempts} times before, which it was not "
                "about to do"
            )
        granted = self._granted.setdefault(place, {}).setdefault((offset, claim.member), {})
        granted[claim.deadline_ms, claim.attempt] = self._moment
        if new.mode is GroupMode.ASSIGNED:
            generation = me.claims[claim.member]
            if generation < self._served.get(place, 0):
                raise Violation(
                    f"I7: {claim.member} claimed from {place} under generation {generation}, after "
                    f"{self._served[place]}"
                )
            self._served[place] = generation

    def _check_given_back(self, place: Place, me: _Intents, offset: int, claim: Claim, after: Claim | None) -> None:
        """Nobody has it any more: the delivery counts if it was released, and does not if it was given back."""
        attempts = 0 if after is None else after.attempt
        if claim.member == NOBODY:
            allowed = bool(me.backs) and attempts == claim.attempt
        else:
            allowed = claim.member in me.backs and attempts in (claim.attempt - 1, claim.attempt)
        if not allowed:
            raise Violation(f"I7: {self._actor()} gave back offset {offset} of {place}, which {claim} has")

    def _has_partition(self, place: Place, member: str) -> bool:
        """Whether there is a generation in which the partition is this member's, and no later one has been at work."""
        names = self._generations.get((place.group, place.tp.topic), [])
        for generation in range(self._served.get(place, 0), len(names)):
            if _dealt(names[generation], place.tp.partition) == member:
                self._served[place] = generation
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

    def _of(self, me: Process, place: Place) -> _Intents:
        self._runtimes[me.name] = me
        return self._intents.setdefault((me.name, place), _Intents())

    def _got(self, place: Place, member: str) -> dict[int, Delivery]:
        return self._delivered.setdefault((place, member), {})

    def _record(self, place: Place) -> GroupRecord | None:
        key = group_key(place.group, *place.tp)
        found = self._meta.value(key)
        return None if found is None else decode(GroupRecord, found, key)

    def _outstanding(self, place: Place) -> dict[int, Claim]:
        record = self._record(place)
        return {} if record is None else _by_offset(record)

    def _bounds(self, place: Place) -> tuple[int, int]:
        key = PartitionKeys(*place.tp).control
        found = self._meta.value(key)
        assert found is not None
        control = decode(Control, found, key)
        return control.log_start_offset, control.sequence_counter


def _check_shape(place: Place, record: GroupRecord, next_offset: int) -> None:
    """No offset is in two claims, and nothing is claimed or passed that is not there."""
    lowest = 1
    for claim in record.claims:
        if not lowest <= claim.start <= claim.end:
            raise Violation(f"I7: {claim} of {place} overlaps another: {record}")
        lowest = claim.end + 1
    if not lowest <= record.offset <= next_offset:
        raise Violation(f"I7: {place} is beyond what was delivered or beyond the end {next_offset}: {record}")


def _by_offset(record: GroupRecord) -> dict[int, Claim]:
    """Every outstanding offset as a claim of its own."""
    return {
        offset: replace(claim, start=offset, end=offset)
        for claim in record.claims
        for offset in range(claim.start, claim.end + 1)
    }


def _dealt(names: Sequence[str], partition: int) -> str | None:
    return names[partition % len(names)] if names else None
