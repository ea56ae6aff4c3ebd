"""Tails: `GET /topics/{name}/tail` and `GET /topics/{name}/partitions/{partition}/tail`, as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Final

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from llog.broker.http.events import EVENTS, LAST_EVENT_ID, HeartbeatMs, events_answer
from llog.broker.http.json_records import ValueForm
from llog.broker.http.operations import Operation
from llog.broker.http.requests import WAIT_MS_MAX, decode_query, path_partition
from llog.broker.http.routing import Route
from llog.broker.routes.partition_records import End, Offset, RecordCount, find_start, start_of
from llog.broker.tails import Followed, Tails
from llog.engines.routing import EngineReader
from llog.errors import InvalidArgument
from llog.log.catalog import Catalog
from llog.model import FIRST_OFFSET

PARTITIONS_MAX: Final = 256
"""The partitions of a topic that can be followed together: each event has an offset of each in its id."""
_LAST_EVENT: Final = {"Last-Event-ID": "The id of the last event that the client has: the tail goes on behind it."}
_ID_CHARACTERS_MAX: Final = 20 * PARTITIONS_MAX


class TailQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    offset: Offset | End | None = None
    last: RecordCount | None = None
    heartbeat_ms: HeartbeatMs = 15_000
    values: ValueForm = "json"


class TopicTailQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    offset: End = "latest"
    heartbeat_ms: HeartbeatMs = 15_000
    values: ValueForm = "json"


class _LastEvent(msgspec.Struct, frozen=True):
    """The header `Last-Event-ID` of a client that reconnects: the last offset that it has of each partition."""

    last_event_id: list[Annotated[int, Meta(ge=0, lt=1 << 62)]]


_FOLLOW_PARTITION: Final = Operation(
    "Records", "Follow a partition", query=TailQuery, headers=_LAST_EVENT, answers={EVENTS: None}
)
_FOLLOW_TOPIC: Final = Operation(
    "Records", "Follow all partitions of a topic", query=TopicTailQuery, headers=_LAST_EVENT, answers={EVENTS: None}
)


class TailRoutes:
    def __init__(self, tails: Tails, catalog: Catalog, reader: EngineReader) -> None:
        self._tails = tails
        self._catalog = catalog
        self._reader = reader

    def routes(self) -> list[Route]:
        partition_path = "/topics/{name}/partitions/{partition}/tail"
        return [
            Route(
                "read", "GET", partition_path, self._follow_partition, wait_ms=WAIT_MS_MAX, operation=_FOLLOW_PARTITION
            ),
            Route(
                "read", "GET", "/topics/{name}/tail", self._follow_topic, wait_ms=WAIT_MS_MAX, operation=_FOLLOW_TOPIC
            ),
        ]

    async def _follow_partition(self, request: Request) -> Response:
        tp, query = path_partition(request), decode_query(TailQuery, request.query_params)

        async def follow() -> AsyncIterator[bytes]:
            positions = _last_positions(request)
            if positions is None:
                positions = [await find_start(self._reader, tp, query.offset or "latest", query.last)]
            elif len(positions) != 1:
                raise InvalidArgument(f"the last-event-id has {len(positions)} offsets: that of a partition has one")
            followed = Followed(tp.topic, [tp.partition], positions, grows=False)
            return await self._tails.follow(followed, query.heartbeat_ms, query.values)

        return await events_answer(request, follow)

    async def _follow_topic(self, request: Request) -> Response:
        query = decode_query(TopicTailQuery, request.query_params)

        async def follow() -> AsyncIterator[bytes]:
            topic = await self._catalog.get(request.path_params["name"])
            if topic.partitions > PARTITIONS_MAX:
                raise InvalidArgument(
                    f"topic {topic.name!r} has {topic.partitions} partitions, and at most {PARTITIONS_MAX} can be "
                    f"followed together: follow /topics/{topic.name}/partitions/{{partition}}/tail"
                )
            positions = _last_positions(request)
            if positions is None:
                positions = [start_of(each, query.offset) for each in await self._reader.topic_bounds(topic)]
            elif len(positions) > topic.partitions:
                raise InvalidArgument(
                    f"the last-event-id has {len(positions)} offsets, and topic {topic.name!r} has "
                    f"{topic.partitions} partitions: the id is of another topic"
                )
            positions += [FIRST_OFFSET] * (topic.partitions - len(positions))  # they were added meanwhile
            followed = Followed(topic.name, range(topic.partitions), positions, grows=True)
            return await self._tails.follow(followed, query.heartbeat_ms, query.values)

        return await events_answer(request, follow)


def _last_positions(request: Request) -> list[int] | None:
    """Return the next offset that a client that reconnects wants of each partition; None if it is a new client."""
    last = request.headers.get(LAST_EVENT_ID, "")
    if not last:
        return None
    if len(last) > _ID_CHARACTERS_MAX:
        raise InvalidArgument(f"the last-event-id has {len(last)} characters: the id is of no topic's tail")
    seen = decode_query(_LastEvent, {"last_event_id": last.split(",")})
    return [offset + 1 for offset in seen.last_event_id]
