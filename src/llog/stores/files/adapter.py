"""How llog opens a blob store in a directory of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from llog.stores.addresses import Address, parse_path
from llog.stores.blobs import BlobStore
from llog.stores.registry import BlobAdapter


def _open(address: Address, settings: object) -> BlobStore:
    from llog.stores.files.blobs import FileBlobStore

    return FileBlobStore(Path(address.path))


BLOB_ADAPTER: Final = BlobAdapter(parse_path, _open)
