"""Blob reads: what the reads of one process want of the blob store, in few requests.

A flush puts the records of many partitions into one blob, and their readers come for them at about the same time, often
within one request of a consumer. So a range that a read wants waits for the reads that were looking up their own ranges
at that moment, for `LOOKUP_WAIT_S` at most; then one GET fetches what all of them want of a blob, as far as the ranges
are near each other. A range that is being fetched, or is part of one, is not fetched again. Nothing is kept: a read
that comes after the answer makes a request of its own.

Sharing an answer that was requested earlier is safe. The bytes of a blob never change, and only what was put before it
was named is asked for: a blob that was not found then was deleted, and is not found later either.

Reads have a gate of their own, which is narrower than the blob store's: however many catch up, the store has requests
left for those who append, and the memory for bytes under way is bounded.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Sequence
from types import TracebackType
from typing import Final

from llog.base.concurrency import ByteGate
from llog.errors import LlogError
from llog.stores.blob_ranges import coalesce, get_each, part_of
from llog.stores.blobs import BlobStore, Buffer

GETS_MAX: Final = 24
"""GETs under way at the same time: fewer than a blob store allows besides its puts."""
BYTES_MAX: Final = 64 << 20
"""Bytes of the GETs under way."""
LOOKUP_WAIT_S: Final = 0.01
"""How long a range waits for the lookups of other reads: less than a GET of an object store takes."""


class BlobReads:
    """All reads of one blob store in one process, on one event loop."""

    def __init__(
        self,
        blobs: BlobStore,
        *,
        gets_max: int = GETS_MAX,
        bytes_max: int = BYTES_MAX,
        lookup_wait_s: float = LOOKUP_WAIT_S,
    ) -> None:
        self.blobs = blobs
        self._gate = ByteGate(gets_max, bytes_max)
        self._lookup_wait_s = lookup_wait_s
        self._lookups: set[BlobRead] = set()
        """The reads that are looking up now."""
        self._ranges: dict[str, list[_Range]] = {}
        """What is wanted of each blob and has not arrived, by the start of the range."""
        self._round: list[_Range] = []
        """Ranges that no GET fetches yet."""
        self._awaited: set[BlobRead] = set()
        """The lookups that the round still waits for."""
        self._end_of_round: asyncio.Handle | None = None
        self._gets: set[asyncio.Task[None]] = set()

    def begin(self) -> BlobRead:
        """Begin a read, as a context: it looks up its ranges whenever it does not wait for some."""
        return BlobRead(self)

    async def get_ranges(self, blob: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer | LlogError]:
        """Return for each (offset, length) its bytes, or the error that kept them away.

        A caller that is cancelled does not disturb those with whom it shares a GET.
        """
        wanted = [self._find_or_add(blob, offset, offset + length) for offset, length in ranges]
        for each in wanted:
            each.waiting += 1
        try:
            open_ranges = {each.found for each in wanted if not each.found.done()}
            if open_ranges:
                await asyncio.wait(open_ranges)
        finally:
            for each in wanted:
                each.waiting -= 1
                if not each.waiting and not each.found.done():
                    self._abandon(each)
        return [each.part(offset, length) for each, (offset, length) in zip(wanted, ranges, strict=True)]

    def begin_lookup(self, read: BlobRead) -> None:
        self._lookups.add(read)

    def end_lookup(self, read: BlobRead) -> None:
        self._lookups.discard(read)
        if read in self._awaited:
            self._awaited.discard(read)
            if not self._awaited and self._end_of_round is not None:
                self._end_of_round.cancel()
                # Not at once: the read that ends its lookup is about to say what it wants.
                self._end_of_round = asyncio.get_running_loop().call_soon(self._fetch_round)

    def _find_or_add(self, blob: str, start: int, end: int) -> _Range:
        known = self._ranges.setdefault(blob, [])
        at = bisect_right(known, start, key=lambda each: each.start)
        if at and known[at - 1].end >= end:
            return known[at - 1]
        loop = asyncio.get_running_loop()
        added = _Range(blob, start, end, loop.create_future())
        known.insert(at, added)
        if not self._round:
            self._end_of_round = loop.call_soon(self._await_lookups)
        self._round.append(added)
        return added

    def _await_lookups(self) -> None:
        """Fetch the round when the lookups of this moment have ended. Ranges that come meanwhile belong to it, too."""
        self._awaited = set(self._lookups)
        if self._awaited:
            loop = asyncio.get_running_loop()
            self._end_of_round = loop.call_later(self._lookup_wait_s, self._fetch_round)
        else:
            self._fetch_round()

    def _fetch_round(self) -> None:
        fetched, self._round, self._end_of_round = self._round, [], None
        self._awaited.clear()
        blobs: dict[str, list[_Range]] = {}
        for each in fetched:
            blobs.setdefault(each.blob, []).append(each)
        for blob, ranges in blobs.items():
            for neighbours in _neighbours(ranges):
                get = asyncio.get_running_loop().create_task(self._get(blob, neighbours))
                self._gets.add(get)
                get.add_done_callback(self._gets.discard)
                for each in neighbours:
                    each.neighbours, each.get = neighbours, get

    async def _get(self, blob: str, ranges: Sequence[_Range]) -> None:
        """Fetch neighbouring ranges and hand every one to those who wait for it."""
        size = max(each.end for each in ranges) - min(each.start for each in ranges)
        found: Sequence[Buffer | Exception] = ()
        try:
            async with self._gate.enter(size):
                found = await get_each(self.blobs, blob, [(each.start, each.end - each.start) for each in ranges])
        except Exception as error:
            found = [error] * len(ranges)
        finally:
            for each, data in zip(ranges, found, strict=False):
                each.found.set_result(data)
            for each in ranges:
                self._forget(each)
                each.found.cancel()  # without effect, unless the GET was cancelled

    def _abandon(self, unwanted: _Range) -> None:
        """Give up a range that nobody waits for any more, unless its GET fetches others that are wanted."""
        if unwanted.get is None:
            self._round.remove(unwanted)
            self._forget(unwanted)
            if not self._round and self._end_of_round is not None:
                self._end_of_round.cancel()
                self._end_of_round = None
                self._awaited.clear()
        elif not any(each.waiting for each in unwanted.neighbours):
            for each in unwanted.neighbours:
                self._forget(each)
            unwanted.get.cancel()

    def _forget(self, gone: _Range) -> None:
        """Make later reads fetch the range again."""
        known = self._ranges.get(gone.blob, [])
        if gone in known:
            known.remove(gone)
            if not known:
                del self._ranges[gone.blob]


class BlobRead:
    """One read: a context that lasts from its first look at the metadata to its last bytes."""

    def __init__(self, reads: BlobReads) -> None:
        self._reads = reads
        self._requests = 0
        self._has_ended = False

    def __enter__(self) -> BlobRead:
        self._reads.begin_lookup(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._has_ended = True
        self._reads.end_lookup(self)

    async def get_ranges(self, blob: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer | LlogError]:
        """Return what `BlobReads.get_ranges` returns. The lookup ends here, and the next one begins after it."""
        self._requests += 1
        self._reads.end_lookup(self)
        try:
            return await self._reads.get_ranges(blob, ranges)
        finally:
            self._requests -= 1
            if not self._requests and not self._has_ended:
                self._reads.begin_lookup(self)


class _Range:
    """A range of a blob that has not arrived, and those who wait for it."""

    def __init__(self, blob: str, start: int, end: int, found: asyncio.Future[Buffer | Exception]) -> None:
        self.blob = blob
        self.start = start
        self.end = end
        self.found = found
        """Its bytes, or what went wrong: not the future's own exception, which somebody would have to retrieve."""
        self.waiting = 0
        """The number of callers that wait for it."""
        self.neighbours: Sequence[_Range] = ()
        self.get: asyncio.Task[None] | None = None
        """The GET that fetches this range and its neighbours, from the end of its round on."""

    def part(self, offset: int, length: int) -> Buffer | LlogError:
        found = self.found.result()
        if isinstance(found, LlogError):
            return found
        if isinstance(found, Exception):
            raise found
        return part_of(found, offset - self.start, length)


def _neighbours(ranges: Sequence[_Range]) -> list[list[_Range]]:
    """Return the ranges of a blob in groups that one GET fetches."""
    bounds = [(each.start, each.end - each.start) for each in ranges]
    groups = [[ranges[index] for index in joined.members] for joined in coalesce(bounds)]
    return groups + [[each] for each in ranges if each.start == each.end]
