"""Reads a log of segments from any process, beside its writer.

The tail file says how far to read, so no frame is read before it is durable. A frame is found by the index and a short
scan, checked, and decoded into Arrow columns that are views of the bytes as read. Segments that are removed while they
are read stay open until the read is done.
"""

from __future__ import annotations

import asyncio
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import Final, TypeVar

from llog.batch.columns import Columns, append_times, effective_timestamps, slice_columns
from llog.engines.disk.format import tail
from llog.engines.disk.format.bodies import RecordRun, decode_frame
from llog.engines.disk.format.files import LOG, TAIL, UNSYNCED, file_numbers, translate_os_errors, unavailable
from llog.engines.disk.format.frames import Frame
from llog.engines.disk.format.index import Maxima, maxima_of
from llog.engines.disk.format.segment import FrameStart, Segment
from llog.engines.disk.log.inspection import FrameInfo, SegmentInfo, inspect_frames, inspect_segments
from llog.engines.disk.log.log import SegmentLog
from llog.engines.disk.log.recovery import examine_segment
from llog.engines.disk.options import SegmentOptions
from llog.errors import CorruptBatch, LlogError, OffsetOutOfRange
from llog.log.engine import Bounds
from llog.model import FIRST_OFFSET, TimestampType
from llog.runtime import Runtime, SystemRuntime

T = TypeVar("T")

_SEGMENTS_OPEN_MAX: Final = 16
_HINTS_MAX: Final = 64
_ATTEMPTS: Final = 3
_WINDOW: Final = 64 << 10
_MAP_BYTES_MIN: Final = 256 << 10
"""Reads of at least this size are memory-mapped, not copied: fresh memory costs more page faults than the mapping."""
_POLL_S_MIN: Final = 0.002
_POLL_S_MAX: Final = 0.05


