"""The metrics of a compactor service: plain numbers, and the families that export them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final

from llog.base.histogram import BYTES_BOUNDS, Histogram
from llog.engines.object.compaction.claims import Claims
from llog.engines.object.compaction.compactor import CompactionResult, LaggingPartition
from llog.metrics.families import Family, Sample, counter, gauge, histogram
from llog.stores.counting import OperationCounts

_COUNT_BOUNDS: Final = (1, 2, 4, 16, 64, 256, 1024, 4096, 16_384, 65_536, 262_144, 1_048_576)


class Backlog:
    """What one look at all partitions found."""

    def __init__(self) -> None:
        self.partitions = 0
        self.offsets = 0
        self.offsets_max = 0
        self.pending = 0
        self.begun = 0

    def add(self, each: LaggingPartition) -> None:
        self.partitions += 1
        self.offsets += each.offsets
        self.offsets_max = max(self.offsets_max, each.offsets)
        self.pending += each.pending
        self.begun += each.begun


class CompactorMetrics:
    """What one compactor service has counted since it started."""

    def __init__(self, compactor_id: str, workers: int, claims: Claims, stages: OperationCounts) -> None:
        self.id = compactor_id
        self.workers = workers
        self.claims = claims
        self.stages = stages
        self.busy_workers = 0
        self.queued = 0
        self.partitions = 0
        self.discoveries: Counter[str] = Counter()
        self.discovered_at_ms = 0
        self.backlog = Backlog()
        self.runs: Counter[str] = Counter()
        self.recoveries: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.damaged = 0
        self.merges = 0
        self.merged_entries = 0
        self.merged_bytes = 0
        self.run_entries = Histogram(_COUNT_BOUNDS)
        self.run_records = Histogram(_COUNT_BOUNDS)
        self.run_read_bytes = Histogram(BYTES_BOUNDS)
        self.run_written_bytes = Histogram(BYTES_BOUNDS)
        self.steps: Counter[tuple[str, str]] = Counter()
        self.step_seconds: dict[str, Histogram] = {}
        self.trimmed_records = 0
        self.trimmed_bytes = 0
        self.deleted_blobs = 0
        self.deleted_bytes = 0

    def count_run(self, outcome: str, result: CompactionResult) -> None:
        self.runs[outcome] += 1
        self.damaged += len(result.damaged)
        self.merges += result.merges
        self.merged_entries += result.merged_entries
        self.merged_bytes += result.merged_bytes
        if result.error is not None and outcome == "failed":
            self.errors[result.error.code] += 1
        if result.resumed_from is not None:
            self.recoveries[result.resumed_from.value] += 1
        if result.end_offset is not None:
            self.run_records.observe(result.records)
            self.run_written_bytes.observe(result.bytes_written)
            if result.entries:  # a compaction that was resumed late has read nothing
                self.run_entries.observe(result.entries)
                self.run_read_bytes.observe(result.bytes_read)

    def count_step(self, name: str, outcome: str, seconds: float) -> None:
        self.steps[name, outcome] += 1
        self.step_seconds.setdefault(name, Histogram()).observe(seconds)


INFO: Final = gauge("llog_compactor_info", "Always 1. The label is the name of the compactor in its claims.", "id")
RUNS: Final = counter(
    "llog_compactor_runs_total",
    "Attempts to compact a partition, by outcome: compacted, nothing (no run was worth it), claimed (another compactor "
    "has the partition), gone (the partition was deleted), failed.",
    "outcome",
)
RECOVERIES: Final = counter(
    "llog_compactor_recoveries_total",
    "Compactions that were resumed from the breadcrumb of a run that was interrupted, by its state.",
    "state",
)
ERRORS: Final = counter("llog_compactor_errors_total", "Failed attempts to compact a partition, by code.", "code")
CLAIMS: Final = counter(
    "llog_compactor_claims_total",
    "Claims of partitions, by outcome: taken, refused (another compactor has it), released, failed (no answer).",
    "outcome",
)
DISCOVERIES: Final = counter(
    "llog_compactor_discoveries_total", "Reads of the catalog for new topics, by outcome: done, failed.", "outcome"
)
STAGES: Final = histogram(
    "llog_compactor_stage_duration_seconds",
    "Time of the stages of compactions: claim, choose (find a run), begin (put its breadcrumb), fetch (read its "
    "slices, for many partitions at once), write (put its blob), publish (replace its index entries).",
    "stage",
)
RUN_ENTRIES: Final = histogram("llog_compactor_run_entries", "Index entries that a run joined into one.")
RUN_RECORDS: Final = histogram("llog_compactor_run_records", "Records of a run.")
RUN_READ: Final = histogram("llog_compactor_run_read_bytes", "Bytes that a run read.")
RUN_WRITTEN: Final = histogram("llog_compactor_run_written_bytes", "Bytes that a run wrote.")
STEPS: Final = counter(
    "llog_compactor_steps_total",
    "Rounds of the other upkeep, such as retention and collection, by outcome: done, claimed (another compactor "
    "service does it), failed.",
    "step",
    "outcome",
)
STEP_SECONDS: Final = histogram(
    "llog_compactor_step_duration_seconds", "Time of the rounds of the other upkeep.", "step"
)

_NUMBERS: Final[tuple[tuple[Family, Callable[[CompactorMetrics], float]], ...]] = (
    (gauge("llog_compactor_workers", "Workers (LLOG_COMPACTOR_WORKERS)."), lambda m: m.workers),
    (gauge("llog_compactor_busy_workers", "Workers that compact at the moment."), lambda m: m.busy_workers),
    (gauge("llog_compactor_queued_partitions", "Partitions that wait for a worker."), lambda m: m.queued),
    (gauge("llog_compactor_partitions", "Partitions of object topics that were discovered."), lambda m: m.partitions),
    (
        gauge(
            "llog_compactor_last_discovery_timestamp_seconds",
            "When the catalog was read last, in seconds since 1970; 0 before the first time.",
        ),
        lambda m: m.discovered_at_ms / 1000,
    ),
    (gauge("llog_compactor_claims_held", "Claims that this process has at the moment."), lambda m: m.claims.held),
    (
        gauge(
            "llog_compactor_lagging_partitions",
            "Partitions with offsets above their compaction cursor, when all of them were looked at last.",
        ),
        lambda m: m.backlog.partitions,
    ),
    (
        gauge("llog_compactor_lag_offsets", "Offsets above the compaction cursors of all partitions."),
        lambda m: m.backlog.offsets,
    ),
    (
        gauge("llog_compactor_lag_offsets_max", "The most offsets above the compaction cursor of one partition."),
        lambda m: m.backlog.offsets_max,
    ),
    (
        gauge(
            "llog_compactor_pending_appends",
            "Lagging partitions whose newest append has no index entry yet, as is usual until the next one.",
        ),
        lambda m: m.backlog.pending,
    ),
    (
        gauge("llog_compactor_unfinished_runs", "Partitions with a compaction that has begun and is not finished."),
        lambda m: m.backlog.begun,
    ),
    (
        counter("llog_compactor_damaged_slices_total", "Slices that could not be read, and were passed over."),
        lambda m: m.damaged,
    ),
    (
        counter(
            "llog_compactor_merges_total", "Merges of small compacted blobs into one, which are not counted as runs."
        ),
        lambda m: m.merges,
    ),
    (
        counter("llog_compactor_merged_entries_total", "Index entries of compacted blobs that merges joined."),
        lambda m: m.merged_entries,
    ),
    (counter("llog_compactor_merged_bytes_total", "Bytes that merges wrote."), lambda m: m.merged_bytes),
    (counter("llog_compactor_trimmed_records_total", "Records that retention removed."), lambda m: m.trimmed_records),
    (counter("llog_compactor_trimmed_bytes_total", "Bytes that retention removed."), lambda m: m.trimmed_bytes),
    (counter("llog_compactor_deleted_blobs_total", "Blobs that collection deleted."), lambda m: m.deleted_blobs),
    (counter("llog_compactor_deleted_bytes_total", "Bytes that collection deleted."), lambda m: m.deleted_bytes),
)
_COUNTERS: Final[tuple[tuple[Family, Callable[[CompactorMetrics], Counter[str]]], ...]] = (
    (RUNS, lambda m: m.runs),
    (RECOVERIES, lambda m: m.recoveries),
    (ERRORS, lambda m: m.errors),
    (CLAIMS, lambda m: Counter({outcome.value: count for outcome, count in m.claims.counts.items()})),
    (DISCOVERIES, lambda m: m.discoveries),
)
_HISTOGRAMS: Final[tuple[tuple[Family, Callable[[CompactorMetrics], Histogram]], ...]] = (
    (RUN_ENTRIES, lambda m: m.run_entries),
    (RUN_RECORDS, lambda m: m.run_records),
    (RUN_READ, lambda m: m.run_read_bytes),
    (RUN_WRITTEN, lambda m: m.run_written_bytes),
)

FAMILIES: Final[tuple[Family, ...]] = (
    INFO,
    *(family for family, _ in _NUMBERS),
    *(family for family, _ in _COUNTERS),
    *(family for family, _ in _HISTOGRAMS),
    STAGES,
    STEPS,
    STEP_SECONDS,
)


def compactor_samples(metrics: CompactorMetrics) -> Iterator[Sample]:
    """Yield the samples of everything that a compactor service counts."""
    yield INFO.sample(1, metrics.id)
    for family, value_of in _NUMBERS:
        yield family.sample(value_of(metrics))
    for family, counts_of in _COUNTERS:
        for label, count in sorted(counts_of(metrics).items()):
            yield family.sample(count, label)
    for family, histogram_of in _HISTOGRAMS:
        yield from family.histogram(histogram_of(metrics))
    for stage, seconds in sorted(metrics.stages.latency.items()):
        yield from STAGES.histogram(seconds, stage)
    for (step, outcome), count in sorted(metrics.steps.items()):
        yield STEPS.sample(count, step, outcome)
    for step, seconds in sorted(metrics.step_seconds.items()):
        yield from STEP_SECONDS.histogram(seconds, step)
