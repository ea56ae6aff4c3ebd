"""Frames: the checksummed units of a segment file, each at a multiple of 8 bytes. docs/segment-format.md defines every
byte.

 0  4  magic "LLF1"                          32  8  append time of the first record, ms (i64)
 4  4  crc32c of bytes 8.. up to the body    40  8  highest append time of the log up to this frame's end (i64)
 8  8  base offset (u64)                     48  8  highest effective timestamp of the log up to this frame's end (i64)
16  4  body length (u32)                     56  8  producer's sequence (i64), else 0
20  4  record count n (u32)                  64  4  span: how many offsets the frame covers (u32, >= n, >= 1)
24  4  checksum of the body (u32)            68  4  kind of body (u32): 0 none, 1 bytes-batch-v1
28  2  flags (u16): 1 sparse 2 producer      72  …  producer's id · sparse: u32[n] offsets relative to the base · body,
       4 more 8 continues                          each padded with zeros to 8 bytes
30  2  length of the producer's id (u16)

All numbers are little-endian. The body is opaque here: this layer checks only its length and its checksum, the crc32c
of the body's bytes from 8 on followed by its bytes 0 to 7. A body that begins with a crc32c of its own bytes from 8 on
therefore need not be summed twice.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
from awscrt.checksums import crc32c

from llog.batch.columns import Buffer
from llog.errors import CorruptBatch, InvalidArgument

MAGIC: Final = b"LLF1"
HEADER_BYTES: Final = 72
SPARSE: Final = 1
PRODUCER: Final = 2
MORE: Final = 4
"""The append goes on in the next frame."""
CONTINUES: Final = 8
"""The append began in an earlier frame."""
_FLAGS_KNOWN: Final = SPARSE | PRODUCER | MORE | CONTINUES
KIND_NONE: Final = 0
KIND_BATCH: Final = 1
SPAN_MAX: Final = (1 << 32) - 1
CHECKED_LAST: Final = 8
"""The number of bytes at the start of a body that enter its checksum after all others."""
_HEADER: Final = struct.Struct("<4sIQIIIHHqqqqII")
_CHECKED: Final = struct.Struct("<QIIIHHqqqqII")
_PADDING: Final = [bytes(-n % 8) for n in range(8)]

Offsets = npt.NDArray[np.uint32]


class Body(NamedTuple):
    """The bytes of a frame's body, and what the frame's header says about them."""

    parts: Sequence[Buffer]
    length: int
    crc: int
    records: int
    append_ms: int
    """Of its first record."""
    append_ms_max: int
    timestamp_max: int
    kind: int = KIND_BATCH


class Frame(NamedTuple):
    """The header of a frame. `length` is that of the whole frame; `body_start` counts from the frame's first byte."""

    base_offset: int
    span: int
    records: int
    append_ms: int
    max_append_ms: int
    max_timestamp_ms: int
    producer: str | None
    sequence: int
    kind: int
    sparse: bool
    more: bool
    continues: bool
    body_start: int
    body_length: int
    body_crc: int
    length: int

    @property
    def next_offset(self) -> int:
        return self.base_offset + self.span


def make_body(
    parts: Sequence[Buffer],
    *,
    records: int,
    append_ms: int,
    timestamp_max: int,
    append_ms_max: int | None = None,
    kind: int = KIND_BATCH,
) -> Body:
    """Make a frame's body of any bytes."""
    return Body(
        parts,
        sum(map(len, parts)),
        checksum(parts),
        records,
        append_ms,
        append_ms if append_ms_max is None else append_ms_max,
        timestamp_max,
        kind,
    )


def checksum(parts: Sequence[Buffer]) -> int:
    """Return the checksum of a body as its frame stores it."""
    if parts and len(parts[0]) < CHECKED_LAST:
        parts = [b"".join(parts)]
    if not parts:
        return 0
    crc = crc32c(memoryview(parts[0])[CHECKED_LAST:])
    for part in parts[1:]:
        crc = crc32c(part, crc)
    return checksum_from_rest(parts[0], crc)


def checksum_from_rest(body: Buffer, crc_of_rest: int) -> int:
    """Return the checksum of a body whose crc32c from byte 8 on is known."""
    found: int = crc32c(bytes(body[:CHECKED_LAST]), crc_of_rest)
    return found


