"""Fetch: the records of many partitions as Kafka's batches, with a wait for more at their ends."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

from llog.batch.columns import Buffer, cut_columns
from llog.batch.kafka_batch import encode
from llog.broker.fetcher import Fetch, Fetcher
from llog.broker.metrics import Metrics
from llog.errors import LlogError
from llog.kafka.error_codes import ErrorCode, error_code
from llog.kafka.handlers import Caller, Handlers
from llog.kafka.live_brokers import LiveBrokers
from llog.kafka.messages.fetch import (
    FetchableTopicResponse,
    FetchPartition,
    FetchRequest,
    FetchResponse,
    PartitionData,
)
from llog.kafka.offsets import from_kafka, to_kafka
from llog.kafka.topic_ids import TopicIds, UnknownTopicId
from llog.log.engine import Batch
from llog.model import TimestampType, TopicPartition

_RECORD_OVERHEAD: Final = 12
"""About the bytes that a Kafka batch adds to a record."""
_CACHE_BYTES_MAX: Final = 64 << 20
_BYTES_MAX: Final = 64 << 20
"""The most that one answer holds, whatever the client asks for; a single record may be larger."""
_WAIT_MS_MAX: Final = 300_000
_TOPIC_IDS_FROM: Final = 13
"""The version from which on requests name topics by their ids."""


class FetchHandlers:
    def __init__(self, fetcher: Fetcher, brokers: LiveBrokers, topic_ids: TopicIds, metrics: Metrics) -> None:
        self._fetcher = fetcher
        self._topic_ids = topic_ids
        self._brokers = brokers
        self._metrics = metrics
        self._encoded = EncodedBatches(_CACHE_BYTES_MAX)

    def handlers(self) -> Handlers:
        return {1: self.fetch}

    async def fetch(self, request: FetchRequest, caller: Caller) -> FetchResponse:
        near = self._brokers.near(request.rack_id)
        ids: list[bytes | None] = [None] * len(request.topics)
        names: list[str | LlogError] = [topic.topic for topic in request.topics]
        if caller.version >= _TOPIC_IDS_FROM:
            ids = [topic.topic_id for topic in request.topics]
            names = await self._topic_ids.names([topic.topic_id for topic in request.topics])
        fetches = [
            [_fetch_of(name, partition) for partition in topic.partitions]
            for name, topic in zip(names, request.topics, strict=True)
        ]
        wanted = [fetch for own in fetches for fetch in own if fetch.error is None]
        has_errors = any(fetch.error is not None for own in fetches for fetch in own)
        if near is None:
            await self._fetcher.fetch(
                wanted,
                max_bytes=min(max(request.max_bytes, 1), _BYTES_MAX),
                min_bytes=request.min_bytes,
                max_wait_ms=0 if has_errors else min(max(request.max_wait_ms, 0), _WAIT_MS_MAX),
            )
        return FetchResponse(
            responses=[
                FetchableTopicResponse(
                    topic=topic.topic,
                    topic_id=topic.topic_id,
                    partitions=[
                        _redirection(partition, near.id) if near is not None else self._answer(fetch, identity)
                        for partition, fetch in zip(topic.partitions, own, strict=True)
                    ],
                )
                for topic, identity, own in zip(request.topics, ids, fetches, strict=True)
            ]
        )

    def _answer(self, fetch: Fetch, identity: bytes | None) -> PartitionData:
        """Answer with the records, unless the topic is not the one with this id."""
        was_seen = fetch.error is None or fetch.topic is not None
        if identity is not None and was_seen and identity != self._topic_ids.id_of(fetch.directory):
            return PartitionData(
                partition_index=fetch.tp.partition,
                error_code=ErrorCode.UNKNOWN_TOPIC_ID,
                high_watermark=-1,
                records=[],
            )
        code = ErrorCode.NONE
        if fetch.error is not None:
            self._metrics.errors[fetch.error.code] += 1
            code = ErrorCode.UNKNOWN_TOPIC_ID if isinstance(fetch.error, UnknownTopicId) else error_code(fetch.error)
        end = -1 if fetch.next_offset is None else to_kafka(fetch.next_offset)
        records = [buffer for batch in fetch.batches for buffer in self._encode(fetch, batch)]
        return PartitionData(
            partition_index=fetch.tp.partition,
            error_code=code,
            high_watermark=end,
            last_stable_offset=end,
            log_start_offset=-1 if fetch.log_start_offset is None else to_kafka(fetch.log_start_offset),
            records=records,
        )

    def _encode(self, fetch: Fetch, batch: Batch) -> Sequence[Buffer]:
        if fetch.view is None:
            return _encode(fetch, batch)  # key compaction changes what an owner's files have
        key = (fetch.directory, fetch.tp.partition, batch.start_offset, batch.end_offset)
        found = self._encoded.get(key)
        if found is None:
            found = _encode(fetch, batch)
            self._encoded.put(key, found)
        return found


_Key = tuple[str, int, int, int]
"""Directory, partition, first and last offset: within a directory, the records at these offsets never change."""


class EncodedBatches:
    """The batches that were encoded most recently, since several consumers usually read the same ones."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._batches: OrderedDict[_Key, Sequence[Buffer]] = OrderedDict()

    def get(self, key: _Key) -> Sequence[Buffer] | None:
        found = self._batches.get(key)
        if found is not None:
            self._batches.move_to_end(key)
        return found

    def put(self, key: _Key, buffers: Sequence[Buffer]) -> None:
        self._batches[key] = buffers
        self._bytes += _size(buffers)
        while self._bytes > self._max_bytes:
            _, oldest = self._batches.popitem(last=False)
            self._bytes -= _size(oldest)


def _encode(fetch: Fetch, batch: Batch) -> Sequence[Buffer]:
    """Encode the records as one batch; where the append time counts, as one batch for each append time."""
    assert fetch.topic is not None
    columns, start = batch.columns, to_kafka(batch.start_offset)
    if fetch.topic.timestamp_type is TimestampType.CREATE:
        return encode(columns, start)
    edges = list(accumulate((count for count, _ in columns.append_runs), initial=0))
    return [
        buffer
        for edge, part in zip(edges, cut_columns(columns, edges), strict=False)
        for buffer in encode(part, start + edge, append_time=True)
    ]


def _fetch_of(topic: str | LlogError, partition: FetchPartition) -> Fetch:
    fetch = Fetch(
        TopicPartition("" if isinstance(topic, LlogError) else topic, partition.partition),
        from_kafka(partition.fetch_offset),
        max(partition.partition_max_bytes, 0),
        record_overhead=_RECORD_OVERHEAD,
    )
    if isinstance(topic, LlogError):
        fetch.fail(topic)
    return fetch


def _redirection(partition: FetchPartition, node_id: int) -> PartitionData:
    """Send the client to a broker of its own zone."""
    return PartitionData(
        partition_index=partition.partition, high_watermark=-1, preferred_read_replica=node_id, records=[]
    )


def _size(buffers: Sequence[Buffer]) -> int:
    return sum(map(len, buffers))
