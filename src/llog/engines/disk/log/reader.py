"""Reads a log of segments from any process, beside its writer.

The tail file says how far: no frame is read that is not durable yet. A frame is found by the index and a short scan,
checked, and decoded into Arrow columns that are views of the bytes as they were read. Segments that go while they are
read stay open until nobody needs them.
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
from llog.engines.disk.format.bodies import Part, parts_of
from llog.engines.disk.format.files import LOG, TAIL, UNSYNCED, explained, numbered, unavailable
from llog.engines.disk.format.frames import Frame
from llog.engines.disk.format.index import Maxima
from llog.engines.disk.format.segment import Segment, Start
from llog.engines.disk.log.inspection import Piece, SegmentInfo, describe, pieces
from llog.engines.disk.log.log import SegmentLog
from llog.engines.disk.log.recovery import examine
from llog.engines.disk.options import SegmentOptions
from llog.engines.port import Bounds
from llog.errors import CorruptBatch, LlogError, OffsetOutOfRange
from llog.model import FIRST_OFFSET, TimestampType
from llog.runtime import Runtime, SystemRuntime

T = TypeVar("T")

_SEGMENTS_OPEN_MAX: Final = 16
_HINTS_MAX: Final = 64
_ATTEMPTS: Final = 3
_WINDOW: Final = 64 << 10
_MAP_BYTES_MIN: Final = 256 << 10
"""Reads of this size and more are not copied: fresh memory costs more page faults than the mapping does."""
_POLL_S_MIN: Final = 0.002
_POLL_S_MAX: Final = 0.05


class SegmentReader:
    """Any number of them, in any processes. `what` names the log in errors.

    Handed the `SegmentLog` of this process it knows of appends without looking at the disk.
    """

    def __init__(self, directory: Path, runtime: Runtime, what: str, log: SegmentLog | None) -> None:
        self.directory = directory
        self.what = what
        self._runtime = runtime
        self._log = log
        self._mutex = threading.Lock()
        self._open: OrderedDict[int, Segment] = OrderedDict()
        self._hints: OrderedDict[int, tuple[int, Start]] = OrderedDict()
        """Where reads ended: a read that goes on from there needs no index."""
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
        """Touches nothing yet: a directory that is not there, or has no segments, is a log without records."""
        return cls(directory.absolute(), runtime or SystemRuntime(), what, log)

    async def bounds(self) -> Bounds:
        known = self._known_bounds()
        return await self._run(self.bounds_now) if known is None else known

    async def read(
        self, offset: int, max_bytes: int = 8 << 20, *, stop: int | None = None
    ) -> list[tuple[int, Columns]]:
        """(start offset, records) from `offset` on, at least one if there is one, up to about `max_bytes`; none at the
        next offset.

        None begins at `stop` or above it; the last one may reach beyond. Where records were removed by key compaction,
        the first begins above `offset`. What cannot be read ends it, and is an error of the read that begins there.
        """
        return await self._run(lambda: self.read_now(offset, max_bytes, stop))

    async def offset_for_time(self, timestamp_ms: int, by: TimestampType) -> int:
        """The first offset whose time, as a running maximum, is at or after this; the next offset if there is none."""
        return await self._run(lambda: self.offset_for_time_now(timestamp_ms, by))

    async def wait(self, past_offset: int, timeout: float) -> bool:
        """Whether there is a record at `past_offset` within `timeout` seconds."""
        if (await self.bounds()).next_offset > past_offset:
            return True
        try:
            async with asyncio.timeout(timeout):
                pause_s = _POLL_S_MIN
                while True:
                    if self._log is not None:
                        changed = self._log.changed()
                        if self._log.bounds().next_offset > past_offset:
                            changed.cancel()
                            return True
                        await changed
                        continue
                    await self._runtime.sleep(pause_s)
                    pause_s = min(pause_s * 2, _POLL_S_MAX)
                    if (await self.bounds()).next_offset > past_offset:
                        return True
        except TimeoutError:
            return False

    def bounds_now(self) -> Bounds:
        """Blocking: as `bounds`, and so are all that end in `_now`."""
        known = self._known_bounds()
        return self._scanned_bounds() if known is None else known

    def read_now(self, offset: int, max_bytes: int = 8 << 20, stop: int | None = None) -> list[tuple[int, Columns]]:
        bounds = self._checked_bounds(offset)
        end = bounds.next_offset if stop is None else min(stop, bounds.next_offset)
        found: list[Part] = []
        size = misses = 0
        with explained("read", self.directory):
            while offset < end and (not found or size < max_bytes):
                try:
                    reached, length = self._read_segment(offset, end, max_bytes - size, found)
                except (FileNotFoundError, _Elsewhere) as error:
                    # Trimmed, replaced or begun since the directory was listed: look again.
                    misses += 1
                    self._forget()
                    self._checked_bounds(offset)
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
                with explained("read", self.directory):
                    return max(self._search(timestamp_ms, by, bounds), bounds.log_start_offset)
            except (LlogError, FileNotFoundError):
                # Trimmed or replaced since the directory was listed: search what is left.
                if attempt + 1 == _ATTEMPTS:
                    raise
                self._forget()
        raise AssertionError

    def pieces(self, from_offset: int | None = None) -> Iterator[Piece]:
        """Every frame from `from_offset` on with where it lies, checked; damage is a piece with a `problem`."""
        bounds = self.bounds_now()
        return pieces(self.directory, bounds, max(from_offset or 0, bounds.log_start_offset))

    def describe(self) -> list[SegmentInfo]:
        """The segments there are."""
        return describe(self.directory, self.bounds_now())

    def close(self) -> None:
        self._forget()
        self._tail = None

    def index_bytes(self) -> int:
        """Memory that the indexes of open segments take at most."""
        with self._mutex:
            return sum(segment.index_bytes() for segment in self._open.values())

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

    def _scanned_bounds(self) -> Bounds:
        """From the segments themselves: no writer has opened the log since the machine was started."""
        with explained("read", self.directory):
            start = tail.read_log_start(self.directory)
            bases = numbered(self.directory, LOG)
            if not bases:
                return Bounds(start or FIRST_OFFSET, start or FIRST_OFFSET)
            unsynced = (self.directory / UNSYNCED).exists()
            for base in reversed(bases):
                found = examine(self.directory, base, SegmentOptions(), Maxima(), unsynced=unsynced)
                if found.position or base == bases[0]:
                    break
            next_offset = max(found.next_offset, bases[-1])
            return Bounds(min(max(start or FIRST_OFFSET, bases[0]), next_offset), next_offset)

    def _checked_bounds(self, offset: int) -> Bounds:
        bounds = self.bounds_now()
        if not bounds.log_start_offset <= offset <= bounds.next_offset:
            raise OffsetOutOfRange(self.what, offset, *bounds)
        return bounds

    def _read_segment(self, offset: int, end: int, max_bytes: int, found: list[Part]) -> tuple[int, int]:
        """Adds what the segment of `offset` has up to `max_bytes`; where to go on, and how many bytes that were."""
        segment = self._segment(offset)
        size = segment.size()
        with self._mutex:
            base, start = self._hints.pop(offset, (0, Start(0, 0)))
        # The segment may have been replaced since the hint was left.
        if base != segment.base or not segment.has_frame(start, size):
            start = segment.floor(offset, size)
        # At the tail, copying a little is cheaper than mapping a file that grows with every append.
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
                parts = parts_of(scan, located)
            except CorruptBatch as error:
                if reached > offset:
                    break
                raise CorruptBatch(
                    f"offsets {frame.base_offset} to {frame.next_offset - 1} of {self.what} are damaged in "
                    f"{segment.path} at byte {located.position}: {error}"
                ) from error
            found += _from(parts, offset)
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
            raise _Elsewhere(f"{segment.path} ends at offset {scan.offset - 1}")
        with self._mutex:
            self._hints[reached] = segment.base, Start(position, reached)
            while len(self._hints) > _HINTS_MAX:
                self._hints.popitem(last=False)
        return reached, length

    def _search(self, timestamp_ms: int, by: TimestampType, bounds: Bounds) -> int:
        """Segments by their last frame, frames by the time index, records by their times."""
        if bounds.log_start_offset == bounds.next_offset:
            return bounds.next_offset
        bases = numbered(self.directory, LOG)
        bases = [base for base in bases if base < bounds.next_offset]
        low, high = max(bisect_right(bases, bounds.log_start_offset) - 1, 0), len(bases) - 1
        while low < high:
            middle = (low + high) // 2
            segment = self._at_base(bases[middle])
            if _time(segment.maxima_at_end(segment.size()), by) < timestamp_ms:
                low = middle + 1
            else:
                high = middle
        segment = self._at_base(bases[low])
        size = segment.size()
        scan = segment.scan(segment.before_time(timestamp_ms, by, size), size)
        for located in scan:
            frame = located.frame
            if frame.base_offset >= bounds.next_offset:
                break
            if _time(Maxima(frame.max_append_ms, frame.max_timestamp_ms), by) >= timestamp_ms:
                return _first_in(parts_of(scan, located), frame, timestamp_ms, by)
        if scan.problem is not None and scan.offset < bounds.next_offset:
            raise CorruptBatch(f"{segment.path} is damaged at byte {scan.position}: {scan.problem}")
        return bounds.next_offset

    def _segment(self, offset: int) -> Segment:
        """The segment in which `offset` lies, as far as the last listing tells."""
        bases = self._bases = self._bases or numbered(self.directory, LOG)
        number = bisect_right(bases, offset) - 1
        if number < 0:
            raise _Elsewhere(f"the first segment begins at {bases[0] if bases else 'no offset'}")
        return self._at_base(bases[number])

    def _at_base(self, base: int) -> Segment:
        """An open segment; opened again if its file was replaced, which the name alone does not show."""
        with self._mutex:
            segment = self._open.pop(base, None)
            if segment is None or segment.is_gone():
                segment = Segment(self.directory, base)
            self._open[base] = segment
            while len(self._open) > _SEGMENTS_OPEN_MAX:
                self._open.popitem(last=False)
            return segment

    def _forget(self) -> None:
        with self._mutex:
            self._open.clear()
            self._hints.clear()
            self._bases = []

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(None, work)


class _Elsewhere(Exception):
    """An offset is not in the segment that should have it."""


def _from(parts: list[Part], offset: int) -> list[Part]:
    """Those at or above `offset`, and the rest of one that it lies in."""
    if parts and parts[0][0] >= offset:
        return parts
    kept = []
    for start, columns in parts:
        skipped = max(offset - start, 0)
        if skipped < columns.count:
            kept.append((start + skipped, slice_columns(columns, skipped, columns.count)))
    return kept


def _first_in(parts: list[Part], frame: Frame, timestamp_ms: int, by: TimestampType) -> int:
    """The first record that reaches this time; if that one was removed by key compaction, the frame's first offset."""
    for start, columns in parts:
        times = append_times(columns) if by is TimestampType.APPEND else effective_timestamps(columns).to_numpy()
        reached = (times >= timestamp_ms).nonzero()[0]
        if len(reached):
            return start + int(reached[0])
    return frame.base_offset


def _time(maxima: Maxima, by: TimestampType) -> int:
    return maxima.append_ms if by is TimestampType.APPEND else maxima.timestamp_ms
