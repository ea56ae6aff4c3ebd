"""The options of a log of segments."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

from llog.batch.format import Codec
from llog.errors import InvalidArgument

SEGMENT_BYTES_MAX: Final = (1 << 32) - 1
"""Positions of frames are 32 bits in the index. A frame begins below this, and is the last one if it ends above it."""


class Fsync(StrEnum):
    """When appended records are synced: before they are acknowledged (`always`), at intervals, or when the operating
    system does. Until then, they survive the end of this process, but not a power cut.
    """

    ALWAYS = "always"
    INTERVAL = "interval"
    OS = "os"


class SegmentOptions(msgspec.Struct, frozen=True, kw_only=True):
    segment_bytes: int = 1 << 30
    segment_ms: int = 7 * 86_400_000
    index_interval_bytes: int = 4 << 10
    index_interval_records: int | None = None
    frame_bytes: int = 1 << 20
    """The bytes of records, before compression, that one frame holds at most; it holds at least one record."""
    fsync: Fsync = Fsync.ALWAYS
    fsync_interval_ms: int = 1000
    ahead_bytes: int = 512 << 10
    """The most zeros by which a segment is extended at a time, with fsync `always`; 0 never extends it."""
    codec: Codec = Codec.NONE


def check_options(options: SegmentOptions) -> None:
    if not 1 <= options.segment_bytes <= SEGMENT_BYTES_MAX:
        raise InvalidArgument(f"segment_bytes must be 1 to {SEGMENT_BYTES_MAX}: {options.segment_bytes}")
    for name in ("segment_ms", "index_interval_bytes", "frame_bytes", "fsync_interval_ms"):
        if getattr(options, name) < 1:
            raise InvalidArgument(f"{name} must be 1 or more: {getattr(options, name)}")
    if options.ahead_bytes < 0:
        raise InvalidArgument(f"ahead_bytes must be 0 or more: {options.ahead_bytes}")
    if options.index_interval_records is not None and options.index_interval_records < 1:
        raise InvalidArgument(f"index_interval_records must be 1 or more: {options.index_interval_records}")
