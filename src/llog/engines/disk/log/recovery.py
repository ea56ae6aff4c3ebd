"""What is left of a log after its writer has ended in whatever way, and how it becomes whole again.

Only the newest segment is read, from the last index entry that points at the first frame of an append: entries are
written once what they point at is durable, so the frames before are as they were acknowledged. If the writer
acknowledged before it synced (`unsynced`), all of the segment is read. The log ends before the first append that is not
whole: one of several frames counts with its last one.
"""

from __future__ import annotations

import errno
import os
from bisect import bisect_right
from pathlib import Path
from typing import NamedTuple

from llog.base.durable import FILE_MODE, sync_directory
from llog.engines.disk.format.files import (
    INDEX,
    LOG,
    PRODUCERS,
    TEMPORARY,
    TIMEINDEX,
    UNSYNCED,
    name_of,
    numbered,
    read_small,
    write_at,
)
from llog.engines.disk.format.frames import Located
from llog.engines.disk.format.index import (
    ENTRY_BYTES,
    TIME_ENTRY_BYTES,
    Entry,
    Index,
    IndexRule,
    Maxima,
    TimeEntry,
    TimeIndex,
    maxima_of,
    sound_entries,
    sound_time_entries,
)
from llog.engines.disk.format.producer_snapshot import LogState, newest_snapshot
from llog.engines.disk.format.segment import Segment, Start
from llog.engines.disk.format.tail import put_log_start, read_log_start
from llog.engines.disk.log.active_segment import ActiveSegment
from llog.engines.disk.options import SegmentOptions
from llog.errors import CorruptBatch
from llog.model import FIRST_OFFSET

_BODIES_WINDOW = 1 << 20


class Found(NamedTuple):
    """The newest segment as its frames say: where they end, and the indexes that belong to them."""

    position: int
    next_offset: int
    maxima: Maxima
    first_append_ms: int | None
    entries: bytes
    time_entries: bytes


class _Whole(NamedTuple):
    """How far the appends of a segment are whole, and how much of its indexes belongs to them."""

    position: int
    next_offset: int
    maxima: Maxima
    entries_bytes: int
    time_entries_bytes: int


class Recovered(NamedTuple):
    active: ActiveSegment
    state: LogState
    log_start: int


def recover(directory: Path, options: SegmentOptions) -> Recovered:
    """Brings the directory in order and opens its newest segment. The caller holds the lock, and has finished
    replacements.
    """
    start = read_log_start(directory)
    for name in os.listdir(directory):
        if name.endswith(TEMPORARY):
            os.unlink(directory / name)
    bases = numbered(directory, LOG)
    if not bases:
        _check_end(directory, start or FIRST_OFFSET, 0, start or FIRST_OFFSET)
        active = create(directory, start or FIRST_OFFSET, options)
        state = newest_snapshot(directory, active.base)
        if state is None or state.next_offset != active.base:
            state = LogState(next_offset=active.base, evicted_through=active.base - 1)
        return Recovered(active, state, active.base)
    log_start = max(start or FIRST_OFFSET, bases[0])
    bases = drop_below(directory, bases, log_start)
    found = _newest(directory, bases, options, unsynced=(directory / UNSYNCED).exists())
    base = bases[-1]
    _check_end(directory, base, found.position, found.next_offset)
    # Also what a killed writer had not synced: from now on it counts as acknowledged. Before the indexes, which rely on
    # it.
    _cut(directory / name_of(base, LOG), found.position)
    left = _replace_index(directory / name_of(base, INDEX), found.entries)
    time_left = _replace_index(directory / name_of(base, TIMEINDEX), found.time_entries)
    sync_directory(directory)
    if log_start > found.next_offset:
        # What was trimmed up to there was lost with the tail. Records that get these offsets now must not be below it
        # one day.
        put_log_start(directory, found.next_offset)
    state = _replayed(directory, bases, found)
    active = ActiveSegment(directory, base, options)
    active.index.add(left)
    active.timeindex.add(time_left)
    active.position = found.position
    if found.first_append_ms is not None:
        active.begin(found.first_append_ms)
    active.rule.resume(_last_entry(found.entries), _last_time_entry(found.time_entries))
    return Recovered(active, state, min(log_start, found.next_offset))


