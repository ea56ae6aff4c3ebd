"""Lists the keys of a log: the listing entries of its segments, merged."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import AsyncIterator, Sequence

from llog.keyed.encoding import listed_key
from llog.keyed.slate import PAGE_ROWS_MAX, Rows


class Listing:
    """The keys of one segment, a page at a time."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._ended = False
        self.keys: list[bytes] = []

    async def fill(self) -> bool:
        """Read the next page if no keys are left, and return whether there are any."""
        while not self.keys and not self._ended:
            page = await self._rows.page(PAGE_ROWS_MAX)
            self._ended = len(page) < PAGE_ROWS_MAX
            self.keys = [listed_key(row.key) for row in page]
        return bool(self.keys)


async def merge_listings(listings: Sequence[Listing]) -> AsyncIterator[list[bytes]]:
    """Yield the distinct keys of all listings in order; each round takes the keys up to the lowest last key of a
    page.
    """
    open_listings = [listing for listing in listings if await listing.fill()]
    while open_listings:
        last = min(listing.keys[-1] for listing in open_listings)
        keys: set[bytes] = set()
        for listing in open_listings:
            taken = len(listing.keys) if listing.keys[-1] == last else bisect_right(listing.keys, last)
            keys.update(listing.keys[:taken])
            listing.keys = listing.keys[taken:]
        yield sorted(keys)
        open_listings = [listing for listing in open_listings if await listing.fill()]
