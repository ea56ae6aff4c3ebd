"""Decodes rows of SlateDB into Arrow batches of the records that lie in a range."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any, Final

import numpy as np
import pyarrow as pa

from llog.keyed.encoding import entry_parts, unescape
from llog.keyed.model import LogEntry, ScanOptions
from llog.keyed.runs import decode, decode_head, unpacked_size
from llog.keyed.segments import EVERYTHING, Interval
from llog.keyed.slate import PAGE_ROWS_MAX, Rows

FIRST_PAGE_ROWS: Final = 8
FETCHED_ROWS_MAX: Final = 64
"""Few, because rows after small ones may be as large as runs get, and all are in memory."""


async def decode_rows(
    rows: Rows, sequences: Interval, times: Interval, options: ScanOptions, *, one_key: bool
) -> AsyncIterator[pa.RecordBatch]:
    """Yield the records of these rows, which are entries, in non-empty batches. With `one_key`, stop at the end of the
    range.
    """
    async for some in _pages_by_size(rows, options.batch_bytes):
        batch = _filter_batch(_decode_page(some), sequences, times)
        if batch.num_rows:
            yield batch
        if one_key and decode_head(some[-1].value).first >= sequences[1] - 1:
            return


async def _pages_by_size(rows: Rows, size_max: int) -> AsyncIterator[list[Any]]:
    """Yield all rows in order, in pages whose records take about `size_max` bytes; the first pages are small."""
    wanted = fetched = FIRST_PAGE_ROWS
    part: list[Any] = []
    size = 0
    while page := await rows.page(fetched):
        sizes = [unpacked_size(row.key, row.value) for row in page]
        for row, more in zip(page, sizes, strict=True):
            if part and size + more > size_max:
                yield part
                part, size = [], 0
            part.append(row)
            size += more
        if len(page) < fetched:
            break
        if len(part) >= wanted:
            yield part
            part, size, wanted = [], 0, min(4 * wanted, PAGE_ROWS_MAX)
        fetched = max(1, min(wanted, FETCHED_ROWS_MAX, size_max * len(page) // max(1, sum(sizes))))
    if part:
        yield part


async def limit_records(found: AsyncIterator[pa.RecordBatch], limit: int | None) -> AsyncIterator[pa.RecordBatch]:
    left = limit
    if left is not None and left <= 0:
        return
    async for batch in found:
        if left is None:
            yield batch
            continue
        yield batch.slice(0, left)
        left -= batch.num_rows
        if left <= 0:
            return


def entries_of(batch: pa.RecordBatch) -> Iterator[LogEntry]:
    """Return one object per record, for reads so small that the cost does not matter."""
    keys, sequences, values = (batch.column(number).to_pylist() for number in range(3))
    return map(LogEntry, keys, sequences, values)


def sort_by_sequence(found: list[pa.RecordBatch]) -> pa.RecordBatch:
    """Return the records of all batches as one, sorted by sequence."""
    joined = pa.Table.from_batches(found).combine_chunks().to_batches()[0]
    sequences = joined.column("sequence").to_numpy()
    if (sequences[1:] > sequences[:-1]).all():
        return joined
    return joined.take(pa.array(np.argsort(sequences)))


def _decode_page(page: list[Any]) -> pa.RecordBatch:
    keys: list[bytes] = []
    last, key = None, b""
    for row in page:
        escaped, _ = entry_parts(row.key)
        if escaped != last:
            last, key = escaped, unescape(escaped)
        keys.append(key)
    return decode(keys, [row.value for row in page])


def _filter_batch(batch: pa.RecordBatch, sequences: Interval, times: Interval) -> pa.RecordBatch:
    numbers = batch.column("sequence").to_numpy()
    kept = (numbers >= sequences[0]) & (numbers < sequences[1])
    if times != EVERYTHING:
        appended = batch.column("append_time").cast(pa.int64()).to_numpy()
        kept &= (appended >= times[0]) & (appended < times[1])
    if kept.all():
        return batch
    wanted = np.flatnonzero(kept)
    if len(wanted) == 0:
        return batch.slice(0, 0)
    if wanted[-1] - wanted[0] == len(wanted) - 1:
        return batch.slice(int(wanted[0]), len(wanted))
    return batch.filter(pa.array(kept))
