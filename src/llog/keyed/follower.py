"""Following a log: rounds of scans, each up to where the log was durable when the round began.

The cursor is a sequence. It only passes what was yielded, and what is below the end of a round is all there, so nothing
is lost or repeated, whoever goes on from it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final, Protocol

import numpy as np
import pyarrow as pa

from llog.keyed.model import Ranges, Segment, SeqRange
from llog.keyed.scanner import in_order

HELD_BYTES_MAX: Final = 32 << 20
"""A prefix is read key by key and yielded by sequence: so much of it is held at a time."""


class Followed(Protocol):
    """What following needs of a reader."""

    def scan_batches(self, key: bytes, seq_range: Ranges = None) -> AsyncIterator[pa.RecordBatch]: ...

    def scan_prefix_batches(self, prefix: bytes, seq_range: Ranges = None) -> AsyncIterator[pa.RecordBatch]: ...

    async def segments(self, seq_range: Ranges = None) -> list[Segment]: ...

    async def next_sequence(self) -> int: ...

    async def wait(self) -> None: ...


async def follow_key(log: Followed, key: bytes, after: int | None) -> AsyncIterator[pa.RecordBatch]:
    async for wanted in _rounds(log, after):
        async for batch in log.scan_batches(key, wanted):
            yield batch


async def follow_prefix(log: Followed, prefix: bytes, after: int | None) -> AsyncIterator[pa.RecordBatch]:
    async for wanted in _rounds(log, after):
        for segment in await log.segments(wanted):
            start, end = max(wanted.start, segment.start_seq), min(wanted.stop, segment.end_seq)
            async for batch in _by_sequence(log, prefix, start, end):
                yield batch


async def _rounds(log: Followed, after: int | None) -> AsyncIterator[range]:
    """Ranges of sequences, each from where the last one ended; waits while there is nothing new."""
    cursor = await log.next_sequence() if after is None else after + 1
    while True:
        end = await log.next_sequence()
        if end > cursor:
            yield range(cursor, end)
            cursor = end
        else:
            await log.wait()


async def _by_sequence(log: Followed, prefix: bytes, start: int, end: int) -> AsyncIterator[pa.RecordBatch]:
    """Records of one segment by sequence. If they are too many to hold, the lower half is kept and the rest read
    again.
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
                whole = in_order(held)
                half = max(1, whole.num_rows // 2)
                if half < whole.num_rows:
                    upper = whole.column("sequence")[half].as_py()
                    held = [whole.take(pa.array(np.arange(half)))]
                    size = held[0].nbytes
        if sum(batch.num_rows for batch in held):
            yield in_order(held)
        start = upper
