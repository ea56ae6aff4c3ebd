"""The routes under `/keyed`, whether or not there is a keyed log behind them.

SlateDB is imported by the first request that needs it: a broker without a keyed log does without.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import TYPE_CHECKING, Final

from starlette.requests import Request
from starlette.responses import Response

from llog.broker.metrics import Metrics
from llog.config import Settings
from llog.errors import KeyedLogNotConfigured
from llog.log.owners import Owners, keyed_of

if TYPE_CHECKING:
    from llog.broker.keyed.answers import KeyedAnswers

Handler = Callable[[Request], Awaitable[Response]]
Body = Callable[[Request, str], AbstractAsyncContextManager[bytearray]]
"""Reads the body of a request, of this content type: `Broker._body`."""

_WRITES: Final = ("/keyed/append", "/keyed/seal")
_READS: Final = ("/keyed/scan", "/keyed/count", "/keyed/keys", "/keyed/segments", "/keyed/tail")
READS: Final = frozenset(_READS)
_FORM: Final = "application/x-www-form-urlencoded"


class Keyed:
    def __init__(
        self,
        settings: Settings,
        metrics: Metrics,
        stopping: asyncio.Event,
        body: Body,
        owners: Owners | None = None,
    ) -> None:
        self._settings = settings
        self._owners = owners
        self._metrics = metrics
        self._stopping = stopping
        self._body = body
        self._answers: KeyedAnswers | None = None

    def routes(self) -> list[tuple[str, str, str, Handler]]:
        """Role, method, path and handler of each."""
        writes = [("write", "POST", path, partial(self._answer, path)) for path in _WRITES]
        reads = [("read", "GET", path, partial(self._answer, path)) for path in _READS]
        return [*writes, *reads, *(("read", "POST", path, partial(self._answer_form, path)) for path in _READS)]

    async def owner(self) -> str | None:
        """The address of the broker that owns the log, if that is another one: it sees at once what was appended."""
        if self._settings.keyed is None or self._owners is None:
            return None
        what = keyed_of(self._settings.keyed)
        lease = None if self._owners.holds(what) else await self._owners.find(what)
        return None if lease is None or lease.address == self._owners.address else lease.address

    async def check(self) -> None:
        """`StoreUnavailable` if a log that was opened takes no records any more."""
        if self._answers is not None:
            await self._answers.check()

    async def close(self) -> None:
        if self._answers is not None:
            await self._answers.close()

    async def _answer_form(self, path: str, request: Request) -> Response:
        """A read whose parameters are in the body: keys may be longer than an address."""
        async with self._body(request, _FORM) as body:
            asked = Request({**request.scope, "query_string": bytes(body)}, request.receive)
        return await self._answer(path, asked)

    async def _answer(self, path: str, request: Request) -> Response:
        if self._settings.keyed is None:
            raise KeyedLogNotConfigured(
                "this broker serves no keyed log: start it with LLOG_KEYED=file:///absolute/dir or s3://bucket/prefix"
            )
        if self._answers is None:
            from llog.broker.keyed.answers import KeyedAnswers

            self._answers = KeyedAnswers(
                self._settings.keyed, self._settings, self._metrics, self._stopping, self._body, self._owners
            )
        return await self._answers.handlers[path](request)
