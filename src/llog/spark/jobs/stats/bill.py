"""What a log would cost on S3, estimated from its index: nothing is asked of the store, so nothing here is an invoice.

Counted are the blobs that the index names: one PUT each, one LIST for a thousand of them, and one GET for each index
entry and each group of its topic, or one reader where there is no group. Not counted are blobs that were compacted or
trimmed away, what the compactor reads, retries, and traffic out of the region.
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
"""Requests of a shorter time are taken as an hour's: seconds of a load are no base for a month."""
_LISTED_PER_REQUEST: Final = 1000


class BlobCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Distinct blobs that index entries name."""

    shared: int = 0
    """Of writers and sinks."""
    compacted: int = 0
    bytes: int = 0
    """Those that belong to records, which is all but the headers."""
    slices: int = 0
    """Index entries: ranges of a blob, each read by a GET."""

    @property
    def blobs(self) -> int:
        return self.shared + self.compacted


class BillLine(msgspec.Struct, frozen=True, kw_only=True):
    item: str
    quantity: float
    """GiB stored, or requests since the first append that is kept."""
    price: float
    per: str
    dollars_month: float
    """In a month that goes on like the time between the first and the last append."""


def check_prices(given: Mapping[str, float]) -> dict[str, float]:
    """All prices, those given in place of the listed ones."""
    for name, price in given.items():
        if name not in PRICES:
            raise InvalidArgument(f"there is no price {name!r}: there are {', '.join(PRICES)}")
        if not 0 <= price < float("inf"):
            raise InvalidArgument(f"the price {name} is {price}: it must be 0 or more")
    return {**PRICES, **given}


def estimate(counts: BlobCounts, *, gets: int, span_ms: int, prices: Mapping[str, float]) -> list[BillLine]:
    """The bill of a log whose kept records were appended, and read by so many GETs, within `span_ms`."""
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
