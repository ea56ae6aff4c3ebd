"""Scans of a keyed log, a page at a time.

All pages of a scan together are the log as it was when the first was read: the cursor carries the sequence that was
next then, and the last record of the page. Many keys are scanned by segment, in it by key, of a key by sequence.
"""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Final, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from llog.base.units import parse_base64url
from llog.broker.keyed.messages import KeysQuery, Number, ScanQuery
from llog.errors import InvalidArgument
from llog.keyed import KeyedLogReader, KeyRange, ScanOptions, SeqRange, TimeRange
from llog.keyed.encoding import after_prefix
from llog.keyed.freshness import reach
from llog.keyed.model import NUMBER_MAX

_RECORD_OVERHEAD: Final = 64
"""What a record counts for besides its bytes: about what its numbers and names take in JSON."""


class Cursor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where a scan goes on: behind the record `sequence` of `key`. Nothing from `end` on belongs to it."""

    end: Number
    sequence: Number
    key: bytes


class Page(NamedTuple):
    batches: list[pa.RecordBatch]
    cursor: str | None
    """None: there is no more."""


async def scan_page(log: KeyedLogReader, asked: ScanQuery) -> Page:
    cursor = None if asked.cursor is None else _cursor(asked.cursor)
    if cursor is None:
        end = min(NUMBER_MAX if asked.end is None else asked.end, await log.next_sequence())
    else:
        end = cursor.end
        await reach(log, end)
    page = _Filling(asked.limit, asked.max_bytes)
    async with aclosing(_found(log, asked, cursor, end)) as found:
        async for batch in found:
            page.add(batch)
            if page.is_full:
                break
    last = page.batches[-1] if page.batches and page.is_full else None
    if last is None:
        return Page(page.batches, None)
    behind = Cursor(end, last.column("sequence")[-1].as_py(), last.column("key")[-1].as_py())
    return Page(page.batches, base64.urlsafe_b64encode(msgspec.msgpack.encode(behind)).rstrip(b"=").decode())


async def keys_page(log: KeyedLogReader, asked: KeysQuery) -> tuple[pa.BinaryArray, bool]:
    """The first keys after the one asked for, and whether there may be more."""
    taken: list[pa.BinaryArray] = []
    left = asked.limit
    async for page in log.keys_batches(asked.prefix, SeqRange(asked.segment_start, asked.segment_end)):
        if asked.after_key is not None:
            if page[-1].as_py() <= asked.after_key:
                continue
            page = page.filter(pc.greater(page, pa.scalar(asked.after_key, pa.binary())))
        taken.append(page.slice(0, left))
        left -= len(taken[-1])
        if left == 0:
            break
    return pa.concat_arrays([*taken, pa.array([], pa.binary())]), left == 0


async def _found(
    log: KeyedLogReader, asked: ScanQuery, cursor: Cursor | None, end: int
) -> AsyncGenerator[pa.RecordBatch, None]:
    options = ScanOptions(
        time_range=TimeRange(asked.start_time_ms, asked.end_time_ms), limit=asked.limit, batch_bytes=asked.max_bytes
    )
    start = asked.start or 0
    if asked.key is not None:
        start = start if cursor is None else max(start, cursor.sequence + 1)
        async for batch in log.scan_batches(asked.key, SeqRange(start, end), options):
            yield batch
        return
    keys = _key_range(asked)
    if cursor is not None:
        # The rest of the segment that the page ended in, if it is still there; then those after it.
        at = cursor.sequence
        for segment in await log.segments(range(at, at + 1)):
            if segment.start_seq <= at < segment.end_seq:
                stop = min(end, segment.end_seq)
                async for batch in log.scan_batches(cursor.key, SeqRange(max(start, at + 1), stop), options):
                    yield batch
                rest = KeyRange(cursor.key + b"\x00", keys.end)
                async for batch in log.scan_keys_batches(rest, SeqRange(max(start, segment.start_seq), stop), options):
                    yield batch
                at = segment.end_seq - 1
        start = max(start, at + 1)
    async for batch in log.scan_keys_batches(keys, SeqRange(start, end), options):
        yield batch


def _key_range(asked: ScanQuery) -> KeyRange:
    if asked.prefix is None:
        return KeyRange(asked.key_start, asked.key_end)
    is_bounded = asked.prefix.rstrip(b"\xff") != b""
    return KeyRange(asked.prefix, after_prefix(asked.prefix) if is_bounded else None)


def _cursor(text: str) -> Cursor:
    try:
        return msgspec.msgpack.decode(parse_base64url(text), type=Cursor)
    except msgspec.DecodeError:
        raise InvalidArgument(
            f"cursor is {text[:40]!r}, which no answer of this broker had: begin without one"
        ) from None


class _Filling:
    """Batches up to a number of records and bytes; one record goes in however large it is."""

    def __init__(self, limit: int, max_bytes: int) -> None:
        self.batches: list[pa.RecordBatch] = []
        self.is_full = False
        self._limit = limit
        self._left = max_bytes

    def add(self, batch: pa.RecordBatch) -> None:
        lengths = pc.add(pc.binary_length(batch.column("key")), pc.binary_length(batch.column("value")))
        sizes = np.cumsum(lengths.to_numpy().astype(np.int64) + _RECORD_OVERHEAD)
        fits = min(self._limit, int(np.searchsorted(sizes, self._left, "right")))
        if not self.batches:
            fits = max(fits, 1)
        fits = min(fits, batch.num_rows)
        if fits:
            self.batches.append(batch.slice(0, fits))
            self._limit -= fits
            self._left -= int(sizes[fits - 1])
        self.is_full = fits < batch.num_rows or self._limit == 0
