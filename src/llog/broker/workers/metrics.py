"""The metrics of all workers, from any of them: the one that is asked collects the reports of the others."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from llog.base.decoders import json_decoder
from llog.broker.metrics import Metrics
from llog.broker.monitoring.attribution import attribute
from llog.broker.monitoring.report import BrokerReport, ReportParts
from llog.broker.monitoring.traffic import Traffic, TrafficByName
from llog.broker.workers.counts import NAME_LABEL, RecordedCounts, WorkerReport
from llog.broker.workers.plan import WorkerPlan
from llog.metrics.billing import make_bill
from llog.metrics.exposition import MetricReport
from llog.metrics.families import Family, Sample, counter, gauge
from llog.metrics.merging import WORKER_LABEL, PackedSamples, is_count, merge
from llog.metrics.stores import BLOBS, OPERATIONS

if TYPE_CHECKING:
    import httpx

logger: Final = logging.getLogger("llog.broker")

WORKERS: Final = gauge("llog_workers", "Processes that serve this broker's port (LLOG_WORKERS), if there are several.")
WORKER_UP: Final = gauge(
    "llog_worker_up",
    "1 if the worker answered for these metrics; 0 if not: then its gauges are missing, and its counters are those of "
    "its last answer.",
    WORKER_LABEL,
)
FAMILIES: Final[tuple[Family, ...]] = (WORKERS, WORKER_UP)

REPORT_TYPE: Final = "application/vnd.llog.worker-report+json"
"""The media type by which one worker asks another for its own report."""
COLLECTION_S: Final = 5.0
"""How long a worker may take for its report. One that measures the bucket for the first time waits a while."""
COUNTS: Final = "counts"
_TRAFFIC: Final = counter("traffic", "Never exported: what the bill is shared by.", "kind", NAME_LABEL, "part")


class WorkerMetrics:
    """What one worker knows of its own metrics and, by asking, of those of its siblings."""

    def __init__(self, plan: WorkerPlan, report: BrokerReport, metrics: Metrics) -> None:
        self._plan = plan
        self._report = report
        self._metrics = metrics
        self._counts = RecordedCounts(Path(plan.directory) / COUNTS)
        self._life = time.monotonic_ns()
        self._numbers = count()
        self._http: httpx.AsyncClient | None = None
        self._is_reported = False

    async def read_own(self) -> bytes:
        """Return the report of this worker, for a sibling."""
        return msgspec.json.encode((await self._read_own())[0])

    async def read(self) -> MetricReport:
        """Return the report of all workers together."""
        asking = [asyncio.ensure_future(self._ask(address)) for address in self._plan.siblings.values()]
        own, parts = await self._read_own()
        others = await asyncio.gather(*asking)
        reports = {report.worker: report for report in (own, *others) if report is not None}
        return await asyncio.to_thread(self._merge, parts, reports)

    def _merge(self, parts: ReportParts, reports: Mapping[int, WorkerReport]) -> MetricReport:
        """Return the report of all workers; not on the event loop, since there may be many samples."""
        counts = self._record([*reports.values()])
        gauges = {
            worker: [sample for sample in report.samples.unpack() if not is_count(sample)]
            for worker, report in sorted(reports.items())
        }
        merged = [*merge(counts), *merge(gauges), *self._worker_samples(reports)]
        sections = parts.sections | {"uptime_seconds": self._plan.uptime_s, "workers": self._describe(reports)}
        if parts.bill is not None:
            footprints = [report.footprint for report in reports.values() if report.footprint is not None]
            bill = make_bill(parts.bill.prices, _blob_operations(merged), footprints[0] if footprints else None)
            sections["s3"] = {"billing": bill.as_json() | attribute(bill, _traffic_of(merged))}
        return MetricReport(sections, [sample for sample in merged if sample.family.name != _TRAFFIC.name])

    def _record(self, reports: Sequence[WorkerReport]) -> dict[int, list[Sample]]:
        """Return the recorded counts or, if they cannot be recorded, those in the reports."""
        try:
            return self._counts.record(reports)
        except OSError as error:
            if not self._is_reported:
                self._is_reported = True
                logger.warning(
                    "the counts of the workers cannot be kept in %s (%s): metrics may fall when a worker dies",
                    self._plan.directory,
                    error,
                )
            return {report.worker: [*filter(is_count, report.samples.unpack())] for report in reports}

    async def close(self) -> None:
        if self._http is not None:
            await self._http.aclose()

    async def _read_own(self) -> tuple[WorkerReport, ReportParts]:
        parts = await self._report.read_parts()
        report = WorkerReport(
            worker=self._plan.number,
            pid=os.getpid(),
            life=self._life,
            number=next(self._numbers),  # reports are numbered in the order in which their samples were taken
            samples=PackedSamples.pack([*parts.samples, *_traffic_samples(self._metrics.traffic)]),
            footprint=None if parts.bill is None else parts.bill.footprint,
        )
        return report, parts

    async def _ask(self, address: str) -> WorkerReport | None:
        """Return the report of a sibling; None if it does not answer in time, or not as a worker does."""
        import httpx

        if self._http is None:
            self._http = httpx.AsyncClient(headers={"accept": REPORT_TYPE}, trust_env=False, timeout=COLLECTION_S)
        try:
            async with asyncio.timeout(COLLECTION_S):
                response = await self._http.get(f"{address}/metrics")
            return json_decoder(WorkerReport).decode(response.content)
        except (httpx.HTTPError, TimeoutError, msgspec.DecodeError):
            return None

    def _worker_samples(self, reports: Mapping[int, WorkerReport]) -> Iterator[Sample]:
        yield WORKERS.sample(len(self._plan.addresses))
        for worker in range(len(self._plan.addresses)):
            yield WORKER_UP.sample(int(worker in reports), str(worker))

    def _describe(self, reports: Mapping[int, WorkerReport]) -> list[dict[str, Any]]:
        return [
            {
                "worker": worker,
                "up": worker in reports,
                "pid": reports[worker].pid if worker in reports else None,
                "address": address,
            }
            for worker, address in enumerate(self._plan.addresses)
        ]


def _traffic_samples(traffic: Mapping[str, TrafficByName]) -> Iterator[Sample]:
    for kind, names in traffic.items():
        for name, found in names:
            for part in Traffic.__slots__:
                yield _TRAFFIC.sample(getattr(found, part), kind, name, part)


def _traffic_of(samples: Iterable[Sample]) -> dict[str, TrafficByName]:
    """Return the traffic of all workers. Its names are as many as the reports have, which are bounded."""
    traffic = {kind: TrafficByName(names_max=1 << 20) for kind in Metrics().traffic}
    for sample in samples:
        if sample.family.name == _TRAFFIC.name:
            kind, name, part = (value for _, value in sample.labels)
            found = traffic[kind].of(name)
            setattr(found, part, getattr(found, part) + sample.value)
    return traffic


def _blob_operations(samples: Iterable[Sample]) -> Counter[str]:
    found: Counter[str] = Counter()
    for sample in samples:
        if sample.family.name == OPERATIONS.name:
            store, operation = (value for _, value in sample.labels)
            if store == BLOBS:
                found[operation] += int(sample.value)
    return found
