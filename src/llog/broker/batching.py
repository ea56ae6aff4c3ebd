"""Many small requests become few blobs: appends that come at the same time share one.

When nothing is under way, an append leaves at once: a lone client waits for the stores and for nothing else. While a batch is under way,
what comes collects, and leaves when that batch is done, when LLOG_BATCH_MAX_BYTES wait, or when the oldest has waited for
LLOG_BATCH_MAX_DELAY_MS, whichever is first. So the busier it is, the larger the batches are. Several may be under way.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

from llog.batch.columns import Columns, byte_size, concat
from llog.broker.metrics import Metrics
from llog.broker.uploads import Appends
from llog.errors import LlogError, PartitionNotInitialized, StoreUnavailable
from llog.model import TopicPartition
from llog.ports import AppendResult, Group

FLUSHES_MAX: Final = 4
RECORD_OVERHEAD: Final = 16
"""Bytes that a record counts for besides its own: empty ones must not collect without bound."""


class _Item(NamedTuple):
    tp: TopicPartition
    columns: Columns
    size: int
    deadline: float
    answer: asyncio.Future[AppendResult]


class BatchingProducer:
    """Appends through one appender. Records of one partition keep the order of the calls."""

    def __init__(
        self,
        appends: Appends,
        metrics: Metrics,
        *,
        max_bytes: int,
        max_delay_s: float,
        flushes_max: int = FLUSHES_MAX,
    ) -> None:
        self._appends = appends
        self._metrics = metrics
        self._max_bytes = max_bytes
        self._max_delay_s = max_delay_s
        self._flushes_max = flushes_max
        self._waiting: deque[_Item] = deque()
        self._waiting_bytes = 0
        self._flushes: set[asyncio.Task[None]] = set()
        self._timer: asyncio.Handle | None = None
        self._closing = False

    async def append(self, tp: TopicPartition, columns: Columns) -> AppendResult:
        """The offsets, once the records are durable. A caller that goes away does not take its records back."""
        if self._closing:
            raise StoreUnavailable("the broker is stopping: nothing was appended")
        loop = asyncio.get_running_loop()
        size = byte_size(columns) + RECORD_OVERHEAD * columns.count
        item = _Item(tp, columns, size, loop.time() + self._max_delay_s, loop.create_future())
        self._waiting.append(item)
        self._waiting_bytes += size
        # Not right here: requests that are read in the same round of the loop go together.
        if len(self._waiting) == 1 or self._waiting_bytes >= self._max_bytes:
            self._look(loop.call_soon(self._flush))
        return await item.answer

    async def close(self) -> None:
        """Flushes what waits and returns when all of it is answered. Appends after it are refused. Idempotent."""
        self._closing = True
        self._flush()
        while self._flushes:
            await asyncio.wait(self._flushes)

    def _look(self, timer: asyncio.Handle) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = timer

    def _flush(self) -> None:
        """Begins as many batches as are due, and sees to it that the next one is looked at in time."""
        loop = asyncio.get_running_loop()
        while self._waiting and len(self._flushes) < self._flushes_max and self._is_due(loop.time()):
            task = loop.create_task(self._append(self._next_batch()))
            self._flushes.add(task)
            self._metrics.flushes_in_flight = len(self._flushes)
            task.add_done_callback(self._flushed)
        if self._waiting and len(self._flushes) < self._flushes_max:
            self._look(loop.call_at(self._waiting[0].deadline, self._flush))

    def _is_due(self, now: float) -> bool:
        full = self._waiting_bytes >= self._max_bytes
        return not self._flushes or full or self._closing or now >= self._waiting[0].deadline

    def _flushed(self, task: asyncio.Task[None]) -> None:
        self._flushes.discard(task)
        self._metrics.flushes_in_flight = len(self._flushes)
        self._flush()

    def _next_batch(self) -> list[_Item]:
        """At least one, and as many more as fit."""
        batch: list[_Item] = []
        size = 0
        while self._waiting and (not batch or size + self._waiting[0].size <= self._max_bytes):
            batch.append(self._waiting.popleft())
            size += batch[-1].size
        self._waiting_bytes -= size
        return batch

    async def _append(self, batch: Sequence[_Item]) -> None:
        parts: dict[TopicPartition, list[_Item]] = {}
        for item in batch:
            parts.setdefault(item.tp, []).append(item)
        try:
            groups = [
                Group(topic=tp.topic, partition=tp.partition, records=concat([item.columns for item in items]))
                for tp, items in parts.items()
            ]
            results = await self._appended(groups)
        except Exception as error:
            for item in batch:
                _fail(item, error)
            return
        self._metrics.batch(sum(item.columns.count for item in batch), sum(item.size for item in batch), len(groups))
        for items, result in zip(parts.values(), results, strict=True):
            _share_out(items, result)

    async def _appended(self, groups: Sequence[Group]) -> Sequence[AppendResult | LlogError]:
        try:
            return await self._appends.append(groups)
        except PartitionNotInitialized:
            # None of the partitions is there, and this tells of one of them: each gets an error of its own.
            return await asyncio.gather(*map(self._alone, groups))

    async def _alone(self, group: Group) -> AppendResult | LlogError:
        try:
            return (await self._appends.append([group]))[0]
        except LlogError as error:
            return error


def _share_out(items: Sequence[_Item], result: AppendResult | LlogError) -> None:
    """Gives every item its part of the offsets that all of them got together."""
    if isinstance(result, LlogError):
        for item in items:
            _fail(item, result)
        return
    start = result.start_offset
    for item in items:
        end = start + item.columns.count - 1
        if not item.answer.done():
            item.answer.set_result(
                AppendResult(topic=item.tp.topic, partition=item.tp.partition, start_offset=start, end_offset=end)
            )
        start = end + 1


def _fail(item: _Item, error: Exception) -> None:
    if not item.answer.done():
        item.answer.set_exception(error)
