"""The shared tail: a cache in files of the batches that the processes of one machine appended a moment ago.

    {root}/lock                     held to make room, and to create or remove a writer's directory
    {root}/{writer}/lock            held by the writer while it lives; a directory whose lock is free is removed
    {root}/{writer}/{n:020}.log     frames (`engines/disk/format/frames.py`)

The base offset and the count of a frame are those of its records. Its body is

    0  4  partition (u32)                  8  …  directory, UTF-8, padded with zeros to 8 bytes
    4  4  length of the directory (u32)       …  the batch as it is stored (`bytes-batch-v1`)

Nothing is synced: this is a cache. A reader checks the header and the body of a frame before it returns a byte of it,
and treats a torn, damaged or removed frame as missing. All files together stay within `max_bytes`, with the newest file
of each writer counted as full; the oldest files go first.
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

from llog.base.durable import DIRECTORY_MODE, FILE_MODE, is_changeable_by_others, make_directory
from llog.base.lockfile import LOCK, remove_abandoned
from llog.batch.columns import Buffer
from llog.batch.format import HEADER_BYTES as BATCH_HEADER_BYTES
from llog.batch.format import peek
from llog.engines.disk.format.files import LOG, file_name, file_numbers, write_at
from llog.engines.disk.format.frames import HEADER_BYTES, Frame, check_body, checksum, frame_parts, make_body, parse
from llog.errors import CorruptBatch

PARTS: Final = 8
"""A segment has at most this part of `max_bytes`."""
SEGMENT_BYTES_MAX: Final = 64 << 20
LOCATIONS_MAX: Final = 200_000
"""Batches whose location a reader remembers; beyond it, the reader forgets those that it learnt of first."""
_DIRECTORY_BYTES_MAX: Final = 1024
_WINDOW_BYTES: Final = HEADER_BYTES + 8 + _DIRECTORY_BYTES_MAX
_FRAMES_PER_LOOK: Final = 20_000
KIND_CACHED: Final = 100
"""The kind of body that names the records' partition before the batch. It is far from the kinds of a log's segments, so
that these files are never taken for them.
"""
_KEY_HEAD: Final = struct.Struct("<II")

TailKey = tuple[str, int]
"""A topic's directory and a partition of it."""


class SharedBatch(NamedTuple):
    start_offset: int
    data: bytes
    """As it is stored, `bytes-batch-v1`."""


