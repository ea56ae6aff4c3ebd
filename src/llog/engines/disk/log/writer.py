"""The one writer of a log, without an event loop: appends in groups, rolls, and goes on after errors.

A group of appends is one `pwritev` and one `fdatasync`; index entries are made while the disk works, the tail file
follows. A group that fails is cut off again before its appends are told so. If a sync failed, nobody knows what reached
the disk: the segment is cut back to what was durable, opened and checked again.
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
from llog.engines.disk.format.files import UNSYNCED, begin_writing, explained, put_small, unavailable
from llog.engines.disk.format.frames import CONTINUES, MORE, SPAN_MAX, Body, frame_parts
from llog.engines.disk.format.index import Maxima
from llog.engines.disk.format.producer_snapshot import LogState, put_snapshot
from llog.engines.disk.log import replacement
from llog.engines.disk.log.recovery import create, recover
from llog.engines.disk.options import Fsync, SegmentOptions, check_options
from llog.engines.port import Bounds
from llog.errors import LlogError, OutcomeUnknown, StoreUnavailable
from llog.log.producers import Appended, Producer, find_repeated, remembered

GROUP_BYTES_MAX: Final = 64 << 20


class Append(msgspec.Struct, frozen=True, gc=False):
    """Records that wait to be appended: the bodies of one frame or several, which are in the log together or not at
    all.
    """

    bodies: Sequence[Body]
    producer: Producer | None = None


class Result(NamedTuple):
    """Where an append is: `repeated` if its producer had appended it before."""

    start_offset: int
    end_offset: int
    repeated: bool = False


class _Framed(NamedTuple):
    """One append as frames, and where the log is behind it."""

    parts: list[Buffer]
    size: int
    frames: list[tuple[int, int, int, Maxima]]
    """Length, base offset, append time and the highest times before it, of each."""
    next_offset: int
    maxima: Maxima


class _Group(msgspec.Struct, frozen=True, gc=False):
    """Appends that are written together, and the log's state behind them."""

    parts: list[Buffer]
    size: int
    frames: list[tuple[int, int, int, Maxima]]
    state: LogState
    results: list[Result | LlogError]


