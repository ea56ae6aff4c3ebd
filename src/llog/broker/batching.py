"""Batching: many small requests become few blobs, since appends that come at the same time share one.

Requests accumulate and go out together when LLOG_BATCH_MAX_BYTES wait, or when the oldest one has waited for
LLOG_BATCH_MAX_DELAY_MS, whichever comes first: every blob in a bucket costs a PUT. Several batches may be under way.

An eager producer also sends what waits as soon as no batch is under way: a lone client waits for the stores and for
nothing else, and batches grow with the load. Local files and the engines that use no blobs are written that way, and so
is what needs no blob because it is small enough to be inline (`log/inline.py`), until a partition is full of that.

Clients that were just answered together usually ask again at once. So the next batch waits for as many requests as the
last one answered, for half as long as that one took at most: otherwise the first of them would leave alone, and all
others would wait for its batch to end.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from contextvars import Context, copy_context
from typing import Final, Literal, NamedTuple

import msgspec

from llog.batch.columns import Columns, byte_size, concat
from llog.broker.metrics import Metrics
from llog.broker.tracing import Tracer
from llog.errors import LlogError, PartitionNotInitialized, StoreUnavailable
from llog.log.engine import AppendGroup, AppendResult, LogAppender
from llog.log.inline import InlineLimits, batch_bytes_max
from llog.log.record_producers import RecordProducer
from llog.model import TopicPartition

FLUSHES_MAX: Final = 4
RECORD_OVERHEAD: Final = 16
"""Bytes that a record counts for besides its own: empty records must not accumulate without bound."""
PARTS_MAX: Final = 20_000
"""Parts of one batch, unless a single request has more: a blob's header has room for about 50,000 partitions."""

_RETURN_SHARE: Final = 0.5
"""How long a batch waits for clients that were just answered, as a share of the time that their batch took."""

Outcome = AppendResult | LlogError
FlushReason = Literal["bytes", "delay", "idle", "inline", "closing"]


class Part(NamedTuple):
    """Records for one partition. Those with a producer are appended at most once, however often they are sent."""

    tp: TopicPartition
    columns: Columns
    producer: RecordProducer | None = None


class _Request(NamedTuple):
    parts: Sequence[Part]
    size: int
    deadline: float
    answer: asyncio.Future[list[Outcome]]
    context: Context | None
    """Where a flush is traced that this request is the first one of."""


