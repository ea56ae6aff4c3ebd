"""Blobs by the full addresses in the metadata, for readers whose settings name no blob store."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final, NoReturn

from llog.errors import ConfigurationError, WrongStore
from llog.stores.blobs import BlobInfo, BlobStore, Buffer
from llog.stores.counting import OperationCounts, measure

STORES_MAX: Final = 16
"""Buckets that one reader opens. More of them would be a sign of damaged or forged metadata."""


class BlobsByUri:
    """A `BlobStore` for reading only, whose names are full addresses such as `s3://bucket/path/of/the/blob`.

    `open_bucket` gets `scheme://bucket` and returns the store whose root that is, or raises `ConfigurationError`.
    """

    uri = ""

    def __init__(self, open_bucket: Callable[[str], BlobStore]) -> None:
        self.counts = OperationCounts()
        self._open = open_bucket
        self._stores: dict[str, BlobStore] = {}

    async def get(self, name: str) -> Buffer:
        store, path = self._locate(name)
        with measure(self.counts, "get") as call:
            data = await store.get(path)
            call.size = len(data)
            return data

    async def get_range(self, name: str, offset: int, length: int) -> Buffer:
        return (await self.get_ranges(name, [(offset, length)]))[0]

    async def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        store, path = self._locate(name)
        with measure(self.counts, "range_get") as call:
            call.size = sum(length for _, length in ranges)
            return await store.get_ranges(path, ranges)

    async def head(self, name: str) -> BlobInfo | None:
        store, path = self._locate(name)
        with measure(self.counts, "head"):
            info = await store.head(path)
        return None if info is None else info._replace(name=name)

    async def put(self, name: str, parts: Sequence[Buffer]) -> None:
        _refuse(f"put the blob {name!r}")

    def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[list[BlobInfo]]:
        _refuse("list blobs")

    async def delete_many(self, names: Sequence[str]) -> None:
        _refuse("delete blobs")

    async def remove_unfinished_puts(self, before_ms: int) -> int:
        _refuse("remove unfinished puts")

    def require(self, name: str) -> None:
        """Nothing to check: this store puts no blobs."""

    async def check(self) -> None:
        for store in self._stores.values():
            await store.check()

    async def close(self) -> None:
        for store in self._stores.values():
            await store.close()

    def _locate(self, name: str) -> tuple[BlobStore, str]:
        """Return the store of the blob's bucket, which the first use opens, and the blob's name in it."""
        scheme, separator, rest = name.partition("://")
        bucket, slash, path = rest.partition("/")
        if not (separator and bucket and slash and path):
            raise ConfigurationError(
                f"the metadata names the blob {name!r} without its store, and the settings name none: set LLOG_BLOBS"
            )
        root = f"{scheme}://{bucket}"
        if root not in self._stores:
            if len(self._stores) >= STORES_MAX:
                raise WrongStore(
                    f"the metadata names {name}, in one more bucket than the {STORES_MAX} that a reader opens: run "
                    "`llog verify`"
                )
            self._stores[root] = self._open(root)
        return self._stores[root], path


def _refuse(what: str) -> NoReturn:
    raise ConfigurationError(
        f"the settings name no blob store, so this process cannot {what}: set LLOG_S3_BUCKET or LLOG_BLOBS"
    )
