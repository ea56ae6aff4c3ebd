"""Where the records of groups are kept: with the topic's order. Each has a key of its own, so that no group pays for
another.

Topics of engine `rocksdb` have theirs in RocksDB, little-endian: u64 the last offset below which all is acknowledged,
itself included; u64 version; then the record as JSON. All others have them in the metadata store.
"""

from __future__ import annotations

import asyncio
import struct
import uuid
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from msgspec.structs import replace

from llog.base.durable import boot_id
from llog.engines.rocksdb.engine import rocksdb_of
from llog.engines.rocksdb.keys import OFFSETS, group_key, group_prefix
from llog.engines.rocksdb.keys import after as rocks_after
from llog.errors import InconsistentReadState
from llog.groups.records import GroupMode, GroupRecord
from llog.log.engine import engine_of
from llog.log.keys import GROUPS, MEMBERS
from llog.log.keys import group_key as meta_group_key
from llog.log.keys import group_prefix as meta_group_prefix
from llog.log.log import Log
from llog.log.records import Topic, decode, encode
from llog.model import TopicPartition
from llog.runtime import Runtime
from llog.stores.meta import ABSENT, MetaStore, mismatch, scan, scan_names

if TYPE_CHECKING:
    from llog.engines.rocksdb.store import RocksStore

_HEAD: Final = struct.Struct("<QQ")
_FIRST_VERSION_BITS: Final = 62
_AHEAD: Final = 65_536
"""So many records may be claimed between two syncs."""


class GroupKey(NamedTuple):
    """`directory` is the topic's: a topic that is created again has groups of its own."""

    group: str
    directory: str
    partition: int


class Stored(NamedTuple):
    record: GroupRecord
    version: int


class GroupStore(Protocol):
    async def get(self, key: GroupKey) -> Stored | None: ...

    async def put(self, key: GroupKey, record: GroupRecord, *, expected: int, durable: bool) -> None:
        """`VersionMismatch`, and no change, unless the version is `expected`, or ABSENT. Without `durable`, a power cut
        may undo it.
        """
        ...

    async def delete(self, key: GroupKey) -> bool:
        """Whether there was one."""
        ...

    async def records(self, group: str, directories: Iterable[str]) -> dict[GroupKey, GroupRecord]:
        """What the group has in these topics, in the order of topics and partitions."""
        ...

    async def names(self, directories: Iterable[str]) -> list[str]:
        """The groups that have something in these topics; a store that holds all topics together names every group."""
        ...


class MetaGroups:
    """In the metadata store; every change is durable."""

    def __init__(self, meta: MetaStore) -> None:
        self._meta = meta

    async def get(self, key: GroupKey) -> Stored | None:
        found = await self._meta.get(meta_group_key(*key))
        return None if found is None else Stored(decode(GroupRecord, found.value, found.key), found.version)

    async def put(self, key: GroupKey, record: GroupRecord, *, expected: int, durable: bool) -> None:
        await self._meta.put(meta_group_key(*key), encode(record), expected=expected)

    async def delete(self, key: GroupKey) -> bool:
        return await self._meta.delete(meta_group_key(*key))

    async def records(self, group: str, directories: Iterable[str]) -> dict[GroupKey, GroupRecord]:
        wanted, prefix = frozenset(directories), meta_group_prefix(group)
        found = {}
        async for entry in scan(self._meta, prefix):
            directory, _, last = entry.key.removeprefix(prefix).partition("/")
            if last != MEMBERS and directory in wanted:
                found[GroupKey(group, directory, int(last))] = decode(GroupRecord, entry.value, entry.key)
        return found

    async def names(self, directories: Iterable[str]) -> list[str]:
        return [name async for name in scan_names(self._meta, GROUPS)]


