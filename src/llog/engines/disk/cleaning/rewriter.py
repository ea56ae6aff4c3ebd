"""Rewrites sealed segments for key compaction: decides which records stay, and makes the frames that hold them.

Frames are joined into larger ones on the way, since what is left of small ones is smaller still. A joined frame covers
the offsets of its sources and has the highest times of the last one, so lookups by time find the same frames. A frame
that is not joined, and of which all records stay, keeps its body byte for byte. A frame whose producer may still repeat
it stays a frame of its own, even without records, because it names its producer. Which frames were one append is not
kept: only recovery needs it, and recovery never cuts a sealed segment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from llog.batch.columns import Buffer, Columns, concat
from llog.batch.event_headers import deletion_mask
from llog.engines.disk.cleaning.newest_offsets import NewestOffsets, Numbers
from llog.engines.disk.format.bodies import decode_frame, encode_body
from llog.engines.disk.format.frames import KIND_NONE, Body, Frame, LocatedFrame, Offsets, Scan, frame_parts, make_body
from llog.engines.disk.format.segment import FrameStart, Segment
from llog.engines.disk.options import SegmentOptions
from llog.errors import CorruptBatch
from llog.log.producers import ProducerState, find_appended

BLOCK_BYTES: Final = 8 << 20
"""Frames are processed in blocks of this size: large enough to amortize a lookup, small enough to hold in memory."""
JOINED_BYTES: Final = 256 << 10
"""Frames are joined up to this size: a reader of one record decodes a whole frame."""
_WINDOW: Final = 1 << 20

Mask = npt.NDArray[np.bool_]
FrameBytes = tuple[list[Buffer], Offsets | None]
"""A frame's parts, and its offsets if it is sparse."""


class DecodedFrame(NamedTuple):
    """A frame with its body, its records and their offsets."""

    frame: Frame
    body: Buffer
    columns: Columns | None
    """None if the frame has no records any more."""
    offsets: Numbers


class Tally(msgspec.Struct):
    """What a pass has found."""

    records: int = 0
    removed: int = 0
    deletions: int = 0
    """Deletions that stay for now, and are removed by a later pass."""


class KeepRule(msgspec.Struct, frozen=True, kw_only=True):
    """Decides which records stay: the newest of each key, and all without a key."""

    newest: NewestOffsets
    log_start: int
    """Records below this offset are removed."""
    expired: int
    """Deletions below this offset are removed."""
    needed: int
    """The record at this offset always stays."""

    def select(self, block: Sequence[DecodedFrame], tally: Tally) -> list[Mask]:
        """Return, for each frame of the block, which of its records stay."""
        offsets = np.concatenate([decoded.offsets for decoded in block])
        rows, keys = keys_in_block(block)
        gone = offsets < self.log_start
        gone[rows] |= self.newest.of(keys) > offsets[rows]
        deleting = np.zeros(len(offsets), np.bool_)
        deleting[rows] = _deletion_mask(block)[rows]
        gone |= deleting & (offsets < self.expired)
        gone &= offsets != self.needed
        tally.records += len(offsets)
        tally.removed += int(np.count_nonzero(gone))
        tally.deletions += int(np.count_nonzero(deleting & ~gone & (offsets != self.needed)))
        return np.split(~gone, np.cumsum([len(decoded.offsets) for decoded in block])[:-1])


def read_blocks(
    segment: Segment, start: FrameStart, stop: int, check: Callable[[], None]
) -> Iterator[list[DecodedFrame]]:
    """Yield the frames of a sealed segment from `start` on, in blocks. Raises `CorruptBatch` if they end before `stop`,
    and whatever `check`, which is called before each frame, raises.
    """
    block: list[DecodedFrame] = []
    size = 0
    scan = segment.scan(start, segment.size(), window=_WINDOW)
    for located in scan:
        check()
        try:
            decoded = _decode_frame(scan, located)
        except CorruptBatch as error:
            raise CorruptBatch(_damage_message(segment, located.position, str(error))) from error
        block.append(decoded)
        size += located.frame.length
        if size >= BLOCK_BYTES:
            yield block
            block, size = [], 0
    if scan.problem is not None or scan.offset != stop:
        raise CorruptBatch(_damage_message(segment, scan.position, scan.problem or f"it ends before offset {stop - 1}"))
    if block:
        yield block


