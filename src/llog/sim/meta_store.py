"""The metadata store as a process sees it: over the network, spread over shards, and sometimes stale.

It guarantees no more than the port does. A call for several partitions reaches each at a different time, and may reach
only some of them. A server that lost its leadership while it was paused may wake and answer reads from the state in
which it was paused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from typing import Any, Final, TypeVar
from zlib import crc32

from llog.errors import OutcomeUnknown, StaleReads, StoreUnavailable, VersionMismatch
from llog.sim.stores import META, Network
from llog.stores.event_watches import ChangedKeys
from llog.stores.memory.meta import MemoryMeta, MemoryMetaStore
from llog.stores.meta import Changes, MetaEntry, Put, Reads, Watch, partition_prefix, prefix_end

T = TypeVar("T")
K = TypeVar("K")
SHARDS: Final = 2
_ALL: Final = 1 << 30
_BROKEN: Final = 0.03
"""The fraction of notifications in whose place the connection of a watch breaks."""


def shard_of(key: str) -> int:
    """Return the shard that holds the key and all keys of its partition."""
    return crc32((partition_prefix(key) or key).encode()) % SHARDS


class OldState:
    """The keys of some shards at the moment when their server was paused."""

    def __init__(self, server: MemoryMeta, shards: Collection[int]) -> None:
        self.shards = frozenset(shards)
        self.client = MemoryMetaStore(server.copy(lambda key: shard_of(key) in self.shards))


class SimMetaStore:
    """The `MetaStore` of one process."""

    def __init__(self, network: Network, server: MemoryMeta, who: str) -> None:
        self.client = MemoryMetaStore(server)
        self.old_answers = 0
        """The number of reads that a former leader answered."""
        self._network = network
        self._who = who
        self._role = who.rpartition(".")[0]

    async def get(self, key: str) -> MetaEntry | None:
        return await self._read(shard_of(key), f"get {key}", lambda client: client.get(key))

    async def get_many(self, keys: Sequence[str]) -> list[MetaEntry | None]:
        found: dict[str, MetaEntry | None] = {}

        async def ask(shard: int, wanted: list[str]) -> None:
            answers = await self._read(shard, f"get_many {', '.join(wanted)}", lambda client: client.get_many(wanted))
            found.update(zip(wanted, answers, strict=True))

        await asyncio.gather(*(ask(shard, wanted) for shard, wanted in _group_by(keys, shard_of).items()))
        return [found[key] for key in keys]

    async def put(self, key: str, value: bytes, *, expected: int | None = None, ephemeral: bool = False) -> int:
        return await self._write(
            f"put {key} at {expected}", lambda: self.client.put(key, value, expected=expected, ephemeral=ephemeral)
        )

    async def put_many(self, puts: Sequence[Put]) -> list[int | VersionMismatch]:
        positions = _group_by(
            range(len(puts)), lambda position: partition_prefix(puts[position].key) or puts[position].key
        )

        async def write_some(some: list[Put]) -> list[int | VersionMismatch]:
            what = "put_many " + ", ".join(f"{put.key} at {put.expected}" for put in some)
            first = some[: self._network.draw.randint(0, len(some))]
            return await self._write(what, lambda: self.client.put_many(some), lambda: self.client.put_many(first))

        groups = [[puts[position] for position in group] for group in positions.values()]
        answers = await _gather_answers([write_some(group) for group in groups])
        results: dict[int, int | VersionMismatch] = {}
        for group, answer in zip(positions.values(), answers, strict=True):
            results.update(zip(group, answer, strict=True))
        return [results[position] for position in range(len(puts))]

    async def delete(self, key: str, *, expected: int | None = None) -> bool:
        return await self._write(f"delete {key} at {expected}", lambda: self.client.delete(key, expected=expected))

    async def delete_range(self, start: str, end: str) -> None:
        what = f"delete_range {start} {end}"
        if _is_of_one_partition(start, end):
            await self._write(what, lambda: self.client.delete_range(start, end))
            return

        async def delete(shard: int) -> None:
            for key in await self.client.keys(start, end, _ALL):
                if shard_of(key) == shard:
                    await self.client.delete(key)

        await _gather_answers([self._write(f"{what} of shard {s}", lambda s=s: delete(s)) for s in range(SHARDS)])  # type: ignore[misc]

    async def floor(self, key: str) -> MetaEntry | None:
        async def read(client: MemoryMetaStore, shard: int) -> MetaEntry | None:
            return _floor_in(await client.range("", key + "\x00", _ALL), shard)

        return max(await self._nearest(f"floor {key}", key, read), key=lambda entry: entry.key, default=None)

    async def floor_many(self, keys: Sequence[str]) -> list[MetaEntry | None]:
        found: dict[str, MetaEntry | None] = {}

        async def ask(shard: int, wanted: list[str]) -> None:
            async def read(client: MemoryMetaStore) -> list[MetaEntry | None]:
                return [_floor_in(await client.range("", key + "\x00", _ALL), shard) for key in wanted]

            found.update(zip(wanted, await self._read(shard, f"floor_many {', '.join(wanted)}", read), strict=True))

        await asyncio.gather(*(ask(shard, wanted) for shard, wanted in _group_by(keys, shard_of).items()))
        return [found[key] for key in keys]

    async def ceiling(self, key: str) -> MetaEntry | None:
        async def read(client: MemoryMetaStore, shard: int) -> MetaEntry | None:
            found = await client.ceiling(key)
            while found is not None and shard_of(found.key) != shard:
                found = await client.ceiling(found.key + "\x00")
            return found

        return min(await self._nearest(f"ceiling {key}", key, read), key=lambda entry: entry.key, default=None)

    async def range(self, start: str, end: str, limit: int) -> list[MetaEntry]:
        async def read(client: MemoryMetaStore, shard: int) -> list[MetaEntry]:
            return [entry for entry in await client.range(start, end, _ALL) if shard_of(entry.key) == shard][:limit]

        shards = [shard_of(start)] if _is_of_one_partition(start, end) else range(SHARDS)
        pages = await asyncio.gather(*(self._read_shard(shard, f"range {start}", read) for shard in shards))
        return sorted(entry for page in pages for entry in page)[:limit]

    async def keys(self, start: str, end: str, limit: int) -> list[str]:
        return [entry.key for entry in await self.range(start, end, limit)]

    async def begin_reads(self) -> Reads:
        return _SimReads(self)

    def watch(self, prefix: str) -> Watch:
        return _SimWatch(self, prefix)

    async def check(self) -> None:
        await self._network.call(self._who, "check", self.client.check, write=False)

    async def close(self) -> None:
        await self.client.close()

    async def confirm(self, old_answers: int) -> None:
        """Raise `StaleReads` if a former leader has answered more reads than `old_answers`."""

        async def effect() -> None:
            if self.old_answers != old_answers:
                raise StaleReads("simulated: a server that was paused has answered reads from an old state")

        # A server proves its leadership by a write.
        await self._network.call(self._who, "confirm reads", effect, write=False, fills=META)

    async def _nearest(
        self, what: str, key: str, read: Callable[[MemoryMetaStore, int], Coroutine[Any, Any, MetaEntry | None]]
    ) -> list[MetaEntry]:
        """Return each shard's entry nearest to the key; only the key's own shard is asked if it has one of the key's
        partition.
        """
        prefix = partition_prefix(key)
        if prefix is not None:
            found = await self._read_shard(shard_of(key), what, read)
            if found is not None and found.key.startswith(prefix):
                return [found]
        answers = await asyncio.gather(*(self._read_shard(shard, what, read) for shard in range(SHARDS)))
        return [entry for entry in answers if entry is not None]

    async def _read_shard(
        self, shard: int, what: str, read: Callable[[MemoryMetaStore, int], Coroutine[Any, Any, T]]
    ) -> T:
        return await self._read(shard, what, lambda client: read(client, shard))

    async def _read(self, shard: int, what: str, read: Callable[[MemoryMetaStore], Coroutine[Any, Any, T]]) -> T:
        def effect() -> Coroutine[Any, Any, T]:
            old = self._network.old.get(self._role)
            if old is None or shard not in old.shards or self._network.draw.random() < 0.5:
                return read(self.client)
            self.old_answers += 1
            self._network.trace.count("old answers")
            return read(old.client)

        return await self._network.call(self._who, what, effect, write=False)

    async def _write(
        self,
        what: str,
        effect: Callable[[], Coroutine[Any, Any, T]],
        in_part: Callable[[], Coroutine[Any, Any, T]] | None = None,
    ) -> T:
        return await self._network.call(self._who, what, effect, write=True, fills=META, in_part=in_part)


class _SimReads:
    def __init__(self, store: SimMetaStore) -> None:
        self._store = store
        self._old_answers = store.old_answers

    async def confirm(self) -> None:
        await self._store.confirm(self._old_answers)


class _SimWatch:
    """A watch whose notifications travel as answers do: late, but in their order."""

    def __init__(self, store: SimMetaStore, prefix: str) -> None:
        self._store = store
        self._watch = store.client.watch(prefix)
        self._changes = self._watch.changed = _LateChanges(store._network)

    def __aiter__(self) -> _SimWatch:
        return self

    async def __anext__(self) -> Changes:
        return await anext(self._watch)

    def take(self) -> Changes:
        return self._watch.take()

    async def confirm(self) -> None:
        async def effect() -> int:
            return self._changes.sent

        store = self._store
        sent = await store._network.call(store._who, "confirm watch", effect, write=False)
        await self._changes.wait_until_received(sent)


class _LateChanges(ChangedKeys):
    """Changes that arrive some time after they happened. Now and then the connection breaks, and any key may have
    changed.
    """

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.sent = 0
        self._received = 0
        self._network = network
        self._last_arrival = 0.0
        self._progress = asyncio.Event()

    def add(self, key: str) -> None:
        self.sent += 1
        network = self._network
        now = network.loop.time()
        self._last_arrival = max(self._last_arrival, now + network.draw_delay())
        is_broken = network.draw.random() < _BROKEN
        network.loop.call_world(self._last_arrival - now, lambda: self._receive(None if is_broken else key))

    async def wait_until_received(self, number: int) -> None:
        while self._received < number:
            self._progress.clear()
            await self._progress.wait()

    def _receive(self, key: str | None) -> None:
        self._received += 1
        self._progress.set()
        if key is None:
            self.add_all()
        else:
            super().add(key)


def _floor_in(found: Sequence[MetaEntry], shard: int) -> MetaEntry | None:
    """Return the highest of these entries that is on the shard."""
    return next((entry for entry in reversed(found) if shard_of(entry.key) == shard), None)


def _is_of_one_partition(start: str, end: str) -> bool:
    prefix = partition_prefix(start)
    return prefix is not None and end <= prefix_end(prefix)


def _group_by(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


async def _gather_answers(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the answers of calls that were made at once. Raises `StoreUnavailable` only if all calls had no effect."""
    answers = await asyncio.gather(*calls, return_exceptions=True)
    failures = [answer for answer in answers if isinstance(answer, BaseException)]
    known = [failure for failure in failures if isinstance(failure, StoreUnavailable)]
    if len(known) < len(failures):
        raise next(failure for failure in failures if not isinstance(failure, StoreUnavailable))
    if known and len(known) < len(answers):
        raise OutcomeUnknown(f"simulated: {len(known)} of {len(answers)} calls had no effect")
    if known:
        raise known[0]
    return [answer for answer in answers if not isinstance(answer, BaseException)]