class RocksGroups:
    """In the RocksDB that this process owns: compare-and-swap is a lock.

    Claims are not synced one by one. A record says durably how far they may go before the next sync: after a power cut,
    what lies below that may be somebody's, though no claim says so.

    What takes microseconds is done at once: a record is in memory while it is used, and so is what is written without a
    sync. A thread waits for the disk, or for others who write.
    """

    def __init__(self, store: RocksStore, runtime: Runtime) -> None:
        self.store = store
        self._runtime = runtime
        self._boot = boot_id() or str(uuid.uuid4())
        """If nobody tells, each opening counts as a boot: rather once too often than not."""

    async def get(self, key: GroupKey) -> Stored | None:
        return self._get(key)

    async def put(self, key: GroupKey, record: GroupRecord, *, expected: int, durable: bool) -> None:
        # A version must not come again after a deletion, which leaves no trace: it starts anywhere.
        version = self._runtime.random().getrandbits(_FIRST_VERSION_BITS) if expected == ABSENT else expected + 1
        if record.mode is GroupMode.CLAIMED and (record.claims or record.ahead):
            durable = durable or record.offset > record.ahead
            if durable:
                record = replace(record, ahead=record.offset + _AHEAD, boot=self._boot)
        value = _HEAD.pack(record.committed - 1, version) + encode(record)
        if durable or not self.store.mutex.acquire(blocking=False):
            await asyncio.to_thread(self._put, key, value, expected, durable)
            return
        try:
            self._put(key, value, expected, durable)
        finally:
            self.store.mutex.release()

    async def delete(self, key: GroupKey) -> bool:
        return await asyncio.to_thread(self._delete, key)

    async def records(self, group: str, directories: Iterable[str]) -> dict[GroupKey, GroupRecord]:
        return await asyncio.to_thread(self._records, group, sorted(directories))

    async def names(self, directories: Iterable[str]) -> list[str]:
        return await asyncio.to_thread(self._names, sorted(directories))

    def _get(self, key: GroupKey) -> Stored | None:
        name = _rocks_key(key)
        value = self.store.get(OFFSETS, name)
        if value is None:
            return None
        record, version = _decoded(value, name)
        if record.boot != self._boot and record.ahead:
            record = replace(record, ahead=0, doubtful=max(record.doubtful, record.ahead))
        return Stored(record, version)

    def _put(self, key: GroupKey, value: bytes, expected: int, durable: bool) -> None:
        name = _rocks_key(key)
        with self.store.mutex:
            found = self.store.get(OFFSETS, name)
            version = ABSENT if found is None else _decoded(found, name).version
            if version != expected:
                raise mismatch(name.decode(), expected, version)
            changes = self.store.changes()
            changes.put(OFFSETS, name, value)
            self.store.write(changes, sync=durable)

    def _delete(self, key: GroupKey) -> bool:
        name = _rocks_key(key)
        with self.store.mutex:
            found = self.store.get(OFFSETS, name) is not None
            changes = self.store.changes()
            changes.delete(OFFSETS, name)
            self.store.write(changes, sync=True)
            return found

    def _records(self, group: str, directories: Iterable[str]) -> dict[GroupKey, GroupRecord]:
        found: dict[GroupKey, GroupRecord] = {}
        for directory in directories:
            prefix = group_prefix(directory, group)
            of_topic = {
                int(name[len(prefix) :]): _decoded(value, name).record
                for name, value in self.store.below(OFFSETS, prefix)
            }
            found |= {GroupKey(group, directory, partition): of_topic[partition] for partition in sorted(of_topic)}
        return found

    def _names(self, directories: Iterable[str]) -> list[str]:
        names: set[str] = set()
        for directory in directories:
            prefix = group_prefix(directory)
            start, end = prefix, rocks_after(prefix)
            while found := self.store.items(OFFSETS, start, end, 1):
                name = found[0][0][len(prefix) :].split(b"/", 1)[0].decode()
                names.add(name)
                start = rocks_after(group_prefix(directory, name))
        return sorted(names)


def _rocks_key(key: GroupKey) -> bytes:
    return group_key(key.directory, key.group, key.partition)


def _decoded(value: bytes, name: bytes) -> Stored:
    if len(value) < _HEAD.size:
        raise InconsistentReadState(
            f"the RocksDB key {name.decode()} has {len(value)} bytes, too few for a group's record"
        )
    _, version = _HEAD.unpack_from(value)
    return Stored(decode(GroupRecord, value[_HEAD.size :], name.decode()), version)


class GroupStores:
    """The store of a topic's groups, by its engine."""

    def __init__(self, log: Log, given: Mapping[str, GroupStore] | None = None) -> None:
        self._given = given or {}
        self._runtime = log.runtime
        self._log = log
        self._rocks_topics = rocksdb_of(log).topics(log)
        self.meta: GroupStore = MetaGroups(log.meta)
        self._rocks: RocksGroups | None = None

    async def of(self, topic: Topic) -> GroupStore:
        """For a topic of engine `rocksdb`, `LogOwned` if another process has it, naming that, and `TopicElsewhere` if
        it is not here.
        """
        if topic.engine in self._given:
            return self._given[topic.engine]
        if not engine_of(self._log, topic).keeps_groups:
            return self.meta
        tp = TopicPartition(topic.name, 0)
        kept = self._rocks_topics.known(tp) or await self._rocks_topics.find(tp)
        if self._rocks is None:
            self._rocks = RocksGroups(kept.logs.store, self._runtime)
        return self._rocks
