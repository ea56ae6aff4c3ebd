"""`GET /health`, for people and alarms: whether every store takes writes. `GET /ready`, for load balancers: whether
requests may come.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from llog.broker.http.answer_shapes import StatusAnswer
from llog.broker.http.answers import json_answer, problem
from llog.broker.http.operations import Operation
from llog.broker.http.requests import JSON
from llog.broker.http.routing import Route
from llog.errors import LlogError, StoreUnavailable
from llog.log.engine import Check
from llog.log.keys import LOG_ID
from llog.log.log import Log

CHECK_SECONDS: Final = 5.0


_HEALTH: Final = Operation("Operations", "Whether every store takes writes", answers={JSON: StatusAnswer})
_READY: Final = Operation("Operations", "Whether the process can serve reads", answers={JSON: StatusAnswer})


class HealthRoutes:
    def __init__(self, log: Log, stopping: asyncio.Event, checks: dict[str, Check]) -> None:
        """`checks` are those of stores beside the log's own, by the names that people read."""
        self._log = log
        self._stopping = stopping
        self._checks: dict[str, Check] = {
            "metadata store": self._check_meta,
            "blob store": log.blobs.check,
            **{name: check for engine in log.engines.values() for name, check in engine.checks().items()},
            **checks,
        }
        self._log_id: bytes | None = None

    def routes(self) -> list[Route]:
        return [
            Route("all", "GET", "/health", self._health, operation=_HEALTH),
            Route("all", "GET", "/ready", self._ready, operation=_READY),
        ]

    async def _health(self, _: Request) -> Response:
        return await _answer("ok", self._checks)

    async def _ready(self, _: Request) -> Response:
        """Answer whether the stores can be read.

        A store that is full or read-only does not count: the broker serves what it can, as any other one would.
        """
        if self._stopping.is_set():
            return _unavailable("this process is stopping")
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
            raise StoreUnavailable("it is that of another log than when this process started: restart the process")
        self._log_id = found


async def _answer(status: str, checks: dict[str, Check]) -> Response:
    failures = await asyncio.gather(*map(_failure, checks.values()))
    problems = [f"{name}: {failure}" for name, failure in zip(checks, failures, strict=True) if failure is not None]
    if problems:
        return _unavailable("; ".join(problems))
    return json_answer({"status": status})


def _unavailable(detail: str) -> Response:
    return problem(HTTPStatus.SERVICE_UNAVAILABLE, StoreUnavailable.code, detail)


async def _failure(check: Check) -> str | None:
    """Return what is wrong with the store; None if nothing is."""
    try:
        async with asyncio.timeout(CHECK_SECONDS):
            await check()
    except LlogError as error:
        return str(error)
    except TimeoutError:
        return f"no answer within {CHECK_SECONDS:.0f} seconds"
    return None
