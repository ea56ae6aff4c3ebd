"""Which topic, producer and consumer group caused the costs of a broker's requests to the bucket: an estimate.

A PUT is shared by the records in its batch, by their bytes. GETs are shared by the bytes that were read from the bucket
rather than from the tail. LISTs, and what other processes do for a topic later, are not attributed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from llog.broker.monitoring.traffic import Traffic, TrafficByName
from llog.metrics.billing import Bill


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """One name's part of the costs so far, in US dollars."""

    name: str
    produced_bytes: int
    consumed_bytes: int
    fetched_bytes: int
    put_requests: float
    get_requests: float
    request_cost: float


def attribute(bill: Bill, traffic: Mapping[str, TrafficByName]) -> dict[str, Any]:
    """Return the shares of `topics`, `producers` and `groups`, the most expensive ones first."""
    return {kind: _shares(bill, names, traffic["topics"]) for kind, names in traffic.items()}


def _shares(bill: Bill, names: TrafficByName, topics: TrafficByName) -> list[Share]:
    """Return the shares of the names in what all topics together caused."""
    total = Traffic()
    for _, traffic in topics:
        total.add(traffic)
    gets = sum(bill.requests[operation] for operation in ("get", "range_get"))
    shares = []
    for name, traffic in names:
        puts = _part(bill.requests["put"], traffic.batch_shares, total.batch_shares)
        reads = _part(gets, traffic.fetched_bytes, total.fetched_bytes)
        shares.append(
            Share(
                name=name,
                produced_bytes=traffic.produced_bytes,
                consumed_bytes=traffic.consumed_bytes,
                fetched_bytes=traffic.fetched_bytes,
                put_requests=puts,
                get_requests=reads,
                request_cost=bill.prices.of("put", puts) + bill.prices.of("get", reads),
            )
        )
    return sorted(shares, key=lambda share: (-share.request_cost, share.name))


def _part(whole: float, share: float, total: float) -> float:
    return whole * share / total if total else 0.0
