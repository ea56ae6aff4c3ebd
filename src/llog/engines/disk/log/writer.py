"""The one writer of a log, without an event loop: appends in groups, rolls, and continues after errors.

A group of appends is one `pwritev` and one `fdatasync`; index entries are made while the disk works, and the tail file
is written last. If a group fails, its bytes are cut off before its appends fail. After a failed sync, it is unknown
which bytes reached the disk: the segment is cut back to what was durable, reopened and checked.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from llog.base.durable import make_directory, sync_directory
from llog.base.lockfile import take_lock
from llog.batch.columns import Buffer
from llog.engines.disk.format import tail
from llog.engines.disk.format.files import (
    UNSYNCED,
    replace_small_file,
    start_writeback,
    translate_os_errors,
    unavailable,
)
from llog.engines.disk.format.frames import CONTINUES, MORE, SPAN_MAX, Body, frame_parts
from llog.engines.disk.format.index import Maxima
from llog.engines.disk.format.producer_snapshot import LogState, put_snapshot
from llog.engines.disk.log import replacement
from llog.engines.disk.log.recovery import create_segment, recover
from llog.engines.disk.options import Fsync, SegmentOptions, check_options
from llog.errors import LlogError, OutcomeUnknown, StoreUnavailable
from llog.log.engine import Bounds
from llog.log.producers import Producer, RememberedAppend, find_repeated, remember

GROUP_BYTES_MAX: Final = 64 << 20


class EncodedAppend(msgspec.Struct, frozen=True, gc=False):
    """Encoded records to be appended: the bodies of one or more frames, which enter the log together or not at all."""

    bodies: Sequence[Body]
    producer: Producer | None = None


class AppendedRange(NamedTuple):
    """The offsets of an append. `repeated` says that its producer had appended it before."""

    start_offset: int
    end_offset: int
    repeated: bool = False


class _AppendFrames(NamedTuple):
    """The frames of one append, and the log's next offset and highest times after it."""

    parts: list[Buffer]
    size: int
    frames: list[tuple[int, int, int, Maxima]]
    """Of each frame: its length, base offset and append time, and the highest times before it."""
    next_offset: int
    maxima: Maxima


class _CommitGroup(msgspec.Struct, frozen=True, gc=False):
    """Appends that are written together, and the log's state after them."""

    parts: list[Buffer]
    size: int
    frames: list[tuple[int, int, int, Maxima]]
    state: LogState
    results: list[AppendedRange | LlogError]


