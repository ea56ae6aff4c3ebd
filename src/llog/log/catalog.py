"""The topic catalog: the topics of a log, their options and the directories of their keys.

To create a topic, the engine creates the partitions and the catalog entry is put last, so a topic that the catalog
names is complete. To delete a topic, a tombstone is put first and the engine then removes the partitions; the next
collector finishes a deletion that was interrupted.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from llog.errors import (
    InvalidArgument,
    LlogError,
    LogOwned,
    MissingExtra,
    OwnerUnavailable,
    PartitionNotInitialized,
    TopicExists,
    TopicNotFound,
    VersionMismatch,
    WrongStore,
)
from llog.log.cas import Backoff
from llog.log.engine import Engine, engine_of
from llog.log.keys import GROUPS, TOPICS, directory_name, group_prefix, topic_key
from llog.log.log import Log
from llog.log.records import (
    DELETE_RETENTION_MS,
    Cleanup,
    Topic,
    decode,
    encode,
)
from llog.model import PARTITIONS_MAX, TimestampType, TopicPartition, check_topic_name
from llog.stores.meta import ABSENT, MetaEntry, prefix_end, read_confirmed, scan, scan_names

OBJECT = "object"
DISK = "disk"
ROCKSDB = "rocksdb"


class Catalog:
    def __init__(self, log: Log) -> None:
        self._log = log

    async def create(
        self,
        name: str,
        partitions: int = 1,
        *,
        engine: str = OBJECT,
        retention_ms: int | None = None,
        retention_bytes: int | None = None,
        timestamp_type: TimestampType = TimestampType.CREATE,
        cleanup: Cleanup = Cleanup.DELETE,
        delete_retention_ms: int = DELETE_RETENTION_MS,
    ) -> Topic:
        """Create the topic with all its partitions; raise `TopicExists` if the name is in use."""
        check_topic_name(name)
        check_partitions(partitions)
        _check_retention(retention_ms, retention_bytes)
        _check_cleanup(self._log, engine, cleanup, delete_retention_ms)
        incarnation, expected = await self._next_incarnation(name)
        topic = Topic(
            name=name,
            partitions=partitions,
            incarnation=incarnation,
            directory=directory_name(name, incarnation),
            engine=engine,
            retention_ms=retention_ms,
            retention_bytes=retention_bytes,
            timestamp_type=timestamp_type,
            cleanup=cleanup,
            delete_retention_ms=delete_retention_ms,
            created_ms=self._log.runtime.now_ms(),
        )
        try:
            topic = await self.engine(topic).create(self._log, topic)
        except WrongStore:
            await self._next_incarnation(name)  # raises `TopicExists` if another process has just created the topic
            raise
        try:
            await self._log.meta.put(topic_key(name), encode(topic), expected=expected)
        except VersionMismatch:
            raise TopicExists(f"topic {name!r} was created by another process at the same time") from None
        return topic

    async def get_or_create(self, name: str, partitions: int = 1, *, engine: str = OBJECT) -> Topic:
        """Return the topic; create it as given if it does not exist. Any number of processes may do so at once.

        A topic that exists is returned as it is, whatever its partitions and its engine are.
        """
        try:
            return await self.get(name)
        except TopicNotFound:
            pass
        try:
            return await self.create(name, partitions, engine=engine)
        except TopicExists:
            return await self.get(name)

    async def get_or_create_partition(self, tp: TopicPartition) -> Topic:
        """Return the partition's topic; create the topic, or add partitions to it, as far as the partition needs it.

        Any number of processes may do so at once.
        """
        if tp.partition < 0:
            raise InvalidArgument(f"partition {tp.partition} of {tp.topic!r} cannot be: partitions are counted from 0")
        topic = await self.get_or_create(tp.topic, tp.partition + 1)
        if tp.partition < topic.partitions:
            return topic
        try:
            return await self.add_partitions(tp.topic, tp.partition + 1)
        except InvalidArgument:
            topic = await self.get(tp.topic)
            if tp.partition >= topic.partitions:
                raise
            return topic  # another process has added more partitions

    async def _next_incarnation(self, name: str) -> tuple[int, int]:
        """Return the incarnation of a new topic of this name, and the version of the catalog entry that it replaces."""
        backoff = self._backoff(name)
        while True:
            found = await self._log.meta.get(topic_key(name))
            if found is None:
                return 1, ABSENT
            old = decode(Topic, found.value, found.key)
            if not old.deleted:
                raise TopicExists(f"topic {name!r} already exists with {old.partitions} partitions")
            if old.swept:
                return old.incarnation + 1, found.version
            await self._sweep(old)
            await backoff.wait()

    def engine(self, topic: Topic) -> Engine:
        """Return the engine that stores the topic; raise `WrongEngine` if this version of llog does not have it."""
        return engine_of(self._log, topic)

    async def get(self, name: str) -> Topic:
        return topic_in(name, await self._log.meta.get(topic_key(check_topic_name(name))))

    async def find(self, names: Sequence[str]) -> dict[str, Topic | LlogError]:
        """Return what `get` returns or raises for each of these names, in few round trips."""
        found: dict[str, Topic | LlogError] = {}
        valid = []
        for name in names:
            try:
                valid.append(check_topic_name(name))
            except InvalidArgument as error:
                found[name] = error
        for name, entry in zip(valid, await self._log.meta.get_many([*map(topic_key, valid)]), strict=True):
            try:
                found[name] = topic_in(name, entry)
            except LlogError as error:
                found[name] = error
        return found

    async def directory(self, tp: TopicPartition) -> str:
        """Return the directory of the partition's topic; a topic that was created again has another directory."""
        topic = await self.get(tp.topic)
        check_partition(topic, tp.partition)
        return topic.directory

    async def topics(self, engine: str | None = None) -> list[Topic]:
        """Return all topics, or those of one engine, ordered by name, without tombstones."""
        return [
            topic for topic in await self._entries() if not topic.deleted and (engine is None or topic.engine == engine)
        ]

    async def all_topics(self) -> list[Topic]:
        """Return all topics from confirmed reads, for a caller that deletes what belongs to no topic.

        Raises `StaleReads` if a read was stale.
        """
        return await read_confirmed(self._log.meta, self.topics)

    async def add_partitions(self, name: str, partitions: int) -> Topic:
        """Grow the topic to `partitions`; records with keys may then go to other partitions than before."""
        check_partitions(partitions)
        topic = await self.get(name)
        check_growth(topic, partitions)
        backoff = self._backoff(name)
        while topic.partitions < partitions:
            await self.engine(topic).add_partitions(self._log, topic, range(topic.partitions, partitions))
            grown = msgspec.structs.replace(topic, partitions=partitions)
            if await self._replace(topic, grown):
                return grown
            await backoff.wait()
            topic = await self.get(name)
        return topic

    async def set_retention(self, name: str, retention_ms: int | None, retention_bytes: int | None) -> Topic:
        return await self.set_options(name, retention_ms=retention_ms, retention_bytes=retention_bytes)

    async def set_options(
        self,
        name: str,
        *,
        retention_ms: int | UnsetType | None = UNSET,
        retention_bytes: int | UnsetType | None = UNSET,
        cleanup: Cleanup | UnsetType = UNSET,
        delete_retention_ms: int | UnsetType = UNSET,
    ) -> Topic:
        """Change the options that are given. None lifts a limit."""
        given = {
            "retention_ms": retention_ms,
            "retention_bytes": retention_bytes,
            "cleanup": cleanup,
            "delete_retention_ms": delete_retention_ms,
        }
        given = {option: value for option, value in given.items() if value is not UNSET}
        backoff = self._backoff(name)
        while True:
            topic = await self.get(name)
            changed = msgspec.structs.replace(topic, **given)
            _check_retention(changed.retention_ms, changed.retention_bytes)
            _check_cleanup(self._log, changed.engine, changed.cleanup, changed.delete_retention_ms)
            if changed == topic or await self._replace(topic, changed):
                return changed
            await backoff.wait()

    async def delete(self, name: str) -> None:
        """Delete the topic with its consumer groups. Its name may be used again at once.

        The next collection deletes blobs; the files of a disk topic are deleted now, also from under a process that has
        them open. Only the owner of the RocksDB can delete a `rocksdb` topic while an owner runs: `LogOwned` otherwise.
        """
        backoff = self._backoff(name)
        while True:
            topic = await self.get(name)
            await self.engine(topic).check_removable(self._log, topic)
            tombstone = msgspec.structs.replace(topic, deleted=True)
            if await self._replace(topic, tombstone):
                await self._sweep(tombstone)
                return
            await backoff.wait()

    async def finish_deletions(self) -> None:
        """Finish interrupted deletions: remove what is left of the deleted topics."""
        here = {name for name, engine in self._log.engines.items() if await engine.is_here()}
        for topic in await self._entries():
            if topic.deleted and not topic.swept and topic.engine in here:
                try:
                    await self._sweep(topic)
                except (LogOwned, OwnerUnavailable, MissingExtra):
                    continue  # Its owner finishes the deletion.

    async def _entries(self) -> list[Topic]:
        return [decode(Topic, entry.value, entry.key) async for entry in scan(self._log.meta, TOPICS)]

    def _backoff(self, name: str) -> Backoff:
        return Backoff(self._log.runtime, f"topic {name!r}")

    async def _replace(self, old: Topic, new: Topic) -> bool:
        """Replace the catalog entry if it still is `old`, and return whether this call did."""
        found = await self._log.meta.get(topic_key(old.name))
        if found is None or decode(Topic, found.value, found.key) != old:
            return False
        try:
            await self._log.meta.put(topic_key(old.name), encode(new), expected=found.version)
        except VersionMismatch:
            return False
        return True

    async def _sweep(self, tombstone: Topic) -> None:
        """Remove what is left of the topic, and mark its tombstone as swept once no read can have missed anything."""
        reads = await self._log.meta.begin_reads()
        await self.engine(tombstone).remove(self._log, tombstone)
        async for group in scan_names(self._log.meta, GROUPS):
            prefix = group_prefix(group, tombstone.directory)
            await self._log.meta.delete_range(prefix, prefix_end(prefix))
        await reads.confirm()
        await self._replace(tombstone, msgspec.structs.replace(tombstone, swept=True))


