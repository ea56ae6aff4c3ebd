"""The fetcher: the records of many partitions from given offsets on, with a wait for more at their ends.

The bounds of a partition come from the broker's views (`engines/object/views.py`), which decide whether they are good
enough for the answer; those of an engine with an owner are looked up for every request, and again after every wait.
Record bytes come from the tail, or else from the log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any, Final

from llog.batch.columns import Columns, byte_size, count_fitting, slice_columns
from llog.broker.arrivals import Arrival, Arrivals
from llog.broker.cache.tail import Tail
from llog.broker.metrics import Metrics
from llog.engines.object.views import Read, View, Views
from llog.engines.routing import EngineReader
from llog.errors import LlogError, OffsetOutOfRange, PartitionNotInitialized, TopicNotFound
from llog.log.catalog import Catalog
from llog.log.engine import Batch, Bounds
from llog.log.records import Topic
from llog.model import TimestampType, TopicPartition

_CONCURRENCY: Final = 8
_SHARES: Final = 8
"""Reads ask for this part of the room in the answer, where records count for more than they take in the log."""
_PAGES: Final = 4
"""Reads ask for as many bytes as this many answers have room for, and the tail keeps the rest for the next requests."""
_READ_BYTES: Final = 4 << 20
"""The most that reads ask for ahead of the answer: one GET where the log is compacted."""


class Fetch:
    """What a request wants of one partition, from `position` on and below `stop`, and what was found of it so far."""

    __slots__ = (
        "batches",
        "count",
        "error",
        "log_start_offset",
        "max_bytes",
        "next_offset",
        "position",
        "record_overhead",
        "records_max",
        "size",
        "stop",
        "topic",
        "tp",
        "view",
    )

    def __init__(
        self,
        tp: TopicPartition,
        position: int,
        max_bytes: int,
        *,
        record_overhead: int,
        stop: int | None = None,
        records_max: int | None = None,
    ) -> None:
        self.tp = tp
        self.position = position
        self.max_bytes = max_bytes
        self.record_overhead = record_overhead
        """Bytes that a record counts for besides its own."""
        self.stop = stop
        self.records_max = records_max
        self.topic: Topic | None = None
        self.view: View | None = None
        """The broker's view of a partition whose engine has no owner."""
        self.log_start_offset: int | None = None
        self.next_offset: int | None = None
        self.batches: list[Batch] = []
        self.count = 0
        self.size = 0
        """The records in `batches`, and their bytes."""
        self.error: LlogError | None = None

    @property
    def room(self) -> int:
        if self.stop is not None and self.position >= self.stop:
            return 0
        if self.records_max is not None and self.count >= self.records_max:
            return 0
        return max(0, self.max_bytes - self.size)

    @property
    def directory(self) -> str:
        return "" if self.topic is None else self.topic.directory

    @property
    def is_empty(self) -> bool:
        """Whether the answer says, as it is now, that there is no record at the position."""
        return self.error is None and not self.batches and self.room > 0

    @property
    def end(self) -> int:
        """The offset to stop at for now."""
        assert self.next_offset is not None
        return self.next_offset if self.stop is None else min(self.stop, self.next_offset)

    @property
    def has_more(self) -> bool:
        return self.error is None and self.next_offset is not None and self.position < self.end

    def see(self, topic: Topic, bounds: Bounds) -> None:
        """Take the bounds of the partition as they are now; fail if the position is outside."""
        if self.topic is not None and self.topic.directory != topic.directory:
            self.max_bytes = 0  # the topic was created again: the records of the old one are the answer
            return
        self.topic = topic
        self.log_start_offset, self.next_offset = bounds
        if not bounds.log_start_offset <= self.position <= bounds.next_offset:
            self.fail(OffsetOutOfRange(str(self.tp), self.position, *bounds))

    def fail(self, error: LlogError) -> None:
        """Fail, unless records were read before: those are the answer, and the next request meets the error again."""
        if not self.batches:
            self.error = error
        self.max_bytes = 0

    def take(self, start: int, columns: Columns, share: int) -> tuple[int, bool]:
        """Take as many of these records as fit into `share` bytes; return their bytes, and whether all of them fit."""
        self.position = max(self.position, min(start, self.end))  # key compaction removed the records between
        first, stop = self.position - start, min(self.end - start, columns.count)
        if self.records_max is not None:
            stop = min(stop, first + self.records_max - self.count)
        if first >= stop:
            return 0, True
        wanted = slice_columns(columns, first, stop)
        count, size = count_fitting(wanted, share, record_overhead=self.record_overhead)
        if count == 0:
            if self.batches:
                return 0, False
            count = 1  # too large for any share: it goes alone, or the partition could never be read on
        self.batches.append(Batch(self.tp, self.position, slice_columns(wanted, 0, count)))
        self.position += count
        self.count += count
        self.size += size
        return size, count == wanted.count and self.room > 0


