"""The compression of Kafka's record batches.

LZ4 and snappy are framed by hand: Arrow writes LZ4 frames whose blocks depend on each other, which Kafka's Java client
cannot read, and has no framing for snappy.
"""

from __future__ import annotations

import struct
import zlib
from enum import IntEnum
from typing import Final

import pyarrow as pa

from llog.batch.columns import Buffer
from llog.errors import InvalidRecord, RecordTooLarge

_GZIP_WINDOW_BITS: Final = 31
"""The largest window, with the header of gzip."""
_CHUNK_BYTES_MIN: Final = 64 << 10

_XERIAL_START: Final = b"\x82SNAPPY\0"
_XERIAL_HEADER: Final = _XERIAL_START + struct.pack(">ii", 1, 1)
_XERIAL_BLOCK_BYTES: Final = 32 << 10

_LZ4_HEADER: Final = bytes.fromhex("04224d18 60 40 82")
"""Independent blocks of up to 64 KiB, without checksums; the last byte is the checksum of the two before it."""
_LZ4_BLOCK_BYTES: Final = 64 << 10
_LZ4_STORED: Final = 1 << 31
"""Added to the length of a block that is not compressed."""


class KafkaCodec(IntEnum):
    """How a batch is compressed, by the numbers of Kafka's batch attributes."""

    NONE = 0
    GZIP = 1
    SNAPPY = 2
    LZ4 = 3
    ZSTD = 4


def compress(data: Buffer, codec: KafkaCodec) -> Buffer:
    """Compress the records of a batch as Kafka's clients expect them."""
    match codec:
        case KafkaCodec.NONE:
            return data
        case KafkaCodec.GZIP:
            return zlib.compress(data, wbits=_GZIP_WINDOW_BITS)
        case KafkaCodec.SNAPPY:
            return _compress_snappy(memoryview(data))
        case KafkaCodec.LZ4:
            return _compress_lz4(memoryview(data))
        case KafkaCodec.ZSTD:
            return _block("zstd", data)


def decompress(data: memoryview, codec: KafkaCodec, bytes_max: int) -> memoryview:
    """Decompress the records of a batch.

    Raises `RecordTooLarge`, without having decompressed much more, if they have more than `bytes_max` bytes, and
    `InvalidRecord` if they cannot be decompressed.
    """
    try:
        match codec:
            case KafkaCodec.NONE:
                found = data
            case KafkaCodec.SNAPPY:
                found = _decompress_snappy(data, bytes_max)
            case KafkaCodec.GZIP | KafkaCodec.LZ4 | KafkaCodec.ZSTD:
                found = _decompress_stream(data, codec, bytes_max)
    except (OSError, pa.ArrowException) as error:
        raise InvalidRecord(f"a batch cannot be decompressed as {codec.name.lower()}: {error}") from error
    _check_size(len(found), bytes_max)
    return found.cast("B")  # Arrow's bytes are signed


def _decompress_stream(data: memoryview, codec: KafkaCodec, bytes_max: int) -> memoryview:
    """Decompress chunks that grow, as the frames need not say how large their content is."""
    chunks: list[pa.Buffer] = []
    size = 0
    wanted = max(_CHUNK_BYTES_MIN, 4 * len(data))
    with pa.CompressedInputStream(pa.BufferReader(data), codec.name.lower()) as stream:
        while True:
            chunk = stream.read_buffer(min(wanted, bytes_max + 1 - size))
            if not chunk.size:
                break
            chunks.append(chunk)
            size += chunk.size
            _check_size(size, bytes_max)
            wanted *= 2
    return memoryview(chunks[0] if len(chunks) == 1 else b"".join(chunks))


def _compress_snappy(data: memoryview) -> bytes:
    parts: list[Buffer] = [_XERIAL_HEADER]
    for start in range(0, len(data), _XERIAL_BLOCK_BYTES):
        block = _block("snappy", data[start : start + _XERIAL_BLOCK_BYTES])
        parts += (len(block).to_bytes(4, "big"), block)
    return b"".join(parts)


def _decompress_snappy(data: memoryview, bytes_max: int) -> memoryview:
    """Decompress blocks as the Java library xerial frames them, or one block alone, as other libraries write it."""
    if bytes(data[: len(_XERIAL_START)]) != _XERIAL_START:
        return memoryview(_decompress_block(data, 0, bytes_max))
    parts: list[Buffer] = []
    size = 0
    position = len(_XERIAL_HEADER)
    while position < len(data):
        start = position + 4
        position = start + int.from_bytes(data[position:start], "big")
        if position > len(data):
            raise InvalidRecord("a batch cannot be decompressed as snappy: it ends early")
        block = _decompress_block(data[start:position], size, bytes_max)
        size += block.size
        parts.append(memoryview(block))
    return memoryview(b"".join(parts))


def _decompress_block(block: memoryview, size_before: int, bytes_max: int) -> pa.Buffer:
    # The block begins with its uncompressed size, of which snappy checks that it is right.
    size = shift = 0
    for byte in block[:5]:
        size |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            _check_size(size_before + size, bytes_max)
            return pa.Codec("snappy").decompress(block, size)
    raise InvalidRecord("a batch cannot be decompressed as snappy: a block has no size")


def _compress_lz4(data: memoryview) -> bytes:
    parts: list[Buffer] = [_LZ4_HEADER]
    for start in range(0, len(data), _LZ4_BLOCK_BYTES):
        plain = data[start : start + _LZ4_BLOCK_BYTES]
        block = _block("lz4_raw", plain)
        if len(block) < len(plain):
            parts += (len(block).to_bytes(4, "little"), block)
        else:
            parts += ((len(plain) | _LZ4_STORED).to_bytes(4, "little"), plain)
    parts.append(bytes(4))
    return b"".join(parts)


def _block(codec: str, data: Buffer) -> bytes:
    # Not the buffer that Arrow returns otherwise: a memoryview of it has the length that was allocated.
    compressed: bytes = pa.Codec(codec).compress(data, asbytes=True)
    return compressed


def _check_size(size: int, bytes_max: int) -> None:
    if size > bytes_max:
        raise RecordTooLarge(f"a batch has more than {bytes_max} bytes of records: send smaller batches")
