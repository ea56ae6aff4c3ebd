"""What a broker exports: its own numbers, those of its stores, of consumer groups and costs, and of what runs beside
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from llog.broker.metrics import Metrics
from llog.broker.monitoring.attribution import attribute
from llog.broker.monitoring.description import Description
from llog.broker.monitoring.families import broker_samples
from llog.broker.monitoring.group_lag import GroupLags
from llog.log.log import Log
from llog.metrics.billing import Bill, Billing
from llog.metrics.exposition import MetricReport
from llog.metrics.families import Sample
from llog.metrics.process import process_samples
from llog.metrics.stores import store_samples

SampleSource = Callable[[], Iterable[Sample]]


class ReportParts(NamedTuple):
    """What a report is made of: the sections of the JSON answer but for the bill, the samples, and the bill."""

    sections: dict[str, Any]
    samples: list[Sample]
    bill: Bill | None


class BrokerReport:
    def __init__(
        self, log: Log, metrics: Metrics, description: Description, billing: Billing, group_lags: GroupLags
    ) -> None:
        self._log = log
        self._metrics = metrics
        self._description = description
        self._billing = billing
        self._group_lags = group_lags
        self._beside: list[SampleSource] = []

    def add(self, source: SampleSource) -> None:
        """Let the report have the samples of something that runs beside the broker, too."""
        self._beside.append(source)

    async def read(self) -> MetricReport:
        sections, samples, bill = await self.read_parts()
        if bill is not None:
            sections["s3"] = {"billing": bill.as_json() | attribute(bill, self._metrics.traffic)}
        return MetricReport(sections, samples)

    async def read_parts(self) -> ReportParts:
        bill, lags = await self._billing.bill(), await self._group_lags.samples()
        samples = [*self._description.samples(), *broker_samples(self._metrics), *store_samples(self._log), *lags]
        if bill is not None:
            samples += bill.samples()
        for source in self._beside:
            samples += source()
        samples += process_samples()
        return ReportParts(self._description.as_json(), samples, bill)
