"""The logs of partitions in one RocksDB: appends that commit together with whatever else is in their WriteBatch, reads,
retention, key compaction.

All calls block, and any thread may make them. The state of each partition in use is in memory, and authoritative, since
the RocksDB has one owner. `directory` is the topic's in the catalog. A topic exists here from `create` to `remove`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final

import msgspec

from llog.batch.columns import Columns
from llog.engines.rocksdb.cleaner import KEYS_MAX, CompactResult, compact, is_worth_it
from llog.engines.rocksdb.keys import (
    COUNTERS,
    LOGS,
    META,
    after,
    counter_key,
    meta_key,
    prefixes_of,
    record_key,
    record_prefix,
)
from llog.engines.rocksdb.partition_state import PartitionState, decode_state, encode_state
from llog.engines.rocksdb.reader import bytes_below, first_at_time, first_within_bytes, read
from llog.engines.rocksdb.staging import StagedAppend, StagedWrites
from llog.engines.rocksdb.waiters import Partition, Waiters
from llog.errors import (
    InconsistentReadState,
    InvalidArgument,
    OffsetOutOfRange,
    PartitionNotInitialized,
    StoreUnavailable,
    WrongStore,
)
from llog.log.engine import Bounds, RetentionResult
from llog.model import FIRST_OFFSET, TimestampType
from llog.runtime import Runtime

if TYPE_CHECKING:
    from llog.engines.rocksdb.store import Changes, RocksStore

__all__ = ["RocksLogs", "StagedAppend", "StagedWrites"]

_RECLAIM_BYTES: Final = 64 << 20
"""Removed bytes below this are left to RocksDB's own compaction."""


