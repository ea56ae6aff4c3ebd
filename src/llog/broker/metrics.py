"""The metrics of a broker: plain numbers on the hot path, which become samples when a client asks for them.

Both answers, JSON and Prometheus text, come from the same samples.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Final, NamedTuple

from llog.log.inline import AppendCounts
from llog.stores.counting import OperationCounts

BATCH_BYTES: Final = (1 << 10, 16 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
_OPERATIONS: Final = "Operations on the stores."


class Sample(NamedTuple):
    """One number. `name` lacks the suffix that the parts of a histogram have."""

    name: str
    kind: str
    help: str
    labels: tuple[tuple[str, str], ...]
    value: float
    suffix: str = ""


class Metrics:
    """The counts of one process since it started."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        self.request_seconds: defaultdict[str, float] = defaultdict(float)
        self.errors: Counter[str] = Counter()
        self.connections = 0
        self.connections_refused = 0
        self.waiting = 0
        self.forwarded = 0
        self.forward_errors = 0
        self.produced_records = 0
        self.produced_bytes = 0
        self.consumed_records = 0
        self.consumed_bytes = 0
        self.appends = AppendCounts()
        self.batches = 0
        self.batch_records = 0
        self.batch_bytes = 0
        self.batch_groups = 0
        self._batch_buckets = [0] * (len(BATCH_BYTES) + 1)
        self.buffered_bytes = 0
        self.flushes_in_flight = 0
        self.tail_hits = 0
        self.tail_misses = 0
        self.tail_bytes = 0
        self.shared_hits = 0
        self.shared_batches = 0
        self.shared_errors = 0
        self.keyed_appends = 0
        self.keyed_records = 0
        self.keyed_bytes = 0
        self.keyed_scans = 0
        self.keyed_scanned_records = 0
        self.keyed_tails = 0
        self.keyed_fenced = 0

    def count_batch(self, records: int, size: int, groups: int) -> None:
        self.batches += 1
        self.batch_records += records
        self.batch_bytes += size
        self.batch_groups += groups
        self._batch_buckets[sum(size > bound for bound in BATCH_BYTES)] += 1

    def samples(self, stores: Iterable[tuple[str, OperationCounts | None]]) -> Iterator[Sample]:
        for (route, status), count in sorted(self.requests.items()):
            by = (("route", route), ("status", str(status)))
            yield Sample("llog_requests_total", "counter", "Requests answered.", by, count)
        for route, seconds in sorted(self.request_seconds.items()):
            text = "Seconds spent on requests, waits included."
            yield Sample("llog_request_seconds_total", "counter", text, (("route", route),), seconds)
        for code, count in sorted(self.errors.items()):
            yield Sample("llog_errors_total", "counter", "Errors answered, by code.", (("code", code),), count)
        for name, kind, text, value in (
            ("llog_connections", "gauge", "Open connections.", self.connections),
            ("llog_connections_refused_total", "counter", "Connections beyond the limit.", self.connections_refused),
            ("llog_waiting_requests", "gauge", "Requests waiting for records.", self.waiting),
            ("llog_forwarded_requests_total", "counter", "Requests sent on to an owner.", self.forwarded),
            ("llog_forward_errors_total", "counter", "Requests that no owner answered.", self.forward_errors),
            ("llog_produced_records_total", "counter", "Records appended.", self.produced_records),
            ("llog_produced_bytes_total", "counter", "Bytes appended.", self.produced_bytes),
            ("llog_consumed_records_total", "counter", "Records consumed.", self.consumed_records),
            ("llog_consumed_bytes_total", "counter", "Bytes consumed.", self.consumed_bytes),
            ("llog_batch_records_total", "counter", "Records in batches.", self.batch_records),
            ("llog_batch_groups_total", "counter", "Partitions in batches.", self.batch_groups),
            ("llog_inline_bytes_total", "counter", "Bytes appended inline.", self.appends.inline_bytes),
            (
                "llog_inline_full_total",
                "counter",
                "Small appends that needed a blob, because their partition was full of inline bytes.",
                self.appends.full,
            ),
            ("llog_buffered_bytes", "gauge", "Bytes of requests not answered yet.", self.buffered_bytes),
            ("llog_flushes_in_flight", "gauge", "Batches being written to the stores.", self.flushes_in_flight),
            ("llog_tail_hits_total", "counter", "Batches read from the tail.", self.tail_hits),
            ("llog_tail_misses_total", "counter", "Reads that the tail could not serve.", self.tail_misses),
            ("llog_tail_bytes", "gauge", "Bytes of batches in the tail.", self.tail_bytes),
            ("llog_tail_shared_hits_total", "counter", "Batches taken from the shared tail.", self.shared_hits),
            ("llog_tail_shared_batches_total", "counter", "Batches put into the shared tail.", self.shared_batches),
            ("llog_tail_shared_errors_total", "counter", "Failures of the shared tail.", self.shared_errors),
            ("llog_keyed_appends_total", "counter", "Appends to the keyed log.", self.keyed_appends),
            ("llog_keyed_records_total", "counter", "Records appended to the keyed log.", self.keyed_records),
            ("llog_keyed_bytes_total", "counter", "Bytes appended to the keyed log.", self.keyed_bytes),
            ("llog_keyed_scans_total", "counter", "Pages of scans of the keyed log.", self.keyed_scans),
            (
                "llog_keyed_scanned_records_total",
                "counter",
                "Keyed records scanned or tailed.",
                self.keyed_scanned_records,
            ),
            ("llog_keyed_tails", "gauge", "Clients following the keyed log.", self.keyed_tails),
            ("llog_keyed_fenced", "gauge", "1 once another writer has taken over the keyed log.", self.keyed_fenced),
        ):
            yield Sample(name, kind, text, (), value)
        for way, appends in (("inline", self.appends.inline), ("blob", self.appends.blob)):
            text = "Appends to partitions, inline in the metadata store or through a blob."
            yield Sample("llog_appends_total", "counter", text, (("way", way),), appends)
        yield from self._batch_sizes()
        for store, counts in stores:
            if counts is not None:
                yield from _operations(store, counts)

    def _batch_sizes(self) -> Iterator[Sample]:
        name, text = "llog_batch_bytes", "Sizes of batches."
        bounds = [*map(str, BATCH_BYTES), "+Inf"]
        for bound, count in zip(bounds, accumulate(self._batch_buckets), strict=True):
            yield Sample(name, "histogram", text, (("le", bound),), count, "_bucket")
        yield Sample(name, "histogram", text, (), self.batch_bytes, "_sum")
        yield Sample(name, "histogram", text, (), self.batches, "_count")


