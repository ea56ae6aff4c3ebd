"""Following a keyed log as server-sent events.

Each record is an event whose `id` is its sequence. A client that reconnects with its last id (`Last-Event-ID`) goes on
without loss or repetition. The first event is an id alone, so this also holds for a client that was cut off before its
first record.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Final

import pyarrow as pa

from llog.broker.http.events import HEARTBEAT, TAILS_MAX, event, opening_event, problem_event
from llog.broker.http.json_records import keyed_records_to_json
from llog.broker.keyed.holder import HeldLog
from llog.broker.keyed.messages import TailQuery
from llog.broker.metrics import Metrics
from llog.errors import LlogError, Overloaded, StoreUnavailable
from llog.keyed import KeyedLogReader, Segment
from llog.keyed.follower import follow_key, follow_prefix
from llog.keyed.model import Ranges

_RECORDS_AT_ONCE: Final = 256


class FollowedLog:
    """A reader whose waits for new records are shared by all clients that follow it."""

    def __init__(self, reader: KeyedLogReader) -> None:
        self.reader = reader
        self._next: int | None = None
        self._wait_task: asyncio.Task[None] | None = None

    def scan_batches(self, key: bytes, seq_range: Ranges = None) -> AsyncIterator[pa.RecordBatch]:
        return self.reader.scan_batches(key, seq_range)

    def scan_prefix_batches(self, prefix: bytes, seq_range: Ranges = None) -> AsyncIterator[pa.RecordBatch]:
        return self.reader.scan_prefix_batches(prefix, seq_range)

    async def segments(self, seq_range: Ranges = None) -> list[Segment]:
        return await self.reader.segments(seq_range)

    async def next_sequence(self) -> int:
        if self._next is None:
            self._next = await self.reader.next_sequence()
        return self._next

    async def wait(self) -> None:
        if self._wait_task is None or self._wait_task.done():
            self._wait_task = asyncio.create_task(self._wait_for_records())
            self._wait_task.add_done_callback(_retrieve_exception)
        await asyncio.shield(self._wait_task)

    async def _wait_for_records(self) -> None:
        await self.reader.wait()
        self._next = await self.reader.next_sequence()


class Tails:
    """The streams of all clients that follow the log."""

    def __init__(self, held: HeldLog, metrics: Metrics, stopping: asyncio.Event) -> None:
        self._held = held
        self._metrics = metrics
        self._stopping = stopping
        self._followed: FollowedLog | None = None

    async def follow(self, query: TailQuery) -> AsyncIterator[bytes]:
        """Return the events, once the log is open. Raises `Overloaded` if too many clients follow it."""
        if self._metrics.keyed_tails >= TAILS_MAX:
            raise Overloaded(f"{TAILS_MAX} clients follow the keyed log here already: come again later")
        reader = await self._held.reader()
        if self._followed is None or self._followed.reader is not reader:
            self._followed = FollowedLog(reader)
        after = query.after
        if after is None:
            try:
                after = await reader.next_sequence() - 1
            except StoreUnavailable:
                await self._held.drop_reader(reader)
                raise
        return self._events(self._followed, query, after)

    async def _events(self, log: FollowedLog, query: TailQuery, after: int) -> AsyncIterator[bytes]:
        self._metrics.keyed_tails += 1
        try:
            yield opening_event(str(after))
            key, prefix = query.key, query.prefix or b""
            batches = follow_prefix(log, prefix, after) if key is None else follow_key(log, key, after)
            async with aclosing(_with_pauses(batches, query.heartbeat_ms / 1000, self._stopping)) as found:
                async for batch in found:
                    if batch is None:
                        yield HEARTBEAT
                        continue
                    for start in range(0, batch.num_rows, _RECORDS_AT_ONCE):
                        if self._stopping.is_set():
                            return
                        some = batch.slice(start, _RECORDS_AT_ONCE)
                        yield _encode_events(some)
                        self._metrics.keyed_scanned_records += some.num_rows
        except LlogError as error:
            self._metrics.errors[error.code] += 1
            if isinstance(error, StoreUnavailable):
                await self._held.drop_reader(log.reader)
            yield problem_event(error)
        finally:
            self._metrics.keyed_tails -= 1


async def _with_pauses(
    batches: AsyncIterator[pa.RecordBatch], pause_s: float, stopping: asyncio.Event
) -> AsyncGenerator[pa.RecordBatch | None, None]:
    """Yield the batches, and None whenever none came for `pause_s` seconds; end when the broker stops."""
    stop = asyncio.create_task(stopping.wait())
    coming: asyncio.Task[pa.RecordBatch] | None = None
    try:
        while not stopping.is_set():
            coming = coming or asyncio.create_task(_next(batches))
            await asyncio.wait((coming, stop), timeout=pause_s, return_when=asyncio.FIRST_COMPLETED)
            if coming.done():
                batch = coming.result()
                coming = None
                yield batch
            elif not stop.done():
                yield None
    finally:
        left = [task for task in (coming, stop) if task is not None]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


async def _next(batches: AsyncIterator[pa.RecordBatch]) -> pa.RecordBatch:
    return await anext(batches)


def _encode_events(batch: pa.RecordBatch) -> bytes:
    return b"".join([event(str(each["sequence"]), each) for each in keyed_records_to_json(batch)])


def _retrieve_exception(done: asyncio.Task[None]) -> None:
    """Retrieve the exception of a task whose waiters may all be gone, so that asyncio does not report it."""
    if not done.cancelled():
        done.exception()
