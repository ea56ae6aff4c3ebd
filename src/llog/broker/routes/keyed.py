"""The keyed log: the routes under `/keyed`, whether or not there is a keyed log behind them.

The handlers are in `keyed/handlers.py`, which needs SlateDB and is imported by the first request: a broker without a
keyed log does without SlateDB.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from starlette.requests import Request
from starlette.responses import Response

from llog.broker.http.answer_shapes import (
    CountAnswer,
    KeyedAppendAnswer,
    KeysAnswer,
    ScanAnswer,
    SealAnswer,
    SegmentsAnswer,
)
from llog.broker.http.answers import Handler
from llog.broker.http.arrow import MEDIA_TYPE
from llog.broker.http.bodies import Bodies
from llog.broker.http.events import EVENTS
from llog.broker.http.operations import Deferred, Operation
from llog.broker.http.requests import FORM, JSON, WAIT_MS_MAX
from llog.broker.http.routing import Route
from llog.broker.metrics import Metrics
from llog.config import Settings
from llog.errors import KeyedLogNotConfigured
from llog.log.owners import Owners, keyed_ownership

if TYPE_CHECKING:
    from llog.broker.keyed.handlers import KeyedHandlers

_Choose = Callable[["KeyedHandlers"], Handler]

_WRITES: Final[Mapping[str, _Choose]] = {
    "/keyed/append": lambda handlers: handlers.append,
    "/keyed/seal": lambda handlers: handlers.seal,
}
_READS: Final[Mapping[str, _Choose]] = {
    "/keyed/scan": lambda handlers: handlers.scan,
    "/keyed/count": lambda handlers: handlers.count,
    "/keyed/keys": lambda handlers: handlers.list_keys,
    "/keyed/segments": lambda handlers: handlers.list_segments,
    "/keyed/tail": lambda handlers: handlers.tail,
}
_TAG: Final = "Keyed log"


def _message(name: str) -> Deferred:
    return Deferred("llog.broker.keyed.messages", name)


_OPERATIONS: Final = {
    "/keyed/append": Operation(
        _TAG,
        "Append records",
        {JSON: _message("AppendRequest"), MEDIA_TYPE: None},
        _message("AppendQuery"),
        answers={JSON: KeyedAppendAnswer},
    ),
    "/keyed/seal": Operation(
        _TAG, "End the active segment", {JSON: _message("SealRequest")}, answers={JSON: SealAnswer}
    ),
    "/keyed/scan": Operation(
        _TAG, "Read a page of records", query=_message("ScanQuery"), answers={JSON: ScanAnswer, MEDIA_TYPE: None}
    ),
    "/keyed/count": Operation(
        _TAG, "Count the records of a key", query=_message("CountQuery"), answers={JSON: CountAnswer}
    ),
    "/keyed/keys": Operation(
        _TAG, "List keys", query=_message("KeysQuery"), answers={JSON: KeysAnswer, MEDIA_TYPE: None}
    ),
    "/keyed/segments": Operation(
        _TAG, "List segments", query=_message("SegmentsQuery"), answers={JSON: SegmentsAnswer, MEDIA_TYPE: None}
    ),
    "/keyed/tail": Operation(
        _TAG,
        "Follow new records",
        query=_message("TailQuery"),
        headers={"Last-Event-ID": "The id of the last event that the client has: the tail goes on behind it."},
        answers={EVENTS: None},
    ),
}


class KeyedRoutes:
    def __init__(
        self,
        settings: Settings,
        metrics: Metrics,
        stopping: asyncio.Event,
        bodies: Bodies,
        owners: Owners | None = None,
    ) -> None:
        self._settings = settings
        self._owners = owners
        self._metrics = metrics
        self._stopping = stopping
        self._bodies = bodies
        self._handlers: KeyedHandlers | None = None

    def routes(self) -> list[Route]:
        writes = [
            Route("write", "POST", path, self._handler(choose), operation=_OPERATIONS[path])
            for path, choose in _WRITES.items()
        ]
        reads = [self._read_route("GET", path, self._handler(choose)) for path, choose in _READS.items()]
        forms = [self._read_route("POST", path, self._form_handler(choose)) for path, choose in _READS.items()]
        return writes + reads + forms

    async def check(self) -> None:
        """Raise `StoreUnavailable` if a log that was opened takes no records any more."""
        if self._handlers is not None:
            await self._handlers.check()

    async def close(self) -> None:
        if self._handlers is not None:
            await self._handlers.close()

    def _read_route(self, method: str, path: str, handler: Handler) -> Route:
        operation = _OPERATIONS[path]
        if method == "POST":
            operation = operation._replace(bodies={FORM: operation.query}, query=None)
        return Route("read", method, path, handler, WAIT_MS_MAX, self._find_owner, may_stay=True, operation=operation)

    async def _find_owner(self) -> str | None:
        """Return the address of the broker that owns the log, if it is another one: it sees appends at once."""
        if self._settings.keyed is None or self._owners is None:
            return None
        key = keyed_ownership(self._settings.keyed)
        lease = None if self._owners.holds(key) else await self._owners.find(key)
        address = None if lease is None else self._owners.find_address(lease)
        return None if address in (self._owners.address, self._owners.local_address) else address

    def _handler(self, choose: _Choose) -> Handler:
        async def answer(request: Request) -> Response:
            return await choose(self._open())(request)

        return answer

    def _form_handler(self, choose: _Choose) -> Handler:
        """Return the handler of a read whose parameters are in the body: keys may be longer than an address."""

        async def answer(request: Request) -> Response:
            async with self._bodies.read(request, FORM) as body:
                query = Request({**request.scope, "query_string": bytes(body)}, request.receive)
            return await choose(self._open())(query)

        return answer

    def _open(self) -> KeyedHandlers:
        if self._settings.keyed is None:
            raise KeyedLogNotConfigured(
                "this broker serves no keyed log: start it with LLOG_KEYED=file:///absolute/dir or s3://bucket/prefix"
            )
        if self._handlers is None:
            from llog.broker.keyed.handlers import KeyedHandlers

            self._handlers = KeyedHandlers(
                self._settings.keyed, self._settings, self._metrics, self._stopping, self._bodies, self._owners
            )
        return self._handlers
