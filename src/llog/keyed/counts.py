"""The writer's memory of how many records each key has in the active segment."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final

from llog.keyed.encoding import entry_prefix
from llog.keyed.runs import decode_head
from llog.keyed.slate import Database

SEEKS_AT_ONCE: Final = 64


class Counts:
    """A bounded memory of counts by key, in two generations: when the young one is full, the old one is forgotten.

    While nothing of a segment that began empty was forgotten, a key that is not in here has no records, and costs no
    seek.
    """

    def __init__(self, keys_max: int) -> None:
        self._half = max(1, keys_max // 2)
        self._young: dict[bytes, int] = {}
        self._old: dict[bytes, int] = {}
        self._complete = False

    def start_segment(self, *, empty: bool) -> None:
        """Forget all counts, because another segment is active; `empty` says that it has no records yet."""
        self._young, self._old, self._complete = {}, {}, empty

    def get(self, key: bytes) -> int | None:
        """Return the count of a key; None if only the database knows it."""
        count = self._young.get(key)
        if count is None:
            count = self._old.get(key, 0 if self._complete else None)
        return count

    def remember(self, counts: Mapping[bytes, int]) -> None:
        self._young.update(counts)
        if len(self._young) > self._half:
            # Keys used since the last time stay: both generations together hold about the limit.
            if self._old:
                self._complete = False
            self._old, self._young = self._young, {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)


async def count_records(database: Database, counts: Counts, segment_id: int, keys: Sequence[bytes]) -> dict[bytes, int]:
    """Return the number of records of each key in the segment, from memory or by one seek."""
    found: dict[bytes, int] = {}
    unknown: list[bytes] = []
    for key in keys:
        count = counts.get(key)
        if count is None:
            unknown.append(key)
        else:
            found[key] = count
    for start in range(0, len(unknown), SEEKS_AT_ONCE):
        some = unknown[start : start + SEEKS_AT_ONCE]
        totals = await asyncio.gather(*(_last_total(database, segment_id, key) for key in some))
        found.update(zip(some, totals, strict=True))
    return found


async def _last_total(database: Database, segment_id: int, key: bytes) -> int:
    rows = await database.rows_with_prefix(entry_prefix(segment_id, key), durable=False, last_first=True)
    row = await rows.first()
    return 0 if row is None else decode_head(row.value).total
