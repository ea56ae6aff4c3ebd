"""The committed offsets of Kafka groups, in the same records as the positions of llog's own groups.

A Kafka commit may go back, and beyond the end: it is a reset, as an operator does it. Offsets are Kafka's here, which
begin at 0, and those in the records are llog's, which begin at 1.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, NamedTuple

from msgspec.structs import replace

from llog.errors import LlogError, OutcomeUnknown, TopicNotFound
from llog.groups import claims
from llog.groups.groups import Groups
from llog.groups.listing import GroupListing
from llog.groups.records import GroupMode, GroupRecord, Members, is_held
from llog.groups.store import GroupKey, GroupStore, RecordPut, VersionedRecord
from llog.groups.waits import gather_bounded
from llog.kafka.error_codes import ErrorCode, error_code
from llog.kafka.groups.fence import Fence
from llog.log.cas import Backoff
from llog.log.keys import kafka_group_key, members_key
from llog.log.records import Topic, decode
from llog.model import FIRST_OFFSET, TopicPartition
from llog.stores.meta import ABSENT, MetaEntry, read_confirmed

METADATA_BYTES_MAX: Final = 4096
_OFFSET_MAX: Final = (1 << 63) - 1 - FIRST_OFFSET


class Commit(NamedTuple):
    offset: int
    leader_epoch: int = -1
    metadata: str = ""


class Fenced(Exception):
    """Another broker coordinates the group by now."""


class _Place(NamedTuple):
    """Where the record of a partition is."""

    store: GroupStore
    key: GroupKey

    @property
    def first(self) -> _Place:
        """The place of the group's record in the topic's first partition, whose mode counts for the topic."""
        return _Place(self.store, self.key._replace(partition=0))


Results = dict[TopicPartition, ErrorCode]


class CommittedOffsets:
    """Commits, reads and deletes the offsets of all groups. Each call takes few round trips, however many partitions it
    concerns.
    """

    def __init__(self, groups: Groups) -> None:
        self._log = groups.log
        self._groups = groups
        self.listing = GroupListing(groups)

    async def commit(self, group: str, fence: Fence, commits: dict[TopicPartition, Commit]) -> Results:
        """Store the offsets, durably; return the error of each, or none.

        Raises `Fenced` if the fence does not hold any more: then those that were not stored before never will be.
        """
        results = {tp: error for tp, each in commits.items() if (error := _check(each))}
        places = await self._places(group, [tp for tp in commits if tp not in results], results)
        backoff = Backoff(self._log.runtime, f"the offsets of the Kafka group {group!r}")
        while places:
            found = await self._judge(group, fence, places, results)
            puts: dict[GroupStore, dict[TopicPartition, RecordPut]] = {}
            for tp, stored in found.items():
                put = self._put(places[tp].key, stored, fence, commits[tp])
                if put is None:
                    results[tp] = ErrorCode.NONE
                else:
                    puts.setdefault(places[tp].store, {})[tp] = put
            lost: OutcomeUnknown | None = None
            for store, of_store in puts.items():
                try:
                    mismatches = await store.put_many([*of_store.values()])
                except OutcomeUnknown as error:
                    lost = error
                    continue
                for tp, mismatch in zip(of_store, mismatches, strict=True):
                    if mismatch is None:
                        results[tp] = ErrorCode.NONE
            places = {tp: place for tp, place in places.items() if tp not in results}
            if places:
                await backoff.wait(lost)
        return results

    async def fetch(self, group: str, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, Commit | ErrorCode]:
        """Return what the group has committed in those of the partitions in which it has; errors for those that this
        process cannot read.
        """

        async def read() -> dict[TopicPartition, Commit | ErrorCode]:
            errors: Results = {}
            places = await self._places(group, partitions, errors)
            records = await self._read([*places.values()])
            found: dict[TopicPartition, Commit | ErrorCode] = {
                tp: error for tp, error in errors.items() if error is not ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            }
            for tp, place in places.items():
                stored = records[place]
                if stored is not None:
                    found[tp] = _committed(stored.record)
            return found

        return await read_confirmed(self._log.meta, read)

    async def fetch_all(self, group: str) -> dict[TopicPartition, Commit]:
        """Return what the group has committed in all partitions that this process can read."""
        records = await read_confirmed(self._log.meta, lambda: self.listing.records(group))
        return {tp: _committed(record) for tp, record in records.items()}

    async def delete(self, group: str, fence: Fence, partitions: Sequence[TopicPartition]) -> Results:
        """Delete what the group has committed in these partitions; raise `Fenced` as `commit` does."""
        results: Results = {}
        places = await self._places(group, partitions, results)
        found = await self._judge(group, fence, places, results)
        await gather_bounded([places[tp].store.delete(places[tp].key) for tp in found])
        return results | dict.fromkeys(found, ErrorCode.NONE)

    async def _judge(
        self, group: str, fence: Fence, places: dict[TopicPartition, _Place], results: Results
    ) -> dict[TopicPartition, VersionedRecord | None]:
        """Return the stored records of those partitions that the group may change; add the errors of others to the
        results. Raises `Fenced` if another broker coordinates the group.

        Both are read at the same time. A record names the fence under which it was changed: if that is a later one, a
        successor may have changed the record just after the group's record was read, so that is read again.
        """
        directories = sorted({place.key.directory for place in places.values()})
        keys = [kafka_group_key(group), *(members_key(group, directory) for directory in directories)]

        async def read() -> tuple[MetaEntry | None, list[MetaEntry | None], dict[_Place, VersionedRecord | None]]:
            (fenced, *members), records = await asyncio.gather(
                self._log.meta.get_many(keys),
                self._read([each for place in places.values() for each in (place, place.first)]),
            )
            if any(each is not None and each.record.fence > fence.version for each in records.values()):
                fenced = await self._log.meta.get(keys[0])
            return fenced, members, records

        fenced, members, records = await read_confirmed(self._log.meta, read)
        if fenced is None or fenced.version != fence.version:
            raise Fenced
        assigned = {
            directory for directory, entry in zip(directories, members, strict=True) if self._has_members(entry)
        }
        found: dict[TopicPartition, VersionedRecord | None] = {}
        for tp, place in places.items():
            stored, first = records[place], records[place.first]
            modes = {each.record.mode for each in (stored, first) if each is not None}
            if place.key.directory in assigned or not modes <= {GroupMode.PLAIN}:
                results[tp] = ErrorCode.INCONSISTENT_GROUP_PROTOCOL
            else:
                found[tp] = stored
        return found

    def _has_members(self, entry: MetaEntry | None) -> bool:
        if entry is None:
            return False
        now_ms = self._log.runtime.now_ms()
        return any(is_held(ms, now_ms) for ms in decode(Members, entry.value, entry.key).deadlines.values())

    def _put(self, key: GroupKey, stored: VersionedRecord | None, fence: Fence, commit: Commit) -> RecordPut | None:
        """Return the put that makes the commit; None if the record says it already."""
        now_ms, offset = self._log.runtime.now_ms(), commit.offset + FIRST_OFFSET
        old = GroupRecord(offset=offset, updated_ms=now_ms) if stored is None else stored.record
        new = replace(
            claims.reset(old, offset),
            metadata=commit.metadata,
            leader_epoch=commit.leader_epoch,
            fence=fence.version,
            is_unbounded=True,
        )
        if stored is not None and new == old:
            return None
        return RecordPut(key, replace(new, updated_ms=now_ms), ABSENT if stored is None else stored.version)

    async def _places(
        self, group: str, partitions: Sequence[TopicPartition], errors: Results
    ) -> dict[TopicPartition, _Place]:
        """Return where the records of these partitions are; add the errors of others."""
        if not partitions:
            return {}
        topics = await self._groups.catalog.find(sorted({tp.topic for tp in partitions}))
        stores: dict[str, GroupStore | ErrorCode] = {}
        for name, topic in topics.items():
            stores[name] = await self._store(topic)
        places: dict[TopicPartition, _Place] = {}
        for tp in partitions:
            topic, store = topics[tp.topic], stores[tp.topic]
            if isinstance(store, ErrorCode):
                errors[tp] = store
            elif not isinstance(topic, Topic) or not 0 <= tp.partition < topic.partitions:
                errors[tp] = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            else:
                places[tp] = _Place(store, GroupKey(group, topic.directory, tp.partition))
        return places

    async def _store(self, topic: Topic | LlogError) -> GroupStore | ErrorCode:
        if isinstance(topic, LlogError):
            return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        try:
            return await self._groups.stores.of(topic)
        except TopicNotFound:
            return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        except LlogError as error:
            return error_code(error)

    async def _read(self, places: Sequence[_Place]) -> dict[_Place, VersionedRecord | None]:
        by_store: dict[GroupStore, dict[GroupKey, None]] = {}
        for place in places:
            by_store.setdefault(place.store, {})[place.key] = None
        found: dict[_Place, VersionedRecord | None] = {}
        for store, keys in by_store.items():
            records = await store.get_many([*keys])
            found |= {_Place(store, key): record for key, record in zip(keys, records, strict=True)}
        return found


def _committed(record: GroupRecord) -> Commit:
    return Commit(record.committed - FIRST_OFFSET, record.leader_epoch, record.metadata)


def _check(commit: Commit) -> ErrorCode:
    if not 0 <= commit.offset <= _OFFSET_MAX:
        return ErrorCode.OFFSET_OUT_OF_RANGE
    if len(commit.metadata.encode()) > METADATA_BYTES_MAX:
        return ErrorCode.OFFSET_METADATA_TOO_LARGE
    return ErrorCode.NONE
