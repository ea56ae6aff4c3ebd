"""`bytes-batches-v1`: many records of one partition as several batches, so that a reader can fetch only some of them.

 0  4  magic "LLC1"                           12  4  zero
 4  4  crc32c of bytes 8.. up to the batches  16  …  record counts u32[k] · zeros to 8 bytes · byte lengths u64[k]
 8  4  batch count k (u32, >= 2)                     batches (`bytes-batch-v1`), each padded with zeros to 8 bytes

All numbers are little-endian. Index entries repeat the table, so that a reader of some batches fetches only their
bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from awscrt.checksums import crc32c

from llog.batch import format as bytes_batch
from llog.batch.columns import Buffer, Columns, byte_size, concat
from llog.batch.format import BATCH_BYTES_MAX, Codec, encode_joined, padded_length
from llog.errors import CorruptBatch, RecordTooLarge

ENCODING: Final = "bytes-batches-v1"
MAGIC: Final = b"LLC1"
PART_BYTES: Final = 4 << 20
"""The approximate size of a batch: large enough to be worth a GET, small enough for a reader of one record."""
_HEADER: Final = struct.Struct("<4sIII")


class BatchPart(NamedTuple):
    """One of several batches that follow one another."""

    records: int
    byte_length: int


class BodyLayout(NamedTuple):
    """The encoding and length of a body, and the batches in it."""

    encoding: str
    byte_length: int
    parts: tuple[BatchPart, ...]
    """Empty if the body is one batch."""


def encode_run(joined: Sequence[Columns], codec: Codec = Codec.NONE) -> tuple[list[Buffer], BodyLayout]:
    """Encode these records as one batch, or as several if they are many. Return the buffers to be written one after the
    other, and their layout.
    """
    if sum(map(byte_size, joined)) > BATCH_BYTES_MAX:
        raise RecordTooLarge(f"a body holds at most {BATCH_BYTES_MAX} bytes of records: take fewer")
    buffers: list[Buffer] = []
    parts: list[BatchPart] = []
    for group in _groups(joined):
        batch = encode_joined(group, codec)
        length = sum(map(len, batch))
        parts.append(BatchPart(sum(columns.count for columns in group), length))
        buffers += [*batch, bytes(-length % 8)]
    if len(parts) == 1:
        return buffers[:-1], BodyLayout(bytes_batch.ENCODING, parts[0].byte_length, ())
    table = _table(parts)
    checked = _HEADER.pack(MAGIC, 0, len(parts), 0)[8:] + table
    buffers.insert(0, MAGIC + crc32c(checked).to_bytes(4, "little") + checked)
    return buffers, BodyLayout(ENCODING, sum(map(len, buffers)), tuple(parts))


def positions(parts: Sequence[BatchPart]) -> list[int]:
    """Return where each batch begins, counted from the body's first byte."""
    starts, position = [], _table_end(len(parts))
    for part in parts:
        starts.append(position)
        position += padded_length(part.byte_length)
    return starts


def layout_of(data: Buffer) -> BodyLayout:
    """Read the layout of a body from its bytes; raises `CorruptBatch` if `encode_run` makes no body that begins so."""
    if bytes(data[:4]) != MAGIC:
        bytes_batch.peek(data)
        return BodyLayout(bytes_batch.ENCODING, len(data), ())
    if len(data) < _HEADER.size:
        raise CorruptBatch(f"the table of a body has at least {_HEADER.size} bytes, there are {len(data)}")
    _, stored, number, reserved = _HEADER.unpack_from(data)
    end = _table_end(number)
    if number < 2 or reserved or end > len(data):
        raise CorruptBatch(f"a body of {len(data)} bytes says that it has {number} batches")
    computed = crc32c(bytes(data[8:end]))
    if computed != stored:
        raise CorruptBatch(f"the table of a body has checksum {computed:08x}, but says {stored:08x}")
    counts = np.frombuffer(data, "<u4", number, _HEADER.size)
    lengths = np.frombuffer(data, "<u8", number, end - 8 * number)
    parts = tuple(BatchPart(int(count), int(length)) for count, length in zip(counts, lengths, strict=True))
    if positions(parts)[-1] + padded_length(parts[-1].byte_length) != len(data):
        raise CorruptBatch(f"the batches of a body do not fill its {len(data)} bytes")
    return BodyLayout(ENCODING, len(data), parts)


def decode(data: Buffer) -> Columns:
    """Decode all records; raises `CorruptBatch` unless the bytes are an undamaged body of several batches."""
    view = memoryview(data).cast("B")
    encoded = layout_of(view)
    if not encoded.parts:
        raise CorruptBatch(f"a body of several batches begins with {MAGIC!r}, these bytes with {bytes(view[:4])!r}")
    decoded = []
    for start, part in zip(positions(encoded.parts), encoded.parts, strict=True):
        end = start + part.byte_length
        columns = bytes_batch.decode(view[start:end])
        if columns.count != part.records or any(view[end : start + padded_length(part.byte_length)]):
            raise CorruptBatch(f"the table of a body says {part.records} records of a batch that has {columns.count}")
        decoded.append(columns)
    return concat(decoded)


def _groups(joined: Sequence[Columns]) -> list[list[Columns]]:
    groups: list[list[Columns]] = []
    size = 0
    for columns in joined:
        if not groups or size + byte_size(columns) > PART_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(columns)
        size += byte_size(columns)
    return groups or [[]]


def _table(parts: Sequence[BatchPart]) -> bytes:
    counts = np.array([part.records for part in parts], "<u4").tobytes()
    return counts + bytes(-len(counts) % 8) + np.array([part.byte_length for part in parts], "<u8").tobytes()


def _table_end(number: int) -> int:
    return _HEADER.size + padded_length(4 * number) + 8 * number
