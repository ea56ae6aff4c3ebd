"""Consumer groups on topics of every engine: which records are delivered to whom, and how far a group has come.

- A committed position never goes back but by a reset, and never passes a record that somebody was given and nobody
  acknowledged.
- One member's acknowledgement drops no other's claim, live or expired.
- What is delivered was recorded before. A power cut may undo a claim: then its records are delivered again, whatever
  others acknowledge. Everything else is durable.

Each call changes one small record by compare-and-swap, tries again when others were faster, and looks again when an
answer was lost. The catalog entry of a topic and the bounds of a partition may be handed in by those who have them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from llog.engines.port import Bounds, LogReader
from llog.engines.routing import EngineReader
from llog.errors import (
    GroupConflict,
    InvalidArgument,
    OffsetOutOfRange,
    OutcomeUnknown,
    StaleMember,
    VersionMismatch,
)
from llog.groups import claims
from llog.groups.acks import Acked, held_in
from llog.groups.assignment import Assignments, Membership, holder
from llog.groups.records import (
    VISIBILITY_MS_MAX,
    Claim,
    GroupMode,
    GroupRecord,
    check_group_name,
    check_member_name,
    is_held,
)
from llog.groups.store import GroupKey, GroupStore, GroupStores
from llog.log.cas import Tries
from llog.log.catalog import Catalog, check_partition
from llog.log.log import Log
from llog.log.records import Topic
from llog.model import FIRST_OFFSET, TopicPartition
from llog.stores.meta import ABSENT, certain

Ranges = Sequence[tuple[int, int]]
Decision = Callable[[GroupRecord | None], GroupRecord | None]
"""From the record as it is to the one that it shall be; None, or the same, if it may stay."""


class Home(NamedTuple):
    """Where a group's record of one partition is kept."""

    topic: Topic
    store: GroupStore
    key: GroupKey

    def __str__(self) -> str:
        return f"group {self.key.group!r} on {self.topic.name}/{self.key.partition}"


