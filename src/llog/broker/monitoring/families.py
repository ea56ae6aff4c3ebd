"""The families of a broker's metrics, and their samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from llog.broker.metrics import Metrics
from llog.broker.monitoring.traffic import Traffic
from llog.metrics.families import Family, Sample, counter, gauge, histogram

REQUESTS: Final = counter("llog_requests_total", "Requests answered, by route and status.", "route", "status")
REQUEST_SECONDS: Final = histogram(
    "llog_request_duration_seconds", "Time from a request to its answer, waits for records included.", "route"
)
VALIDATION_FAILURES: Final = counter(
    "llog_request_validation_failures_total",
    "Requests, and items of requests, that were refused as malformed or too large.",
    "route",
)
ERRORS: Final = counter("llog_errors_total", "Errors answered, for requests or for their items, by code.", "code")

KAFKA_REQUESTS: Final = counter("llog_kafka_requests_total", "Requests of Kafka clients, by API.", "api")
KAFKA_REQUEST_SECONDS: Final = histogram(
    "llog_kafka_request_duration_seconds",
    "Time from a Kafka client's request to its answer, waits for records and for other members included.",
    "api",
)

FLUSHES: Final = counter(
    "llog_flushes_total",
    "Batches handed to the engines, by reason: bytes (LLOG_BATCH_MAX_BYTES waited), delay (the oldest request waited "
    "for LLOG_BATCH_MAX_DELAY_MS), idle (no batch was under way), inline (the same, and small enough to need no blob), "
    "closing.",
    "reason",
)
FLUSH_SECONDS: Final = histogram(
    "llog_flush_duration_seconds", "Time from the flush of a batch until its records were durable."
)
QUEUE_WAIT: Final = histogram(
    "llog_batch_queue_wait_seconds", "Time that requests waited in the queue until their batch was flushed."
)
BATCH_BYTES: Final = histogram("llog_batch_bytes", "Sizes of batches as records, before encoding and compression.")
BLOB_BYTES: Final = histogram("llog_blob_bytes", "Sizes of the shared blobs that appends put, as stored.")
APPENDS: Final = counter(
    "llog_appends_total", "Appends to partitions, inline in the metadata store or through a blob.", "way"
)

_Number = tuple[Family, Callable[[Metrics], float]]
_CONNECTIONS: Final[tuple[_Number, ...]] = (
    (gauge("llog_connections", "Open connections."), lambda m: m.connections),
    (counter("llog_connections_refused_total", "Connections beyond the limit."), lambda m: m.connections_refused),
)
_NUMBERS: Final[tuple[_Number, ...]] = (
    (gauge("llog_kafka_connections", "Open connections of Kafka clients."), lambda m: m.kafka_connections),
    (gauge("llog_waiting_requests", "Requests waiting for records."), lambda m: m.waiting),
    (counter("llog_forwarded_requests_total", "Requests sent on to an owner."), lambda m: m.forwarded),
    (counter("llog_forward_errors_total", "Requests that no owner answered."), lambda m: m.forward_errors),
    (counter("llog_produced_records_total", "Records appended."), lambda m: m.produced_records),
    (counter("llog_produced_bytes_total", "Bytes appended, as keys, values and headers."), lambda m: m.produced_bytes),
    (counter("llog_consumed_records_total", "Records consumed."), lambda m: m.consumed_records),
    (counter("llog_consumed_bytes_total", "Bytes consumed, as keys, values and headers."), lambda m: m.consumed_bytes),
    (
        gauge("llog_batch_queue_requests", "Requests that wait for their batch to be flushed."),
        lambda m: m.queued_requests,
    ),
    (
        gauge("llog_batch_queue_bytes", "Bytes of records that wait for their batch to be flushed."),
        lambda m: m.queued_bytes,
    ),
    (gauge("llog_flushes_in_flight", "Batches being written to the stores."), lambda m: m.flushes_in_flight),
    (counter("llog_flush_errors_total", "Batches of which nothing was appended."), lambda m: m.flush_errors),
    (counter("llog_batch_records_total", "Records in batches."), lambda m: m.batch_records),
    (counter("llog_batch_groups_total", "Partitions in batches."), lambda m: m.batch_groups),
    (counter("llog_inline_bytes_total", "Bytes appended inline."), lambda m: m.appends.inline_bytes),
    (
        counter(
            "llog_inline_full_total",
            "Small appends that needed a blob, because their partition was full of inline bytes.",
        ),
        lambda m: m.appends.full,
    ),
    (gauge("llog_buffered_bytes", "Bytes of requests not answered yet."), lambda m: m.buffered_bytes),
    (gauge("llog_tails", "Clients following topics."), lambda m: m.tails),
    (counter("llog_tail_hits_total", "Batches read from the tail."), lambda m: m.tail_hits),
    (counter("llog_tail_misses_total", "Reads that the tail could not serve."), lambda m: m.tail_misses),
    (gauge("llog_tail_bytes", "Bytes of batches in the tail."), lambda m: m.tail_bytes),
    (counter("llog_tail_shared_hits_total", "Batches taken from the shared tail."), lambda m: m.shared_hits),
    (counter("llog_tail_shared_batches_total", "Batches put into the shared tail."), lambda m: m.shared_batches),
    (counter("llog_tail_shared_errors_total", "Failures of the shared tail."), lambda m: m.shared_errors),
    (counter("llog_keyed_appends_total", "Appends to the keyed log."), lambda m: m.keyed_appends),
    (counter("llog_keyed_records_total", "Records appended to the keyed log."), lambda m: m.keyed_records),
    (counter("llog_keyed_bytes_total", "Bytes appended to the keyed log."), lambda m: m.keyed_bytes),
    (counter("llog_keyed_scans_total", "Pages of scans of the keyed log."), lambda m: m.keyed_scans),
    (
        counter("llog_keyed_scanned_records_total", "Keyed records scanned or tailed."),
        lambda m: m.keyed_scanned_records,
    ),
    (gauge("llog_keyed_tails", "Clients following the keyed log."), lambda m: m.keyed_tails),
    (
        gauge("llog_keyed_fenced", "1 once another writer has taken over the keyed log.", across="max"),
        lambda m: m.keyed_fenced,
    ),
)
_TRAFFIC: Final[tuple[tuple[Family, Callable[[Traffic], float]], ...]] = (
    (
        counter("llog_topic_produced_records_total", "Records appended, by topic.", "topic"),
        lambda t: t.produced_records,
    ),
    (counter("llog_topic_produced_bytes_total", "Bytes appended, by topic.", "topic"), lambda t: t.produced_bytes),
    (
        counter("llog_topic_consumed_records_total", "Records consumed, by topic.", "topic"),
        lambda t: t.consumed_records,
    ),
    (counter("llog_topic_consumed_bytes_total", "Bytes consumed, by topic.", "topic"), lambda t: t.consumed_bytes),
)

FAMILIES: Final[tuple[Family, ...]] = (
    REQUESTS,
    REQUEST_SECONDS,
    VALIDATION_FAILURES,
    ERRORS,
    KAFKA_REQUESTS,
    KAFKA_REQUEST_SECONDS,
    FLUSHES,
    FLUSH_SECONDS,
    QUEUE_WAIT,
    BATCH_BYTES,
    BLOB_BYTES,
    APPENDS,
    *(family for family, _ in (*_CONNECTIONS, *_NUMBERS)),
    *(family for family, _ in _TRAFFIC),
)


def http_samples(metrics: Metrics) -> Iterator[Sample]:
    """Yield the samples of requests and connections, which every process that answers HTTP has."""
    for (route, status), count in sorted(metrics.requests.items()):
        yield REQUESTS.sample(count, route, str(status))
    for route, seconds in sorted(metrics.request_seconds.items()):
        yield from REQUEST_SECONDS.histogram(seconds, route)
    for family, by_label in ((VALIDATION_FAILURES, metrics.validation_failures), (ERRORS, metrics.errors)):
        for label, count in sorted(by_label.items()):
            yield family.sample(count, label)
    for family, value_of in _CONNECTIONS:
        yield family.sample(value_of(metrics))


def broker_samples(metrics: Metrics) -> Iterator[Sample]:
    """Yield the samples of everything that the broker counts."""
    yield from http_samples(metrics)
    for api, count in sorted(metrics.kafka_requests.items()):
        yield KAFKA_REQUESTS.sample(count, api)
    for api, seconds in sorted(metrics.kafka_request_seconds.items()):
        yield from KAFKA_REQUEST_SECONDS.histogram(seconds, api)
    for reason, count in sorted(metrics.flushes.items()):
        yield FLUSHES.sample(count, reason)
    for family, counted in (
        (FLUSH_SECONDS, metrics.flush_seconds),
        (QUEUE_WAIT, metrics.queue_wait),
        (BATCH_BYTES, metrics.batch_bytes),
        (BLOB_BYTES, metrics.appends.blob_bytes),
    ):
        yield from family.histogram(counted)
    for way, appends in (("inline", metrics.appends.inline), ("blob", metrics.appends.blob)):
        yield APPENDS.sample(appends, way)
    for family, value_of in _NUMBERS:
        yield family.sample(value_of(metrics))
    for name, traffic in metrics.topics:
        for family, part_of in _TRAFFIC:
            yield family.sample(part_of(traffic), name)
