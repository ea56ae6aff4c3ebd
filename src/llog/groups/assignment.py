"""Assigned groups: who is a member, and which partitions each has.

One record per group and topic in the metadata store, whatever the engine. Partitions are dealt round-robin over the
members in the order of their names, so that all who know the members know the deal. Members whose deadline has passed
are dropped by whoever comes. No guarantee rests on the clock: what a member that was taken for dead has claimed is
delivered again, and what it acknowledges is refused.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import msgspec

from llog.errors import InvalidArgument, OutcomeUnknown, StaleMember, VersionMismatch
from llog.groups.records import VISIBILITY_MS_MAX, Members, is_held
from llog.log.cas import Tries
from llog.log.keys import MEMBERS, group_prefix, members_key
from llog.log.log import Log
from llog.log.records import Topic, decode, encode
from llog.stores.meta import ABSENT, scan

MEMBERS_MAX: Final = 1000


class Membership(msgspec.Struct, frozen=True, kw_only=True):
    """A member's share as of one generation; none of the partitions if there are more members than those."""

    generation: int
    member: str
    members: tuple[str, ...]
    partitions: tuple[int, ...]


def share(members: Collection[str], member: str, partitions: int) -> range:
    """The partitions of a topic with so many that this one of the members has."""
    return range(sorted(members).index(member), partitions, len(members))


def holder(members: Collection[str], partition: int) -> str | None:
    """Who has this partition; None if there are no members."""
    return sorted(members)[partition % len(members)] if members else None


class Assignments:
    def __init__(self, log: Log) -> None:
        self._log = log

    async def join(self, group: str, topic: Topic, member: str, session_ms: int, *, served: int = 0) -> Membership:
        """Becomes a member, or stays one: alive for `session_ms` from about now. Writes nothing if that was said a
        short while ago.

        Who joins makes a generation above `served`, the highest that the group's positions know: they may have outlived
        the members that they were served under.
        """
        return await self._renew(group, topic, member, session_ms, may_join=True, served=served)

    async def heartbeat(self, group: str, topic: Topic, member: str, session_ms: int) -> Membership:
        """As `join`, of a member only: `StaleMember` if it was dropped, so that it knows that its claims are being
        delivered to others.
        """
        return await self._renew(group, topic, member, session_ms, may_join=False)

    async def leave(self, group: str, topic: Topic, member: str) -> None:
        """Gives the member's partitions to the others now. One that is no member may leave, too."""
        key = members_key(group, topic.directory)
        tries = Tries(self._log.runtime, key)
        while True:
            await tries.another()
            found = await self._log.meta.get(key)
            if found is None or member not in (members := decode(Members, found.value, key)).deadlines:
                return
            now_ms = self._log.runtime.now_ms()
            left = {name: ms for name, ms in members.deadlines.items() if is_held(ms, now_ms) and name != member}
            try:
                new = Members(generation=members.generation + 1, deadlines=left)
                await self._log.meta.put(key, encode(new), expected=found.version)
                return
            except (VersionMismatch, OutcomeUnknown) as error:
                tries.lost(error)

    async def members(self, group: str, topic: Topic) -> Members:
        """As the record says, the dead among them included; nobody if there is none."""
        key = members_key(group, topic.directory)
        found = await self._log.meta.get(key)
        return Members() if found is None else decode(Members, found.value, key)

    async def of_group(self, group: str) -> dict[str, Members]:
        """By directory, wherever the group is or was an assigned one."""
        prefix = group_prefix(group)
        found = {}
        async for entry in scan(self._log.meta, prefix):
            directory, _, last = entry.key.removeprefix(prefix).partition("/")
            if last == MEMBERS:
                found[directory] = decode(Members, entry.value, entry.key)
        return found

    async def forget(self, group: str, directory: str) -> bool:
        """Whether there was something to forget."""
        return await self._log.meta.delete(members_key(group, directory))

    async def _renew(
        self, group: str, topic: Topic, member: str, session_ms: int, *, may_join: bool, served: int = 0
    ) -> Membership:
        if not 1 <= session_ms <= VISIBILITY_MS_MAX:
            raise InvalidArgument(f"a member's session lasts from 1 to {VISIBILITY_MS_MAX} ms: {session_ms}")
        key = members_key(group, topic.directory)
        tries = Tries(self._log.runtime, key)
        while True:
            await tries.another()
            found = await self._log.meta.get(key)
            old = Members() if found is None else decode(Members, found.value, key)
            if member not in old.deadlines and not may_join:
                raise StaleMember(
                    f"{member!r} is no member of group {group!r} on topic {topic.name!r}: it left, or was silent "
                    "for too long. Join again"
                )
            above = msgspec.structs.replace(old, generation=max(old.generation, served))
            new = _renewed(above, member, self._log.runtime.now_ms(), session_ms)
            if len(new.deadlines) > MEMBERS_MAX:
                raise InvalidArgument(f"group {group!r} has {MEMBERS_MAX} members, which is the most there may be")
            try:
                if new != old:
                    await self._log.meta.put(key, encode(new), expected=ABSENT if found is None else found.version)
                return _membership(new, member, topic.partitions)
            except (VersionMismatch, OutcomeUnknown) as error:
                tries.lost(error)


def _renewed(old: Members, member: str, now_ms: int, session_ms: int) -> Members:
    """With the member alive and the dead gone; `old` itself if nobody came or went and the member's time is hardly
    used.
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
        generation=members.generation, member=member, members=names, partitions=tuple(share(names, member, partitions))
    )
