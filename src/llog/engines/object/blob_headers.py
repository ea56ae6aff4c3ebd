"""Reading the headers of shared blobs without their bodies."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from llog.batch.shared import PREFIX_BYTES, BlobHeader, Body, header_length, unpack_header
from llog.log.log import Log

_BODIES_MAX: Final = 50_000
_AT_ONCE_BYTES: Final = 64 << 10


async def read_header(log: Log, blob: str) -> BlobHeader:
    """Return the header of a shared blob; raise `BlobNotFound`, or `CorruptBatch` if it is damaged or cut off."""
    start = await log.blobs.get_range(blob, 0, PREFIX_BYTES)
    return unpack_header(await log.blobs.get_range(blob, 0, header_length(start)))


class BlobHeaders:
    """Looks up bodies in blob headers, and caches the latest headers, because partitions share blobs."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._bodies: OrderedDict[str, dict[int, Body]] = OrderedDict()
        self._count = 0

    async def body_at(self, blob: str, byte_offset: int) -> Body | None:
        """Return the body that begins there according to the header, or None; raise the errors of `read_header`."""
        bodies = self._bodies.get(blob)
        if bodies is None:
            bodies = {body.body_offset: body for body in (await self._read(blob, byte_offset)).partitions}
            self._bodies[blob] = bodies
            self._count += len(bodies)
            while self._count > _BODIES_MAX and len(self._bodies) > 1:
                self._count -= len(self._bodies.popitem(last=False)[1])
        return bodies.get(byte_offset)

    async def _read(self, blob: str, byte_offset: int) -> BlobHeader:
        if byte_offset > _AT_ONCE_BYTES:
            return await read_header(self._log, blob)
        return unpack_header(await self._log.blobs.get_range(blob, 0, byte_offset))
