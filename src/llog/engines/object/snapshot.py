"""Snapshots: where a range of records lies, resolved once, compact enough to plan reads over millions of index entries.

Take a pin before a snapshot (`pins.pin`), so that the collector keeps the blobs that the snapshot names while the pin
lives. Confirm the snapshot's reads (`stores.meta.read_confirmed`): a stale read, from before the pin, may name blobs
that the collector has deleted.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from llog.engines.object.reader import EntrySpan, Reader, parts_of, pending_spans
from llog.errors import InconsistentReadState, OffsetOutOfRange
from llog.log.inline import is_inline
from llog.log.keys import PartitionKeys, end_offset_of
from llog.log.log import Log
from llog.log.records import Compaction, CompactionCursor, IndexEntry, Kind, decode
from llog.model import TopicPartition
from llog.stores.meta import prefix_end, read_confirming_errors

_PAGE = 5000
_ATTEMPTS = 3


class Extent(NamedTuple):
    """Consecutive records in one range of bytes of one blob; inline records are in `data_uri` itself."""

    start_offset: int
    end_offset: int
    data_uri: str
    byte_offset: int
    byte_length: int
    encoding: str


class Snapshot:
    """Extents by rising offset, without gaps or overlaps, stored in columns: a tenth of the memory of as many
    objects.
    """

    def __init__(self, tp: TopicPartition) -> None:
        self.tp = tp
        self._numbers = array("q")
        self._uris: list[str] = []
        self._encodings: list[str] = []

    def __len__(self) -> int:
        return len(self._uris)

    def __getitem__(self, position: int) -> Extent:
        position = range(len(self))[position]
        start, end, byte_offset, byte_length = self._numbers[4 * position : 4 * position + 4]
        return Extent(start, end, self._uris[position], byte_offset, byte_length, self._encodings[position])

    def __iter__(self) -> Iterator[Extent]:
        return (self[position] for position in range(len(self)))

    @property
    def byte_lengths(self) -> npt.NDArray[np.int64]:
        return self._table[:, 3]

    @property
    def _table(self) -> npt.NDArray[np.int64]:
        """A copy of the numbers: an array that shares its buffer with numpy cannot grow."""
        return np.array(self._numbers, np.int64).reshape(-1, 4)

    @property
    def inline_bytes(self) -> int:
        """The bytes of the inline records, which the snapshot itself carries."""
        return sum(extent.byte_length for extent in self if is_inline(extent.data_uri))

    def move(self, position: int, data_uri: str, byte_offset: int, byte_length: int) -> None:
        """Let the extent at this position lead to a copy of its records in a blob."""
        self._numbers[4 * position + 2] = byte_offset
        self._numbers[4 * position + 3] = byte_length
        self._uris[position] = sys.intern(data_uri)

    def part(self, first: int, last: int) -> Snapshot:
        """Return the extents from position `first` up to `last`, exclusive."""
        part = Snapshot(self.tp)
        part._numbers = self._numbers[4 * first : 4 * last]
        part._uris, part._encodings = self._uris[first:last], self._encodings[first:last]
        return part

    def add(self, start_offset: int, end_offset: int, entry: IndexEntry) -> None:
        """Add the extents of an entry that ends above all others, and drop those inside it, which a stalled writer left
        in a compacted range.
        """
        numbers = self._numbers
        if numbers and numbers[-4] >= start_offset:
            self.cut(start_offset)
        for start, end, part in parts_of(EntrySpan(start_offset, end_offset, entry)):
            numbers.extend((start, end, part.byte_offset, part.byte_length))
            # Partitions share blobs, and all snapshots share one string for each blob.
            self._uris.append(part.data_uri if is_inline(part.data_uri) else sys.intern(part.data_uri))
            self._encodings.append(sys.intern(part.encoding))

    def cut(self, stop: int) -> None:
        """Drop the extents that begin at `stop` or above."""
        while self._uris and self._numbers[-4] >= stop:
            del self._numbers[-4:], self._uris[-1], self._encodings[-1]

    def skip(self, start: int) -> None:
        """Drop the extents that end below `start`: the first batches of a body with several."""
        first = 0
        while first < len(self) and self._numbers[4 * first + 1] < start:
            first += 1
        del self._numbers[: 4 * first], self._uris[:first], self._encodings[:first]

    def check_whole(self, start: int, stop: int) -> None:
        starts, ends = self._table[:, 0], self._table[:, 1]
        if len(self) == 0 or starts[0] > start:
            expected = start
        else:
            breaks = np.flatnonzero(starts[1:] != ends[:-1] + 1)
            expected = int(ends[breaks[0] if len(breaks) else -1]) + 1
        if expected < stop:
            raise InconsistentReadState(
                f"the index of {self.tp} has a gap at offset {expected}: records up to {stop - 1} should be there"
            )


async def take_snapshot(log: Log, tp: TopicPartition, start: int, stop: int) -> Snapshot:
    """Return the extents that hold [start, stop); the first and the last may reach beyond it. Reads no blob."""
    take = partial(_take, log, tp, start, stop)
    return await read_confirming_errors(log.meta, take, InconsistentReadState, OffsetOutOfRange)


async def _take(log: Log, tp: TopicPartition, start: int, stop: int) -> Snapshot:
    for _ in range(_ATTEMPTS - 1):
        try:
            return await _resolve(log, tp, start, stop)
        except InconsistentReadState:
            pass  # Records were trimmed or deleted since the control record was read: read it again.
    return await _resolve(log, tp, start, stop)


async def _resolve(log: Log, tp: TopicPartition, start: int, stop: int) -> Snapshot:
    keys, control = await Reader(log).control(tp)
    if start < control.log_start_offset or stop > control.next_offset:
        outside = start if start < control.log_start_offset else stop
        raise OffsetOutOfRange(str(tp), outside, control.log_start_offset, control.next_offset)
    snapshot = Snapshot(tp)
    if start >= stop:
        return snapshot
    compacted = await _compacted_end(log, keys)
    key, end, covered, more, first = keys.entry(start), prefix_end(keys.index), start - 1, True, 0
    is_last = False
    while more:
        page = await log.meta.range(key, end, _PAGE)
        for found in page:
            entry = decode(IndexEntry, found.value, found.key)
            following = end_offset_of(found.key) - entry.msg_count + 1
            if is_last and following > first:
                more = False
                break
            first, covered = following, end_offset_of(found.key)
            snapshot.add(first, covered, entry)
            # A stalled writer may have left a WAL entry below the compacted end, and a stalled repair a COMPACTED one
            # inside another, whose blobs are gone: the COMPACTED entry above covers them.
            is_last = covered >= stop - 1 and (entry.kind is Kind.COMPACTED or covered > compacted)
        if len(page) < _PAGE:
            break
        key = page[-1].key + "\x00"
    snapshot.cut(stop)
    for span in pending_spans(control):
        if span.end_offset > covered and span.start_offset < stop:
            snapshot.add(*span)
    snapshot.skip(start)
    snapshot.check_whole(start, stop)
    return snapshot


async def _compacted_end(log: Log, keys: PartitionKeys) -> int:
    """Return the highest offset at which a COMPACTED entry can end.

    Reads the breadcrumb before the cursor, because a compactor moves the cursor before it clears the breadcrumb.
    """
    found = await log.meta.get(keys.compaction)
    begun = 0 if found is None else decode(Compaction, found.value, found.key).end_offset
    found = await log.meta.get(keys.cursor)
    return max(begun, 0 if found is None else decode(CompactionCursor, found.value, found.key).offset - 1)
