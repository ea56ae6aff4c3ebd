"""What there is of many partitions from given offsets on, with a wait for more at their ends.

Bounds are looked up for every request, and again after every wait; record bytes come from the tail or else from the
log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, Final

import numpy as np

from llog.batch.columns import Columns, byte_size, record_sizes, slice_columns
from llog.broker.arrivals import Arrival, Arrivals
from llog.broker.cache.tail import Tail
from llog.broker.metrics import Metrics
from llog.engines.port import Batch
from llog.engines.routing import EngineReader
from llog.errors import LlogError, OffsetOutOfRange
from llog.log.catalog import Catalog
from llog.log.records import Topic
from llog.model import TimestampType, TopicPartition

_CONCURRENCY: Final = 8
_SHARES: Final = 8
"""Reads ask for this part of what there is room for: records count for more in an answer than they take in the log."""
_TOPICS_MAX: Final = 10_000


class Fetch:
    """One partition's way through a request: asked for from `position` on, below `stop`; then what was found."""

    def __init__(
        self, tp: TopicPartition, position: int, max_bytes: int, *, record_overhead: int, stop: int | None = None
    ) -> None:
        self.tp = tp
        self.position = position
        self.max_bytes = max_bytes
        self.record_overhead = record_overhead
        """What a record counts for besides its bytes."""
        self.stop = stop
        self.directory = ""
        self.log_start_offset: int | None = None
        self.next_offset: int | None = None
        self.batches: list[Batch] = []
        self.size = 0
        self.error: LlogError | None = None

    @property
    def room(self) -> int:
        if self.stop is not None and self.position >= self.stop:
            return 0
        return max(0, self.max_bytes - self.size)

    @property
    def end(self) -> int:
        """Where to stop for now."""
        assert self.next_offset is not None
        return self.next_offset if self.stop is None else min(self.stop, self.next_offset)

    @property
    def has_more(self) -> bool:
        return self.error is None and self.next_offset is not None and self.position < self.end

    @property
    def count(self) -> int:
        return sum(batch.columns.count for batch in self.batches)

    def fail(self, error: LlogError) -> None:
        """Records that were read before it are handed out first: the next request meets the error again."""
        if not self.batches:
            self.error = error
        self.max_bytes = 0

    def take(self, start: int, columns: Columns, share: int) -> tuple[int, bool]:
        """Takes as many of these records as fit into `share`: what they count for, and whether all of them did."""
        self.position = max(self.position, min(start, self.end))  # records between were removed
        first, stop = self.position - start, min(self.end - start, columns.count)
        if first >= stop:
            return 0, True
        wanted = slice_columns(columns, first, stop)
        count, size = _fitting(wanted, share, self.record_overhead)
        if count == 0:
            if self.batches:
                return 0, False
            count = 1  # too large for any share: alone, or its partition could never be read on
        self.batches.append(Batch(self.tp, self.position, slice_columns(wanted, 0, count)))
        self.position += count
        self.size += size
        return size, count == wanted.count


