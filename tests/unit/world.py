"""A log on stores in memory, with a clock that tests set and store calls that tests disturb."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

from llog.engines.object.partition_keys import find_keys
from llog.engines.object.reader import EntrySpan, Reader, span_of
from llog.engines.object.writer import Writer
from llog.engines.registry import all_engines
from llog.errors import LlogError, StaleReads, VersionMismatch
from llog.log.catalog import Catalog
from llog.log.engine import AppendGroup, AppendResult
from llog.log.keys import PartitionKeys
from llog.log.log import Log
from llog.log.records import CompactionCursor, Control, Kind, decode, encode
from llog.model import Record, TopicPartition
from llog.stores.blobs import BlobInfo, Buffer
from llog.stores.memory.blobs import MemoryBlobs, MemoryBlobStore
from llog.stores.memory.meta import MemoryMeta, MemoryMetaStore
from llog.stores.meta import MetaEntry, Put, Reads, Watch, scan

T = TypeVar("T")
START_MS = 1_700_000_000_000
TP = TopicPartition("orders", 0)


class Crash(Exception):
    """The process died here; nothing catches this."""


class ManualRuntime:
    """A clock that only tests move; sleeping lets the others run."""

    def __init__(self, seed: int = 0) -> None:
        self.now = START_MS
        self._random = random.Random(seed)

    def now_ms(self) -> int:
        return self.now

    def random(self) -> random.Random:
        return self._random

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)


class Faults:
    """What happens around each store call of one process: `before` and `after` may raise, or wait."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    async def before(self, operation: str, key: str) -> None:
        """The call has not happened yet."""

    async def after(self, operation: str, key: str) -> None:
        """The call has happened, and its answer is on the way."""

    async def around(self, operation: str, key: str, call: Callable[[], Awaitable[T]]) -> T:
        self.calls.append((operation, key))
        await self.before(operation, key)
        result = await call()
        await self.after(operation, key)
        return result


class CrashAt(Faults):
    """Dies at the n-th store call, before or after it is done."""

    def __init__(self, number: int, *, done: bool) -> None:
        super().__init__()
        self.number, self.done = number, done

    async def before(self, operation: str, key: str) -> None:
        if len(self.calls) >= self.number and not self.done:
            raise Crash

    async def after(self, operation: str, key: str) -> None:
        if len(self.calls) >= self.number:
            raise Crash


class Interleaved(Faults):
    """Lets others run at random around each call."""

    def __init__(self, seed: int, most: int = 4) -> None:
        super().__init__()
        self._random, self._most = random.Random(seed), most

    async def before(self, operation: str, key: str) -> None:
        for _ in range(self._random.randrange(self._most)):
            await asyncio.sleep(0)

    async def after(self, operation: str, key: str) -> None:
        await self.before(operation, key)


class Stall(Faults):
    """Stops before the first call that matches, until `go` is set."""

    def __init__(self, matches: Callable[[str, str], bool]) -> None:
        super().__init__()
        self._matches = matches
        self.stalled, self.go = asyncio.Event(), asyncio.Event()

    async def before(self, operation: str, key: str) -> None:
        if not self.stalled.is_set() and self._matches(operation, key):
            self.stalled.set()
            await self.go.wait()


class LostAnswers(Faults):
    """Raises `error` once at the n-th matching call (from 1), before or after it is done."""

    def __init__(self, error: LlogError, matches: Callable[[str, str], bool], *, done: bool, number: int = 1) -> None:
        super().__init__()
        self._error, self._matches, self._done, self._number = error, matches, done, number
        self.seen = 0

    async def before(self, operation: str, key: str) -> None:
        self.seen += self._matches(operation, key)
        if not self._done and self._matches(operation, key) and self.seen == self._number:
            raise self._error

    async def after(self, operation: str, key: str) -> None:
        if self._done and self._matches(operation, key) and self.seen == self._number:
            raise self._error


