"""The broker's metrics: `GET /metrics` as JSON, and `GET /metrics/prometheus` as Prometheus text."""

from __future__ import annotations

from collections.abc import Iterator

from starlette.requests import Request
from starlette.responses import Response

from llog.broker.http.answers import json_answer
from llog.broker.http.routing import Route
from llog.broker.metrics import Metrics, Sample, as_json, as_prometheus
from llog.log.log import Log


class MetricRoutes:
    def __init__(self, log: Log, metrics: Metrics) -> None:
        self._log = log
        self._metrics = metrics

    def routes(self) -> list[Route]:
        return [
            Route("all", "GET", "/metrics", self._json),
            Route("all", "GET", "/metrics/prometheus", self._prometheus),
        ]

    async def _json(self, _: Request) -> Response:
        return json_answer(as_json(self._samples()))

    async def _prometheus(self, _: Request) -> Response:
        return Response(as_prometheus(self._samples()), media_type="text/plain; version=0.0.4")

    def _samples(self) -> Iterator[Sample]:
        stores = (("meta", self._log.meta), ("blobs", self._log.blobs))
        return self._metrics.samples((name, getattr(store, "counts", None)) for name, store in stores)
