"""The shared blob: bodies of several partitions behind one header, which describes them. A compacted blob has one
body.

"LLS1" · u32 BE header length · u32 BE crc32c of the header · header (JSON) · zeros to 8 bytes · bodies, each followed
by zeros to 8 bytes. Bodies are in the order of the header's `partitions`, without gaps between them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Final

import msgspec
from awscrt.checksums import crc32c

from llog.batch.columns import Buffer, Columns, timestamp_bounds
from llog.batch.format import ENCODING, Codec, encode, padded_length
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
    """One partition's records in the blob; `body_offset` counts from the blob's first byte."""

    topic: str
    partition: Natural
    directory: str
    msg_count: Positive
    encoding: str
    body_offset: Natural
    body_length: Positive
    append_ms: Millis
    """The append time of the first record."""
    timestamp_min: Millis
    timestamp_max: Millis
    next_offset: Positive | None = None
    """The partition's next offset as the writer knew it at the upload: if the records were committed, they got this
    offset or higher ones.
    """
    start_offset: Positive | None = None
    """The offset of the first record; only in a compacted blob and in a copy of inline records, where it is known."""


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
    start_offsets: Sequence[int] | None = None,
) -> tuple[list[Buffer], list[Body]]:
    """Pack groups of (partition, its topic's directory, stamped columns) into a blob. Return the buffers to be written
    one after the other, and the body of each group, in their order.

    `next_offsets` are those of the partitions, and `start_offsets` those of the records, if known. Raises
    `RecordTooLarge` if a group or the header is too large.
    """
    bodies: list[Body] = []
    body_parts: list[Buffer] = []
    position = 0
    for number, (tp, directory, columns) in enumerate(groups):
        parts, body = encode_body(
            tp,
            directory,
            columns,
            codec,
            body_offset=position,
            next_offset=None if next_offsets is None else next_offsets[number],
            start_offset=None if start_offsets is None else start_offsets[number],
        )
        bodies.append(body)
        body_parts += parts
        if body.body_length % 8:
            body_parts.append(bytes(-body.body_length % 8))
        position += padded_length(body.body_length)

    start, bodies = _encode_start(bodies, writer, created_at_ms)
    return [start, *body_parts], bodies


def encode_body(
    tp: TopicPartition,
    directory: str,
    columns: Columns,
    codec: Codec = Codec.NONE,
    *,
    body_offset: int = 0,
    next_offset: int | None = None,
    start_offset: int | None = None,
) -> tuple[list[Buffer], Body]:
    """Encode one group of stamped columns as a batch. Return its buffers and its description."""
    parts = encode(columns, codec)
    timestamp_min, timestamp_max = timestamp_bounds(columns)
    return parts, Body(
        topic=tp.topic,
        partition=tp.partition,
        directory=directory,
        msg_count=columns.count,
        encoding=ENCODING,
        body_offset=body_offset,
        body_length=sum(map(len, parts)),
        append_ms=columns.append_runs[0][1],
        timestamp_min=timestamp_min,
        timestamp_max=timestamp_max,
        next_offset=next_offset,
        start_offset=start_offset,
    )


def body_parts(parts: Sequence[Buffer], bodies: Sequence[Body]) -> Iterator[Sequence[Buffer]]:
    """Yield the parts of each body of a blob, as `pack` returned both, without copying their bytes."""
    number = position = 0
    for body in bodies:
        while position < body.body_offset:
            position += len(parts[number])
            number += 1
        first, end = number, body.body_offset + body.body_length
        while position < end:
            position += len(parts[number])
            number += 1
        yield parts[first:number]


def pack_one(body: Body, parts: Sequence[Buffer], *, writer: str, created_at_ms: int) -> tuple[list[Buffer], Body]:
    """Pack one encoded body into a blob. Return the blob's buffers, and the body with its offset."""
    buffers, [placed] = pack_encoded([(body, parts)], writer=writer, created_at_ms=created_at_ms)
    return buffers, placed


def pack_encoded(
    encoded: Sequence[tuple[Body, Sequence[Buffer]]], *, writer: str, created_at_ms: int
) -> tuple[list[Buffer], list[Body]]:
    """Pack encoded bodies into a blob. Return the blob's buffers, and the bodies with their offsets."""
    bodies: list[Body] = []
    buffers: list[Buffer] = []
    position = 0
    for body, parts in encoded:
        bodies.append(msgspec.structs.replace(body, body_offset=position))
        buffers += [*parts, bytes(-body.body_length % 8)]
        position += padded_length(body.body_length)
    start, placed = _encode_start(bodies, writer, created_at_ms)
    return [start, *buffers], placed


def header_length(data: Buffer) -> int:
    """Return how many of a blob's first bytes `unpack_header` needs, given the first 12. Raises `CorruptBatch` if they
    begin no blob.
    """
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
    """Decode the header of a blob from at least its first `header_length` bytes; raises `CorruptBatch` if damaged."""
    end = header_length(data)
    if len(data) < end:
        raise CorruptBatch(f"the header of a shared blob needs {end} bytes, but only {len(data)} are given")
    encoded = bytes(data[PREFIX_BYTES:end])
    stored, computed = int.from_bytes(data[8:12], "big"), crc32c(encoded)
    if stored != computed:
        raise CorruptBatch(f"the header of a shared blob has checksum {computed:08x}, but says {stored:08x}")
    try:
        header = _decoder.decode(encoded)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptBatch(f"the header of a shared blob cannot be decoded: {error}") from error
    if header.version != VERSION:
        raise CorruptBatch(
            f"a shared blob has version {header.version}, not {VERSION}: a newer llog may have written it"
        )
    position = padded_length(end)
    for body in header.partitions:
        if body.body_offset != position:
            raise CorruptBatch(
                f"a shared blob has the body of {body.topic}/{body.partition} at {body.body_offset}, not at {position}"
            )
        position += padded_length(body.body_length)
    return header


def _encode_start(bodies: list[Body], writer: str, created_at_ms: int) -> tuple[bytes, list[Body]]:
    """Return the bytes before the bodies, and the bodies with their offsets in the blob."""
    header, placed = _header(bodies, writer, created_at_ms)
    if len(header) > HEADER_BYTES_MAX:
        raise RecordTooLarge(
            f"the header of a blob with {len(bodies)} partitions has {len(header)} bytes, "
            f"more than {HEADER_BYTES_MAX}: write several blobs"
        )
    start = MAGIC + len(header).to_bytes(4, "big") + crc32c(header).to_bytes(4, "big") + header
    return start + bytes(-len(start) % 8), placed


def _header(bodies: list[Body], writer: str, created_at_ms: int) -> tuple[bytes, list[Body]]:
    """Encode the header, which contains the offsets of the bodies, which depend on its length. Larger offsets never
    shorten it, so the loop ends.
    """
    start = 0
    placed = bodies
    while True:
        header = msgspec.json.encode(
            BlobHeader(version=VERSION, created_at_ms=created_at_ms, writer=writer, partitions=tuple(placed))
        )
        needed = padded_length(PREFIX_BYTES + len(header))
        if needed == start:
            return header, placed
        start = needed
        placed = [msgspec.structs.replace(body, body_offset=body.body_offset + start) for body in bodies]
