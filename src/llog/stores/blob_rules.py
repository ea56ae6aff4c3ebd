"""What every blob store holds to: which names and ranges are valid.

One rule for all stores, so that a name that one takes is taken by every other.
"""

from __future__ import annotations

from llog.errors import CorruptBatch, InvalidArgument, StoreUnavailable

PAGE = 1000
"""Blobs to a page of a listing, and names to a delete request."""
NAME_BYTES_MAX = 1024
SEGMENT_BYTES_MAX = 255
TEMPORARY = ".tmp-"
"""How the names of half-written local files start; no segment of a blob's name may."""


def check_name(name: str) -> str:
    """The name itself, or `InvalidArgument`."""
    if not name:
        raise InvalidArgument("a blob's name is empty: give it at least one segment")
    _check_text(name)
    for segment in name.split("/"):
        if segment in ("", ".", ".."):
            raise InvalidArgument(
                f"the blob name {name!r} has the segment {segment!r}: names are relative, without '.', '..' or "
                "empty segments"
            )
        if segment.startswith(TEMPORARY):
            raise InvalidArgument(
                f"the blob name {name!r} has a segment that starts with {TEMPORARY!r}: choose another"
            )
        if len(segment.encode()) > SEGMENT_BYTES_MAX:
            raise InvalidArgument(f"a segment of the blob name {name!r} is longer than {SEGMENT_BYTES_MAX} bytes")
    return name


def check_prefix(prefix: str) -> str:
    """A prefix is any beginning of a valid name, the empty one included; else `InvalidArgument`."""
    if prefix:
        # The last segment may be cut anywhere ("." of ".config"): one more character completes it.
        check_name(prefix + "x" if len(prefix) < NAME_BYTES_MAX else prefix)
    return prefix


def check_range(name: str, offset: int, length: int) -> None:
    if offset < 0 or length < 0:
        raise InvalidArgument(f"range ({offset}, {length}) of blob {name!r}: offset and length must not be negative")


def too_short(name: str, offset: int, length: int, size: int) -> CorruptBatch:
    return CorruptBatch(
        f"blob {name!r} has {size} bytes, but {length} bytes from {offset} were asked for: it was cut short or replaced"
    )


def lost(uri: str, name: str) -> StoreUnavailable:
    return StoreUnavailable(
        f"the blob store {uri} has lost the blob {name!r}, which is there from the beginning: the store was "
        "deleted, replaced or unmounted "
        "while this process had it open, so nothing was written. Bring it back as it was, or restart this process "
        "on another one"
    )


def _check_text(name: str) -> None:
    try:
        encoded = name.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(f"the blob name {name!r} is not valid Unicode") from None
    if len(encoded) > NAME_BYTES_MAX:
        raise InvalidArgument(f"a blob name of {len(encoded)} bytes is too long: at most {NAME_BYTES_MAX}")
    # Object stores list in XML, which cannot carry control characters.
    if any(byte < 0x20 or byte == 0x7F for byte in encoded) or "\\" in name:
        raise InvalidArgument(f"the blob name {name!r} has a control character or a backslash: leave it out")