class FaultyMeta:
    """A metadata store with `Faults` around its calls."""

    def __init__(self, inner: MemoryMetaStore, faults: Faults) -> None:
        self.inner, self.faults = inner, faults

    async def get(self, key: str) -> MetaEntry | None:
        return await self.faults.around("get", key, lambda: self.inner.get(key))

    async def get_many(self, keys: Sequence[str]) -> list[MetaEntry | None]:
        return await self.faults.around("get_many", keys[-1], lambda: self.inner.get_many(keys))

    async def put(self, key: str, value: bytes, *, expected: int | None = None, ephemeral: bool = False) -> int:
        put = self.inner.put
        return await self.faults.around("put", key, lambda: put(key, value, expected=expected, ephemeral=ephemeral))

    async def put_many(self, puts: Sequence[Put]) -> list[int | VersionMismatch]:
        return await self.faults.around("put_many", puts[-1].key, lambda: self.inner.put_many(puts))

    async def delete(self, key: str, *, expected: int | None = None) -> bool:
        return await self.faults.around("delete", key, lambda: self.inner.delete(key, expected=expected))

    async def delete_range(self, start: str, end: str) -> None:
        return await self.faults.around("delete_range", start, lambda: self.inner.delete_range(start, end))

    async def floor(self, key: str) -> MetaEntry | None:
        return await self.faults.around("floor", key, lambda: self.inner.floor(key))

    async def floor_many(self, keys: Sequence[str]) -> list[MetaEntry | None]:
        return await self.faults.around("floor_many", keys[-1], lambda: self.inner.floor_many(keys))

    async def ceiling(self, key: str) -> MetaEntry | None:
        return await self.faults.around("ceiling", key, lambda: self.inner.ceiling(key))

    async def range(self, start: str, end: str, limit: int) -> list[MetaEntry]:
        return await self.faults.around("range", start, lambda: self.inner.range(start, end, limit))

    async def keys(self, start: str, end: str, limit: int) -> list[str]:
        return await self.faults.around("keys", start, lambda: self.inner.keys(start, end, limit))

    async def begin_reads(self) -> Reads:
        return await self.inner.begin_reads()

    def watch(self, prefix: str) -> Watch:
        return self.inner.watch(prefix)

    async def check(self) -> None:
        await self.faults.around("check", "", self.inner.check)

    async def close(self) -> None:
        await self.inner.close()


class StaleMeta(FaultyMeta):
    """A metadata store that answers reads below a prefix from an old state, from `pause` to `wake`."""

    def __init__(self, server: MemoryMeta) -> None:
        super().__init__(MemoryMetaStore(server), Faults())
        self._server = server
        self._prefix = ""
        self._old: MemoryMetaStore | None = None
        self.old_answers = 0

    def pause(self, prefix: str) -> None:
        self._prefix = prefix
        self._old = MemoryMetaStore(self._server.copy(lambda key: key.startswith(prefix)))

    def wake(self) -> None:
        self._old = None

    def _answering(self, key: str) -> MemoryMetaStore:
        if self._old is None or not key.startswith(self._prefix):
            return self.inner
        self.old_answers += 1
        return self._old

    async def get(self, key: str) -> MetaEntry | None:
        return await self._answering(key).get(key)

    async def get_many(self, keys: Sequence[str]) -> list[MetaEntry | None]:
        return [await self.get(key) for key in keys]

    async def floor_many(self, keys: Sequence[str]) -> list[MetaEntry | None]:
        return [await self._answering(key).floor(key) for key in keys]

    async def ceiling(self, key: str) -> MetaEntry | None:
        return await self._answering(key).ceiling(key)

    async def range(self, start: str, end: str, limit: int) -> list[MetaEntry]:
        return await self._answering(start).range(start, end, limit)

    async def keys(self, start: str, end: str, limit: int) -> list[str]:
        return await self._answering(start).keys(start, end, limit)

    async def begin_reads(self) -> Reads:
        return _StaleReads(self, self.old_answers)


class _StaleReads:
    def __init__(self, store: StaleMeta, old_answers: int) -> None:
        self._store, self._old_answers = store, old_answers

    async def confirm(self) -> None:
        if self._store.old_answers != self._old_answers:
            raise StaleReads("a server that was paused has answered")


class FaultyBlobs:
    """A blob store with `Faults` around its calls."""

    def __init__(self, inner: MemoryBlobStore, faults: Faults) -> None:
        self.inner, self.faults, self.uri = inner, faults, inner.uri

    async def put(self, name: str, parts: Sequence[Buffer]) -> None:
        return await self.faults.around("put blob", name, lambda: self.inner.put(name, parts))

    async def get(self, name: str) -> Buffer:
        return await self.faults.around("get blob", name, lambda: self.inner.get(name))

    async def get_range(self, name: str, offset: int, length: int) -> Buffer:
        return await self.faults.around("get blob", name, lambda: self.inner.get_range(name, offset, length))

    async def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        return await self.faults.around("get blob", name, lambda: self.inner.get_ranges(name, ranges))

    async def head(self, name: str) -> BlobInfo | None:
        return await self.faults.around("head blob", name, lambda: self.inner.head(name))

    def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[list[BlobInfo]]:
        return self.inner.list(prefix, start_after=start_after)

    async def delete_many(self, names: Sequence[str]) -> None:
        return await self.faults.around("delete blobs", names[0], lambda: self.inner.delete_many(names))

    async def remove_unfinished_puts(self, before_ms: int) -> int:
        return await self.inner.remove_unfinished_puts(before_ms)

    def require(self, name: str) -> None:
        self.inner.require(name)

    async def check(self) -> None:
        await self.faults.around("check blobs", "", self.inner.check)

    async def close(self) -> None:
        await self.inner.close()


