"""The metrics of the two stores: operations, failures, bytes and latencies, by the name of the operation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from llog.log.log import Log
from llog.metrics.families import Family, Sample, counter, histogram
from llog.stores.counting import OperationCounts

META: Final = "meta"
BLOBS: Final = "blobs"
_BY: Final = ("store", "operation")

OPERATIONS: Final = counter(
    "llog_store_operations_total",
    "Operations on the metadata store (meta) and the blob store (blobs), those that failed included.",
    *_BY,
)
ERRORS: Final = counter("llog_store_errors_total", "Operations on the stores that failed.", *_BY)
BYTES: Final = counter("llog_store_bytes_total", "Bytes that operations on the stores wrote or read.", *_BY)
LATENCY: Final = histogram(
    "llog_store_operation_duration_seconds", "Time that operations on the stores took, waits for a turn included.", *_BY
)
FAMILIES: Final[tuple[Family, ...]] = (OPERATIONS, ERRORS, BYTES, LATENCY)


def counts_of(store: object) -> OperationCounts | None:
    """Return the counts of a store's operations; None for a store that keeps none."""
    counts = getattr(store, "counts", None)
    return counts if isinstance(counts, OperationCounts) else None


def store_samples(log: Log) -> Iterator[Sample]:
    """Yield the samples of both stores of the log."""
    for name, store in ((META, log.meta), (BLOBS, log.blobs)):
        counts = counts_of(store)
        if counts is None:
            continue
        for family, values in ((OPERATIONS, counts.count), (ERRORS, counts.errors), (BYTES, counts.bytes)):
            for operation, value in sorted(dict(values).items()):
                yield family.sample(value, name, operation)
        for operation, latency in sorted(dict(counts.latency).items()):
            yield from LATENCY.histogram(latency, name, operation)
