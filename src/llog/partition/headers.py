"""The headers of shared blobs, read alone."""

from __future__ import annotations

from llog.batch.shared import PREFIX_BYTES, BlobHeader, header_length, unpack_header
from llog.partition.log import Log


async def read_header(log: Log, blob: str) -> BlobHeader:
    """What a shared blob says that it holds; `BlobNotFound`, or `CorruptBatch` if its header is damaged or cut off."""
    start = await log.blobs.get_range(blob, 0, PREFIX_BYTES)
    return unpack_header(await log.blobs.get_range(blob, 0, header_length(start)))
