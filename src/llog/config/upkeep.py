"""Settings of compaction and collection."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

from llog.config.stores import StoreSettings

_FOR_SERVICE: Final = (
    "No command of this version starts such a service; the upkeep beside a broker looks at all partitions."
)


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
            description="How long the upkeep beside a broker waits between two searches for partitions to compact. "
            "Lower it to compact sooner; raise it for fewer requests to the stores.",
            ge=1,
            le=86_400_000,
            extra={"unit": "duration"},
        ),
    ] = 30_000
    compactor_idle_jitter_ms: Annotated[
        int,
        Meta(
            description="The most random time that is added to LLOG_COMPACTOR_IDLE_SLEEP_MS, so that many processes "
            "do not search at the same moment.",
            ge=0,
            le=3_600_000,
            extra={"unit": "duration"},
        ),
    ] = 3000
    compactor_error_sleep_ms: Annotated[
        int,
        Meta(
            description="How long the upkeep beside a broker waits after a compaction that failed as a whole, for "
            "example because a store was out of reach.",
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
            description="The partitions that a compactor service looks at before it has discovered any: "
            "`topic:partition`, or `topic` for all partitions of a topic, separated by commas. " + _FOR_SERVICE,
            extra={"default": "none: those that it discovers"},
        ),
    ] = None
    compactor_bind_host: Annotated[
        str, Meta(description="The address that a compactor service listens on. " + _FOR_SERVICE)
    ] = "127.0.0.1"
    compactor_port: Annotated[
        int,
        Meta(
            description="The port that a compactor service listens on; 0 takes a free one. " + _FOR_SERVICE,
            ge=0,
            le=65_535,
        ),
    ] = 8081
    compactor_workers: Annotated[
        int, Meta(description="How many partitions a compactor service compacts at once. " + _FOR_SERVICE, ge=1, le=256)
    ] = 4
    compactor_discovery_interval_ms: Annotated[
        int,
        Meta(
            description="How often a compactor service looks for new partitions. " + _FOR_SERVICE,
            ge=100,
            le=86_400_000,
            extra={"unit": "duration"},
        ),
    ] = 30_000
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
