"""`POST /consume`: records of many partitions, with a wait for more at their ends."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Coroutine, Sequence
from typing import Any, Final

import numpy as np
import pyarrow.compute as pc

from llog.batch.columns import Columns, decode_headers, effective_timestamps, slice_columns
from llog.broker.messages import ConsumeItem, ConsumeRequest, data_out
from llog.broker.metrics import Metrics
from llog.broker.problems import error_of
from llog.errors import LlogError, OffsetOutOfRange
from llog.model import TopicPartition
from llog.partition.log import Log
from llog.partition.reader import Reader
from llog.ports import Batch

RECORD_OVERHEAD: Final = 80
"""What a record counts for besides its bytes: about what its field names take in the answer."""
KEPT_BYTES_MAX: Final = 64 << 20
_CONCURRENCY: Final = 8
_PAUSE_S: Final = 0.1


class Pages:
    """The batch last read of each partition, so that a client that pages through a large blob does not fetch it for every page.

    Records never change at their offset within one directory, so an old batch is as good as a new one; whether its offsets may
    still be read is for the control record to say.
    """

    def __init__(self, max_bytes: int = KEPT_BYTES_MAX) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[tuple[str, int], tuple[Batch, int]] = OrderedDict()
        self._bytes = 0

    def get(self, place: tuple[str, int], offset: int) -> Batch | None:
        batch, _ = self._kept.get(place, (None, 0))
        if batch is None or not batch.start_offset <= offset <= batch.end_offset:
            return None
        self._kept.move_to_end(place)
        return batch

    def keep(self, place: tuple[str, int], batch: Batch) -> None:
        columns = batch.columns
        arrays = (columns.values, columns.keys, columns.timestamps, columns.headers)
        size = sum(array.get_total_buffer_size() for array in arrays if array is not None)
        _, old = self._kept.pop(place, (None, 0))
        self._bytes -= old
        if size <= self._max_bytes:
            self._kept[place] = batch, size
            self._bytes += size
        while self._bytes > self._max_bytes:
            _, (_, gone) = self._kept.popitem(last=False)
            self._bytes -= gone


class _Fetch:
    """One partition's way through a request."""

    def __init__(self, item: ConsumeItem) -> None:
        self.tp = TopicPartition(item.topic, item.partition)
        self.max_bytes = item.partition_max_bytes
        self.position = item.fetch_offset
        self.directory = ""
        self.log_start_offset: int | None = None
        self.next_offset: int | None = None
        self.records: list[dict[str, Any]] = []
        self.size = 0
        self.error: LlogError | None = None

    @property
    def room(self) -> int:
        return max(0, self.max_bytes - self.size)

    @property
    def has_more(self) -> bool:
        return self.error is None and self.next_offset is not None and self.position < self.next_offset

    def fail(self, error: LlogError) -> None:
        """Records that were read before it are handed out first: the next request meets the error again."""
        if not self.records:
            self.error = error
        self.max_bytes = 0

    def answer(self) -> dict[str, Any]:
        answer: dict[str, Any] = {"topic": self.tp.topic, "partition": self.tp.partition}
        if self.error is not None:
            answer["error"] = error_of(self.error)
        if self.next_offset is not None:
            answer |= {"high_watermark": self.next_offset - 1, "log_start_offset": self.log_start_offset}
        return answer | {"next_fetch_offset": self.position, "records": self.records}