def topic_in(name: str, entry: MetaEntry | None) -> Topic:
    topic = None if entry is None else decode(Topic, entry.value, entry.key)
    if topic is None or topic.deleted:
        raise TopicNotFound(
            f"there is no topic {name!r}: `llog topics list` shows the topics, `llog topics create` creates one"
        )
    return topic


def check_partition(topic: Topic, partition: int) -> None:
    if not 0 <= partition < topic.partitions:
        raise PartitionNotInitialized(
            f"topic {topic.name!r} has no partition {partition}: it has {topic.partitions}, counted from 0"
        )


def check_partitions(partitions: int) -> None:
    if not 1 <= partitions <= PARTITIONS_MAX:
        raise InvalidArgument(f"a topic has 1 to {PARTITIONS_MAX} partitions, not {partitions}")


def check_growth(topic: Topic, partitions: int) -> None:
    if partitions < topic.partitions:
        raise InvalidArgument(f"topic {topic.name!r} has {topic.partitions} partitions: they cannot become fewer")


def _check_cleanup(log: Log, engine: str, cleanup: Cleanup, delete_retention_ms: int) -> None:
    if engine not in log.engines:
        raise InvalidArgument(f"engine {engine!r} is unknown: there are {', '.join(map(repr, log.engines))}")
    if cleanup is Cleanup.COMPACT and not log.engines[engine].compacts_keys:
        able = [repr(name) for name, each in log.engines.items() if each.compacts_keys]
        raise InvalidArgument(
            f"cleanup 'compact' needs engine {' or '.join(able)}: engine {engine!r} keeps every record of a key"
        )
    if delete_retention_ms < 0:
        raise InvalidArgument(f"delete_retention_ms must not be negative: {delete_retention_ms}")


def _check_retention(retention_ms: int | None, retention_bytes: int | None) -> None:
    for name, value in (("retention_ms", retention_ms), ("retention_bytes", retention_bytes)):
        if value is not None and value < 0:
            raise InvalidArgument(f"{name} must not be negative: {value}")
