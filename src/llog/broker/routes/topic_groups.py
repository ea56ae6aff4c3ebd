"""`POST /topics/consume`, `/ack`, `/release`, `/heartbeat` and `/leave`: topics for consumer groups, as JSON or Arrow.

Message ids do not fit into a JavaScript number, so JSON has them as text. A payload is the JSON value itself if its
bytes are JSON, else text, else `{"base64": …}`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from datetime import datetime, timedelta
from typing import Annotated, Any, Final, Literal

import msgspec
import pyarrow as pa
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from llog.base.units import bytes_to_json, ms_of
from llog.batch.columns import binary_size, headers_in
from llog.broker.http.arrow import MEDIA_TYPE
from llog.broker.http.disconnects import unless_gone
from llog.broker.http.messages import ITEMS_MAX, WAIT_MS_MAX, FetchBytes, Partition, decoded
from llog.broker.metrics import Metrics
from llog.errors import InvalidArgument
from llog.groups.acks import committed_in, warnings_of
from llog.groups.consumption import Consuming
from llog.groups.records import VISIBILITY_MS_MAX
from llog.groups.requests import LIMIT_MAX, ConsumeCall, Start

Handler = Callable[[Request], Awaitable[Response]]
Body = Callable[[Request], AbstractAsyncContextManager[bytearray]]

MEMBER_HEADER: Final = "llog-member"
_JSON: Final = "application/json"
_EPOCH: Final = datetime(1970, 1, 1)
_OFFSET_MAX: Final = (1 << 63) - 2


Offset = Annotated[int, Meta(ge=0, le=_OFFSET_MAX)]


class StartAt(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="pascal"):
    """`{"Offset": n}`, `{"After": n}` or `{"Timestamp": ms or ISO 8601}`."""

    offset: Offset | None = None
    after: Offset | None = None
    timestamp: int | str | None = None


class ConsumeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    topic: str
    group_id: str | None = None
    start: Literal["Latest", "Earliest"] | StartAt | None = None
    limit: Annotated[int, Meta(ge=1, le=LIMIT_MAX)] = 100
    partition_id: Partition | None = None
    member: str = ""
    wait_ms: Annotated[int, Meta(ge=0, le=WAIT_MS_MAX)] = 0
    visibility_ms: Annotated[int, Meta(ge=1, le=VISIBILITY_MS_MAX)] = 60_000
    max_attempts: Annotated[int, Meta(ge=1)] | None = None
    dead_letter: str | None = None
    mode: Literal["claimed", "assigned"] = "claimed"
    max_bytes: FetchBytes = 8 << 20


class AckItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    partition_id: Partition
    offset: Offset


class AckRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    topic: str
    group_id: str
    partition_id: Partition | None = None
    upto_offset: Offset | None = None
    upto: Annotated[list[AckItem], Meta(min_length=1, max_length=ITEMS_MAX)] | None = None
    member: str = ""


class ReleaseRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    topic: str
    group_id: str
    partition_id: Partition
    offset: Offset
    member: str = ""
    delay_ms: Annotated[int, Meta(ge=0, le=VISIBILITY_MS_MAX)] = 0


class HeartbeatRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    topic: str
    group_id: str
    member: str
    visibility_ms: Annotated[int, Meta(ge=1, le=VISIBILITY_MS_MAX)] = 60_000


class LeaveRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    topic: str
    group_id: str
    member: str


class TopicGroups:
    def __init__(self, consuming: Consuming, metrics: Metrics, body: Body) -> None:
        self._consuming = consuming
        self._metrics = metrics
        self._body = body

    def routes(self) -> list[tuple[str, str, str, Handler]]:
        """Role, method, path and handler of each."""
        return [
            ("read", "POST", "/topics/consume", self._consume),
            ("read", "POST", "/topics/ack", self._ack),
            ("read", "POST", "/topics/release", self._release),
            ("read", "POST", "/topics/heartbeat", self._heartbeat),
            ("read", "POST", "/topics/leave", self._leave),
        ]

    async def _consume(self, request: Request) -> Response:
        async with self._body(request) as body:
            asked = decoded(ConsumeRequest, body)
        call = self._consuming.named(_call(asked))
        found = await unless_gone(request, self._consuming.consume(call))
        self._metrics.consumed_records += found.num_rows
        self._metrics.consumed_bytes += sum(_byte_size(found.column(name)) for name in ("key", "payload"))
        if MEDIA_TYPE in request.headers.get("accept", ""):
            return Response(memoryview(_stream(found)), headers={MEMBER_HEADER: call.member}, media_type=MEDIA_TYPE)
        return answer({"messages": messages_out(found), "member": call.member})

    async def _ack(self, request: Request) -> Response:
        async with self._body(request) as body:
            asked = decoded(AckRequest, body)
        acked = await self._consuming.ack(asked.topic, asked.group_id, _upto(asked), asked.member)
        found: dict[str, Any] = {"committed": committed_in(acked)}
        if warnings := warnings_of(asked.topic, acked):
            held = {partition: each.held for partition, each in sorted(acked.items()) if each.held}
            found |= {"held_by_others": held, "warnings": warnings}
        return answer(found)

    async def _release(self, request: Request) -> Response:
        async with self._body(request) as body:
            asked = decoded(ReleaseRequest, body)
        released = await self._consuming.release(
            asked.topic,
            asked.group_id,
            asked.partition_id,
            asked.offset,
            member=asked.member,
            delay_ms=asked.delay_ms,
        )
        return answer({"released": released})

    async def _heartbeat(self, request: Request) -> Response:
        async with self._body(request) as body:
            asked = decoded(HeartbeatRequest, body)
        partitions = await self._consuming.heartbeat(
            asked.topic, asked.group_id, asked.member, visibility_ms=asked.visibility_ms
        )
        return answer({"partitions": partitions})

    async def _leave(self, request: Request) -> Response:
        async with self._body(request) as body:
            asked = decoded(LeaveRequest, body)
        await self._consuming.leave(asked.topic, asked.group_id, asked.member)
        return answer({})


def messages_out(table: pa.Table) -> list[dict[str, Any]]:
    """Messages as JSON has them: an object for each, so whoever calls this bounds them."""
    rows = {name: table.column(name).to_pylist() for name in table.column_names if name not in ("ts", "headers")}
    times = table.column("ts").cast(pa.int64()).to_pylist()
    return [
        {
            "topic_id": topic,
            "partition_id": partition,
            "offset": offset,
            "message_id": None if message_id is None else str(message_id),
            "source_table": source_table,
            "op": op,
            "ts": _iso(ms),
            "payload_mode": mode,
            "key": bytes_to_json(key),
            "payload": _payload_out(payload),
            "headers": [[name, bytes_to_json(value)] for name, value in headers],
            "attempt": attempt,
        }
        for topic, partition, offset, message_id, source_table, op, ms, mode, key, payload, headers, attempt in zip(
            rows["topic"],
            rows["partition"],
            rows["offset"],
            rows["message_id"],
            rows["source_table"],
            rows["op"],
            times,
            rows["payload_mode"],
            rows["key"],
            rows["payload"],
            headers_in(table.column("headers")),
            rows["attempt"],
            strict=True,
        )
    ]


def _call(asked: ConsumeRequest) -> ConsumeCall:
    return ConsumeCall(
        topic=asked.topic,
        group=asked.group_id,
        member=asked.member,
        partition=asked.partition_id,
        start=start_of(asked.start),
        limit=asked.limit,
        wait_ms=asked.wait_ms,
        visibility_ms=asked.visibility_ms,
        max_attempts=asked.max_attempts,
        dead_letter=asked.dead_letter,
        mode=asked.mode,
        max_bytes=asked.max_bytes,
    )


def start_of(start: str | StartAt | None) -> Start | None:
    match start:
        case None:
            return None
        case "Latest":
            return Start("latest")
        case "Earliest":
            return Start("earliest")
        case StartAt(offset=int(offset), after=None, timestamp=None):
            return Start("offset", offset)
        case StartAt(offset=None, after=int(offset), timestamp=None):
            return Start("after", offset)
        case StartAt(offset=None, after=None, timestamp=int() | str() as time):
            return Start("timestamp", time if isinstance(time, int) else _millis(time))
        case _:
            raise InvalidArgument('start has exactly one of "Offset", "After" and "Timestamp"')


def _upto(asked: AckRequest) -> dict[int | None, int]:
    if asked.upto is not None and asked.upto_offset is None and asked.partition_id is None:
        named: dict[int | None, int] = {each.partition_id: each.offset for each in asked.upto}
        if len(named) < len(asked.upto):
            raise InvalidArgument("upto names a partition twice: once is enough")
        return named
    if asked.upto is None and asked.upto_offset is not None:
        return {asked.partition_id: asked.upto_offset}
    raise InvalidArgument(
        'an ack has either "upto_offset" (and "partition_id") or "upto", a list with both for each partition'
    )


def _millis(text: str) -> int:
    try:
        return ms_of(datetime.fromisoformat(text))
    except ValueError:
        raise InvalidArgument(f"a timestamp is {text[:80]!r}: write ms since 1970, or ISO 8601") from None


def _iso(ms: int) -> str | int:
    """As text, unless it is a year that text does not have."""
    try:
        return (_EPOCH + timedelta(milliseconds=ms)).isoformat(timespec="milliseconds") + "Z"
    except OverflowError:
        return ms


def _payload_out(payload: bytes | None) -> Any:
    if payload is None:
        return None
    try:
        msgspec.json.decode(payload)  # the whole of it: what is put into the answer as it is must be JSON
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return bytes_to_json(payload)
    return msgspec.Raw(payload)


def _byte_size(column: pa.ChunkedArray) -> int:
    return sum(binary_size(chunk) for chunk in column.chunks)


def _stream(table: pa.Table) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def answer(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type=_JSON)