class SegmentWriter:
    """Calls may come from any thread, one at a time goes on. The lock on the directory is held until `close`."""

    def __init__(self, directory: Path, options: SegmentOptions, what: str) -> None:
        check_options(options)
        self.directory = directory
        self.options = options
        self.what = what
        self.closed = False
        self._durably = options.fsync is Fsync.ALWAYS
        self.mutex = threading.RLock()
        self._broken: BaseException | None = None
        """What a sync or a roll failed with, or was interrupted by, until the segment was opened and checked again."""
        self._ragged = False
        """Whether there may be bytes behind the last frame."""
        with explained("open", directory), ExitStack() as opened:
            make_directory(directory)
            self._lock = take_lock(directory, what)
            opened.callback(os.close, self._lock)
            replacement.finish(directory)
            self.active, self.state, self.log_start = recover(directory, options)
            opened.callback(self.active.close)
            self._mark_unsynced()
            self._tail = tail.open_tail(directory)
            opened.callback(os.close, self._tail)
            tail.write_tail(self._tail, tail.pack_tail(self.bounds, tail.boot()))
            opened.pop_all()
        self._unsynced = False

    @property
    def unsynced(self) -> bool:
        """Whether something was acknowledged that is not durable yet."""
        return self._unsynced

    @property
    def bounds(self) -> Bounds:
        return Bounds(self.log_start, self.state.next_offset)

    def check_open(self) -> None:
        """`StoreUnavailable` once it is closed: its descriptors may be those of other files by now. Under the mutex."""
        if self.closed:
            raise StoreUnavailable(f"{self.what} in {self.directory} is closed: open it again")

    def commit(self, appends: Sequence[Append], now_ms: int) -> list[Result | LlogError]:
        """One result or error each, in order. With fsync `always`, what is not an error is durable."""
        with self.mutex:
            results = self._commit_group(appends, now_ms) if appends else []
            while len(results) < len(appends):
                results += self._commit_group(appends[len(results) :], now_ms)
        return results

    def sync(self) -> None:
        """Makes all that was acknowledged durable."""
        with self.mutex, explained("sync", self.active.path):
            if self.closed or not self._unsynced:
                return
            self._heal()
            try:
                self.active.sync()
            except OSError as error:
                self._broken = error
                raise
            self._unsynced = False

    def roll(self) -> None:
        """Seals the newest segment and begins the next one, unless it is empty."""
        with self.mutex, explained("begin a segment in", self.directory):
            self.check_open()
            self._heal()
            if self.active.position:
                self._roll()

    def raise_start(self, offset: int) -> None:
        """Moves the log start, durably, and tells readers."""
        with self.mutex:
            tail.put_log_start(self.directory, offset)
            self.log_start = offset
            self._tell(tail.pack_tail(self.bounds, tail.boot()))

    def _tell(self, news: bytes) -> None:
        """Readers in other processes, by the tail file. If that fails the next commit does: they only hear of it
        later.
        """
        try:
            tail.write_tail(self._tail, news)
        except OSError:
            pass

    def close(self) -> None:
        """Syncs, and leaves a snapshot so that the next open has little to read."""
        with self.mutex:
            if self.closed:
                return
            self.closed = True
            try:
                with explained("close", self.active.path):
                    self._heal()
                    self.active.finish()
                    put_snapshot(self.directory, self.state)
                    (self.directory / UNSYNCED).unlink(missing_ok=True)
                    sync_directory(self.directory)
            finally:
                self.active.close()
                os.close(self._tail)
                os.close(self._lock)

    def _commit_group(self, appends: Sequence[Append], now_ms: int) -> list[Result | LlogError]:
        """The outcome of the first ones, which went together: at least one."""
        try:
            if self.closed or self._ragged or self._broken is not None or now_ms >= self.active.old_ms:
                self._make_ready(now_ms)
            group = self._gathered(appends)
            if not group.results:
                self._roll()
                group = self._gathered(appends)
            if group.parts:
                self._write(group)
        except LlogError as error:
            return [error]
        except OSError as error:
            return self._failed(len(appends), unavailable("append to", self.active.path, error))
        return group.results

    def _write(self, group: _Group) -> None:
        """Makes the group part of the log, durably if it must be, and tells readers.

        All that need not wait for the disk is done while it works. Index entries that are written then are of earlier
        groups: what they point at is durable.
        """
        active, durably = self.active, self._durably
        start = active.position
        self._ragged = True
        active.write(group.parts, group.size)
        if durably:
            begin_writing(active.descriptor, start, group.size)
        active.check_there()
        active.flush_indexes()
        try:
            for frame in group.frames:
                active.accept(*frame)
            news = tail.pack_tail(Bounds(self.log_start, group.state.next_offset), tail.boot())
            if durably:
                active.sync()
        except BaseException as error:  # also Ctrl-C: the segment must not be ahead of the state
            active.position = start
            self._broken = error
            raise
        self.state = group.state
        self._ragged = False
        self._unsynced = not durably
        self._tell(news)

    def _gathered(self, appends: Sequence[Append]) -> _Group:
        """Frames for as many appends as fit into this segment, judged one after the other; none if it is full."""
        state, active = self.state, self.active
        start, maxima, producers, evicted = state.next_offset, state.maxima, state.producers, state.evicted_through
        room, base, size = self.options.segment_bytes - active.position, active.base, 0
        parts: list[Buffer] = []
        frames: list[tuple[int, int, int, Maxima]] = []
        results: list[Result | LlogError] = []
        for append in appends:
            producer = append.producer
            if producer is not None:
                try:
                    found = find_repeated(producers, evicted, start, producer, self.what)
                except LlogError as error:
                    results.append(error)
                    continue
                if found is not None:
                    results.append(Result(found.start_offset, found.end_offset, True))
                    continue
            made = _framed(append, start, maxima)
            if (size or active.position) and (size + made.size > room or made.next_offset - base > SPAN_MAX):
                break
            parts += made.parts
            size += made.size
            frames += made.frames
            results.append(Result(start, made.next_offset - 1))
            if producer is not None:
                appended = Appended(producer.sequence, start, made.next_offset - 1)
                used_ms = append.bodies[-1].append_ms
                producers, evicted = remembered(producers, evicted, producer.id, appended, used_ms)
            start, maxima = made.next_offset, made.maxima
            if size >= GROUP_BYTES_MAX:
                break
        state = LogState(next_offset=start, maxima=maxima, producers=producers, evicted_through=evicted)
        return _Group(parts, size, frames, state, results)

    def _make_ready(self, now_ms: int) -> None:
        """For an append: after an error, or when the newest segment is old enough to be sealed."""
        self.check_open()
        self._heal()
        if now_ms >= self.active.old_ms:
            self._roll()

    def _roll(self) -> None:
        sealed = self.active
        try:
            sealed.finish()
        except OSError as error:
            self._broken = error
            raise
        self._unsynced = False
        put_snapshot(self.directory, self.state)
        try:
            self.active = create(self.directory, self.state.next_offset, self.options)
        except BaseException as error:  # also Ctrl-C: if it is there, readers do not look into the old one any more
            self._broken = error
            raise
        sealed.close()

    def _failed(self, count: int, error: StoreUnavailable) -> list[Result | LlogError]:
        """Cuts off what the failed group has written. Until that is done, nobody knows whether it is there after a
        crash.
        """
        written = self._ragged
        try:
            self._heal()
        except (OSError, LlogError):
            if written:
                unknown = OutcomeUnknown(
                    f"{error}. Whether these records are in {self.what} after a restart cannot be told"
                )
                return [unknown] * count
        return [error] * count

    def _heal(self) -> None:
        """Brings the newest segment back to its last whole frame, if anything has gone wrong."""
        if self._broken is not None:
            self.active.cut()
            self._reopen()
            self._broken = None
            self._ragged = False
        elif self._ragged:
            try:
                self.active.cut()
            except OSError as error:
                self._broken = error
                raise
            self._ragged = False

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
        if self._durably:
            path.unlink(missing_ok=True)
            sync_directory(self.directory)
        elif not path.exists():
            put_small(path, b"")


def _framed(append: Append, start: int, maxima: Maxima) -> _Framed:
    """The frames of an append from offset `start` on. `maxima` are the highest times of the log before it."""
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
    return _Framed(parts, size, frames, start, maxima)
