"""Topics: creating, listing, describing, changing, fencing and deleting them, under `/topics`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from llog.broker.http.answer_shapes import DescribedTopic, FenceAnswer, TopicAnswer, TopicsAnswer
from llog.broker.http.answers import json_answer
from llog.broker.http.bodies import Bodies
from llog.broker.http.operations import Operation
from llog.broker.http.requests import JSON, Partition, content_type, decode_body, decode_query, is_from_page
from llog.broker.http.routing import Route
from llog.engines.object.fencing import fence_topic, unfence_topic
from llog.engines.routing import EngineReader
from llog.engines.upkeep import release_deleted
from llog.errors import InvalidArgument
from llog.log.catalog import Catalog, check_growth
from llog.log.log import Log
from llog.log.records import DELETE_RETENTION_MS, Cleanup, topic_fields
from llog.model import PARTITIONS_MAX, TimestampType

ChangeFence = Callable[[Log, str, int | None], Awaitable[list[int]]]


class TopicRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    partitions: Annotated[int, Meta(ge=1, le=PARTITIONS_MAX)] = 1
    retention_ms: Annotated[int, Meta(ge=0)] | None = None
    retention_bytes: Annotated[int, Meta(ge=0)] | None = None
    timestamp_type: TimestampType = TimestampType.CREATE
    engine: Literal["object", "disk", "rocksdb"] = "object"
    cleanup: Cleanup = Cleanup.DELETE
    delete_retention_ms: Annotated[int, Meta(ge=0)] = DELETE_RETENTION_MS


class TopicChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What of a topic to change: what is not given stays as it is, and null lifts a limit."""

    partitions: Annotated[int, Meta(ge=1, le=PARTITIONS_MAX)] | UnsetType = UNSET
    retention_ms: Annotated[int, Meta(ge=0)] | UnsetType | None = UNSET
    retention_bytes: Annotated[int, Meta(ge=0)] | UnsetType | None = UNSET
    cleanup: Cleanup | UnsetType = UNSET
    delete_retention_ms: Annotated[int, Meta(ge=0)] | UnsetType = UNSET


class FenceQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    partition: Partition | None = None


_CREATE: Final = Operation(
    "Topics", "Create a topic", {JSON: TopicRequest}, answers={JSON: TopicAnswer}, status=HTTPStatus.CREATED
)
_CHANGE: Final = Operation(
    "Topics", "Change the options of a topic, or add partitions", {JSON: TopicChange}, answers={JSON: TopicAnswer}
)
_FENCE: Final = Operation(
    "Topics", "Stop appends to a topic or a partition", query=FenceQuery, answers={JSON: FenceAnswer}
)
_UNFENCE: Final = Operation("Topics", "Let appends commit again", query=FenceQuery, answers={JSON: FenceAnswer})
_DELETE: Final = Operation("Topics", "Delete a topic and all its records", status=HTTPStatus.NO_CONTENT)
_LIST: Final = Operation("Topics", "List topics", answers={JSON: TopicsAnswer})
_DESCRIBE: Final = Operation("Topics", "Describe a topic", answers={JSON: DescribedTopic})


class TopicRoutes:
    def __init__(
        self,
        log: Log,
        catalog: Catalog,
        reader: EngineReader,
        note_change: Callable[[str], None],
        bodies: Bodies,
    ) -> None:
        self._log = log
        self._note_change = note_change
        self._catalog = catalog
        self._reader = reader
        self._bodies = bodies

    def routes(self) -> list[Route]:
        return [
            Route("write", "POST", "/topics", self._create, operation=_CREATE),
            Route("write", "PATCH", "/topics/{name}", self._change, operation=_CHANGE),
            Route("write", "POST", "/topics/{name}/fence", self._fence, operation=_FENCE),
            Route("write", "POST", "/topics/{name}/unfence", self._unfence, operation=_UNFENCE),
            Route("write", "DELETE", "/topics/{name}", self._delete, operation=_DELETE),
            Route("all", "GET", "/topics", self._list, operation=_LIST),
            Route("all", "GET", "/topics/{name}", self._describe, operation=_DESCRIBE),
        ]

    async def _create(self, request: Request) -> Response:
        async with self._bodies.read(request) as body:
            wanted = decode_body(TopicRequest, body)
        topic = await self._catalog.create(
            wanted.name,
            wanted.partitions,
            retention_ms=wanted.retention_ms,
            retention_bytes=wanted.retention_bytes,
            timestamp_type=wanted.timestamp_type,
            engine=wanted.engine,
            cleanup=wanted.cleanup,
            delete_retention_ms=wanted.delete_retention_ms,
        )
        return json_answer(topic_fields(topic), HTTPStatus.CREATED)

    async def _change(self, request: Request) -> Response:
        async with self._bodies.read(request) as body:
            wanted = decode_body(TopicChange, body)
        name = request.path_params["name"]
        if isinstance(wanted.partitions, int):
            check_growth(await self._catalog.get(name), wanted.partitions)
        topic = await self._catalog.set_options(
            name,
            retention_ms=wanted.retention_ms,
            retention_bytes=wanted.retention_bytes,
            cleanup=wanted.cleanup,
            delete_retention_ms=wanted.delete_retention_ms,
        )
        if isinstance(wanted.partitions, int):
            topic = await self._catalog.add_partitions(name, wanted.partitions)
        self._note_change(name)
        return json_answer(topic_fields(topic))

    async def _fence(self, request: Request) -> Response:
        return await self._change_fence(request, "fenced", fence_topic)

    async def _unfence(self, request: Request) -> Response:
        return await self._change_fence(request, "open", unfence_topic)

    async def _change_fence(self, request: Request, state: str, change: ChangeFence) -> Response:
        if content_type(request) != JSON and is_from_page(request):
            raise InvalidArgument(f"a web page sent this without content-type {JSON}, which it must have")
        query = decode_query(FenceQuery, request.query_params)
        name = request.path_params["name"]
        changed = await change(self._log, name, query.partition)
        return json_answer({"topic": name, "partitions": changed, "state": state})

    async def _delete(self, request: Request) -> Response:
        await self._catalog.delete(request.path_params["name"])
        self._note_change(request.path_params["name"])
        await release_deleted(self._log)
        return Response(status_code=HTTPStatus.NO_CONTENT)

    async def _list(self, _: Request) -> Response:
        return json_answer({"topics": [topic_fields(topic) for topic in await self._catalog.topics()]})

    async def _describe(self, request: Request) -> Response:
        topic = await self._catalog.get(request.path_params["name"])
        bounds = enumerate(await self._reader.topic_bounds(topic))
        fields = topic_fields(topic) | {"bounds": [{"partition": p, **found._asdict()} for p, found in bounds]}
        ownership_name = self._catalog.engine(topic).ownership_name(topic)
        if ownership_name is not None:
            fields["owner"] = await self._owner(ownership_name)
        return json_answer(fields)

    async def _owner(self, key: str) -> dict[str, Any] | None:
        """Return the process that owns what has this key; None if no process has taken it up."""
        owners = self._log.owners
        lease = None if owners is None else await owners.find(key)
        return None if lease is None else {"address": lease.address, "host": lease.host, "pid": lease.process.pid}
