"""What a task does: GETs of byte ranges, batches out, in the order of the offsets.

Extents are fetched in windows of bounded size; within a window, all ranges of one blob are one request. While one window is handed
to Spark, the next is fetched.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import NamedTuple

from llog.batch.columns import byte_size, slice_columns
from llog.errors import (
    BlobNotFound,
    CorruptBatch,
    DataLoss,
    InconsistentReadState,
    LlogError,
    OffsetOutOfRange,
    PartitionNotInitialized,
    TopicNotFound,
)
from llog.partition.log import Log
from llog.partition.pins import renew
from llog.partition.reader import Batch, Reader, decode_located
from llog.partition.snapshot import Extent
from llog.spark.planning import Run
from llog.stores.blobs import Buffer

WINDOW_BYTES_MAX = 32 << 20
ROWS_PER_BATCH_MAX = 10_000
BYTES_PER_BATCH_MAX = 16 << 20
PIN_LEASE_MS = 300_000
_PIN_RENEW_MS = 60_000

logger = logging.getLogger("llog.spark")


class _Wanted(NamedTuple):
    run: Run
    extent: Extent


async def fetch_runs(
    log: Log, runs: Sequence[Run], *, pin: str | None, fail_on_data_loss: bool
) -> AsyncIterator[tuple[Run, Batch]]:
    """The batches of these runs, each with its run. Lost records raise `DataLoss`, or are skipped and logged."""
    lease = _Lease(log, pin)
    windows = _windows(runs)
    fetching: asyncio.Task[list[Buffer | LlogError]] | None = None
    current = next(windows, None)
    try:
        if current:
            fetching = asyncio.create_task(_fetch(log, current))
        while current and fetching:
            await lease.keep()
            fetched = await fetching
            following = next(windows, None)
            fetching = asyncio.create_task(_fetch(log, following)) if following else None
            for wanted, data in zip(current, fetched, strict=True):
                async for batch in _decoded(log, wanted, data, fail_on_data_loss):
                    for part in _sized(batch):
                        yield wanted.run, part
            current = following
    finally:
        if fetching:
            fetching.cancel()


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
    """The bytes of every extent, or why there are none."""
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


async def _decoded(
    log: Log, wanted: _Wanted, data: Buffer | LlogError, fail_on_data_loss: bool
) -> AsyncIterator[Batch]:
    """The wanted records of one extent."""
    (run, extent), tp = wanted, wanted.run.tp
    start, stop = max(run.start, extent.start_offset), min(run.stop, extent.end_offset + 1)
    try:
        if isinstance(data, LlogError):
            if isinstance(data, CorruptBatch):
                raise data
            # Compacted and collected since the plan was made, which an expired pin allows: the log knows where it lies now.
            async for batch in Reader(log).iter_from(tp, start, stop):
                yield batch
            return
        columns = decode_located(tp, extent.start_offset, extent.end_offset, extent, data)
        yield Batch(tp, start, slice_columns(columns, start - extent.start_offset, stop - extent.start_offset))
    except (BlobNotFound, CorruptBatch, InconsistentReadState) as error:
        _lost(f"records {start} to {stop - 1} of {tp} are damaged: {error} (blob {extent.data_uri})", fail_on_data_loss)
    except OffsetOutOfRange as error:
        _lost(f"records {start} to {stop - 1} of {tp} are gone by retention: {error}", fail_on_data_loss)
    except (TopicNotFound, PartitionNotInitialized) as error:
        _lost(f"records {start} to {stop - 1} of {tp} are gone by deletion: {error}", fail_on_data_loss)


def _lost(what: str, fail: bool) -> None:
    if fail:
        raise DataLoss(f"{what}. Set failOnDataLoss=false to go on without them")
    report_loss(what)


def report_loss(what: str) -> None:
    """Says what a read without `failOnDataLoss` goes without."""
    logger.warning("llog skipped: %s", what)


def _sized(batch: Batch) -> Iterator[Batch]:
    """Views of at most so many rows and about so many bytes: what crosses best into the JVM."""
    count = batch.columns.count
    rows = max(1, min(ROWS_PER_BATCH_MAX, count * BYTES_PER_BATCH_MAX // max(1, byte_size(batch.columns))))
    for first in range(0, count, rows):
        part = slice_columns(batch.columns, first, min(count, first + rows))
        yield Batch(batch.tp, batch.start_offset + first, part)


class _Lease:
    """Keeps the snapshot's pin alive while a task works on it."""

    def __init__(self, log: Log, pin: str | None) -> None:
        self._log, self._pin = log, pin
        self._renewed_ms = 0

    async def keep(self) -> None:
        now = self._log.runtime.now_ms()
        if self._pin is not None and now - self._renewed_ms > _PIN_RENEW_MS:
            self._renewed_ms = now
            await renew(self._log, self._pin, PIN_LEASE_MS)
