"""Kafka's varints (zigzag, 7 bits per byte, the lowest first) over whole arrays of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from llog.batch.columns import Buffer
from llog.errors import InvalidRecord

Positions = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.int64]

WIDTH_MAX: Final = 8
"""Varints of more bytes are not read: they hold numbers of more than 55 bits, which no valid record has."""

_WORD_BYTES: Final = 8
_WORD: Final = np.dtype("<u8")
_EVERY_BYTE: Final = np.uint64(0x0101010101010101)
_MORE: Final = np.uint64(0x8080808080808080)
"""The bit of each byte that says that another one follows."""
_JOINS: Final = tuple(
    (np.uint64(low), np.uint64(low << width), np.uint64(shift))
    for low, width, shift in (
        (0x007F007F007F007F, 8, 1),
        (0x00003FFF00003FFF, 16, 2),
        (0x000000000FFFFFFF, 32, 4),
    )
)
"""Each step joins neighbouring groups of bits: the mask of the lower ones, that of the higher ones, and how far these
move.
"""
_LIMITS: Final = np.uint64(1) << np.arange(7, 64, 7, dtype=np.uint64)
"""A number at or above the k-th limit needs more than k + 1 bytes."""
_ONE_BYTE: Final = tuple(bytes([number << 1 ^ number >> 63]) for number in (*range(64), *range(-64, 0)))
"""The varints of one byte; those of negative numbers come last, where a negative index finds them."""


class Varints(NamedTuple):
    """Numbers, and the position after each."""

    numbers: Numbers
    ends: Positions


class VarintReader:
    """Reads varints at many positions of some bytes at once."""

    def __init__(self, data: memoryview) -> None:
        self.size: Final = len(data)
        # Eight bytes from every position on; those near the end come from a copy that zeros follow.
        self._tail_start = max(0, self.size - _WORD_BYTES + 1)
        self._words = _words(data)
        self._tail = _words(memoryview(bytes(data[self._tail_start :]) + bytes(_WORD_BYTES)))

    def read(self, positions: Positions) -> Varints:
        """Read the varints at `positions`, which ascend up to the size of the data, where zeros seem to follow.

        The end of one that is wider than `WIDTH_MAX` is beyond the data.
        """
        words = self._words_at(positions)
        second = words >> np.uint64(7) & np.uint64(1)
        if not np.count_nonzero(second):
            return Varints(_unzigzag(words & np.uint64(0x7F)), positions + 1)
        if not np.count_nonzero(words & second << np.uint64(15)):
            numbers = words & np.uint64(0x7F) | words >> np.uint64(1) & second * np.uint64(0x3F80)
            return Varints(_unzigzag(numbers), positions + second.view(np.int64) + 1)
        last = ~words & _MORE
        used = last ^ (last - np.uint64(1))  # every bit up to the lowest one of `last`
        widths = ((used & _EVERY_BYTE) * _EVERY_BYTE >> np.uint64(56)).astype(np.int64)
        numbers = words & used & ~_MORE
        for low, high, shift in _JOINS:
            numbers = (numbers & low) | (numbers & high) >> shift
        ends = positions + widths
        if np.count_nonzero(last) < len(last):
            ends[last == 0] = self.size + 1
        return Varints(_unzigzag(numbers), ends)

    def _words_at(self, positions: Positions) -> npt.NDArray[np.uint64]:
        late = int(np.searchsorted(positions, self._tail_start))
        if late == len(positions):
            return self._words[positions]
        return np.concatenate((self._words[positions[:late]], self._tail[positions[late:] - self._tail_start]))


class Field:
    """Numbers that are to be written as varints, one per record."""

    def __init__(self, numbers: Numbers) -> None:
        self._unsigned = (numbers << 1 ^ numbers >> 63).view(np.uint64)
        self.widths: Final = np.searchsorted(_LIMITS, self._unsigned, side="right") + 1
        self.width_max: Final = int(self.widths.max())

    def write(self, matrix: npt.NDArray[np.uint8], used: npt.NDArray[np.bool_]) -> None:
        """Write one number into each row of a matrix `width_max` wide, and which of its bytes are used."""
        for column in range(self.width_max):
            more = self.widths > column + 1
            low = (self._unsigned >> np.uint64(7 * column)).astype(np.uint8)
            matrix[:, column] = np.where(more, low | 0x80, low & 0x7F)
            used[:, column] = self.widths > column


def rows(fields: Sequence[Field]) -> pa.BinaryArray:
    """Return the numbers of all fields, one after the other, for each record."""
    count = len(fields[0].widths)
    width = sum(field.width_max for field in fields)
    matrix = np.empty((count, width), np.uint8)
    used = np.empty((count, width), np.bool_)
    offsets = np.zeros(count + 1, np.int32)
    column = 0
    for field in fields:
        columns = slice(column, column + field.width_max)
        field.write(matrix[:, columns], used[:, columns])
        column += field.width_max
        offsets[1:] += field.widths.astype(np.int32)
    np.cumsum(offsets, out=offsets)
    return pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(matrix[used])])


def read_one(data: Buffer, position: int) -> tuple[int, int]:
    """Return the number at a position, and the position after it; raises `InvalidRecord` if it is cut short or wider
    than `WIDTH_MAX`.
    """
    if position < len(data) and (byte := data[position]) < 0x80:
        return byte >> 1 ^ -(byte & 1), position + 1
    unsigned = shift = 0
    for byte in data[position : position + WIDTH_MAX]:
        unsigned |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return unsigned >> 1 ^ -(unsigned & 1), position + shift // 7
    raise InvalidRecord("a Kafka batch has a number that is cut short or too wide")


def write_one(number: int) -> bytes:
    """Return one number as a varint."""
    if -64 <= number < 64:
        return _ONE_BYTE[number]
    unsigned = number << 1 ^ number >> 63
    found = bytearray()
    while unsigned >= 0x80:
        found.append(unsigned & 0x7F | 0x80)
        unsigned >>= 7
    found.append(unsigned)
    return bytes(found)


def _words(data: memoryview) -> npt.NDArray[np.uint64]:
    return np.ndarray((max(0, len(data) - _WORD_BYTES + 1),), _WORD, data, strides=(1,))


def _unzigzag(unsigned: npt.NDArray[np.uint64]) -> Numbers:
    return (unsigned >> np.uint64(1)).view(np.int64) ^ -(unsigned & np.uint64(1)).view(np.int64)
