"""Estimates what a log would cost on S3 from its index alone; it is not an invoice.

The estimate counts the blobs in the index: one PUT for each, one LIST for a thousand of them, and one GET for each
index entry and each consumer group of its topic, or for one reader without groups. It does not count blobs that were
compacted or trimmed away, the reads of the compactor, retries, and traffic out of the region.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from llog.errors import InvalidArgument

PRICES: Final[dict[str, float]] = {
    # US dollars, S3 Standard, us-east-1, first 50 TB, as listed in January 2025.
    "storage": 0.023,  # for a GiB and month
    "put": 0.005,  # for 1,000 requests
    "get": 0.0004,  # for 1,000 requests
    "list": 0.005,  # for 1,000 requests
}
MONTH_MS: Final = 30 * 86_400_000
SPAN_MS_MIN: Final = 3_600_000
"""A shorter time counts as an hour: some seconds of load cannot be extrapolated to a month."""
_LISTED_PER_REQUEST: Final = 1000


class BlobCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The distinct blobs that index entries refer to."""

    shared: int = 0
    """The blobs of writers and sinks."""
    compacted: int = 0
    bytes: int = 0
    """The bytes of records, without the blobs' headers."""
    slices: int = 0
    """The number of index entries: each is a range of a blob that one GET reads."""

    @property
    def blobs(self) -> int:
        return self.shared + self.compacted


class BillLine(msgspec.Struct, frozen=True, kw_only=True):
    item: str
    quantity: float
    """The stored GiB, or the requests since the first append that is kept."""
    price: float
    per: str
    dollars_month: float
    """The price of a month with the same rates as between the first and the last append."""


def check_prices(given: Mapping[str, float]) -> dict[str, float]:
    """Return all prices, with the given ones in place of the list prices."""
    for name, price in given.items():
        if name not in PRICES:
            raise InvalidArgument(f"there is no price {name!r}: there are {', '.join(PRICES)}")
        if not 0 <= price < float("inf"):
            raise InvalidArgument(f"the price {name} is {price}: it must be 0 or more")
    return {**PRICES, **given}


def estimate(counts: BlobCounts, *, gets: int, span_ms: int, prices: Mapping[str, float]) -> list[BillLine]:
    """Return the bill of a log whose kept records were appended, and read by `gets` requests, within `span_ms`."""
    stored_gib = counts.bytes / (1 << 30)
    requests = {
        "put": counts.blobs,
        "get": gets,
        "list": -(-counts.blobs // _LISTED_PER_REQUEST),
    }
    months = max(span_ms, SPAN_MS_MIN) / MONTH_MS
    storage = BillLine(
        item="storage",
        quantity=stored_gib,
        price=prices["storage"],
        per="GiB-month",
        dollars_month=stored_gib * prices["storage"],
    )
    return [
        storage,
        *(
            BillLine(
                item=item,
                quantity=count,
                price=prices[item],
                per="1,000 requests",
                dollars_month=count / 1000 * prices[item] / months,
            )
            for item, count in requests.items()
        ),
    ]