def frame_parts(
    body: Body,
    base_offset: int,
    max_append_ms: int,
    max_timestamp_ms: int,
    producer: str | None = None,
    sequence: int = 0,
    *,
    flags: int = 0,
    offsets: Offsets | None = None,
    span: int | None = None,
) -> list[Buffer]:
    """Return the bytes of one frame, as buffers to be written one after the other.

    The maxima are those of the log up to the end of this frame. `offsets` are given if they have gaps: those of the
    records, relative to the base. `span` is the number of offsets that the frame covers; the last ones need not have a
    record. `flags` are `MORE` and `CONTINUES`, for an append of several frames.
    """
    count, length = body.records, body.length
    name, prefix = b"", b""
    if producer is not None:
        flags |= PRODUCER
        name = producer.encode()
        prefix = name + _PADDING[len(name) % 8]
    if offsets is not None:
        flags |= SPARSE
        prefix += _pack_offsets(offsets, count, span)
    covered = count if span is None else span
    if not 1 <= covered <= SPAN_MAX or (offsets is None and covered != count):
        raise InvalidArgument(f"a frame of {count} records cannot cover {covered} offsets")
    checked: bytes = _CHECKED.pack(
        base_offset, length, count, body.crc, flags, len(name), body.append_ms, max_append_ms, max_timestamp_ms,
        sequence, covered, body.kind,
    )  # fmt: skip
    crc = crc32c(checked + prefix if prefix else checked)
    head = MAGIC + crc.to_bytes(4, "little") + checked + prefix
    if length % 8:
        return [head, *body.parts, _PADDING[length % 8]]
    return [head, *body.parts]


def parse(data: Buffer, at: int, end: int) -> Frame | int:
    """Parse the header at byte `at` of `data`, which ends at `end`. If that is too short, return the number of bytes
    needed from `at` on.

    Raises `CorruptBatch` if the bytes are no frame.
    """
    if end - at < HEADER_BYTES:
        return HEADER_BYTES
    magic: bytes
    body_start: int
    (
        magic, crc, base_offset, body_length, count, body_crc, flags, name_length, append_ms, max_append_ms,
        max_timestamp_ms, sequence, span, kind,
    ) = _HEADER.unpack_from(data, at)  # fmt: skip
    if magic != MAGIC:
        raise CorruptBatch(f"a frame begins with {MAGIC!r}, these bytes with {magic!r}")
    body_start = HEADER_BYTES
    if flags:
        body_start += name_length + -name_length % 8
        if flags & SPARSE:
            body_start += count * 4 + count % 2 * 4
        if end - at < body_start:
            return body_start
    computed = crc32c(memoryview(data)[at + 8 : at + body_start])
    if computed != crc:
        raise CorruptBatch(f"the header of a frame has checksum {computed:08x}, but says {crc:08x}")
    if flags & ~_FLAGS_KNOWN:
        raise CorruptBatch(f"a frame has flags {flags}: a newer version may have written it")
    name = None
    if flags & PRODUCER:
        start = at + HEADER_BYTES
        try:
            name = bytes(data[start : start + name_length]).decode()
        except UnicodeDecodeError as error:
            raise CorruptBatch(f"a frame has a producer's id that is not UTF-8: {error}") from error
    if span < max(count, 1) or (not flags & SPARSE and span != count):
        raise CorruptBatch(f"a frame of {count} records says that it covers {span} offsets")
    return Frame(
        base_offset, span, count, append_ms, max_append_ms, max_timestamp_ms, name, sequence, kind,
        bool(flags & SPARSE), bool(flags & MORE), bool(flags & CONTINUES), body_start, body_length, body_crc,
        body_start + body_length + -body_length % 8,
    )  # fmt: skip


def sparse_offsets(data: Buffer, at: int, frame: Frame) -> Offsets:
    """Return the relative offsets of a sparse frame's records; `CorruptBatch` unless they grow and lie in its span."""
    start = at + frame.body_start - (frame.records * 4 + frame.records % 2 * 4)
    offsets = np.frombuffer(data, "<u4", frame.records, start)
    if frame.records and (not (offsets[1:] > offsets[:-1]).all() or int(offsets[-1]) >= frame.span):
        raise CorruptBatch(f"a sparse frame has offsets that do not grow, or go beyond its {frame.span}")
    return offsets