class RocksLogs:
    """The logs of all partitions in a store."""

    def __init__(self, store: RocksStore, runtime: Runtime) -> None:
        self.store = store
        self._runtime = runtime
        self._states: dict[Partition, PartitionState] = {}
        self._waiters = Waiters()
        self._compacting: set[Partition] = set()
        self._closed = False

    def create(self, directory: str, entry: bytes) -> None:
        """Create a topic whose catalog entry is `entry`. Raises `WrongStore` if its directory has records already,
        which would be read as its own.
        """
        with self.store.mutex:
            for family, prefix in prefixes_of(directory):
                if self.store.items(family, prefix, after(prefix), 1):
                    raise WrongStore(
                        f"{self.store.directory} has a topic {directory!r} of another log: move the directory away, "
                        "or set LLOG_ROCKSDB_DIR to another one"
                    )
            changes = self.store.changes()
            changes.put(META, meta_key(directory), entry)
            self.store.write(changes, sync=True)

    def remove(self, directory: str) -> None:
        """Remove a topic with its records, routes and groups in one write. Idempotent."""
        with self.store.mutex:
            changes = self.store.changes()
            for family, prefix in prefixes_of(directory):
                changes.delete_range(family, prefix, after(prefix))
            changes.delete(META, meta_key(directory))
            self.store.write(changes, sync=True)
            for cached_state in [cached_state for cached_state in self._states if cached_state[0] == directory]:
                del self._states[cached_state]
        self._waiters.wake_where(lambda partition: partition[0] == directory)

    def stage(self) -> StagedWrites:
        return StagedWrites(self)

    def cached_state(self, directory: str, partition: int) -> PartitionState | None:
        """Return the present state if it is in memory, else None; never blocks."""
        return None if self._closed else self._states.get((directory, partition))

    def state(self, directory: str, partition: int, what: str = "") -> PartitionState:
        """Return the present state. Raises `PartitionNotInitialized` if the topic was deleted."""
        found = self.cached_state(directory, partition)
        if found is not None:
            return found
        what = what or f"{directory}/{partition}"
        if self._closed:
            raise StoreUnavailable(f"the log that {what} is read and written through is closed: open another one")
        self._check_exists(directory, what)  # first without the mutex, which others may hold for long
        with self.store.mutex:
            self._check_exists(directory, what)
            value = self.store.get(COUNTERS, counter_key(directory, partition))
            state = PartitionState() if value is None else decode_state(value, what)
            return self._states.setdefault((directory, partition), state)

    def _check_exists(self, directory: str, what: str) -> None:
        if self.store.get(META, meta_key(directory)) is None:
            raise PartitionNotInitialized(f"partition {what} was deleted, or is not in {self.store.directory}")

    def bounds(self, directory: str, partition: int, what: str = "") -> Bounds:
        return self.state(directory, partition, what).bounds

    def read(
        self, directory: str, partition: int, offset: int, max_bytes: int, *, stop: int | None = None, what: str = ""
    ) -> list[tuple[int, Columns]]:
        """Return runs of consecutive records from `offset` on, each with its first offset, as `LogReader.read` does."""
        what = what or f"{directory}/{partition}"
        before = self.state(directory, partition, what)
        if not before.log_start_offset <= offset <= before.next_offset:
            raise OffsetOutOfRange(what, offset, *before.bounds)
        end = before.next_offset if stop is None else min(stop, before.next_offset)
        if offset >= end:
            return []
        found = read(self.store, directory, partition, offset, end, max_bytes)
        state = self.state(directory, partition, what)
        if not found or not (state.has_gaps or found[0][0] == offset):
            with self.store.mutex:  # a removal of records updates the state before it releases the mutex
                state = self.state(directory, partition, what)
        if offset < state.log_start_offset:
            raise OffsetOutOfRange(what, offset, *state.bounds)
        if not state.has_gaps:
            found = _without_gaps(found, offset)
        if found or (state.has_gaps and end < before.next_offset):
            return found
        if state.has_gaps and end < state.next_offset:  # the last record of `before` was compacted meanwhile
            return self.read(directory, partition, offset, max_bytes, stop=stop, what=what)
        # Key compaction never removes the last record.
        raise InconsistentReadState(
            f"offset {offset} of {what} is missing in {self.store.directory}: `llog verify` shows all damage"
        )

    def offset_for_time(
        self, directory: str, partition: int, timestamp_ms: int, by: TimestampType, what: str = ""
    ) -> int:
        """Return the first offset whose time, as a running maximum, is at or after this time; else the next offset."""
        state = self.state(directory, partition, what)
        return first_at_time(self.store, directory, partition, state, timestamp_ms, by)

    def trim(self, directory: str, partition: int, before_offset: int, what: str = "") -> RetentionResult:
        """Remove every record below `before_offset` and raise the log start, in one write."""
        if before_offset < FIRST_OFFSET:
            raise InvalidArgument(f"offsets start at {FIRST_OFFSET}: {before_offset}")
        with self.store.mutex:
            state = self.state(directory, partition, what)
            old = state.log_start_offset
            if before_offset > state.next_offset:
                raise OffsetOutOfRange(what or f"{directory}/{partition}", before_offset, *state.bounds)
            if before_offset <= old:
                return RetentionResult(old_start=old, new_start=old, records=0, bytes=0)
            dropped = bytes_below(self.store, directory, partition, state, before_offset)
            changes = self.store.changes()
            changes.delete_range(
                LOGS, record_key(directory, partition, old), record_key(directory, partition, before_offset)
            )
            self._replace(directory, partition, changes, msgspec.structs.replace(state, log_start_offset=before_offset))
        return RetentionResult(old_start=old, new_start=before_offset, records=before_offset - old, bytes=dropped)

    def retain(
        self,
        directory: str,
        partition: int,
        *,
        retention_ms: int | None,
        retention_bytes: int | None,
        by: TimestampType,
        what: str = "",
    ) -> RetentionResult:
        """Remove the records older than `retention_ms`, by running maxima, and the oldest beyond `retention_bytes`;
        None is no limit.

        The record that crosses `retention_bytes` stays. All records may be removed, up to the next offset.
        """
        for name, value in (("retention_ms", retention_ms), ("retention_bytes", retention_bytes)):
            if value is not None and value < 0:
                raise InvalidArgument(f"{name} must not be negative: {value}")
        with self.store.mutex:
            state = self.state(directory, partition, what)
            start = state.log_start_offset
            if retention_ms is not None:
                oldest_ms = self._runtime.now_ms() - retention_ms
                start = max(start, first_at_time(self.store, directory, partition, state, oldest_ms, by))
            if retention_bytes is not None:
                start = max(start, first_within_bytes(self.store, directory, partition, state, retention_bytes))
            done = self.trim(directory, partition, start, what)
        if done.bytes >= _RECLAIM_BYTES:
            self._reclaim(directory, partition)
        return done

    def compact(
        self,
        directory: str,
        partition: int,
        *,
        delete_retention_ms: int,
        force: bool = False,
        keys_max: int = KEYS_MAX,
        what: str = "",
    ) -> CompactResult:
        """Compact by key if enough records are new, or, with `force`, in any case; not if a compaction is under way.
        Appends and reads go on.
        """
        with self.store.mutex:
            state = self.state(directory, partition, what)
            if (directory, partition) in self._compacting or not (force or is_worth_it(state)):
                return CompactResult(through=state.compacted_through + 1)
            self._compacting.add((directory, partition))
        try:
            done = compact(self, directory, partition, self._runtime.now_ms() - delete_retention_ms, keys_max, what)
            if done.removed:
                self._reclaim(directory, partition)
            return done
        finally:
            self._compacting.discard((directory, partition))

    def commit_event(self, directory: str, partition: int) -> AbstractContextManager[asyncio.Event]:
        """Yield an event of the running loop that is set with every commit to this partition, with its deletion, and by
        `close`.
        """
        return self._waiters.register((directory, partition))

    def close(self) -> None:
        """Refuse further calls and wake all waiters, before the store is closed. Idempotent."""
        self._closed = True
        self._waiters.wake_where(lambda _: True)

    def publish(self, new: Mapping[Partition, PartitionState]) -> None:
        """Take over the states that a write under the mutex has given these partitions, and wake their waiters."""
        self._states.update(new)
        self._waiters.wake(new)

    def remove_records(self, directory: str, partition: int, offsets: Sequence[int], what: str) -> None:
        """Remove records for key compaction, in one write that also records that the partition has gaps."""
        with self.store.mutex:
            state = self.state(directory, partition, what)
            changes = self.store.changes()
            for offset in offsets:
                changes.delete(LOGS, record_key(directory, partition, offset))
            self._replace(directory, partition, changes, msgspec.structs.replace(state, has_gaps=True))

    def note_compaction(self, directory: str, partition: int, through: int, records: int, what: str) -> None:
        """Record that the offsets up to `through` are compacted, and how many records are left there."""
        with self.store.mutex:
            state = self.state(directory, partition, what)
            state = msgspec.structs.replace(state, compacted_through=through, compacted_records=records)
            self._replace(directory, partition, self.store.changes(), state)

    def _reclaim(self, directory: str, partition: int) -> None:
        prefix = record_prefix(directory, partition)
        self.store.reclaim(LOGS, prefix, after(prefix))

    def _replace(self, directory: str, partition: int, changes: Changes, state: PartitionState) -> None:
        """Write changes together with the new state; the caller holds the mutex."""
        changes.put(COUNTERS, counter_key(directory, partition), encode_state(state))
        self.store.write(changes, sync=True)
        self.publish({(directory, partition): state})


def _without_gaps(found: list[tuple[int, Columns]], expected: int) -> list[tuple[int, Columns]]:
    """Return the leading runs that follow one another from `expected` on."""
    for index, (start, columns) in enumerate(found):
        if start != expected:
            return found[:index]
        expected += columns.count
    return found
