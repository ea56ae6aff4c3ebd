"""Consumer groups: deliveries to their members under `/topics/…`, and the groups themselves under `/groups/…`.

Messages are delivered as JSON or Arrow. Message ids do not fit into a JavaScript number, so JSON has them as text. A
payload is the JSON value itself if its bytes are JSON, else text, else `{"base64": …}`.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Annotated, Any, Final, Literal

import msgspec
import pyarrow as pa
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from llog.base.units import bytes_to_json, epoch_ms
from llog.batch.columns import binary_size, decode_arrow_headers
from llog.broker.http.answer_shapes import (
    AckAnswer,
    DeletedAnswer,
    GroupsAnswer,
    HeartbeatAnswer,
    LeaveAnswer,
    MessagesAnswer,
    ReleaseAnswer,
    ResetAnswer,
)
from llog.broker.http.answers import json_answer
from llog.broker.http.arrow import MEDIA_TYPE, encode_stream
from llog.broker.http.bodies import Bodies
from llog.broker.http.disconnects import unless_gone
from llog.broker.http.forwarding import FindOwner
from llog.broker.http.json_records import value_to_json
from llog.broker.http.operations import Operation
from llog.broker.http.requests import ITEMS_MAX, JSON, WAIT_MS_MAX, FetchBytes, Partition, decode_body
from llog.broker.http.routing import Route
from llog.broker.metrics import Metrics
from llog.errors import InvalidArgument
from llog.groups.acks import ack_warnings, committed_offsets
from llog.groups.dispatcher import Dispatcher
from llog.groups.listing import GroupListing
from llog.groups.options import LIMIT_MAX, ConsumeOptions, Start
from llog.groups.records import VISIBILITY_MS_MAX

MEMBER_HEADER: Final = "llog-member"
_EPOCH: Final = datetime(1970, 1, 1)
_OFFSET_MAX: Final = (1 << 63) - 2

Offset = Annotated[int, Meta(ge=0, le=_OFFSET_MAX)]


class StartAt(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="pascal"):
    """`{"Offset": n}`, `{"After": n}` or `{"Timestamp": ms or ISO 8601}`."""

    offset: Offset | None = None
    after: Offset | None = None
    timestamp: int | str | None = None


class GroupConsumeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
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


class ListGroupsRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    group_id: str | None = None


class ResetGroupRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    topic: str
    group_id: str
    to: Literal["Latest", "Earliest"] | StartAt
    partition_id: Partition | None = None


class DeleteGroupRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    group_id: str
    topic: str | None = None
    force: bool = False


_CONSUME: Final = Operation(
    "Consumer groups",
    "Deliver messages to a member of a group",
    {JSON: GroupConsumeRequest},
    answers={JSON: MessagesAnswer, MEDIA_TYPE: None},
)
_ACK: Final = Operation("Consumer groups", "Acknowledge messages", {JSON: AckRequest}, answers={JSON: AckAnswer})
_RELEASE: Final = Operation(
    "Consumer groups", "Give a message back", {JSON: ReleaseRequest}, answers={JSON: ReleaseAnswer}
)
_HEARTBEAT: Final = Operation(
    "Consumer groups", "Keep an assigned member alive", {JSON: HeartbeatRequest}, answers={JSON: HeartbeatAnswer}
)
_LEAVE: Final = Operation(
    "Consumer groups", "End the membership of an assigned member", {JSON: LeaveRequest}, answers={JSON: LeaveAnswer}
)
_LIST: Final = Operation(
    "Consumer groups", "List groups and their lag", {JSON: ListGroupsRequest}, answers={JSON: GroupsAnswer}
)
_RESET: Final = Operation("Consumer groups", "Move a group", {JSON: ResetGroupRequest}, answers={JSON: ResetAnswer})
_DELETE: Final = Operation(
    "Consumer groups", "Delete a group", {JSON: DeleteGroupRequest}, answers={JSON: DeletedAnswer}
)


class GroupRoutes:
    def __init__(
        self, dispatcher: Dispatcher, listing: GroupListing, find_tables: FindOwner, bodies: Bodies, metrics: Metrics
    ) -> None:
        """`find_tables` finds the owner of the tables, beside which the groups of RocksDB's topics are."""
        self._dispatcher = dispatcher
        self._listing = listing
        self._find_tables = find_tables
        self._bodies = bodies
        self._metrics = metrics

    def routes(self) -> list[Route]:
        return [
            Route("read", "POST", "/topics/consume", self._consume, wait_ms=WAIT_MS_MAX, operation=_CONSUME),
            Route("read", "POST", "/topics/ack", self._ack, operation=_ACK),
            Route("read", "POST", "/topics/release", self._release, operation=_RELEASE),
            Route("read", "POST", "/topics/heartbeat", self._heartbeat, operation=_HEARTBEAT),
            Route("read", "POST", "/topics/leave", self._leave, operation=_LEAVE),
            Route("read", "POST", "/groups/list", self._list, find_owner=self._find_tables, operation=_LIST),
            Route("read", "POST", "/groups/reset", self._reset, operation=_RESET),
            Route("read", "POST", "/groups/delete", self._delete, find_owner=self._find_tables, operation=_DELETE),
        ]

    async def _consume(self, request: Request) -> Response:
        async with self._bodies.read(request) as body:
            command = decode_body(GroupConsumeRequest, body)
        options = self._dispatcher.name_member(_consume_options(command))
        found = await unless_gone(request, self._dispatcher.consume(options))
        if found.num_rows:
            size = sum(_byte_size(found.column(name)) for name in ("key", "payload"))
            self._metrics.count_consumed(command.topic, command.group_id, found.num_rows, size)
            self._metrics.count_fetched(command.topic, command.group_id, size)  # groups do not read from the tail
        if MEDIA_TYPE in request.headers.get("accept", ""):
            return Response(
                encode_stream(found.schema, found.to_batches()),
                headers={MEMBER_HEADER: options.member},
                media_type=MEDIA_TYPE,
            )
        return json_answer({"messages": _messages_to_json(found), "member": options.member})

    async def _ack(self, request: Request) -> Response:
        async with self._bodies.read(request) as body:
            command = decode_body(AckRequest, body)
        acked = await self._dispatcher.ack(command.topic, command.group_id, _upto(command), command.member)
        found: dict[str, Any] = {"committed": committed_offsets(acked)}
        if warnings := ack_warnings(command.topic, acked):
            held = {partition: each.held for partition, each in sorted(acked.items()) if each.held}
            found |= {"held_by_others": held, "warnings": warnings}
        return json_answer(found)

    async def _release(self, request: Request) -> Response:
        async with self._bodies.read(request) as body:
            command = decode_body(ReleaseRequest, body)
        released = await self._dispatcher.release(
            command.topic,
            command.group_id,
            command.partition_id,
            command.offset,
            member=command.member,
            delay_ms=command.delay_ms,
        )
        return json_answer({"released": released})

    async def _heartbeat(self, request: Request) -> Response:
        async with self._bodies.read(request) as body:
            command = decode_body(HeartbeatRequest, body)
        partitions = await self._dispatcher.heartbeat(
            command.topic, command.group_id, command.member, visibility_ms=command.visibility_ms
        )
        return json_answer({"partitions": partitions})

    async def _leave(self, request: Request) -> Response:
        async with self._bodies.read(request) as body:
            command = decode_body(LeaveRequest, body)
        await self._dispatcher.leave(command.topic, command.group_id, command.member)
        return json_answer({})

    async def _list(self, request: Request) -> Response:
        async with self._bodies.read(request) as body:
            command = decode_body(ListGroupsRequest, body)
        names = await self._listing.names() if command.group_id is None else [command.group_id]
        found = {name: await self._listing.describe(name) for name in names}
        if command.group_id is not None and not found[command.group_id]:
            await self._listing.check_exists(command.group_id)
        missing = await self._listing.unreachable()
        groups = {name: [msgspec.structs.asdict(share) for share in shares] for name, shares in found.items()}
        return json_answer({"groups": groups, "missing": None if missing is None else str(missing)})

    async def _reset(self, request: Request) -> Response:
        async with self._bodies.read(request) as body:
            command = decode_body(ResetGroupRequest, body)
        start = _start(command.to)
        assert start is not None
        moved = await self._dispatcher.reset(command.group_id, command.topic, start, command.partition_id)
        return json_answer({"offsets": {str(partition): offset for partition, offset in sorted(moved.items())}})

    async def _delete(self, request: Request) -> Response:
        async with self._bodies.read(request) as body:
            command = decode_body(DeleteGroupRequest, body)
        return json_answer(
            {"deleted": await self._listing.delete_completely(command.group_id, command.topic, force=command.force)}
        )


