"""A metadata store below a prefix of another one, so that several logs can share a store."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llog.errors import VersionMismatch
from llog.stores.counting import OperationCounts
from llog.stores.diagnosis import Diagnosis, diagnose
from llog.stores.meta import Changes, MetaEntry, MetaStore, Put, Reads, Watch


class PrefixedMetaStore:
    """Shows the keys of `store` that begin with `prefix`, without that prefix.

    The order of keys and the shards of partitions stay the same. `prefix` ends in "/" and has no part named
    `partitions`.
    """

    def __init__(self, store: MetaStore, prefix: str) -> None:
        self.counts: OperationCounts | None = getattr(store, "counts", None)
        self._store = store
        self._prefix = prefix

    async def get(self, key: str) -> MetaEntry | None:
        return self._strip(await self._store.get(self._prefix + key))

    async def get_many(self, keys: Sequence[str]) -> list[MetaEntry | None]:
        return [self._strip(entry) for entry in await self._store.get_many([self._prefix + key for key in keys])]

    async def put(self, key: str, value: bytes, *, expected: int | None = None, ephemeral: bool = False) -> int:
        return await self._store.put(self._prefix + key, value, expected=expected, ephemeral=ephemeral)

    async def put_many(self, puts: Sequence[Put]) -> list[int | VersionMismatch]:
        return await self._store.put_many([Put(self._prefix + put.key, put.value, put.expected) for put in puts])

    async def delete(self, key: str, *, expected: int | None = None) -> bool:
        return await self._store.delete(self._prefix + key, expected=expected)

    async def delete_range(self, start: str, end: str) -> None:
        await self._store.delete_range(self._prefix + start, self._prefix + end)

    async def floor(self, key: str) -> MetaEntry | None:
        return self._strip(await self._store.floor(self._prefix + key))

    async def floor_many(self, keys: Sequence[str]) -> list[MetaEntry | None]:
        return [self._strip(entry) for entry in await self._store.floor_many([self._prefix + key for key in keys])]

    async def ceiling(self, key: str) -> MetaEntry | None:
        return self._strip(await self._store.ceiling(self._prefix + key))

    async def range(self, start: str, end: str, limit: int) -> list[MetaEntry]:
        entries = await self._store.range(self._prefix + start, self._prefix + end, limit)
        return [MetaEntry(entry.key[len(self._prefix) :], entry.value, entry.version) for entry in entries]

    async def keys(self, start: str, end: str, limit: int) -> list[str]:
        keys = await self._store.keys(self._prefix + start, self._prefix + end, limit)
        return [key[len(self._prefix) :] for key in keys]

    async def begin_reads(self) -> Reads:
        return await self._store.begin_reads()

    def watch(self, prefix: str) -> Watch:
        return _PrefixedWatch(self._store.watch(self._prefix + prefix), self._prefix)

    async def check(self) -> None:
        await self._store.check()

    async def diagnose(self, now_ms: Callable[[], int]) -> list[Diagnosis]:
        return await diagnose(self._store, now_ms)

    async def close(self) -> None:
        await self._store.close()

    def _strip(self, entry: MetaEntry | None) -> MetaEntry | None:
        """Return the entry under its key without the prefix; None if `floor` or `ceiling` found a key outside it."""
        if entry is None or not entry.key.startswith(self._prefix):
            return None
        return MetaEntry(entry.key[len(self._prefix) :], entry.value, entry.version)


class _PrefixedWatch:
    """A watch that names keys without the prefix."""

    def __init__(self, watch: Watch, prefix: str) -> None:
        self._watch = watch
        self._prefix = prefix

    def __aiter__(self) -> _PrefixedWatch:
        return self

    async def __anext__(self) -> Changes:
        return self._strip(await anext(self._watch))

    def take(self) -> Changes:
        return self._strip(self._watch.take())

    async def confirm(self) -> None:
        await self._watch.confirm()

    def _strip(self, changes: Changes) -> Changes:
        return None if changes is None else frozenset(key.removeprefix(self._prefix) for key in changes)