def keys_in_block(block: Sequence[DecodedFrame]) -> tuple[npt.NDArray[np.intp], pa.BinaryArray]:
    """Return the row numbers, within the block, of the records that have keys, and those keys."""
    rows: list[npt.NDArray[np.intp]] = []
    keys: list[pa.BinaryArray] = []
    first = 0
    for decoded in block:
        found = None if decoded.columns is None else decoded.columns.keys
        if found is not None and found.null_count:
            rows.append(first + np.flatnonzero(found.is_valid().to_numpy(zero_copy_only=False)))
            keys.append(found.drop_null())
        elif found is not None:
            rows.append(np.arange(first, first + len(found)))
            keys.append(found)
        first += len(decoded.offsets)
    if not rows:
        return np.empty(0, np.intp), pa.array([], pa.binary())
    return np.concatenate(rows), pa.concat_arrays(keys)


class Rewriter:
    """Makes the frames of a segment that replaces others, from `base` on."""

    def __init__(
        self,
        base: int,
        rule: KeepRule,
        options: SegmentOptions,
        producers: Mapping[str, ProducerState] | None,
    ) -> None:
        self._base = base
        """The first offset that no frame covers yet."""
        self._rule = rule
        self._codec = options.codec
        self._frame_bytes = options.frame_bytes
        self._producers = producers
        self._joined: list[tuple[DecodedFrame, Mask]] = []
        self._last: Frame | None = None
        """The last source frame that the next frame is to cover."""
        self._size = 0

    def frames(self, blocks: Iterable[list[DecodedFrame]], tally: Tally) -> Iterator[FrameBytes]:
        for block in blocks:
            for decoded, mask in zip(block, self._rule.select(block, tally), strict=True):
                alone = self._is_remembered(decoded.frame)
                kept = int(np.count_nonzero(mask))
                size = decoded.frame.body_length * kept // len(mask) if kept else 0
                if alone or (self._joined and self._size + size > self._frame_bytes):
                    yield from self._flush()
                self._last = decoded.frame
                if kept:
                    self._joined.append((decoded, mask))
                    self._size += size
                if alone or self._size >= JOINED_BYTES:
                    yield from self._flush()
        yield from self._flush()

    def _is_remembered(self, frame: Frame) -> bool:
        """Whether the log still needs this frame to recognize a repeated append; True if its producers are unknown."""
        if frame.producer is None:
            return False
        return self._producers is None or find_appended(self._producers, frame.producer, frame.sequence) is not None

    def _flush(self) -> Iterator[FrameBytes]:
        """Yield one frame of the joined records; an empty one if none stays."""
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

    def _body(self, joined: list[tuple[DecodedFrame, Mask]], last: Frame) -> tuple[Body, Numbers]:
        if not joined:
            empty = make_body(
                [], records=0, append_ms=last.append_ms, timestamp_max=last.max_timestamp_ms, kind=KIND_NONE
            )
            return empty, np.empty(0, np.int64)
        if len(joined) == 1 and joined[0][1].all():
            decoded = joined[0][0]
            frame = decoded.frame
            same = Body(
                [decoded.body],
                frame.body_length,
                frame.body_crc,
                frame.records,
                frame.append_ms,
                frame.max_append_ms,
                frame.max_timestamp_ms,
                frame.kind,
            )
            return same, decoded.offsets
        columns = concat(
            [_filter_columns(decoded.columns, mask) for decoded, mask in joined if decoded.columns is not None]
        )
        return encode_body(columns, self._codec), np.concatenate([decoded.offsets[mask] for decoded, mask in joined])


def _decode_frame(scan: Scan, located: LocatedFrame) -> DecodedFrame:
    frame = located.frame
    if not frame.records:
        return DecodedFrame(frame, b"", None, np.empty(0, np.int64))
    if frame.sparse:
        offsets = frame.base_offset + scan.offsets(located).astype(np.int64)
    else:
        offsets = np.arange(frame.base_offset, frame.next_offset)
    # Decoded as if it had no gaps, to get all records as one part.
    ((_, columns),) = decode_frame(scan, LocatedFrame(located.position, frame._replace(sparse=False)))
    return DecodedFrame(frame, scan.unchecked_body(located), columns, offsets)


def _deletion_mask(block: Sequence[DecodedFrame]) -> Mask:
    nothing = np.empty(0, np.bool_)
    return np.concatenate([nothing if each.columns is None else deletion_mask(each.columns) for each in block])


def _filter_columns(columns: Columns, mask: Mask) -> Columns:
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


def _damage_message(segment: Segment, position: int, why: str) -> str:
    return (
        f"{segment.path} is damaged at byte {position}, and cannot be compacted: {why}. `llog verify` lists the "
        "damage; compaction continues once the log is trimmed beyond it"
    )
