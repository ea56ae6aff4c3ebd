"""The shared blob: bodies of several partitions behind one header, so that a blob explains itself. A compacted blob has
one body.

"LLS1" · u32 BE header length · u32 BE crc32c of the header · header (JSON) · zeros to 8 bytes · bodies, each followed
by zeros to 8 bytes. Bodies have no gaps between them and the order of the header's `partitions`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Final

import msgspec
from awscrt.checksums import crc32c

from llog.batch.columns import Buffer, Columns, timestamp_bounds
from llog.batch.format import ENCODING, Codec, encode
from llog.errors import CorruptBatch, RecordTooLarge
from llog.model import TopicPartition

MAGIC: Final = b"LLS1"
VERSION: Final = 1
PREFIX_BYTES: Final = 12
HEADER_BYTES_MAX: Final = 16 << 20
_POSITION_MAX: Final = (1 << 63) - 1

Natural = Annotated[int, msgspec.Meta(ge=0, le=_POSITION_MAX)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=_POSITION_MAX)]
Millis = Annotated[int, msgspec.Meta(ge=-_POSITION_MAX - 1, le=_POSITION_MAX)]


class Body(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Where one partition's records lie in the blob; `body_offset` counts from the blob's first byte."""

    topic: str
    partition: Natural
    directory: str
    msg_count: Positive
    encoding: str
    body_offset: Natural
    body_length: Positive
    append_ms: Millis
    """Append time of the first record."""
    timestamp_min: Millis
    timestamp_max: Millis
    next_offset: Positive | None = None
    """The next offset of the partition that the writer knew of when it uploaded: the records got this one or a higher
    one, if any.
    """
    start_offset: Positive | None = None
    """The offset of the first record, where it is settled: in a compacted blob."""


class BlobHeader(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    created_at_ms: Millis
    writer: str
    partitions: tuple[Body, ...]


_decoder: Final = msgspec.json.Decoder(BlobHeader)


def pack(
    groups: Iterable[tuple[TopicPartition, str, Columns]],
    *,
    writer: str,
    created_at_ms: int,
    codec: Codec = Codec.NONE,
    next_offsets: Sequence[int] | None = None,
) -> tuple[list[Buffer], list[Body]]:
    """The parts of a blob, to be written one after the other, and where each group's body lies, in the order given.

    Takes (partition, its topic's directory, stamped columns), and the next offsets of these partitions as far as they
    are known. `RecordTooLarge` if a group or the header is too large.
    """
    bodies: list[Body] = []
    body_parts: list[Buffer] = []
    position = 0
    for number, ((topic, partition), directory, columns) in enumerate(groups):
        parts = encode(columns, codec)
        length = sum(map(len, parts))
        timestamp_min, timestamp_max = timestamp_bounds(columns)
        bodies.append(
            Body(
                topic=topic,
                partition=partition,
                directory=directory,
                msg_count=columns.count,
                encoding=ENCODING,
                body_offset=position,
                body_length=length,
                append_ms=columns.append_runs[0][1],
                timestamp_min=timestamp_min,
                timestamp_max=timestamp_max,
                next_offset=None if next_offsets is None else next_offsets[number],
            )
        )
        body_parts += parts
        if length % 8:
            body_parts.append(bytes(-length % 8))
        position += _aligned(length)

    start, bodies = _start(bodies, writer, created_at_ms)
    return [start, *body_parts], bodies


def pack_one(body: Body, parts: Sequence[Buffer], *, writer: str, created_at_ms: int) -> tuple[list[Buffer], Body]:
    """The parts of a blob of one body that is encoded already, and the body with the place where it lies."""
    start, [placed] = _start([body], writer, created_at_ms)
    return [start, *parts, bytes(-body.body_length % 8)], placed


def header_length(data: Buffer) -> int:
    """How many bytes from the blob's start `unpack_header` needs, told from the first 12; `CorruptBatch`."""
    if len(data) < PREFIX_BYTES:
        raise CorruptBatch(f"a shared blob has at least {PREFIX_BYTES} bytes, this one {len(data)}")
    magic = bytes(data[:4])
    if magic != MAGIC:
        raise CorruptBatch(f"a shared blob begins with {MAGIC!r}, these bytes with {magic!r}")
    length = int.from_bytes(data[4:8], "big")
    if length > HEADER_BYTES_MAX:
        raise CorruptBatch(f"a shared blob says its header has {length} bytes, more than {HEADER_BYTES_MAX}")
    return PREFIX_BYTES + length


def unpack_header(data: Buffer) -> BlobHeader:
    """The header of a blob, of which at least `header_length` bytes are given; `CorruptBatch` if it is damaged."""
    end = header_length(data)
    if len(data) < end:
        raise CorruptBatch(f"the header of a shared blob needs {end} bytes, {len(data)} are there")
    encoded = bytes(data[PREFIX_BYTES:end])
    stored, computed = int.from_bytes(data[8:12], "big"), crc32c(encoded)
    if stored != computed:
        raise CorruptBatch(f"the header of a shared blob has checksum {computed:08x}, but says {stored:08x}")
    try:
        header = _decoder.decode(encoded)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptBatch(f"the header of a shared blob is not what it should be: {error}") from error
    if header.version != VERSION:
        raise CorruptBatch(
            f"a shared blob has version {header.version}, not {VERSION}: a newer llog may have written it"
        )
    position = _aligned(end)
    for body in header.partitions:
        if body.body_offset != position:
            raise CorruptBatch(
                f"a shared blob has the body of {body.topic}/{body.partition} at {body.body_offset}, not at {position}"
            )
        position += _aligned(body.body_length)
    return header


def _start(bodies: list[Body], writer: str, created_at_ms: int) -> tuple[bytes, list[Body]]:
    """What stands before the bodies, and the bodies with the places where they lie."""
    header, placed = _header(bodies, writer, created_at_ms)
    if len(header) > HEADER_BYTES_MAX:
        raise RecordTooLarge(
            f"the header of a blob with {len(bodies)} partitions has {len(header)} bytes, "
            f"more than {HEADER_BYTES_MAX}: write several blobs"
        )
    start = MAGIC + len(header).to_bytes(4, "big") + crc32c(header).to_bytes(4, "big") + header
    return start + bytes(-len(start) % 8), placed


def _header(bodies: list[Body], writer: str, created_at_ms: int) -> tuple[bytes, list[Body]]:
    """Offsets are part of the header whose length they depend on: more room never makes it shorter, so this settles."""
    start = 0
    placed = bodies
    while True:
        header = msgspec.json.encode(
            BlobHeader(version=VERSION, created_at_ms=created_at_ms, writer=writer, partitions=tuple(placed))
        )
        needed = _aligned(PREFIX_BYTES + len(header))
        if needed == start:
            return header, placed
        start = needed
        placed = [msgspec.structs.replace(body, body_offset=body.body_offset + start) for body in bodies]


def _aligned(length: int) -> int:
    return length + -length % 8
