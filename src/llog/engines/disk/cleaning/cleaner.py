"""Key compaction of sealed segments: of each key, the newest record stays, at its offset. The newest segment is never
touched.

A pass finds the newest offset of each key from the first offset on that no pass has reached (`newest_offsets.py`), up
to as many keys as fit into `map_bytes`. Then, from the log start on, segments that have older records of these keys are
rewritten without them (`rewriter.py`), small neighbours into one, each by an atomic replacement (`log/replacement.py`).
Then the pass is noted (`progress.py`). A crash in between leaves some segments compacted: the same pass comes over them
again. Passes follow until all sealed segments are done.

Deletions go last, in a later pass: all older records of their keys are durably gone by then.
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

from llog.engines.disk.cleaning.newest_offsets import Newest, merged, newest_of, nothing
from llog.engines.disk.cleaning.progress import Passes, put_passes, read_passes
from llog.engines.disk.cleaning.rewriter import Made, Piece, Rewriter, Rule, Tally, blocks, keyed
from llog.engines.disk.format.files import LOG, explained, name_of, numbered
from llog.engines.disk.format.frames import SPAN_MAX
from llog.engines.disk.format.producer_snapshot import newest_snapshot
from llog.engines.disk.format.segment import Segment, Start
from llog.engines.disk.log.log import SegmentLog
from llog.engines.disk.options import SEGMENT_BYTES_MAX
from llog.engines.port import CleanResult
from llog.errors import InvalidArgument, LlogError

MAP_BYTES_MAX: Final = 512 << 20
_MERGED_ROWS_MIN: Final = 256 << 10
_ATTEMPTS: Final = 3


class CleaningOptions(msgspec.Struct, frozen=True, kw_only=True):
    min_dirty_ratio: float = 0.5
    """A pass begins when this part of the sealed bytes is new since the last one."""
    map_bytes: int = 128 << 20
    """For keys and their newest offsets. While it grows, about twice that is in use."""


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
    """Compacts what is worth it, or with `force` all there is. Blocking, for a thread of its own; appends and reads go
    on.

    Ends early, with what is done so far, once `stopped` says so: the log must not be closed before this has returned.
    Does nothing if another thread compacts the same log. `CorruptBatch` at a damaged segment: compaction goes no
    further.
    """
    options = options or CleaningOptions()
    check_cleaning(options)
    cleaner = _Cleaner(log, delete_retention_ms, now_ms, options, force, stopped)
    with _alone(log.directory) as free, explained("compact", log.directory):
        misses = 0
        while free:
            try:
                if not cleaner.run_pass():
                    break
                misses = 0
            except _Stopped:
                break
            except _Moved:
                misses += 1
                if misses >= _ATTEMPTS:
                    break
    return cleaner.result


class _Stopped(Exception):
    pass


class _Moved(Exception):
    """Retention has removed a segment that was about to be compacted."""


class _Sealed(NamedTuple):
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
        """Where the sealed segments ended when this began: what is sealed since is for the next time, or this would not
        end.
        """
        self.result = CleanResult()

    def run_pass(self) -> bool:
        """Whether there was anything to do."""
        segments = [each for each in self._sealed() if self._end is None or each.base < self._end]
        if not segments:
            return False
        end = self._end = segments[-1].stop
        log_start = self._log.bounds().log_start_offset
        passes = read_passes(self._directory, end)
        first = max(passes.through, log_start, segments[0].base)
        self.result = msgspec.structs.replace(self.result, through=min(first, end))
        if not self._is_due(segments, passes, first):
            return False
        newest, through = self._newest(segments, first)
        rule = Rule(
            newest=newest,
            log_start=log_start,
            expired=passes.expired(self._delay_ms, self._now_ms()),
            needed=end - 1,
        )
        tally = Tally()
        for group in _groups([each for each in segments if each.base < through], self._log.options.segment_bytes):
            self._clean_group(group, rule, tally)
        self._check()
        put_passes(self._directory, passes.after(through, tally.deletions, self._delay_ms, self._now_ms()))
        self.result = msgspec.structs.replace(self.result, through=through, passes=self.result.passes + 1)
        return True

    def _sealed(self) -> list[_Sealed]:
        sealed = self._log.sealed()
        # After that, another one may have been sealed: the segment behind the last one begins where it ends all the
        # same.
        following = [base for base in numbered(self._directory, LOG) if sealed and base > sealed[-1]]
        try:
            return [
                _Sealed(base, stop, os.stat(self._directory / name_of(base, LOG)).st_size)
                for base, stop in pairwise([*sealed, *following[:1]])
            ]
        except FileNotFoundError as error:
            raise _Moved from error

    def _is_due(self, segments: list[_Sealed], passes: Passes, first: int) -> bool:
        if passes.deletions_due(self._delay_ms, self._now_ms()):
            return True
        dirty = sum(each.size for each in segments if each.stop > first)
        # Once begun, it goes on to the end: the next pass has less to gain, but would be due soon anyway.
        if not dirty or self._force or self.result.passes:
            return dirty > 0
        return dirty / sum(each.size for each in segments) >= self._options.min_dirty_ratio

    def _newest(self, segments: list[_Sealed], first: int) -> tuple[Newest, int]:
        """The newest offsets of keys from `first` on, and the offset up to which there was memory for them."""
        parts = [nothing()]
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
                    parts, rows = [merged(parts)], 0
                    size = parts[0].bytes
                    # Not to the last byte: with little room left, what is gained by each merge would not be worth it.
                    if size >= self._options.map_bytes * 3 // 4:
                        return parts[0], through
        return merged(parts), segments[-1].stop

    def _clean_group(self, group: list[_Sealed], rule: Rule, tally: Tally) -> None:
        """Replaces these neighbours by one, unless none of their records goes."""
        met = Tally()
        if not any(met.removed for each in group for _ in self._looked(each, rule, met)):
            tally.deletions += met.deletions
            return
        bases = [each.base for each in group]
        met = Tally()
        try:
            size = self._log.replace(bases, self._frames(group, rule, met))
        except LlogError:
            if set(bases) <= set(self._log.sealed()):
                raise
            raise _Moved from None
        tally.deletions += met.deletions
        self.result = msgspec.structs.replace(
            self.result,
            removed=self.result.removed + met.removed,
            segments=self.result.segments + len(group),
            bytes_before=self.result.bytes_before + sum(each.size for each in group),
            bytes_after=self.result.bytes_after + size,
        )

    def _looked(self, each: _Sealed, rule: Rule, met: Tally) -> Iterator[None]:
        for block in self._blocks(each, each.base):
            rule.kept(block, met)
            yield

    def _frames(self, group: list[_Sealed], rule: Rule, met: Tally) -> Iterator[Made]:
        # Of what was remembered before the end of these segments, nothing may be forgotten. Later ones say it, too.
        snapshot = newest_snapshot(self._directory, self._log.bounds().next_offset, remove=False)
        known = snapshot is not None and snapshot.next_offset >= group[-1].stop
        producers = snapshot.producers if snapshot is not None and known else None
        rewriter = Rewriter(group[0].base, rule, self._log.options, producers)
        pieces = (block for each in group for block in self._blocks(each, each.base))
        size = 0
        for made in rewriter.frames(pieces, met):
            if size > SEGMENT_BYTES_MAX:
                raise InvalidArgument(
                    f"segment {group[0].base} in {self._directory} is too large to be compacted: its offsets would "
                    f"take it beyond {SEGMENT_BYTES_MAX} bytes. Set segment_bytes lower for segments to come"
                )
            yield made
            size += sum(map(len, made[0]))
        self._check()

    def _blocks(self, each: _Sealed, first: int) -> Iterator[list[Piece]]:
        try:
            segment = Segment(self._directory, each.base)
        except FileNotFoundError as error:
            raise _Moved from error
        start = segment.floor(first, segment.size()) if first > each.base else Start(0, each.base)
        return blocks(segment, start, each.stop, self._check)

    def _check(self) -> None:
        if self._stopped():
            raise _Stopped


def _newest_in(block: list[Piece], first: int) -> Newest:
    rows, keys = keyed(block)
    offsets = np.concatenate([piece.offsets for piece in block])[rows]
    skipped = int(np.searchsorted(offsets, first))
    return newest_of(keys.slice(skipped), offsets[skipped:])


def _groups(segments: list[_Sealed], segment_bytes: int) -> Iterator[list[_Sealed]]:
    """Neighbours that fit into one segment together."""
    group: list[_Sealed] = []
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
def _alone(directory: Path) -> Iterator[bool]:
    """Whether no other thread compacts this log; other processes cannot, without its lock."""
    with _mutex:
        free = directory not in _under_way
        _under_way.add(directory)
    try:
        yield free
    finally:
        if free:
            with _mutex:
                _under_way.discard(directory)