def _check_end(directory: Path, base: int, position: int, next_offset: int) -> None:
    """`CorruptBatch` if the log ends before a snapshot: that was put when all before it was durable, so this is no torn
    tail.

    To cut it off would give offsets to other records that readers have seen, and groups have passed.
    """
    ends = numbered(directory, PRODUCERS)
    if ends and ends[-1] > next_offset:
        raise CorruptBatch(
            f"{directory / name_of(base, LOG)} is damaged or gone from byte {position} on: offsets {next_offset} to "
            f"{ends[-1] - 1} were durable, and cannot be read any more. Bring the file back from a copy; or remove "
            f"{directory / name_of(ends[-1], PRODUCERS)} to go on without them, and new records get these offsets"
        )


def _newest(directory: Path, bases: list[int], options: SegmentOptions, *, unsynced: bool) -> Found:
    """The newest segment. An empty one that a failed roll left behind, while appends went on before it, is removed from
    `bases`.
    """
    found = examine(directory, bases[-1], options, maxima_before(directory, bases, len(bases) - 1), unsynced=unsynced)
    if found.position == 0 and len(bases) > 1:
        before = maxima_before(directory, bases, len(bases) - 2)
        previous = examine(directory, bases[-2], options, before, unsynced=unsynced)
        if previous.next_offset > bases[-1]:
            _remove(directory, bases.pop())
            sync_directory(directory)
            return previous
    return found


def create(directory: Path, base: int, options: SegmentOptions) -> ActiveSegment:
    """A new, empty segment, durably; files that a crash left under its name had no acknowledged records."""
    _remove(directory, base)
    try:
        active = ActiveSegment(directory, base, options)
        try:
            sync_directory(directory)
        except OSError:
            active.close()
            raise
    except OSError:
        _remove(directory, base)
        raise
    return active


def drop_below(directory: Path, bases: list[int], log_start: int) -> list[int]:
    """Removes segments that end below the log start, lowest first; those that are left. The newest one always stays."""
    kept = max(bisect_right(bases, log_start) - 1, 0)
    for base in bases[:kept]:
        _remove(directory, base)
        (directory / name_of(base, PRODUCERS)).unlink(missing_ok=True)
    if kept:
        sync_directory(directory)
    return bases[kept:]


def _remove(directory: Path, base: int) -> None:
    for suffix in (LOG, INDEX, TIMEINDEX):
        (directory / name_of(base, suffix)).unlink(missing_ok=True)


def maxima_before(directory: Path, bases: list[int], number: int) -> Maxima:
    """The highest times of the log before segment `number`."""
    base = bases[number]
    if base == FIRST_OFFSET:
        return Maxima()
    snapshot = newest_snapshot(directory, base, remove=False)
    if snapshot is not None and snapshot.next_offset == base:
        return snapshot.maxima
    if number == 0:
        return Maxima()  # what was before it is gone, and its frames say it again
    before = Segment(directory, bases[number - 1])
    return before.maxima_at_end(before.size())


def examine(directory: Path, base: int, options: SegmentOptions, before: Maxima, *, unsynced: bool) -> Found:
    """Reads only. `before` are the highest times of the log before this segment."""
    segment = Segment(directory, base)
    end = segment.size()
    index = read_small(directory / name_of(base, INDEX)) or b""
    timeindex = read_small(directory / name_of(base, TIMEINDEX)) or b""
    trusted = _last_standing(segment, Index(index), sound_entries(index, end), end)
    times = TimeIndex(timeindex)
    number = -1
    if trusted and not unsynced:
        limit = Index(index)[trusted - 1].position
        number = _time_number(segment, times, sound_time_entries(timeindex, end), limit, end)
    if number > 0:
        entry = times[number]
        start = Start(entry.position, base + entry.relative_offset)
        before = Maxima(entry.max_append_ms, entry.max_timestamp_ms)
    else:
        number, start = 0, Start(0, base)
    # Everything from `start` on is decided again, so entries behind it go.
    entries = bytearray(
        index[: (Index(index[: trusted * ENTRY_BYTES]).floor(start.offset - base - 1) + 1) * ENTRY_BYTES]
    )
    time_entries = bytearray(timeindex[: number * TIME_ENTRY_BYTES])
    rule = IndexRule(base, options.index_interval_bytes, options.index_interval_records)
    rule.resume(_last_entry(entries), _last_time_entry(time_entries))

    checked = start
    if trusted and not unsynced:
        last = Index(index)[trusted - 1]
        checked = Start(last.position, base + last.relative_offset)

    def note(located: Located) -> None:
        nonlocal before
        entry, time_entry = rule.entries(located.position, located.frame.base_offset, before)
        entries.extend(entry)
        time_entries.extend(time_entry)
        before = maxima_of(located.frame)

    # Damage in here is not a torn tail: readers report it, and what follows stays.
    for located in segment.scan(start, checked.position):
        note(located)
    whole = _Whole(checked.position, checked.offset, before, len(entries), len(time_entries))
    within = False
    scan = segment.scan(checked, end, bodies=True, window=_BODIES_WINDOW)
    for located in scan:
        if located.frame.continues != within:
            break
        note(located)
        within = located.frame.more
        if not within:
            whole = _Whole(scan.position, scan.offset, before, len(entries), len(time_entries))
    first = segment.frame_at(Start(0, base), whole.position)
    return Found(
        whole.position,
        whole.next_offset,
        whole.maxima,
        first.append_ms if first else None,
        bytes(entries[: whole.entries_bytes]),
        bytes(time_entries[: whole.time_entries_bytes]),
    )


