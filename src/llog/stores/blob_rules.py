"""The rules and the errors that all blob stores share: a name that is valid in one store is valid in every other."""

from __future__ import annotations

from llog.errors import BlobExists, BlobNotFound, CorruptBatch, InvalidArgument, StoreUnavailable

PAGE = 1000
"""Blobs in a page of a listing, and names in a delete request."""
NAME_BYTES_MAX = 1024
SEGMENT_BYTES_MAX = 255
TEMPORARY = ".tmp-"
"""The beginning of the names of half-written local files. No segment of a blob's name may begin so."""


def check_name(name: str) -> str:
    """Return the name, or raise `InvalidArgument`."""
    if not name:
        raise InvalidArgument("the blob name is empty: give it at least one segment")
    _check_text(name)
    for segment in name.split("/"):
        if segment in ("", ".", ".."):
            raise InvalidArgument(
                f"the blob name {name!r} has the segment {segment!r}: names are relative, without '.', '..' or "
                "empty segments"
            )
        if segment.startswith(TEMPORARY):
            raise InvalidArgument(
                f"the blob name {name!r} has a segment that begins with {TEMPORARY!r}: choose another name"
            )
        if len(segment.encode()) > SEGMENT_BYTES_MAX:
            raise InvalidArgument(
                f"a segment of the blob name {name!r} has {len(segment.encode())} bytes: at most {SEGMENT_BYTES_MAX} "
                "are allowed"
            )
    return name


def check_prefix(prefix: str) -> str:
    """Return the prefix, which is any beginning of a valid name or empty, or raise `InvalidArgument`."""
    if prefix:
        # The last segment may be cut anywhere ("." of ".config"): one more character makes it valid.
        check_name(prefix + "x" if len(prefix) < NAME_BYTES_MAX else prefix)
    return prefix


def check_range(name: str, offset: int, length: int) -> None:
    if offset < 0 or length < 0:
        raise InvalidArgument(
            f"range of blob {name!r} has offset {offset} and length {length}: neither may be negative"
        )


def blob_exists(name: str, uri: str) -> BlobExists:
    return BlobExists(f"blob {name!r} is already in {uri}: blobs are immutable, choose another name")


def blob_not_found(name: str, uri: str) -> BlobNotFound:
    return BlobNotFound(f"blob {name!r} is not in {uri}: it was never put, or has been deleted")


def blob_too_short(name: str, offset: int, length: int, size: int) -> CorruptBatch:
    return CorruptBatch(
        f"blob {name!r} has {size} bytes, but {length} bytes from {offset} were requested: it was cut short or replaced"
    )


def required_blob_missing(uri: str, name: str) -> StoreUnavailable:
    """Return the error of a put after the blob that `BlobStore.require` named has disappeared."""
    return StoreUnavailable(
        f"the blob store {uri} has lost the blob {name!r}, which it had from the beginning: the store was deleted, "
        "replaced or unmounted while this process had it open, so nothing was written. Restore it, or restart this "
        "process with another store"
    )


def _check_text(name: str) -> None:
    try:
        encoded = name.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(f"the blob name {name!r} is not valid Unicode: it holds a lone surrogate") from None
    if len(encoded) > NAME_BYTES_MAX:
        raise InvalidArgument(
            f"the blob name {name[:64]!r}... has {len(encoded)} bytes: at most {NAME_BYTES_MAX} are allowed"
        )
    # Object stores answer listings in XML, which cannot carry control characters.
    if any(byte < 0x20 or byte == 0x7F for byte in encoded) or "\\" in name:
        raise InvalidArgument(f"the blob name {name!r} has a control character or a backslash: leave it out")
