"""Follows a log in rounds of scans, each up to where the log was durable when the round began.

The cursor is a sequence. It passes only records that were yielded, and all records below the end of a round exist, so a
caller that continues from it loses and repeats nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
import pyarrow as pa

from llog.errors import NotSeenYet
from llog.keyed.model import Ranges, Segment, SeqRange
from llog.keyed.scanner import sort_by_sequence

if TYPE_CHECKING:
    from llog.keyed.reader import KeyedLogReader

CATCH_UP_S: Final = 20.0
HELD_BYTES_MAX: Final = 32 << 20
"""A prefix is read key by key and yielded by sequence: at most this much of it is held in memory."""


class FollowableLog(Protocol):
    """What following needs of a reader."""

    def scan_batches(self, key: bytes, seq_range: Ranges = None) -> AsyncIterator[pa.RecordBatch]: ...

    def scan_prefix_batches(self, prefix: bytes, seq_range: Ranges = None) -> AsyncIterator[pa.RecordBatch]: ...

    async def segments(self, seq_range: Ranges = None) -> list[Segment]: ...

    async def next_sequence(self) -> int: ...

    async def wait(self) -> None: ...


async def follow_key(log: FollowableLog, key: bytes, after: int | None) -> AsyncIterator[pa.RecordBatch]:
    async for wanted in _rounds(log, after):
        async for batch in log.scan_batches(key, wanted):
            yield batch


async def follow_prefix(log: FollowableLog, prefix: bytes, after: int | None) -> AsyncIterator[pa.RecordBatch]:
    async for wanted in _rounds(log, after):
        for segment in await log.segments(wanted):
            start, end = max(wanted.start, segment.start_seq), min(wanted.stop, segment.end_seq)
            async for batch in _by_sequence(log, prefix, start, end):
                yield batch


async def _rounds(log: FollowableLog, after: int | None) -> AsyncIterator[range]:
    """Yield ranges of sequences, each from where the last one ended; wait while nothing is new."""
    cursor = await log.next_sequence() if after is None else after + 1
    while True:
        end = await log.next_sequence()
        if end > cursor:
            yield range(cursor, end)
            cursor = end
        else:
            await log.wait()


async def _by_sequence(log: FollowableLog, prefix: bytes, start: int, end: int) -> AsyncIterator[pa.RecordBatch]:
    """Yield the records of one segment by sequence. If they do not fit into memory, keep the lower half and read the
    rest again.
    """
    while start < end:
        upper, size = end, 0
        held: list[pa.RecordBatch] = []
        async for batch in log.scan_prefix_batches(prefix, SeqRange(start, end)):
            if upper < end:
                batch = batch.filter(pa.array(batch.column("sequence").to_numpy() < upper))
            held.append(batch)
            size += batch.nbytes
            if size > HELD_BYTES_MAX:
                joined = sort_by_sequence(held)
                half = max(1, joined.num_rows // 2)
                if half < joined.num_rows:
                    upper = joined.column("sequence")[half].as_py()
                    held = [joined.take(pa.array(np.arange(half)))]
                    size = held[0].nbytes
        if sum(batch.num_rows for batch in held):
            yield sort_by_sequence(held)
        start = upper


async def wait_for_sequence(log: KeyedLogReader, sequence: int) -> None:
    """Wait until everything below `sequence` can be read. Raises `NotSeenYet` after `CATCH_UP_S`.

    A reader lags behind its writer: a caller that has seen a later state elsewhere waits for the reader to catch up.
    """
    try:
        async with asyncio.timeout(CATCH_UP_S):
            while await log.next_sequence() < sequence:
                await log.wait()
    except TimeoutError:
        raise NotSeenYet(
            f"{log.url} was not seen up to sequence {sequence} within {CATCH_UP_S:.0f} s: is it the same log?"
        ) from None