def _operations(store: str, counts: OperationCounts) -> Iterator[Sample]:
    for name, values in (
        ("llog_store_operations_total", counts.count),
        ("llog_store_errors_total", counts.errors),
        ("llog_store_bytes_total", counts.bytes),
        ("llog_store_seconds_total", counts.seconds),
    ):
        for operation, value in sorted(dict(values).items()):
            yield Sample(name, "counter", _OPERATIONS, (("store", store), ("operation", operation)), value)


def as_json(samples: Iterable[Sample]) -> dict[str, object]:
    """Return the samples by name: a number, or a list of numbers with their labels."""
    numbers: dict[str, object] = {}
    for sample in samples:
        name = sample.name + sample.suffix
        if not sample.labels:
            numbers[name] = sample.value
            continue
        labelled = numbers.setdefault(name, [])
        assert isinstance(labelled, list)
        labelled.append({**dict(sample.labels), "value": sample.value})
    return numbers


def as_prometheus(samples: Iterable[Sample]) -> str:
    """Return the samples in the text format, which wants those of one name together."""
    families: dict[str, list[Sample]] = {}
    for sample in samples:
        families.setdefault(sample.name, []).append(sample)
    lines = []
    for name, family in families.items():
        lines += [f"# HELP {name} {family[0].help}", f"# TYPE {name} {family[0].kind}"]
        for sample in family:
            labels = ",".join(f'{label}="{_escape(value)}"' for label, value in sample.labels)
            lines.append(f"{name}{sample.suffix}{f'{{{labels}}}' if labels else ''} {sample.value}")
    return "\n".join([*lines, ""])


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