def check_body(frame: Frame, computed: int) -> None:
    if computed != frame.body_crc:
        raise CorruptBatch(f"the body of a frame has checksum {computed:08x}, but its frame says {frame.body_crc:08x}")


def _pack_offsets(offsets: Offsets, count: int, span: int | None) -> bytes:
    if span is None or len(offsets) != count:
        raise InvalidArgument(f"a sparse frame of {count} records has {len(offsets)} offsets, and span {span}")
    if count and (not (offsets[1:] > offsets[:-1]).all() or int(offsets[-1]) >= span):
        raise InvalidArgument(f"a sparse frame needs offsets that grow and lie below its span {span}")
    return offsets.astype("<u4").tobytes() + _PADDING[count * 4 % 8]


class LocatedFrame(NamedTuple):
    """A frame and the position in its file where it begins."""

    position: int
    frame: Frame


class Scan:
    """Iterates over the frames of a file; stops at the first bytes that are not the expected frame.

    Reads `window` bytes at a time, unless `mapped` is the memory map of the file, which is safe only if no process
    truncates these bytes any more.

    Afterwards, `position` and `offset` say where the next frame would begin, and `problem` why none does (None: the end
    was reached).
    """

    def __init__(
        self,
        descriptor: int,
        position: int,
        end: int,
        offset: int,
        *,
        bodies: bool,
        window: int = 16 << 10,
        mapped: memoryview | None = None,
    ) -> None:
        self.position = position
        self.offset = offset
        self.problem: str | None = None
        self._descriptor = descriptor
        self._end = end
        self._bodies = bodies
        self._window = window
        self._data: Buffer = b"" if mapped is None else mapped
        self._start = 0
        """Position of the first byte of `_data`."""

    def __iter__(self) -> Iterator[LocatedFrame]:
        while self.position < self._end:
            try:
                located = self._next()
            except CorruptBatch as error:
                self.problem = str(error)
                return
            self.position += located.frame.length
            self.offset = located.frame.next_offset
            yield located

    def body(self, located: LocatedFrame) -> memoryview:
        """Return the body of the frame that this scan yielded last; `CorruptBatch` if it is short or fails its
        checksum.
        """
        view = self.unchecked_body(located)
        check_body(located.frame, checksum([view]))
        return view

    def unchecked_body(self, located: LocatedFrame) -> memoryview:
        """Like `body`, for a caller that verifies the checksum itself."""
        frame = located.frame
        at = self._load(located.position, frame.length) + frame.body_start
        return memoryview(self._data)[at : at + frame.body_length]

    def offsets(self, located: LocatedFrame) -> Offsets:
        """Return the relative offsets of the records of the sparse frame that this scan yielded last."""
        at = self._load(located.position, located.frame.body_start)
        return sparse_offsets(self._data, at, located.frame)

    def _next(self) -> LocatedFrame:
        needed = HEADER_BYTES
        while True:
            at = self._load(self.position, needed)
            found = parse(self._data, at, len(self._data))
            if not isinstance(found, int):
                break
            needed = found
        if found.base_offset != self.offset:
            raise CorruptBatch(f"a frame has base offset {found.base_offset} where {self.offset} is expected")
        if self.position + found.length > self._end:
            raise CorruptBatch(f"a frame of {found.length} bytes is cut short after {self._end - self.position}")
        located = LocatedFrame(self.position, found)
        if self._bodies:
            self.body(located)
        return located

    def _load(self, position: int, size: int) -> int:
        """Return where in `_data` the file's bytes [position, position + size) begin, after reading them if needed."""
        at = position - self._start
        if at >= 0 and at + size <= len(self._data):
            return at
        if position + size > self._end:
            raise CorruptBatch(f"{size} bytes are expected at byte {position}, but the file ends at {self._end}")
        wanted = min(max(size, self._window), self._end - position)
        data = os.pread(self._descriptor, wanted, position)
        while len(data) < size:
            more = os.pread(self._descriptor, wanted - len(data), position + len(data))
            if not more:
                raise CorruptBatch(f"{size} bytes are expected at byte {position}, but the file ends after {len(data)}")
            data += more
        self._data, self._start = data, position
        return 0
