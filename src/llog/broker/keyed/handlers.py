"""The handlers of the routes under `/keyed`, on the keyed log that the broker holds."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from starlette.requests import Request
from starlette.responses import Response

from llog.base.units import bytes_to_json
from llog.broker.http.answers import json_answer
from llog.broker.http.arrow import MEDIA_TYPE, encode_stream, wants_arrow
from llog.broker.http.bodies import Bodies
from llog.broker.http.events import LAST_EVENT_ID, events_answer
from llog.broker.http.json_records import bytes_from_json, keyed_pairs_from_json, keyed_records_to_json
from llog.broker.http.requests import JSON, content_type, decode_body, decode_query
from llog.broker.keyed.holder import HeldLog
from llog.broker.keyed.messages import (
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
    decode_keyed_records,
    decode_parameters,
    segment_to_json,
)
from llog.broker.keyed.pages import keys_page, scan_page
from llog.broker.keyed.tail import Tails
from llog.broker.metrics import Metrics
from llog.config import Settings
from llog.errors import RecordTooLarge
from llog.keyed import KeyedLogReader, Segment, SeqRange, TimeRange
from llog.keyed.model import columns_of
from llog.keyed.runs import SCHEMA
from llog.log.owners import Owners

_TOKEN_HEADER: Final = "llog-cursor"


class KeyedHandlers:
    """Handlers raise `LlogError`, which the broker turns into an answer."""

    def __init__(
        self,
        url: str,
        settings: Settings,
        metrics: Metrics,
        stopping: asyncio.Event,
        bodies: Bodies,
        owners: Owners | None = None,
    ) -> None:
        self._held = HeldLog(url, settings, metrics, owners)
        self._tails = Tails(self._held, metrics, stopping)
        self._metrics = metrics
        self._bodies = bodies

    async def check(self) -> None:
        await asyncio.to_thread(self._held.check)

    async def close(self) -> None:
        await self._held.close()

    async def append(self, request: Request) -> Response:
        is_arrow = content_type(request) == MEDIA_TYPE
        async with self._bodies.read(request, MEDIA_TYPE if is_arrow else JSON) as body:
            if is_arrow:
                await_durable = decode_parameters(AppendQuery, request).await_durable
                keys, values = columns_of(decode_keyed_records(body))
            else:
                command = decode_body(AppendRequest, body)
                await_durable = command.await_durable
                keys, values = columns_of(keyed_pairs_from_json(command.records))
            records = pa.RecordBatch.from_arrays([keys, values], ["key", "value"])
            first = await self._held.write(lambda log: log.append(records, await_durable))
        self._metrics.keyed_appends += 1
        self._metrics.keyed_records += len(keys)
        self._metrics.keyed_bytes += _size(keys) + _size(values)
        return json_answer({"first_sequence": first, "last_sequence": first + len(keys) - 1, "records": len(keys)})

    async def seal(self, request: Request) -> Response:
        async with self._bodies.read(request, JSON) as body:
            user_meta = bytes_from_json(decode_body(SealRequest, body).user_meta)
        if user_meta is not None and len(user_meta) > USER_META_BYTES_MAX:
            raise RecordTooLarge(f"user_meta has {len(user_meta)} bytes, more than {USER_META_BYTES_MAX}: shorten it")
        return json_answer({"sealed": await self._held.write(lambda log: log.seal_segment(user_meta))})

    async def scan(self, request: Request) -> Response:
        query, arrow = decode_parameters(ScanQuery, request), wants_arrow(request)
        page = await self._held.read(lambda log: scan_page(log, query))
        self._metrics.keyed_scans += 1
        self._metrics.keyed_scanned_records += sum(batch.num_rows for batch in page.batches)
        if arrow:
            return _arrow(SCHEMA, page.batches, page.next_token)
        return json_answer(
            {
                "records": [each for batch in page.batches for each in keyed_records_to_json(batch)],
                "cursor": page.next_token,
            }
        )

    async def count(self, request: Request) -> Response:
        query = decode_parameters(CountQuery, request)
        wanted = SeqRange(query.start, query.end)
        return json_answer(
            {"count": await self._held.read(lambda log: log.count(query.key, wanted, query.approximate))}
        )

    async def list_keys(self, request: Request) -> Response:
        query, arrow = decode_parameters(KeysQuery, request), wants_arrow(request)
        keys, more = await self._held.read(lambda log: keys_page(log, query))
        if arrow:
            return _arrow(KEYS_SCHEMA, [pa.RecordBatch.from_arrays([keys], schema=KEYS_SCHEMA)])
        return json_answer({"keys": [bytes_to_json(key) for key in keys.to_pylist()], "more": more})

    async def list_segments(self, request: Request) -> Response:
        query, arrow = decode_parameters(SegmentsQuery, request), wants_arrow(request)
        wanted = SeqRange(query.start, query.end), TimeRange(query.start_time_ms, query.end_time_ms)

        async def find_segments(log: KeyedLogReader) -> list[Segment]:
            # A writer has its segments in memory: this reads the store, which shows whether it still is the writer.
            await log.count(b"", SeqRange(await log.next_sequence()))
            return await log.segments(*wanted)

        found = await self._held.read(find_segments)
        if arrow:
            rows = [msgspec.structs.asdict(each) for each in found]
            return _arrow(SEGMENTS_SCHEMA, [pa.RecordBatch.from_pylist(rows, SEGMENTS_SCHEMA)])
        return json_answer({"segments": [segment_to_json(each) for each in found]})

    async def tail(self, request: Request) -> Response:
        query = decode_parameters(TailQuery, request)
        last = request.headers.get(LAST_EVENT_ID, "")
        if last:
            seen = decode_query(LastEvent, {"last_event_id": last})
            query = msgspec.structs.replace(query, after=seen.last_event_id)
        return await events_answer(request, lambda: self._tails.follow(query))


def _arrow(schema: pa.Schema, batches: list[pa.RecordBatch], token: str | None = None) -> Response:
    headers = {} if token is None else {_TOKEN_HEADER: token}
    return Response(encode_stream(schema, batches), headers=headers, media_type=MEDIA_TYPE)


def _size(column: Any) -> int:
    size: int = pc.sum(pc.binary_length(column)).as_py() or 0
    return size
