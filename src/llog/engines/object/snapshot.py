"""Where a range of records lies, resolved once and small enough to plan reads over millions of index entries.

Take a pin first (`pins.pin`): what a snapshot names is then kept from the collector while the pin lives. Confirm the
reads after it (`stores.meta.confirmed`): in a state from before the pin, the snapshot may name what the collector has
deleted.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from llog.engines.object.reader import Piece, Reader, parts_of, pending_pieces
from llog.errors import InconsistentReadState, OffsetOutOfRange
from llog.log.keys import PartitionKeys, end_offset_of
from llog.log.log import Log
from llog.log.records import Compaction, Cursor, IndexEntry, Kind, decode
from llog.model import TopicPartition
from llog.stores.meta import after, certain

_PAGE = 5000
_ATTEMPTS = 3


class Extent(NamedTuple):
    """Consecutive records in one range of bytes of one blob."""

    start_offset: int
    end_offset: int
    data_uri: str
    byte_offset: int
    byte_length: int
    encoding: str


class Snapshot:
    """Extents by rising offset, without gaps or overlaps, in columns: a tenth of what as many objects would take."""

    def __init__(self, tp: TopicPartition) -> None:
        self.tp = tp
        self._numbers = array("q")
        self._uris: list[str] = []
        self._encodings: list[str] = []

    def __len__(self) -> int:
        return len(self._uris)

    def __getitem__(self, place: int) -> Extent:
        place = range(len(self))[place]
        start, end, byte_offset, byte_length = self._numbers[4 * place : 4 * place + 4]
        return Extent(start, end, self._uris[place], byte_offset, byte_length, self._encodings[place])

    def __iter__(self) -> Iterator[Extent]:
        return (self[place] for place in range(len(self)))

    @property
    def byte_lengths(self) -> npt.NDArray[np.int64]:
        return self._table[:, 3]

    @property
    def _table(self) -> npt.NDArray[np.int64]:
        """A copy: an array that numpy looks into cannot grow."""
        return np.array(self._numbers, np.int64).reshape(-1, 4)

    def part(self, first: int, last: int) -> Snapshot:
        """The extents from place `first` up to `last`, exclusive."""
        part = Snapshot(self.tp)
        part._numbers = self._numbers[4 * first : 4 * last]
        part._uris, part._encodings = self._uris[first:last], self._encodings[first:last]
        return part

    def add(self, start_offset: int, end_offset: int, entry: IndexEntry) -> None:
        """Adds the extents of an entry that ends above all others, and drops those inside it: a zombie's in a compacted
        range.
        """
        numbers = self._numbers
        if numbers and numbers[-4] >= start_offset:
            self.cut(start_offset)
        for start, end, part in parts_of(Piece(start_offset, end_offset, entry)):
            numbers.extend((start, end, part.byte_offset, part.byte_length))
            # Partitions share blobs: one string for each, over all snapshots.
            self._uris.append(sys.intern(part.data_uri))
            self._encodings.append(sys.intern(part.encoding))

    def cut(self, stop: int) -> None:
        """Drops the extents that begin at `stop` or above."""
        while self._uris and self._numbers[-4] >= stop:
            del self._numbers[-4:], self._uris[-1], self._encodings[-1]

    def skip(self, start: int) -> None:
        """Drops the extents that end below `start`: the first batches of a body that has several."""
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
    """The extents that hold [start, stop), the first and last of which may reach beyond it. Reads no blob."""
    taking = partial(_taken, log, tp, start, stop)
    return await certain(log.meta, taking, InconsistentReadState, OffsetOutOfRange)


async def _taken(log: Log, tp: TopicPartition, start: int, stop: int) -> Snapshot:
    for _ in range(_ATTEMPTS - 1):
        try:
            return await _resolved(log, tp, start, stop)
        except InconsistentReadState:
            pass  # trimmed or deleted since the control record was read: what that says now is what counts
    return await _resolved(log, tp, start, stop)


async def _resolved(log: Log, tp: TopicPartition, start: int, stop: int) -> Snapshot:
    keys, control = await Reader(log).control(tp)
    if start < control.log_start_offset or stop > control.sequence_counter:
        outside = start if start < control.log_start_offset else stop
        raise OffsetOutOfRange(str(tp), outside, control.log_start_offset, control.sequence_counter)
    snapshot = Snapshot(tp)
    if start >= stop:
        return snapshot
    compacted = await _compacted_through(log, keys)
    key, end, covered, more = keys.entry(start), after(keys.index), start - 1, True
    while more:
        page = await log.meta.range(key, end, _PAGE)
        for found in page:
            entry = decode(IndexEntry, found.value, found.key)
            covered = end_offset_of(found.key)
            snapshot.add(covered - entry.msg_count + 1, covered, entry)
            # A WAL entry below that may be a zombie's, whose blob is gone: then a COMPACTED one above covers it.
            if covered >= stop - 1 and (entry.kind is Kind.COMPACTED or covered > compacted):
                more = False
                break
        if len(page) < _PAGE:
            break
        key = page[-1].key + "\x00"
    snapshot.cut(stop)
    for piece in pending_pieces(control):
        if piece.end_offset > covered and piece.start_offset < stop:
            snapshot.add(*piece)
    snapshot.skip(start)
    snapshot.check_whole(start, stop)
    return snapshot


async def _compacted_through(log: Log, keys: PartitionKeys) -> int:
    """No COMPACTED entry ends above this. The breadcrumb goes before the cursor, for it is cleared after that has
    moved.
    """
    found = await log.meta.get(keys.compaction)
    begun = 0 if found is None else decode(Compaction, found.value, found.key).end_offset
    found = await log.meta.get(keys.cursor)
    return max(begun, 0 if found is None else decode(Cursor, found.value, found.key).offset - 1)
