"""The shared tail: a cache in files of the batches that the processes of one machine appended a moment ago.

    {root}/lock                     held by whoever makes room, makes a writer's directory or removes one
    {root}/{writer}/lock            held by the writer as long as it lives; a directory whose lock is free is removed
    {root}/{writer}/{n:020}.log     frames (`engines/disk/format/frames.py`)

The base offset and the count of a frame are those of its records. Its body is

    0  4  partition (u32)                  8  …  directory, UTF-8, padded with zeros to 8 bytes
    4  4  length of the directory (u32)       …  the batch as it is stored (`bytes-batch-v1`)

Nothing is synced, and nothing of it is needed. Frames are checked, header and body, before anybody gets a byte of them:
what is torn, damaged or gone is not there. Files together stay within `max_bytes`, the newest of each writer counted as
if it were full; the oldest go first.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
from bisect import bisect_right, insort
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from llog.base.durable import DIRECTORY_MODE, FILE_MODE, changeable_by_others, make_directory
from llog.base.lockfile import LOCK
from llog.batch.columns import Buffer
from llog.batch.format import HEADER_BYTES as BATCH_HEADER_BYTES
from llog.batch.format import peek
from llog.engines.disk.format.files import LOG, name_of, numbered, write_at
from llog.engines.disk.format.frames import HEADER_BYTES, Frame, body_of, check_body, checksum, frame_parts, parse
from llog.errors import CorruptBatch

PARTS: Final = 8
"""A segment is at most this part of all that there may be."""
SEGMENT_BYTES_MAX: Final = 64 << 20
ENTRIES_MAX: Final = 200_000
"""Batches that a reader knows the places of; of more, it forgets those that it learnt of first."""
_DIRECTORY_BYTES_MAX: Final = 1024
_WINDOW_BYTES: Final = HEADER_BYTES + 8 + _DIRECTORY_BYTES_MAX
_FRAMES_PER_LOOK: Final = 20_000
KIND_PLACED: Final = 100
"""Kind of body: whose records they are, then the batch. Far from the kinds of a log, for which these files must not be
taken.
"""
_KEY: Final = struct.Struct("<II")

Place = tuple[str, int]
"""A topic's directory and a partition of it."""


class SharedBatch(NamedTuple):
    start_offset: int
    data: bytes
    """As it is stored, `bytes-batch-v1`."""


