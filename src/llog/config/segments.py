"""Settings of topics of engine `disk`: their segment files, indexes and syncs."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from llog.config.upkeep import UpkeepSettings


class SegmentSettings(UpkeepSettings, frozen=True, kw_only=True):
    """How disk topics are written, added to the settings before them."""

    segment_bytes: Annotated[
        int,
        Meta(
            description="Size at which a disk topic begins a new segment file. Retention removes whole segments.",
            ge=1 << 10,
            le=4 << 30,
            extra={"unit": "size"},
        ),
    ] = 1 << 30
    segment_ms: Annotated[
        int,
        Meta(
            description="Age at which a disk topic begins a new segment file with the next append, however small "
            "the old one is.",
            ge=1000,
            extra={"unit": "duration"},
        ),
    ] = 7 * 86_400_000
    segment_index_bytes: Annotated[
        int,
        Meta(
            description="A disk topic's index has one entry for so many bytes: fewer make it larger, and lookups "
            "quicker.",
            ge=64,
            le=16 << 20,
            extra={"unit": "size"},
        ),
    ] = 4 << 10
    segment_index_records: Annotated[
        int,
        Meta(
            description="A disk topic's index also has an entry for so many records, where they take fewer bytes than "
            "LLOG_SEGMENT_INDEX_BYTES; 0: only bytes count.",
            ge=0,
        ),
    ] = 0
    segment_frame_bytes: Annotated[
        int,
        Meta(
            description="Bytes of records, before compression, that a disk topic writes as one frame; a larger "
            "append becomes several "
            "frames, which recovery keeps or drops together. A frame is what a read decodes at least: fewer bytes "
            "make reads of "
            "single records cheaper, and appends a little slower.",
            ge=4 << 10,
            le=64 << 20,
            extra={"unit": "size"},
        ),
    ] = 1 << 20
    segment_fsync: Annotated[
        Literal["always", "interval", "os"],
        Meta(
            description="When a disk topic's records are on the disk. `always`: before an append is answered. "
            "`interval`: every "
            "LLOG_SEGMENT_FSYNC_INTERVAL_MS; a power cut can take what was answered since. `os`: when the "
            "operating system likes."
        ),
    ] = "always"
    segment_fsync_interval_ms: Annotated[
        int,
        Meta(
            description="How often a disk topic is synced with LLOG_SEGMENT_FSYNC=interval.",
            ge=1,
            le=3_600_000,
            extra={"unit": "duration"},
        ),
    ] = 1000
    segment_ahead_bytes: Annotated[
        int,
        Meta(
            description="With LLOG_SEGMENT_FSYNC=always, the file of a disk topic is made longer by up to so many "
            "zeros at a time: appends "
            "of up to a quarter of that are on the disk sooner. 0: never, as suits file systems that do not write "
            "in place "
            "(Btrfs, ZFS).",
            ge=0,
            le=16 << 20,
            extra={"unit": "size"},
        ),
    ] = 512 << 10
