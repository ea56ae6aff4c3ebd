"""The log of requests, and their ids: a middleware that is there only where the access log or tracing is on.

A request's id is that of its header `x-request-id`, or a new one, and the answer repeats it. Its trace is that of the
header `traceparent` (W3C trace context). Everything that is logged while the request is answered has both.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llog.base.logs import (
    REQUEST_ID,
    TRACEPARENT,
    RequestContext,
    current_request,
    is_request_id,
    log_fields,
    parse_traceparent,
)
from llog.broker.tracing import Tracer
from llog.config import Settings

logger: Final = logging.getLogger("llog.access")
_numbers: Final = itertools.count(1)
_process: Final = os.urandom(6).hex()
_TEXT_MAX: Final = 300


def request_log(settings: Settings, tracer: Tracer | None) -> list[Middleware]:
    """Return the middleware, if these settings need one."""
    if settings.access_log == "off" and tracer is None:
        return []
    return [Middleware(_RequestLog, is_logging=settings.access_log == "on", tracer=tracer)]


def context_of(request: Request) -> RequestContext:
    """Return what identifies the request in logs."""
    return current_request.get() or _read_context(request.headers)


class _RequestLog:
    def __init__(self, app: ASGIApp, is_logging: bool, tracer: Tracer | None) -> None:
        self._app = app
        self._is_logging = is_logging
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        started = time.perf_counter()
        status = 500
        sent_bytes = 0

        async def send_counted(message: Message) -> None:
            nonlocal status, sent_bytes
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID] = context.request_id
            sent_bytes += len(message.get("body", b""))
            await send(message)

        context = _read_context(headers)
        span = None
        if self._tracer is not None:
            span = self._tracer.begin_request(scope["method"], headers.get(TRACEPARENT), headers.get("tracestate"))
            context = RequestContext(context.request_id, span.trace_id, span.span_id, span.flags)
        token = current_request.set(context)
        try:
            await self._app(scope, receive, send_counted)
        finally:
            seconds = time.perf_counter() - started
            path = scope["path"][:_TEXT_MAX]
            if span is not None:
                span.end(path, status)
            if self._is_logging:
                client = scope.get("client")
                about = log_fields(
                    method=scope["method"],
                    path=path,
                    status=status,
                    duration_ms=round(seconds * 1000, 3),
                    bytes=sent_bytes,
                    client=None if client is None else client[0],
                    user_agent=headers.get("user-agent", "")[:_TEXT_MAX],
                )
                logger.info("request", extra=about)
            current_request.reset(token)


def _read_context(headers: Headers) -> RequestContext:
    given = headers.get(REQUEST_ID, "")
    request_id = given if is_request_id(given) else f"{_process}-{next(_numbers):x}"
    return RequestContext(request_id, *(parse_traceparent(headers.get(TRACEPARENT, "")) or ()))
