"""The bytes that index entries and extents lead to: in a blob, or in the entry itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from llog.log.inline import from_inline, is_inline
from llog.log.log import Log
from llog.stores.blobs import Buffer


class ByteRange(Protocol):
    """The bytes that hold records: of an index entry, or of an extent of a snapshot."""

    @property
    def data_uri(self) -> str: ...
    @property
    def byte_offset(self) -> int: ...
    @property
    def byte_length(self) -> int: ...
    @property
    def encoding(self) -> str: ...


async def read_bytes(log: Log, byte_range: ByteRange) -> Buffer:
    """Return the bytes; raise `BlobNotFound`, or `CorruptBatch` if the blob is too short."""
    return (await read_ranges(log, byte_range.data_uri, [(byte_range.byte_offset, byte_range.byte_length)]))[0]


async def read_ranges(log: Log, data_uri: str, ranges: Sequence[tuple[int, int]]) -> Sequence[Buffer]:
    """Return the bytes at these offsets and lengths of one address, like `BlobStore.get_ranges`.

    Inline bytes are always one whole batch, which needs no request.
    """
    if is_inline(data_uri):
        return [from_inline(data_uri)] * len(ranges)
    return await log.blobs.get_ranges(log.blob_name(data_uri), ranges)


def location_of(byte_range: ByteRange) -> str:
    """Return where the bytes are, for error messages."""
    if is_inline(byte_range.data_uri):
        return "the index entry itself"
    last_byte = byte_range.byte_offset + byte_range.byte_length
    return f"blob {byte_range.data_uri} (bytes {byte_range.byte_offset} to {last_byte})"