class TailWriter:
    """Puts batches where other processes find them. Used from one thread.

    Every method may raise `OSError`; the writer can be used afterwards.
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

    def put(self, key: TailKey, start_offset: int, data: Buffer) -> bool:
        """Return whether the batch was put: not if it is too large, or if another process is making room."""
        directory, partition = key
        name = directory.encode()
        header = peek(data)
        prefix = _KEY_HEAD.pack(partition, len(name)) + name + bytes(-len(name) % 8)
        body = make_body(
            [prefix, data],
            records=header.count,
            append_ms=header.append_ms,
            timestamp_max=header.timestamp_max,
            kind=KIND_CACHED,
        )
        parts = frame_parts(body, start_offset, header.append_ms, header.timestamp_max)
        size = sum(map(len, parts))
        if size > self._segment_bytes or len(name) > _DIRECTORY_BYTES_MAX or not self._has_room(size):
            return False
        assert self._descriptor is not None
        try:
            write_at(self._descriptor, parts, self._position, size)
        except OSError:
            self._end_segment()  # a reader finds nothing behind a torn frame
            raise
        self._position += size
        return True

    def close(self) -> None:
        """Remove everything that this writer put."""
        self._end_segment()
        if self._lock is not None:
            with _lock_root(self._root) as alone:
                os.close(self._lock)
                self._lock = None
                if alone:
                    shutil.rmtree(self._directory, ignore_errors=True)

    def _has_room(self, size: int) -> bool:
        """Return whether a segment has room for `size` bytes; it may be a new one."""
        if self._descriptor is not None:
            if self._position + size <= self._segment_bytes and os.fstat(self._descriptor).st_nlink:
                return True
            self._end_segment()
        make_directory(self._root)
        with _lock_root(self._root) as alone:
            if not alone:
                return False
            self._take_directory()
            remove_leftovers(self._root)
            self._make_room()
            self._number += 1
            path = self._directory / file_name(self._number, LOG)
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
        """Remove the oldest segments of all writers until a new one fits."""
        segments: list[tuple[int, int, Path]] = []
        for directory in _writers(self._root):
            numbers = file_numbers(directory, LOG)
            for number in numbers:
                path = directory / file_name(number, LOG)
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


class _FrameLocation(NamedTuple):
    """Where a frame lies, and how many records and bytes it has."""

    segment: Path
    position: int
    records: int
    length: int


class _SegmentProgress:
    """How far a reader has come in a file."""

    def __init__(self) -> None:
        self.position = 0
        self.is_broken = False


class TailReader:
    """Finds the batches of all writers by reading on at the ends of their files. Used from one thread; raises nothing.

    It holds no file open, so a file that a writer removes is gone from the disk.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._segments: dict[Path, _SegmentProgress] = {}
        self._locations: dict[tuple[TailKey, int], _FrameLocation] = {}
        self._starts: dict[TailKey, list[int]] = {}
        self.damaged = 0
        """The number of damaged frames and files that were met."""

    def find(self, key: TailKey, offset: int, max_bytes: int) -> list[SharedBatch]:
        """Return consecutive batches of the partition, the first of which has a record at `offset`; [] if none has."""
        found = self._locate(key, offset)
        if found is None:
            self._look()
            found = self._locate(key, offset)
        batches: list[SharedBatch] = []
        size = 0
        while found is not None and (not batches or size < max_bytes):
            start, location = found
            data = self._read_batch(key, start, location)
            if data is None:
                self._forget(key, start)
                break
            batches.append(SharedBatch(start, data))
            size += len(data)
            found = self._locate(key, start + location.records)
        return batches

    def _locate(self, key: TailKey, offset: int) -> tuple[int, _FrameLocation] | None:
        starts = self._starts.get(key, [])
        at = bisect_right(starts, offset) - 1
        if at < 0:
            return None
        location = self._locations[key, starts[at]]
        return (starts[at], location) if offset < starts[at] + location.records else None

    def _look(self) -> None:
        """Learn which batches were put since the last look, the newest files first, and forget the removed ones."""
        there: dict[Path, bool] = {}
        for directory in _writers(self._root):
            numbers = file_numbers(directory, LOG)
            there |= {directory / file_name(number, LOG): number < numbers[-1] for number in numbers}
        gone = {path for path in self._segments if path not in there}
        if gone:
            for path in gone:
                del self._segments[path]
            for key, start in [known for known, location in self._locations.items() if location.segment in gone]:
                self._forget(key, start)
        budget = _FRAMES_PER_LOOK
        for path, ended in reversed(there.items()):
            segment = self._segments.setdefault(path, _SegmentProgress())
            if budget > 0 and not segment.is_broken:
                budget -= self._follow(path, segment, ended, budget)
        while len(self._locations) > LOCATIONS_MAX:
            self._forget(*next(iter(self._locations)))

    def _follow(self, path: Path, segment: _SegmentProgress, ended: bool, budget: int) -> int:
        """Read the headers that were added to a file, and return their number.

        An unfinished frame at the end is looked at again next time.
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
            segment.is_broken = True
            self.damaged += 1
        return number

    def _learn(self, path: Path, segment: _SegmentProgress, frame: Frame, head: bytes) -> None:
        """Remember where the frame is. It is not trusted yet: `_read_batch` checks its body."""
        key = _key_in(memoryview(head)[frame.body_start :])
        if key is None or frame.kind != KIND_CACHED or frame.sparse:
            return
        start = frame.base_offset
        old = self._locations.get((key, start))
        if old is None:
            insort(self._starts.setdefault(key, []), start)
        elif old.records > frame.records:
            return
        self._locations[key, start] = _FrameLocation(path, segment.position, frame.records, frame.length)

    def _read_batch(self, key: TailKey, start: int, location: _FrameLocation) -> bytes | None:
        """Return the batch; None if its frame is gone, damaged, or of another partition."""
        try:
            descriptor = os.open(location.segment, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None  # removed since
        try:
            data = os.pread(descriptor, location.length, location.position)
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
                if _key_in(body) == key:
                    batch = bytes(body[_batch_start(body) :])
                    if len(batch) >= BATCH_HEADER_BYTES and peek(batch).count == frame.records == location.records:
                        return batch
        except CorruptBatch:
            pass
        self.damaged += 1
        return None

    def _forget(self, key: TailKey, start: int) -> None:
        if self._locations.pop((key, start), None) is not None:
            starts = self._starts[key]
            del starts[bisect_right(starts, start) - 1]
            if not starts:
                del self._starts[key]


def prepare(root: Path) -> None:
    """Create the directory, and remove what dead writers left in it."""
    make_directory(root)
    with _lock_root(root) as alone:
        if alone:
            remove_leftovers(root)


def remove_leftovers(root: Path) -> None:
    """Remove the directories whose writers are dead. The caller holds the root's lock, as a writer does that begins."""
    for directory in _writers(root):
        remove_abandoned(directory, is_made_with_lock=True)


def _remove(path: Path) -> None:
    """Remove a segment. Its bytes are freed at once, although its writer has it open until its next put.

    A reader that finds the file truncated sees that it has been removed.
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
def _lock_root(root: Path) -> Iterator[bool]:
    """Yield whether this process got the root's lock, without waiting for it."""
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
    """Return the directories of all writers, in the order of their names.

    A directory that other users may change is left out: they may have planted it.
    """
    try:
        return sorted(
            Path(entry.path)
            for entry in os.scandir(root)
            if entry.is_dir(follow_symlinks=False) and not is_changeable_by_others(entry.stat(follow_symlinks=False))
        )
    except OSError:
        return []


def _key_in(body: memoryview) -> TailKey | None:
    if len(body) < _KEY_HEAD.size:
        return None
    partition, length = _KEY_HEAD.unpack_from(body)
    if length > _DIRECTORY_BYTES_MAX or len(body) < _KEY_HEAD.size + length:
        return None
    try:
        return bytes(body[_KEY_HEAD.size : _KEY_HEAD.size + length]).decode(), partition
    except UnicodeDecodeError:
        return None


def _batch_start(body: memoryview) -> int:
    length: int = _KEY_HEAD.unpack_from(body)[1]
    return _KEY_HEAD.size + length + -length % 8