class World:
    """The servers, and as many processes on them as a test wants."""

    def __init__(self) -> None:
        self.runtime = ManualRuntime()
        self.meta_server, self.blob_server = MemoryMeta(), MemoryBlobs(self.runtime.now_ms)
        self.meta, self.blobs = MemoryMetaStore(self.meta_server), MemoryBlobStore(self.blob_server)
        self.log = Log(self.meta, self.blobs, self.runtime, all_engines())
        self.catalog, self.reader, self.writer = Catalog(self.log), Reader(self.log), Writer(self.log)

    def process(self, faults: Faults | None = None) -> Log:
        """The same log as another process sees it."""
        meta, blobs = MemoryMetaStore(self.meta_server), MemoryBlobStore(self.blob_server)
        faults = faults or Faults()
        return Log(FaultyMeta(meta, faults), FaultyBlobs(blobs, faults), self.runtime, all_engines())

    def stale_process(self) -> tuple[Log, StaleMeta]:
        """Another process, and its metadata store, whose reads may be answered from an old state."""
        meta = StaleMeta(self.meta_server)
        return Log(meta, MemoryBlobStore(self.blob_server), self.runtime, all_engines()), meta

    async def append(self, *payloads: str, tp: TopicPartition = TP, writer: Writer | None = None) -> AppendResult:
        records = [Record(payload=payload.encode()) for payload in payloads]
        group = AppendGroup(topic=tp.topic, partition=tp.partition, records=records)
        [result] = await (writer or self.writer).append([group])
        if isinstance(result, LlogError):
            raise result
        return result

    async def payloads(self, tp: TopicPartition = TP) -> list[str]:
        """Everything that is readable from the log start on, each offset checked."""
        start, _ = await self.reader.bounds(tp)
        found: list[str] = []
        async for batch in self.reader.iter_from(tp, start):
            assert batch.start_offset == start + len(found)
            found += [value.decode() for value in batch.columns.values.to_pylist()]
        return found

    async def keys(self, tp: TopicPartition = TP) -> PartitionKeys:
        return await find_keys(self.log, tp)

    async def control(self, tp: TopicPartition = TP) -> Control:
        _, control = await self.reader.control(tp)
        return control

    async def change_control(self, tp: TopicPartition = TP, **changes: object) -> None:
        keys, control = await self.reader.control(tp)
        fields = {name: getattr(control, name) for name in control.__struct_fields__}
        await self.meta.put(keys.control, encode(Control(**(fields | changes))))

    async def cursor(self, tp: TopicPartition = TP) -> int:
        found = await self.meta.get((await self.keys(tp)).cursor)
        assert found is not None
        return decode(CompactionCursor, found.value, found.key).offset

    async def index(self, tp: TopicPartition = TP) -> list[EntrySpan]:
        return [span_of(found) async for found in scan(self.meta, (await self.keys(tp)).index)]

    async def shape(self, tp: TopicPartition = TP) -> list[tuple[int, int, Kind]]:
        return [(span.start_offset, span.end_offset, span.entry.kind) for span in await self.index(tp)]

    async def check_index(self, tp: TopicPartition = TP) -> None:
        """At rest: no gap, no overlap, no breadcrumb, and everything below the cursor compacted."""
        expected = None
        for span in await self.index(tp):
            assert expected is None or span.start_offset == expected
            expected = span.end_offset + 1
            assert (span.entry.kind is Kind.COMPACTED) == (span.end_offset < await self.cursor(tp))
        assert await self.meta.get((await self.keys(tp)).compaction) is None

    def damage(self, data_uri: str) -> None:
        data, put_ms = self.blob_server.blobs[data_uri]
        self.blob_server.blobs[data_uri] = (data[:-9] + bytes([data[-9] ^ 1]) + data[-8:], put_ms)
