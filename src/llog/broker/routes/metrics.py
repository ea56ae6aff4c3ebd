"""The metrics of a process: `GET /metrics` as JSON or, to Prometheus, as text; `GET /metrics/prometheus` as text."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from llog.broker.http.answers import json_answer
from llog.broker.http.operations import Operation
from llog.broker.http.requests import JSON
from llog.broker.http.routing import Route
from llog.broker.workers.metrics import REPORT_TYPE
from llog.metrics.exposition import PROMETHEUS, MetricReport, as_json, as_prometheus, prefers_prometheus
from llog.metrics.process import uptime_s

_JSON_OR_PROMETHEUS: Final = Operation(
    "Operations", "Metrics as JSON, or as text for Prometheus", answers={JSON: dict[str, Any], "text/plain": str}
)
_PROMETHEUS: Final = Operation("Operations", "Metrics as text for Prometheus", answers={"text/plain": str})


class MetricRoutes:
    def __init__(
        self, read: Callable[[], Awaitable[MetricReport]], read_own: Callable[[], Awaitable[bytes]] | None = None
    ) -> None:
        """`read` returns what the service exports, for one answer; `read_own`, in a worker, what this process alone
        exports, for its siblings.
        """
        self._read = read
        self._read_own = read_own

    def routes(self) -> list[Route]:
        return [
            Route("all", "GET", "/metrics", self._json_or_prometheus, operation=_JSON_OR_PROMETHEUS),
            Route("all", "GET", "/metrics/prometheus", self._prometheus, operation=_PROMETHEUS),
        ]

    async def _json_or_prometheus(self, request: Request) -> Response:
        if self._read_own is not None and request.headers.get("accept") == REPORT_TYPE:
            return Response(await self._read_own(), media_type=REPORT_TYPE)
        if prefers_prometheus(request.headers.get("accept")):
            return await self._prometheus(request)
        report = await self._read()
        return json_answer({"uptime_seconds": uptime_s(), **report.sections, **as_json(report.samples)})

    async def _prometheus(self, _: Request) -> Response:
        return Response(as_prometheus((await self._read()).samples), media_type=PROMETHEUS)
