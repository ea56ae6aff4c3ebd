"""Records of a partition from an offset on: `GET /topics/{name}/partitions/{partition}/records`, as JSON or Arrow."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from llog.broker.fetcher import Fetch, Fetcher
from llog.broker.http.answer_shapes import PartitionRecordsAnswer
from llog.broker.http.answers import json_answer
from llog.broker.http.arrow import MEDIA_TYPE, encode_records, wants_arrow
from llog.broker.http.json_records import JSON_RECORD_OVERHEAD, ValueForm, values_to_json
from llog.broker.http.operations import Operation
from llog.broker.http.requests import JSON, WAIT_MS_MAX, FetchBytes, decode_query, path_partition
from llog.broker.http.routing import Route
from llog.engines.routing import EngineReader
from llog.errors import InvalidArgument, OffsetOutOfRange
from llog.log.engine import Bounds
from llog.model import TopicPartition

ARROW_RECORD_OVERHEAD: Final = 24
"""Bytes that a record counts for besides its own in Arrow: its offset, its time and where its bytes end."""
RECORDS: Final = "/topics/{name}/partitions/{partition}/records"
JSON_RECORDS: Final = 1000
"""Records of a JSON answer, unless the request says otherwise."""
_RECORDS_MAX: Final = 100_000
_ATTEMPTS: Final = 3

Offset = Annotated[int, Meta(ge=1)]
End = Literal["earliest", "latest"]
RecordCount = Annotated[int, Meta(ge=1, le=_RECORDS_MAX)]


class FetchQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    offset: Offset | End | None = None
    last: RecordCount | None = None
    stop: Offset | None = None
    limit: RecordCount | None = None
    max_bytes: FetchBytes = 4 << 20
    max_wait_ms: Annotated[int, Meta(ge=0, le=WAIT_MS_MAX)] = 0
    values: ValueForm = "json"


_FETCH: Final = Operation(
    "Records",
    "Read the records of a partition",
    query=FetchQuery,
    answers={JSON: PartitionRecordsAnswer, MEDIA_TYPE: None},
)


class PartitionRecordRoutes:
    def __init__(self, fetcher: Fetcher, reader: EngineReader) -> None:
        self._fetcher = fetcher
        self._reader = reader

    def routes(self) -> list[Route]:
        return [Route("read", "GET", RECORDS, self._fetch, wait_ms=WAIT_MS_MAX, operation=_FETCH)]

    async def _fetch(self, request: Request) -> Response:
        tp, query = path_partition(request), decode_query(FetchQuery, request.query_params)
        is_arrow = wants_arrow(request)
        fetch = await self._fetch_from_start(tp, query, is_arrow)
        headers = {
            "llog-log-start-offset": str(fetch.log_start_offset),
            "llog-next-offset": str(fetch.next_offset),
            "llog-next-fetch-offset": str(fetch.position),
            "llog-topic-directory": fetch.directory,
        }
        if is_arrow:
            return Response(encode_records(fetch.batches), headers=headers, media_type=MEDIA_TYPE)
        answer = json_answer(_fetched(fetch, query.values))
        answer.headers.update(headers)
        return answer

    async def _fetch_from_start(self, tp: TopicPartition, query: FetchQuery, is_arrow: bool) -> Fetch:
        """Return what was fetched. Retention may overtake a start that was looked up: it is looked up again."""
        for attempt in range(_ATTEMPTS):
            start = await find_start(self._reader, tp, query.offset or "earliest", query.last)
            fetch = Fetch(
                tp,
                start,
                query.max_bytes,
                record_overhead=ARROW_RECORD_OVERHEAD if is_arrow else JSON_RECORD_OVERHEAD,
                stop=query.stop,
                records_max=query.limit or (None if is_arrow else JSON_RECORDS),
            )
            await self._fetcher.fetch([fetch], max_bytes=query.max_bytes, min_bytes=1, max_wait_ms=query.max_wait_ms)
            if fetch.error is None:
                break
            is_overtaken = isinstance(fetch.error, OffsetOutOfRange) and not isinstance(query.offset, int)
            if not is_overtaken or attempt == _ATTEMPTS - 1:
                raise fetch.error
        return fetch


async def find_start(reader: EngineReader, tp: TopicPartition, offset: int | End, last: int | None) -> int:
    """Return the offset at which to begin: a given one, an end of the partition, or that of the last few records."""
    if isinstance(offset, int):
        if last is not None:
            raise InvalidArgument(f"the query has the offset {offset} and the last {last} records: give one of them")
        return offset
    return start_of(await reader.bounds(tp), offset, last)


def start_of(bounds: Bounds, end: End, last: int | None = None) -> int:
    if last is not None:
        return max(bounds.log_start_offset, bounds.next_offset - last)
    return bounds.log_start_offset if end == "earliest" else bounds.next_offset


def _fetched(fetch: Fetch, form: ValueForm) -> dict[str, Any]:
    return {
        "topic": fetch.tp.topic,
        "partition": fetch.tp.partition,
        "log_start_offset": fetch.log_start_offset,
        "next_offset": fetch.next_offset,
        "next_fetch_offset": fetch.position,
        "records": [record for batch in fetch.batches for record in values_to_json(batch, form)],
    }
