"""The newest segment of a log, to which frames are added."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from llog.batch.columns import Buffer
from llog.segment.files import INDEX, LOG, TIMEINDEX, name_of, sync_data, write_at
from llog.segment.index import PENDING_BYTES, IndexFile, IndexRule, Maxima
from llog.segment.options import SegmentOptions

_NEVER: Final = 1 << 63


class ActiveSegment:
    """Opened as its files are: `recovery.py` has brought them in order, or they are new.

    `position` is where the next frame goes: all before it are whole frames, what is behind it is nobody's."""

    def __init__(self, directory: Path, base: int, options: SegmentOptions) -> None:
        self.base = base
        self.path = directory / name_of(base, LOG)
        self.position = 0
        self.old_ms = _NEVER
        """When it is to be sealed: as long after its first append as segments are written to."""
        self._segment_ms = options.segment_ms
        self.rule = IndexRule(base, options.index_interval_bytes, options.index_interval_records)
        self.descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
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

    def write(self, parts: Sequence[Buffer]) -> int:
        """Writes behind the last frame; how many bytes. They are nobody's until `accept` has counted each frame of them."""
        return write_at(self.descriptor, parts, self.position)

    def begin(self, append_ms: int) -> None:
        """Its first append was at this time."""
        self.old_ms = append_ms + self._segment_ms

    def accept(self, length: int, base_offset: int, append_ms: int, before: Maxima) -> None:
        """Goes on behind one frame of what was written, and makes its index entries. `before` are the highest times before it.

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
        if not os.fstat(self.descriptor).st_nlink:
            raise FileNotFoundError(errno.ENOENT, "its file was removed", str(self.path))

    def cut(self) -> None:
        """Removes what lies behind the last frame, durably."""
        os.ftruncate(self.descriptor, self.position)
        sync_data(self.descriptor)

    def sync(self) -> None:
        sync_data(self.descriptor)

    def sync_all(self) -> None:
        os.fsync(self.descriptor)
        self.index.sync()
        self.timeindex.sync()

    def close(self) -> None:
        os.close(self.descriptor)
        self.index.close()
        self.timeindex.close()
