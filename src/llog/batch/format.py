"""`bytes-batch-v1`: records of one partition, as stored in blobs. docs/format.md defines every byte.

 0  4  magic "LLB1"                     16  8  append time of the first record, ms (i64)
 4  4  crc32c of bytes 8..              24  8  highest effective timestamp, ms (i64)
 8  4  record count n (u32, >= 1)       32  …  sections, each padded with zeros to 8 bytes:
12  1  codec 0 none 1 lz4 2 zstd               value offsets i32[n+1] · values
13  1  flags                                   flag 1: key validity bitmap · offsets i32[n+1] · keys
14  2  zero                                    flag 2: effective timestamps i64[n]
                                               flag 4: header offsets i32[n+1] · headers
                                               flag 8: run count u32 r (> 1) · counts i64[r] · append ms i64[r]
                                               flag 16: value validity bitmap

All numbers are little-endian. With a codec, byte 32 is the u64 length of the sections, which follow compressed.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from awscrt.checksums import crc32c

from llog.batch.columns import Buffer, Columns, Runs, binary_offsets, binary_size, concat, timestamp_bounds
from llog.errors import CorruptBatch, InvalidArgument, RecordTooLarge

ENCODING: Final = "bytes-batch-v1"
MAGIC: Final = b"LLB1"
BATCH_BYTES_MAX: Final = 1 << 30
HEADER_BYTES: Final = 32
JOINED_BYTES_MAX: Final = 64 << 10
"""A batch up to this size is returned as one buffer: copying it costs less than handling its parts."""
SMALL_BYTES_MAX: Final = 16 << 10
"""The values of many columns are joined into one buffer if they have less than this on average."""

KEYS: Final = 1
TIMESTAMPS: Final = 2
HEADERS: Final = 4
RUNS: Final = 8
NULL_VALUES: Final = 16
_BINARY: Final = pa.binary()
_INT64: Final = pa.int64()
_OFFSETS: Final = np.dtype("<i4")
_OFFSET: Final = struct.Struct("<i")
_FLAGS_KNOWN: Final = KEYS | TIMESTAMPS | HEADERS | RUNS | NULL_VALUES
_HEADER: Final = struct.Struct("<4sIIBBHqq")
_SUMMED: Final = struct.Struct("<IBBHqq")
"""The part of the header that the checksum covers."""


class Codec(StrEnum):
    """How a batch is compressed. The numbers in `_CODEC_NUMBERS` are stored, and must stay."""

    NONE = "none"
    LZ4 = "lz4"
    ZSTD = "zstd"


_CODEC_NUMBERS: Final = {Codec.NONE: 0, Codec.LZ4: 1, Codec.ZSTD: 2}
_CODECS: Final = {number: codec for codec, number in _CODEC_NUMBERS.items()}


class BatchHeader(msgspec.Struct, frozen=True):
    """The header of a batch, known before anything is decompressed or decoded."""

    count: int
    append_ms: int
    timestamp_max: int
    codec: Codec
    flags: int


def encode(columns: Columns, codec: Codec = Codec.NONE) -> list[Buffer]:
    """Encode stamped, non-empty columns as a batch. Return buffers to be written one after the other; large ones share
    the memory of `columns`.

    Raises `RecordTooLarge` if the batch exceeds `BATCH_BYTES_MAX` before compression.
    """
    _check_stamped(columns)
    return _encode([columns.values], columns, codec)


def encode_joined(joined: Sequence[Columns], codec: Codec = Codec.NONE) -> list[Buffer]:
    """Encode the records of all `joined` as one batch, like `encode(concat(joined))` but without copying their
    values.
    """
    joined = [columns for columns in joined if columns.count]
    if len(joined) == 1:
        return encode(joined[0], codec)
    for columns in joined:
        _check_stamped(columns)
    if not joined:
        raise InvalidArgument("a batch has at least one record: there is nothing to encode")
    rest = concat([c._replace(values=pa.nulls(c.count, pa.binary())) for c in joined])
    return _encode([columns.values for columns in joined], rest, codec)


def _encode(values: Sequence[Any], rest: Columns, codec: Codec) -> list[Buffer]:
    """Encode a batch of these values, one array after the other, and of all other columns of `rest`."""
    count = rest.count
    flags = 0
    sections = [*_binary_sections(values)]
    if rest.keys is not None and rest.keys.null_count < count:
        flags |= KEYS
        sections += [[_bitmap([rest.keys])], *_binary_sections([rest.keys])]
    if rest.timestamps is not None:
        flags |= TIMESTAMPS
        sections.append([_bytes_of(rest.timestamps.to_numpy(zero_copy_only=True))])
    if rest.headers is not None and binary_size(rest.headers):
        flags |= HEADERS
        sections += _binary_sections([rest.headers])
    if len(rest.append_runs) > 1:
        flags |= RUNS
        runs = np.array(rest.append_runs, "<i8")
        sections += [[len(runs).to_bytes(8, "little")], [runs.T.tobytes()]]
    if [array for array in values if array.null_count]:
        flags |= NULL_VALUES
        sections.append([_bitmap(values)])

    parts: list[Buffer] = []
    size = HEADER_BYTES
    for section in sections:
        for part in section:
            size += len(part)
        parts += section
        if size % 8:
            parts.append(bytes(-size % 8))
            size += -size % 8
    if size > BATCH_BYTES_MAX:
        raise RecordTooLarge(
            f"a batch of {count} records has {size} bytes, more than {BATCH_BYTES_MAX}: append fewer at a time"
        )
    if codec is not Codec.NONE:
        # As bytes: a memoryview of the buffer that Arrow returns otherwise has the length that was allocated.
        compressed = pa.Codec(codec.value).compress(b"".join(parts), asbytes=True)
        parts = [(size - HEADER_BYTES).to_bytes(8, "little"), compressed]
        size = HEADER_BYTES + 8 + len(compressed)

    first_append_ms = rest.append_runs[0][1]
    _, timestamp_max = timestamp_bounds(rest)
    parts = [_SUMMED.pack(count, _CODEC_NUMBERS[codec], flags, 0, first_append_ms, timestamp_max), *parts]
    if size <= JOINED_BYTES_MAX:
        parts = [b"".join(parts)]
    crc = 0
    for part in parts:
        crc = crc32c(part, crc)
    start = MAGIC + crc.to_bytes(4, "little")
    return [start + parts[0], *parts[1:]]


def peek(data: Buffer) -> BatchHeader:
    """Decode the header from the first 32 bytes, without verifying the checksum, which `decode` does."""
    if len(data) < HEADER_BYTES:
        raise CorruptBatch(f"a batch has at least {HEADER_BYTES} bytes, this one {len(data)}")
    magic, _, count, codec, flags, reserved, append_ms, timestamp_max = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise CorruptBatch(f"a batch begins with {MAGIC!r}, these bytes with {magic!r}")
    if codec not in _CODECS or flags & ~_FLAGS_KNOWN or reserved:
        raise CorruptBatch(
            f"batch header with codec {codec}, flags {flags} and reserved bytes {reserved}: "
            "damaged, or written by a newer version"
        )
    if count == 0:
        raise CorruptBatch("a batch has at least one record, this one says 0")
    return BatchHeader(count, append_ms, timestamp_max, _CODECS[codec], flags)


def decode(data: Buffer) -> Columns:
    """Decode a batch. Raises `CorruptBatch` unless the bytes are exactly one undamaged batch: uncompressed, those that
    `encode` makes of the returned columns.

    Without compression, the columns are views into `data`, which must not change while they exist; only numbers that
    are not aligned in memory are copied. `decode_headers` checks the inside of a record's headers.
    """
    view = memoryview(data).cast("B")
    header = peek(view)
    stored = int.from_bytes(view[4:8], "little")
    computed = crc32c(view[8:])
    if computed != stored:
        raise CorruptBatch(
            f"a batch of {len(view)} bytes has checksum {computed:08x}, but its header says {stored:08x}"
        )
    count, flags = header.count, header.flags
    sections = _Sections(pa.py_buffer(view).slice(HEADER_BYTES), header.codec)

    value_buffers = sections.binary(count, "values")
    keys = timestamps = headers = None
    if flags & KEYS:
        bitmap, present = sections.bitmap(count, "keys")
        buffers = sections.binary(count, "keys")
        if not present.any():
            raise CorruptBatch("a batch says that it has keys, but all of them are null")
        keys = _nullable_array(buffers, bitmap, present, "keys")
    if flags & TIMESTAMPS:
        timestamps = pa.Array.from_buffers(pa.int64(), count, [None, sections.numbers(count * 8, "timestamps")], 0)
    if flags & HEADERS:
        buffers = sections.binary(count, "headers")
        if not buffers[1].size:
            raise CorruptBatch("a batch says that it has headers, but all of them are empty")
        headers = _binary_array(buffers, count, "headers")
    runs: Runs = ((count, header.append_ms),)
    if flags & RUNS:
        runs = sections.runs(count, header.append_ms)
    if flags & NULL_VALUES:
        bitmap, present = sections.bitmap(count, "values")
        if present.all():
            raise CorruptBatch("a batch says that it has null values, but none of them is")
        values = _nullable_array(value_buffers, bitmap, present, "values")
    else:
        values = _binary_array(value_buffers, count, "values")
    sections.end()

    columns = Columns(values, keys, timestamps, headers, runs)
    _, timestamp_max = timestamp_bounds(columns)
    if timestamp_max != header.timestamp_max:
        raise CorruptBatch(
            f"a batch has timestamps up to {timestamp_max}, but its header says up to {header.timestamp_max}"
        )
    return columns


class _Sections:
    """Returns one section after the other, after checking that it lies within the batch."""

    def __init__(self, region: pa.Buffer, codec: Codec) -> None:
        self._region = region if codec is Codec.NONE else _decompress(region, codec)
        self._bytes = memoryview(self._region)
        self._position = 0

    def take(self, size: int, what: str) -> pa.Buffer:
        start, stop = self._position, self._position + size
        end = stop + -size % 8
        if end > len(self._bytes):
            raise CorruptBatch(f"a batch ends early: {what} need {end} bytes of sections, there are {len(self._bytes)}")
        if stop < end and any(self._bytes[stop:end]):
            raise CorruptBatch(f"a batch has bytes other than zero as padding after its {what}")
        self._position = end
        return self._region.slice(start, size)

    def numbers(self, size: int, what: str) -> pa.Buffer:
        """Return a section that Arrow can read as numbers, which must be aligned in memory."""
        section = self.take(size, what)
        return section if section.address % 8 == 0 else pa.py_buffer(section.to_pybytes())

    def binary(self, count: int, what: str) -> list[pa.Buffer]:
        """Return the offsets and data of a binary array. `_binary_array` checks the offsets in between."""
        section = self.numbers((count + 1) * 4, what)
        offsets = memoryview(section)
        (first,), (last,) = _OFFSET.unpack_from(offsets), _OFFSET.unpack_from(offsets, count * 4)
        if first or last < 0:
            raise CorruptBatch(f"a batch has {what} whose offsets do not begin at 0 and grow")
        return [section, self.take(last, what)]

    def bitmap(self, count: int, what: str) -> tuple[pa.Buffer, npt.NDArray[np.bool_]]:
        section = self.take((count + 7) // 8, f"validity bitmap of {what}")
        bits = np.unpackbits(np.frombuffer(section, np.uint8), bitorder="little")
        if bits[count:].any():
            raise CorruptBatch(f"a batch has a validity bitmap of {what} that marks more than its {count} records")
        return section, bits[:count].view(np.bool_)

    def runs(self, count: int, first_append_ms: int) -> Runs:
        number = int.from_bytes(memoryview(self.take(8, "append runs")), "little")
        if not 1 < number <= count:
            raise CorruptBatch(f"a batch of {count} records has {number} append runs, not 2 to {count}")
        table = np.frombuffer(self.numbers(number * 16, "append runs"), "<i8").reshape(2, number)
        counts, times = table
        # Check the bounds of each count first, so that the sum cannot overflow.
        if counts.min() < 1 or counts.max() > count or int(counts.sum()) != count:
            raise CorruptBatch(f"a batch of {count} records has append runs that do not add up to them")
        if times[0] != first_append_ms:
            raise CorruptBatch(
                f"a batch has append time {first_append_ms} in its header, but {times[0]} in its first run"
            )
        return tuple(zip(counts.tolist(), times.tolist(), strict=True))

    def end(self) -> None:
        if self._position != len(self._bytes):
            raise CorruptBatch(f"a batch has {len(self._bytes) - self._position} bytes after its last section")


def _decompress(region: pa.Buffer, codec: Codec) -> pa.Buffer:
    if region.size < 8:
        raise CorruptBatch(f"a compressed batch ends early: {region.size} bytes after its header")
    size = int.from_bytes(memoryview(region)[:8], "little")
    if size > BATCH_BYTES_MAX:
        raise CorruptBatch(f"a compressed batch says it has {size} bytes uncompressed, more than {BATCH_BYTES_MAX}")
    try:
        # Not Codec.decompress: given a size that is too large, it returns uninitialized memory behind the data.
        with pa.CompressedInputStream(pa.BufferReader(region.slice(8)), codec.value) as stream:
            sections = stream.read_buffer(size)
            rest = stream.read(1)
    except (OSError, pa.ArrowException) as error:
        raise CorruptBatch(f"a batch cannot be decompressed as {codec.value}: {error}") from error
    if sections.size != size or rest:
        raise CorruptBatch(f"a compressed batch does not have the {size} bytes uncompressed that it says")
    return sections


def _nullable_array(
    buffers: Sequence[pa.Buffer], bitmap: pa.Buffer, present: npt.NDArray[np.bool_], what: str
) -> pa.BinaryArray:
    offsets = np.frombuffer(buffers[0], _OFFSETS)
    if (offsets[1:] != offsets[:-1])[~present].any():
        raise CorruptBatch(f"a batch has null {what} with bytes")
    return _binary_array(buffers, len(present), what, bitmap, len(present) - int(np.count_nonzero(present)))


def _binary_array(
    buffers: Sequence[pa.Buffer], count: int, what: str, bitmap: pa.Buffer | None = None, nulls: int = 0
) -> pa.BinaryArray:
    array = pa.Array.from_buffers(_BINARY, count, [bitmap, *buffers], nulls)
    try:
        array.validate(full=True)
    except pa.ArrowInvalid as error:
        raise CorruptBatch(f"a batch has {what} whose offsets do not begin at 0 and grow: {error}") from error
    return array


def _check_stamped(columns: Columns) -> None:
    """Raise `InvalidArgument` if the columns would make a batch that `decode` refuses."""
    values, keys, timestamps, headers, runs = columns
    count = len(values)
    if count == 0:
        raise InvalidArgument("a batch has at least one record: there is nothing to encode")
    covered = sum([length for length, _ in runs])
    if covered != count or min(runs)[0] < 1:
        raise InvalidArgument(f"append runs cover {covered} of {count} records: stamp them first")
    if timestamps is not None and timestamps.null_count:
        raise InvalidArgument(f"{timestamps.null_count} records have no timestamp: stamp them first")
    _check_column("values", values, _BINARY, count)
    if keys is not None:
        _check_column("keys", keys, _BINARY, count)
    if timestamps is not None:
        _check_column("timestamps", timestamps, _INT64, count)
    if headers is not None:
        _check_column("headers", headers, _BINARY, count)


def _check_column(name: str, array: Any, wanted: Any, count: int) -> None:
    if array.type != wanted or len(array) != count:
        raise InvalidArgument(f"{name} of {count} records are {len(array)} of type {array.type}, not of type {wanted}")


def _binary_sections(arrays: Sequence[Any]) -> tuple[Sequence[Buffer], Sequence[Buffer]]:
    """Return the offsets, from 0 on, and the bytes that they point to: of a slice, only its own; of nulls, none."""
    if len(arrays) == 1 and not arrays[0].null_count:
        found = _stored_sections(arrays[0])
        if found is not None:
            return found
    wholes = [array.fill_null(b"") if array.null_count else array for array in arrays]
    sizes = [binary_size(array) for array in wholes]
    if sum(sizes) > BATCH_BYTES_MAX:
        raise RecordTooLarge(
            f"a batch with a column of {sum(sizes)} bytes is over {BATCH_BYTES_MAX}: append fewer at a time"
        )
    all_offsets: list[npt.NDArray[np.int32]] = []
    data: list[Buffer] = []
    end = 0
    for array, size in zip(wholes, sizes, strict=True):
        offsets = binary_offsets(array)
        first = int(offsets[0])
        if size:
            data.append(memoryview(array.buffers()[2])[first : first + size])
        all_offsets.append((offsets if first == end else offsets + np.int32(end - first))[1 if all_offsets else 0 :])
        end += size
    if len(data) > 1 and end < len(data) * SMALL_BYTES_MAX:
        data = [b"".join(data)]
    return [_bytes_of(all_offsets[0] if len(all_offsets) == 1 else np.concatenate(all_offsets))], data


def _stored_sections(array: Any) -> tuple[Sequence[Buffer], Sequence[Buffer]] | None:
    """Return the sections of an array whose memory already has the stored form, else None. This makes flushes of many
    small batches fast.
    """
    _, offsets, data = array.buffers()
    stored = memoryview(offsets)[array.offset * 4 : (array.offset + len(array) + 1) * 4]
    first, end = _OFFSET.unpack_from(stored)[0], _OFFSET.unpack_from(stored, len(array) * 4)[0]
    if first or end > BATCH_BYTES_MAX:
        return None
    return [stored], [memoryview(data)[:end]] if end else []


def _bitmap(arrays: Sequence[Any]) -> Buffer:
    valid = [array.is_valid().to_numpy(zero_copy_only=False) for array in arrays]
    return np.packbits(np.concatenate(valid), bitorder="little").tobytes()


def padded_length(length: int) -> int:
    """Return a length rounded up to a multiple of 8, as all formats pad their parts."""
    return length + -length % 8


def _bytes_of(numbers: npt.NDArray[Any]) -> memoryview:
    return numbers.view(np.uint8).data
