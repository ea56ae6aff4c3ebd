"""`POST /consume`: records of many partitions as JSON."""

from __future__ import annotations

from typing import Any, Final

from llog.base.units import bytes_to_json
from llog.batch.columns import decode_headers, effective_timestamps
from llog.broker.fetcher import Fetch, FetchService
from llog.broker.http.messages import ConsumeRequest
from llog.broker.http.problems import error_of
from llog.broker.metrics import Metrics
from llog.engines.port import Batch
from llog.model import TopicPartition

RECORD_OVERHEAD: Final = 80
"""What a record counts for besides its bytes: about what its field names take in the answer."""


async def consume(service: FetchService, request: ConsumeRequest, metrics: Metrics) -> list[dict[str, Any]]:
    """One answer per item, in their order. Earlier items go first where `max_bytes` is not enough for all."""
    fetches = [
        Fetch(
            TopicPartition(item.topic, item.partition),
            item.fetch_offset,
            item.partition_max_bytes,
            record_overhead=RECORD_OVERHEAD,
        )
        for item in request.topic_partitions
    ]
    await service.fetch(
        fetches, max_bytes=request.max_bytes, min_bytes=request.min_bytes, max_wait_ms=request.max_wait_ms
    )
    for fetch in fetches:
        if fetch.error is not None:
            metrics.errors[fetch.error.code] += 1
    return [_answer(fetch) for fetch in fetches]


def _answer(fetch: Fetch) -> dict[str, Any]:
    answer: dict[str, Any] = {"topic": fetch.tp.topic, "partition": fetch.tp.partition}
    if fetch.error is not None:
        answer["error"] = error_of(fetch.error)
    if fetch.next_offset is not None:
        answer |= {"high_watermark": fetch.next_offset - 1, "log_start_offset": fetch.log_start_offset}
    records = [record for batch in fetch.batches for record in _records(batch)]
    return answer | {"next_fetch_offset": fetch.position, "records": records}


def _records(batch: Batch) -> list[dict[str, Any]]:
    columns = batch.columns
    count = columns.count
    keys = [None] * count if columns.keys is None else columns.keys.to_pylist()
    headers = [b""] * count if columns.headers is None else columns.headers.to_pylist()
    times = effective_timestamps(columns).to_pylist()
    return [
        {
            "offset": offset,
            "payload": bytes_to_json(value),
            "key": bytes_to_json(key),
            "timestamp": ms,
            "headers": [[name, bytes_to_json(data)] for name, data in decode_headers(encoded)],
        }
        for offset, (value, key, ms, encoded) in enumerate(
            zip(columns.values.to_pylist(), keys, times, headers, strict=True), batch.start_offset
        )
    ]
