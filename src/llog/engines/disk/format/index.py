"""The two sparse indexes of a segment. Both can be rebuilt from its frames, and neither is trusted: a reader checks
that there is a frame where an entry points.

`.index`, 8 bytes an entry, big-endian: u32 base offset of a frame relative to the segment's · u32 position of that
frame. `.timeindex`, 24 bytes, big-endian: i64 highest append time and i64 highest effective timestamp of the log before
a frame · u32 relative base offset · u32 position of that frame. Its first entry is that of the segment's first frame.

A frame gets an entry if the previous entry's frame lies at least `interval_bytes` (or `interval_records`) back; in the
time index, `TIME_FACTOR` times as far.
"""

from __future__ import annotations

import mmap
import os
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from llog.base.durable import FILE_MODE
from llog.engines.disk.format.files import sync_data
from llog.engines.disk.format.frames import Frame
from llog.model import TimestampType

ENTRY_BYTES: Final = 8
TIME_ENTRY_BYTES: Final = 24
TIME_FACTOR: Final = 8
_ENTRY: Final = struct.Struct(">II")
_TIME_ENTRY: Final = struct.Struct(">qqII")
_KEY: Final = struct.Struct(">I")
_TIME: Final = struct.Struct(">q")
_TIME_TYPE: Final = np.dtype([("append_ms", ">i8"), ("timestamp_ms", ">i8"), ("offset", ">u4"), ("position", ">u4")])
TIME_NONE: Final = -(1 << 63)
"""The highest time of a log without records."""


class OffsetEntry(NamedTuple):
    relative_offset: int
    position: int


class TimeEntry(NamedTuple):
    max_append_ms: int
    max_timestamp_ms: int
    relative_offset: int
    position: int


class Maxima(NamedTuple):
    """The highest times of a log up to some offset."""

    append_ms: int = TIME_NONE
    timestamp_ms: int = TIME_NONE

    def time(self, by: TimestampType) -> int:
        return self.append_ms if by is TimestampType.APPEND else self.timestamp_ms


class IndexRule:
    """Decides which frames of one segment get index entries, by the same rule when frames are written and when indexes
    are rebuilt.
    """

    def __init__(self, base: int, interval_bytes: int, interval_records: int | None) -> None:
        self._base = base
        self._bytes = interval_bytes
        self._records = interval_records
        self._last = OffsetEntry(0, 0)
        self._last_time: OffsetEntry | None = None

    def resume(self, last: OffsetEntry | None, last_time: TimeEntry | None) -> None:
        """Continue behind these last entries."""
        self._last = last or OffsetEntry(0, 0)
        self._last_time = None if last_time is None else OffsetEntry(last_time.relative_offset, last_time.position)

    def entries(self, position: int, base_offset: int, before: Maxima) -> tuple[bytes, bytes]:
        """Return the bytes that the frame at `position` adds to the index and to the time index."""
        relative = base_offset - self._base
        first = time = b""
        if self._is_due(self._last, relative, position, 1):
            self._last = OffsetEntry(relative, position)
            first = _ENTRY.pack(relative, position)
        if self._last_time is None or self._is_due(self._last_time, relative, position, TIME_FACTOR):
            self._last_time = OffsetEntry(relative, position)
            time = _TIME_ENTRY.pack(*before, relative, position)
        return first, time

    def _is_due(self, last: OffsetEntry, relative: int, position: int, factor: int) -> bool:
        if position - last.position >= self._bytes * factor:
            return True
        return self._records is not None and relative - last.relative_offset >= self._records * factor


PENDING_BYTES: Final = 128
"""How far the indexes of the newest segment lag behind: a write for every append would cost more than the longer scan
at the end.
"""


class IndexFile:
    """The end of a growing index. Entries that could not be written are kept and tried again, since an index may lag
    behind its log.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        self._size = os.fstat(self._descriptor).st_size
        self._pending = bytearray()

    def add(self, entry: bytes) -> None:
        self._pending += entry

    def flush(self, min_bytes: int = 1) -> None:
        """Write the pending entries if they are at least `min_bytes`."""
        if len(self._pending) < min_bytes:
            return
        written = os.pwrite(self._descriptor, self._pending, self._size)
        self._size += written
        del self._pending[:written]

    def sync(self) -> None:
        self.flush()
        sync_data(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


class Index:
    """A searchable index of offsets, memory-mapped or built in memory."""

    def __init__(self, data: mmap.mmap | bytes) -> None:
        self._data = data
        self._count = len(data) // ENTRY_BYTES

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> OffsetEntry:
        return OffsetEntry(*_ENTRY.unpack_from(self._data, number * ENTRY_BYTES))

    def floor(self, relative_offset: int) -> int:
        """Return the number of the last entry at or below this offset; -1 if none is."""
        return bisect_right(range(self._count), relative_offset, key=self._offset) - 1

    def _offset(self, number: int) -> int:
        found: int = _KEY.unpack_from(self._data, number * ENTRY_BYTES)[0]
        return found


class TimeIndex:
    """A searchable index of times, memory-mapped or built in memory."""

    def __init__(self, data: mmap.mmap | bytes) -> None:
        self._data = data
        self._count = len(data) // TIME_ENTRY_BYTES

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> TimeEntry:
        return TimeEntry(*_TIME_ENTRY.unpack_from(self._data, number * TIME_ENTRY_BYTES))

    def before(self, timestamp_ms: int, by: TimestampType) -> int:
        """Return the number of the last entry whose highest time is below this one; -1 if none is."""
        return bisect_left(range(self._count), timestamp_ms, key=self._time(by)) - 1

    def _time(self, by: TimestampType) -> Callable[[int], int]:
        field = 0 if by is TimestampType.APPEND else 8

        def time(number: int) -> int:
            found: int = _TIME.unpack_from(self._data, number * TIME_ENTRY_BYTES + field)[0]
            return found

        return time


def count_sound_entries(data: bytes, end: int) -> int:
    """Return how many entries, counted from the first, ascend and point below `end`."""
    table = np.frombuffer(data, ">u4", len(data) // ENTRY_BYTES * 2).reshape(-1, 2).astype(np.int64)
    if not len(table):
        return 0
    good = (table[:, 1] < end) & (table[:, 0] > 0) & (table[:, 1] > 0)
    good[1:] &= (table[1:] > table[:-1]).all(axis=1)
    return _count_leading(good)


def count_sound_time_entries(data: bytes, end: int) -> int:
    """Like `count_sound_entries`, for a time index: its first entry must also be that of the first frame, and its times
    must not decrease.
    """
    table = np.frombuffer(data, _TIME_TYPE, len(data) // TIME_ENTRY_BYTES)
    if not len(table):
        return 0
    offsets, positions = table["offset"].astype(np.int64), table["position"].astype(np.int64)
    good = positions < end
    good[0] &= bool(offsets[0] == 0 and positions[0] == 0)
    good[1:] &= (offsets[1:] > offsets[:-1]) & (positions[1:] > positions[:-1])
    for name in ("append_ms", "timestamp_ms"):
        times = table[name].astype(np.int64)
        good[1:] &= times[1:] >= times[:-1]
    return _count_leading(good)


def maxima_of(frame: Frame) -> Maxima:
    return Maxima(frame.max_append_ms, frame.max_timestamp_ms)


def _count_leading(good: npt.NDArray[np.bool_]) -> int:
    return len(good) if good.all() else int(good.argmin())
