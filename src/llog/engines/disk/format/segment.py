"""One segment opened for reading: its frames, and where to begin to find an offset or a time."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Final, NamedTuple

from llog.engines.disk.format.files import INDEX, LOG, TIMEINDEX, file_name, is_removed
from llog.engines.disk.format.frames import Frame, Scan
from llog.engines.disk.format.index import (
    Index,
    IndexRule,
    Maxima,
    TimeIndex,
    count_sound_entries,
    count_sound_time_entries,
    maxima_of,
)
from llog.model import TimestampType

HEADERS_WINDOW: Final = 16 << 10
BUILT_INTERVAL_BYTES: Final = 4 << 10
"""The interval of indexes that are built in memory because the file is missing or damaged."""


class FrameStart(NamedTuple):
    """The position in a segment where a frame begins, and the frame's base offset."""

    position: int
    offset: int


class Segment:
    """Stays readable when its files are removed or replaced: it holds them open until it is garbage-collected."""

    def __init__(self, directory: Path, base: int) -> None:
        self.base = base
        self.path = directory / file_name(base, LOG)
        self._file = FileIO(self.path)
        self.descriptor = self._file.fileno()
        self._index_file = _open_if_exists(directory / file_name(base, INDEX))
        self._time_file = _open_if_exists(directory / file_name(base, TIMEINDEX))
        self._index: Index | None = None
        self._times: TimeIndex | None = None
        self._sizes = (-1, -1)
        self._memory: memoryview | None = None
        self._built: tuple[bytes, bytes] | None = None

    def size(self) -> int:
        """Return the size of the segment's file, without `fstat`: see `is_removed`."""
        return os.lseek(self.descriptor, 0, os.SEEK_END)

    def is_gone(self) -> bool:
        """Whether the segment's file was removed or replaced."""
        return is_removed(self.descriptor)

    def scan(
        self, start: FrameStart, end: int, *, bodies: bool = False, window: int = HEADERS_WINDOW, mapped: bool = False
    ) -> Scan:
        """Scan the frames from `start` up to `end`. `mapped` reads them from a memory map, which is safe only if no
        process truncates the file below `end` any more.
        """
        memory = self._map_up_to(end) if mapped else None
        return Scan(self.descriptor, start.position, end, start.offset, bodies=bodies, window=window, mapped=memory)

    def floor(self, offset: int, end: int) -> FrameStart:
        """Return the last indexed frame at or below `offset` that exists; the segment's first frame if none does."""
        for attempt in range(2):
            index, _ = self._indexes(end, again=attempt > 0)
            number = index.floor(offset - self.base)
            if number < 0:
                break
            entry = index[number]
            start = FrameStart(entry.position, self.base + entry.relative_offset)
            if self.has_frame(start, end):
                return start
        return FrameStart(0, self.base)

    def before_time(self, timestamp_ms: int, by: TimestampType, end: int) -> FrameStart:
        """Return an indexed frame before which no record reaches this time; the segment's first frame if the index has
        none.
        """
        for attempt in range(2):
            _, times = self._indexes(end, again=attempt > 0)
            number = times.before(timestamp_ms, by)
            if number < 0:
                break
            entry = times[number]
            start = FrameStart(entry.position, self.base + entry.relative_offset)
            if self.has_frame(start, end):
                return start
        return FrameStart(0, self.base)

    def maxima_at_end(self, end: int) -> Maxima:
        """Return the highest times of the log up to the end of this segment, from the headers of its last frames."""
        index, _ = self._indexes(end, again=False)
        for number in range(len(index) - 1, -1, -1):
            entry = index[number]
            start = FrameStart(entry.position, self.base + entry.relative_offset)
            if self.has_frame(start, end):
                break
        else:
            start = FrameStart(0, self.base)
        maxima = Maxima()
        for located in self.scan(start, end):
            maxima = maxima_of(located.frame)
        return maxima

    def build_indexes(
        self, end: int, interval_bytes: int, interval_records: int | None, before: Maxima
    ) -> tuple[bytes, bytes]:
        """Build both indexes from the frames up to `end`. `before` are the highest times of the log before this
        segment.
        """
        rule = IndexRule(self.base, interval_bytes, interval_records)
        entries, times = bytearray(), bytearray()
        for located in self.scan(FrameStart(0, self.base), end):
            entry, time_entry = rule.entries(located.position, located.frame.base_offset, before)
            entries += entry
            times += time_entry
            before = maxima_of(located.frame)
        return bytes(entries), bytes(times)

    def indexed_frames(self, end: int) -> Iterator[FrameStart]:
        """Yield where the index says that frames begin, in order."""
        index, _ = self._indexes(end, again=False)
        for number in range(len(index)):
            yield FrameStart(index[number].position, self.base + index[number].relative_offset)

    def _map_up_to(self, end: int) -> memoryview:
        """Return the file up to `end`, memory-mapped once, and again when it has grown: pages already touched are free.

        The view stops at `end`: bytes behind it may have been truncated since, and reading those would kill the
        process.
        """
        memory = self._memory
        if memory is None or len(memory) < end:
            memory = memoryview(mmap.mmap(self.descriptor, end, prot=mmap.PROT_READ))
            self._memory = memory
        return memory[:end]

    def index_problem(self, end: int) -> str | None:
        """Return what is wrong with the index files of this segment; None if they are sound."""
        if self._index_file is None or self._time_file is None:
            return "missing"
        data = os.pread(self._index_file.fileno(), end, 0)
        times = os.pread(self._time_file.fileno(), end, 0)
        if count_sound_entries(data, end) * 8 != len(data) or count_sound_time_entries(times, end) * 24 != len(times):
            return "damaged"
        if end and not times:
            return "empty"
        return None

    def index_bytes(self) -> int:
        """Return the size of both indexes, in memory or mapped."""
        if self._built is not None:
            return sum(map(len, self._built))
        files = (self._index_file, self._time_file)
        return sum(os.fstat(file.fileno()).st_size for file in files if file is not None)

    def _indexes(self, end: int, *, again: bool) -> tuple[Index, TimeIndex]:
        """Return the indexes as mapped from their files; built from the frames if a file is missing, or if `again` says
        that an entry pointed at no frame.
        """
        if self._built is None and (again or self._index_file is None or self._time_file is None):
            built = self.build_indexes(end, BUILT_INTERVAL_BYTES, None, Maxima())
            self._index, self._times = Index(built[0]), TimeIndex(built[1])
            self._built = built  # set last: other threads use the built indexes from now on
        if self._built is None and self._index_file is not None and self._time_file is not None:
            sizes = (os.fstat(self._index_file.fileno()).st_size, os.fstat(self._time_file.fileno()).st_size)
            if sizes != self._sizes:
                self._index = Index(_map_file(self._index_file, sizes[0] // 8 * 8))
                self._times = TimeIndex(_map_file(self._time_file, sizes[1] // 24 * 24))
                self._sizes = sizes
        assert self._index is not None and self._times is not None  # noqa: PT018
        return self._index, self._times

    def has_frame(self, start: FrameStart, end: int) -> bool:
        return self.frame_at(start, end) is not None

    def frame_at(self, start: FrameStart, end: int) -> Frame | None:
        """Return the header of the frame that begins there; None if none does."""
        located = next(iter(self.scan(start, end)), None)
        return None if located is None else located.frame


def _open_if_exists(path: Path) -> FileIO | None:
    try:
        return FileIO(path)
    except FileNotFoundError:
        return None


def _map_file(file: FileIO, size: int) -> mmap.mmap | bytes:
    return mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) if size else b""
