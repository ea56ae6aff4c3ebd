"""The lag of consumer groups as metrics, for a bounded number of groups and topics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from llog.groups.listing import GroupListing
from llog.metrics.cached import Cached
from llog.metrics.families import Family, Sample, counter, gauge

GROUPS_MAX: Final = 100
SERIES_MAX: Final = 1000

LAG: Final = gauge(
    "llog_group_lag_records",
    "Records that a consumer group has yet to acknowledge in all partitions of a topic. Take the max over brokers.",
    "group",
    "topic",
    across="max",
)
OUTSTANDING: Final = gauge(
    "llog_group_outstanding_records",
    "Records that were delivered to a consumer group and not acknowledged. Take the max over brokers.",
    "group",
    "topic",
    across="max",
)
FAILURES: Final = counter("llog_group_lag_failures_total", "Failed attempts to read the lag of the groups.")
FAMILIES: Final[tuple[Family, ...]] = (LAG, OUTSTANDING, FAILURES)


class _Behind(NamedTuple):
    group: str
    topic: str
    lag: int
    outstanding: int


class GroupLags:
    """The lag of the first groups by name, read at most once in an interval, and not at all with an interval of 0."""

    def __init__(self, listing: GroupListing, interval_ms: int) -> None:
        self._listing = listing
        self._found: Cached[Sequence[_Behind]] | None = None
        if interval_ms:
            self._found = Cached(self._read, lambda _: interval_ms / 1000)

    async def samples(self) -> Iterator[Sample]:
        if self._found is None:
            return iter(())
        behind = await self._found.get() or ()
        samples = [FAILURES.sample(self._found.failures)]
        for each in behind:
            samples.append(LAG.sample(each.lag, each.group, each.topic))
            samples.append(OUTSTANDING.sample(each.outstanding, each.group, each.topic))
        return iter(samples)

    async def close(self) -> None:
        if self._found is not None:
            await self._found.close()

    async def _read(self) -> Sequence[_Behind]:
        found: list[_Behind] = []
        for group in (await self._listing.names())[:GROUPS_MAX]:
            lags: Counter[str] = Counter()
            outstanding: Counter[str] = Counter()
            for each in await self._listing.describe(group):
                lags[each.topic] += each.lag or 0
                outstanding[each.topic] += each.outstanding
            found += (_Behind(group, topic, lag, outstanding[topic]) for topic, lag in sorted(lags.items()))
        return found[:SERIES_MAX]
