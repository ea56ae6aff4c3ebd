"""Shortcuts: small requests that arrive in one piece go from the parser to their handler, and its answer to the socket.

A third of the CPU time of a small request would go into ASGI: the task and the messages of its cycle, the middleware,
the search for the route. A shortcut has the same handler and gives the same answer. A request that needs more than its
handler takes the usual way: one of a page of another origin, one under a name that the broker does not serve, one whose
body is not JSON, large or still on its way, or one that is sent before the answer to the request before it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from starlette.requests import Request
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from llog.broker.http.answers import Handler
from llog.broker.http.bodies import JSON_BODY
from llog.broker.http.requests import JSON

if TYPE_CHECKING:
    from starlette.responses import Response
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_BODY_BYTES_MAX: Final = 64 << 10
_JSON: Final = JSON.encode()
_NEEDS_MORE: Final = frozenset({b"expect", b"origin", b"transfer-encoding", b"upgrade"})
"""Headers of requests that need more than their handler."""

RawHeaders = Sequence[tuple[bytes, bytes]]


class Shortcut(NamedTuple):
    """The handler of requests with this method and path."""

    method: str
    path: str
    handler: Handler


class Shortcuts:
    """The shortcuts of a broker."""

    def __init__(self, shortcuts: Iterable[Shortcut], serves_host: Callable[[str], bool]) -> None:
        self._shortcuts = {(each.method.encode(), each.path.encode()): each for each in shortcuts}
        self._serves_host = serves_host

    def find(self, method: bytes, url: bytes, headers: RawHeaders) -> Shortcut | None:
        """Return the shortcut of a request, if the request needs nothing else and its body is small and JSON."""
        shortcut = self._shortcuts.get((method, url))
        if shortcut is None:
            return None
        hosts = lengths = types = 0
        for name, value in headers:
            if name == b"host":
                hosts += 1
                if not self._serves_host(value.decode("latin-1")):
                    return None
            elif name == b"content-length":
                lengths += 1
                if len(value) > len(str(_BODY_BYTES_MAX)) or not value.isdigit() or int(value) > _BODY_BYTES_MAX:
                    return None
            elif name == b"content-type":
                types += 1
                if value != _JSON:
                    return None
            elif name in _NEEDS_MORE:
                return None
        return shortcut if hosts == lengths == types == 1 else None


class Exchange:
    """A request that arrived whole, until it is answered. To uvicorn's connection it is the cycle under way."""

    __slots__ = ("_connection", "_gone", "_request", "disconnected", "keep_alive", "response_complete")

    def __init__(
        self, connection: HttpToolsProtocol, scope: dict[str, Any], body: bytearray, *, keep_alive: bool
    ) -> None:
        scope[JSON_BODY] = body
        self._connection = connection
        self._request = Request(scope, self._receive)
        self._gone: asyncio.Future[None] | None = None
        self.disconnected = False
        """Set by the connection, which then calls `message_event.set`."""
        self.keep_alive = keep_alive
        """Cleared by the connection when the server stops."""
        self.response_complete = False

    async def answer(self, handler: Handler) -> None:
        """Answer the request. The handler turns its errors into answers, and returns no stream."""
        response = await handler(self._request)
        flow = self._connection.flow
        if flow.write_paused and not self.disconnected:
            await flow.drain()
        if not self.disconnected:
            self._send(response)

    @property
    def message_event(self) -> Exchange:
        return self

    def set(self) -> None:
        """Notice that the client is gone: nothing else happens to a connection before its answer."""
        if self._gone is not None and not self._gone.done():
            self._gone.set_result(None)

    async def _receive(self) -> dict[str, Any]:
        """Return when the client has disconnected. The body is in the scope."""
        if not self.disconnected:
            self._gone = self._gone or asyncio.get_running_loop().create_future()
            await asyncio.shield(self._gone)
        return {"type": "http.disconnect"}

    def _send(self, response: Response) -> None:
        connection = self._connection
        headers: Iterable[tuple[bytes, bytes]] = (*connection.server_state.default_headers, *response.raw_headers)
        if (b"connection", b"close") in headers:
            self.keep_alive = False
        elif not self.keep_alive:
            headers = (*headers, (b"connection", b"close"))
        lines = [name + b": " + value + b"\r\n" for name, value in headers]
        connection.transport.write(b"".join([STATUS_LINE[response.status_code], *lines, b"\r\n", response.body]))
        self.response_complete = True
        if not self.keep_alive:
            connection.transport.close()
        connection.on_response_complete()
