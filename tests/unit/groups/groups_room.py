"""Consumer groups on a topic of four partitions, with their records in the metadata store or in RocksDB."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Sequence

from llog.errors import LlogError, OutcomeUnknown, VersionMismatch
from llog.groups.group_partition import GroupPartition
from llog.groups.groups import Groups
from llog.groups.listing import GroupListing
from llog.groups.records import GroupRecord
from llog.groups.store import GroupKey, GroupStore, RecordPut, VersionedRecord
from llog.log.log import Log
from llog.model import TopicPartition
from tests.unit.world import TP, World

OTHER = TopicPartition(TP.topic, 1)
KEY = GroupKey("g", TP.topic, 0)
VISIBILITY_MS = 60_000
UNKNOWN = OutcomeUnknown("the answer was lost")


class Disturbed:
    """A store whose next puts fail, each before or after it is done; others run around every call."""

    def __init__(self, inner: GroupStore, *failures: tuple[LlogError, bool], seed: int | None = None) -> None:
        self.inner, self.failures = inner, list(failures)
        self.puts = 0
        self.durable: list[bool] = []
        self._random = None if seed is None else random.Random(seed)

    async def get(self, key: GroupKey) -> VersionedRecord | None:
        await self._others()
        return await self.inner.get(key)

    async def put(self, key: GroupKey, record: GroupRecord, *, expected: int, durable: bool) -> None:
        await self._others()
        self.puts += 1
        self.durable.append(durable)
        failure = self.failures.pop(0) if self.failures else None
        if failure is not None and not failure[1]:
            raise failure[0]
        await self.inner.put(key, record, expected=expected, durable=durable)
        await self._others()
        if failure is not None:
            raise failure[0]
        if self._random is not None and self._random.random() < 0.1:
            raise UNKNOWN

    async def get_many(self, keys: Sequence[GroupKey]) -> list[VersionedRecord | None]:
        return [await self.get(key) for key in keys]

    async def put_many(self, puts: Sequence[RecordPut]) -> list[VersionMismatch | None]:
        return await self.inner.put_many(puts)

    async def delete(self, key: GroupKey) -> bool:
        return await self.inner.delete(key)

    async def records(self, group: str, directories: Iterable[str]) -> dict[GroupKey, GroupRecord]:
        return await self.inner.records(group, directories)

    async def names(self, directories: Iterable[str]) -> list[str]:
        return await self.inner.names(directories)

    async def _others(self) -> None:
        for _ in range(0 if self._random is None else self._random.randrange(4)):
            await asyncio.sleep(0)


class Room:
    """The topic `orders` with four partitions, and where its groups are kept."""

    def __init__(self, world: World, store: GroupStore) -> None:
        self.world, self.store = world, store
        self.groups = self.over(store)
        self.listing = GroupListing(self.groups)

    def over(self, store: GroupStore, log: Log | None = None) -> Groups:
        return Groups(log or self.world.log, self.world.reader, {"object": store})

    async def group(
        self, name: str = "g", tp: TopicPartition = TP, *, store: GroupStore | None = None
    ) -> GroupPartition:
        """A group in one partition, as kept in `store`, if that is given."""
        return await (self.groups if store is None else self.over(store)).partition(name, tp)

    async def disturbed(self, *failures: tuple[LlogError, bool]) -> tuple[GroupPartition, Disturbed]:
        store = Disturbed(self.store, *failures)
        return await self.group(store=store), store

    async def fill(self, count: int, tp: TopicPartition = TP) -> None:
        await self.world.append(*map(str, range(count)), tp=tp)

    async def claim(self, member: str, limit: int, group: GroupPartition | None = None) -> list[tuple[int, int, int]]:
        """Start, end and attempt of what was claimed."""
        given = await (group or await self.group()).claim(member, limit=limit, visibility_ms=VISIBILITY_MS)
        assert given is not None
        assert {each.member for each in given} <= {member}
        return [(each.start, each.end, each.attempt) for each in given]
