"""Bounds of connections: the size and pace of a request's header, stalled clients, and the number of connections.

uvicorn bounds only the idle time between two requests. This module sets a deadline for a header, for the rest of a body
that no handler reads, and for an answer that the client does not take; `bodies.py` sets the deadline of a body that a
handler reads.
"""

from __future__ import annotations

import asyncio
import logging
import math
import resource
from enum import Enum
from typing import Any, Final, cast

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from llog.broker.http.answers import error_answer
from llog.broker.http.hosts import is_open
from llog.broker.http.shortcuts import Exchange, Shortcut, Shortcuts
from llog.broker.metrics import Metrics
from llog.config import Settings
from llog.errors import HeaderTooLarge, LlogError, RequestTimeout, TooManyConnections

logger: Final = logging.getLogger("llog.broker")

FILES_WANTED: Final = 65_536
_BACKLOG_MAX: Final = 2048
_EXTRA_MAX: Final = 16
"""Connections beyond the limit that may be open at the same time. Each gets one answer; the oldest is closed to make
room for the newest.
"""
_FILES_KEPT: Final = 2 * _EXTRA_MAX
"""Open files that are reserved for the stores."""


def allowed_files() -> int:
    """Return how many files this process may have open, after raising its own limit as far as it is useful and
    allowed.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = FILES_WANTED if hard == resource.RLIM_INFINITY else min(hard, FILES_WANTED)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    return FILES_WANTED if soft == resource.RLIM_INFINITY else soft


class Limits:
    """The bounds of all connections of one broker.

    Connections get half of the files that may be open. Connections beyond that are answered with 503, except that they
    may ask for /health, /ready and /metrics: operators can still look at a full broker.
    """

    def __init__(self, settings: Settings, metrics: Metrics, files_max: int) -> None:
        self.header_bytes_max = settings.request_header_max_bytes
        self.timeout_s = settings.request_timeout_ms / 1000
        self.check_s = self.timeout_s / 2
        self.bytes_per_check = settings.request_min_bytes_per_second * self.check_s
        self.metrics = metrics
        self._files_max = files_max
        self._connections_max = max(1, files_max // 2)
        self._extra: dict[Connection, None] = {}
        self._is_reported = False
        self._checked: set[Connection] = set()
        """The connections that had something to check since the last time: those that only wait cost no time."""
        self._checks: asyncio.TimerHandle | None = None

    @property
    def backlog(self) -> int:
        """How many connections may wait to be accepted. The event loop accepts all of them before it calls `admit`
        for the first, so their files are open by then.
        """
        return min(_BACKLOG_MAX, max(1, self._files_max // 4))

    def admit(self, connection: Connection, count: int, fileno: int) -> bool:
        """Return whether there is room for this connection, the newest of `count` open ones.

        The kernel gives a file the lowest free number, so a high number means that many files are open.
        """
        self.metrics.connections = count
        if count <= self._connections_max and fileno < self._files_max - _FILES_KEPT:
            return True
        if not self._is_reported:
            self._is_reported = True
            logger.warning(
                "%d connections are open, and %d files may be (ulimit -n): more connections are answered with 503 "
                "until some end; raise the limit to allow more",
                count,
                self._files_max,
            )
        if len(self._extra) >= _EXTRA_MAX:
            oldest = next(iter(self._extra))
            del self._extra[oldest]
            oldest.turn_away(self._full())
        self._extra[connection] = None
        return False

    def release(self, connection: Connection, count: int) -> None:
        self._extra.pop(connection, None)
        self.metrics.connections = count
        if count < self._connections_max * 3 // 4:  # well below the limit: report the next time again
            self._is_reported = False

    def begin_checks(self, connection: Connection) -> None:
        """Check the connection every `check_s`, as long as there is something to check."""
        self._checked.add(connection)
        if self._checks is None:
            self._checks = connection.loop.call_later(self.check_s, self._check_all, connection.loop)

    def end_checks(self, connection: Connection) -> None:
        self._checked.discard(connection)
        if self._checks is not None and not self._checked:
            self._checks.cancel()
            self._checks = None

    def only_open(self, app: ASGIApp) -> ASGIApp:
        """Return the application for connections beyond the limit."""

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            chosen = app if is_open(scope["path"]) else _refusal(self._full())
            await chosen(scope, receive, send)

        return answer

    def _check_all(self, loop: asyncio.AbstractEventLoop) -> None:
        self._checked = {connection for connection in self._checked if connection.check()}
        self._checks = loop.call_later(self.check_s, self._check_all, loop) if self._checked else None

    def _full(self) -> TooManyConnections:
        self.metrics.connections_refused += 1
        return TooManyConnections(
            f"the broker has as many connections as it may have, {self._connections_max} for {self._files_max} "
            "open files (ulimit -n): try again later, use fewer, or raise the limit"
        )


class _Phase(Enum):
    BETWEEN = "between two requests"
    HEADER = "in a header"
    BODY = "in a body"


class Connection(HttpToolsProtocol):
    """uvicorn's protocol, with bounds."""

    # In slots, since the dictionaries of uvicorn's attributes share their keys only while they are few.
    __slots__ = (
        "_body",
        "_deadline",
        "_is_extra",
        "_limits",
        "_overhead_bytes",
        "_phase",
        "_shortcut",
        "_shortcuts",
        "_unsent_bytes",
    )

    def __init__(self, limits: Limits, shortcuts: Shortcuts, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._limits = limits
        self._shortcuts = shortcuts
        self._shortcut: Shortcut | None = None
        """That of a request which is arriving, until all of it is here or it takes the usual way."""
        self._body = bytearray()
        """What has arrived of the body of such a request."""
        self._is_extra = False
        self._phase = _Phase.HEADER
        self._deadline = math.inf
        self._overhead_bytes = 0
        """Bytes received since the last byte of a body or the end of a request: a header, or the trailers of a body."""
        self._unsent_bytes = 0
        """Bytes of an answer that the client had not taken at the last check; 0 if it has caught up since."""

    # --- calls by asyncio

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_by(self._limits.timeout_s)
        fileno = transport.get_extra_info("socket").fileno()
        self._is_extra = not self._limits.admit(self, len(self.connections), fileno)
        if self._is_extra:
            self.app = cast(Any, self._limits.only_open(cast(ASGIApp, self.app)))

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._limits.end_checks(self)
        self._limits.release(self, len(self.connections))

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if data[0] == 0 and self._phase is not _Phase.BODY and not self._is_busy:
            # No method begins so, and every request of a Kafka client does: the first byte of its length.
            logger.warning(
                "%s sent something other than HTTP, probably a request of a Kafka client: LLOG_KAFKA_PORT has the port "
                "for these",
                (self.client or ("a client",))[0],
            )
            self.transport.close()
            return
        self._overhead_bytes += len(data)
        super().data_received(data)
        if self._shortcut is not None and not self.transport.is_closing():  # the rest of the body is on its way
            self._begin_cycle()
        if self._overhead_bytes > self._limits.header_bytes_max:
            self.turn_away(self._too_large())
        elif self._phase is _Phase.BETWEEN and not self._is_busy and self._deadline == math.inf:
            self._expect_by(self._limits.timeout_s)  # these bytes began no request, but ended uvicorn's idle timeout

    def pause_writing(self) -> None:
        super().pause_writing()
        self._limits.begin_checks(self)

    def resume_writing(self) -> None:
        self._unsent_bytes = 0
        super().resume_writing()

    # --- calls by the parser

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._phase = _Phase.HEADER
        self._expect_by(self._limits.timeout_s)

    def on_headers_complete(self) -> None:
        self._phase = _Phase.BODY
        self._deadline = math.inf
        size = len(self.url) + sum([len(name) + len(value) for name, value in self.headers])
        is_large = size > self._limits.header_bytes_max
        if not (is_large or self._is_extra or self._is_busy):
            self._shortcut = self._shortcuts.find(self.parser.get_method(), self.url, self.headers)
            if self._shortcut is not None:
                return
        if is_large:
            self.app = cast(Any, _refusal(self._too_large()))
        super().on_headers_complete()
        if self._is_extra or is_large:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._overhead_bytes = 0
        if self._shortcut is None:
            super().on_body(body)
        else:
            self._body += body

    def on_message_complete(self) -> None:
        self._overhead_bytes = 0
        self._phase = _Phase.BETWEEN
        self._deadline = math.inf
        if self._shortcut is None:
            super().on_message_complete()
        else:
            self._begin_exchange(self._shortcut)

    def _begin_exchange(self, shortcut: Shortcut) -> None:
        """Let the handler answer the request, which is here as a whole."""
        scope: dict[str, Any] = cast(Any, self.scope)
        scope.update(method=shortcut.method, path=shortcut.path, raw_path=self.url, query_string=b"")
        keep_alive = self.parser.get_http_version() != "1.0" and self.parser.should_keep_alive()
        exchange = Exchange(self, scope, self._body, keep_alive=keep_alive)
        self._shortcut, self._body = None, bytearray()
        self.cycle = cast(Any, exchange)
        task = self.loop.create_task(exchange.answer(shortcut.handler))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def _begin_cycle(self) -> None:
        """Let the request, of which the header and a part of the body are here, take the usual way."""
        body, self._body, self._shortcut = self._body, bytearray(), None
        super().on_headers_complete()
        if body:
            super().on_body(bytes(body))

    # --- the answer

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._phase is _Phase.BODY and not self._is_busy:
            self._expect_by(self._limits.timeout_s)  # for the rest of a body that no handler reads
        if self.transport.get_write_buffer_size():
            self._limits.begin_checks(self)

    def check(self) -> bool:
        """Turn the client away if it is too late or too slow; return whether the connection is to be checked again."""
        if self.loop.time() >= self._deadline and not self.transport.is_closing():
            self.turn_away(
                RequestTimeout(
                    f"the request did not arrive within {self._limits.timeout_s:g} seconds (LLOG_REQUEST_TIMEOUT_MS)"
                )
            )
        buffered = self.transport.get_write_buffer_size()
        unsent = buffered if self.flow.write_paused or self.transport.is_closing() else 0
        if self._unsent_bytes and unsent > self._unsent_bytes - self._limits.bytes_per_check:
            self.transport.abort()
            return False
        self._unsent_bytes = unsent
        return buffered > 0 or (self._deadline < math.inf and not self.transport.is_closing())

    def turn_away(self, error: LlogError) -> None:
        """Close the connection; send the error first if the client would take it for the answer to its request."""
        if self._phase is _Phase.HEADER and not self._is_busy and not self.transport.is_closing():
            self.transport.write(_raw(_refusal(error)))
        self.transport.close()

    @property
    def _is_busy(self) -> bool:
        """Whether a request is being answered or queued behind another."""
        return self.cycle is not None and not self.cycle.response_complete

    def _expect_by(self, seconds: float) -> None:
        self._deadline = self.loop.time() + seconds
        self._limits.begin_checks(self)

    def _too_large(self) -> HeaderTooLarge:
        return HeaderTooLarge(
            f"the header of the request has more than {self._limits.header_bytes_max} bytes "
            "(LLOG_REQUEST_HEADER_MAX_BYTES): send large values in the body"
        )


def _refusal(error: LlogError) -> Response:
    response = error_answer(error)
    response.headers["connection"] = "close"
    return response


def _raw(response: Response) -> bytes:
    """Return the bytes of an answer that is sent outside of any request."""
    lines = [name + b": " + value + b"\r\n" for name, value in response.raw_headers]
    return b"".join([STATUS_LINE[response.status_code], *lines, b"\r\n", bytes(response.body)])