def _messages_to_json(table: pa.Table) -> list[dict[str, Any]]:
    """Return an object for each message; the caller bounds their number."""
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
            "ts": _time_to_json(ms),
            "payload_mode": mode,
            "key": bytes_to_json(key),
            "payload": value_to_json(payload),
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
            decode_arrow_headers(table.column("headers")),
            rows["attempt"],
            strict=True,
        )
    ]


def _consume_options(command: GroupConsumeRequest) -> ConsumeOptions:
    return ConsumeOptions(
        topic=command.topic,
        group=command.group_id,
        member=command.member,
        partition=command.partition_id,
        start=_start(command.start),
        limit=command.limit,
        wait_ms=command.wait_ms,
        visibility_ms=command.visibility_ms,
        max_attempts=command.max_attempts,
        dead_letter=command.dead_letter,
        mode=command.mode,
        max_bytes=command.max_bytes,
    )


def _start(start: str | StartAt | None) -> Start | None:
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
            return Start("timestamp", time if isinstance(time, int) else _parse_time(time))
        case _:
            raise InvalidArgument('start has exactly one of "Offset", "After" and "Timestamp"')


def _upto(command: AckRequest) -> dict[int | None, int]:
    if command.upto is not None and command.upto_offset is None and command.partition_id is None:
        named: dict[int | None, int] = {each.partition_id: each.offset for each in command.upto}
        if len(named) < len(command.upto):
            raise InvalidArgument("upto names a partition twice: once is enough")
        return named
    if command.upto is None and command.upto_offset is not None:
        return {command.partition_id: command.upto_offset}
    raise InvalidArgument(
        'an ack has either "upto_offset" (and "partition_id") or "upto", a list with both for each partition'
    )


def _parse_time(text: str) -> int:
    try:
        return epoch_ms(datetime.fromisoformat(text))
    except ValueError:
        raise InvalidArgument(f"a timestamp is {text[:80]!r}: write ms since 1970, or ISO 8601") from None


def _time_to_json(ms: int) -> str | int:
    """Return the time as text, or as a number if its year is beyond what text has."""
    try:
        return (_EPOCH + timedelta(milliseconds=ms)).isoformat(timespec="milliseconds") + "Z"
    except OverflowError:
        return ms


def _byte_size(column: pa.ChunkedArray) -> int:
    return sum(binary_size(chunk) for chunk in column.chunks)
