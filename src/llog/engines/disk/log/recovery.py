"""Recovers a log, however its last writer ended.

Only the newest segment is read, from the last index entry that points at the first frame of an append: entries are
written after the frames they point at are durable, so the frames before are as they were acknowledged. If the writer
acknowledged before it synced (`unsynced`), the whole segment is read. The log ends before the first append that is
incomplete: an append of several frames counts only with its last one.
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
    file_name,
    file_numbers,
    read_small_file,
    write_at,
)
from llog.engines.disk.format.frames import LocatedFrame
from llog.engines.disk.format.index import (
    ENTRY_BYTES,
    TIME_ENTRY_BYTES,
    Index,
    IndexRule,
    Maxima,
    OffsetEntry,
    TimeEntry,
    TimeIndex,
    count_sound_entries,
    count_sound_time_entries,
    maxima_of,
)
from llog.engines.disk.format.producer_snapshot import LogState, newest_snapshot
from llog.engines.disk.format.segment import FrameStart, Segment
from llog.engines.disk.format.tail import put_log_start, read_log_start
from llog.engines.disk.log.active_segment import ActiveSegment
from llog.engines.disk.options import SegmentOptions
from llog.errors import CorruptBatch
from llog.model import FIRST_OFFSET

_BODIES_WINDOW = 1 << 20


class SegmentState(NamedTuple):
    """The newest segment according to its frames: where they end, and the index entries that belong to them."""

    position: int
    next_offset: int
    maxima: Maxima
    first_append_ms: int | None
    entries: bytes
    time_entries: bytes


class _WholeAppends(NamedTuple):
    """How far the appends of a segment are complete, and how many bytes of its indexes belong to them."""

    position: int
    next_offset: int
    maxima: Maxima
    entries_bytes: int
    time_entries_bytes: int


class RecoveredLog(NamedTuple):
    active: ActiveSegment
    state: LogState
    log_start: int


def recover(directory: Path, options: SegmentOptions) -> RecoveredLog:
    """Recover the log and open its newest segment. The caller holds the lock and has finished replacements."""
    start = read_log_start(directory)
    for name in os.listdir(directory):
        if name.endswith(TEMPORARY):
            os.unlink(directory / name)
    bases = file_numbers(directory, LOG)
    if not bases:
        _check_end(directory, start or FIRST_OFFSET, 0, start or FIRST_OFFSET)
        active = create_segment(directory, start or FIRST_OFFSET, options)
        state = newest_snapshot(directory, active.base)
        if state is None or state.next_offset != active.base:
            state = LogState(next_offset=active.base, evicted_through=active.base - 1)
        return RecoveredLog(active, state, active.base)
    log_start = max(start or FIRST_OFFSET, bases[0])
    bases = remove_segments_below(directory, bases, log_start)
    found = _examine_newest(directory, bases, options, unsynced=(directory / UNSYNCED).exists())
    base = bases[-1]
    _check_end(directory, base, found.position, found.next_offset)
    # This also syncs what a killed writer had not: it counts as acknowledged from now on. Indexes follow, because their
    # entries must point at durable frames.
    _truncate(directory / file_name(base, LOG), found.position)
    left = _replace_index(directory / file_name(base, INDEX), found.entries)
    time_left = _replace_index(directory / file_name(base, TIMEINDEX), found.time_entries)
    sync_directory(directory)
    if log_start > found.next_offset:
        # The log was trimmed beyond what is left of it. New records get the lost offsets, and must not lie below the
        # log start.
        put_log_start(directory, found.next_offset)
    state = _replay_state(directory, bases, found)
    active = ActiveSegment(directory, base, options)
    active.index.add(left)
    active.timeindex.add(time_left)
    active.position = found.position
    if found.first_append_ms is not None:
        active.set_first_append(found.first_append_ms)
    active.rule.resume(_last_entry(found.entries), _last_time_entry(found.time_entries))
    return RecoveredLog(active, state, min(log_start, found.next_offset))


def _check_end(directory: Path, base: int, position: int, next_offset: int) -> None:
    """Raise `CorruptBatch` if the log ends before a snapshot. All records before a snapshot were durable when it was
    written, so this is not a torn tail.

    To cut the log there would reuse offsets that readers have seen and consumer groups have passed.
    """
    ends = file_numbers(directory, PRODUCERS)
    if ends and ends[-1] > next_offset:
        raise CorruptBatch(
            f"{directory / file_name(base, LOG)} is damaged or gone from byte {position} on: offsets {next_offset} to "
            f"{ends[-1] - 1} were durable, and cannot be read any more. Restore the file from a copy; or remove "
            f"{directory / file_name(ends[-1], PRODUCERS)} to continue without them: new records then get these offsets"
        )


def _examine_newest(directory: Path, bases: list[int], options: SegmentOptions, *, unsynced: bool) -> SegmentState:
    """Examine the newest segment. An empty one that a failed roll left behind, while appends went on in the previous
    one, is deleted and removed from `bases`.
    """
    found = examine_segment(
        directory, bases[-1], options, maxima_before(directory, bases, len(bases) - 1), unsynced=unsynced
    )
    if found.position == 0 and len(bases) > 1:
        before = maxima_before(directory, bases, len(bases) - 2)
        previous = examine_segment(directory, bases[-2], options, before, unsynced=unsynced)
        if previous.next_offset > bases[-1]:
            _remove_segment(directory, bases.pop())
            sync_directory(directory)
            return previous
    return found


def create_segment(directory: Path, base: int, options: SegmentOptions) -> ActiveSegment:
    """Create an empty segment durably. Files that a crash left under its name have no acknowledged records, and are
    removed.
    """
    _remove_segment(directory, base)
    try:
        active = ActiveSegment(directory, base, options)
        try:
            sync_directory(directory)
        except OSError:
            active.close()
            raise
    except OSError:
        _remove_segment(directory, base)
        raise
    return active


def remove_segments_below(directory: Path, bases: list[int], log_start: int) -> list[int]:
    """Remove segments that end below the log start, lowest first, and return those left. The newest always stays."""
    kept = max(bisect_right(bases, log_start) - 1, 0)
    for base in bases[:kept]:
        _remove_segment(directory, base)
        (directory / file_name(base, PRODUCERS)).unlink(missing_ok=True)
    if kept:
        sync_directory(directory)
    return bases[kept:]


def _remove_segment(directory: Path, base: int) -> None:
    for suffix in (LOG, INDEX, TIMEINDEX):
        (directory / file_name(base, suffix)).unlink(missing_ok=True)


def maxima_before(directory: Path, bases: list[int], number: int) -> Maxima:
    """Return the highest times of the log before segment `number`."""
    base = bases[number]
    if base == FIRST_OFFSET:
        return Maxima()
    snapshot = newest_snapshot(directory, base, remove=False)
    if snapshot is not None and snapshot.next_offset == base:
        return snapshot.maxima
    if number == 0:
        return Maxima()  # earlier segments are gone, and the headers of this one's frames repeat the maxima
    before = Segment(directory, bases[number - 1])
    return before.maxima_at_end(before.size())


def examine_segment(
    directory: Path, base: int, options: SegmentOptions, before: Maxima, *, unsynced: bool
) -> SegmentState:
    """Find how far a segment is intact, without changing it. `before` are the highest times of the log before it."""
    segment = Segment(directory, base)
    end = segment.size()
    index = read_small_file(directory / file_name(base, INDEX)) or b""
    timeindex = read_small_file(directory / file_name(base, TIMEINDEX)) or b""
    trusted = _count_trusted(segment, Index(index), count_sound_entries(index, end), end)
    times = TimeIndex(timeindex)
    number = -1
    if trusted and not unsynced:
        limit = Index(index)[trusted - 1].position
        number = _last_time_entry_up_to(segment, times, count_sound_time_entries(timeindex, end), limit, end)
    if number > 0:
        entry = times[number]
        start = FrameStart(entry.position, base + entry.relative_offset)
        before = Maxima(entry.max_append_ms, entry.max_timestamp_ms)
    else:
        number, start = 0, FrameStart(0, base)
    # Entries from `start` on are made again.
    entries = bytearray(
        index[: (Index(index[: trusted * ENTRY_BYTES]).floor(start.offset - base - 1) + 1) * ENTRY_BYTES]
    )
    time_entries = bytearray(timeindex[: number * TIME_ENTRY_BYTES])
    rule = IndexRule(base, options.index_interval_bytes, options.index_interval_records)
    rule.resume(_last_entry(entries), _last_time_entry(time_entries))

    checked = start
    if trusted and not unsynced:
        last = Index(index)[trusted - 1]
        checked = FrameStart(last.position, base + last.relative_offset)

    def add_entries(located: LocatedFrame) -> None:
        nonlocal before
        entry, time_entry = rule.entries(located.position, located.frame.base_offset, before)
        entries.extend(entry)
        time_entries.extend(time_entry)
        before = maxima_of(located.frame)

    # Damage in here is not a torn tail: readers report it, and the frames behind it stay.
    for located in segment.scan(start, checked.position):
        add_entries(located)
    whole = _WholeAppends(checked.position, checked.offset, before, len(entries), len(time_entries))
    within = False
    scan = segment.scan(checked, end, bodies=True, window=_BODIES_WINDOW)
    for located in scan:
        if located.frame.continues != within:
            break
        add_entries(located)
        within = located.frame.more
        if not within:
            whole = _WholeAppends(scan.position, scan.offset, before, len(entries), len(time_entries))
    first = segment.frame_at(FrameStart(0, base), whole.position)
    return SegmentState(
        whole.position,
        whole.next_offset,
        whole.maxima,
        first.append_ms if first else None,
        bytes(entries[: whole.entries_bytes]),
        bytes(time_entries[: whole.time_entries_bytes]),
    )


def _count_trusted(segment: Segment, index: Index, count: int, end: int) -> int:
    """Return how many of `count` entries remain if the last one must point at the first frame of an append."""
    while count:
        entry = index[count - 1]
        frame = segment.frame_at(FrameStart(entry.position, segment.base + entry.relative_offset), end)
        if frame is not None and not frame.continues:
            break
        count -= 1
    return count


def _last_time_entry_up_to(segment: Segment, times: TimeIndex, count: int, limit: int, end: int) -> int:
    """Return the number of the last of `count` time entries that points at a frame up to position `limit`; -1 if none
    does.
    """
    number = bisect_right(range(count), limit, key=lambda n: times[n].position) - 1
    while number >= 0:
        entry = times[number]
        if segment.has_frame(FrameStart(entry.position, segment.base + entry.relative_offset), end):
            break
        number -= 1
    return number


def _replay_state(directory: Path, bases: list[int], found: SegmentState) -> LogState:
    """Return the state at the end of the log: the newest snapshot, updated by the headers of later frames."""
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
        # Headers in between are damaged: any unknown producer may have made those appends, so none counts as new.
        state = LogState(
            next_offset=found.next_offset, producers=state.producers, evicted_through=found.next_offset - 1
        )
    return LogState(
        next_offset=found.next_offset,
        maxima=found.maxima,
        producers=state.producers,
        evicted_through=state.evicted_through,
    )


def _truncate(path: Path, size: int) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(descriptor).st_size != size:
            os.ftruncate(descriptor, size)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replace_index(path: Path, content: bytes) -> bytes:
    """Replace an index file, and return what is left to be written: all of `content` if the disk is full, since the log
    must open even then.

    The file is never truncated in place, because a reader may have mapped it.
    """
    if read_small_file(path) == content:
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


def _last_entry(data: bytes | bytearray) -> OffsetEntry | None:
    index = Index(bytes(data))
    return index[len(index) - 1] if len(index) else None


def _last_time_entry(data: bytes | bytearray) -> TimeEntry | None:
    index = TimeIndex(bytes(data))
    return index[len(index) - 1] if len(index) else None
