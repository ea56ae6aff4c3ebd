"""Assigned groups: their members, and the partitions that each member has.

The metadata store holds one record per group and topic, for every engine. Partitions are dealt round-robin to the
members in the order of their names, so that every process that knows the members knows the assignment. Any member that
joins or leaves drops those whose deadline has passed. No guarantee rests on the clock: the claims of a member that was
wrongly taken for dead are delivered again, and its ACKs are refused.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import msgspec

from llog.errors import InvalidArgument, OutcomeUnknown, StaleMember, VersionMismatch
from llog.groups.records import VISIBILITY_MS_MAX, Members, is_held
from llog.log.cas import Backoff, update
from llog.log.keys import MEMBERS, group_prefix, members_key
from llog.log.log import Log
from llog.log.records import Topic, decode, encode
from llog.stores.meta import ABSENT, scan

MEMBERS_MAX: Final = 1000


class Membership(msgspec.Struct, frozen=True, kw_only=True):
    """A member's partitions as of one generation; none if there are more members than partitions."""

    generation: int
    member: str
    members: tuple[str, ...]
    partitions: tuple[int, ...]


def member_partitions(members: Collection[str], member: str, partitions: int) -> range:
    """Return which of the topic's `partitions` this member has."""
    return range(sorted(members).index(member), partitions, len(members))


def partition_holder(members: Collection[str], partition: int) -> str | None:
    """Return the member that has this partition; None if there are no members."""
    return sorted(members)[partition % len(members)] if members else None


class Assignments:
    def __init__(self, log: Log) -> None:
        self._log = log

    async def join(self, group: str, topic: Topic, member: str, session_ms: int, *, served: int = 0) -> Membership:
        """Become a member, or stay one, until `session_ms` from about now. Writes nothing if the member joined a short
        while ago.

        A new member makes a generation above `served`, the highest that the group's positions know: they may have
        outlived the members under which they were served.
        """
        return await self._renew_session(group, topic, member, session_ms, may_join=True, served=served)

    async def heartbeat(self, group: str, topic: Topic, member: str, session_ms: int) -> Membership:
        """As `join`, but raise `StaleMember` for a member that was dropped and whose claims go to others."""
        return await self._renew_session(group, topic, member, session_ms, may_join=False)

    async def leave(self, group: str, topic: Topic, member: str) -> None:
        """Give the member's partitions to the others now; do nothing if it is not a member."""
        key = members_key(group, topic.directory)

        def drop_member(members: Members) -> Members:
            if member not in members.deadlines:
                return members
            now_ms = self._log.runtime.now_ms()
            left = {name: ms for name, ms in members.deadlines.items() if is_held(ms, now_ms) and name != member}
            return Members(generation=members.generation + 1, deadlines=left)

        await update(self._log, key, Members, drop_member)

    async def members(self, group: str, topic: Topic) -> Members:
        """Return the members as stored, those whose deadline has passed included; none if nothing is stored."""
        key = members_key(group, topic.directory)
        found = await self._log.meta.get(key)
        return Members() if found is None else decode(Members, found.value, key)

    async def of_group(self, group: str) -> dict[str, Members]:
        """Return the members by topic directory, wherever the group is or was an assigned one."""
        prefix = group_prefix(group)
        found = {}
        async for entry in scan(self._log.meta, prefix):
            directory, _, last = entry.key.removeprefix(prefix).partition("/")
            if last == MEMBERS:
                found[directory] = decode(Members, entry.value, entry.key)
        return found

    async def forget(self, group: str, directory: str) -> bool:
        """Delete the group's members on a topic; return whether a record existed."""
        return await self._log.meta.delete(members_key(group, directory))

    async def _renew_session(
        self, group: str, topic: Topic, member: str, session_ms: int, *, may_join: bool, served: int = 0
    ) -> Membership:
        if not 1 <= session_ms <= VISIBILITY_MS_MAX:
            raise InvalidArgument(f"a member's session must last from 1 to {VISIBILITY_MS_MAX} ms, not {session_ms}")
        key = members_key(group, topic.directory)
        backoff = Backoff(self._log.runtime, key)
        while True:
            found = await self._log.meta.get(key)
            old = Members() if found is None else decode(Members, found.value, key)
            if member not in old.deadlines and not may_join:
                raise StaleMember(
                    f"{member!r} is not a member of group {group!r} on topic {topic.name!r}: it left, or was silent "
                    "for too long. Join again"
                )
            above = msgspec.structs.replace(old, generation=max(old.generation, served))
            new = _renew_member(above, member, self._log.runtime.now_ms(), session_ms)
            if len(new.deadlines) > MEMBERS_MAX:
                raise InvalidArgument(f"group {group!r} has {MEMBERS_MAX} members, and no group may have more")
            try:
                if new != old:
                    await self._log.meta.put(key, encode(new), expected=ABSENT if found is None else found.version)
                return _membership(new, member, topic.partitions)
            except (VersionMismatch, OutcomeUnknown) as error:
                await backoff.wait(error)


def _renew_member(old: Members, member: str, now_ms: int, session_ms: int) -> Members:
    """Return the members with this one's deadline renewed and without the dead ones; `old` itself if nobody came or
    went and at most a third of the member's session has passed.
    """
    deadline_ms = now_ms + session_ms
    alive = {name: ms for name, ms in old.deadlines.items() if is_held(ms, now_ms) or name == member}
    if alive.keys() == old.deadlines.keys() and member in alive:
        if deadline_ms - session_ms // 3 <= alive[member] <= deadline_ms:
            return old
        return Members(generation=old.generation, deadlines=alive | {member: deadline_ms})
    return Members(generation=old.generation + 1, deadlines=alive | {member: deadline_ms})


def _membership(members: Members, member: str, partitions: int) -> Membership:
    names = tuple(sorted(members.deadlines))
    return Membership(
        generation=members.generation,
        member=member,
        members=names,
        partitions=tuple(member_partitions(names, member, partitions)),
    )
