"""How many records each key has in the active segment, as far as the writer remembers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final

from llog.keyed.encoding import entry_prefix
from llog.keyed.runs import peek
from llog.keyed.slate import Database

SEEKS_AT_ONCE: Final = 64


class Counts:
    """A bounded memory of counts by key. Two generations: when the young one is full, the old one is forgotten.

    As long as nothing of a segment was forgotten and the segment began empty, a key that is not in here has no records:
    no seek.
    """

    def __init__(self, keys_max: int) -> None:
        self._half = max(1, keys_max // 2)
        self._young: dict[bytes, int] = {}
        self._old: dict[bytes, int] = {}
        self._complete = False

    def begin(self, *, empty: bool) -> None:
        """Another segment is active; `empty`: it holds nothing yet."""
        self._young, self._old, self._complete = {}, {}, empty

    def get(self, key: bytes) -> int | None:
        """None: only the database knows."""
        count = self._young.get(key)
        if count is None:
            count = self._old.get(key, 0 if self._complete else None)
        return count

    def remember(self, counts: Mapping[bytes, int]) -> None:
        self._young.update(counts)
        if len(self._young) > self._half:
            # Everything is kept that was used since the last time: the two generations together hold about the limit.
            if self._old:
                self._complete = False
            self._old, self._young = self._young, {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)


async def counted_before(
    database: Database, counts: Counts, segment_id: int, keys: Sequence[bytes]
) -> dict[bytes, int]:
    """Records of each key in the segment: remembered, or one seek."""
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
    rows = await database.rows_of(entry_prefix(segment_id, key), durable=False, last_first=True)
    row = await rows.first()
    return 0 if row is None else peek(row.value).total
