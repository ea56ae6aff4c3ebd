"""Where the records of groups are stored: with the order of the topic, each under its own key, so that groups do not
contend.

Groups on `rocksdb` topics have their records in RocksDB, little-endian: u64 the last offset up to which everything is
acknowledged; u64 version; then the record as JSON. All other records are in the metadata store.
"""

from __future__ import annotations

import asyncio
import struct
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from msgspec.structs import replace

from llog.base.durable import boot_id
from llog.engines.rocksdb.engine import rocksdb_of
from llog.engines.rocksdb.keys import OFFSETS, group_key, group_prefix
from llog.engines.rocksdb.keys import after as rocks_after
from llog.errors import InconsistentReadState, VersionMismatch
from llog.groups.records import GroupMode, GroupRecord
from llog.log.engine import engine_of
from llog.log.keys import GROUPS, MEMBERS
from llog.log.keys import group_key as meta_group_key
from llog.log.keys import group_prefix as meta_group_prefix
from llog.log.log import Log
from llog.log.records import Topic, decode, encode
from llog.model import TopicPartition
from llog.runtime import Runtime
from llog.stores.meta import ABSENT, MetaEntry, MetaStore, Put, scan, scan_names, version_mismatch

if TYPE_CHECKING:
    from llog.engines.rocksdb.store import RocksStore

_HEAD: Final = struct.Struct("<QQ")
_FIRST_VERSION_BITS: Final = 62
_AHEAD: Final = 65_536
"""How many records may be claimed between two syncs."""


class GroupKey(NamedTuple):
    """Names a group's record. `directory` is the topic's: a topic that is created again has groups of its own."""

    group: str
    directory: str
    partition: int


class VersionedRecord(NamedTuple):
    record: GroupRecord
    version: int


class RecordPut(NamedTuple):
    """One put of a `put_many`."""

    key: GroupKey
    record: GroupRecord
    expected: int


class GroupStore(Protocol):
    async def get(self, key: GroupKey) -> VersionedRecord | None: ...

    async def get_many(self, keys: Sequence[GroupKey]) -> list[VersionedRecord | None]:
        """Return what `get` returns for each key, in few round trips."""
        ...

    async def put(self, key: GroupKey, record: GroupRecord, *, expected: int, durable: bool) -> None:
        """Replace the record; raise `VersionMismatch`, and change nothing, unless its version is `expected` (ABSENT if
        none may exist). Without `durable`, a power cut may undo the change.
        """
        ...

    async def put_many(self, puts: Sequence[RecordPut]) -> list[VersionMismatch | None]:
        """Put each record as a durable `put` does, in few round trips; return the mismatch of each that was not put.

        After `OutcomeUnknown`, any of them may have been put.
        """
        ...

    async def delete(self, key: GroupKey) -> bool:
        """Delete the record; return whether it existed."""
        ...

    async def records(self, group: str, directories: Iterable[str]) -> dict[GroupKey, GroupRecord]:
        """Return the group's records in these topics, ordered by topic and partition."""
        ...

    async def names(self, directories: Iterable[str]) -> list[str]:
        """Return the groups that have records in these topics; a store that keeps all topics together names every
        group.
        """
        ...


class MetaGroupStore:
    """Group records in the metadata store, where every change is durable."""

    def __init__(self, meta: MetaStore) -> None:
        self._meta = meta

    async def get(self, key: GroupKey) -> VersionedRecord | None:
        return _decode_entry(await self._meta.get(meta_group_key(*key)))

    async def get_many(self, keys: Sequence[GroupKey]) -> list[VersionedRecord | None]:
        return [_decode_entry(each) for each in await self._meta.get_many([meta_group_key(*key) for key in keys])]

    async def put(self, key: GroupKey, record: GroupRecord, *, expected: int, durable: bool) -> None:
        await self._meta.put(meta_group_key(*key), encode(record), expected=expected)

    async def put_many(self, puts: Sequence[RecordPut]) -> list[VersionMismatch | None]:
        wanted = [Put(meta_group_key(*put.key), encode(put.record), put.expected) for put in puts]
        results = await self._meta.put_many(wanted)
        return [each if isinstance(each, VersionMismatch) else None for each in results]

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


