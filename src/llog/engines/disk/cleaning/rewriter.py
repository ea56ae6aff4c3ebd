"""Sealed segments without the records that key compaction removes: which ones go, and the frames that hold the rest.

Frames are joined into larger ones on the way, since what is left of small ones is smaller still. Each covers the
offsets of those that it was made of, and has the highest times of the last of them, so times found before are found
again. A frame of which all stays, alone, keeps its body byte for byte. A frame whose producer may still repeat it stays
a frame of its own, even without records: it says who appended it. Which frames were one append is not kept: only
recovery asks, and it never cuts a sealed segment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from llog.batch.columns import Buffer, Columns, concat
from llog.batch.event_headers import deletions
from llog.engines.disk.cleaning.newest_offsets import Newest, Numbers
from llog.engines.disk.format.bodies import encode_body, parts_of
from llog.engines.disk.format.frames import KIND_NONE, Body, Frame, Located, Offsets, Scan, body_of, frame_parts
from llog.engines.disk.format.segment import Segment, Start
from llog.engines.disk.options import SegmentOptions
from llog.errors import CorruptBatch
from llog.log.producers import ProducerState, find_appended

BLOCK_BYTES: Final = 8 << 20
"""Frames are looked at so many at a time: enough for a lookup to be worth it, and few enough to hold in memory."""
JOINED_BYTES: Final = 256 << 10
"""Frames are joined up to this size: a reader of one record decodes a whole frame."""
_WINDOW: Final = 1 << 20

Mask = npt.NDArray[np.bool_]
Made = tuple[list[Buffer], Offsets | None]
"""A frame's parts, and its offsets if it is sparse."""


class Piece(NamedTuple):
    """A frame with its records."""

    frame: Frame
    body: Buffer
    columns: Columns | None
    """None if it has no records any more."""
    offsets: Numbers


class Tally(msgspec.Struct):
    """What a pass has met."""

    records: int = 0
    removed: int = 0
    deletions: int = 0
    """Kept, though they go one day."""


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """Which records stay: the newest of each key, and all without a key."""

    newest: Newest
    log_start: int
    """Records below go."""
    expired: int
    """Deletions below go."""
    needed: int
    """The record at this offset stays, whatever it is."""

    def kept(self, block: Sequence[Piece], tally: Tally) -> list[Mask]:
        """Of each piece, which records stay."""
        offsets = np.concatenate([piece.offsets for piece in block])
        rows, keys = keyed(block)
        gone = offsets < self.log_start
        gone[rows] |= self.newest.of(keys) > offsets[rows]
        deleting = np.zeros(len(offsets), np.bool_)
        deleting[rows] = _deleting(block)[rows]
        gone |= deleting & (offsets < self.expired)
        gone &= offsets != self.needed
        tally.records += len(offsets)
        tally.removed += int(np.count_nonzero(gone))
        tally.deletions += int(np.count_nonzero(deleting & ~gone & (offsets != self.needed)))
        return np.split(~gone, np.cumsum([len(piece.offsets) for piece in block])[:-1])


def blocks(segment: Segment, start: Start, stop: int, check: Callable[[], None]) -> Iterator[list[Piece]]:
    """The frames of a sealed segment from `start` on; `CorruptBatch` if they do not reach up to `stop`. `check` may
    raise, to end it.
    """
    block: list[Piece] = []
    size = 0
    scan = segment.scan(start, segment.size(), window=_WINDOW)
    for located in scan:
        check()
        try:
            piece = _piece(scan, located)
        except CorruptBatch as error:
            raise CorruptBatch(_damaged(segment, located.position, str(error))) from error
        block.append(piece)
        size += located.frame.length
        if size >= BLOCK_BYTES:
            yield block
            block, size = [], 0
    if scan.problem is not None or scan.offset != stop:
        raise CorruptBatch(_damaged(segment, scan.position, scan.problem or f"it ends before offset {stop - 1}"))
    if block:
        yield block


def keyed(block: Sequence[Piece]) -> tuple[npt.NDArray[np.intp], pa.BinaryArray]:
    """The records that have keys, counted from the first of the block, and those keys."""
    rows: list[npt.NDArray[np.intp]] = []
    keys: list[pa.BinaryArray] = []
    first = 0
    for piece in block:
        found = None if piece.columns is None else piece.columns.keys
        if found is not None and found.null_count:
            rows.append(first + np.flatnonzero(found.is_valid().to_numpy(zero_copy_only=False)))
            keys.append(found.drop_null())
        elif found is not None:
            rows.append(np.arange(first, first + len(found)))
            keys.append(found)
        first += len(piece.offsets)
    if not rows:
        return np.empty(0, np.intp), pa.array([], pa.binary())
    return np.concatenate(rows), pa.concat_arrays(keys)


