"""A metadata store in memory, for tests and the simulation: deterministic, no threads, no clock.

`MemoryMeta` is the server that holds the data; every `MemoryMetaStore` is a client with its own session.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Sequence
from typing import Final
from weakref import WeakValueDictionary

from llog.errors import StoreUnavailable, VersionMismatch
from llog.stores.counting import OperationCounts
from llog.stores.event_watches import ChangedKeys
from llog.stores.meta import (
    ABSENT,
    Changes,
    FreshReads,
    MetaEntry,
    Put,
    check_bounds,
    check_puts,
    check_size,
    entries_size,
    version_mismatch,
)

_INSERTS_MAX: Final = 100
"""New keys that are inserted one by one; with more, all keys are sorted."""


class MemoryMeta:
    """The server: the data that several store objects share."""

    def __init__(self) -> None:
        self._sorted: list[str] = []
        self._unsorted: list[str] = []
        """Keys that were put since the last operation that needed their order."""
        self._entries: dict[str, MetaEntry] = {}
        self._holders: dict[str, int] = {}
        """The session of each ephemeral key."""
        self._version = 0
        self._sessions: set[int] = set()
        self._sessions_opened = 0
        # Ordered by creation, because the order in which watches wake must be deterministic.
        self._watches: WeakValueDictionary[int, _Watch] = WeakValueDictionary()
        self._watches_opened = 0

    def expire(self, store: MemoryMetaStore) -> None:
        """End the store's session as if its process had died, without closing the store.

        The store's next ephemeral put opens another session.
        """
        self._end_session(store._session)

    def copy(self, wanted: Callable[[str], bool]) -> MemoryMeta:
        """Return a server with the present entries of all keys for which `wanted` is true, without sessions."""
        copy = MemoryMeta()
        copy._sorted = [key for key in self._keys if wanted(key)]
        copy._entries = {key: self._entries[key] for key in copy._sorted}
        return copy

    @property
    def _keys(self) -> list[str]:
        """All keys in order. Python sorts text by code points, which is the order of its UTF-8 bytes."""
        if self._unsorted:
            if len(self._unsorted) > _INSERTS_MAX:
                self._sorted += self._unsorted
                self._sorted.sort()
            else:
                for key in self._unsorted:
                    insort(self._sorted, key)
            self._unsorted.clear()
        return self._sorted

    def _open_session(self) -> int:
        self._sessions_opened += 1
        self._sessions.add(self._sessions_opened)
        return self._sessions_opened

    def _end_session(self, session: int) -> None:
        if session in self._sessions:
            self._sessions.remove(session)
            for key in [key for key, holder in self._holders.items() if holder == session]:
                self._remove(key)

    def _put(self, key: str, value: bytes, expected: int | None, session: int | None) -> int:
        self._check_version(key, expected)
        if key not in self._entries:
            self._unsorted.append(key)
        version = self._next_version(key)
        self._entries[key] = MetaEntry(key, value, version)
        self._holders.pop(key, None)
        if session is not None:
            self._holders[key] = session
        self._notify(key)
        return version

    def _next_version(self, key: str) -> int:
        self._version += 1
        return self._version

    def _delete(self, key: str, expected: int | None) -> bool:
        if key not in self._entries:
            return False
        self._check_version(key, expected)
        self._remove(key)
        return True

    def _check_version(self, key: str, expected: int | None) -> None:
        if expected is not None:
            entry = self._entries.get(key)
            found = ABSENT if entry is None else entry.version
            if expected != found:
                raise version_mismatch(key, expected, found)

    def _remove(self, key: str) -> None:
        del self._keys[bisect_left(self._keys, key)]
        self._forget(key)

    def _forget(self, key: str) -> None:
        del self._entries[key]
        self._holders.pop(key, None)
        self._notify(key)

    def _floor(self, key: str) -> MetaEntry | None:
        position = bisect_right(self._keys, key)
        return self._entries[self._keys[position - 1]] if position > 0 else None

    def _slice(self, start: str, end: str) -> tuple[int, int]:
        return bisect_left(self._keys, start), bisect_left(self._keys, end)

    def _delete_range(self, start: str, end: str) -> None:
        low, high = self._slice(start, end)
        keys = self._keys[low:high]
        del self._keys[low:high]
        for key in keys:
            self._forget(key)

    def _notify(self, key: str) -> None:
        for watch in list(self._watches.values()) if self._watches else ():
            if key.startswith(watch.prefix):
                watch.changed.add(key)

    def _register(self, watch: _Watch) -> None:
        self._watches_opened += 1
        self._watches[self._watches_opened] = watch


class _Watch:
    def __init__(self, store: MemoryMetaStore, prefix: str) -> None:
        self.prefix = prefix
        self.changed = ChangedKeys()
        self._store = store

    def __aiter__(self) -> _Watch:
        return self

    async def __anext__(self) -> Changes:
        await self.changed.wait()
        self._store._check_open()
        return self.changed.take()

    def take(self) -> Changes:
        return self.changed.take()

    async def confirm(self) -> None:
        self._store._check_open()  # every change is delivered as it happens


class MemoryMetaStore:
    """A client of a `MemoryMeta`, or of a new one if none is given."""

    def __init__(self, server: MemoryMeta | None = None) -> None:
        self.counts = OperationCounts()
        self._server = MemoryMeta() if server is None else server
        self._session = self._server._open_session()
        self._watches: WeakValueDictionary[int, _Watch] = WeakValueDictionary()
        self._closed = False

    async def get(self, key: str) -> MetaEntry | None:
        check_size(key)
        self._check_open()
        entry = self._server._entries.get(key)
        self._count("get", 0 if entry is None else len(entry.value))
        return entry

    async def get_many(self, keys: Sequence[str]) -> list[MetaEntry | None]:
        for key in keys:
            check_size(key)
        self._check_open()
        entries = [self._server._entries.get(key) for key in keys]
        self._count("get_many", sum(len(entry.value) for entry in entries if entry is not None))
        return entries

    async def put(self, key: str, value: bytes, *, expected: int | None = None, ephemeral: bool = False) -> int:
        check_size(key, value)
        self._check_open()
        self._count("put", len(value))
        if ephemeral and self._session not in self._server._sessions:
            self._session = self._server._open_session()
        return self._server._put(key, value, expected, self._session if ephemeral else None)

    async def put_many(self, puts: Sequence[Put]) -> list[int | VersionMismatch]:
        size = check_puts(puts)
        self._check_open()
        self._count("put_many", size)
        results: list[int | VersionMismatch] = []
        for put in puts:
            try:
                results.append(self._server._put(put.key, put.value, put.expected, None))
            except VersionMismatch as error:
                results.append(error)
        return results

    async def delete(self, key: str, *, expected: int | None = None) -> bool:
        check_size(key)
        self._check_open()
        self._count("delete", 0)
        return self._server._delete(key, expected)

    async def delete_range(self, start: str, end: str) -> None:
        check_bounds(start, end)
        self._check_open()
        self._count("delete_range", 0)
        self._server._delete_range(start, end)

    async def floor(self, key: str) -> MetaEntry | None:
        check_bounds(key)
        self._check_open()
        entry = self._server._floor(key)
        self._count("floor", 0 if entry is None else len(entry.value))
        return entry

    async def floor_many(self, keys: Sequence[str]) -> list[MetaEntry | None]:
        for key in keys:
            check_bounds(key)
        self._check_open()
        entries = [self._server._floor(key) for key in keys]
        self._count("floor_many", entries_size(entries))
        return entries

    async def ceiling(self, key: str) -> MetaEntry | None:
        check_bounds(key)
        self._check_open()
        keys = self._server._keys
        position = bisect_left(keys, key)
        entry = self._server._entries[keys[position]] if position < len(keys) else None
        self._count("ceiling", 0 if entry is None else len(entry.value))
        return entry

    async def range(self, start: str, end: str, limit: int) -> list[MetaEntry]:
        check_bounds(start, end, limit)
        self._check_open()
        entries = [self._server._entries[key] for key in self._page(start, end, limit)]
        self._count("range", sum(len(entry.value) for entry in entries))
        return entries

    async def keys(self, start: str, end: str, limit: int) -> list[str]:
        check_bounds(start, end, limit)
        self._check_open()
        self._count("keys", 0)
        return self._page(start, end, limit)

    async def begin_reads(self) -> FreshReads:
        self._check_open()
        return FreshReads(self._check_open)

    def watch(self, prefix: str) -> _Watch:
        self._check_open()
        watch = _Watch(self, prefix)
        self._server._register(watch)
        self._watches[id(watch)] = watch
        self._count("watch", 0)
        return watch

    async def check(self) -> None:
        self._check_open()

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._server._end_session(self._session)
            for watch in list(self._watches.values()):
                watch.changed.add_all()

    def _page(self, start: str, end: str, limit: int) -> list[str]:
        low, high = self._server._slice(start, end)
        return self._server._keys[low : min(high, low + limit)]

    def _count(self, operation: str, size: int) -> None:
        self.counts.add(operation, size, 0.0)

    def _check_open(self) -> None:
        if self._closed:
            raise StoreUnavailable("this metadata store is closed: open another one")
