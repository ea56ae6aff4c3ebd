"""Settings of compaction and collection."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

from llog.config.stores import StoreSettings

_FOR_SERVICE: Final = (
    "No command of this version starts that service; the upkeep beside a broker looks at all partitions."
)


class UpkeepSettings(StoreSettings, frozen=True, kw_only=True):
    """How a log is compacted and collected, added to the settings of its stores."""

    compactor_id: Annotated[
        str | None,
        Meta(
            description="Name of a compactor in its claims, so that people see which process compacts a partition.",
            extra={"default": "LLOG_CLIENT_IDENTIFIER"},
        ),
    ] = None
    compactor_idle_sleep_ms: Annotated[
        int,
        Meta(
            description="How long the upkeep beside a broker waits before it looks again for partitions to compact.",
            ge=1,
            le=86_400_000,
            extra={"unit": "duration"},
        ),
    ] = 30_000
    compactor_idle_jitter_ms: Annotated[
        int,
        Meta(
            description="Most time that is added to LLOG_COMPACTOR_IDLE_SLEEP_MS at random, so that many processes "
            "do not look at once.",
            ge=0,
            le=3_600_000,
            extra={"unit": "duration"},
        ),
    ] = 3000
    compactor_error_sleep_ms: Annotated[
        int,
        Meta(
            description="How long the upkeep beside a broker waits after a compaction that failed as a whole, for "
            "example because a store "
            "cannot be reached.",
            ge=1,
            le=86_400_000,
            extra={"unit": "duration"},
        ),
    ] = 30_000
    compactor_error_jitter_ms: Annotated[
        int,
        Meta(
            description="Most time that is added to LLOG_COMPACTOR_ERROR_SLEEP_MS at random.",
            ge=0,
            le=3_600_000,
            extra={"unit": "duration"},
        ),
    ] = 3000
    compactor_targets: Annotated[
        str | None,
        Meta(
            description="Partitions that a compactor service looks at before it has discovered any: "
            "`topic:partition`, or `topic` for all "
            "of its partitions, with commas between them. " + _FOR_SERVICE,
            extra={"default": "none: those that it discovers"},
        ),
    ] = None
    compactor_bind_host: Annotated[
        str, Meta(description="Address that a compactor service listens on. " + _FOR_SERVICE)
    ] = "127.0.0.1"
    compactor_port: Annotated[
        int,
        Meta(
            description="Port that a compactor service listens on; 0 takes a free one. " + _FOR_SERVICE, ge=0, le=65_535
        ),
    ] = 8081
    compactor_workers: Annotated[
        int, Meta(description="Partitions that a compactor service compacts at once. " + _FOR_SERVICE, ge=1, le=256)
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
        int, Meta(description="Most records that one compaction joins into a blob.", ge=1, le=100_000_000)
    ] = 1_000_000
    compactor_max_bytes_per_run: Annotated[
        int,
        Meta(
            description="Most bytes that one compaction joins into a blob; it holds about twice as much in memory.",
            ge=1 << 10,
            le=1 << 30,
            extra={"unit": "size"},
        ),
    ] = 64 << 20
    collect_grace_ms: Annotated[
        int,
        Meta(
            description="How old a blob that nothing names must be to be collected: longer than any append or "
            "compaction takes.",
            ge=0,
            extra={"unit": "duration"},
        ),
    ] = 3_600_000
