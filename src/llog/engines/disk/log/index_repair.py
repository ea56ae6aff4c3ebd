"""Rebuilds missing or damaged indexes of sealed segments on disk. Until then, readers build theirs in memory."""

from __future__ import annotations

from llog.engines.disk.format.files import (
    INDEX,
    LOG,
    TIMEINDEX,
    file_name,
    file_numbers,
    replace_small_file,
    translate_os_errors,
)
from llog.engines.disk.format.segment import Segment
from llog.engines.disk.log.recovery import maxima_before
from llog.engines.disk.log.writer import SegmentWriter


def rebuild_indexes(writer: SegmentWriter) -> int:
    """Rebuild the indexes that need it, and return for how many segments. Reads all indexes, but only the headers of
    segments whose index is rebuilt.

    Appends wait for one segment at most.
    """
    rebuilt = 0
    with translate_os_errors("index", writer.directory):
        for base in file_numbers(writer.directory, LOG):
            with writer.mutex:
                writer.check_open()
                rebuilt += _rebuild_if_needed(writer, base)
    return rebuilt


def _rebuild_if_needed(writer: SegmentWriter, base: int) -> bool:
    """Return whether the segment's indexes were rebuilt; False if the segment was removed meanwhile."""
    bases = file_numbers(writer.directory, LOG)
    if base >= writer.active.base or base not in bases:
        return False
    segment = Segment(writer.directory, base)
    end = segment.size()
    if segment.index_problem(end) is None:
        return False
    options = writer.options
    before = maxima_before(writer.directory, bases, bases.index(base))
    index, timeindex = segment.build_indexes(end, options.index_interval_bytes, options.index_interval_records, before)
    replace_small_file(writer.directory / file_name(base, INDEX), index)
    replace_small_file(writer.directory / file_name(base, TIMEINDEX), timeindex)
    return True
