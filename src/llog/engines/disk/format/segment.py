"""One segment opened for reading: its frames, and where to begin to find an offset or a time."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Final, NamedTuple

from llog.engines.disk.format.files import INDEX, LOG, TIMEINDEX, is_removed, name_of
from llog.engines.disk.format.frames import Frame, Scan
from llog.engines.disk.format.index import (
    Index,
    IndexRule,
    Maxima,
    TimeIndex,
    maxima_of,
    sound_entries,
    sound_time_entries,
)
from llog.model import TimestampType

HEADERS_WINDOW: Final = 16 << 10
BUILT_INTERVAL_BYTES: Final = 4 << 10
"""Of indexes that are made in memory because the file is missing or damaged."""


class Start(NamedTuple):
    """A place where a frame begins, and its base offset."""

    position: int
    offset: int


class Segment:
    """Stays readable when its files are removed or replaced: they are open. They close when nobody refers to this any
    more.
    """

    def __init__(self, directory: Path, base: int) -> None:
        self.base = base
        self.path = directory / name_of(base, LOG)
        self._file = FileIO(self.path)
        self.descriptor = self._file.fileno()
        self._index_file = _opened(directory / name_of(base, INDEX))
        self._time_file = _opened(directory / name_of(base, TIMEINDEX))
        self._index: Index | None = None
        self._times: TimeIndex | None = None
        self._sizes = (-1, -1)
        self._memory: memoryview | None = None
        self._built: tuple[bytes, bytes] | None = None

    def size(self) -> int:
        """Not by `fstat`: see `is_removed`."""
        return os.lseek(self.descriptor, 0, os.SEEK_END)

    def is_gone(self) -> bool:
        """Whether its file was removed or replaced."""
        return is_removed(self.descriptor)

    def scan(
        self, start: Start, end: int, *, bodies: bool = False, window: int = HEADERS_WINDOW, mapped: bool = False
    ) -> Scan:
        """`mapped`: in the file's memory, which only those may touch who know that no byte up to `end` is cut off any
        more.
        """
        memory = self._whole(end) if mapped else None
        return Scan(self.descriptor, start.position, end, start.offset, bodies=bodies, window=window, mapped=memory)

    def floor(self, offset: int, end: int) -> Start:
        """The indexed frame nearest below `offset` that is really there; the segment's first one if none is."""
        for attempt in range(2):
            index, _ = self._indexes(end, again=attempt > 0)
            number = index.floor(offset - self.base)
            if number < 0:
                break
            entry = index[number]
            start = Start(entry.position, self.base + entry.relative_offset)
            if self.has_frame(start, end):
                return start
        return Start(0, self.base)

    def before_time(self, timestamp_ms: int, by: TimestampType, end: int) -> Start:
        """An indexed frame below which no record has this time; the segment's first one if it knows of none."""
        for attempt in range(2):
            _, times = self._indexes(end, again=attempt > 0)
            number = times.before(timestamp_ms, by)
            if number < 0:
                break
            entry = times[number]
            start = Start(entry.position, self.base + entry.relative_offset)
            if self.has_frame(start, end):
                return start
        return Start(0, self.base)

    def maxima_at_end(self, end: int) -> Maxima:
        """The highest times of the log up to the end of this segment, from the headers of its last frames."""
        index, _ = self._indexes(end, again=False)
        for number in range(len(index) - 1, -1, -1):
            entry = index[number]
            start = Start(entry.position, self.base + entry.relative_offset)
            if self.has_frame(start, end):
                break
        else:
            start = Start(0, self.base)
        maxima = Maxima()
        for located in self.scan(start, end):
            maxima = maxima_of(located.frame)
        return maxima

    def build(self, end: int, interval_bytes: int, interval_records: int | None, before: Maxima) -> tuple[bytes, bytes]:
        """Both indexes as its frames up to `end` make them. `before` are the highest times of the log before this
        segment.
        """
        rule = IndexRule(self.base, interval_bytes, interval_records)
        entries, times = bytearray(), bytearray()
        for located in self.scan(Start(0, self.base), end):
            entry, time_entry = rule.entries(located.position, located.frame.base_offset, before)
            entries += entry
            times += time_entry
            before = maxima_of(located.frame)
        return bytes(entries), bytes(times)

    def indexed(self, end: int) -> Iterator[Start]:
        """Where the index says that frames begin, in order."""
        index, _ = self._indexes(end, again=False)
        for number in range(len(index)):
            yield Start(index[number].position, self.base + index[number].relative_offset)

    def _whole(self, end: int) -> memoryview:
        """The file up to `end`, mapped once, and again when it has grown: pages that were touched before cost nothing
        then.

        Nothing behind `end`, which may be cut off since it was mapped: to touch that would end this process.
        """
        memory = self._memory
        if memory is None or len(memory) < end:
            memory = memoryview(mmap.mmap(self.descriptor, end, prot=mmap.PROT_READ))
            self._memory = memory
        return memory[:end]

    def index_problem(self, end: int) -> str | None:
        """Why the index files of this segment are of no use; None if they are."""
        if self._index_file is None or self._time_file is None:
            return "missing"
        data = os.pread(self._index_file.fileno(), end, 0)
        times = os.pread(self._time_file.fileno(), end, 0)
        if sound_entries(data, end) * 8 != len(data) or sound_time_entries(times, end) * 24 != len(times):
            return "damaged"
        if end and not times:
            return "empty"
        return None

    def index_bytes(self) -> int:
        """Bytes of both indexes that this holds or maps."""
        if self._built is not None:
            return sum(map(len, self._built))
        files = (self._index_file, self._time_file)
        return sum(os.fstat(file.fileno()).st_size for file in files if file is not None)

    def _indexes(self, end: int, *, again: bool) -> tuple[Index, TimeIndex]:
        """Mapped as they are now; made from the frames if the files are missing, or `again`: they have led astray."""
        if self._built is None and (again or self._index_file is None or self._time_file is None):
            built = self.build(end, BUILT_INTERVAL_BYTES, None, Maxima())
            self._index, self._times = Index(built[0]), TimeIndex(built[1])
            self._built = built  # last: another thread takes what is there from now on
        if self._built is None and self._index_file is not None and self._time_file is not None:
            sizes = (os.fstat(self._index_file.fileno()).st_size, os.fstat(self._time_file.fileno()).st_size)
            if sizes != self._sizes:
                self._index = Index(_mapped(self._index_file, sizes[0] // 8 * 8))
                self._times = TimeIndex(_mapped(self._time_file, sizes[1] // 24 * 24))
                self._sizes = sizes
        assert self._index is not None and self._times is not None  # noqa: PT018
        return self._index, self._times

    def has_frame(self, start: Start, end: int) -> bool:
        return self.frame_at(start, end) is not None

    def frame_at(self, start: Start, end: int) -> Frame | None:
        """The header of the frame that begins there; None if none does."""
        located = next(iter(self.scan(start, end)), None)
        return None if located is None else located.frame


def _opened(path: Path) -> FileIO | None:
    try:
        return FileIO(path)
    except FileNotFoundError:
        return None


def _mapped(file: FileIO, size: int) -> mmap.mmap | bytes:
    return mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) if size else b""