class FetchService:
    """`stopping` ends every wait: what there is by then is the answer."""

    def __init__(
        self,
        reader: EngineReader,
        catalog: Catalog,
        tail: Tail,
        metrics: Metrics,
        arrivals: Arrivals,
        stopping: asyncio.Event,
    ) -> None:
        self._reader = reader
        self._arrivals = arrivals
        self._catalog = catalog
        self._tail = tail
        self._metrics = metrics
        self._stopping = stopping
        self._topics: dict[str, Topic] = {}
        """By directory: what is used of them never changes there."""
        self._gate = asyncio.Semaphore(_CONCURRENCY)

    async def fetch(self, fetches: Sequence[Fetch], *, max_bytes: int, min_bytes: int, max_wait_ms: int) -> None:
        """Fills them in. Earlier ones go first where `max_bytes` is not enough for all."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + max_wait_ms / 1000
        arrival: Arrival | None = None
        while True:
            await asyncio.gather(*(self._look(each, arrival) for each in fetches))
            await self._fill(fetches, max_bytes)
            size, left = sum(each.size for each in fetches), deadline - loop.time()
            enough = size >= min_bytes or any(each.error or each.has_more for each in fetches)
            growing = [each for each in fetches if each.room]
            if enough or left <= 0 or not growing or self._stopping.is_set():
                break
            arrival = await self._arrivals.first([(each.tp, each.position) for each in growing], left)
        for each in fetches:
            self._metrics.consumed_records += each.count
            self._metrics.consumed_bytes += each.size - each.record_overhead * each.count

    async def _look(self, fetch: Fetch, arrival: Arrival | None) -> None:
        """Learns the bounds of the partition as they are now, or were at the arrival that ended a wait."""
        try:
            if arrival is not None and arrival[0] == fetch.tp:
                directory, bounds = arrival[1]
            else:
                async with self._gate:
                    directory, bounds = await self._reader.look(fetch.tp)
        except LlogError as error:
            fetch.fail(error)
            return
        if fetch.directory not in ("", directory):
            fetch.max_bytes = 0  # deleted and created again meanwhile: what was read of the old one is the answer
            return
        fetch.directory = directory
        fetch.log_start_offset, fetch.next_offset = bounds
        if not bounds.log_start_offset <= fetch.position <= bounds.next_offset:
            fetch.fail(OffsetOutOfRange(str(fetch.tp), fetch.position, *bounds))

    async def _fill(self, fetches: Sequence[Fetch], max_bytes: int) -> None:
        """Reads what there is, several partitions at a time, each within a share of what is left of `max_bytes`."""
        waiting = [each for each in fetches if each.room and each.has_more]
        left = max_bytes - sum(each.size for each in fetches)
        while waiting and left > 0:
            reads: list[Coroutine[Any, Any, None]] = []
            while waiting and left > 0 and len(reads) < _CONCURRENCY:
                fetch = waiting.pop(0)
                share = min(fetch.room, left)
                left -= share
                reads.append(self._read(fetch, share))
            await asyncio.gather(*reads)
            left = max_bytes - sum(each.size for each in fetches)

    async def _read(self, fetch: Fetch, share: int) -> None:
        try:
            async with self._gate:
                while share > 0 and fetch.has_more:
                    found = await self._found(fetch, max(share // _SHARES, 1))
                    if found is None:
                        fetch.max_bytes = 0
                        return
                    if not found:
                        fetch.position = fetch.end  # all there was up to there was removed
                    for start, columns in found:
                        size, whole = fetch.take(start, columns, share)
                        share -= size
                        if not whole:
                            return
        except LlogError as error:
            fetch.fail(error)

    async def _found(self, fetch: Fetch, max_bytes: int) -> list[tuple[int, Columns]] | None:
        """Batches from the fetch's position on, with the offset that each begins at; None if the topic is another one
        by now.
        """
        topic = await self._topic(fetch)
        if topic is None:
            return None
        place = fetch.directory, fetch.tp.partition
        # Files of this machine are at hand, and lose records by key compaction.
        is_kept = not self._catalog.engine(topic).has_owner
        kept = await self._tail.find(place, fetch.position) if is_kept else None
        if kept is not None:
            start, columns = kept
            if topic.timestamp_type is TimestampType.APPEND:
                columns = columns._replace(timestamps=None)
            return [(start, columns)]
        stop = self._tail.next_start(place, fetch.position, fetch.end)
        batches = await self._reader.read(fetch.tp, fetch.position, max_bytes, stop=stop)
        if await self._catalog.directory(fetch.tp) != fetch.directory:
            return None  # the reader looks topics up by name, and this may be of the new one
        found = [(batch.start_offset, batch.columns) for batch in batches]
        if is_kept:
            assert fetch.next_offset is not None
            self._tail.keep_read(place, found, fetch.next_offset)
        return found

    async def _topic(self, fetch: Fetch) -> Topic | None:
        """The topic of the fetch's directory; None if the name stands for another one by now."""
        topic = self._topics.get(fetch.directory)
        if topic is None:
            topic = await self._catalog.get(fetch.tp.topic)
            if topic.directory != fetch.directory:
                return None
            if len(self._topics) >= _TOPICS_MAX:
                self._topics.clear()
            self._topics[fetch.directory] = topic
        return topic


def _fitting(columns: Columns, share: int, overhead: int) -> tuple[int, int]:
    """How many of the first records fit, and what those (or the first one, if none does) count for."""
    whole = byte_size(columns) + overhead * columns.count
    if whole <= share:
        return columns.count, whole
    first = slice_columns(columns, 0, min(columns.count, share // overhead + 1))
    through = (record_sizes(first) + overhead).cumsum()
    count = int(np.searchsorted(through, share, side="right"))
    return count, int(through[max(count, 1) - 1])