class TailWriter:
    """Puts batches where other processes find them. Used from one thread; every method may raise `OSError`, after which
    it goes on.
    """

    def __init__(self, root: Path, name: str, max_bytes: int) -> None:
        self._root = root
        self._directory = root / name
        self._max_bytes = max_bytes
        self._segment_bytes = min(max_bytes // PARTS, SEGMENT_BYTES_MAX)
        self._lock: int | None = None
        self._descriptor: int | None = None
        self._position = 0
        self._number = 0

    def put(self, place: Place, start_offset: int, data: Buffer) -> bool:
        """Whether it was put: it is not if it is too large, or if another process is just making room."""
        directory, partition = place
        name = directory.encode()
        header = peek(data)
        prefix = _KEY.pack(partition, len(name)) + name + bytes(-len(name) % 8)
        body = body_of(
            [prefix, data],
            records=header.count,
            append_ms=header.append_ms,
            timestamp_max=header.timestamp_max,
            kind=KIND_PLACED,
        )
        parts = frame_parts(body, start_offset, header.append_ms, header.timestamp_max)
        size = sum(map(len, parts))
        if size > self._segment_bytes or len(name) > _DIRECTORY_BYTES_MAX or not self._has_room(size):
            return False
        assert self._descriptor is not None
        try:
            write_at(self._descriptor, parts, self._position, size)
        except OSError:
            self._end_segment()  # what comes after a torn frame would not be found
            raise
        self._position += size
        return True

    def close(self) -> None:
        """Removes what this writer put."""
        self._end_segment()
        if self._lock is not None:
            with _locked(self._root) as alone:
                os.close(self._lock)
                self._lock = None
                if alone:
                    shutil.rmtree(self._directory, ignore_errors=True)

    def _has_room(self, size: int) -> bool:
        """Whether there is a segment with room for so much, which may be a new one."""
        if self._descriptor is not None:
            if self._position + size <= self._segment_bytes and os.fstat(self._descriptor).st_nlink:
                return True
            self._end_segment()
        make_directory(self._root)
        with _locked(self._root) as alone:
            if not alone:
                return False
            self._take_directory()
            remove_leftovers(self._root)
            self._make_room()
            self._number += 1
            path = self._directory / name_of(self._number, LOG)
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
            self._position = 0
            return True

    def _take_directory(self) -> None:
        if self._lock is not None and self._directory.is_dir():
            return
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        self._directory.mkdir(DIRECTORY_MODE, exist_ok=True)
        self._lock = os.open(self._directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _make_room(self) -> None:
        """Removes the oldest segments of all writers until a new one fits."""
        segments: list[tuple[int, int, Path]] = []
        for directory in _writers(self._root):
            numbers = numbered(directory, LOG)
            for number in numbers:
                path = directory / name_of(number, LOG)
                try:
                    found = path.stat()
                except FileNotFoundError:
                    continue
                growing = number == numbers[-1] and directory != self._directory
                segments.append((found.st_mtime_ns, self._segment_bytes if growing else found.st_size, path))
        total = sum(size for _, size, _ in segments) + self._segment_bytes
        for _, size, path in sorted(segments):
            if total <= self._max_bytes:
                return
            _remove(path)
            total -= size

    def _end_segment(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class _Entry(NamedTuple):
    """Where a frame is, how many records it has and how many bytes."""

    segment: Path
    position: int
    records: int
    length: int


class _Segment:
    """How far a reader has come in a file."""

    def __init__(self) -> None:
        self.position = 0
        self.broken = False


class TailReader:
    """Finds what writers put, by looking at the ends of their files. Used from one thread; raises nothing.

    It holds no file open: what a writer removes is gone from the disk.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._segments: dict[Path, _Segment] = {}
        self._entries: dict[tuple[Place, int], _Entry] = {}
        self._starts: dict[Place, list[int]] = {}
        self.damaged = 0
        """Frames and files that were not what they should be."""

    def find(self, place: Place, offset: int, max_bytes: int) -> list[SharedBatch]:
        """Batches of this place, one after the other, the first of which has a record at `offset`; none if there is
        none.
        """
        found = self._known(place, offset)
        if found is None:
            self._look()
            found = self._known(place, offset)
        batches: list[SharedBatch] = []
        size = 0
        while found is not None and (not batches or size < max_bytes):
            start, entry = found
            data = self._checked(place, start, entry)
            if data is None:
                self._forget(place, start)
                break
            batches.append(SharedBatch(start, data))
            size += len(data)
            found = self._known(place, start + entry.records)
        return batches

    def _known(self, place: Place, offset: int) -> tuple[int, _Entry] | None:
        starts = self._starts.get(place, [])
        at = bisect_right(starts, offset) - 1
        if at < 0:
            return None
        entry = self._entries[place, starts[at]]
        return (starts[at], entry) if offset < starts[at] + entry.records else None

    def _look(self) -> None:
        """Learns what was put since the last look, of the newest files first, and forgets what was removed."""
        there: dict[Path, bool] = {}
        for directory in _writers(self._root):
            numbers = numbered(directory, LOG)
            there |= {directory / name_of(number, LOG): number < numbers[-1] for number in numbers}
        gone = {path for path in self._segments if path not in there}
        if gone:
            for path in gone:
                del self._segments[path]
            for key in [key for key, entry in self._entries.items() if entry.segment in gone]:
                self._forget(*key)
        budget = _FRAMES_PER_LOOK
        for path, ended in reversed(there.items()):
            segment = self._segments.setdefault(path, _Segment())
            if budget > 0 and not segment.broken:
                budget -= self._follow(path, segment, ended, budget)
        while len(self._entries) > ENTRIES_MAX:
            self._forget(*next(iter(self._entries)))

    def _follow(self, path: Path, segment: _Segment, ended: bool, budget: int) -> int:
        """Reads the headers that were added to a file; how many. An unfinished frame at its end is looked at again next
        time.
        """
        number = 0
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return number
        try:
            size = os.fstat(descriptor).st_size
            while segment.position < size and number < budget:
                head = os.pread(descriptor, _WINDOW_BYTES, segment.position)
                frame = parse(head, 0, len(head))
                if isinstance(frame, int) or segment.position + frame.length > size:
                    break
                self._learn(path, segment, frame, head)
                segment.position += frame.length
                number += 1
            is_stuck = segment.position < size and number < budget
        except (CorruptBatch, OSError):
            is_stuck = True
        finally:
            is_there = os.fstat(descriptor).st_nlink > 0
            os.close(descriptor)
        if is_stuck and ended and is_there:
            segment.broken = True
            self.damaged += 1
        return number

    def _learn(self, path: Path, segment: _Segment, frame: Frame, head: bytes) -> None:
        """Not yet relied on: the body that says whose records these are is checked when they are asked for."""
        place = _place_in(memoryview(head)[frame.body_start :])
        if place is None or frame.kind != KIND_PLACED or frame.sparse:
            return
        start = frame.base_offset
        old = self._entries.get((place, start))
        if old is None:
            insort(self._starts.setdefault(place, []), start)
        elif old.records > frame.records:
            return
        self._entries[place, start] = _Entry(path, segment.position, frame.records, frame.length)

    def _checked(self, place: Place, start: int, entry: _Entry) -> bytes | None:
        """The batch, if frame and body are whole and of this place."""
        try:
            descriptor = os.open(entry.segment, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None  # removed since
        try:
            data = os.pread(descriptor, entry.length, entry.position)
        except OSError:
            data = b""
        finally:
            is_there = os.fstat(descriptor).st_nlink > 0
            os.close(descriptor)
        if not is_there:
            return None
        try:
            frame = parse(data, 0, len(data))
            if not isinstance(frame, int) and frame.length == len(data) and frame.base_offset == start:
                body = memoryview(data)[frame.body_start : frame.body_start + frame.body_length]
                check_body(frame, checksum([body]))
                if _place_in(body) == place:
                    batch = bytes(body[_batch_start(body) :])
                    if len(batch) >= BATCH_HEADER_BYTES and peek(batch).count == frame.records == entry.records:
                        return batch
        except CorruptBatch:
            pass
        self.damaged += 1
        return None

    def _forget(self, place: Place, start: int) -> None:
        if self._entries.pop((place, start), None) is not None:
            starts = self._starts[place]
            del starts[bisect_right(starts, start) - 1]
            if not starts:
                del self._starts[place]


def prepare(root: Path) -> None:
    """Makes the directory and removes what dead writers left in it."""
    make_directory(root)
    with _locked(root) as alone:
        if alone:
            remove_leftovers(root)


def remove_leftovers(root: Path) -> None:
    """Removes the directories whose writers are dead. Under the root's lock: a writer that is just beginning holds
    that.
    """
    for directory in _writers(root):
        try:
            descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        except OSError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory, ignore_errors=True)
        except BlockingIOError:
            pass
        finally:
            os.close(descriptor)


def _remove(path: Path) -> None:
    """Its bytes go at once, though its writer has it open until it puts something again. Who meets it cut short sees
    that it is removed.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        os.unlink(path)
        os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


@contextmanager
def _locked(root: Path) -> Iterator[bool]:
    """Whether this process has the root to itself; it does not wait for it."""
    descriptor = os.open(root / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(descriptor)


def _writers(root: Path) -> list[Path]:
    """The directories of all writers, in the order of their names. One that other users may change is no writer's: they
    planted it.
    """
    try:
        return sorted(
            Path(entry.path)
            for entry in os.scandir(root)
            if entry.is_dir(follow_symlinks=False) and not changeable_by_others(entry.stat(follow_symlinks=False))
        )
    except OSError:
        return []


def _place_in(body: memoryview) -> Place | None:
    if len(body) < _KEY.size:
        return None
    partition, length = _KEY.unpack_from(body)
    if length > _DIRECTORY_BYTES_MAX or len(body) < _KEY.size + length:
        return None
    try:
        return bytes(body[_KEY.size : _KEY.size + length]).decode(), partition
    except UnicodeDecodeError:
        return None


def _batch_start(body: memoryview) -> int:
    length: int = _KEY.unpack_from(body)[1]
    return _KEY.size + length + -length % 8
