"""Server-sent events: how the tails of topics and of keyed logs are answered.

The first event is an id alone, so that a client which is cut off before its first record can go on from there. Comments
show that the connection lives. A failure is an event `problem`, after which the stream ends.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated, Final

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from llog.broker.http.answers import item_error
from llog.errors import LlogError

EVENTS: Final = "text/event-stream"
LAST_EVENT_ID: Final = "last-event-id"
TAILS_MAX: Final = 256
"""The clients that may follow topics, and those that may follow the keyed log."""
RETRY_MS: Final = 1000
HEARTBEAT: Final = b": still here\n\n"
_HEADERS: Final = {"cache-control": "no-store", "x-accel-buffering": "no"}
_LINE_ENDS: Final = bytes.maketrans(b"\r\n", b"  ")

HeartbeatMs = Annotated[int, Meta(ge=100, le=60_000)]


async def events_answer(request: Request, follow: Callable[[], Awaitable[AsyncIterator[bytes]]]) -> Response:
    """Return the answer that streams the events that `follow` returns; a HEAD has none."""
    if request.method == "HEAD":  # it would wait for the end of an endless answer
        return Response(headers=_HEADERS, media_type=EVENTS)
    return StreamingResponse(await follow(), headers=_HEADERS, media_type=EVENTS)


def opening_event(id: str) -> bytes:
    return f"retry: {RETRY_MS}\nid: {id}\n\n".encode()


def event(id: str, data: object, kind: str | None = None) -> bytes:
    """Return an event. A line end in JSON can only stand between tokens, where a space means the same."""
    name = b"" if kind is None else b"event: %s\n" % kind.encode()
    return b"%sid: %s\ndata: %s\n\n" % (name, id.encode(), msgspec.json.encode(data).translate(_LINE_ENDS))


def problem_event(error: LlogError) -> bytes:
    return b"event: problem\ndata: " + msgspec.json.encode(item_error(error)) + b"\n\n"
