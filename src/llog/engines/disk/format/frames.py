"""Frames: checksummed pieces of a segment file, each at a multiple of 8 bytes. docs/segment-format.md states every
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

All numbers are little-endian. The body is opaque here: this layer checks its length and its checksum only. That is the
crc32c of the body's bytes from 8 on followed by its bytes 0 to 7, so that a body which holds a crc32c of its bytes from
8 on is not gone through twice.
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
"""How many of a body's first bytes go into its checksum after all others."""
_HEADER: Final = struct.Struct("<4sIQIIIHHqqqqII")
_CHECKED: Final = struct.Struct("<QIIIHHqqqqII")
_PADDING: Final = [bytes(-n % 8) for n in range(8)]

Offsets = npt.NDArray[np.uint32]


class Body(NamedTuple):
    """What a frame is made around: bytes, and what its header says of them."""

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
    """What the header of a frame says; `length` is that of the whole frame, `body_start` counts from its first byte."""

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


def body_of(
    parts: Sequence[Buffer],
    *,
    records: int,
    append_ms: int,
    timestamp_max: int,
    append_ms_max: int | None = None,
    kind: int = KIND_BATCH,
) -> Body:
    """Any bytes as the body of a frame to come."""
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
    """The checksum that a frame holds of its body."""
    if parts and len(parts[0]) < CHECKED_LAST:
        parts = [b"".join(parts)]
    if not parts:
        return 0
    crc = crc32c(memoryview(parts[0])[CHECKED_LAST:])
    for part in parts[1:]:
        crc = crc32c(part, crc)
    return checksum_of(parts[0], crc)


def checksum_of(body: Buffer, crc_of_rest: int) -> int:
    """The checksum of a body whose crc32c from byte 8 on is known."""
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
    """The bytes of one frame, to be written one after the other.

    The maxima are those of the log up to the end of this frame. `offsets` are those of its records, relative to the
    base, if they have gaps; `span` says how many offsets it covers, of which the last ones may have no record. `flags`
    are `MORE` and `CONTINUES`, of an append that is several frames.
    """
    count, length = body.records, body.length
    name, prefix = b"", b""
    if producer is not None:
        flags |= PRODUCER
        name = producer.encode()
        prefix = name + _PADDING[len(name) % 8]
    if offsets is not None:
        flags |= SPARSE
        prefix += _packed_offsets(offsets, count, span)
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
    """The header at byte `at` of `data`, which ends at `end`; or how many bytes from `at` on it takes to tell.

    `CorruptBatch` if there is no frame.
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
    """The relative offsets of a sparse frame's records; `CorruptBatch` unless they grow and lie within its span."""
    start = at + frame.body_start - (frame.records * 4 + frame.records % 2 * 4)
    offsets = np.frombuffer(data, "<u4", frame.records, start)
    if frame.records and (not (offsets[1:] > offsets[:-1]).all() or int(offsets[-1]) >= frame.span):
        raise CorruptBatch(f"a sparse frame has offsets that do not grow, or go beyond its {frame.span}")
    return offsets


def check_body(frame: Frame, computed: int) -> None:
    if computed != frame.body_crc:
        raise CorruptBatch(f"the body of a frame has checksum {computed:08x}, but its frame says {frame.body_crc:08x}")


def _packed_offsets(offsets: Offsets, count: int, span: int | None) -> bytes:
    if span is None or len(offsets) != count:
        raise InvalidArgument(f"a sparse frame of {count} records has {len(offsets)} offsets, and span {span}")
    if count and (not (offsets[1:] > offsets[:-1]).all() or int(offsets[-1]) >= span):
        raise InvalidArgument(f"a sparse frame needs offsets that grow and lie below its span {span}")
    return offsets.astype("<u4").tobytes() + _PADDING[count * 4 % 8]


class Located(NamedTuple):
    """A frame and where it begins in its file."""

    position: int
    frame: Frame


class Scan:
    """Walks the frames of a file from one to the next; stops at the first bytes that are not the frame expected there.

    Reads `window` bytes at a time, unless `mapped` is the file's memory: only for bytes that nobody cuts off any more.

    After it: `position` and `offset` say where the next frame would begin, `problem` why it is none (None: the end).
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

    def __iter__(self) -> Iterator[Located]:
        while self.position < self._end:
            try:
                located = self._next()
            except CorruptBatch as error:
                self.problem = str(error)
                return
            self.position += located.frame.length
            self.offset = located.frame.next_offset
            yield located

    def body(self, located: Located) -> memoryview:
        """The body of a frame that this scan just gave. `CorruptBatch` if it is cut short or has another checksum."""
        view = self.unchecked_body(located)
        check_body(located.frame, checksum([view]))
        return view

    def unchecked_body(self, located: Located) -> memoryview:
        """As `body`, for a caller that checks it."""
        frame = located.frame
        at = self._have(located.position, frame.length) + frame.body_start
        return memoryview(self._data)[at : at + frame.body_length]

    def offsets(self, located: Located) -> Offsets:
        """Relative offsets of the records of a sparse frame that this scan just gave."""
        at = self._have(located.position, located.frame.body_start)
        return sparse_offsets(self._data, at, located.frame)

    def _next(self) -> Located:
        needed = HEADER_BYTES
        while True:
            at = self._have(self.position, needed)
            found = parse(self._data, at, len(self._data))
            if not isinstance(found, int):
                break
            needed = found
        if found.base_offset != self.offset:
            raise CorruptBatch(f"a frame has base offset {found.base_offset} where {self.offset} is due")
        if self.position + found.length > self._end:
            raise CorruptBatch(f"a frame of {found.length} bytes is cut short after {self._end - self.position}")
        located = Located(self.position, found)
        if self._bodies:
            self.body(located)
        return located

    def _have(self, position: int, size: int) -> int:
        """Where in `_data` the bytes [position, position + size) begin, read if they are not there yet."""
        at = position - self._start
        if at >= 0 and at + size <= len(self._data):
            return at
        if position + size > self._end:
            raise CorruptBatch(f"{size} bytes are due at byte {position}, and the file ends at {self._end}")
        wanted = min(max(size, self._window), self._end - position)
        data = os.pread(self._descriptor, wanted, position)
        while len(data) < size:
            more = os.pread(self._descriptor, wanted - len(data), position + len(data))
            if not more:
                raise CorruptBatch(f"{size} bytes are due at byte {position}, and the file ends after {len(data)}")
            data += more
        self._data, self._start = data, position
        return 0