class Groups:
    """The groups of a log. `reader` tells bounds; `stores` are for those who keep records elsewhere than by the topic's
    engine.
    """

    def __init__(
        self, log: Log, reader: LogReader | None = None, stores: Mapping[str, GroupStore] | None = None
    ) -> None:
        self.log = log
        self.reader = reader or EngineReader(log)
        self.catalog = Catalog(log)
        self.stores = GroupStores(log, stores)
        self.assignments = Assignments(log)

    async def claim(
        self,
        group: str,
        tp: TopicPartition,
        member: str,
        *,
        limit: int,
        visibility_ms: int,
        membership: Membership | None = None,
        bounds: Bounds | None = None,
        topic: Topic | None = None,
    ) -> tuple[Claim, ...] | None:
        """Up to `limit` records that are `member`'s to work on for `visibility_ms`: in order, none if there are none.

        None if the group has no position here: `begin` gives it one. With a membership, the group is an assigned one,
        and the partition is this member's alone: `StaleMember` if it is not, or if a later generation was served here.
        """
        if limit < 1 or not 0 <= visibility_ms <= VISIBILITY_MS_MAX:
            raise InvalidArgument(
                f"a claim is of 1 record or more and for 0 to {VISIBILITY_MS_MAX} ms: {limit}, {visibility_ms}"
            )
        home = await self._home(group, tp, topic)
        check_member_name(member)
        if membership is not None and (membership.member != member or tp.partition not in membership.partitions):
            raise _stale(home)
        mode = GroupMode.CLAIMED if membership is None else GroupMode.ASSIGNED
        if bounds is None:
            bounds = await self.reader.bounds(tp)
        tries = Tries(self.log.runtime, home)
        perhaps: list[Claim] = []
        while True:
            await tries.another()
            found = await home.store.get(home.key)
            if found is None:
                return None
            # The answer of an earlier try was lost, but it was done: what it claimed would be nobody's until it
            # expires.
            if perhaps and (mine := claims.still_held(found.record, perhaps)):
                return mine
            old = _in_mode(home, found.record, mode)
            if membership is not None:
                old = _served(home, old, membership.generation)
            now_ms = self.log.runtime.now_ms()
            in_order = mode is GroupMode.ASSIGNED
            new, given = claims.claim(old, member, limit, bounds, now_ms, visibility_ms, in_order=in_order)
            if not given and new.claims == found.record.claims:
                return ()
            try:
                new = replace(new, updated_ms=now_ms)
                await home.store.put(home.key, new, expected=found.version, durable=False)
                return given
            except (VersionMismatch, OutcomeUnknown) as error:
                tries.lost(error)
                if isinstance(error, OutcomeUnknown):
                    perhaps += given

    async def begin(
        self,
        group: str,
        tp: TopicPartition,
        offset: int,
        *,
        mode: GroupMode = GroupMode.CLAIMED,
        topic: Topic | None = None,
    ) -> int:
        """Gives the group its first position here; returns the one that counts, which is another's if that was
        faster.
        """
        home = await self._home(group, tp, topic)
        _check_offset(offset)
        known = await self._known_mode(home)
        if known not in (GroupMode.PLAIN, mode):
            raise _conflict(home, f"is one whose partitions are {known}, and not {mode}")

        def decide(old: GroupRecord | None) -> GroupRecord | None:
            return GroupRecord(offset=offset, updated_ms=0, mode=mode) if old is None else _in_mode(home, old, mode)

        return _there(await self._change(home, decide)).committed

    async def ack(self, group: str, tp: TopicPartition, member: str, upto: int, *, topic: Topic | None = None) -> Acked:
        """Everything up to `upto`, included, is done: what `member` was given, and what nobody was.

        Returns the group's position then, which is the lowest offset that others were given, if they were; and, if
        nothing was acknowledged, who holds it. `OffsetOutOfRange` beyond the end; in an assigned group, `StaleMember`
        from one that does not have the partition.
        """
        home = await self._home(group, tp, topic)
        check_member_name(member)
        _check_offset(upto)
        stored = await home.store.get(home.key)
        if stored is None or upto >= stored.record.offset:  # else it was delivered, so it is there
            await self._check_reached(tp, upto + 1, upto)
        mode = GroupMode.PLAIN if stored is None else stored.record.mode
        if mode is GroupMode.PLAIN:
            mode = await self._known_mode(home) or GroupMode.CLAIMED
        assigned = mode is GroupMode.ASSIGNED
        generation = await self._generation_of_holder(home, member) if assigned else 0
        given: tuple[Claim, ...] = ()
        passes_on = False

        def decide(old: GroupRecord | None) -> GroupRecord:
            nonlocal given, passes_on
            if old is None:
                old = GroupRecord(offset=FIRST_OFFSET, updated_ms=0, mode=mode)
            if assigned:
                old = _served(home, _in_mode(home, old, mode), generation)
            elif old.mode is GroupMode.ASSIGNED:  # since it was looked at
                raise _stale(home)
            given += claims.held_by(old, member, upto)  # not the last time, if an answer was lost
            passes_on |= upto >= old.offset
            return claims.ack(old, member, upto)

        record = _there(await self._change(home, decide))
        if passes_on or claims.is_any_done(record, given):
            return Acked(record.committed)
        return Acked(record.committed, held_in(claims.held_by_others(record, member, upto)))

    async def settle(
        self, group: str, tp: TopicPartition, member: str, ranges: Ranges, *, topic: Topic | None = None
    ) -> None:
        """Exactly these ranges, ends included, are done, as far as `member` holds them."""
        await self._change(await self._home(group, tp, topic), _each_range(claims.settle, member, ranges))

    async def give_back(
        self, group: str, tp: TopicPartition, member: str, ranges: Ranges, *, topic: Topic | None = None
    ) -> None:
        """These ranges, ends included, did not get to `member`: whoever comes next gets them, as if they had not been
        claimed.
        """
        await self._change(await self._home(group, tp, topic), _each_range(claims.give_back, member, ranges))

    async def release(
        self,
        group: str,
        tp: TopicPartition,
        member: str,
        offset: int,
        *,
        delay_ms: int = 0,
        topic: Topic | None = None,
    ) -> bool:
        """`member` failed with the record at `offset`: it is delivered again after `delay_ms`. Whether the member still
        held it.

        What the member acknowledges above it does not drop it. In an assigned group, nothing is delivered while it
        waits.
        """
        home = await self._home(group, tp, topic)
        due_ms = self.log.runtime.now_ms() + delay_ms
        held = False

        def decide(old: GroupRecord | None) -> GroupRecord | None:
            nonlocal held
            new = None if old is None else claims.release(old, member, offset, offset, due_ms)
            # Once more after a lost answer: it was done before, or another has got it.
            held = new != old or (held and old is not None and claims.is_released(old, offset, due_ms))
            return new

        await self._change(home, decide)
        return held

    async def join(self, group: str, topic: str, member: str, *, session_ms: int) -> Membership:
        """Becomes a member of an assigned group, or stays one, for `session_ms`; returns its share, which may change
        with every call.
        """
        entry = await self.catalog.get(topic)
        check_member_name(member)
        served = 0
        if member not in (await self.assignments.members(check_group_name(group), entry)).deadlines:
            store = await self.stores.of(entry)
            for key, record in (await store.records(group, [entry.directory])).items():
                served = max(served, _in_mode(Home(entry, store, key), record, GroupMode.ASSIGNED).generation)
        return await self.assignments.join(group, entry, member, session_ms, served=served)

    async def heartbeat(self, group: str, topic: str, member: str, *, session_ms: int) -> Membership:
        """As `join`, but `StaleMember` from one that was dropped."""
        entry = await self.catalog.get(topic)
        return await self.assignments.heartbeat(check_group_name(group), entry, member, session_ms)

    async def leave(self, group: str, topic: str, member: str) -> None:
        """Gives the member's partitions to the others at once; what it did not acknowledge is delivered again."""
        await self.assignments.leave(check_group_name(group), await self.catalog.get(topic), member)

    async def commit(self, group: str, tp: TopicPartition, offset: int) -> int:
        """Moves a plain group on to `offset` and returns where it is then: further, if somebody committed more; never
        back.

        `OffsetOutOfRange` beyond the partition's next offset, for such a group would pass over records unseen;
        `GroupConflict` if the group is an assigned one, or its members hold claims.
        """
        home = await self._home(group, tp)
        _check_offset(offset)
        await self._check_reached(tp, offset)

        def decide(old: GroupRecord | None) -> GroupRecord:
            if old is None:
                return GroupRecord(offset=offset, updated_ms=0)
            if old.claims or old.mode is GroupMode.ASSIGNED:
                raise _conflict(
                    home,
                    "shares its records out to members, who are at work on some: a plain commit would pass over them",
                )
            return claims.commit(old, offset)

        return _there(await self._change(home, decide)).committed

    async def mode(self, group: str, topic: str) -> GroupMode:
        """Returns how the group shares the topic out; plain if it does not, or not yet."""
        return await self._known_mode(await self._home(group, TopicPartition(topic, 0)))

    async def position(self, group: str, tp: TopicPartition, *, topic: Topic | None = None) -> int | None:
        """The next offset that the group wants, or None if it has no position here."""
        record = await self.record(group, tp, topic=topic)
        return None if record is None else record.committed

    async def record(self, group: str, tp: TopicPartition, *, topic: Topic | None = None) -> GroupRecord | None:
        home = await self._home(group, tp, topic)
        found = await home.store.get(home.key)
        return None if found is None else found.record

    async def reset(self, group: str, tp: TopicPartition, offset: int, *, topic: Topic | None = None) -> None:
        """Moves the group to `offset`, back as well, and forgets its claims: for operators, while the group's consumers
        are stopped.
        """
        home = await self._home(group, tp, topic)
        _check_offset(offset)
        await self._check_reached(tp, offset)

        def decide(old: GroupRecord | None) -> GroupRecord:
            return GroupRecord(offset=offset, updated_ms=0) if old is None else claims.reset(old, offset)

        await self._change(home, decide)

    async def _home(self, group: str, tp: TopicPartition, topic: Topic | None = None) -> Home:
        check_group_name(group)
        topic = topic or await self.catalog.get(tp.topic)
        check_partition(topic, tp.partition)
        return Home(topic, await self.stores.of(topic), GroupKey(group, topic.directory, tp.partition))

    async def _change(self, home: Home, decide: Decision) -> GroupRecord | None:
        """The record as it is then, durably. To decide twice does no harm: an answer that was lost is followed by
        another try.
        """
        tries = Tries(self.log.runtime, home)
        while True:
            await tries.another()
            reads = await self.log.meta.begin_reads()
            found = await home.store.get(home.key)
            old = None if found is None else found.record
            new = decide(old)
            if new is None or new == old:
                await reads.confirm()  # else it may be done in an old state only, and the caller is told that it is
                return old
            new = replace(new, updated_ms=self.log.runtime.now_ms())
            try:
                version = ABSENT if found is None else found.version
                await home.store.put(home.key, new, expected=version, durable=True)
                return new
            except (VersionMismatch, OutcomeUnknown) as error:
                tries.lost(error)

    async def _check_reached(self, tp: TopicPartition, position: int, asked: int | None = None) -> None:
        async def check() -> None:
            bounds = await self.reader.bounds(tp)
            if position > bounds.next_offset:
                raise OffsetOutOfRange(str(tp), position if asked is None else asked, *bounds)

        await certain(self.log.meta, check, OffsetOutOfRange)

    async def _known_mode(self, home: Home) -> GroupMode:
        """How the group shares the topic out: as in the first partition, or as its members show; plain if neither
        does.
        """
        first = await home.store.get(home.key._replace(partition=0))
        if first is not None and first.record.mode:
            return first.record.mode
        members = await self.assignments.members(home.key.group, home.topic)
        now_ms = self.log.runtime.now_ms()
        is_assigned = any(is_held(ms, now_ms) for ms in members.deadlines.values())
        return GroupMode.ASSIGNED if is_assigned else GroupMode.PLAIN

    async def _generation_of_holder(self, home: Home, member: str) -> int:
        members = await self.assignments.members(home.key.group, home.topic)
        if holder(members.deadlines, home.key.partition) != member:
            raise _stale(home)
        return members.generation


