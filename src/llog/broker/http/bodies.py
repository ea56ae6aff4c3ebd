"""Bodies of requests, read within bounds: on the size and the pace of each, and on the size of all together."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

from starlette.requests import Request

from llog.broker.http.requests import JSON, content_type
from llog.broker.metrics import Metrics
from llog.config import Settings
from llog.errors import InvalidArgument, Overloaded, RequestTimeout, RequestTooLarge

BODY: Final = "llog.body"
"""The key of a request's scope under which its body is, once it was read: forwarding sends it on."""
JSON_BODY: Final = "llog.json_body"
"""The key of a request's scope under which its body is, if it arrived with its header and has the type of JSON."""


class Pace(NamedTuple):
    """How slowly bytes may arrive: at `bytes_per_s`, with `patience_s` of delay forgiven."""

    patience_s: float
    bytes_per_s: int

    def begin(self, now: float) -> float:
        """Return when to give up unless bytes arrive."""
        return now + self.patience_s

    def extend(self, deadline: float, now: float, size: int) -> float:
        """Return the deadline after `size` bytes arrived. A burst buys no more than the patience: a stall behind it is
        noticed.
        """
        return min(now + self.patience_s, deadline + size / self.bytes_per_s)


class Buffer:
    """The bytes of requests that the broker holds, from their arrival until the requests are answered."""

    def __init__(self, max_bytes: int, metrics: Metrics) -> None:
        self.max_bytes = max_bytes
        self.metrics = metrics


class Share:
    """What one request, and so one connection, holds of the buffer: never more than it leaves free for the others.

    So a few large bodies cannot take the last of the buffer.
    """

    __slots__ = ("_buffer", "size")

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer
        self.size = 0

    def release(self) -> None:
        self._buffer.metrics.buffered_bytes -= self.size
        self.size = 0

    def check(self, more: int) -> None:
        """Raise `Overloaded` if there is no room for `more` bytes."""
        max_bytes, held = self._buffer.max_bytes, self._buffer.metrics.buffered_bytes
        if self.size + more > max_bytes - held - more:
            raise Overloaded(
                f"the broker holds {held} of at most {max_bytes} bytes of requests (LLOG_BATCH_MAX_BUFFER_BYTES), "
                f"and this one's {self.size + more} would leave less than that to others: try again later"
            )

    def grow(self, more: int) -> None:
        self.check(more)
        self.size += more
        self._buffer.metrics.buffered_bytes += more


class Bodies:
    """Reads bodies into one buffer."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self._buffer = Buffer(settings.batch_max_buffer_bytes, metrics)
        self._pace = Pace(settings.request_timeout_ms / 1000, settings.request_min_bytes_per_second)
        self._bytes_max, self._bound_by = min(
            (settings.request_max_bytes, "LLOG_REQUEST_MAX_BYTES"),
            (settings.batch_max_buffer_bytes // 2, "half of LLOG_BATCH_MAX_BUFFER_BYTES"),
        )

    def read(self, request: Request, wanted: str | None = JSON) -> HeldBody:
        """Return the context of a block that has the body, of this content type or of any."""
        return HeldBody(self, request, wanted, Share(self._buffer))

    @contextmanager
    def held(self, size: int) -> Iterator[None]:
        """Count `size` bytes of a body that was read before as held until the block ends."""
        share = Share(self._buffer)
        share.grow(size)
        try:
            yield
        finally:
            share.release()

    def take(self, body: bytearray, share: Share) -> bytearray:
        """Return a body that is here already."""
        self._check_size(len(body))
        share.grow(len(body))
        return body

    async def receive(self, request: Request, share: Share) -> bytearray:
        """Return the body of the request, which may be here already."""
        body: bytearray | None = request.scope.get(BODY)
        if body is not None:
            return self.take(body, share)
        declared = request.headers.get("content-length", "")
        if declared.isascii() and declared.isdecimal():
            # Too much is refused before it is sent; nothing counts as held before it has arrived.
            self._check_size(int(declared[:20]))
            share.check(int(declared[:20]))
        body = request.scope[BODY] = await self._receive(request, share)
        return body

    async def _receive(self, request: Request, share: Share) -> bytearray:
        body = bytearray()
        loop = asyncio.get_running_loop()
        begun = loop.time()
        deadline = self._pace.begin(begun)
        try:
            async with asyncio.timeout_at(deadline) as timeout:
                async for chunk in request.stream():
                    self._check_size(len(body) + len(chunk))
                    share.grow(len(chunk))
                    body += chunk
                    deadline = self._pace.extend(deadline, loop.time(), len(chunk))
                    timeout.reschedule(deadline)
        except TimeoutError:
            raise RequestTimeout(
                f"{len(body)} bytes of the body arrived within {loop.time() - begun:.0f} seconds, slower than "
                f"{self._pace.bytes_per_s} bytes per second (LLOG_REQUEST_MIN_BYTES_PER_SECOND) for "
                f"{self._pace.patience_s:g} seconds (LLOG_REQUEST_TIMEOUT_MS): send smaller requests, or lower the rate"
            ) from None
        return body

    def _check_size(self, size: int) -> None:
        if size > self._bytes_max:
            raise RequestTooLarge(
                f"the body has {size} bytes or more: at most {self._bytes_max} are read ({self._bound_by})"
            )


class HeldBody:
    """The body of a request, which counts as held until the block ends."""

    __slots__ = ("_bodies", "_request", "_share", "_wanted")

    def __init__(self, bodies: Bodies, request: Request, wanted: str | None, share: Share) -> None:
        self._bodies = bodies
        self._request = request
        self._wanted = wanted
        self._share = share

    async def __aenter__(self) -> bytearray:
        arrived = self._request.scope.get(JSON_BODY)
        if arrived is not None and self._wanted == JSON:
            return self._bodies.take(arrived, self._share)
        kind = content_type(self._request)
        if self._wanted is not None and kind != self._wanted:
            # Routes that write ask for a type that no web page can send here behind its visitor's back.
            raise InvalidArgument(f"content-type is {kind[:80]!r}: it must be {self._wanted}")
        try:
            return await self._bodies.receive(self._request, self._share)
        except BaseException:
            self._share.release()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._share.release()
