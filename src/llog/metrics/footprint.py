"""The footprint of a log in its bucket: how many blobs there are and how large, by a LIST of all of them."""

from __future__ import annotations

from typing import Final

import msgspec

from llog.log.log import Log
from llog.metrics.cached import Cached

SECONDS_PER_LIST: Final = 10
"""Scans of a large log come so seldom that they make one LIST in this time on average, about $1.30 in a month."""
_BLOBS_PER_LIST: Final = 1000


class Footprint(msgspec.Struct, frozen=True, kw_only=True):
    """All blobs below the log's prefix at one time, those that no index names any more included."""

    objects: int
    bytes: int
    measured_at_ms: int


def footprint_of(log: Log, interval_ms: int) -> Cached[Footprint]:
    """Return the log's footprint, which is measured again when it is asked for and older than the interval."""

    async def scan() -> Footprint:
        objects = size = 0
        started_ms = log.runtime.now_ms()
        async for page in log.blobs.list(""):
            objects += len(page)
            size += sum(info.size for info in page)
        return Footprint(objects=objects, bytes=size, measured_at_ms=started_ms)

    def keep_s(found: Footprint | None) -> float:
        lists = 1 if found is None else found.objects // _BLOBS_PER_LIST + 1
        return max(interval_ms / 1000, lists * SECONDS_PER_LIST)

    return Cached(scan, keep_s)
