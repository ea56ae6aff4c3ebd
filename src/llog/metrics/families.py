"""Families of metrics: what a metric is called, counts and means, declared once for both answers and for the docs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Final, Literal, NamedTuple

from llog.base.histogram import Histogram

Kind = Literal["counter", "gauge", "histogram"]
Across = Literal["sum", "max", "each"]
"""How the values of several workers become one answer: added up, the largest, or each with the worker's number."""
_UNITS: Final = ("seconds", "bytes", "dollars", "records", "requests")


class Family(NamedTuple):
    """The metrics of one name. Their values differ by their labels."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    across: Across = "sum"

    @property
    def unit(self) -> str:
        """The unit that the name ends with, before `_total`; empty for a plain number."""
        last = self.name.removesuffix("_total").rpartition("_")[2]
        return last if last in _UNITS else ""

    def sample(self, value: float, *labels: str) -> Sample:
        """Return one value, with the values of the labels in their order."""
        return Sample(self, tuple(zip(self.labels, labels, strict=True)), value)

    def histogram(self, histogram: Histogram, *labels: str) -> Iterator[Sample]:
        """Yield the cumulative buckets, the sum and the count of a histogram."""
        by = tuple(zip(self.labels, labels, strict=True))
        totals = [*accumulate(histogram.counts)]  # read once, so that the count equals the last bucket
        for bound, total in zip((*(f"{bound:g}" for bound in histogram.bounds), "+Inf"), totals, strict=True):
            yield Sample(self, (*by, ("le", bound)), total, "_bucket")
        yield Sample(self, by, histogram.sum, "_sum")
        yield Sample(self, by, totals[-1], "_count")


class Sample(NamedTuple):
    """One number of a family. `suffix` is what the name of a histogram's part ends with."""

    family: Family
    labels: tuple[tuple[str, str], ...]
    value: float
    suffix: str = ""


def counter(name: str, text: str, *labels: str) -> Family:
    return Family(name, "counter", text, labels)


def gauge(name: str, text: str, *labels: str, across: Across = "sum") -> Family:
    return Family(name, "gauge", text, labels, across)


def histogram(name: str, text: str, *labels: str) -> Family:
    return Family(name, "histogram", text, labels)
