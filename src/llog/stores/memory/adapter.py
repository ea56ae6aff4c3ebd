"""How llog opens stores in memory: by name, for as long as the process lives."""

from __future__ import annotations

from typing import Final

from llog.stores.addresses import Address, refuse_credentials, refuse_parameters
from llog.stores.blobs import BlobStore
from llog.stores.memory.blobs import MemoryBlobs, MemoryBlobStore
from llog.stores.memory.meta import MemoryMeta, MemoryMetaStore
from llog.stores.meta import MetaStore
from llog.stores.registry import BlobAdapter, MetaAdapter, has_key, run_in_own_loop

# One per name, so that every caller in this process that opens a name gets the same log.
_meta_servers: Final[dict[str, MemoryMeta]] = {}
_blob_servers: Final[dict[str, MemoryBlobs]] = {}


def _parse(variable: str, url: str) -> Address:
    refuse_credentials(variable, url)
    refuse_parameters(variable, url)
    return Address("memory", url.partition("://")[2], "")


async def _open_meta(address: Address, settings: object) -> MetaStore:
    return MemoryMetaStore(_meta_servers.setdefault(address.authority, MemoryMeta()))


def _has_key(address: Address, settings: object, key: str) -> bool:
    return run_in_own_loop(has_key(_open_meta(address, settings), key))


def _open_blobs(address: Address, settings: object) -> BlobStore:
    name = f"{address.authority}/{address.path}" if address.path else address.authority
    return MemoryBlobStore(_blob_servers.setdefault(name, MemoryBlobs()), uri=f"memory://{name}")


META_ADAPTER: Final = MetaAdapter(_parse, _open_meta, _has_key, is_local=True)
BLOB_ADAPTER: Final = BlobAdapter(_parse, _open_blobs)
