"""What is answered under `/keyed`."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from llog.base.units import bytes_to_json
from llog.broker.http.arrow import MEDIA_TYPE
from llog.broker.http.messages import data_in, decoded, keyed_out, pairs_in, queried
from llog.broker.keyed.holder import HeldLog
from llog.broker.keyed.messages import (
    JSON,
    KEYS_SCHEMA,
    SEGMENTS_SCHEMA,
    USER_META_BYTES_MAX,
    AppendQuery,
    AppendRequest,
    CountQuery,
    KeysQuery,
    LastEvent,
    ScanQuery,
    SealRequest,
    SegmentsQuery,
    TailQuery,
    parameters,
    records_from,
    shown_segment,
    stream_of,
    wants_arrow,
)
from llog.broker.keyed.pages import keys_page, scan_page
from llog.broker.keyed.tail import Tails
from llog.broker.metrics import Metrics
from llog.broker.routes.keyed import Body, Handler
from llog.config import Settings
from llog.errors import RecordTooLarge
from llog.keyed import KeyedLogReader, Segment, SeqRange, TimeRange
from llog.keyed.model import columns_of
from llog.keyed.runs import SCHEMA
from llog.log.owners import Owners

_CURSOR: Final = "llog-cursor"
_EVENTS: Final = "text/event-stream"


class KeyedAnswers:
    """Handlers by path. They raise what is wrong; the broker makes answers of it."""

    def __init__(
        self,
        url: str,
        settings: Settings,
        metrics: Metrics,
        stopping: asyncio.Event,
        body: Body,
        owners: Owners | None = None,
    ) -> None:
        self._held = HeldLog(url, settings, metrics, owners)
        self._tails = Tails(self._held, metrics, stopping)
        self._metrics = metrics
        self._body = body
        self.handlers: dict[str, Handler] = {
            "/keyed/append": self._append,
            "/keyed/seal": self._seal,
            "/keyed/scan": self._scan,
            "/keyed/count": self._count,
            "/keyed/keys": self._keys,
            "/keyed/segments": self._segments,
            "/keyed/tail": self._tail,
        }

    async def check(self) -> None:
        await asyncio.to_thread(self._held.check)

    async def close(self) -> None:
        await self._held.close()

    async def _append(self, request: Request) -> Response:
        is_arrow = request.headers.get("content-type", "").partition(";")[0].strip().lower() == MEDIA_TYPE
        async with self._body(request, MEDIA_TYPE if is_arrow else JSON) as body:
            if is_arrow:
                await_durable = parameters(AppendQuery, request).await_durable
                keys, values = columns_of(records_from(body))
            else:
                asked = decoded(AppendRequest, body)
                await_durable = asked.await_durable
                keys, values = columns_of(pairs_in(asked.records))
            records = pa.RecordBatch.from_arrays([keys, values], ["key", "value"])
            first = await self._held.write(lambda log: log.append(records, await_durable))
        self._metrics.keyed_appends += 1
        self._metrics.keyed_records += len(keys)
        self._metrics.keyed_bytes += _size(keys) + _size(values)
        return _json({"first_sequence": first, "last_sequence": first + len(keys) - 1, "records": len(keys)})

    async def _seal(self, request: Request) -> Response:
        async with self._body(request, JSON) as body:
            user_meta = data_in(decoded(SealRequest, body).user_meta)
        if user_meta is not None and len(user_meta) > USER_META_BYTES_MAX:
            raise RecordTooLarge(f"user_meta has {len(user_meta)} bytes, more than {USER_META_BYTES_MAX}: shorten it")
        return _json({"sealed": await self._held.write(lambda log: log.seal_segment(user_meta))})

    async def _scan(self, request: Request) -> Response:
        asked, arrow = parameters(ScanQuery, request), wants_arrow(request)
        page = await self._held.read(lambda log: scan_page(log, asked))
        self._metrics.keyed_scans += 1
        self._metrics.keyed_scanned_records += sum(batch.num_rows for batch in page.batches)
        if arrow:
            return _arrow(SCHEMA, page.batches, page.cursor)
        return _json({"records": [each for batch in page.batches for each in keyed_out(batch)], "cursor": page.cursor})

    async def _count(self, request: Request) -> Response:
        asked = parameters(CountQuery, request)
        wanted = SeqRange(asked.start, asked.end)
        return _json({"count": await self._held.read(lambda log: log.count(asked.key, wanted, asked.approximate))})

    async def _keys(self, request: Request) -> Response:
        asked, arrow = parameters(KeysQuery, request), wants_arrow(request)
        keys, more = await self._held.read(lambda log: keys_page(log, asked))
        if arrow:
            return _arrow(KEYS_SCHEMA, [pa.RecordBatch.from_arrays([keys], schema=KEYS_SCHEMA)])
        return _json({"keys": [bytes_to_json(key) for key in keys.to_pylist()], "more": more})

    async def _segments(self, request: Request) -> Response:
        asked, arrow = parameters(SegmentsQuery, request), wants_arrow(request)
        wanted = SeqRange(asked.start, asked.end), TimeRange(asked.start_time_ms, asked.end_time_ms)

        async def listed(log: KeyedLogReader) -> list[Segment]:
            # A writer knows them by heart: asking the store for something tells whether it is still the writer.
            await log.count(b"", SeqRange(await log.next_sequence()))
            return await log.segments(*wanted)

        found = await self._held.read(listed)
        if arrow:
            rows = [msgspec.structs.asdict(each) for each in found]
            return _arrow(SEGMENTS_SCHEMA, [pa.RecordBatch.from_pylist(rows, SEGMENTS_SCHEMA)])
        return _json({"segments": [shown_segment(each) for each in found]})

    async def _tail(self, request: Request) -> Response:
        asked = parameters(TailQuery, request)
        last = request.headers.get("last-event-id", "")
        if last:
            seen = queried(LastEvent, {"last_event_id": last})
            asked = msgspec.structs.replace(asked, after=seen.last_event_id)
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        if request.method == "HEAD":  # which would wait for the end of what has none
            return Response(headers=headers, media_type=_EVENTS)
        return StreamingResponse(await self._tails.follow(asked), headers=headers, media_type=_EVENTS)


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type=JSON)


def _arrow(schema: pa.Schema, batches: list[pa.RecordBatch], cursor: str | None = None) -> Response:
    headers = {} if cursor is None else {_CURSOR: cursor}
    return Response(stream_of(schema, batches), headers=headers, media_type=MEDIA_TYPE)


def _size(column: Any) -> int:
    size: int = pc.sum(pc.binary_length(column)).as_py() or 0
    return size
