"""An estimate of what a process costs on S3, from the requests that it has made and the blobs in the bucket."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from llog.config import Settings
from llog.log.log import Log, is_remote
from llog.metrics.cached import Cached
from llog.metrics.families import Family, Sample, counter, gauge
from llog.metrics.footprint import Footprint, footprint_of
from llog.metrics.stores import counts_of

GB: Final = 1 << 30
MONTH_S: Final = 30 * 86_400
PUT_OPERATIONS: Final = ("put", "list")
GET_OPERATIONS: Final = ("get", "range_get")
EXCLUDED: Final = (
    "data transfer in or out",
    "replication",
    "lifecycle transitions",
    "KMS",
    "taxes, discounts, support, or account-level billing adjustments",
)

REQUEST_COST: Final = counter(
    "llog_s3_request_cost_dollars_total",
    "Estimated price of the requests to the bucket. Sum it over processes.",
    "operation",
)
STORED_OBJECTS: Final = gauge(
    "llog_s3_stored_objects", "Blobs below the log's prefix in the bucket. Take the max over processes.", across="max"
)
STORED_BYTES: Final = gauge(
    "llog_s3_stored_bytes",
    "Bytes of the blobs below the log's prefix in the bucket. Take the max over processes.",
    across="max",
)
STORAGE_COST: Final = gauge(
    "llog_s3_storage_month_cost_dollars",
    "Estimated price of storing these bytes for a month. Take the max over processes.",
    across="max",
)
FAMILIES: Final[tuple[Family, ...]] = (REQUEST_COST, STORED_OBJECTS, STORED_BYTES, STORAGE_COST)


class Prices(msgspec.Struct, frozen=True, kw_only=True):
    """Prices in US dollars."""

    storage_gb_month: float
    put_1000: float
    get_10000: float

    def of(self, operation: str, requests: float) -> float:
        """Return the price of this many requests; those that are neither listed nor free count as GETs."""
        if operation in PUT_OPERATIONS:
            return requests / 1000 * self.put_1000
        return requests / 10_000 * self.get_10000

    def of_storage(self, size: int) -> float:
        """Return the price of storing these bytes for a month."""
        return size / GB * self.storage_gb_month


class Bill(msgspec.Struct, frozen=True, kw_only=True):
    """What one process has cost so far, and what the bucket costs in a month."""

    prices: Prices
    requests: dict[str, int]
    footprint: Footprint | None

    @property
    def costs(self) -> dict[str, float]:
        """The price of the requests so far, by operation."""
        return {operation: self.prices.of(operation, count) for operation, count in self.requests.items()}

    @property
    def put_cost(self) -> float:
        return self.costs["put"]

    @property
    def get_cost(self) -> float:
        return sum(self.costs[operation] for operation in GET_OPERATIONS)

    def as_json(self) -> dict[str, Any]:
        found = self.footprint
        return {
            "currency": "USD",
            "assumptions": "S3 Standard in us-east-1, unless LLOG_PRICE_… say otherwise; 1 GB is 2^30 bytes",
            "prices": self.prices,
            "requests": self.requests,
            "request_costs": self.costs,
            "request_cost": sum(self.costs.values()),
            "objects": None if found is None else found.objects,
            "stored_bytes": None if found is None else found.bytes,
            "stored_gb": None if found is None else found.bytes / GB,
            "storage_cost_month": None if found is None else self.prices.of_storage(found.bytes),
            "measured_at_ms": None if found is None else found.measured_at_ms,
            "excluded": EXCLUDED,
        }

    def samples(self) -> Iterator[Sample]:
        for operation, cost in self.costs.items():
            yield REQUEST_COST.sample(cost, operation)
        if self.footprint is not None:
            yield STORED_OBJECTS.sample(self.footprint.objects)
            yield STORED_BYTES.sample(self.footprint.bytes)
            yield STORAGE_COST.sample(self.prices.of_storage(self.footprint.bytes))


class Billing:
    """The bill of a log whose blobs are in a bucket; there is none for local files."""

    def __init__(self, log: Log, settings: Settings) -> None:
        self._blobs = log.blobs
        self._is_billed = is_remote(log.blobs.uri)
        self._prices = Prices(
            storage_gb_month=settings.price_storage_gb_month,
            put_1000=settings.price_put_1000,
            get_10000=settings.price_get_10000,
        )
        self._footprint: Cached[Footprint] | None = None
        if self._is_billed and settings.footprint_interval_ms:
            self._footprint = footprint_of(log, settings.footprint_interval_ms)

    async def bill(self) -> Bill | None:
        """Return the bill as it is now, or None if nothing is charged."""
        if not self._is_billed:
            return None
        found = None if self._footprint is None else await self._footprint.get()
        return make_bill(self._prices, getattr(counts_of(self._blobs), "count", {}), found)

    async def close(self) -> None:
        if self._footprint is not None:
            await self._footprint.close()


def make_bill(prices: Prices, counts: Mapping[str, int], footprint: Footprint | None) -> Bill:
    """Return the bill for these counts of operations on the blob store."""
    requests = {operation: counts.get(operation, 0) for operation in (*PUT_OPERATIONS, *GET_OPERATIONS)}
    return Bill(prices=prices, requests=requests, footprint=footprint)