class Rewriter:
    """Makes the frames of the segments that take the place of others, from `base` on."""

    def __init__(
        self,
        base: int,
        rule: Rule,
        options: SegmentOptions,
        producers: Mapping[str, ProducerState] | None,
    ) -> None:
        self._base = base
        """The first offset that no frame covers yet."""
        self._rule = rule
        self._codec = options.codec
        self._frame_bytes = options.frame_bytes
        self._producers = producers
        self._joined: list[tuple[Piece, Mask]] = []
        self._last: Frame | None = None
        """The last frame of those that are to be covered."""
        self._size = 0

    def frames(self, pieces: Iterable[list[Piece]], tally: Tally) -> Iterator[Made]:
        for block in pieces:
            for piece, mask in zip(block, self._rule.kept(block, tally), strict=True):
                alone = self._is_remembered(piece.frame)
                kept = int(np.count_nonzero(mask))
                size = piece.frame.body_length * kept // len(mask) if kept else 0
                if alone or (self._joined and self._size + size > self._frame_bytes):
                    yield from self._flush()
                self._last = piece.frame
                if kept:
                    self._joined.append((piece, mask))
                    self._size += size
                if alone or self._size >= JOINED_BYTES:
                    yield from self._flush()
        yield from self._flush()

    def _is_remembered(self, frame: Frame) -> bool:
        """Whether the log must be able to tell later that this was appended; always, if nobody knows what it
        remembers.
        """
        if frame.producer is None:
            return False
        return self._producers is None or find_appended(self._producers, frame.producer, frame.sequence) is not None

    def _flush(self) -> Iterator[Made]:
        """One frame of what was joined, empty if nothing is left of it."""
        last, joined = self._last, self._joined
        if last is None:
            return
        span = last.next_offset - self._base
        producer = last.producer if self._is_remembered(last) else None
        body, offsets = self._body(joined, last)
        relative = None if len(offsets) == span else (offsets - self._base).astype(np.uint32)
        parts = frame_parts(
            body,
            self._base,
            last.max_append_ms,
            last.max_timestamp_ms,
            producer=producer,
            sequence=last.sequence if producer is not None else 0,
            offsets=relative,
            span=span,
        )
        self._base = last.next_offset
        self._joined, self._last, self._size = [], None, 0
        yield parts, relative

    def _body(self, joined: list[tuple[Piece, Mask]], last: Frame) -> tuple[Body, Numbers]:
        if not joined:
            empty = body_of(
                [], records=0, append_ms=last.append_ms, timestamp_max=last.max_timestamp_ms, kind=KIND_NONE
            )
            return empty, np.empty(0, np.int64)
        if len(joined) == 1 and joined[0][1].all():
            piece = joined[0][0]
            frame = piece.frame
            same = Body(
                [piece.body],
                frame.body_length,
                frame.body_crc,
                frame.records,
                frame.append_ms,
                frame.max_append_ms,
                frame.max_timestamp_ms,
                frame.kind,
            )
            return same, piece.offsets
        columns = concat([_filtered(piece.columns, mask) for piece, mask in joined if piece.columns is not None])
        return encode_body(columns, self._codec), np.concatenate([piece.offsets[mask] for piece, mask in joined])


def _piece(scan: Scan, located: Located) -> Piece:
    frame = located.frame
    if not frame.records:
        return Piece(frame, b"", None, np.empty(0, np.int64))
    if frame.sparse:
        offsets = frame.base_offset + scan.offsets(located).astype(np.int64)
    else:
        offsets = np.arange(frame.base_offset, frame.next_offset)
    # As if it had no gaps: all its records together.
    ((_, columns),) = parts_of(scan, Located(located.position, frame._replace(sparse=False)))
    return Piece(frame, scan.unchecked_body(located), columns, offsets)


def _deleting(block: Sequence[Piece]) -> Mask:
    nothing = np.empty(0, np.bool_)
    return np.concatenate([nothing if piece.columns is None else deletions(piece.columns) for piece in block])


def _filtered(columns: Columns, mask: Mask) -> Columns:
    if mask.all():
        return columns
    chosen = pa.array(mask)
    runs = np.array(columns.append_runs, np.int64)
    counts = np.add.reduceat(mask.astype(np.int64), np.cumsum(runs[:, 0]) - runs[:, 0])
    left = zip(counts.tolist(), runs[:, 1].tolist(), strict=True)
    return Columns(
        values=columns.values.filter(chosen),
        keys=None if columns.keys is None else columns.keys.filter(chosen),
        timestamps=None if columns.timestamps is None else columns.timestamps.filter(chosen),
        headers=None if columns.headers is None else columns.headers.filter(chosen),
        append_runs=tuple((count, ms) for count, ms in left if count),
    )


def _damaged(segment: Segment, position: int, why: str) -> str:
    return (
        f"{segment.path} is damaged at byte {position}, and cannot be compacted: {why}. `llog verify` shows what is "
        "damaged; trimming the log beyond it lets compaction go on"
    )
