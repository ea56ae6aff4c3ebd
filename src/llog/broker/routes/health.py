"""`GET /health`, for people and alarms: whether every store takes writes. `GET /ready`, for load balancers: whether
requests may come.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from llog.broker.http.problems import problem
from llog.errors import LlogError, StoreUnavailable
from llog.log.keys import LOG_ID
from llog.log.log import Log

CHECK_SECONDS: Final = 5.0

Handler = Callable[[Request], Awaitable[Response]]
Check = Callable[[], Awaitable[None]]


class Health:
    def __init__(self, log: Log, stopping: asyncio.Event, checks: dict[str, Check]) -> None:
        """`checks` are of stores beside those of the log, by what they are called."""
        self._log = log
        self._stopping = stopping
        self._checks: dict[str, Check] = {
            "metadata store": self._check_meta,
            "blob store": log.blobs.check,
            **{name: check for engine in log.engines.values() for name, check in engine.checks().items()},
            **checks,
        }
        self._log_id: bytes | None = None

    def routes(self) -> list[tuple[str, str, str, Handler]]:
        """Role, method, path and handler of each."""
        return [("all", "GET", "/health", self._health), ("all", "GET", "/ready", self._ready)]

    async def _health(self, _: Request) -> Response:
        return await _answer("ok", self._checks)

    async def _ready(self, _: Request) -> Response:
        """A store that is full or read-only does not count: the broker still serves what it can, as any other one
        would.
        """
        if self._stopping.is_set():
            return _unavailable("the broker is stopping")
        return await _answer("ready", {"metadata store": self._read_meta, "blob store": self._read_blobs})

    async def _read_meta(self) -> None:
        await self._log.meta.get(LOG_ID)

    async def _read_blobs(self) -> None:
        await self._log.blobs.head(LOG_ID)

    async def _check_meta(self) -> None:
        await self._log.meta.check()
        entry = await self._log.meta.get(LOG_ID)
        found = None if entry is None else entry.value
        if self._log_id is not None and found != self._log_id:
            raise StoreUnavailable("it is that of another log than when this broker started: restart the broker")
        self._log_id = found


async def _answer(status: str, checks: dict[str, Check]) -> Response:
    found = await asyncio.gather(*map(_problem, checks.values()))
    problems = [f"{name}: {said}" for name, said in zip(checks, found, strict=True) if said is not None]
    if problems:
        return _unavailable("; ".join(problems))
    return Response(msgspec.json.encode({"status": status}), media_type="application/json")


def _unavailable(detail: str) -> Response:
    return problem(HTTPStatus.SERVICE_UNAVAILABLE, StoreUnavailable.code, detail)


async def _problem(check: Check) -> str | None:
    """What is wrong with the store."""
    try:
        async with asyncio.timeout(CHECK_SECONDS):
            await check()
    except LlogError as error:
        return str(error)
    except TimeoutError:
        return f"no answer within {CHECK_SECONDS:.0f} seconds"
    return None
