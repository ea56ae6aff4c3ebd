"""Settings of compaction and collection."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from llog.config.stores import StoreSettings


class UpkeepSettings(StoreSettings, frozen=True, kw_only=True):
    """How a log is compacted and collected, in addition to the settings of its stores."""

    compactor_id: Annotated[
        str | None,
        Meta(
            description="The name of a compactor in its claims. It shows people which process compacts a partition.",
            extra={"default": "LLOG_CLIENT_IDENTIFIER"},
        ),
    ] = None
    compactor_idle_sleep_ms: Annotated[
        int,
        Meta(
            description="How long a compactor (`llog compactor`, `llog up`) waits between two looks at all partitions. "
            "Lower it to compact sooner; raise it for fewer requests to the metadata store, since a look reads one "
            "key range of every partition.",
            ge=1,
            le=86_400_000,
            extra={"unit": "duration"},
        ),
    ] = 30_000
    compactor_idle_jitter_ms: Annotated[
        int,
        Meta(
            description="The most random time that is added to LLOG_COMPACTOR_IDLE_SLEEP_MS, so that many processes "
            "do not look at the same moment.",
            ge=0,
            le=3_600_000,
            extra={"unit": "duration"},
        ),
    ] = 3000
    compactor_error_sleep_ms: Annotated[
        int,
        Meta(
            description="How long a compactor waits after a look at all partitions that failed, for example because a "
            "store was out of reach, and how long it leaves a partition alone whose compaction failed.",
            ge=1,
            le=86_400_000,
            extra={"unit": "duration"},
        ),
    ] = 30_000
    compactor_error_jitter_ms: Annotated[
        int,
        Meta(
            description="The most random time that is added to LLOG_COMPACTOR_ERROR_SLEEP_MS.",
            ge=0,
            le=3_600_000,
            extra={"unit": "duration"},
        ),
    ] = 3000
    compactor_targets: Annotated[
        str | None,
        Meta(
            description="The partitions that a compactor compacts before the others that lag: `topic:partition`, or "
            "`topic` for all partitions of a topic, separated by commas. It discovers and compacts all others, too.",
            extra={"default": "none: all partitions are equal"},
        ),
    ] = None
    compactor_bind_host: Annotated[
        str, Meta(description="The address that `llog compactor` listens on, for health and metrics.")
    ] = "127.0.0.1"
    compactor_port: Annotated[
        int,
        Meta(description="The port that `llog compactor` listens on; 0 takes a free one.", ge=0, le=65_535),
    ] = 8081
    compactor_workers: Annotated[
        int,
        Meta(
            description="How many workers a compactor has. Each compacts up to 64 neighbouring partitions at a time, "
            "which share the blobs that it reads. Raise it for a log with many busy partitions.",
            ge=1,
            le=256,
        ),
    ] = 4
    compactor_discovery_interval_ms: Annotated[
        int,
        Meta(
            description="How often a compactor reads the catalog for new topics and partitions.",
            ge=100,
            le=86_400_000,
            extra={"unit": "duration"},
        ),
    ] = 30_000
    compactor_linger_ms: Annotated[
        int,
        Meta(
            description="How long a compactor lets a few small appends to a partition wait for more, so that a "
            "partition which grows slowly becomes few blobs. 64 appends, 64 KiB inline or a quarter of "
            "LLOG_COMPACTOR_MAX_BYTES_PER_RUN do not wait. `llog compact` and `llog compactor --once` do not wait "
            "either.",
            ge=0,
            le=86_400_000,
            extra={"unit": "duration"},
        ),
    ] = 600_000
    compactor_max_offsets_per_run: Annotated[
        int, Meta(description="The most records that one compaction joins into a blob.", ge=1, le=100_000_000)
    ] = 1_000_000
    compactor_max_bytes_per_run: Annotated[
        int,
        Meta(
            description="The most bytes that one compaction joins into a blob. A compaction needs about twice this in "
            "memory.",
            ge=1 << 10,
            le=1 << 30,
            extra={"unit": "size"},
        ),
    ] = 64 << 20
    collect_grace_ms: Annotated[
        int,
        Meta(
            description="How old an unreferenced blob must be before the collector deletes it. It should be longer "
            "than any append or compaction takes: a writer whose blob is too old must upload it again.",
            ge=0,
            extra={"unit": "duration"},
        ),
    ] = 3_600_000
    retain_interval_ms: Annotated[
        int,
        Meta(
            description="How often a compactor applies the retention of object topics. One of the compactors of a log "
            "does so for all.",
            ge=100,
            le=86_400_000,
            extra={"unit": "duration"},
        ),
    ] = 60_000
    collect_interval_ms: Annotated[
        int,
        Meta(
            description="How often a compactor deletes unreferenced blobs. One of the compactors of a log does so for "
            "all; each time, it lists all blobs, which costs one LIST request for 1,000 of them.",
            ge=100,
            le=604_800_000,
            extra={"unit": "duration"},
        ),
    ] = 600_000
