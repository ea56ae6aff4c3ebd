"""The consumer groups of a log, on topics of every engine: their partitions, and the members of assigned groups."""

from __future__ import annotations

from collections.abc import Mapping

from llog.engines.routing import EngineReader
from llog.groups.assignment import Assignments, Membership
from llog.groups.group_partition import GroupPartition
from llog.groups.offsets import resolve_start
from llog.groups.options import Start
from llog.groups.records import GroupMode, check_group_name, check_member_name
from llog.groups.store import GroupKey, GroupStore, GroupStores
from llog.log.catalog import Catalog, check_partition
from llog.log.engine import LogReader
from llog.log.log import Log
from llog.log.records import Topic
from llog.model import TopicPartition


class Groups:
    """Finds groups by name. `reader` reads bounds; `stores` override where records are kept, by engine."""

    def __init__(
        self, log: Log, reader: LogReader | None = None, stores: Mapping[str, GroupStore] | None = None
    ) -> None:
        self.log = log
        self.reader = reader or EngineReader(log)
        self.catalog = Catalog(log)
        self.stores = GroupStores(log, stores)
        self.assignments = Assignments(log)

    async def partition(self, group: str, tp: TopicPartition, *, topic: Topic | None = None) -> GroupPartition:
        """Return the group in this partition, whether or not it has a position there.

        `topic` spares a read to a caller that has the catalog entry. A topic that is created again has groups of its
        own: ask again then.
        """
        check_group_name(group)
        topic = topic or await self.catalog.get(tp.topic)
        check_partition(topic, tp.partition)
        return self._partition(topic, await self.stores.of(topic), GroupKey(group, topic.directory, tp.partition))

    async def begin(self, group: str, topic: Topic, start: Start, mode: GroupMode) -> None:
        """Store the group's first position in every partition where it has none, so that nothing is skipped from now
        on.

        Partition 0 comes last: a group that has a position there has begun, and a partition without one was added
        later, of which the group gets every record.
        """
        first = await self.partition(group, TopicPartition(topic.name, 0), topic=topic)
        if await first.record() is not None:
            start = Start("earliest")
        positions = await resolve_start(self.reader, topic.name, start, range(topic.partitions))
        for number, offset in sorted(positions.items(), reverse=True):
            partition = await self.partition(group, TopicPartition(topic.name, number), topic=topic)
            await partition.begin(offset, mode=mode)

    async def mode(self, group: str, topic: str) -> GroupMode:
        """Return how the group shares the topic out; plain if it does not, or not yet."""
        return await (await self.partition(group, TopicPartition(topic, 0))).topic_mode()

    async def join(self, group: str, topic: str, member: str, *, session_ms: int) -> Membership:
        """Become a member of an assigned group, or stay one, for `session_ms`; return the member's partitions, which
        every call may change.
        """
        entry = await self.catalog.get(topic)
        check_member_name(member)
        served = 0
        if member not in (await self.assignments.members(check_group_name(group), entry)).deadlines:
            store = await self.stores.of(entry)
            for key, record in (await store.records(group, [entry.directory])).items():
                self._partition(entry, store, key).check_mode(record, GroupMode.ASSIGNED)
                served = max(served, record.generation)
        return await self.assignments.join(group, entry, member, session_ms, served=served)

    async def heartbeat(self, group: str, topic: str, member: str, *, session_ms: int) -> Membership:
        """As `join`, but raise `StaleMember` for a member that was dropped."""
        entry = await self.catalog.get(topic)
        return await self.assignments.heartbeat(check_group_name(group), entry, member, session_ms)

    async def leave(self, group: str, topic: str, member: str) -> None:
        """Give the member's partitions to the others at once; what it did not acknowledge is delivered again."""
        await self.assignments.leave(check_group_name(group), await self.catalog.get(topic), member)

    def _partition(self, topic: Topic, store: GroupStore, key: GroupKey) -> GroupPartition:
        return GroupPartition(self.log, self.reader, self.assignments, topic, store, key)
