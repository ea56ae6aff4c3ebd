"""Scans of a keyed log, a page at a time.

All pages of a scan together show the log as it was when the first page was read: the token of the next page carries the
sequence that was next then, and the last record of the page before. A scan of many keys goes by segment, within a
segment by key, and within a key by sequence.
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
from llog.keyed.follower import wait_for_sequence
from llog.keyed.model import NUMBER_MAX

_RECORD_OVERHEAD: Final = 64
"""Bytes that a record counts for besides its own: about what its numbers and names take in JSON."""


class PageToken(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where a scan continues: behind the record `sequence` of `key`. Sequences from `end` on do not belong to it.

    Clients get it as text, under the name `cursor`.
    """

    end: Number
    sequence: Number
    key: bytes


class Page(NamedTuple):
    batches: list[pa.RecordBatch]
    next_token: str | None
    """The encoded `PageToken` of the next page; None if this is the last."""


async def scan_page(log: KeyedLogReader, query: ScanQuery) -> Page:
    token = None if query.cursor is None else _decode_token(query.cursor)
    if token is None:
        end = min(NUMBER_MAX if query.end is None else query.end, await log.next_sequence())
    else:
        end = token.end
        await wait_for_sequence(log, end)
    page = _PageBuilder(query.limit, query.max_bytes)
    async with aclosing(_scan(log, query, token, end)) as batches:
        async for batch in batches:
            page.add(batch)
            if page.is_full:
                break
    last = page.batches[-1] if page.batches and page.is_full else None
    if last is None:
        return Page(page.batches, None)
    token = PageToken(end, last.column("sequence")[-1].as_py(), last.column("key")[-1].as_py())
    return Page(page.batches, base64.urlsafe_b64encode(msgspec.msgpack.encode(token)).rstrip(b"=").decode())


async def keys_page(log: KeyedLogReader, query: KeysQuery) -> tuple[pa.BinaryArray, bool]:
    """Return the first keys after `after_key`, and whether there may be more."""
    taken: list[pa.BinaryArray] = []
    left = query.limit
    async for page in log.keys_batches(query.prefix, SeqRange(query.segment_start, query.segment_end)):
        if query.after_key is not None:
            if page[-1].as_py() <= query.after_key:
                continue
            page = page.filter(pc.greater(page, pa.scalar(query.after_key, pa.binary())))
        taken.append(page.slice(0, left))
        left -= len(taken[-1])
        if left == 0:
            break
    return pa.concat_arrays([*taken, pa.array([], pa.binary())]), left == 0


async def _scan(
    log: KeyedLogReader, query: ScanQuery, token: PageToken | None, end: int
) -> AsyncGenerator[pa.RecordBatch, None]:
    """Yield the records from the token on, below `end`."""
    options = ScanOptions(
        time_range=TimeRange(query.start_time_ms, query.end_time_ms), limit=query.limit, batch_bytes=query.max_bytes
    )
    start = query.start or 0
    if query.key is not None:
        start = start if token is None else max(start, token.sequence + 1)
        async for batch in log.scan_batches(query.key, SeqRange(start, end), options):
            yield batch
        return
    keys = _key_range(query)
    if token is not None:
        # First the rest of the segment that the last page ended in, if it still exists; then the segments after it.
        at = token.sequence
        for segment in await log.segments(range(at, at + 1)):
            if segment.start_seq <= at < segment.end_seq:
                stop = min(end, segment.end_seq)
                async for batch in log.scan_batches(token.key, SeqRange(max(start, at + 1), stop), options):
                    yield batch
                rest = KeyRange(token.key + b"\x00", keys.end)
                async for batch in log.scan_keys_batches(rest, SeqRange(max(start, segment.start_seq), stop), options):
                    yield batch
                at = segment.end_seq - 1
        start = max(start, at + 1)
    async for batch in log.scan_keys_batches(keys, SeqRange(start, end), options):
        yield batch


def _key_range(query: ScanQuery) -> KeyRange:
    if query.prefix is None:
        return KeyRange(query.key_start, query.key_end)
    is_bounded = query.prefix.rstrip(b"\xff") != b""
    return KeyRange(query.prefix, after_prefix(query.prefix) if is_bounded else None)


def _decode_token(text: str) -> PageToken:
    try:
        return msgspec.msgpack.decode(parse_base64url(text), type=PageToken)
    except msgspec.DecodeError:
        raise InvalidArgument(
            f"cursor is {text[:40]!r}, which no answer of this broker had: begin without one"
        ) from None


class _PageBuilder:
    """Collects batches up to a number of records and bytes; the first record goes in however large it is."""

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
