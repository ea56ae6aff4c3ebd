"""Many small requests become few blobs: appends that come at the same time share one.

When nothing is under way, an append leaves at once: a lone client waits for the stores and for nothing else. While a
batch is under way, what comes collects, and leaves when that batch is done, when LLOG_BATCH_MAX_BYTES wait, or when the
oldest has waited for LLOG_BATCH_MAX_DELAY_MS, whichever is first. So the busier it is, the larger the batches are.
Several may be under way.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from llog.batch.columns import Columns, byte_size, concat
from llog.broker.cache.uploads import Appends
from llog.broker.metrics import Metrics
from llog.engines.port import AppendResult, Group
from llog.errors import LlogError, PartitionNotInitialized, StoreUnavailable
from llog.model import TopicPartition

FLUSHES_MAX: Final = 4
RECORD_OVERHEAD: Final = 16
"""Bytes that a record counts for besides its own: empty ones must not collect without bound."""


PARTS_MAX: Final = 20_000
"""Parts of one batch, unless a single request has more: the header of a blob has room for some 50,000 partitions."""

Outcome = AppendResult | LlogError


class Part(NamedTuple):
    """Records for one partition."""

    tp: TopicPartition
    columns: Columns


class _Request(NamedTuple):
    parts: Sequence[Part]
    size: int
    deadline: float
    answer: asyncio.Future[list[Outcome]]


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
        self._waiting: deque[_Request] = deque()
        self._waiting_bytes = 0
        self._flushes: set[asyncio.Task[None]] = set()
        self._timer: asyncio.Handle | None = None
        self._closing = False

    async def append(self, parts: Sequence[Part]) -> list[Outcome]:
        """The offsets of each part, once its records are durable, or its error. All parts leave in one batch.

        Raises if nothing of that batch was appended. A caller that goes away does not take its records back.
        """
        if self._closing:
            raise StoreUnavailable("the broker is stopping: nothing was appended")
        loop = asyncio.get_running_loop()
        size = sum(byte_size(part.columns) + RECORD_OVERHEAD * part.columns.count for part in parts)
        request = _Request(parts, size, loop.time() + self._max_delay_s, loop.create_future())
        self._waiting.append(request)
        self._waiting_bytes += size
        # Not right here: requests that are read in the same round of the loop go together.
        if len(self._waiting) == 1 or self._waiting_bytes >= self._max_bytes:
            self._look(loop.call_soon(self._flush))
        return await request.answer

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

    def _next_batch(self) -> list[_Request]:
        """At least one, and as many more as fit."""
        batch: list[_Request] = []
        size = parts = 0
        while self._waiting:
            request = self._waiting[0]
            size += request.size
            parts += len(request.parts)
            if batch and (size > self._max_bytes or parts > PARTS_MAX):
                break
            batch.append(self._waiting.popleft())
            self._waiting_bytes -= request.size
        return batch

    async def _append(self, batch: Sequence[_Request]) -> None:
        columns: dict[TopicPartition, list[Columns]] = {}
        for request in batch:
            for tp, part in request.parts:
                columns.setdefault(tp, []).append(part)
        try:
            groups = [
                Group(topic=tp.topic, partition=tp.partition, records=concat(joined)) for tp, joined in columns.items()
            ]
            results = await self._appended(groups)
        except Exception as error:
            for request in batch:
                if not request.answer.done():
                    request.answer.set_exception(error)
            return
        records = sum(part.columns.count for request in batch for part in request.parts)
        self._metrics.batch(records, sum(request.size for request in batch), len(groups))
        shares = _Shares(dict(zip(columns, results, strict=True)))
        for request in batch:
            outcomes = [shares.take(part) for part in request.parts]
            if not request.answer.done():
                request.answer.set_result(outcomes)

    async def _appended(self, groups: Sequence[Group]) -> Sequence[Outcome]:
        try:
            return await self._appends.append(groups)
        except PartitionNotInitialized:
            # None of the partitions is there, and this tells of one of them: each gets an error of its own.
            return await asyncio.gather(*map(self._alone, groups))

    async def _alone(self, group: Group) -> Outcome:
        try:
            return (await self._appends.append([group]))[0]
        except LlogError as error:
            return error


class _Shares:
    """Gives every part its offsets of those that all parts of its partition got together, in their order."""

    def __init__(self, outcomes: dict[TopicPartition, Outcome]) -> None:
        self._outcomes = outcomes

    def take(self, part: Part) -> Outcome:
        outcome = self._outcomes[part.tp]
        if isinstance(outcome, LlogError):
            return outcome
        end = outcome.start_offset + part.columns.count - 1
        if end == outcome.end_offset:
            return outcome
        self._outcomes[part.tp] = msgspec.structs.replace(outcome, start_offset=end + 1)
        return msgspec.structs.replace(outcome, end_offset=end)
