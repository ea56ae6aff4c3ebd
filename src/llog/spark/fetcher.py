"""Fetches the records of a task: it reads byte ranges of blobs and yields batches in the order of the offsets.

Extents are fetched in windows of bounded size; within a window, one request fetches all ranges of a blob. While Spark
consumes a window, the next ones are fetched.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import islice
from typing import NamedTuple

from llog.batch.columns import byte_size, slice_columns
from llog.engines.object.entry_bytes import location_of, read_ranges
from llog.engines.object.reader import Reader, decode_range
from llog.engines.object.snapshot import Extent
from llog.errors import (
    BlobNotFound,
    CorruptBatch,
    InconsistentReadState,
    LlogError,
    OffsetOutOfRange,
    PartitionNotInitialized,
    TopicNotFound,
)
from llog.log.catalog import Catalog
from llog.log.engine import Batch
from llog.log.log import Log
from llog.log.pins import renew
from llog.model import TopicPartition
from llog.spark.offsets import lose
from llog.spark.planner import LocatedRange
from llog.stores.blobs import Buffer

WINDOW_BYTES_MAX = 8 << 20
WINDOWS_AHEAD = 4
ROWS_PER_BATCH_MAX = 10_000
BYTES_PER_BATCH_MAX = 16 << 20
PIN_LEASE_MS = 300_000
_PIN_RENEW_S = 60.0


class _Wanted(NamedTuple):
    located: LocatedRange
    extent: Extent


async def fetch_ranges(
    log: Log, ranges: Sequence[LocatedRange], *, pin: str | None, fail_on_data_loss: bool
) -> AsyncIterator[tuple[LocatedRange, Batch]]:
    """Yield the batches of these ranges, each with its range.

    Lost records raise `DataLoss`, or are skipped and logged.
    """
    async with _keep_pin(log, pin):
        async for fetched in _fetch_ranges(log, ranges, fail_on_data_loss):
            yield fetched


async def _fetch_ranges(
    log: Log, ranges: Sequence[LocatedRange], fail_on_data_loss: bool
) -> AsyncIterator[tuple[LocatedRange, Batch]]:
    windows = _windows(ranges)
    fetching: deque[tuple[list[_Wanted], asyncio.Task[list[Buffer | LlogError]]]] = deque()

    def fetch_ahead(most: int) -> None:
        for window in islice(windows, most - len(fetching)):
            fetching.append((window, asyncio.create_task(_fetch(log, window))))

    try:
        fetch_ahead(1)  # alone: until it has arrived, Spark has nothing to do
        while fetching:
            window, task = fetching.popleft()
            fetched = await task
            fetch_ahead(WINDOWS_AHEAD)
            for wanted, data in zip(window, fetched, strict=True):
                async for batch in _decode(log, wanted, data, fail_on_data_loss):
                    for part in _cut_to_size(batch):
                        yield wanted.located, part
    finally:
        for _, task in fetching:
            task.cancel()


def _windows(ranges: Sequence[LocatedRange]) -> Iterator[list[_Wanted]]:
    window: list[_Wanted] = []
    size = 0
    for located in ranges:
        for extent in located.extents:
            if window and size + extent.byte_length > WINDOW_BYTES_MAX:
                yield window
                window, size = [], 0
            window.append(_Wanted(located, extent))
            size += extent.byte_length
    if window:
        yield window


async def _fetch(log: Log, window: Sequence[_Wanted]) -> list[Buffer | LlogError]:
    """Return the bytes of every extent, or the error that kept them away."""
    by_blob: dict[str, list[int]] = {}
    for index, wanted in enumerate(window):
        by_blob.setdefault(wanted.extent.data_uri, []).append(index)
    fetched: list[Buffer | LlogError] = [BlobNotFound("not fetched")] * len(window)

    async def fetch_blob(data_uri: str, indexes: list[int]) -> None:
        ranges = [(window[index].extent.byte_offset, window[index].extent.byte_length) for index in indexes]
        try:
            parts: Sequence[Buffer | LlogError] = await read_ranges(log, data_uri, ranges)
        except (BlobNotFound, CorruptBatch) as error:
            parts = [error] * len(indexes)
        for index, part in zip(indexes, parts, strict=True):
            fetched[index] = part

    await asyncio.gather(*(fetch_blob(uri, indexes) for uri, indexes in by_blob.items()))
    return fetched


async def _decode(log: Log, wanted: _Wanted, data: Buffer | LlogError, fail_on_data_loss: bool) -> AsyncIterator[Batch]:
    """Yield the wanted records of one extent."""
    (located, extent), tp = wanted, wanted.located.tp
    start, stop = max(located.start, extent.start_offset), min(located.stop, extent.end_offset + 1)
    try:
        if isinstance(data, LlogError):
            if isinstance(data, CorruptBatch):
                raise data
            # The blob was compacted and collected since the plan, which an expired pin allows: the index names the
            # blob that holds the records now.
            async for batch in Reader(log).iter_from(tp, start, stop):
                # After the read: only then does an unchanged incarnation prove that these are the topic's records.
                if (await Catalog(log).get(tp.topic)).incarnation != located.topic.incarnation:
                    raise TopicNotFound(f"topic {tp.topic!r} was deleted and created again")
                yield batch
                start = batch.end_offset + 1
            if start < stop:
                raise TopicNotFound(f"the log of {tp} ends before offset {start} now")
            return
        columns = decode_range(tp, extent.start_offset, extent.end_offset, extent, data)
        yield Batch(tp, start, slice_columns(columns, start - extent.start_offset, stop - extent.start_offset))
    except (BlobNotFound, CorruptBatch, InconsistentReadState) as error:
        lose(f"{_records(tp, start, stop)} are damaged: {error} ({location_of(extent)})", fail=fail_on_data_loss)
    except OffsetOutOfRange as error:
        # A partition that ends before the planned offsets belongs to another topic of that name, or was restored.
        why = "retention" if error.offset < error.log_start_offset else "deletion"
        lose(f"{_records(tp, start, stop)} are gone by {why}: {error}", fail=fail_on_data_loss)
    except (TopicNotFound, PartitionNotInitialized) as error:
        lose(f"{_records(tp, start, stop)} are gone by deletion: {error}", fail=fail_on_data_loss)


def _records(tp: TopicPartition, start: int, stop: int) -> str:
    return f"{stop - start} records of {tp}, offsets {start} to {stop - 1},"


def _cut_to_size(batch: Batch) -> Iterator[Batch]:
    """Yield views of the batch that are small enough to pass to the JVM quickly."""
    count = batch.columns.count
    rows = max(1, min(ROWS_PER_BATCH_MAX, count * BYTES_PER_BATCH_MAX // max(1, byte_size(batch.columns))))
    for first in range(0, count, rows):
        part = slice_columns(batch.columns, first, min(count, first + rows))
        yield Batch(batch.tp, batch.start_offset + first, part)


@asynccontextmanager
async def _keep_pin(log: Log, pin: str | None) -> AsyncIterator[None]:
    """Keep the snapshot's pin alive while a task works on it, however slowly Spark consumes the records."""

    async def keep(pin: str) -> None:
        while True:
            try:
                await renew(log, pin, PIN_LEASE_MS)
            except LlogError:
                pass  # without the pin, a missing blob's records are looked up again
            await asyncio.sleep(_PIN_RENEW_S)

    keeper = None if pin is None else asyncio.create_task(keep(pin))
    try:
        yield
    finally:
        if keeper is not None:
            keeper.cancel()
