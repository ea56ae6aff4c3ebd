"""The doctor tells a store that works from one that only says so."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from llog.cli.doctor import examine
from llog.engines.registry import all_engines
from llog.log.log import Log
from llog.runtime import SystemRuntime
from llog.stores.blobs import BlobInfo, Buffer
from llog.stores.memory.blobs import MemoryBlobs, MemoryBlobStore
from llog.stores.memory.meta import MemoryMetaStore


class _OverwritingBlobs(MemoryBlobStore):
    """Ignores that a blob is there already, as a server does that knows no conditional puts."""

    async def put(self, name: str, parts: Sequence[Buffer]) -> None:
        await self.delete_many([name])
        await super().put(name, parts)


class _EmptyListingBlobs(MemoryBlobStore):
    """Lists nothing yet, as a store does that is only eventually consistent."""

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[list[BlobInfo]]:
        return
        yield


class _UnconditionalMeta(MemoryMetaStore):
    """Takes every put, whatever version it expects."""

    async def put(self, key: str, value: bytes, *, expected: int | None = None, ephemeral: bool = False) -> int:
        return await super().put(key, value, ephemeral=ephemeral)


async def _failed_checks(meta: MemoryMetaStore, blobs: MemoryBlobStore) -> set[tuple[str, str]]:
    findings = await examine(Log(meta, blobs, SystemRuntime(), all_engines()))
    return {(finding.store, finding.check) for finding in findings if not finding.ok}


async def test_stores_that_keep_their_promises_pass() -> None:
    assert await _failed_checks(MemoryMetaStore(), MemoryBlobStore()) == set()


async def test_a_blob_store_that_replaces_blobs_is_found_out() -> None:
    assert await _failed_checks(MemoryMetaStore(), _OverwritingBlobs()) == {
        ("blobs", "a second create is refused"),
        ("blobs", "one create wins under contention"),
    }


async def test_a_blob_store_that_lists_late_is_found_out() -> None:
    assert await _failed_checks(MemoryMetaStore(), _EmptyListingBlobs()) == {("blobs", "list right after put")}


async def test_a_blob_store_with_another_clock_is_found_out() -> None:
    assert await _failed_checks(MemoryMetaStore(), MemoryBlobStore(MemoryBlobs(lambda: 0))) == {
        ("blobs", "its clock is near ours")
    }


async def test_a_metadata_store_without_conditions_is_found_out() -> None:
    assert await _failed_checks(_UnconditionalMeta(), MemoryBlobStore()) == {
        ("meta", "compare and swap"),
        ("meta", "one create wins under contention"),
    }
