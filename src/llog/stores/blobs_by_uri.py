"""The blobs that metadata names by full address, for readers that have no blob store of their own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final, NoReturn

from llog.errors import ConfigurationError, WrongStore
from llog.stores.blobs import BlobInfo, BlobStore, Buffer
from llog.stores.counting import OperationCounts, counted

STORES_MAX: Final = 16
"""Buckets that one reader opens: more of them are no log, but damaged or forged metadata."""


class BlobsByUri:
    """`BlobStore` whose names are full addresses, `s3://bucket/path/of/the/blob`. It reads, and refuses everything
    else.

    `open_bucket` gets `scheme://bucket` and returns the store that is rooted there; a `ConfigurationError` says that
    there is none.
    """

    uri = ""

    def __init__(self, open_bucket: Callable[[str], BlobStore]) -> None:
        self.counts = OperationCounts()
        self._open = open_bucket
        self._stores: dict[str, BlobStore] = {}

    async def get(self, name: str) -> Buffer:
        store, path = self._place(name)
        with counted(self.counts, "get") as call:
            found = await store.get(path)
            call.size = len(found)
            return found

    async def get_range(self, name: str, offset: int, length: int) -> Buffer:
        return (await self.get_ranges(name, [(offset, length)]))[0]

    async def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        store, path = self._place(name)
        with counted(self.counts, "get") as call:
            call.size = sum(length for _, length in ranges)
            return await store.get_ranges(path, ranges)

    async def head(self, name: str) -> BlobInfo | None:
        store, path = self._place(name)
        with counted(self.counts, "head"):
            found = await store.head(path)
        return None if found is None else found._replace(name=name)

    async def put(self, name: str, parts: Sequence[Buffer]) -> None:
        _refuse(f"put the blob {name!r}")

    def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[list[BlobInfo]]:
        _refuse("list blobs")

    async def delete_many(self, names: Sequence[str]) -> None:
        _refuse("delete blobs")

    def require(self, name: str) -> None:
        """Nothing is put here."""

    async def check(self) -> None:
        for store in self._stores.values():
            await store.check()

    async def close(self) -> None:
        for store in self._stores.values():
            await store.close()

    def _place(self, name: str) -> tuple[BlobStore, str]:
        scheme, separator, rest = name.partition("://")
        bucket, slash, path = rest.partition("/")
        if not (separator and bucket and slash and path):
            raise ConfigurationError(
                f"the metadata names the blob {name!r} without its store, and this process has none of its own: "
                "set LLOG_BLOBS"
            )
        root = f"{scheme}://{bucket}"
        if root not in self._stores:
            if len(self._stores) >= STORES_MAX:
                raise WrongStore(
                    f"the metadata names {name}, in the bucket after {STORES_MAX} others: run `llog verify`"
                )
            self._stores[root] = self._open(root)
        return self._stores[root], path


def _refuse(what: str) -> NoReturn:
    raise ConfigurationError(
        f"this process has no blob store of its own and cannot {what}: set LLOG_S3_BUCKET or LLOG_BLOBS"
    )
