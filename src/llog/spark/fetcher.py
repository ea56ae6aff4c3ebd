"""What a task does: GETs of byte ranges, batches out, in the order of the offsets.

Extents are fetched in windows of bounded size; within a window, all ranges of one blob are one request. While one
window is handed to Spark, the next ones are fetched.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import islice
from typing import NamedTuple

from llog.batch.columns import byte_size, slice_columns
from llog.engines.object.reader import Reader, decode_located
from llog.engines.object.snapshot import Extent
from llog.engines.port import Batch
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
from llog.log.log import Log
from llog.log.pins import renew
from llog.model import TopicPartition
from llog.spark.offsets import lose
from llog.spark.planner import Run
from llog.stores.blobs import Buffer

WINDOW_BYTES_MAX = 8 << 20
WINDOWS_AHEAD = 4
ROWS_PER_BATCH_MAX = 10_000
BYTES_PER_BATCH_MAX = 16 << 20
PIN_LEASE_MS = 300_000
_PIN_RENEW_S = 60.0


class _Wanted(NamedTuple):
    run: Run
    extent: Extent


async def fetch_runs(
    log: Log, runs: Sequence[Run], *, pin: str | None, fail_on_data_loss: bool
) -> AsyncIterator[tuple[Run, Batch]]:
    """Yield the batches of these runs, each with its run. Lost records raise `DataLoss`, or are skipped and logged."""
    async with _keep_pin(log, pin):
        async for fetched in _fetch_runs(log, runs, fail_on_data_loss):
            yield fetched


async def _fetch_runs(log: Log, runs: Sequence[Run], fail_on_data_loss: bool) -> AsyncIterator[tuple[Run, Batch]]:
    windows = _windows(runs)
    fetching: deque[tuple[list[_Wanted], asyncio.Task[list[Buffer | LlogError]]]] = deque()

    def fetch_ahead(most: int) -> None:
        for window in islice(windows, most - len(fetching)):
            fetching.append((window, asyncio.create_task(_fetch(log, window))))

    try:
        fetch_ahead(1)  # alone: until it is there, Spark has nothing to do
        while fetching:
            window, task = fetching.popleft()
            fetched = await task
            fetch_ahead(WINDOWS_AHEAD)
            for wanted, data in zip(window, fetched, strict=True):
                async for batch in _decode(log, wanted, data, fail_on_data_loss):
                    for part in _cut_to_size(batch):
                        yield wanted.run, part
    finally:
        for _, task in fetching:
            task.cancel()


def _windows(runs: Sequence[Run]) -> Iterator[list[_Wanted]]:
    window: list[_Wanted] = []
    size = 0
    for run in runs:
        for extent in run.extents:
            if window and size + extent.byte_length > WINDOW_BYTES_MAX:
                yield window
                window, size = [], 0
            window.append(_Wanted(run, extent))
            size += extent.byte_length
    if window:
        yield window


async def _fetch(log: Log, window: Sequence[_Wanted]) -> list[Buffer | LlogError]:
    """Return the bytes of every extent, or the error that kept them away."""
    by_blob: dict[str, list[int]] = {}
    for place, wanted in enumerate(window):
        by_blob.setdefault(wanted.extent.data_uri, []).append(place)
    fetched: list[Buffer | LlogError] = [BlobNotFound("not fetched")] * len(window)

    async def fetch_blob(data_uri: str, places: list[int]) -> None:
        ranges = [(window[place].extent.byte_offset, window[place].extent.byte_length) for place in places]
        try:
            parts: Sequence[Buffer | LlogError] = await log.blobs.get_ranges(log.blob_name(data_uri), ranges)
        except (BlobNotFound, CorruptBatch) as error:
            parts = [error] * len(places)
        for place, part in zip(places, parts, strict=True):
            fetched[place] = part

    await asyncio.gather(*(fetch_blob(uri, places) for uri, places in by_blob.items()))
    return fetched


async def _decode(log: Log, wanted: _Wanted, data: Buffer | LlogError, fail_on_data_loss: bool) -> AsyncIterator[Batch]:
    """Yield the wanted records of one extent."""
    (run, extent), tp = wanted, wanted.run.tp
    start, stop = max(run.start, extent.start_offset), min(run.stop, extent.end_offset + 1)
    try:
        if isinstance(data, LlogError):
            if isinstance(data, CorruptBatch):
                raise data
            # Compacted and collected since the plan was made, which an expired pin allows: the log knows where it lies
            # now.
            async for batch in Reader(log).iter_from(tp, start, stop):
                # After the read: only then does the same incarnation say that these are its records.
                if (await Catalog(log).get(tp.topic)).incarnation != run.topic.incarnation:
                    raise TopicNotFound(f"topic {tp.topic!r} was deleted and created again")
                yield batch
                start = batch.end_offset + 1
            if start < stop:
                raise TopicNotFound(f"the log of {tp} ends before offset {start} now")
            return
        columns = decode_located(tp, extent.start_offset, extent.end_offset, extent, data)
        yield Batch(tp, start, slice_columns(columns, start - extent.start_offset, stop - extent.start_offset))
    except (BlobNotFound, CorruptBatch, InconsistentReadState) as error:
        lose(f"{_records(tp, start, stop)} are damaged: {error} (blob {extent.data_uri})", fail=fail_on_data_loss)
    except OffsetOutOfRange as error:
        # What ends before the plan is another topic of that name, or a restored one.
        why = "retention" if error.offset < error.log_start_offset else "deletion"
        lose(f"{_records(tp, start, stop)} are gone by {why}: {error}", fail=fail_on_data_loss)
    except (TopicNotFound, PartitionNotInitialized) as error:
        lose(f"{_records(tp, start, stop)} are gone by deletion: {error}", fail=fail_on_data_loss)


def _records(tp: TopicPartition, start: int, stop: int) -> str:
    return f"{stop - start} records of {tp}, offsets {start} to {stop - 1},"


def _cut_to_size(batch: Batch) -> Iterator[Batch]:
    """Yield views of the batch that are small enough to cross well into the JVM."""
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
                pass  # a pin that is lost is made good by looking up again what it kept
            await asyncio.sleep(_PIN_RENEW_S)

    keeper = None if pin is None else asyncio.create_task(keep(pin))
    try:
        yield
    finally:
        if keeper is not None:
            keeper.cancel()
