"""Listing, describing and deleting consumer groups over topics of every engine.

The listing leaves out deleted topics, and topics that this process cannot read because they are on another machine or
another process owns them; `unreachable` reports why.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

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
from llog.groups.assignment import partition_holder
from llog.groups.groups import Groups
from llog.groups.records import NOBODY, GroupRecord, Members, check_group_name, is_held
from llog.groups.store import GroupKey, GroupStore
from llog.log.engine import Bounds
from llog.log.keys import group_prefix
from llog.log.records import Topic
from llog.model import TopicPartition
from llog.stores.meta import prefix_end

_GONE: Final = (TopicNotFound, PartitionNotInitialized)
_OUT_OF_REACH: Final = (ConfigurationError, LogOwned, MissingExtra, TopicElsewhere, WrongEngine)


class GroupLag(msgspec.Struct, frozen=True, kw_only=True):
    """`lag` counts the records that the group has yet to acknowledge, without those that retention removed."""

    topic: str
    partition: int
    offset: int
    next_offset: int
    lag: int


class GroupProgress(msgspec.Struct, frozen=True, kw_only=True):
    """A group's progress in one partition. Without an offset and lag, it has a member there and no position yet."""

    topic: str
    partition: int
    mode: str
    offset: int | None
    next_offset: int
    lag: int | None
    outstanding: int = 0
    """How many records were delivered and not acknowledged; `expired` of them may be delivered again."""
    expired: int = 0
    holders: tuple[str, ...] = ()
    """The members that hold claims."""
    assigned_to: str | None = None

    @property
    def members(self) -> list[str]:
        """The members that hold claims, and the member that has the partition, in order."""
        return sorted({*self.holders, *([] if self.assigned_to is None else [self.assigned_to])})


class GroupListing:
    """The groups on topics of all engines, or of one."""

    def __init__(self, groups: Groups, engine: str | None = None) -> None:
        self._groups = groups
        self._engine = engine

    async def names(self) -> list[str]:
        """Return the names of all groups, in order."""
        names: set[str] = set()
        for store, topics in await self._stores(await self._topics()):
            names.update(await store.names(topics))
        return sorted(names)

    async def unreachable(self) -> LlogError | None:
        """Return the reason why this process cannot see the groups on some topics; None if it can see all."""
        for topic in (await self._topics()).values():
            try:
                await self._groups.stores.of(topic)
            except _OUT_OF_REACH as error:
                return error
            except _GONE:
                continue
        return None

    async def check_exists(self, group: str) -> None:
        """Raise `InvalidArgument` if the group does not exist, or the reason if it may exist out of reach."""
        if group not in await self.names():
            missing = await self.unreachable()
            raise missing or InvalidArgument(f"there is no group {group!r}: `llog groups list` shows all groups")

    async def records(self, group: str) -> dict[TopicPartition, GroupRecord]:
        """Return the group's record in every partition in which it has a position."""
        topics = await self._topics()
        found: dict[TopicPartition, GroupRecord] = {}
        for store, mine in await self._stores(topics):
            for key, record in (await store.records(check_group_name(group), mine)).items():
                found[TopicPartition(topics[key.directory].name, key.partition)] = record
        return found

    async def lag(self, group: str) -> list[GroupLag]:
        """Return the group's lag in every partition in which it has a position, by directory and partition."""
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

    async def describe(self, group: str) -> list[GroupProgress]:
        """Return the group's progress in every partition in which it has a position or a member, by directory and
        partition.
        """
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
                continue  # deleted just now, or out of reach
            shares.append(self._progress(topic, key, found[key], assigned.get(key.directory, Members()), bounds))
        return shares

    async def delete_completely(self, group: str, topic: str | None = None, *, force: bool = False) -> int:
        """As `delete`, of a group that exists. Raises the reason if a part of it is out of reach, since half a group
        must not be left behind.
        """
        await self.check_exists(group)
        if topic is None:
            missing = await self.unreachable()
            if missing is not None:
                raise missing
        return await self.delete(group, topic, force=force)

    async def delete(self, group: str, topic: str | None = None, *, force: bool = False) -> int:
        """Delete the group, on one topic or everywhere; return in how many partitions it had a position.

        Raises `GroupConflict` while a member is alive or a claim has not expired, unless forced: such a member would
        continue as a new group.
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
            for name in self._active_members(
                [record for _, records in found for record in records.values()], assigned, topics
            ):
                raise GroupConflict(
                    f"group {group!r} is in use by {name!r}: stop its members and wait until their claims expire, "
                    "or delete it by force"
                )
        await reads.confirm()
        # The members go last: new members must not begin below the generation of positions that are left.
        deleted = [await store.delete(key) for store, records in found for key in records]
        if topic is None:
            prefix = group_prefix(group)
            await self._groups.log.meta.delete_range(prefix, prefix_end(prefix))  # and those of deleted topics
        for directory in assigned.keys() & topics.keys():
            await self._groups.assignments.forget(group, directory)
        return sum(deleted)

    async def _topics(self) -> dict[str, Topic]:
        return {topic.directory: topic for topic in await self._groups.catalog.topics(self._engine)}

    async def _stores(self, topics: dict[str, Topic]) -> list[tuple[GroupStore, list[str]]]:
        """Return each store within reach with the directories of those topics whose groups it has; always with the
        metadata store.
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

    def _active_members(
        self, records: list[GroupRecord], assigned: dict[str, Members], topics: dict[str, Topic]
    ) -> Iterator[str]:
        now_ms = self._groups.log.runtime.now_ms()
        for directory, members in assigned.items():
            if directory in topics:
                yield from (name for name, ms in members.deadlines.items() if is_held(ms, now_ms))
        for record in records:
            held = (each for each in record.claims if is_held(each.deadline_ms, now_ms))
            yield from (each.member for each in held if each.member != NOBODY)

    def _progress(
        self, topic: Topic, key: GroupKey, record: GroupRecord | None, members: Members, bounds: Bounds
    ) -> GroupProgress:
        assigned_to = partition_holder(members.deadlines, key.partition)
        if record is None:
            return GroupProgress(
                topic=topic.name,
                partition=key.partition,
                mode="assigned",
                offset=None,
                next_offset=bounds.next_offset,
                lag=None,
                assigned_to=assigned_to,
            )
        now_ms = self._groups.log.runtime.now_ms()
        outstanding = claims.count_outstanding(record, bounds.log_start_offset)
        held = tuple(each for each in record.claims if is_held(each.deadline_ms, now_ms))
        live = claims.count_outstanding(msgspec.structs.replace(record, claims=held), bounds.log_start_offset)
        return GroupProgress(
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