class FetchService:
    """`stopping` ends every wait: what there is by then is the answer."""

    def __init__(self, log: Log, metrics: Metrics, stopping: asyncio.Event) -> None:
        self._reader = Reader(log)
        self._metrics = metrics
        self._stopping = stopping
        self._pages = Pages()
        self._gate = asyncio.Semaphore(_CONCURRENCY)

    async def fetch(self, request: ConsumeRequest) -> list[dict[str, Any]]:
        """One answer per item, in their order. Earlier items go first where `max_bytes` is not enough for all."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + request.max_wait_ms / 1000
        fetches = [_Fetch(item) for item in request.topic_partitions]
        while True:
            await asyncio.gather(*map(self._look, fetches))
            await self._fill(fetches, request.max_bytes)
            size, left = sum(each.size for each in fetches), deadline - loop.time()
            enough = size >= request.min_bytes or any(each.error or each.has_more for each in fetches)
            growing = [each for each in fetches if each.room]
            if enough or left <= 0 or not growing or self._stopping.is_set():
                break
            await self._any_more(growing, left)
        count = sum(len(each.records) for each in fetches)
        self._metrics.consumed_records += count
        self._metrics.consumed_bytes += size - RECORD_OVERHEAD * count
        for each in fetches:
            if each.error is not None:
                self._metrics.errors[each.error.code] += 1
        return [each.answer() for each in fetches]

    async def _look(self, fetch: _Fetch) -> None:
        """Learns the bounds of the partition as they are now."""
        try:
            async with self._gate:
                keys, control = await self._reader.control(fetch.tp)
        except LlogError as error:
            fetch.fail(error)
            return
        if fetch.directory not in ("", keys.directory):
            fetch.max_bytes = 0  # deleted and created again meanwhile: what was read of the old one is the answer
            return
        fetch.directory = keys.directory
        fetch.log_start_offset, fetch.next_offset = control.log_start_offset, control.sequence_counter
        if not control.log_start_offset <= fetch.position <= control.sequence_counter:
            bounds = control.log_start_offset, control.sequence_counter
            fetch.fail(OffsetOutOfRange(str(fetch.tp), fetch.position, *bounds))

    async def _fill(self, fetches: Sequence[_Fetch], max_bytes: int) -> None:
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

    async def _read(self, fetch: _Fetch, share: int) -> None:
        try:
            async with self._gate:
                while share > 0 and fetch.has_more:
                    batch = await self._batch(fetch)
                    columns = slice_columns(batch.columns, fetch.position - batch.start_offset, batch.columns.count)
                    count, size = _fitting(columns, share)
                    if count == 0:
                        if fetch.records:
                            return
                        count = 1  # too large for any share: alone, or its partition could never be read on
                    fetch.records += _records(slice_columns(columns, 0, count), fetch.position)
                    fetch.position += count
                    fetch.size += size
                    share -= size
        except LlogError as error:
            fetch.fail(error)

    async def _batch(self, fetch: _Fetch) -> Batch:
        place = fetch.directory, fetch.tp.partition
        batch = self._pages.get(place, fetch.position)
        if batch is None:
            batch = (await self._reader.read(fetch.tp, fetch.position, 1))[0]
            self._pages.keep(place, batch)
        return batch

    async def _any_more(self, fetches: Sequence[_Fetch], timeout: float) -> None:
        """Returns when one of the partitions has grown, something failed, the broker stops, or the time is up."""
        waits: list[asyncio.Task[bool]] = [
            asyncio.ensure_future(self._reader.wait(each.tp, each.position, timeout)) for each in fetches
        ]
        stop = asyncio.ensure_future(self._stopping.wait())
        everything: list[asyncio.Task[bool]] = [*waits, stop]
        try:
            done, _ = await asyncio.wait(everything, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in everything:
                task.cancel()
            results = await asyncio.gather(*everything, return_exceptions=True)
        if done and True not in results:
            await asyncio.sleep(min(_PAUSE_S, timeout))  # a watch that ended early must not become a busy loop


def _fitting(columns: Columns, share: int) -> tuple[int, int]:
    """How many of the first records fit, and what those (or the first one, if none does) count for."""
    first = slice_columns(columns, 0, min(columns.count, share // RECORD_OVERHEAD + 1))
    sizes = np.full(first.count, RECORD_OVERHEAD, np.int64)
    for array in (first.values, first.keys, first.headers):
        if array is not None:
            sizes += pc.fill_null(pc.binary_length(array), 0).to_numpy(zero_copy_only=False)
    through = sizes.cumsum()
    count = int(np.searchsorted(through, share, side="right"))
    return count, int(through[max(count, 1) - 1])


def _records(columns: Columns, offset: int) -> list[dict[str, Any]]:
    count = columns.count
    keys = [None] * count if columns.keys is None else columns.keys.to_pylist()
    headers = [b""] * count if columns.headers is None else columns.headers.to_pylist()
    times = effective_timestamps(columns).to_pylist()
    return [
        {
            "offset": offset + place,
            "payload": data_out(value),
            "key": data_out(key),
            "timestamp": ms,
            "headers": [[name, data_out(data)] for name, data in decode_headers(encoded)],
        }
        for place, (value, key, ms, encoded) in enumerate(
            zip(columns.values.to_pylist(), keys, times, headers, strict=True)
        )
    ]