def _last_standing(segment: Segment, index: Index, count: int, end: int) -> int:
    """How many entries are left if the last one of them must point at a frame with which an append begins."""
    while count:
        entry = index[count - 1]
        frame = segment.frame_at(Start(entry.position, segment.base + entry.relative_offset), end)
        if frame is not None and not frame.continues:
            break
        count -= 1
    return count


def _time_number(segment: Segment, times: TimeIndex, count: int, limit: int, end: int) -> int:
    """Number of the last of `count` time entries that points at a frame up to position `limit`; -1 if there is none."""
    number = bisect_right(range(count), limit, key=lambda n: times[n].position) - 1
    while number >= 0:
        entry = times[number]
        if segment.has_frame(Start(entry.position, segment.base + entry.relative_offset), end):
            break
        number -= 1
    return number


def _replayed(directory: Path, bases: list[int], found: Found) -> LogState:
    """What the log remembers at its end: the newest snapshot, and the headers of the frames since."""
    state = newest_snapshot(directory, found.next_offset)
    if state is None:
        evicted = 0 if bases[0] == FIRST_OFFSET else bases[0] - 1
        state = LogState(next_offset=bases[0], evicted_through=evicted)
    if state.next_offset < bases[0]:
        state = LogState(next_offset=bases[0], producers=state.producers, evicted_through=bases[0] - 1)
    for base in bases[max(bisect_right(bases, state.next_offset) - 1, 0) :]:
        segment = Segment(directory, base)
        end = found.position if base == bases[-1] else segment.size()
        for located in segment.scan(segment.floor(state.next_offset, end), end):
            if located.frame.base_offset == state.next_offset:
                state = state.after(located.frame)
    if state.next_offset < found.next_offset:
        # Headers in between are damaged: whose appends they were cannot be told, so nobody unknown is taken for new.
        state = LogState(
            next_offset=found.next_offset, producers=state.producers, evicted_through=found.next_offset - 1
        )
    return LogState(
        next_offset=found.next_offset,
        maxima=found.maxima,
        producers=state.producers,
        evicted_through=state.evicted_through,
    )


def _cut(path: Path, size: int) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(descriptor).st_size != size:
            os.ftruncate(descriptor, size)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replace_index(path: Path, content: bytes) -> bytes:
    """What is left to be written: all of it if the disk is full, which must not keep anybody from opening the log.

    Never in place: a reader may have it mapped, and must not find its end cut off.
    """
    if read_small(path) == content:
        return b""
    temporary = path.with_name(path.name + TEMPORARY)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, FILE_MODE)
    try:
        write_at(descriptor, [content], 0, len(content))
    except OSError as error:
        temporary.unlink(missing_ok=True)
        if error.errno != errno.ENOSPC:
            raise
        path.unlink(missing_ok=True)
        return content
    finally:
        os.close(descriptor)
    os.rename(temporary, path)
    return b""


def _last_entry(data: bytes | bytearray) -> Entry | None:
    index = Index(bytes(data))
    return index[len(index) - 1] if len(index) else None


def _last_time_entry(data: bytes | bytearray) -> TimeEntry | None:
    index = TimeIndex(bytes(data))
    return index[len(index) - 1] if len(index) else None
