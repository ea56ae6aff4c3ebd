"""What an append puts into the blob store, seen on its way: the bytes of every partition as they are stored, and whose
they are.

The offsets come from the append's results, the directory and the bytes from the blob that it put: nothing is asked for
twice, and nothing is made up. An append that put a partition's records twice (its first blob was too old) is left out:
which of them counts is not told.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Sequence
from contextvars import ContextVar
from itertools import accumulate
from typing import Protocol

from llog.batch.columns import Buffer
from llog.batch.format import ENCODING
from llog.batch.shared import Body, unpack_header
from llog.engines.port import AppendResult, Group
from llog.errors import CorruptBatch, LlogError
from llog.log.keys import WAL
from llog.model import TopicPartition
from llog.stores.blobs import BlobInfo, BlobStore

Keep = Callable[[tuple[str, int], int, Buffer], None]
"""Takes a directory and a partition, the first offset, and the batch as it is stored."""

_seen: ContextVar[list[Sequence[Buffer]] | None] = ContextVar("llog_uploads", default=None)


class Appends(Protocol):
    async def append(self, groups: Sequence[Group]) -> list[AppendResult | LlogError]: ...


class SeenAppends:
    """Appends through `appends`, which puts its blobs into a `SeenBlobs`, and hands what was appended to `keep`."""

    def __init__(self, appends: Appends, keep: Keep) -> None:
        self._appends = appends
        self._keep = keep

    async def append(self, groups: Sequence[Group]) -> list[AppendResult | LlogError]:
        uploads: list[Sequence[Buffer]] = []
        token = _seen.set(uploads)
        try:
            results = await self._appends.append(groups)
        finally:
            _seen.reset(token)
        bodies = _bodies(uploads)
        for result in results:
            if isinstance(result, AppendResult) and not result.repeated:
                found = bodies.get(TopicPartition(result.topic, result.partition), ())
                if len(found) == 1 and found[0][0].msg_count == result.end_offset - result.start_offset + 1:
                    body, parts = found[0]
                    if body.encoding == ENCODING:
                        data = parts.between(body.body_offset, body.body_length)
                        self._keep((body.directory, body.partition), result.start_offset, data)
        return results


class SeenBlobs:
    """The blob store, with an eye on the puts of appends."""

    def __init__(self, blobs: BlobStore) -> None:
        self._blobs = blobs
        self.uri = blobs.uri

    async def put(self, name: str, parts: Sequence[Buffer]) -> None:
        await self._blobs.put(name, parts)
        uploads = _seen.get()
        if uploads is not None and name.startswith(WAL):
            uploads.append(parts)

    async def get(self, name: str) -> Buffer:
        return await self._blobs.get(name)

    async def get_range(self, name: str, offset: int, length: int) -> Buffer:
        return await self._blobs.get_range(name, offset, length)

    async def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        return await self._blobs.get_ranges(name, ranges)

    async def head(self, name: str) -> BlobInfo | None:
        return await self._blobs.head(name)

    def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[list[BlobInfo]]:
        return self._blobs.list(prefix, start_after=start_after)

    async def delete_many(self, names: Sequence[str]) -> None:
        await self._blobs.delete_many(names)

    def require(self, name: str) -> None:
        self._blobs.require(name)

    async def check(self) -> None:
        await self._blobs.check()

    async def close(self) -> None:
        await self._blobs.close()


class _Parts:
    """The parts of a blob as one run of bytes."""

    def __init__(self, parts: Sequence[Buffer]) -> None:
        self._views = [memoryview(part).cast("B") for part in parts]
        self._ends = [*accumulate(map(len, self._views))]

    def between(self, start: int, length: int) -> bytes:
        taken: list[memoryview] = []
        place = bisect_right(self._ends, start)
        while length > 0 and place < len(self._views):
            view = self._views[place]
            first = start - (self._ends[place] - len(view))
            taken.append(view[first : first + length])
            start, length = start + len(taken[-1]), length - len(taken[-1])
            place += 1
        return b"".join(taken)


def _bodies(uploads: Sequence[Sequence[Buffer]]) -> dict[TopicPartition, list[tuple[Body, _Parts]]]:
    bodies: dict[TopicPartition, list[tuple[Body, _Parts]]] = {}
    for parts in uploads:
        try:
            header = unpack_header(parts[0])
        except CorruptBatch:
            continue  # no shared blob: nothing to learn from it
        whole = _Parts(parts)
        for body in header.partitions:
            bodies.setdefault(TopicPartition(body.topic, body.partition), []).append((body, whole))
    return bodies
