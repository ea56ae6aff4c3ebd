"""The newest segment of a log, to which frames are added."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from llog.base.durable import FILE_MODE
from llog.batch.columns import Buffer
from llog.engines.disk.format.files import INDEX, LOG, TIMEINDEX, is_removed, name_of, sync_data, write_at
from llog.engines.disk.format.index import PENDING_BYTES, IndexFile, IndexRule, Maxima
from llog.engines.disk.options import Fsync, SegmentOptions

_NEVER: Final = 1 << 63
_BLOCK: Final = 4 << 10
_ZEROS: Final = bytes(128 << 10)
_APPENDS_AHEAD: Final = 4
"""Zeros are written for at least so many appends like the one at hand: for fewer, they cost more than they save."""


class ActiveSegment:
    """Opened as its files are: `recovery.py` has brought them in order, or they are new.

    `position` is where the next frame goes: all before it are whole frames, what is behind it is nobody's.

    A sync of bytes that make a file longer waits for the file system's journal, too; one of bytes that replace others
    does not. So if every append is synced, the file is made longer by zeros, for many small appends at a time, and cut
    when it is finished.
    """

    def __init__(self, directory: Path, base: int, options: SegmentOptions) -> None:
        self.base = base
        self.path = directory / name_of(base, LOG)
        self.position = 0
        self._end = 0
        """Up to where zeros were written, or tried in vain: no more are before `position` has come there."""
        self._segment_bytes = options.segment_bytes
        self._ahead_bytes = options.ahead_bytes if options.fsync is Fsync.ALWAYS else 0
        self.old_ms = _NEVER
        """When it is to be sealed: as long after its first append as segments are written to."""
        self._segment_ms = options.segment_ms
        self.rule = IndexRule(base, options.index_interval_bytes, options.index_interval_records)
        self.descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        try:
            self.index = IndexFile(directory / name_of(base, INDEX))
            try:
                self.timeindex = IndexFile(directory / name_of(base, TIMEINDEX))
            except OSError:
                self.index.close()
                raise
        except OSError:
            os.close(self.descriptor)
            raise

    def write(self, parts: Sequence[Buffer], size: int) -> None:
        """Writes parts of this size together behind the last frame. They are nobody's until `accept` has counted each
        frame of them.
        """
        write_at(self.descriptor, parts, self.position, size)
        end = self.position + size
        if end > self._end:
            # No more than there is, for many logs are small, and none that would never be replaced.
            ahead = min(self._ahead_bytes, end, self._segment_bytes - end)
            if size * _APPENDS_AHEAD <= ahead:
                self._lengthen(end, ahead + -(end + ahead) % _BLOCK)

    def _lengthen(self, end: int, size: int) -> None:
        """Zeros from `end` on. If there is no room for them the appends go without, and it is tried again later."""
        zeros = [_ZEROS] * (size // len(_ZEROS)) + [_ZEROS[: size % len(_ZEROS)]]
        try:
            write_at(self.descriptor, zeros, end, size)
        except OSError:
            os.ftruncate(self.descriptor, end)
        self._end = end + size

    def begin(self, append_ms: int) -> None:
        """Its first append was at this time."""
        self.old_ms = append_ms + self._segment_ms

    def accept(self, length: int, base_offset: int, append_ms: int, before: Maxima) -> None:
        """Goes on behind one frame of what was written, and makes its index entries. `before` are the highest times
        before it.

        It may not be durable yet: whoever fails to sync it sets `position` back, and opens the segment again.
        """
        if self.old_ms == _NEVER:
            self.begin(append_ms)
        entry, time_entry = self.rule.entries(self.position, base_offset, before)
        if entry:
            self.index.add(entry)
        if time_entry:
            self.timeindex.add(time_entry)
        self.position += length

    def flush_indexes(self) -> None:
        """An index that cannot be written lags behind, which costs readers a longer scan and nothing else."""
        try:
            self.index.flush(PENDING_BYTES)
            self.timeindex.flush(PENDING_BYTES)
        except OSError:
            pass

    def check_there(self) -> None:
        """`FileNotFoundError` if its file was removed: nobody would find again what is written to it."""
        if is_removed(self.descriptor):
            raise FileNotFoundError(errno.ENOENT, "its file was removed", str(self.path))

    def cut(self) -> None:
        """Removes what lies behind the last frame, durably."""
        os.ftruncate(self.descriptor, self.position)
        self._end = 0
        sync_data(self.descriptor)

    def sync(self) -> None:
        sync_data(self.descriptor)

    def finish(self) -> None:
        """Cuts off the zeros, and makes all of it durable with its indexes: it may be sealed then."""
        if self._end:
            os.ftruncate(self.descriptor, self.position)
            self._end = 0
        os.fsync(self.descriptor)
        self.index.sync()
        self.timeindex.sync()

    def close(self) -> None:
        os.close(self.descriptor)
        self.index.close()
        self.timeindex.close()
