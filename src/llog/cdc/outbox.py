"""The outbox: change events on their way to topics of other engines, stored by the WriteBatch that changes the rows.

An entry, `outbox/<topic>/<partition>/<sequence:020>`, little-endian:

 0  1  version 1            4  4  key length (u32)         12  8  time of the change in ms (i64)
 1  3  zero                 8  4  headers length (u32)     20  …  key · headers · payload

Sequences increase, with gaps where a change was abandoned. The relay's cut, `relay/<topic>/<partition>`, is JSON.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import msgspec

from llog.engines.rocksdb.keys import (
    COUNTERS,
    OUTBOX,
    OUTBOX_PREFIX,
    STORE_NAME,
    after,
    last_sequence_key,
    offset_of,
    outbox_key,
    outbox_keys,
    outbox_prefix,
    outbox_prefixes,
    partition_of,
    relay_key,
)
from llog.errors import CorruptBatch
from llog.log.records import decode
from llog.runtime import Runtime, uuid7

if TYPE_CHECKING:
    from llog.engines.rocksdb.store import Changes, RocksStore

_VERSION: Final = 1
_FIXED: Final = struct.Struct("<BxxxIIq")
_PAGE_FIRST: Final = 16


class OutboxEntry(NamedTuple):
    """One event of the outbox."""

    sequence: int
    timestamp_ms: int
    key: bytes
    headers: bytes
    payload: bytes


class Cut(msgspec.Struct, frozen=True, kw_only=True):
    """The batch that the relay is appending to a partition, or appended last."""

    producer: str
    number: int
    """The producer's sequence."""
    after: int
    """The last entry before the batch, or 0."""
    through: int
    """The last entry of the batch."""
    since: int
    """The partition's next offset before the batch was first appended."""
    open: bool
    """Whether the batch may still have to be appended; if so, all its entries exist."""


class OutboxStore(Protocol):
    """The relay's view of the outbox. An open cut always has its entries: both change together."""

    async def name(self) -> str:
        """Return the store's name, which never changes and which no other store has."""
        ...

    async def partitions(self) -> list[tuple[str, int]]:
        """Return directory and partition of all partitions that have entries."""
        ...

    async def entries(
        self, directory: str, partition: int, after: int, limit: int, max_bytes: int
    ) -> list[OutboxEntry]:
        """Return the next entries above `after`, up to `limit` and `max_bytes`, but at least one if one exists."""
        ...

    async def batch(self, directory: str, partition: int, cut: Cut) -> list[OutboxEntry]:
        """Return the entries of an open cut."""
        ...

    async def cut(self, directory: str, partition: int) -> Cut | None: ...

    async def put_cut(self, directory: str, partition: int, cut: Cut) -> bool:
        """Store the cut durably, with all entries before it; return False, and change nothing, if its entries are
        gone.
        """
        ...

    async def finish(self, directory: str, partition: int, cut: Cut) -> None:
        """Drop the entries of the cut and close it, as one change, which a power cut may undo until the next
        `put_cut`.
        """
        ...

    async def drop(self, directory: str, partition: int) -> None:
        """Drop the entries and the cut of a partition whose topic was deleted."""
        ...


class OutboxWriter:
    """Puts events into the outbox; the caller holds the store's mutex."""

    def __init__(self, store: RocksStore) -> None:
        self._store = store
        self._last: dict[tuple[str, int], int] = {}
        """The last sequence by partition; ahead of the store where changes were abandoned."""

    def add(
        self,
        changes: Changes,
        directory: str,
        partition: int,
        values: Sequence[bytes],
        *,
        keys: Sequence[bytes],
        headers: Sequence[bytes],
        now_ms: int,
    ) -> None:
        counter = last_sequence_key(directory, partition)
        last = self._last.get((directory, partition))
        if last is None:
            last = int.from_bytes(self._store.get(OUTBOX, counter) or b"", "little")
        names = outbox_keys(directory, partition, range(last + 1, last + 1 + len(values)))
        pack = _FIXED.pack
        entries = [
            b"".join((pack(_VERSION, len(key), len(header), now_ms), key, header, value))
            for key, header, value in zip(keys, headers, values, strict=True)
        ]
        changes.put_all(OUTBOX, names, entries)
        last += len(values)
        changes.put(OUTBOX, counter, last.to_bytes(8, "little"))
        self._last[directory, partition] = last


