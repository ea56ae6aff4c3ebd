"""The port to an object store: immutable blobs, created once, read in ranges.

Names are '/'-separated and relative to the store's root. A put that returned is durable; a put never replaces a blob.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple, Protocol

Buffer = bytes | bytearray | memoryview


class BlobInfo(NamedTuple):
    name: str
    size: int
    modified_ms: int
    """The store's own clock: when the blob was put."""


class BlobStore(Protocol):
    uri: str
    """Where names are rooted, e.g. `s3://bucket/prefix`: never with credentials."""

    async def put(self, name: str, parts: Sequence[Buffer]) -> None:
        """Creates the blob from the concatenated parts; `BlobExists` if the name is taken.

        A lost answer is settled by looking at what is there (size and content): if it is these bytes, the put
        succeeded.
        """
        ...

    async def get(self, name: str) -> Buffer:
        """The whole blob; `BlobNotFound`."""
        ...

    async def get_range(self, name: str, offset: int, length: int) -> Buffer:
        """Exactly `length` bytes from `offset`; `BlobNotFound`, or `CorruptBatch` if the blob is shorter."""
        ...

    async def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        """Several (offset, length) ranges of one blob, near ones fetched together."""
        ...

    async def head(self, name: str) -> BlobInfo | None: ...

    def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[list[BlobInfo]]:
        """Pages of blobs whose names start with `prefix`, in the order of their names, after `start_after`."""
        ...

    async def delete_many(self, names: Sequence[str]) -> None:
        """Deletes these; those that are not there are no error."""
        ...

    def require(self, name: str) -> None:
        """From now on a put fails with `StoreUnavailable` if this blob, which is there, is gone: then all others are,
        too.

        A store where looking costs a request looks every few seconds only.
        """
        ...

    async def check(self) -> None:
        """`StoreUnavailable` if the store cannot be reached, or a put would fail as far as can be told without one."""
        ...

    async def close(self) -> None: ...