class SegmentWriter:
    """Holds the lock on the log's directory until `close`. Any thread may call; the mutex serializes the calls."""

    def __init__(self, directory: Path, options: SegmentOptions, what: str) -> None:
        check_options(options)
        self.directory = directory
        self.options = options
        self.what = what
        self.is_closed = False
        self._syncs_each_group = options.fsync is Fsync.ALWAYS
        self.mutex = threading.RLock()
        self._failure: BaseException | None = None
        """The error or interrupt of a sync or roll, until the segment was reopened and checked."""
        self._has_torn_end = False
        """Whether the segment may have bytes behind its last frame."""
        with translate_os_errors("open", directory), ExitStack() as opened:
            make_directory(directory)
            self._lock = take_lock(directory, what)
            opened.callback(os.close, self._lock)
            replacement.finish_replacements(directory)
            self.active, self.state, self.log_start = recover(directory, options)
            opened.callback(self.active.close)
            self._mark_unsynced()
            self._tail = tail.open_tail(directory)
            opened.callback(os.close, self._tail)
            tail.write_tail(self._tail, tail.pack_tail(self.bounds, tail.boot()))
            opened.pop_all()
        self._unsynced = False

    @property
    def has_unsynced(self) -> bool:
        """Whether acknowledged records are not durable yet."""
        return self._unsynced

    @property
    def bounds(self) -> Bounds:
        return Bounds(self.log_start, self.state.next_offset)

    def check_open(self) -> None:
        """Raise `StoreUnavailable` after `close`: the descriptors may belong to other files by now. Call it under the
        mutex.
        """
        if self.is_closed:
            raise StoreUnavailable(f"{self.what} in {self.directory} is closed: open it again")

    def commit(self, appends: Sequence[EncodedAppend], now_ms: int) -> list[AppendedRange | LlogError]:
        """Return one result or error per append, in order. With fsync `always`, an append that succeeded is durable."""
        with self.mutex:
            results = self._commit_group(appends, now_ms) if appends else []
            while len(results) < len(appends):
                results += self._commit_group(appends[len(results) :], now_ms)
        return results

    def sync(self) -> None:
        """Make all acknowledged records durable."""
        with self.mutex, translate_os_errors("sync", self.active.path):
            if self.is_closed or not self._unsynced:
                return
            self._heal()
            try:
                self.active.sync()
            except OSError as error:
                self._failure = error
                raise
            self._unsynced = False

    def roll(self) -> None:
        """Seal the newest segment and create the next one, unless the newest is empty."""
        with self.mutex, translate_os_errors("begin a segment in", self.directory):
            self.check_open()
            self._heal()
            if self.active.position:
                self._roll()

    def raise_start(self, offset: int) -> None:
        """Raise the log start durably, and publish it to readers."""
        with self.mutex:
            tail.put_log_start(self.directory, offset)
            self.log_start = offset
            self._publish_tail(tail.pack_tail(self.bounds, tail.boot()))

    def _publish_tail(self, packed: bytes) -> None:
        """Write the tail file for readers in other processes. An error is ignored: the next commit publishes it."""
        try:
            tail.write_tail(self._tail, packed)
        except OSError:
            pass

    def close(self) -> None:
        """Sync, and write a snapshot so that the next open has little to read."""
        with self.mutex:
            if self.is_closed:
                return
            self.is_closed = True
            try:
                with translate_os_errors("close", self.active.path):
                    self._heal()
                    self.active.finish()
                    put_snapshot(self.directory, self.state)
                    (self.directory / UNSYNCED).unlink(missing_ok=True)
                    sync_directory(self.directory)
            finally:
                self.active.close()
                os.close(self._tail)
                os.close(self._lock)

    def _commit_group(self, appends: Sequence[EncodedAppend], now_ms: int) -> list[AppendedRange | LlogError]:
        """Commit as many of the first appends as go together, at least one, and return their results."""
        try:
            if self.is_closed or self._has_torn_end or self._failure is not None or now_ms >= self.active.seal_at_ms:
                self._make_ready(now_ms)
            group = self._make_group(appends)
            if not group.results:
                self._roll()
                group = self._make_group(appends)
            if group.parts:
                self._write(group)
        except LlogError as error:
            return [error]
        except OSError as error:
            return self._undo_group(len(appends), unavailable("append to", self.active.path, error))
        return group.results

    def _write(self, group: _CommitGroup) -> None:
        """Make the group part of the log, durably with fsync `always`, and publish it to readers.

        Work that need not wait for the disk is done while the disk works. The index entries that are written then
        belong to earlier groups, whose frames are durable.
        """
        active, durably = self.active, self._syncs_each_group
        start = active.position
        self._has_torn_end = True
        active.write(group.parts, group.size)
        if durably:
            start_writeback(active.descriptor, start, group.size)
        active.check_not_removed()
        active.flush_indexes()
        try:
            for frame in group.frames:
                active.accept(*frame)
            packed_tail = tail.pack_tail(Bounds(self.log_start, group.state.next_offset), tail.boot())
            if durably:
                active.sync()
        except BaseException as error:  # even an interrupt: the segment must not be ahead of the state
            active.position = start
            self._failure = error
            raise
        self.state = group.state
        self._has_torn_end = False
        self._unsynced = not durably
        self._publish_tail(packed_tail)

    def _make_group(self, appends: Sequence[EncodedAppend]) -> _CommitGroup:
        """Make frames of as many appends as fit into this segment, checking their producers in order; none if the
        segment is full.
        """
        state, active = self.state, self.active
        start, maxima, producers, evicted = state.next_offset, state.maxima, state.producers, state.evicted_through
        room, base, size = self.options.segment_bytes - active.position, active.base, 0
        parts: list[Buffer] = []
        frames: list[tuple[int, int, int, Maxima]] = []
        results: list[AppendedRange | LlogError] = []
        for append in appends:
            producer = append.producer
            if producer is not None:
                try:
                    found = find_repeated(producers, evicted, start, producer, self.what)
                except LlogError as error:
                    results.append(error)
                    continue
                if found is not None:
                    results.append(AppendedRange(found.start_offset, found.end_offset, True))
                    continue
            made = _make_frames(append, start, maxima)
            if (size or active.position) and (size + made.size > room or made.next_offset - base > SPAN_MAX):
                break
            parts += made.parts
            size += made.size
            frames += made.frames
            results.append(AppendedRange(start, made.next_offset - 1))
            if producer is not None:
                appended = RememberedAppend(producer.sequence, start, made.next_offset - 1)
                used_ms = append.bodies[-1].append_ms
                producers, evicted = remember(producers, evicted, producer.id, appended, used_ms)
            start, maxima = made.next_offset, made.maxima
            if size >= GROUP_BYTES_MAX:
                break
        state = LogState(next_offset=start, maxima=maxima, producers=producers, evicted_through=evicted)
        return _CommitGroup(parts, size, frames, state, results)

    def _make_ready(self, now_ms: int) -> None:
        """Prepare for an append after an error, or when the newest segment is old enough to be sealed."""
        self.check_open()
        self._heal()
        if now_ms >= self.active.seal_at_ms:
            self._roll()

    def _roll(self) -> None:
        sealed = self.active
        try:
            sealed.finish()
        except OSError as error:
            self._failure = error
            raise
        self._unsynced = False
        put_snapshot(self.directory, self.state)
        try:
            self.active = create_segment(self.directory, self.state.next_offset, self.options)
        except BaseException as error:  # even an interrupt: readers ignore the old segment once the new one exists
            self._failure = error
            raise
        sealed.close()

    def _undo_group(self, count: int, error: StoreUnavailable) -> list[AppendedRange | LlogError]:
        """Cut off what a failed group has written, and return its errors: `OutcomeUnknown` if the bytes cannot be cut
        off, since they may be in the log after a crash.
        """
        written = self._has_torn_end
        try:
            self._heal()
        except (OSError, LlogError):
            if written:
                unknown = OutcomeUnknown(f"{error}. These records may or may not be in {self.what} after a restart")
                return [unknown] * count
        return [error] * count

    def _heal(self) -> None:
        """Cut the newest segment back to its last whole frame if an error has left more, and reopen it after a failed
        sync or roll.
        """
        if self._failure is not None:
            self.active.cut_torn_end()
            self._reopen()
            self._failure = None
            self._has_torn_end = False
        elif self._has_torn_end:
            try:
                self.active.cut_torn_end()
            except OSError as error:
                self._failure = error
                raise
            self._has_torn_end = False

    def _reopen(self) -> None:
        found = recover(self.directory, self.options)
        if found.state.next_offset != self.state.next_offset:
            found.active.close()
            raise StoreUnavailable(
                f"{self.active.path} ends at offset {found.state.next_offset - 1} after a failed sync, but offset "
                f"{self.state.next_offset - 1} was acknowledged: check the disk, then restart this process"
            )
        before, self.active = self.active, found.active
        before.close()

    def _mark_unsynced(self) -> None:
        path = self.directory / UNSYNCED
        if self._syncs_each_group:
            path.unlink(missing_ok=True)
            sync_directory(self.directory)
        elif not path.exists():
            replace_small_file(path, b"")


def _make_frames(append: EncodedAppend, start: int, maxima: Maxima) -> _AppendFrames:
    """Make the frames of an append from offset `start` on. `maxima` are the highest times of the log before it."""
    bodies, producer = append.bodies, append.producer
    name, sequence = (None, 0) if producer is None else (producer.id, producer.sequence)
    parts: list[Buffer] = []
    frames: list[tuple[int, int, int, Maxima]] = []
    size = flags = 0
    left = len(bodies)
    for body in bodies:
        left -= 1
        before = maxima
        if body.append_ms_max > before.append_ms or body.timestamp_max > before.timestamp_ms:
            maxima = Maxima(max(before.append_ms, body.append_ms_max), max(before.timestamp_ms, body.timestamp_max))
        flags = flags | MORE if left else flags & ~MORE
        made = frame_parts(body, start, maxima.append_ms, maxima.timestamp_ms, name, sequence, flags=flags)
        flags |= CONTINUES
        length = len(made[0]) + body.length + -body.length % 8
        parts += made
        size += length
        frames.append((length, start, body.append_ms, before))
        start += body.records
    return _AppendFrames(parts, size, frames, start, maxima)