class RocksOutbox:
    """The outbox in RocksDB."""

    def __init__(self, store: RocksStore, runtime: Runtime) -> None:
        self._store = store
        self._runtime = runtime

    async def name(self) -> str:
        return await asyncio.to_thread(self._name)

    async def partitions(self) -> list[tuple[str, int]]:
        return await asyncio.to_thread(self._partitions)

    async def entries(
        self, directory: str, partition: int, after: int, limit: int, max_bytes: int
    ) -> list[OutboxEntry]:
        return await asyncio.to_thread(self._entries, directory, partition, after, limit, max_bytes)

    async def batch(self, directory: str, partition: int, cut: Cut) -> list[OutboxEntry]:
        start = outbox_key(directory, partition, cut.after + 1)
        stop = outbox_key(directory, partition, cut.through + 1)
        found = await asyncio.to_thread(self._store.items, OUTBOX, start, stop)
        return [_decode_entry(key, value) for key, value in found]

    async def cut(self, directory: str, partition: int) -> Cut | None:
        found = await asyncio.to_thread(self._store.get, OUTBOX, relay_key(directory, partition))
        return None if found is None else decode(Cut, found, f"relay/{directory}/{partition}")

    async def put_cut(self, directory: str, partition: int, cut: Cut) -> bool:
        return await asyncio.to_thread(self._put, directory, partition, cut, sync=True)

    async def finish(self, directory: str, partition: int, cut: Cut) -> None:
        closed = msgspec.structs.replace(cut, open=False)
        await asyncio.to_thread(self._put, directory, partition, closed, sync=False)

    async def drop(self, directory: str, partition: int) -> None:
        def drop_entries() -> None:
            with self._store.mutex:
                changes = self._store.changes()
                prefix = outbox_prefix(directory, partition)
                changes.delete_range(OUTBOX, prefix, after(prefix))
                changes.delete(OUTBOX, relay_key(directory, partition))
                changes.delete(OUTBOX, last_sequence_key(directory, partition))
                self._store.write(changes, sync=False)

        await asyncio.to_thread(drop_entries)

    def _name(self) -> str:
        with self._store.mutex:
            found = self._store.get(COUNTERS, STORE_NAME)
            if found is None:
                found = uuid7(self._runtime.now_ms(), self._runtime.random()).encode()
                changes = self._store.changes()
                changes.put(COUNTERS, STORE_NAME, found)
                self._store.write(changes, sync=True)
            return found.decode()

    def _partitions(self) -> list[tuple[str, int]]:
        found: list[tuple[str, int]] = []
        start = OUTBOX_PREFIX
        while entry := self._store.items(OUTBOX, start, after(OUTBOX_PREFIX), 1):
            found.append(partition_of(entry[0][0]))
            start = after(outbox_prefix(*found[-1]))
        return found

    def _entries(self, directory: str, partition: int, above: int, limit: int, max_bytes: int) -> list[OutboxEntry]:
        """Read pages of doubling size, so that large entries are not read by the thousand only to be dropped."""
        start, stop = outbox_key(directory, partition, above + 1), after(outbox_prefix(directory, partition))
        found: list[OutboxEntry] = []
        size, page = 0, _PAGE_FIRST
        while len(found) < limit:
            count = min(page, limit - len(found))
            items = self._store.items(OUTBOX, start, stop, count)
            for key, value in items:
                size += len(value)
                if found and size > max_bytes:
                    return found
                found.append(_decode_entry(key, value))
            if len(items) < count:
                break
            start, page = items[-1][0] + b"\0", page * 2
        return found

    def _put(self, directory: str, partition: int, cut: Cut, *, sync: bool) -> bool:
        with self._store.mutex:
            if self._store.get(OUTBOX, outbox_key(directory, partition, cut.through)) is None:
                return False
            changes = self._store.changes()
            changes.put(OUTBOX, relay_key(directory, partition), msgspec.json.encode(cut))
            if not cut.open:
                start, stop = outbox_prefix(directory, partition), outbox_key(directory, partition, cut.through + 1)
                changes.delete_range(OUTBOX, start, stop)
            self._store.write(changes, sync=sync)
            return True


def drop_topic(changes: Changes, directory: str) -> None:
    """Drop the entries for a topic that is being deleted."""
    for prefix in outbox_prefixes(directory):
        changes.delete_range(OUTBOX, prefix, after(prefix))


def _decode_entry(key: bytes, value: bytes) -> OutboxEntry:
    if len(value) < _FIXED.size or value[0] != _VERSION:
        raise CorruptBatch(f"outbox entry {key!r} has {len(value)} bytes and version {value[:1]!r}")
    _, key_length, headers_length, timestamp_ms = _FIXED.unpack_from(value)
    headers = _FIXED.size + key_length
    payload = headers + headers_length
    if payload > len(value):
        raise CorruptBatch(f"outbox entry {key!r} of {len(value)} bytes ends early: {payload} bytes come first")
    return OutboxEntry(
        offset_of(key), timestamp_ms, value[_FIXED.size : headers], value[headers:payload], value[payload:]
    )
