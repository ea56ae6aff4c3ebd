"""A consumer group in one partition: which records are delivered to whom, and how far the group has come.

- A committed position goes back only by a reset, and never passes a record that was delivered to a member and not
  acknowledged.
- One member's acknowledgement drops no other member's claim, live or expired.
- A claim is recorded before its records are delivered. A power cut may undo a claim: then its records are delivered
  again, whatever others acknowledge. Every other change is durable.

Each call changes one small record by compare-and-swap. It tries again when another process was faster, and reads the
record again when the answer of a write was lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from llog.errors import (
    GroupConflict,
    InvalidArgument,
    OffsetOutOfRange,
    OutcomeUnknown,
    StaleMember,
    VersionMismatch,
)
from llog.groups import claims
from llog.groups.acks import AckResult, held_ranges
from llog.groups.assignment import Assignments, Membership, partition_holder
from llog.groups.records import VISIBILITY_MS_MAX, Claim, GroupMode, GroupRecord, check_member_name, is_held
from llog.groups.store import GroupKey, GroupStore
from llog.log.cas import Backoff
from llog.log.engine import Bounds, LogReader
from llog.log.log import Log
from llog.log.records import Topic
from llog.model import FIRST_OFFSET, TopicPartition
from llog.stores.meta import ABSENT, read_confirmed, read_confirming_errors

Ranges = Sequence[tuple[int, int]]
"""Offsets, both ends included."""
Decision = Callable[[GroupRecord | None], GroupRecord | None]
"""Returns the record that shall replace the given one; None, or an equal record, if the given one may stay."""


class GroupPartition:
    """One group's record for one partition of the topic that the caller found in the catalog."""

    def __init__(
        self, log: Log, reader: LogReader, assignments: Assignments, topic: Topic, store: GroupStore, key: GroupKey
    ) -> None:
        self.tp = TopicPartition(topic.name, key.partition)
        self.topic = topic
        self._log = log
        self._reader = reader
        self._assignments = assignments
        self._store = store
        self._key = key

    def __str__(self) -> str:
        return f"group {self._key.group!r} on {self.tp}"

    async def record(self) -> GroupRecord | None:
        stored = await self._store.get(self._key)
        return None if stored is None else stored.record

    async def position(self) -> int | None:
        """Return the next offset that the group wants, or None if it has no position here."""
        record = await self.record()
        return None if record is None else record.committed

    async def claim(
        self,
        member: str,
        *,
        limit: int,
        visibility_ms: int,
        membership: Membership | None = None,
        bounds: Bounds | None = None,
    ) -> tuple[Claim, ...] | None:
        """Claim up to `limit` records for `member` for `visibility_ms`; return the claims in order of their offsets.

        Returns None if the group has no position here: `begin` gives it one. A membership makes the group an assigned
        one, whose partition belongs to this member alone: raises `StaleMember` if it does not, or if a later generation
        was served here. `bounds` spares a read to a caller that has them.
        """
        if limit < 1 or not 0 <= visibility_ms <= VISIBILITY_MS_MAX:
            raise InvalidArgument(
                f"a claim must be of at least 1 record, not {limit}, and last from 0 to {VISIBILITY_MS_MAX} ms, not "
                f"{visibility_ms}"
            )
        check_member_name(member)
        if membership is not None and (membership.member != member or self.tp.partition not in membership.partitions):
            raise self._stale_member()
        mode = GroupMode.CLAIMED if membership is None else GroupMode.ASSIGNED
        if bounds is None:
            bounds = await self._reader.bounds(self.tp)
        backoff = Backoff(self._log.runtime, self)
        unconfirmed: list[Claim] = []
        while True:
            stored = await self._store.get(self._key)
            if stored is None:
                return None
            # If an earlier try succeeded and only its answer was lost, its claims are this call's. Claiming more would
            # leave them to nobody until they expire.
            if unconfirmed and (mine := claims.still_held(stored.record, unconfirmed)):
                return mine
            old = self._in_mode(await self._within_bounds(stored.record), mode)
            if membership is not None:
                old = self._in_generation(old, membership.generation)
            now_ms = self._log.runtime.now_ms()
            in_order = mode is GroupMode.ASSIGNED
            new, given = claims.claim(old, member, limit, bounds, now_ms, visibility_ms, in_order=in_order)
            if not given and new.claims == stored.record.claims and not stored.record.is_unbounded:
                return ()
            try:
                new = replace(new, updated_ms=now_ms)
                await self._store.put(self._key, new, expected=stored.version, durable=False)
                return given
            except (VersionMismatch, OutcomeUnknown) as error:
                if isinstance(error, OutcomeUnknown):
                    unconfirmed += given
                await backoff.wait(error)

    async def begin(self, offset: int, *, mode: GroupMode = GroupMode.CLAIMED) -> int:
        """Give the group its first position here; return the position that counts, which another member may have
        stored before.
        """
        _check_offset(offset)
        known = await self.topic_mode()
        if known not in (GroupMode.PLAIN, mode):
            raise self._conflict(f"has the mode {known}, not {mode}")

        def decide(old: GroupRecord | None) -> GroupRecord:
            return GroupRecord(offset=offset, updated_ms=0, mode=mode) if old is None else self._in_mode(old, mode)

        return _present(await self._change(decide)).committed

    async def ack(self, member: str, upto: int) -> AckResult:
        """Acknowledge every offset up to and including `upto` that was delivered to `member` or to nobody.

        Returns the group's position, which is the lowest offset that others hold, if they hold any; and, if nothing was
        acknowledged, who holds the records. Raises `OffsetOutOfRange` beyond the end; in an assigned group,
        `StaleMember` from a member that does not have the partition.
        """
        check_member_name(member)
        _check_offset(upto)
        stored = await self._store.get(self._key)
        if stored is None or upto >= stored.record.offset:  # below, the record was delivered, so it exists
            await self._check_reached(upto + 1, upto)
        mode = GroupMode.PLAIN if stored is None else stored.record.mode
        if mode is GroupMode.PLAIN:
            mode = await self.topic_mode() or GroupMode.CLAIMED
        is_assigned = mode is GroupMode.ASSIGNED
        generation = await self._generation_of_holder(member) if is_assigned else 0
        held: tuple[Claim, ...] = ()
        skips_undelivered = False

        def decide(old: GroupRecord | None) -> GroupRecord:
            nonlocal held, skips_undelivered
            if old is None:
                old = GroupRecord(offset=FIRST_OFFSET, updated_ms=0, mode=mode)
            if is_assigned:
                old = self._in_generation(self._in_mode(old, mode), generation)
            elif old.mode is GroupMode.ASSIGNED:  # since its mode was read above
                raise self._stale_member()
            held += claims.held_by(old, member, upto)  # adds nothing after a lost answer of a write that succeeded
            skips_undelivered |= upto >= old.offset
            return claims.ack(old, member, upto)

        record = _present(await self._change(decide))
        if skips_undelivered or claims.is_any_acknowledged(record, held):
            return AckResult(record.committed)
        return AckResult(record.committed, held_ranges(claims.held_by_others(record, member, upto)))

    async def settle(self, member: str, ranges: Ranges) -> None:
        """Acknowledge exactly these ranges, as far as `member` holds them."""
        await self._change(_for_ranges(claims.settle, member, ranges))

    async def give_back(self, member: str, ranges: Ranges) -> None:
        """Return ranges that did not reach `member` to the group, as if they had not been claimed."""
        await self._change(_for_ranges(claims.give_back, member, ranges))

    async def release(self, member: str, offset: int, *, delay_ms: int = 0) -> bool:
        """Have a record with which `member` failed delivered again after `delay_ms`; return whether the member still
        held it.

        What the member acknowledges above the record does not acknowledge it. In an assigned group, nothing is
        delivered until the delay is over.
        """
        due_ms = self._log.runtime.now_ms() + delay_ms
        was_held = False

        def decide(old: GroupRecord | None) -> GroupRecord | None:
            nonlocal was_held
            new = None if old is None else claims.release(old, member, offset, offset, due_ms)
            # After a lost answer: the release was recorded before, unless another member has got the record since.
            was_held = new != old or (was_held and old is not None and claims.is_released(old, offset, due_ms))
            return new

        await self._change(decide)
        return was_held

    async def commit(self, offset: int) -> int:
        """Move a plain group forward to `offset`, never back; return its position, which is higher if another reader
        committed more.

        Raises `OffsetOutOfRange` beyond the partition's next offset, since the group would skip records unseen, and
        `GroupConflict` if the group is an assigned one or its members hold claims.
        """
        _check_offset(offset)
        await self._check_reached(offset)

        def decide(old: GroupRecord | None) -> GroupRecord:
            if old is None:
                return GroupRecord(offset=offset, updated_ms=0)
            if old.claims or old.mode is GroupMode.ASSIGNED:
                raise self._conflict(
                    "shares its records out to members, which hold some of them: a plain commit would skip those"
                )
            return claims.commit(old, offset)

        return _present(await self._change(decide)).committed

    async def reset(self, offset: int) -> None:
        """Move the group to `offset`, forward or back, and forget its claims: for operators, while the group's
        consumers are stopped.
        """
        _check_offset(offset)
        await self._check_reached(offset)

        def decide(old: GroupRecord | None) -> GroupRecord:
            return GroupRecord(offset=offset, updated_ms=0) if old is None else claims.reset(old, offset)

        await self._change(decide)

    async def topic_mode(self) -> GroupMode:
        """Return how the group shares out the topic, by its record in the first partition or by its living members;
        plain if neither exists.
        """
        first = await self._store.get(self._key._replace(partition=0))
        if first is not None and first.record.mode:
            return first.record.mode
        members = await self._assignments.members(self._key.group, self.topic)
        now_ms = self._log.runtime.now_ms()
        is_assigned = any(is_held(ms, now_ms) for ms in members.deadlines.values())
        return GroupMode.ASSIGNED if is_assigned else GroupMode.PLAIN

    def check_mode(self, record: GroupRecord, mode: GroupMode) -> None:
        """Raise `GroupConflict` if the record is of another mode that shares records out."""
        if record.mode not in (GroupMode.PLAIN, mode):
            raise self._conflict(f"has the mode {record.mode}, not {mode}")

    async def _change(self, decide: Decision) -> GroupRecord | None:
        """Make the change that `decide` returns, durably, and return the record after it.

        `decide` is called again after a lost race or a lost answer, and so must bear the state that it made itself.
        """
        backoff = Backoff(self._log.runtime, self)
        while True:
            reads = await self._log.meta.begin_reads()
            stored = await self._store.get(self._key)
            old = None if stored is None else await self._within_bounds(stored.record)
            new = decide(old)
            if new is None or (stored is not None and new == stored.record):
                await reads.confirm()  # in a stale state, the change may have been made and undone since
                return old
            if old is not None and new.committed != old.committed:
                new = replace(new, metadata="", leader_epoch=-1)  # a Kafka client committed them with its offset
            new = replace(new, updated_ms=self._log.runtime.now_ms())
            try:
                version = ABSENT if stored is None else stored.version
                await self._store.put(self._key, new, expected=version, durable=True)
                return new
            except (VersionMismatch, OutcomeUnknown) as error:
                await backoff.wait(error)

    async def _within_bounds(self, record: GroupRecord) -> GroupRecord:
        """Return the record with a position that a Kafka client committed beyond the end moved to the end.

        No record from the end on was there when the client committed, so the group has seen none of them.
        """
        if not record.is_unbounded:
            return record
        bounds = await read_confirmed(self._log.meta, lambda: self._reader.bounds(self.tp))
        return replace(record, offset=min(record.offset, bounds.next_offset), is_unbounded=False)

    async def _check_reached(self, position: int, named: int | None = None) -> None:
        """Raise `OffsetOutOfRange`, of the offset `named` by the caller, if the position is beyond the next offset."""

        async def check() -> None:
            bounds = await self._reader.bounds(self.tp)
            if position > bounds.next_offset:
                raise OffsetOutOfRange(str(self.tp), position if named is None else named, *bounds)

        await read_confirming_errors(self._log.meta, check, OffsetOutOfRange)

    async def _generation_of_holder(self, member: str) -> int:
        """Return the generation in which `member` has the partition; raise `StaleMember` if it has not."""
        members = await self._assignments.members(self._key.group, self.topic)
        if partition_holder(members.deadlines, self.tp.partition) != member:
            raise self._stale_member()
        return members.generation

    def _in_mode(self, record: GroupRecord, mode: GroupMode) -> GroupRecord:
        """Return the record as one of this mode; raise `GroupConflict` if it is of the other."""
        self.check_mode(record, mode)
        return replace(record, mode=mode)

    def _in_generation(self, record: GroupRecord, generation: int) -> GroupRecord:
        """Return the record as served under this generation; raise `StaleMember` if a later one was served."""
        if record.generation > generation:
            raise self._stale_member()
        return replace(record, generation=generation)

    def _conflict(self, why: str) -> GroupConflict:
        return GroupConflict(
            f"{self} {why}. Choose another group, or delete this one once its members are gone: llog groups delete"
        )

    def _stale_member(self) -> StaleMember:
        return StaleMember(
            f"{self}: this member does not have the partition, or no longer. Join again, and continue with the "
            "partitions that it gets"
        )


def _for_ranges(change: Callable[[GroupRecord, str, int, int], GroupRecord], member: str, ranges: Ranges) -> Decision:
    def decide(old: GroupRecord | None) -> GroupRecord | None:
        for start, end in ranges if old is not None else ():
            assert old is not None
            old = change(old, member, start, end)
        return old

    return decide


def _present(record: GroupRecord | None) -> GroupRecord:
    assert record is not None
    return record


def _check_offset(offset: int) -> None:
    if offset < FIRST_OFFSET:
        raise InvalidArgument(f"offsets start at {FIRST_OFFSET}, so {offset} is not one")
