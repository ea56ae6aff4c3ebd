"""The HTTP surface: routes, bodies that are bounded before they are read, and one way to answer errors."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any, Final

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from llog.broker import metrics as counting
from llog.broker.batching import BatchingProducer, Buffer
from llog.broker.fetching import FetchService
from llog.broker.messages import ConsumeRequest, ProduceRequest, TopicRequest, decoded
from llog.broker.problems import problem, problem_of
from llog.broker.producing import ProduceService
from llog.config import Settings
from llog.errors import InvalidArgument, LlogError, RequestTooLarge
from llog.model import TopicPartition
from llog.opening import writer_options
from llog.partition.catalog import Catalog
from llog.partition.keys import LOG_ID
from llog.partition.log import Log
from llog.partition.reader import Reader
from llog.partition.records import Topic
from llog.partition.writer import Writer

BODY_SECONDS: Final = 60.0
HEALTH_SECONDS: Final = 5.0
_BOUNDS_AT_A_TIME: Final = 64

Handler = Callable[[Request], Awaitable[Response]]


class Broker:
    """Everything that one broker process holds. Made on the event loop that it runs on; `close` before the log is closed."""

    def __init__(self, log: Log, settings: Settings) -> None:
        self.metrics = counting.Metrics()
        self.stopping = asyncio.Event()
        self._log = log
        self._catalog = Catalog(log)
        self._reader = Reader(log)
        self._producer = BatchingProducer(
            Writer(log, writer_options(settings)),
            self.metrics,
            max_bytes=settings.batch_max_bytes,
            max_delay_s=settings.batch_max_delay_ms / 1000,
        )
        self._producing = ProduceService(self._catalog, self._producer, self.metrics)
        self._fetching = FetchService(log, self.metrics, self.stopping)
        self._buffer = Buffer(settings.batch_max_buffer_bytes, self.metrics)
        self._body_bytes_max = min(settings.request_max_bytes, settings.batch_max_buffer_bytes)

    def app(self) -> Starlette:
        routes = [
            ("POST", "/produce", self._produce),
            ("POST", "/consume", self._consume),
            ("GET", "/topics", self._topics),
            ("POST", "/topics", self._create_topic),
            ("GET", "/topics/{name}", self._topic),
            ("DELETE", "/topics/{name}", self._delete_topic),
            ("GET", "/health", self._health),
            ("GET", "/metrics", self._metrics_json),
            ("GET", "/metrics/prometheus", self._metrics_text),
        ]
        return Starlette(
            routes=[Route(path, self._answering(path, handler), methods=[verb]) for verb, path, handler in routes],
            exception_handlers={HTTPException: self._no_route},
        )

    async def close(self) -> None:
        """Ends waits and appends what was accepted; returns when all of it is answered."""
        self.stopping.set()
        await self._producer.close()

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
            if isinstance(error, RequestTooLarge):
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
            return _json({"topic_partitions": await self._producing.produce(asked.topic_partitions)})

    async def _consume(self, request: Request) -> Response:
        async with self._body(request) as body:
            asked = decoded(ConsumeRequest, body)
        return _json({"topic_partitions": await self._fetching.fetch(asked)})

    @asynccontextmanager
    async def _body(self, request: Request) -> AsyncIterator[bytearray]:
        """The body, which counts as buffered until the block ends."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # which a web page cannot send here behind its visitor's back
            raise InvalidArgument(f"content-type is {kind[:80]!r}: it must be application/json")
        declared = request.headers.get("content-length", "")
        taken = 0

        def take(size: int) -> None:
            nonlocal taken
            if size > self._body_bytes_max:
                raise RequestTooLarge(
                    f"the body has {size} bytes or more: at most {self._body_bytes_max} are read (LLOG_REQUEST_MAX_BYTES)"
                )
            if size > taken:
                self._buffer.take(size - taken)
                taken = size

        try:
            if declared.isascii() and declared.isdecimal():
                take(int(declared[:20]))
            body = bytearray()
            try:
                async with asyncio.timeout(BODY_SECONDS):
                    async for chunk in request.stream():
                        take(len(body) + len(chunk))
                        body += chunk
            except TimeoutError:
                raise InvalidArgument(f"the body did not arrive within {BODY_SECONDS:.0f} seconds") from None
            yield body
        finally:
            self._buffer.give_back(taken)

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
        )
        return _json(_shown(topic), HTTPStatus.CREATED)

    async def _topic(self, request: Request) -> Response:
        topic = await self._catalog.get(request.path_params["name"])
        every = []
        for first in range(0, topic.partitions, _BOUNDS_AT_A_TIME):
            partitions = range(first, min(first + _BOUNDS_AT_A_TIME, topic.partitions))
            bounds = await asyncio.gather(*(self._reader.bounds(TopicPartition(topic.name, p)) for p in partitions))
            every += [{"partition": p, **b._asdict()} for p, b in zip(partitions, bounds, strict=True)]
        return _json({**_shown(topic), "bounds": every})

    async def _delete_topic(self, request: Request) -> Response:
        await self._catalog.delete(request.path_params["name"])
        return Response(status_code=HTTPStatus.NO_CONTENT)

    # --- the broker itself

    async def _health(self, _: Request) -> Response:
        meta, blobs = await asyncio.gather(_asked(self._log.meta.get(LOG_ID)), _asked(self._log.blobs.head(LOG_ID)))
        if meta or blobs:
            said = "; ".join(
                f"{name}: {what}" for name, what in (("metadata store", meta), ("blob store", blobs)) if what
            )
            return problem(HTTPStatus.SERVICE_UNAVAILABLE, "store_unavailable", said)
        return _json({"status": "ok"})

    async def _metrics_json(self, _: Request) -> Response:
        return _json(counting.as_json(self._samples()))

    async def _metrics_text(self, _: Request) -> Response:
        text = counting.as_prometheus(self._samples())
        return Response(text, media_type="text/plain; version=0.0.4")

    def _samples(self) -> Iterator[counting.Sample]:
        stores = (("meta", self._log.meta), ("blobs", self._log.blobs))
        return self.metrics.samples((name, getattr(store, "counts", None)) for name, store in stores)


async def _asked(question: Awaitable[object]) -> str | None:
    """What is wrong with the store, if it does not answer."""
    try:
        async with asyncio.timeout(HEALTH_SECONDS):
            await question
    except LlogError as error:
        return str(error)
    except TimeoutError:
        return f"no answer within {HEALTH_SECONDS:.0f} seconds"
    return None


def _shown(topic: Topic) -> dict[str, Any]:
    fields = ("name", "partitions", "retention_ms", "retention_bytes", "timestamp_type", "created_ms")
    return {field: getattr(topic, field) for field in fields}


def _json(value: object, status: HTTPStatus = HTTPStatus.OK) -> Response:
    return Response(msgspec.json.encode(value), status.value, media_type="application/json")
