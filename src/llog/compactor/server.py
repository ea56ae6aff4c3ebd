"""One compactor process: the service, and the few routes by which people and monitors look at it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import closing
from typing import Any

import msgspec

from llog.broker.http.routing import App
from llog.broker.listeners import listen
from llog.broker.metrics import Metrics
from llog.broker.monitoring.families import http_samples
from llog.broker.routes.health import HealthRoutes
from llog.broker.routes.metrics import MetricRoutes
from llog.broker.server import run_loop, serve
from llog.compactor.metrics import compactor_samples
from llog.compactor.service import CompactorService
from llog.config import Settings
from llog.log.log import Log
from llog.log.opening import opened_log, require_log
from llog.metrics.billing import Billing
from llog.metrics.exposition import MetricReport
from llog.metrics.process import process_samples
from llog.metrics.stores import store_samples


def run(settings: Settings, *, ready: Callable[[str], None], report: Callable[[str], None]) -> None:
    """Compact until SIGINT or SIGTERM, then finish what was begun. `ready` gets the address once it answers."""
    require_log(settings)
    with closing(listen(settings.compactor_bind_host, settings.compactor_port, "LLOG_COMPACTOR")) as listener:
        run_loop(_serve(settings, listener, ready, report))


class CompactorServer:
    """Everything that one compactor process holds. Made on the event loop that it runs on."""

    def __init__(self, log: Log, settings: Settings, report: Callable[[str], None]) -> None:
        self.metrics = Metrics()
        self.stopping = asyncio.Event()
        self.compactor = CompactorService(log, settings, report)
        self._log = log
        self._billing = Billing(log, settings)
        self._settings = msgspec.structs.replace(settings, broker_bind_host=settings.compactor_bind_host)

    def app(self) -> App:
        resources = (
            HealthRoutes(self._log, self.stopping, {"compaction": self.compactor.check}),
            MetricRoutes(self._report),
        )
        routes = [route for resource in resources for route in resource.routes()]
        return App(routes, self._settings, None, self.metrics)

    async def close(self) -> None:
        await self._billing.close()

    async def _report(self) -> MetricReport:
        bill = await self._billing.bill()
        sections: dict[str, Any] = {"compactor": self.compactor.describe()}
        samples = [*compactor_samples(self.compactor.metrics), *http_samples(self.metrics), *store_samples(self._log)]
        if bill is not None:
            sections["s3"] = {"billing": bill.as_json()}
            samples += bill.samples()
        samples += process_samples()
        return MetricReport(sections, samples)


async def _serve(
    settings: Settings, listener: socket.socket, ready: Callable[[str], None], report: Callable[[str], None]
) -> None:
    async with opened_log(settings) as log:
        server = CompactorServer(log, settings, report)
        await serve(server, settings, [listener], ready, [server.compactor.run(server.stopping)])
