"""Settings of topics of engine `disk`: their segment files, indexes and syncs."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from llog.config.upkeep import UpkeepSettings


class SegmentSettings(UpkeepSettings, frozen=True, kw_only=True):
    """How disk topics are written, in addition to the settings of upkeep."""

    segment_bytes: Annotated[
        int,
        Meta(
            description="The size at which a disk topic begins a new segment file. Retention removes whole segments: "
            "smaller ones free space sooner, at the cost of more files.",
            ge=1 << 10,
            le=4 << 30,
            extra={"unit": "size"},
        ),
    ] = 1 << 30
    segment_ms: Annotated[
        int,
        Meta(
            description="The age at which a disk topic begins a new segment file with its next append, however small "
            "the current file is.",
            ge=1000,
            extra={"unit": "duration"},
        ),
    ] = 7 * 86_400_000
    segment_index_bytes: Annotated[
        int,
        Meta(
            description="How many bytes of a disk topic one index entry covers. Lower it for quicker lookups and a "
            "larger index.",
            ge=64,
            le=16 << 20,
            extra={"unit": "size"},
        ),
    ] = 4 << 10
    segment_index_records: Annotated[
        int,
        Meta(
            description="How many records of a disk topic one index entry covers at most, if that is less than "
            "LLOG_SEGMENT_INDEX_BYTES. With 0, only the bytes count.",
            ge=0,
        ),
    ] = 0
    segment_frame_bytes: Annotated[
        int,
        Meta(
            description="How many bytes of records, before compression, a disk topic writes as one frame. A larger "
            "append becomes several frames, which recovery keeps or drops together. A read decodes whole frames: "
            "lower it to make reads of single records cheaper and appends a little slower.",
            ge=4 << 10,
            le=64 << 20,
            extra={"unit": "size"},
        ),
    ] = 1 << 20
    segment_fsync: Annotated[
        Literal["always", "interval", "os"],
        Meta(
            description="When a disk topic's records reach the disk. `always`: before an append is acknowledged. "
            "`interval`: every LLOG_SEGMENT_FSYNC_INTERVAL_MS; a power failure can lose records that were "
            "acknowledged since. `os`: when the operating system writes them."
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
            description="The most zeros that a disk topic writes ahead of its records with LLOG_SEGMENT_FSYNC=always, "
            "so that appends of up to a quarter of this size reach the disk sooner. Set it to 0 on file systems that "
            "do not write in place (Btrfs, ZFS).",
            ge=0,
            le=16 << 20,
            extra={"unit": "size"},
        ),
    ] = 512 << 10
