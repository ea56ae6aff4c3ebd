"""All that is to be seen of consumer groups, over topics of every engine; and their removal.

Left out are deleted topics, and those that cannot be read from here: they are on another machine, or another process
owns them. That is what `unreachable` tells.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from llog.engines.port import Bounds
from llog.errors import (
    ConfigurationError,
    GroupConflict,
    InvalidArgument,
    LlogError,
    LogOwned,
    MissingExtra,
    PartitionNotInitialized,
    TopicElsewhere,
    TopicNotFound,
    WrongEngine,
)
from llog.groups import claims
from llog.groups.assignment import holder
from llog.groups.groups import Groups
from llog.groups.records import NOBODY, GroupRecord, Members, check_group_name, is_held
from llog.groups.store import GroupKey, GroupStore
from llog.log.keys import group_prefix
from llog.log.records import Topic
from llog.model import TopicPartition
from llog.stores.meta import after

_GONE: Final = (TopicNotFound, PartitionNotInitialized)
_OUT_OF_REACH: Final = (ConfigurationError, LogOwned, MissingExtra, TopicElsewhere, WrongEngine)


class GroupLag(msgspec.Struct, frozen=True, kw_only=True):
    """`lag` counts the records that the group has yet to acknowledge, without those that retention took before it
    came.
    """

    topic: str
    partition: int
    offset: int
    next_offset: int
    lag: int


class GroupShare(msgspec.Struct, frozen=True, kw_only=True):
    """A group in one partition. No offset and lag: it has a member there, and no position yet."""

    topic: str
    partition: int
    mode: str
    offset: int | None
    next_offset: int
    lag: int | None
    outstanding: int = 0
    """How many records are delivered and not acknowledged; `expired` of them may be delivered again."""
    expired: int = 0
    holders: tuple[str, ...] = ()
    """The members that hold claims."""
    assigned_to: str | None = None

    @property
    def members(self) -> list[str]:
        """Those who hold claims, and the one that has the partition, in order."""
        return sorted({*self.holders, *([] if self.assigned_to is None else [self.assigned_to])})


class GroupListing:
    """Of topics of all engines, or of one."""

    def __init__(self, groups: Groups, engine: str | None = None) -> None:
        self._groups = groups
        self._engine = engine

    async def names(self) -> list[str]:
        """Of all groups, in order."""
        names: set[str] = set()
        for store, topics in await self._stores(await self._topics()):
            names.update(await store.names(topics))
        return sorted(names)

    async def unreachable(self) -> LlogError | None:
        """Why the groups on some topics cannot be seen from here; None if all can."""
        for topic in (await self._topics()).values():
            try:
                await self._groups.stores.of(topic)
            except _OUT_OF_REACH as error:
                return error
            except _GONE:
                continue
        return None

    async def check_there(self, group: str) -> None:
        """`InvalidArgument` if there is no such group; if it may be where nobody can look from here, why that is so."""
        if group not in await self.names():
            missing = await self.unreachable()
            raise missing or InvalidArgument(f"there is no group {group!r}: `llog groups list` shows those there are")

    async def lag(self, group: str) -> list[GroupLag]:
        """Where the group is in every partition in which it has a position, by directory and partition."""
        return [
            GroupLag(
                topic=each.topic,
                partition=each.partition,
                offset=each.offset,
                next_offset=each.next_offset,
                lag=each.lag,
            )
            for each in await self.describe(group)
            if each.offset is not None and each.lag is not None
        ]

    async def describe(self, group: str) -> list[GroupShare]:
        """Every partition in which the group has a position, or a member; by directory and partition."""
        topics = await self._topics()
        assigned = await self._groups.assignments.of_group(check_group_name(group))
        found: dict[GroupKey, GroupRecord | None] = {}
        for directory, members in assigned.items():
            if directory in topics and members.deadlines:
                found |= {GroupKey(group, directory, p): None for p in range(topics[directory].partitions)}
        for store, mine in await self._stores(topics):
            found |= await store.records(group, mine)
        shares = []
        for key in sorted(found):
            topic = topics[key.directory]
            try:
                bounds = await self._groups.reader.bounds(TopicPartition(topic.name, key.partition))
            except (*_GONE, *_OUT_OF_REACH):
                continue  # deleted just now, or not to be had here
            shares.append(self._share(topic, key, found[key], assigned.get(key.directory, Members()), bounds))
        return shares

    async def delete_whole(self, group: str, topic: str | None = None, *, force: bool = False) -> int:
        """As `delete`, of a group that is there. Refused if some of it is out of reach: half of a group must not be
        left behind.
        """
        await self.check_there(group)
        if topic is None:
            missing = await self.unreachable()
            if missing is not None:
                raise missing
        return await self.delete(group, topic, force=force)

    async def delete(self, group: str, topic: str | None = None, *, force: bool = False) -> int:
        """Forgets the group, on one topic or everywhere; returns in how many partitions it had a position.

        `GroupConflict` while a member is alive or a claim has not expired, unless forced: whoever is at work would go
        on as a new group.
        """
        reads = await self._groups.log.meta.begin_reads()
        topics = await self._topics()
        if topic is not None:
            entry = await self._groups.catalog.get(topic)
            await self._groups.stores.of(entry)
            topics = {entry.directory: entry}
        assigned = await self._groups.assignments.of_group(check_group_name(group))
        found = [(store, await store.records(group, mine)) for store, mine in await self._stores(topics)]
        if not force:
            for name in self._at_work(
                [record for _, records in found for record in records.values()], assigned, topics
            ):
                raise GroupConflict(
                    f"group {group!r} is in use by {name!r}: stop its members and wait until their claims expire, "
                    "or delete it by force"
                )
        await reads.confirm()
        # The members last: positions of a later generation than theirs would be out of their reach.
        deleted = [await store.delete(key) for store, records in found for key in records]
        if topic is None:
            prefix = group_prefix(group)
            await self._groups.log.meta.delete_range(prefix, after(prefix))  # and what is left of deleted topics
        for directory in assigned.keys() & topics.keys():
            await self._groups.assignments.forget(group, directory)
        return sum(deleted)

    async def _topics(self) -> dict[str, Topic]:
        return {topic.directory: topic for topic in await self._groups.catalog.topics(self._engine)}

    async def _stores(self, topics: dict[str, Topic]) -> list[tuple[GroupStore, list[str]]]:
        """Each store that can be reached, and the topics of these whose groups it has; that of most engines in any
        case.
        """
        found: dict[GroupStore, list[str]] = {self._groups.stores.meta: []}
        missing: set[str] = set()
        for topic in topics.values():
            if topic.engine in missing:
                continue
            try:
                found.setdefault(await self._groups.stores.of(topic), []).append(topic.directory)
            except (*_GONE, TopicElsewhere):
                continue  # others of its engine may be here
            except _OUT_OF_REACH:
                missing.add(topic.engine)
        return list(found.items())

    def _at_work(
        self, records: list[GroupRecord], assigned: dict[str, Members], topics: dict[str, Topic]
    ) -> Iterator[str]:
        now_ms = self._groups.log.runtime.now_ms()
        for directory, members in assigned.items():
            if directory in topics:
                yield from (name for name, ms in members.deadlines.items() if is_held(ms, now_ms))
        for record in records:
            held = (each for each in record.claims if is_held(each.deadline_ms, now_ms))
            yield from (each.member for each in held if each.member != NOBODY)

    def _share(
        self, topic: Topic, key: GroupKey, record: GroupRecord | None, members: Members, bounds: Bounds
    ) -> GroupShare:
        assigned_to = holder(members.deadlines, key.partition)
        if record is None:
            return GroupShare(
                topic=topic.name,
                partition=key.partition,
                mode="assigned",
                offset=None,
                next_offset=bounds.next_offset,
                lag=None,
                assigned_to=assigned_to,
            )
        now_ms = self._groups.log.runtime.now_ms()
        outstanding = claims.outstanding(record, bounds.log_start_offset)
        held = tuple(each for each in record.claims if is_held(each.deadline_ms, now_ms))
        live = claims.outstanding(msgspec.structs.replace(record, claims=held), bounds.log_start_offset)
        return GroupShare(
            topic=topic.name,
            partition=key.partition,
            mode=record.mode.value,
            offset=record.committed,
            next_offset=bounds.next_offset,
            lag=outstanding + max(0, bounds.next_offset - max(record.offset, bounds.log_start_offset)),
            outstanding=outstanding,
            expired=outstanding - live,
            holders=tuple(sorted({each.member for each in record.claims if each.member != NOBODY})),
            assigned_to=assigned_to,
        )
