"""Key compaction of sealed segments: the newest record of each key stays, at its offset. The newest segment is never
touched.

A pass finds the newest offset of each key, starting at the first offset that no pass has reached (`newest_offsets.py`),
for as many keys as fit into `map_bytes`. Then, from the log start on, it rewrites the segments that have older records
of these keys without them (`rewriter.py`), joining small neighbours, each by an atomic replacement
(`log/replacement.py`). Finally it records the pass (`progress.py`). A crash in between leaves some segments compacted,
and the pass is repeated. Passes follow until all sealed segments are done.

Deletions are removed in a later pass, when all older records of their keys are durably gone.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import numpy as np

from llog.engines.disk.cleaning.newest_offsets import NewestOffsets, merge, newest_of, no_offsets
from llog.engines.disk.cleaning.progress import Progress, put_progress, read_progress
from llog.engines.disk.cleaning.rewriter import (
    DecodedFrame,
    FrameBytes,
    KeepRule,
    Rewriter,
    Tally,
    keys_in_block,
    read_blocks,
)
from llog.engines.disk.format.files import LOG, file_name, file_numbers, translate_os_errors
from llog.engines.disk.format.frames import SPAN_MAX
from llog.engines.disk.format.producer_snapshot import newest_snapshot
from llog.engines.disk.format.segment import FrameStart, Segment
from llog.engines.disk.log.log import SegmentLog
from llog.engines.disk.options import SEGMENT_BYTES_MAX
from llog.errors import InvalidArgument, LlogError
from llog.log.engine import CleanResult

MAP_BYTES_MAX: Final = 512 << 20
_MERGED_ROWS_MIN: Final = 256 << 10
_ATTEMPTS: Final = 3


class CleaningOptions(msgspec.Struct, frozen=True, kw_only=True):
    min_dirty_ratio: float = 0.5
    """A pass begins when this fraction of the sealed bytes is new since the last one."""
    map_bytes: int = 128 << 20
    """Memory for keys and their newest offsets. While that grows, about twice as much is in use."""


def check_cleaning(options: CleaningOptions) -> None:
    if not 0 <= options.min_dirty_ratio <= 1:
        raise InvalidArgument(f"min_dirty_ratio must be 0 to 1: {options.min_dirty_ratio}")
    if not 1 <= options.map_bytes <= MAP_BYTES_MAX:
        raise InvalidArgument(f"map_bytes must be 1 to {MAP_BYTES_MAX}: {options.map_bytes}")


def clean(
    log: SegmentLog,
    *,
    delete_retention_ms: int,
    now_ms: Callable[[], int],
    options: CleaningOptions | None = None,
    force: bool = False,
    stopped: Callable[[], bool] = lambda: False,
) -> CleanResult:
    """Compact the log if enough of it is new, or, with `force`, in any case. Blocks, so it needs a thread of its own;
    appends and reads go on.

    Returns early, with what is done so far, once `stopped()` is true; the log must not be closed before this returns.
    Does nothing if another thread compacts the same log. Raises `CorruptBatch` at a damaged segment, where compaction
    ends.
    """
    options = options or CleaningOptions()
    check_cleaning(options)
    cleaner = _Cleaner(log, delete_retention_ms, now_ms, options, force, stopped)
    with _exclusively(log.directory) as free, translate_os_errors("compact", log.directory):
        misses = 0
        while free:
            try:
                if not cleaner.run_pass():
                    break
                misses = 0
            except _StopRequested:
                break
            except _SegmentRemoved:
                misses += 1
                if misses >= _ATTEMPTS:
                    break
    return cleaner.result


class _StopRequested(Exception):
    pass


class _SegmentRemoved(Exception):
    """Retention has removed a segment that was about to be compacted."""


class _SealedSegment(NamedTuple):
    base: int
    stop: int
    size: int


class _Cleaner:
    def __init__(
        self,
        log: SegmentLog,
        delete_retention_ms: int,
        now_ms: Callable[[], int],
        options: CleaningOptions,
        force: bool,
        stopped: Callable[[], bool],
    ) -> None:
        self._log = log
        self._directory = log.directory
        self._delay_ms = delete_retention_ms
        self._now_ms = now_ms
        self._options = options
        self._force = force
        self._stopped = stopped
        self._end: int | None = None
        """Where the sealed segments ended at the start: those sealed since are left to the next call, so that this one
        ends.
        """
        self.result = CleanResult()

    def run_pass(self) -> bool:
        """Run one pass, if one is due, and return whether it was."""
        segments = [each for each in self._sealed_segments() if self._end is None or each.base < self._end]
        if not segments:
            return False
        end = self._end = segments[-1].stop
        log_start = self._log.bounds().log_start_offset
        passes = read_progress(self._directory, end)
        first = max(passes.through, log_start, segments[0].base)
        self.result = msgspec.structs.replace(self.result, through=min(first, end))
        if not self._is_due(segments, passes, first):
            return False
        newest, through = self._newest(segments, first)
        rule = KeepRule(
            newest=newest,
            log_start=log_start,
            expired=passes.expired_through(self._delay_ms, self._now_ms()),
            needed=end - 1,
        )
        tally = Tally()
        for group in _groups([each for each in segments if each.base < through], self._log.options.segment_bytes):
            self._clean_group(group, rule, tally)
        self._check_not_stopped()
        put_progress(self._directory, passes.after(through, tally.deletions, self._delay_ms, self._now_ms()))
        self.result = msgspec.structs.replace(self.result, through=through, passes=self.result.passes + 1)
        return True

    def _sealed_segments(self) -> list[_SealedSegment]:
        sealed = self._log.sealed_bases()
        # Another segment may have been sealed since; in any case, the last one of these ends where the next begins.
        following = [base for base in file_numbers(self._directory, LOG) if sealed and base > sealed[-1]]
        try:
            return [
                _SealedSegment(base, stop, os.stat(self._directory / file_name(base, LOG)).st_size)
                for base, stop in pairwise([*sealed, *following[:1]])
            ]
        except FileNotFoundError as error:
            raise _SegmentRemoved from error

    def _is_due(self, segments: list[_SealedSegment], passes: Progress, first: int) -> bool:
        if passes.deletions_due(self._delay_ms, self._now_ms()):
            return True
        dirty = sum(each.size for each in segments if each.stop > first)
        # After a first pass, others follow to the end: they gain less, but would be due soon anyway.
        if not dirty or self._force or self.result.passes:
            return dirty > 0
        return dirty / sum(each.size for each in segments) >= self._options.min_dirty_ratio

    def _newest(self, segments: list[_SealedSegment], first: int) -> tuple[NewestOffsets, int]:
        """Return the newest offsets of keys from `first` on, and the offset up to which they fit into memory."""
        parts = [no_offsets()]
        rows = size = 0
        for each in segments:
            if each.stop <= first:
                continue
            for block in self._blocks(each, first):
                found = _newest_in(block, first)
                parts.append(found)
                rows += len(found.hashes)
                through = block[-1].frame.next_offset
                size += found.bytes
                if rows >= max(_MERGED_ROWS_MIN, len(parts[0].hashes)) or size >= self._options.map_bytes:
                    parts, rows = [merge(parts)], 0
                    size = parts[0].bytes
                    # Stop early: with little room left, merges cost more than they gain.
                    if size >= self._options.map_bytes * 3 // 4:
                        return parts[0], through
        return merge(parts), segments[-1].stop

    def _clean_group(self, group: list[_SealedSegment], rule: KeepRule, tally: Tally) -> None:
        """Replace these neighbouring segments by one, unless all of their records stay."""
        met = Tally()
        if not any(met.removed for each in group for _ in self._tally_segment(each, rule, met)):
            tally.deletions += met.deletions
            return
        bases = [each.base for each in group]
        met = Tally()
        try:
            size = self._log.replace(bases, self._frames(group, rule, met))
        except LlogError:
            if set(bases) <= set(self._log.sealed_bases()):
                raise
            raise _SegmentRemoved from None
        tally.deletions += met.deletions
        self.result = msgspec.structs.replace(
            self.result,
            removed=self.result.removed + met.removed,
            segments=self.result.segments + len(group),
            bytes_before=self.result.bytes_before + sum(each.size for each in group),
            bytes_after=self.result.bytes_after + size,
        )

    def _tally_segment(self, each: _SealedSegment, rule: KeepRule, met: Tally) -> Iterator[None]:
        for block in self._blocks(each, each.base):
            rule.select(block, met)
            yield

    def _frames(self, group: list[_SealedSegment], rule: KeepRule, met: Tally) -> Iterator[FrameBytes]:
        # Frames of producers that the log knew at the end of these segments must stay; any later snapshot will do.
        snapshot = newest_snapshot(self._directory, self._log.bounds().next_offset, remove=False)
        known = snapshot is not None and snapshot.next_offset >= group[-1].stop
        producers = snapshot.producers if snapshot is not None and known else None
        rewriter = Rewriter(group[0].base, rule, self._log.options, producers)
        read_blocks = (block for each in group for block in self._blocks(each, each.base))
        size = 0
        for made in rewriter.frames(read_blocks, met):
            if size > SEGMENT_BYTES_MAX:
                raise InvalidArgument(
                    f"segment {group[0].base} in {self._directory} is too large to be compacted: its offsets would "
                    f"take it beyond {SEGMENT_BYTES_MAX} bytes. Set segment_bytes lower for segments to come"
                )
            yield made
            size += sum(map(len, made[0]))
        self._check_not_stopped()

    def _blocks(self, each: _SealedSegment, first: int) -> Iterator[list[DecodedFrame]]:
        try:
            segment = Segment(self._directory, each.base)
        except FileNotFoundError as error:
            raise _SegmentRemoved from error
        start = segment.floor(first, segment.size()) if first > each.base else FrameStart(0, each.base)
        return read_blocks(segment, start, each.stop, self._check_not_stopped)

    def _check_not_stopped(self) -> None:
        if self._stopped():
            raise _StopRequested


def _newest_in(block: list[DecodedFrame], first: int) -> NewestOffsets:
    rows, keys = keys_in_block(block)
    offsets = np.concatenate([frame.offsets for frame in block])[rows]
    skipped = int(np.searchsorted(offsets, first))
    return newest_of(keys.slice(skipped), offsets[skipped:])


def _groups(segments: list[_SealedSegment], segment_bytes: int) -> Iterator[list[_SealedSegment]]:
    """Yield groups of neighbours that fit into one segment together."""
    group: list[_SealedSegment] = []
    size = 0
    for each in segments:
        if group and (size + each.size > segment_bytes or each.stop - group[0].base > SPAN_MAX):
            yield group
            group, size = [], 0
        group.append(each)
        size += each.size
    if group:
        yield group


_under_way: set[Path] = set()
_mutex = threading.Lock()


@contextmanager
def _exclusively(directory: Path) -> Iterator[bool]:
    """Yield whether no other thread compacts this log. Other processes cannot: they do not have its lock."""
    with _mutex:
        free = directory not in _under_way
        _under_way.add(directory)
    try:
        yield free
    finally:
        if free:
            with _mutex:
                _under_way.discard(directory)
