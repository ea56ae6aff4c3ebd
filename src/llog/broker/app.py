"""The HTTP surface: routes, and one way to answer errors."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from llog.broker import metrics as counting
from llog.broker.arrivals import Arrivals
from llog.broker.auto_creation import AutoCreation
from llog.broker.batching import BatchingProducer, Part
from llog.broker.cache.tail import SharedTail, Tail, private_directory
from llog.broker.cache.uploads import SeenAppends, SeenBlobs
from llog.broker.fetcher import Fetch, FetchService
from llog.broker.http.arrow import MEDIA_TYPE, columns_from, stream_of
from llog.broker.http.bodies import JSON, Bodies
from llog.broker.http.cors import cors
from llog.broker.http.forwarding import FORWARDED, Forwarding
from llog.broker.http.hosts import host_check
from llog.broker.http.messages import (
    WAIT_MS_MAX,
    ConsumeRequest,
    FetchQuery,
    Partition,
    ProduceRequest,
    TimeQuery,
    TopicRequest,
    decoded,
    queried,
)
from llog.broker.http.problems import items_answer, problem, problem_of
from llog.broker.routes.consume import consume
from llog.broker.routes.groups import GroupRoutes
from llog.broker.routes.health import Health
from llog.broker.routes.keyed import READS, Keyed
from llog.broker.routes.produce import ProduceService
from llog.broker.routes.sql import Sql
from llog.broker.routes.topic_groups import TopicGroups
from llog.config import Settings
from llog.engines.rocksdb.engine import rocksdb_of
from llog.engines.rocksdb.topics import require_rocks
from llog.engines.routing import EngineAppender, EngineReader
from llog.engines.upkeep import release_deleted
from llog.errors import (
    InvalidArgument,
    LlogError,
    LogOwned,
    MissingExtra,
    OwnerUnavailable,
    RequestTimeout,
    RequestTooLarge,
    StoreUnavailable,
    WrongRole,
)
from llog.groups.consumption import Consuming
from llog.groups.groups import Groups
from llog.groups.listing import GroupListing
from llog.log.catalog import ROCKSDB, Catalog
from llog.log.engine import engine_of
from llog.log.keys import LOG_ID
from llog.log.log import Log
from llog.log.opening import writer_options
from llog.log.records import Topic
from llog.model import TopicPartition, check_topic_name
from llog.runtime import uuid7

_ARROW_OVERHEAD: Final = 24
"""What a record counts for besides its bytes in an Arrow stream: its offset, its time and where its bytes end."""
_RECORDS: Final = "/topics/{name}/partitions/{partition}/records"
_WAITING: Final = frozenset({_RECORDS, "/topics/consume"})
"""Where requests say how long they wait for records."""
_OF_SQL: Final = frozenset({"/sql", "/sql/insert", "/sql/names"})
_OF_GROUPS: Final = frozenset({"/groups/list", "/groups/delete"})
"""What works on the groups of every topic, those in RocksDB beside the tables included."""

Handler = Callable[[Request], Awaitable[Response]]


class _Place(msgspec.Struct, frozen=True):
    partition: Partition


class Broker:
    """Everything that one broker process holds. Made on the event loop that it runs on; `close` before the log is
    closed.
    """

    def __init__(self, log: Log, settings: Settings) -> None:
        self.metrics = counting.Metrics()
        self.stopping = asyncio.Event()
        self._taking_up: asyncio.Future[None] | None = None
        self._log = log
        self._settings = settings
        self._catalog = Catalog(log)
        self._reader = EngineReader(log)
        self._tail = Tail(0 if settings.role == "write" else settings.tail_cache_max_bytes, self.metrics)
        appender = EngineAppender(log._replace(blobs=SeenBlobs(log.blobs)), writer_options(settings))
        self._producer = BatchingProducer(
            SeenAppends(appender, self._tail.keep_appended),
            self.metrics,
            max_bytes=settings.batch_max_bytes,
            max_delay_s=settings.batch_max_delay_ms / 1000,
        )
        self._producing = ProduceService(
            AutoCreation(self._catalog, settings.auto_create), self._producer, self.metrics
        )
        self._arrivals = Arrivals(self._reader, self.metrics, self.stopping)
        self._fetching = FetchService(
            self._reader, self._catalog, self._tail, self.metrics, self._arrivals, self.stopping
        )
        bodies = Bodies(settings, self.metrics)
        self._body = bodies.read
        self._forwarding = Forwarding(settings, bodies, self.metrics, self.stopping)
        consuming = Consuming(log, self._reader, appender, waits=self._arrivals, stopping=self.stopping)
        self._topic_groups = TopicGroups(consuming, self.metrics, self._body)
        self._groups = GroupRoutes(GroupListing(Groups(log, self._reader)), consuming, self._body)
        self._keyed = Keyed(settings, self.metrics, self.stopping, self._body, log.owners)
        self._sql = Sql(log, settings, self.stopping, self._body)
        self._health = Health(log, self.stopping, {"keyed log": self._keyed.check})

    async def start(self) -> None:
        """Takes up tables and disk topics, if there are some, and opens the shared tail, if there is to be one: in a
        directory of this log's own, for others have other records.
        """
        settings, runtime = self._settings, self._log.runtime
        directory = None
        if settings.tail_cache_dir is not None and settings.tail_cache_max_bytes:
            directory = private_directory(Path(settings.tail_cache_dir))
        await self._sql.start()
        self._taking_up = asyncio.ensure_future(self._take_up())
        found = await self._log.meta.get(LOG_ID)
        if directory is not None and found is not None:
            writer = None if settings.role == "read" else uuid7(runtime.now_ms(), runtime.random())
            root = directory / found.value.decode()
            self._tail.share(SharedTail(root, writer, settings.tail_cache_max_bytes, self.metrics))

    async def _take_up(self) -> None:
        """Own what is in the directories of this machine, now or once the process that does has ended: other brokers
        look for an owner.
        """
        steps = [self._sql.take_up]
        if self._settings.role != "read":
            steps += [engine.take_up for engine in self._log.engines.values()]
        while True:
            for step in steps:
                with suppress(LlogError):  # another process has them, or a store is out of order, which `/health` says
                    await step()
            await self._log.runtime.sleep(self._settings.session_timeout_ms / 1000)

    def app(self) -> Starlette:
        routes = [
            ("write", "POST", "/produce", self._produce),
            ("write", "POST", _RECORDS, self._produce_arrow),
            ("write", "POST", "/topics", self._create_topic),
            ("write", "DELETE", "/topics/{name}", self._delete_topic),
            ("read", "POST", "/consume", self._consume),
            ("read", "GET", _RECORDS, self._fetch_arrow),
            ("read", "GET", "/topics/{name}/partitions/{partition}/offset", self._offset),
            *self._topic_groups.routes(),
            *self._groups.routes(),
            ("all", "GET", "/topics", self._topics),
            ("all", "GET", "/topics/{name}", self._topic),
            *self._health.routes(),
            ("all", "GET", "/metrics", self._metrics_json),
            ("all", "GET", "/metrics/prometheus", self._metrics_text),
            *self._keyed.routes(),
            *self._sql.routes(),
        ]
        app = Starlette(
            routes=[
                Route(path, self._answering(path, self._as_role(role, self._by_owner(path, handler))), methods=[verb])
                for role, verb, path, handler in routes
            ],
            exception_handlers={HTTPException: self._no_route},
            middleware=[host_check(self._settings, self.metrics), *cors(self._settings)],
        )
        app.router.redirect_slashes = False  # a redirect would name the host that the request named
        return app

    async def close(self) -> None:
        """Ends waits and appends what was accepted; returns when all of it is answered."""
        self.stopping.set()
        if self._taking_up is not None:
            self._taking_up.cancel()
            await asyncio.gather(self._taking_up, return_exceptions=True)
        await self._producer.close()
        await self._arrivals.close()
        await self._tail.close()
        await self._keyed.close()
        await self._sql.close()
        await self._forwarding.close()

    def _as_role(self, role: str, handler: Handler) -> Handler:
        """The handler itself, or a refusal if this broker's role is the other one. An owner answers for all: nobody
        else can.
        """
        if role in ("all", self._settings.role) or self._settings.role == "both":
            return handler

        async def refused(request: Request) -> Response:
            if FORWARDED in request.headers:
                return await handler(request)
            raise WrongRole(
                f"this broker has the role {self._settings.role!r} and does not answer {request.method} "
                f"{request.url.path[:200]}: "
                f"ask one with the role {role!r} or 'both' (--role, LLOG_ROLE)"
            )

        return refused

    def _by_owner(self, path: str, handler: Handler) -> Handler:
        """The handler, with its requests sent on to the broker that owns what they ask for, if that is another one."""
        if path in _OF_SQL:
            if self._settings.role != "both":
                return handler  # which says why it refuses
            return self._forwarding.to_owner(self._tables_owner, handler, self._settings.sql_timeout_ms)
        if path in READS:
            return self._forwarding.to_owner(self._keyed.owner, handler, WAIT_MS_MAX, or_here=True)
        if path in _OF_GROUPS:
            return self._forwarding.to_owner(self._tables_owner, handler)
        return self._forwarding.or_owner(handler, WAIT_MS_MAX if path in _WAITING else 0)

    async def _tables_owner(self) -> str | None:
        """The address of the broker that owns the tables, unless this one does, or no broker does yet."""
        owners, rocksdb = self._log.owners, rocksdb_of(self._log)
        if owners is None or rocksdb.is_taken_up:
            return None
        if await owners.home(ROCKSDB) is None:
            return None
        try:
            await (await require_rocks(self._log, rocksdb.rocks, "SQL")).opened()
        except LogOwned as error:
            return error.address
        except (OwnerUnavailable, StoreUnavailable, MissingExtra):
            pass  # what needs no tables works without them, and what does says so
        return None

    def _answering(self, path: str, handler: Handler) -> Handler:
        """The handler with its failures made into answers, and counted."""

        async def answered(request: Request) -> Response:
            start = time.perf_counter()
            response = await self._guarded(handler, request)
            self.metrics.requests[f"{request.method} {path}", response.status_code] += 1
            self.metrics.request_seconds[f"{request.method} {path}"] += time.perf_counter() - start
            return response

        return answered

    async def _guarded(self, handler: Handler, request: Request) -> Response:
        try:
            return await handler(request)
        except LlogError as error:
            self.metrics.errors[error.code] += 1
            response = problem_of(error)
            if isinstance(error, RequestTooLarge | RequestTimeout):
                response.headers["connection"] = "close"  # the rest of the body is not wanted
            return response
        except ClientDisconnect:
            return problem(HTTPStatus.BAD_REQUEST, "disconnected", "the client went away before its request was whole")
        except Exception:
            traceback.print_exc()
            self.metrics.errors["internal"] += 1
            return problem(HTTPStatus.INTERNAL_SERVER_ERROR, "internal", "a bug in the broker; its log has the details")

    async def _no_route(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        status = HTTPStatus(error.status_code)
        self.metrics.requests["other", status.value] += 1
        code = "method_not_allowed" if status is HTTPStatus.METHOD_NOT_ALLOWED else "not_found"
        detail = f"there is no {request.method} {request.url.path[:200]} here"
        return problem(status, code, detail, dict(error.headers or {}))

    # --- records

    async def _produce(self, request: Request) -> Response:
        async with self._body(request) as body:
            asked = decoded(ProduceRequest, body)
            body.clear()
            answers = await self._producing.produce(asked.topic_partitions)
            return items_answer(await self._forwarding.produce(request, asked, answers))

    async def _consume(self, request: Request) -> Response:
        async with self._body(request) as body:
            asked = decoded(ConsumeRequest, body)
        answers = await consume(self._fetching, asked, self.metrics)
        return items_answer(
            await self._forwarding.consume(
                request, asked, answers, lambda part: consume(self._fetching, part, self.metrics)
            )
        )

    async def _produce_arrow(self, request: Request) -> Response:
        tp = _partition_of(request)
        async with self._body(request, MEDIA_TYPE) as body:
            (result,) = await self._producing.append([Part(tp, columns_from(body))])
        if isinstance(result, LlogError):
            raise result
        return _json({**tp._asdict(), "start_offset": result.start_offset, "end_offset": result.end_offset})

    async def _fetch_arrow(self, request: Request) -> Response:
        tp, asked = _partition_of(request), queried(FetchQuery, request.query_params)
        accepted = request.headers.get("accept", "*/*")
        if not any(each in accepted for each in (MEDIA_TYPE, "*/*", "application/*")):
            raise InvalidArgument(f"accept is {accepted[:80]!r}: this is answered as {MEDIA_TYPE}")
        fetch = Fetch(tp, asked.offset, asked.max_bytes, record_overhead=_ARROW_OVERHEAD, stop=asked.stop)
        await self._fetching.fetch([fetch], max_bytes=asked.max_bytes, min_bytes=1, max_wait_ms=asked.max_wait_ms)
        if fetch.error is not None:
            raise fetch.error
        headers = {
            "llog-log-start-offset": str(fetch.log_start_offset),
            "llog-next-offset": str(fetch.next_offset),
            "llog-next-fetch-offset": str(fetch.position),
            "llog-topic-directory": fetch.directory,
        }
        return Response(memoryview(stream_of(fetch.batches)), headers=headers, media_type=MEDIA_TYPE)

    async def _offset(self, request: Request) -> Response:
        asked = queried(TimeQuery, request.query_params)
        return _json({"offset": await self._reader.offset_for_time(_partition_of(request), asked.timestamp_ms)})

    # --- topics

    async def _topics(self, _: Request) -> Response:
        return _json({"topics": [_shown(topic) for topic in await self._catalog.topics()]})

    async def _create_topic(self, request: Request) -> Response:
        async with self._body(request) as body:
            asked = decoded(TopicRequest, body)
        topic = await self._catalog.create(
            asked.name,
            asked.partitions,
            retention_ms=asked.retention_ms,
            retention_bytes=asked.retention_bytes,
            timestamp_type=asked.timestamp_type,
            engine=asked.engine,
            cleanup=asked.cleanup,
            delete_retention_ms=asked.delete_retention_ms,
        )
        return _json(_shown(topic), HTTPStatus.CREATED)

    async def _topic(self, request: Request) -> Response:
        topic = await self._catalog.get(request.path_params["name"])
        bounds = enumerate(await self._reader.topic_bounds(topic))
        shown: dict[str, Any] = {"bounds": [{"partition": p, **each._asdict()} for p, each in bounds]}
        owner_key = engine_of(self._log, topic).owner_key(topic)
        if owner_key is not None:
            shown["owner"] = await self._owner(owner_key)
        return _json({**_shown(topic), **shown})

    async def _owner(self, key: str) -> dict[str, Any] | None:
        """The process that owns what has this key; None if none has taken it up."""
        owners = self._log.owners
        lease = None if owners is None else await owners.find(key)
        return None if lease is None else {"address": lease.address, "host": lease.host, "pid": lease.process.pid}

    async def _delete_topic(self, request: Request) -> Response:
        await self._catalog.delete(request.path_params["name"])
        await release_deleted(self._log)
        return Response(status_code=HTTPStatus.NO_CONTENT)

    # --- the broker itself

    async def _metrics_json(self, _: Request) -> Response:
        return _json(counting.as_json(self._samples()))

    async def _metrics_text(self, _: Request) -> Response:
        text = counting.as_prometheus(self._samples())
        return Response(text, media_type="text/plain; version=0.0.4")

    def _samples(self) -> Iterator[counting.Sample]:
        stores = (("meta", self._log.meta), ("blobs", self._log.blobs))
        return self.metrics.samples((name, getattr(store, "counts", None)) for name, store in stores)


def _shown(topic: Topic) -> dict[str, Any]:
    fields = (
        "name",
        "partitions",
        "engine",
        "incarnation",
        "directory",
        "retention_ms",
        "retention_bytes",
        "timestamp_type",
        "cleanup",
        "delete_retention_ms",
        "created_ms",
    )
    return {field: getattr(topic, field) for field in fields}


def _partition_of(request: Request) -> TopicPartition:
    """The partition that the address names."""
    partition = queried(_Place, {"partition": request.path_params["partition"]}).partition
    return TopicPartition(check_topic_name(request.path_params["name"]), partition)


def _json(value: object, status: HTTPStatus = HTTPStatus.OK) -> Response:
    return Response(msgspec.json.encode(value), status.value, media_type=JSON)
