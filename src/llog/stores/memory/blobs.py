"""Blobs in memory, for tests and for the simulation: deterministic and without threads."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import AsyncIterator, Callable, Sequence

from llog.runtime import SystemRuntime
from llog.stores.blob_rules import (
    PAGE,
    blob_exists,
    blob_not_found,
    blob_too_short,
    check_name,
    check_prefix,
    check_range,
    required_blob_missing,
)
from llog.stores.blobs import BlobInfo, Buffer
from llog.stores.counting import OperationCounts


class MemoryBlobs:
    """The server, which outlives the clients that are opened on it, as a bucket does."""

    def __init__(self, now_ms: Callable[[], int] | None = None) -> None:
        self.now_ms = now_ms or SystemRuntime().now_ms
        self.names: list[str] = []
        """All names, sorted."""
        self.blobs: dict[str, tuple[bytes, int]] = {}
        """The content of each blob, and when it was put."""


class MemoryBlobStore:
    """`BlobStore` on a `MemoryBlobs`. No call waits, so each call, and each page of a listing, is one atomic step."""

    def __init__(self, server: MemoryBlobs | None = None, *, uri: str = "memory://blobs") -> None:
        self.uri = uri
        self.counts = OperationCounts()
        self.server = server or MemoryBlobs()
        self._required: str | None = None

    async def put(self, name: str, parts: Sequence[Buffer]) -> None:
        check_name(name)
        data = b"".join(parts)
        self._count("put", len(data))
        self._check_required()
        if name in self.server.blobs:
            raise blob_exists(name, self.uri)
        self.server.blobs[name] = (data, self.server.now_ms())
        insort(self.server.names, name)

    async def get(self, name: str) -> Buffer:
        data = self._content(name)
        self._count("get", len(data))
        return data

    async def get_range(self, name: str, offset: int, length: int) -> Buffer:
        return (await self.get_ranges(name, [(offset, length)]))[0]

    async def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        check_name(name)
        for offset, length in ranges:
            check_range(name, offset, length)
        if not ranges:
            return []
        data = self._content(name)
        self._count("range_get", sum(length for _, length in ranges))
        for offset, length in ranges:
            if offset + length > len(data):
                raise blob_too_short(name, offset, length, len(data))
        return [data[offset : offset + length] for offset, length in ranges]

    async def head(self, name: str) -> BlobInfo | None:
        check_name(name)
        self._count("head")
        return self._info(name) if name in self.server.blobs else None

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[list[BlobInfo]]:
        check_prefix(prefix)
        names = self.server.names
        size = PAGE
        while size == PAGE:
            self._count("list")
            first = max(bisect_right(names, start_after), bisect_left(names, prefix))
            page = [name for name in names[first : first + PAGE] if name.startswith(prefix)]
            size = len(page)
            if page:
                start_after = page[-1]
                yield [self._info(name) for name in page]

    async def delete_many(self, names: Sequence[str]) -> None:
        for name in names:
            check_name(name)
        for start in range(0, len(names), PAGE):
            self._count("delete")
            for name in names[start : start + PAGE]:
                if self.server.blobs.pop(name, None) is not None:
                    del self.server.names[bisect_left(self.server.names, name)]

    async def remove_unfinished_puts(self, before_ms: int) -> int:
        """Return 0: a put is one step."""
        return 0

    def require(self, name: str) -> None:
        self._required = check_name(name)

    async def check(self) -> None:
        self._check_required()

    async def close(self) -> None:
        """Do nothing: the blobs belong to the server."""

    def _check_required(self) -> None:
        if self._required is not None and self._required not in self.server.blobs:
            raise required_blob_missing(self.uri, self._required)

    def _content(self, name: str) -> bytes:
        check_name(name)
        if name not in self.server.blobs:
            raise blob_not_found(name, self.uri)
        return self.server.blobs[name][0]

    def _info(self, name: str) -> BlobInfo:
        data, put_ms = self.server.blobs[name]
        return BlobInfo(name, len(data), put_ms)

    def _count(self, operation: str, size: int = 0) -> None:
        self.counts.add(operation, size, 0.0)
