"""The newest segment of a log, to which frames are added."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from llog.base.durable import FILE_MODE
from llog.batch.columns import Buffer
from llog.engines.disk.format.files import INDEX, LOG, TIMEINDEX, file_name, is_removed, sync_data, write_at
from llog.engines.disk.format.index import PENDING_BYTES, IndexFile, IndexRule, Maxima
from llog.engines.disk.options import Fsync, SegmentOptions

_NEVER: Final = 1 << 63
_BLOCK: Final = 4 << 10
_ZEROS: Final = bytes(128 << 10)
_APPENDS_AHEAD: Final = 4
"""Zeros are written for at least this many appends of the present size: for fewer, they cost more than they save."""


class ActiveSegment:
    """Opens files that are new, or that `recovery.py` has repaired.

    `position` is where the next frame goes: before it are whole frames, and the bytes behind it do not count.

    Syncing bytes that make a file longer also waits for the file system's journal; syncing bytes that replace others
    does not. If every append is synced, the file is therefore extended with zeros, for many small appends at a time,
    and truncated when it is finished.
    """

    def __init__(self, directory: Path, base: int, options: SegmentOptions) -> None:
        self.base = base
        self.path = directory / file_name(base, LOG)
        self.position = 0
        self._end = 0
        """Up to where zeros were written, or could not be: the next ones follow when `position` gets there."""
        self._segment_bytes = options.segment_bytes
        self._ahead_bytes = options.ahead_bytes if options.fsync is Fsync.ALWAYS else 0
        self.seal_at_ms = _NEVER
        """When the segment is to be sealed: `segment_ms` after its first append."""
        self._segment_ms = options.segment_ms
        self.rule = IndexRule(base, options.index_interval_bytes, options.index_interval_records)
        self.descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        try:
            self.index = IndexFile(directory / file_name(base, INDEX))
            try:
                self.timeindex = IndexFile(directory / file_name(base, TIMEINDEX))
            except OSError:
                self.index.close()
                raise
        except OSError:
            os.close(self.descriptor)
            raise

    def write(self, parts: Sequence[Buffer], size: int) -> None:
        """Write these parts, `size` bytes together, behind the last frame. They do not count until `accept` was called
        for each of their frames.
        """
        write_at(self.descriptor, parts, self.position, size)
        end = self.position + size
        if end > self._end:
            # Never more than the segment has, since many logs are small, and none that no frame would replace.
            ahead = min(self._ahead_bytes, end, self._segment_bytes - end)
            if size * _APPENDS_AHEAD <= ahead:
                self._lengthen(end, ahead + -(end + ahead) % _BLOCK)

    def _lengthen(self, end: int, size: int) -> None:
        """Write zeros from `end` on. If the disk has no room for them, appends go on without, until the next try."""
        zeros = [_ZEROS] * (size // len(_ZEROS)) + [_ZEROS[: size % len(_ZEROS)]]
        try:
            write_at(self.descriptor, zeros, end, size)
        except OSError:
            os.ftruncate(self.descriptor, end)
        self._end = end + size

    def set_first_append(self, append_ms: int) -> None:
        """Record the time of the segment's first append, from which its age counts."""
        self.seal_at_ms = append_ms + self._segment_ms

    def accept(self, length: int, base_offset: int, append_ms: int, before: Maxima) -> None:
        """Advance behind the next frame that was written, and make its index entries. `before` are the highest times
        before the frame.

        The frame need not be durable yet: a caller that fails to sync it sets `position` back and reopens the segment.
        """
        if self.seal_at_ms == _NEVER:
            self.set_first_append(append_ms)
        entry, time_entry = self.rule.entries(self.position, base_offset, before)
        if entry:
            self.index.add(entry)
        if time_entry:
            self.timeindex.add(time_entry)
        self.position += length

    def flush_indexes(self) -> None:
        """Write pending index entries. An error is ignored: an index that lags behind only costs readers a longer
        scan.
        """
        try:
            self.index.flush(PENDING_BYTES)
            self.timeindex.flush(PENDING_BYTES)
        except OSError:
            pass

    def check_not_removed(self) -> None:
        """Raise `FileNotFoundError` if the segment's file was removed: records written to it would be lost."""
        if is_removed(self.descriptor):
            raise FileNotFoundError(errno.ENOENT, "its file was removed", str(self.path))

    def cut_torn_end(self) -> None:
        """Durably remove the bytes behind the last frame."""
        os.ftruncate(self.descriptor, self.position)
        self._end = 0
        sync_data(self.descriptor)

    def sync(self) -> None:
        sync_data(self.descriptor)

    def finish(self) -> None:
        """Cut off the zeros and make the segment and its indexes durable, so that it can be sealed."""
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