class SegmentReader:
    """A log may have any number of readers, in any processes. `what` names the log in errors.

    A reader that is given the `SegmentLog` of its process learns of appends without reading the tail file.
    """

    def __init__(self, directory: Path, runtime: Runtime, what: str, log: SegmentLog | None) -> None:
        self.directory = directory
        self.what = what
        self._runtime = runtime
        self._log = log
        self._mutex = threading.Lock()
        self._segments: OrderedDict[int, Segment] = OrderedDict()
        self._hints: OrderedDict[int, tuple[int, FrameStart]] = OrderedDict()
        """Where reads ended, by the next offset: a read that continues there needs no index."""
        self._bases: list[int] = []
        self._tail: FileIO | None = None

    @classmethod
    def open(
        cls,
        directory: Path,
        runtime: Runtime | None = None,
        *,
        what: str = "the log",
        log: SegmentLog | None = None,
    ) -> SegmentReader:
        """Return a reader without touching files: a missing directory, or one without segments, is an empty log."""
        return cls(directory.absolute(), runtime or SystemRuntime(), what, log)

    async def bounds(self) -> Bounds:
        known = self._known_bounds()
        return await self._run(self.bounds_now) if known is None else known

    async def read(
        self, offset: int, max_bytes: int = 8 << 20, *, stop: int | None = None
    ) -> list[tuple[int, Columns]]:
        """Return (start offset, records) from `offset` on: at least one if any exists, up to about `max_bytes`, and
        none at the next offset.

        None begins at or above `stop`; the last one may reach beyond it. Where key compaction removed records, the
        first begins above `offset`. Stops before the first unreadable record; the next read raises.
        """
        return await self._run(lambda: self.read_now(offset, max_bytes, stop))

    async def offset_for_time(self, timestamp_ms: int, by: TimestampType) -> int:
        """Return the first offset whose time, as a running maximum, is at or after this time; else the next offset."""
        return await self._run(lambda: self.offset_for_time_now(timestamp_ms, by))

    async def wait(self, past_offset: int, timeout: float) -> bool:
        """Wait up to `timeout` seconds for a record at `past_offset`, and return whether there is one."""
        if (await self.bounds()).next_offset > past_offset:
            return True
        try:
            async with asyncio.timeout(timeout):
                pause_s = _POLL_S_MIN
                while True:
                    if self._log is not None:
                        next_commit = self._log.next_commit()
                        if self._log.bounds().next_offset > past_offset:
                            next_commit.cancel()
                            return True
                        await next_commit
                        continue
                    await self._runtime.sleep(pause_s)
                    pause_s = min(pause_s * 2, _POLL_S_MAX)
                    if (await self.bounds()).next_offset > past_offset:
                        return True
        except TimeoutError:
            return False

    def bounds_now(self) -> Bounds:
        """Blocking variant of `bounds`; other names that end in `_now` block, too."""
        known = self._known_bounds()
        return self._scan_bounds() if known is None else known

    def read_now(self, offset: int, max_bytes: int = 8 << 20, stop: int | None = None) -> list[tuple[int, Columns]]:
        bounds = self._bounds_with(offset)
        end = bounds.next_offset if stop is None else min(stop, bounds.next_offset)
        found: list[RecordRun] = []
        size = misses = 0
        with translate_os_errors("read", self.directory):
            while offset < end and (not found or size < max_bytes):
                try:
                    reached, length = self._read_segment(offset, end, max_bytes - size, found)
                except (FileNotFoundError, _OffsetNotInSegment) as error:
                    # A segment was trimmed, replaced or begun since the directory was listed: list it again.
                    misses += 1
                    self._forget()
                    self._bounds_with(offset)
                    if misses >= _ATTEMPTS:
                        if found:
                            break
                        raise CorruptBatch(f"offset {offset} of {self.what} cannot be found: {error}") from error
                    continue
                except CorruptBatch:
                    if found:
                        break
                    raise
                offset, size = reached, size + length
        return [part for part in found if part[0] < end]

    def offset_for_time_now(self, timestamp_ms: int, by: TimestampType) -> int:
        for attempt in range(_ATTEMPTS):
            bounds = self.bounds_now()
            try:
                with translate_os_errors("read", self.directory):
                    return max(self._search_time(timestamp_ms, by, bounds), bounds.log_start_offset)
            except (LlogError, FileNotFoundError):
                # A segment was trimmed or replaced since the directory was listed: search again.
                if attempt + 1 == _ATTEMPTS:
                    raise
                self._forget()
        raise AssertionError

    def frames(self, from_offset: int | None = None) -> Iterator[FrameInfo]:
        """Yield every frame from `from_offset` on, checked; damaged bytes are a frame with a `problem`."""
        bounds = self.bounds_now()
        return inspect_frames(self.directory, bounds, max(from_offset or 0, bounds.log_start_offset))

    def describe(self) -> list[SegmentInfo]:
        """Describe the segments of the log."""
        return inspect_segments(self.directory, self.bounds_now())

    def close(self) -> None:
        self._forget()
        self._tail = None

    def index_bytes(self) -> int:
        """Return the most memory that the indexes of open segments take."""
        with self._mutex:
            return sum(segment.index_bytes() for segment in self._segments.values())

    def _known_bounds(self) -> Bounds | None:
        if self._log is not None:
            return self._log.bounds()
        file = self._tail
        if file is None:
            try:
                file = self._tail = FileIO(self.directory / TAIL)
            except FileNotFoundError:
                return None
            except OSError as error:
                raise unavailable("read", self.directory / TAIL, error) from error
        return tail.read_tail(file.fileno())

    def _scan_bounds(self) -> Bounds:
        """Find the bounds in the segments themselves, if no writer has opened the log since the machine started."""
        with translate_os_errors("read", self.directory):
            start = tail.read_log_start(self.directory)
            bases = file_numbers(self.directory, LOG)
            if not bases:
                return Bounds(start or FIRST_OFFSET, start or FIRST_OFFSET)
            unsynced = (self.directory / UNSYNCED).exists()
            for base in reversed(bases):
                found = examine_segment(self.directory, base, SegmentOptions(), Maxima(), unsynced=unsynced)
                if found.position or base == bases[0]:
                    break
            next_offset = max(found.next_offset, bases[-1])
            return Bounds(min(max(start or FIRST_OFFSET, bases[0]), next_offset), next_offset)

    def _bounds_with(self, offset: int) -> Bounds:
        bounds = self.bounds_now()
        if not bounds.log_start_offset <= offset <= bounds.next_offset:
            raise OffsetOutOfRange(self.what, offset, *bounds)
        return bounds

    def _read_segment(self, offset: int, end: int, max_bytes: int, found: list[RecordRun]) -> tuple[int, int]:
        """Add the parts from `offset` on, up to `max_bytes`, of one segment to `found`; return the offset to continue
        at, and the bytes read.
        """
        segment = self._segment_of(offset)
        size = segment.size()
        with self._mutex:
            base, start = self._hints.pop(offset, (0, FrameStart(0, 0)))
        # The segment may have been replaced since the hint was left.
        if base != segment.base or not segment.has_frame(start, size):
            start = segment.floor(offset, size)
        # Near the end, copying a little is cheaper than mapping a file that grows with every append.
        large = min(max_bytes, size - start.position) >= _MAP_BYTES_MIN
        scan = segment.scan(start, size, window=_WINDOW, mapped=large)
        length, reached, position = 0, offset, start.position
        for located in scan:
            frame = located.frame
            if scan.offset <= offset:
                if scan.offset >= end:
                    break
                continue
            try:
                parts = decode_frame(scan, located)
            except CorruptBatch as error:
                if reached > offset:
                    break
                raise CorruptBatch(
                    f"offsets {frame.base_offset} to {frame.next_offset - 1} of {self.what} are damaged in "
                    f"{segment.path} at byte {located.position}: {error}"
                ) from error
            found += _parts_from(parts, offset)
            reached, position = scan.offset, scan.position
            length += frame.length
            if reached >= end or (length >= max_bytes and found):
                break
        if reached == offset:
            if scan.problem is not None and scan.offset < end:
                raise CorruptBatch(
                    f"offset {offset} of {self.what} cannot be read: {segment.path} is damaged at byte "
                    f"{scan.position}: {scan.problem}"
                )
            raise _OffsetNotInSegment(f"{segment.path} ends at offset {scan.offset - 1}")
        with self._mutex:
            self._hints[reached] = segment.base, FrameStart(position, reached)
            while len(self._hints) > _HINTS_MAX:
                self._hints.popitem(last=False)
        return reached, length

    def _search_time(self, timestamp_ms: int, by: TimestampType, bounds: Bounds) -> int:
        """Find the segment by the times of last frames, the frame by the time index, the record by its time."""
        if bounds.log_start_offset == bounds.next_offset:
            return bounds.next_offset
        bases = file_numbers(self.directory, LOG)
        bases = [base for base in bases if base < bounds.next_offset]
        low, high = max(bisect_right(bases, bounds.log_start_offset) - 1, 0), len(bases) - 1
        while low < high:
            middle = (low + high) // 2
            segment = self._open_segment(bases[middle])
            if segment.maxima_at_end(segment.size()).time(by) < timestamp_ms:
                low = middle + 1
            else:
                high = middle
        segment = self._open_segment(bases[low])
        size = segment.size()
        scan = segment.scan(segment.before_time(timestamp_ms, by, size), size)
        for located in scan:
            frame = located.frame
            if frame.base_offset >= bounds.next_offset:
                break
            if maxima_of(frame).time(by) >= timestamp_ms:
                return _first_offset_at_time(decode_frame(scan, located), frame, timestamp_ms, by)
        if scan.problem is not None and scan.offset < bounds.next_offset:
            raise CorruptBatch(f"{segment.path} is damaged at byte {scan.position}: {scan.problem}")
        return bounds.next_offset

    def _segment_of(self, offset: int) -> Segment:
        """Return the segment of `offset`, by the last listing of the directory."""
        bases = self._bases = self._bases or file_numbers(self.directory, LOG)
        number = bisect_right(bases, offset) - 1
        if number < 0:
            raise _OffsetNotInSegment(f"the first segment begins at {bases[0] if bases else 'no offset'}")
        return self._open_segment(bases[number])

    def _open_segment(self, base: int) -> Segment:
        """Return the open segment with this base; opens it if needed, and again if its file was replaced under the same
        name.
        """
        with self._mutex:
            segment = self._segments.pop(base, None)
            if segment is None or segment.is_gone():
                segment = Segment(self.directory, base)
            self._segments[base] = segment
            while len(self._segments) > _SEGMENTS_OPEN_MAX:
                self._segments.popitem(last=False)
            return segment

    def _forget(self) -> None:
        with self._mutex:
            self._segments.clear()
            self._hints.clear()
            self._bases = []

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(None, work)


class _OffsetNotInSegment(Exception):
    """An offset is not in the segment that should contain it."""


def _parts_from(parts: list[RecordRun], offset: int) -> list[RecordRun]:
    """Return the records of these parts from `offset` on."""
    if parts and parts[0][0] >= offset:
        return parts
    kept = []
    for start, columns in parts:
        skipped = max(offset - start, 0)
        if skipped < columns.count:
            kept.append((start + skipped, slice_columns(columns, skipped, columns.count)))
    return kept


def _first_offset_at_time(parts: list[RecordRun], frame: Frame, timestamp_ms: int, by: TimestampType) -> int:
    """Return the first offset of a frame that reaches this time; the frame's base if key compaction removed it."""
    for start, columns in parts:
        times = append_times(columns) if by is TimestampType.APPEND else effective_timestamps(columns).to_numpy()
        reached = (times >= timestamp_ms).nonzero()[0]
        if len(reached):
            return start + int(reached[0])
    return frame.base_offset