class BatchingProducer:
    """Appends through one appender. Records of one partition keep the order of the calls.

    `is_eager` says whether requests leave at once while no batch is under way; otherwise only those do that `inline`
    admits.
    """

    def __init__(
        self,
        appender: LogAppender,
        metrics: Metrics,
        *,
        max_bytes: int,
        max_delay_s: float,
        is_eager: bool,
        inline: InlineLimits | None = None,
        flushes_max: int = FLUSHES_MAX,
        tracer: Tracer | None = None,
    ) -> None:
        self._appender = appender
        self._metrics = metrics
        self._max_bytes = max_bytes
        self._max_delay_s = max_delay_s
        self._is_eager = is_eager
        self._inline = inline or InlineLimits()
        self._is_inline_refused = False
        """Whether the last batch was small enough to be inline, but had a partition that was full."""
        self._flushes_max = flushes_max
        self._tracer = tracer
        self._waiting: deque[_Request] = deque()
        self._waiting_bytes = 0
        self._flushes: set[asyncio.Task[None]] = set()
        self._timer: asyncio.Handle | None = None
        self._expected = 1
        """How many requests wait once all clients that the last batch answered have asked again."""
        self._expected_until = 0.0
        self._is_closing = False

    def append(self, parts: Sequence[Part]) -> asyncio.Future[list[Outcome]]:
        """Return the future of each part's offsets, once its records are durable, or error. All parts leave in one
        batch.

        The future raises if nothing of that batch was appended. The records of a caller that goes away are appended all
        the same.
        """
        loop = asyncio.get_running_loop()
        size = 0
        for part in parts:
            size += byte_size(part.columns) + RECORD_OVERHEAD * part.columns.count
        context = None if self._tracer is None else copy_context()
        request = _Request(parts, size, loop.time() + self._max_delay_s, loop.create_future(), context)
        if self._is_closing:
            request.answer.set_exception(StoreUnavailable("the broker is stopping: nothing was appended"))
            return request.answer
        self._waiting.append(request)
        self._waiting_bytes += size
        self._metrics.queued_requests += 1
        self._metrics.queued_bytes += size
        # Not at once: requests that are read in the same round of the event loop go together.
        if len(self._waiting) in (1, self._expected) or self._waiting_bytes >= self._max_bytes:
            self._set_timer(loop.call_soon(self._flush))
        return request.answer

    async def close(self) -> None:
        """Flush what waits; return when all of it is answered. Later appends are refused. Idempotent."""
        self._is_closing = True
        self._flush()
        while self._flushes:
            await asyncio.wait(self._flushes)

    def _set_timer(self, timer: asyncio.Handle) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = timer

    def _flush(self) -> None:
        """Begin all batches that are due, and set the timer for the next one."""
        loop = asyncio.get_running_loop()
        while self._waiting and len(self._flushes) < self._flushes_max and (reason := self._due(loop.time())):
            self._metrics.flushes[reason] += 1
            batch = self._next_batch(loop.time())
            if not self._is_eager and reason != "inline":
                self._count_shares(batch)
            task = loop.create_task(self._append(batch), context=batch[0].context)
            self._flushes.add(task)
            self._metrics.flushes_in_flight += 1
            task.add_done_callback(self._end_flush)
        if self._waiting and len(self._flushes) < self._flushes_max:
            due = self._waiting[0].deadline
            if loop.time() < self._expected_until:
                due = min(due, self._expected_until)
            self._set_timer(loop.call_at(due, self._flush))

    def _due(self, now: float) -> FlushReason | None:
        """Return why the next batch must leave now; None if it may wait."""
        if self._waiting_bytes >= self._max_bytes:
            return "bytes"
        if self._is_closing:
            return "closing"
        if now >= self._waiting[0].deadline:
            return "delay"
        if self._flushes or (len(self._waiting) < self._expected and now < self._expected_until):
            return None
        if self._is_eager:
            return "idle"
        return "inline" if self._fits_inline() else None

    def _fits_inline(self) -> bool:
        """Return whether all that waits needs no blob, as far as the last batch shows."""
        if not self._inline.group_bytes_max or self._is_inline_refused:
            return False
        sizes: dict[TopicPartition, int] = {}
        total = 0
        for request in self._waiting:
            for tp, columns, *_ in request.parts:
                size = batch_bytes_max(columns)
                sizes[tp] = sizes.get(tp, 0) + size
                total += size
                if total > self._inline.flush_bytes_max:
                    return False
        return self._inline.fit(sizes.values())

    def _count_shares(self, batch: Sequence[_Request]) -> None:
        """Share the blob to come among the parts of the batch, by their bytes, for the estimate of costs."""
        total = sum(request.size for request in batch)
        for request in batch:
            for tp, columns, producer in request.parts:
                share = (byte_size(columns) + RECORD_OVERHEAD * columns.count) / total
                self._metrics.count_batch_share(tp.topic, None if producer is None else producer.id, share)

    def _end_flush(self, task: asyncio.Task[None]) -> None:
        self._flushes.discard(task)
        self._metrics.flushes_in_flight -= 1
        self._flush()

    def _expect_again(self, answered: int, seconds: float) -> None:
        """Expect the clients of a batch, which took this long and is about to be answered, beside those that wait."""
        self._expected = answered + len(self._waiting)
        self._expected_until = asyncio.get_running_loop().time() + _RETURN_SHARE * seconds

    def _next_batch(self, now: float) -> list[_Request]:
        """Take at least one request, and as many more as fit."""
        metrics = self._metrics
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
            metrics.queued_requests -= 1
            metrics.queued_bytes -= request.size
            metrics.queue_wait.observe(now - request.deadline + self._max_delay_s)
        return batch

    async def _append(self, batch: Sequence[_Request]) -> None:
        started = time.perf_counter()
        try:
            joined = _join(batch)
            refused = self._metrics.appends.full
            results = await self._append_groups([each.group() for each in joined])
            self._is_inline_refused = self._metrics.appends.full > refused
        except Exception as error:
            self._metrics.flush_errors += 1
            for request in batch:
                if not request.answer.done():
                    request.answer.set_exception(error)
            return
        seconds = time.perf_counter() - started
        self._metrics.flush_seconds.observe(seconds)
        if self._tracer is not None:
            self._tracer.record("flush", seconds, requests=len(batch))
        records = sum(part.columns.count for request in batch for part in request.parts)
        partitions = len({each.tp for each in joined})
        self._metrics.count_batch(records, sum(request.size for request in batch), partitions)
        outcomes = dict(share for each, result in zip(joined, results, strict=True) for share in each.shares(result))
        self._expect_again(len(batch), seconds)
        number = 0
        for request in batch:
            numbers = range(number, number + len(request.parts))
            number = numbers.stop
            if not request.answer.done():
                request.answer.set_result([outcomes[each] for each in numbers])

    async def _append_groups(self, groups: Sequence[AppendGroup]) -> Sequence[Outcome]:
        try:
            return await self._appender.append(groups)
        except PartitionNotInitialized:
            # None of the partitions exists, and this error names one of them: each gets an error of its own.
            return await asyncio.gather(*map(self._append_alone, groups))

    async def _append_alone(self, group: AppendGroup) -> Outcome:
        try:
            return (await self._appender.append([group]))[0]
        except LlogError as error:
            return error


class _JoinedParts:
    """Parts of one batch for one partition that become one append group: one with a producer, or consecutive ones
    without.
    """

    __slots__ = ("columns", "numbers", "producer", "tp")

    def __init__(self, tp: TopicPartition, producer: RecordProducer | None) -> None:
        self.tp = tp
        self.producer = producer
        self.columns: list[Columns] = []
        self.numbers: list[int] = []
        """The position of each part in the batch."""

    def group(self) -> AppendGroup:
        topic, partition = self.tp
        return AppendGroup(topic=topic, partition=partition, records=concat(self.columns), producer=self.producer)

    def shares(self, outcome: Outcome) -> list[tuple[int, Outcome]]:
        """Divide the offsets that all parts got together among the parts, in their order."""
        if isinstance(outcome, LlogError) or len(self.numbers) == 1:
            return [(number, outcome) for number in self.numbers]
        shares: list[tuple[int, Outcome]] = []
        start = outcome.start_offset
        for number, columns in zip(self.numbers, self.columns, strict=True):
            end = start + columns.count - 1
            shares.append((number, msgspec.structs.replace(outcome, start_offset=start, end_offset=end)))
            start = end + 1
        return shares


def _join(batch: Sequence[_Request]) -> list[_JoinedParts]:
    """Join the parts of the batch by partition. The records of a partition keep their order."""
    joined: list[_JoinedParts] = []
    newest: dict[TopicPartition, _JoinedParts] = {}
    number = 0
    for request in batch:
        for tp, columns, producer in request.parts:
            each = newest.get(tp)
            if each is None or producer is not None or each.producer is not None:
                each = newest[tp] = _JoinedParts(tp, producer)
                joined.append(each)
            each.columns.append(columns)
            each.numbers.append(number)
            number += 1
    return joined
