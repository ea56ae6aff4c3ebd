"""The metrics of a broker as plain numbers, which cost the hot path little; `monitoring/families.py` exports them."""

from __future__ import annotations

from collections import Counter, defaultdict

from llog.base.histogram import BYTES_BOUNDS, Histogram
from llog.broker.monitoring.traffic import TrafficByName
from llog.log.inline import AppendCounts


class Metrics:
    """The counts of one process since it started."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        self.request_seconds: defaultdict[str, Histogram] = defaultdict(Histogram)
        self.errors: Counter[str] = Counter()
        self.validation_failures: Counter[str] = Counter()
        """Requests, and items of requests, that were refused because of what they contained, by route."""
        self.kafka_requests: Counter[str] = Counter()
        self.kafka_request_seconds: defaultdict[str, Histogram] = defaultdict(Histogram)
        self.kafka_connections = 0
        self.connections = 0
        self.connections_refused = 0
        self.waiting = 0
        self.forwarded = 0
        self.forward_errors = 0
        self.produced_records = 0
        self.produced_bytes = 0
        self.consumed_records = 0
        self.consumed_bytes = 0
        self.topics = TrafficByName()
        self.producers = TrafficByName()
        self.groups = TrafficByName()
        self.appends = AppendCounts()
        self.batch_records = 0
        self.batch_groups = 0
        self.batch_bytes = Histogram(BYTES_BOUNDS)
        self.queued_requests = 0
        self.queued_bytes = 0
        self.queue_wait = Histogram()
        self.flushes: Counter[str] = Counter()
        self.flush_errors = 0
        self.flush_seconds = Histogram()
        self.buffered_bytes = 0
        self.flushes_in_flight = 0
        self.tails = 0
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

    @property
    def traffic(self) -> dict[str, TrafficByName]:
        """The traffic by topic, producer and consumer group."""
        return {"topics": self.topics, "producers": self.producers, "groups": self.groups}

    def count_request(self, route: str, status: int, seconds: float) -> None:
        """Count a request that was answered."""
        self.requests[route, status] += 1
        self.request_seconds[route].observe(seconds)

    def count_batch(self, records: int, size: int, groups: int) -> None:
        self.batch_records += records
        self.batch_groups += groups
        self.batch_bytes.observe(size)

    def count_produced(self, topic: str, producer: str | None, records: int, size: int) -> None:
        """Count records that were appended to a topic, by a producer if it gave its id."""
        self.produced_records += records
        self.produced_bytes += size
        self.topics.of(topic).add_produced(records, size)
        if producer is not None:
            self.producers.of(producer).add_produced(records, size)

    def count_consumed(self, topic: str, group: str | None, records: int, size: int) -> None:
        """Count records that were read from a topic, by a consumer group if it was one."""
        self.consumed_records += records
        self.consumed_bytes += size
        self.topics.of(topic).add_consumed(records, size)
        if group is not None:
            self.groups.of(group).add_consumed(records, size)

    def count_fetched(self, topic: str, group: str | None, size: int) -> None:
        """Count bytes that were read from the blob store for a topic, and for a consumer group if it was one."""
        self.topics.of(topic).fetched_bytes += size
        if group is not None:
            self.groups.of(group).fetched_bytes += size

    def count_batch_share(self, topic: str, producer: str | None, share: float) -> None:
        """Count the share of a topic, and of a producer if it gave its id, in a batch that went into a blob."""
        self.topics.of(topic).batch_shares += share
        if producer is not None:
            self.producers.of(producer).batch_shares += share
