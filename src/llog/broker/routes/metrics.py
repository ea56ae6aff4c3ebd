"""The broker's metrics: `GET /metrics` as JSON or, to Prometheus, as text; `GET /metrics/prometheus` always as text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llog.broker.http.answers import json_answer
from llog.broker.http.routing import Route
from llog.broker.metrics import Metrics
from llog.broker.monitoring.attribution import attribute
from llog.broker.monitoring.description import Description
from llog.broker.monitoring.families import broker_samples
from llog.broker.monitoring.group_lag import GroupLags
from llog.log.log import Log
from llog.metrics.billing import Bill, Billing
from llog.metrics.exposition import PROMETHEUS, as_json, as_prometheus, prefers_prometheus
from llog.metrics.families import Sample
from llog.metrics.process import process_samples, uptime_s
from llog.metrics.stores import store_samples


class MetricRoutes:
    def __init__(
        self, log: Log, metrics: Metrics, description: Description, billing: Billing, group_lags: GroupLags
    ) -> None:
        self._log = log
        self._metrics = metrics
        self._description = description
        self._billing = billing
        self._group_lags = group_lags

    def routes(self) -> list[Route]:
        return [
            Route("all", "GET", "/metrics", self._json_or_prometheus),
            Route("all", "GET", "/metrics/prometheus", self._prometheus),
        ]

    async def _json_or_prometheus(self, request: Request) -> Response:
        if prefers_prometheus(request.headers.get("accept")):
            return await self._prometheus(request)
        bill, lags = await self._billing.bill(), await self._group_lags.samples()
        sections: dict[str, Any] = self._description.as_json()
        if bill is not None:
            sections["s3"] = {"billing": bill.as_json() | attribute(bill, self._metrics)}
        return json_answer({"uptime_seconds": uptime_s(), **sections, **as_json(self._samples(bill, lags))})

    async def _prometheus(self, _: Request) -> Response:
        bill, lags = await self._billing.bill(), await self._group_lags.samples()
        return Response(as_prometheus(self._samples(bill, lags)), media_type=PROMETHEUS)

    def _samples(self, bill: Bill | None, lags: Iterator[Sample]) -> Iterator[Sample]:
        yield from self._description.samples()
        yield from broker_samples(self._metrics)
        yield from store_samples(self._log)
        yield from lags
        if bill is not None:
            yield from bill.samples()
        yield from process_samples()
