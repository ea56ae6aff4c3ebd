"""The port to the blob store: immutable blobs, which are put once and read in ranges.

Every adapter keeps these promises, and one conformance suite (`tests/conformance/test_blobs.py`) asks each adapter for
them:

- **Names** are '/'-separated and relative to the store's root; `blob_rules` has the rules.
- **Blobs are immutable.** A put never replaces a blob, and a reader sees a whole blob or none.
- **Durability.** When a put returns, the blob is durable, and every later read and listing finds it.
- **Failure.** A put that raises `StoreUnavailable` did not happen and never will. A put that raises `OutcomeUnknown`
  may have happened, or may still happen.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple, Protocol

Buffer = bytes | bytearray | memoryview


class BlobInfo(NamedTuple):
    """A blob without its bytes."""

    name: str
    size: int
    modified_ms: int
    """When the blob was put, by the store's own clock."""


class BlobStore(Protocol):
    """A client of a blob store. Every operation may raise `StoreUnavailable`, and `InvalidArgument` for a bad name."""

    uri: str
    """The store's root, such as `s3://bucket/prefix`, without credentials."""

    async def put(self, name: str, parts: Sequence[Buffer]) -> None:
        """Create the blob from the concatenated parts; raise `BlobExists` if a blob has the name.

        After a lost answer, the store compares what it finds under the name: if these bytes are there, the put
        succeeded.
        """
        ...

    async def get(self, name: str) -> Buffer:
        """Return the whole blob, or raise `BlobNotFound`."""
        ...

    async def get_range(self, name: str, offset: int, length: int) -> Buffer:
        """Return `length` bytes from `offset`; raise `BlobNotFound`, or `CorruptBatch` if the blob is shorter."""
        ...

    async def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        """Return what `get_range` returns for each (offset, length), with one request for ranges that are near."""
        ...

    async def head(self, name: str) -> BlobInfo | None:
        """Return the blob's size and time, or None if it does not exist."""
        ...

    def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[list[BlobInfo]]:
        """Yield pages of the blobs whose names begin with `prefix`, in the order of names, after `start_after`."""
        ...

    async def delete_many(self, names: Sequence[str]) -> None:
        """Delete these blobs. A blob that does not exist is no error."""
        ...

    async def remove_unfinished_puts(self, before_ms: int) -> int:
        """Remove what puts of killed processes have left behind before this time, and return the number of pieces.

        A put that began before and is still under way raises `StoreUnavailable`.
        """
        ...

    def require(self, name: str) -> None:
        """Have every later put raise `StoreUnavailable` if this blob, which exists now, has disappeared.

        Its loss shows that the store was deleted or replaced, and that other blobs are gone, too. A store in which the
        check costs a request checks only every few seconds.
        """
        ...

    async def check(self) -> None:
        """Raise `StoreUnavailable` if the store cannot be reached, or if a put would fail as far as the store can find
        out without putting a blob.
        """
        ...

    async def close(self) -> None:
        """Let go of connections and threads."""
        ...
