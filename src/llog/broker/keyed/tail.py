"""Following a keyed log as server-sent events.

Each record is an event whose `id` is its sequence: a client that comes back with it (`Last-Event-ID`) goes on without
loss or repetition. The first event is an id alone, so that this holds for a client that was cut off before any record,
too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Final

import msgspec
import pyarrow as pa

from llog.broker.http.messages import keyed_out
from llog.broker.http.problems import error_of
from llog.broker.keyed.holder import HeldLog
from llog.broker.keyed.messages import TailQuery
from llog.broker.metrics import Metrics
from llog.errors import LlogError, Overloaded, StoreUnavailable
from llog.keyed import KeyedLogReader, Segment
from llog.keyed.follower import follow_key, follow_prefix
from llog.keyed.model import Ranges

TAILS_MAX: Final = 256
RETRY_MS: Final = 1000
_RECORDS_AT_ONCE: Final = 256
_HEARTBEAT: Final = b": still here\n\n"


class Follow:
    """A reader whose looks for new records are shared by all who follow it."""

    def __init__(self, reader: KeyedLogReader) -> None:
        self.reader = reader
        self._next: int | None = None
        self._looking: asyncio.Task[None] | None = None

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
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
            self._looking.add_done_callback(_retrieved)
        await asyncio.shield(self._looking)

    async def _look(self) -> None:
        await self.reader.wait()
        self._next = await self.reader.next_sequence()


class Tails:
    def __init__(self, held: HeldLog, metrics: Metrics, stopping: asyncio.Event) -> None:
        self._held = held
        self._metrics = metrics
        self._stopping = stopping
        self._follow: Follow | None = None

    async def follow(self, asked: TailQuery) -> AsyncIterator[bytes]:
        """The events, once it is known that there is a log to follow."""
        if self._metrics.keyed_tails >= TAILS_MAX:
            raise Overloaded(f"{TAILS_MAX} clients follow the keyed log here already: come again later")
        reader = await self._held.reader()
        if self._follow is None or self._follow.reader is not reader:
            self._follow = Follow(reader)
        after = asked.after
        if after is None:
            try:
                after = await reader.next_sequence() - 1
            except StoreUnavailable:
                await self._held.drop_reader(reader)
                raise
        return self._events(self._follow, asked, after)

    async def _events(self, log: Follow, asked: TailQuery, after: int) -> AsyncIterator[bytes]:
        self._metrics.keyed_tails += 1
        try:
            yield f"retry: {RETRY_MS}\nid: {after}\n\n".encode()
            key, prefix = asked.key, asked.prefix or b""
            batches = follow_prefix(log, prefix, after) if key is None else follow_key(log, key, after)
            async with aclosing(_with_pauses(batches, asked.heartbeat_ms / 1000, self._stopping)) as found:
                async for batch in found:
                    if batch is None:
                        yield _HEARTBEAT
                        continue
                    for start in range(0, batch.num_rows, _RECORDS_AT_ONCE):
                        if self._stopping.is_set():
                            return
                        some = batch.slice(start, _RECORDS_AT_ONCE)
                        yield _written(some)
                        self._metrics.keyed_scanned_records += some.num_rows
        except LlogError as error:
            self._metrics.errors[error.code] += 1
            if isinstance(error, StoreUnavailable):
                await self._held.drop_reader(log.reader)
            yield b"event: problem\ndata: " + msgspec.json.encode(error_of(error)) + b"\n\n"
        finally:
            self._metrics.keyed_tails -= 1


async def _with_pauses(
    batches: AsyncIterator[pa.RecordBatch], pause_s: float, stopping: asyncio.Event
) -> AsyncGenerator[pa.RecordBatch | None, None]:
    """What comes, None whenever nothing came for so long, and an end when the broker stops."""
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


def _written(batch: pa.RecordBatch) -> bytes:
    encode = msgspec.json.encode
    return b"".join([b"id: %d\ndata: %s\n\n" % (each["sequence"], encode(each)) for each in keyed_out(batch)])


def _retrieved(done: asyncio.Task[None]) -> None:
    """Whoever waited may be gone."""
    if not done.cancelled():
        done.exception()