def _each_range(change: Callable[[GroupRecord, str, int, int], GroupRecord], member: str, ranges: Ranges) -> Decision:
    def decide(old: GroupRecord | None) -> GroupRecord | None:
        for start, end in ranges if old is not None else ():
            assert old is not None
            old = change(old, member, start, end)
        return old

    return decide


def _in_mode(home: Home, record: GroupRecord, mode: GroupMode) -> GroupRecord:
    """The record as one of this mode; `GroupConflict` if it is of the other."""
    if record.mode not in (GroupMode.PLAIN, mode):
        raise _conflict(home, f"is one whose records are {record.mode}, and not {mode}")
    return replace(record, mode=mode)


def _served(home: Home, record: GroupRecord, generation: int) -> GroupRecord:
    """The record as served under this generation; `StaleMember` if a later one was."""
    if record.generation > generation:
        raise _stale(home)
    return replace(record, generation=generation)


def _conflict(home: Home, why: str) -> GroupConflict:
    return GroupConflict(
        f"{home} {why}. Choose another group, or delete this one once its members are gone: llog groups delete"
    )


def _stale(home: Home) -> StaleMember:
    return StaleMember(
        f"{home}: this member does not have the partition, or no longer. Join again, and go on with those it has then"
    )


def _there(record: GroupRecord | None) -> GroupRecord:
    assert record is not None
    return record


def _check_offset(offset: int) -> None:
    if offset < FIRST_OFFSET:
        raise InvalidArgument(f"offsets start at {FIRST_OFFSET}: {offset}")