class Fetcher:
    """Fetches from the tail and the log. `stopping` ends every wait: the records found by then are the answer."""

    def __init__(
        self,
        reader: EngineReader,
        catalog: Catalog,
        views: Views,
        tail: Tail,
        metrics: Metrics,
        arrivals: Arrivals,
        stopping: asyncio.Event,
    ) -> None:
        self._reader = reader
        self._arrivals = arrivals
        self._catalog = catalog
        self._views = views
        self._tail = tail
        self._metrics = metrics
        self._stopping = stopping
        self._gate = asyncio.Semaphore(_CONCURRENCY)

    async def fetch(self, fetches: Sequence[Fetch], *, max_bytes: int, min_bytes: int, max_wait_ms: int) -> None:
        """Fill the fetches. Earlier ones go first where `max_bytes` is not enough for all."""
        for each in fetches:
            each.max_bytes = min(each.max_bytes, max_bytes)
        arrived = self._views.now()
        deadline = arrived + max_wait_ms / 1000
        arrival: Arrival | None = None
        while True:
            left = deadline - self._views.now()
            may_wait = left > 0 and not self._stopping.is_set()
            await self._look(fetches, arrived, arrival, may_wait=may_wait)
            await self._fill(fetches, max_bytes)
            if not may_wait:
                break
            size = sum(each.size for each in fetches)
            growing = [each for each in fetches if each.room]
            if size >= min_bytes or not growing or any(each.error or each.has_more for each in fetches):
                empty = [each for each in fetches if each.is_empty and not each.has_more]
                if empty:
                    await self._look(empty, arrived, None, may_wait=False)
                    await self._fill(fetches, max_bytes)
                break
            arrival = await self._arrivals.first([(each.tp, each.position) for each in growing], left)
        for each in fetches:
            if each.count:
                size = each.size - each.record_overhead * each.count
                self._metrics.count_consumed(each.tp.topic, None, each.count, size)

    async def _look(self, fetches: Sequence[Fetch], arrived: float, arrival: Arrival | None, *, may_wait: bool) -> None:
        """Find the bounds of all partitions, as they must be known to answer a request that arrived then.

        At the end of a partition, a fetch that has records, or that will wait, needs to know no more.
        """
        looking = [each for each in fetches if each.room or each.topic is None]
        reads = [Read(each.tp, each.position, may_wait or not each.is_empty) for each in looking]
        found = await self._views.look(reads, arrived)
        owned: list[Coroutine[Any, Any, None]] = []
        for each in looking:
            view = found[each.tp]
            if isinstance(view, LlogError):
                each.fail(view)
            elif view.bounds is not None:
                each.view = view
                each.see(view.topic, view.bounds)
            else:
                owned.append(self._look_at_owner(each, view.topic, arrival))
        if owned:
            await asyncio.gather(*owned)

    async def _look_at_owner(self, fetch: Fetch, topic: Topic, arrival: Arrival | None) -> None:
        """Look up the bounds of the partition as they are now, or were at the arrival that ended a wait."""
        try:
            if arrival is not None and arrival[0] == fetch.tp:
                directory, bounds = arrival[1]
            else:
                async with self._gate:
                    directory, bounds = await self._reader.view(fetch.tp)
            if topic.directory != directory:
                topic = await self._catalog.get(fetch.tp.topic)
        except LlogError as error:
            fetch.fail(error)
            return
        if topic.directory == directory:
            fetch.see(topic, bounds)
        else:
            fetch.max_bytes = 0

    async def _fill(self, fetches: Sequence[Fetch], max_bytes: int) -> None:
        """Read what is there, several partitions at a time, each within a share of what is left of `max_bytes`.

        Shares are what partitions may have, and most have less. So those for which no share is left are read at the
        same time, into the tail: partitions share blobs, and one GET is for all of them.
        """
        waiting = [each for each in fetches if each.room and each.has_more]
        left = max_bytes - sum(each.size for each in fetches)
        while waiting and left > 0:
            reads: list[Coroutine[Any, Any, None]] = []
            while waiting and left > 0 and len(reads) < _CONCURRENCY:
                fetch = waiting.pop(0)
                share = min(fetch.room, left)
                left -= share
                reads.append(self._read(fetch, share))
            if self._tail.is_on:
                reads += [self._read_ahead(each) for each in waiting[: _CONCURRENCY - len(reads)]]
            await asyncio.gather(*reads)  # tasks, also for one: a stream from the tail yields to the event loop
            left = max_bytes - sum(each.size for each in fetches)

    async def _read(self, fetch: Fetch, share: int) -> None:
        try:
            async with self._gate:
                while share > 0 and fetch.has_more:
                    found = await self._read_batches(fetch, max(share // _SHARES, 1))
                    if found is None:
                        fetch.max_bytes = 0
                        return
                    if not found:
                        fetch.position = fetch.end  # key compaction removed everything up to there
                    for start, columns in found:
                        size, whole = fetch.take(start, columns, share)
                        share -= size
                        if not whole:
                            return
        except LlogError as error:
            fetch.fail(error)

    async def _read_ahead(self, fetch: Fetch) -> None:
        """Read into the tail what the fetch is about to want. An error is left to the fetch, which meets it again."""
        if fetch.view is None or self._tail.get((fetch.directory, fetch.tp.partition), fetch.position) is not None:
            return
        with suppress(LlogError):
            async with self._gate:
                await self._read_batches(fetch, 1)

    async def _read_batches(self, fetch: Fetch, max_bytes: int) -> list[tuple[int, Columns]] | None:
        """Return batches from the fetch's position on, each with its start offset.

        None if the topic was created again.
        """
        topic = fetch.topic
        assert topic is not None
        if fetch.view is None:
            # The files of an owner are on this machine, and key compaction changes them: they are not kept.
            batches = await self._reader.read(fetch.tp, fetch.position, max_bytes, stop=fetch.end)
            if await self._catalog.directory(fetch.tp) != fetch.directory:
                return None  # the reader looks topics up by name, and may have read the new one
            return [(batch.start_offset, batch.columns) for batch in batches]
        key = fetch.directory, fetch.tp.partition
        kept = await self._tail.find(key, fetch.position)
        if kept is not None:
            start, columns = kept
            if topic.timestamp_type is TimestampType.APPEND:
                columns = columns._replace(timestamps=None)
            return [(start, columns)]
        if self._tail.is_on:
            max_bytes = max(max_bytes, min(fetch.max_bytes * _PAGES, _READ_BYTES))
        stop = self._tail.next_start(key, fetch.position, fetch.end)
        try:
            batches = await self._views.read(fetch.tp, fetch.view, fetch.position, max_bytes, stop=stop)
        except TopicNotFound:
            raise
        except PartitionNotInitialized:
            return None
        found = [(batch.start_offset, batch.columns) for batch in batches]
        self._metrics.count_fetched(fetch.tp.topic, None, sum(byte_size(columns) for _, columns in found))
        assert fetch.next_offset is not None
        self._tail.keep_read(key, found, fetch.next_offset)
        return found