class RocksGroupStore:
    """Group records in the RocksDB that this process owns, so that a lock suffices for compare-and-swap.

    Claims are not synced one by one. A record says durably how far they may go before the next sync: after a power cut,
    any offset below that may have been delivered, although no claim says so.

    Reads and writes without a sync take microseconds and run on the event loop, since records in use are in memory. A
    thread waits for the disk, or for the store's lock.
    """

    def __init__(self, store: RocksStore, runtime: Runtime) -> None:
        self.store = store
        self._runtime = runtime
        self._boot = boot_id() or str(uuid.uuid4())
        """Where the system does not report its boot, each opening counts as one: once too often does no harm."""

    async def get(self, key: GroupKey) -> VersionedRecord | None:
        return self._get(key)

    async def get_many(self, keys: Sequence[GroupKey]) -> list[VersionedRecord | None]:
        return [self._get(key) for key in keys]

    async def put(self, key: GroupKey, record: GroupRecord, *, expected: int, durable: bool) -> None:
        if record.mode is GroupMode.CLAIMED and (record.claims or record.ahead):
            durable = durable or record.offset > record.ahead
            if durable:
                record = replace(record, ahead=record.offset + _AHEAD, boot=self._boot)
        value = self._encode(record, expected)
        if durable or not self.store.mutex.acquire(blocking=False):
            await asyncio.to_thread(self._put, key, value, expected, durable)
            return
        try:
            self._put(key, value, expected, durable)
        finally:
            self.store.mutex.release()

    async def put_many(self, puts: Sequence[RecordPut]) -> list[VersionMismatch | None]:
        return await asyncio.to_thread(self._put_many, puts)

    async def delete(self, key: GroupKey) -> bool:
        return await asyncio.to_thread(self._delete, key)

    async def records(self, group: str, directories: Iterable[str]) -> dict[GroupKey, GroupRecord]:
        return await asyncio.to_thread(self._records, group, sorted(directories))

    async def names(self, directories: Iterable[str]) -> list[str]:
        return await asyncio.to_thread(self._names, sorted(directories))

    def _get(self, key: GroupKey) -> VersionedRecord | None:
        name = _rocks_key(key)
        value = self.store.get(OFFSETS, name)
        if value is None:
            return None
        record, version = _decode(value, name)
        if record.boot != self._boot and record.ahead:
            record = replace(record, ahead=0, doubtful=max(record.doubtful, record.ahead))
        return VersionedRecord(record, version)

    def _encode(self, record: GroupRecord, expected: int) -> bytes:
        # A deletion leaves no trace, and no version may be used twice: so the first one is random.
        version = self._runtime.random().getrandbits(_FIRST_VERSION_BITS) if expected == ABSENT else expected + 1
        return _HEAD.pack(record.committed - 1, version) + encode(record)

    def _mismatch(self, name: bytes, expected: int) -> VersionMismatch | None:
        found = self.store.get(OFFSETS, name)
        version = ABSENT if found is None else _decode(found, name).version
        return None if version == expected else version_mismatch(name.decode(), expected, version)

    def _put_many(self, puts: Sequence[RecordPut]) -> list[VersionMismatch | None]:
        with self.store.mutex:
            changes = self.store.changes()
            mismatches = [self._mismatch(_rocks_key(put.key), put.expected) for put in puts]
            for put, mismatch in zip(puts, mismatches, strict=True):
                if mismatch is None:
                    changes.put(OFFSETS, _rocks_key(put.key), self._encode(put.record, put.expected))
            self.store.write(changes, sync=True)
        return mismatches

    def _put(self, key: GroupKey, value: bytes, expected: int, durable: bool) -> None:
        name = _rocks_key(key)
        with self.store.mutex:
            mismatch = self._mismatch(name, expected)
            if mismatch is not None:
                raise mismatch
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
                int(name[len(prefix) :]): _decode(value, name).record
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


def _decode_entry(entry: MetaEntry | None) -> VersionedRecord | None:
    return None if entry is None else VersionedRecord(decode(GroupRecord, entry.value, entry.key), entry.version)


def _rocks_key(key: GroupKey) -> bytes:
    return group_key(key.directory, key.group, key.partition)


def _decode(value: bytes, name: bytes) -> VersionedRecord:
    if len(value) < _HEAD.size:
        raise InconsistentReadState(
            f"the RocksDB key {name.decode()} has {len(value)} bytes, too few for a group's record"
        )
    _, version = _HEAD.unpack_from(value)
    return VersionedRecord(decode(GroupRecord, value[_HEAD.size :], name.decode()), version)


class GroupStores:
    """Finds the store of a topic's groups by its engine; `overrides` replace it."""

    def __init__(self, log: Log, overrides: Mapping[str, GroupStore] | None = None) -> None:
        self._overrides = overrides or {}
        self._runtime = log.runtime
        self._log = log
        self._rocks_topics = rocksdb_of(log).topics(log)
        self.meta: GroupStore = MetaGroupStore(log.meta)
        self._rocks: RocksGroupStore | None = None

    async def of(self, topic: Topic) -> GroupStore:
        """Return the store; for a `rocksdb` topic, raise `LogOwned` with the owner if another process has it open, and
        `TopicElsewhere` if it is not in this RocksDB.
        """
        if topic.engine in self._overrides:
            return self._overrides[topic.engine]
        if not engine_of(self._log, topic).keeps_groups:
            return self.meta
        tp = TopicPartition(topic.name, 0)
        kept = self._rocks_topics.find_cached(tp) or await self._rocks_topics.find(tp)
        if self._rocks is None:
            self._rocks = RocksGroupStore(kept.logs.store, self._runtime)
        return self._rocks
