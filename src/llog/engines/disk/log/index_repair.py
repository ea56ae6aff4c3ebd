"""Indexes of sealed segments that are missing or damaged, made again on disk. Readers make their own in memory until
then.
"""

from __future__ import annotations

from llog.engines.disk.format.files import INDEX, LOG, TIMEINDEX, explained, name_of, numbered, put_small
from llog.engines.disk.format.segment import Segment
from llog.engines.disk.log.recovery import maxima_before
from llog.engines.disk.log.writer import SegmentWriter


def rebuild_indexes(writer: SegmentWriter) -> int:
    """How many segments needed it. Reads the indexes of all sealed segments, and the headers of those segments only.

    Appends wait for one segment at most.
    """
    rebuilt = 0
    with explained("index", writer.directory):
        for base in numbered(writer.directory, LOG):
            with writer.mutex:
                writer.check_open()
                rebuilt += _rebuild(writer, base)
    return rebuilt


def _rebuild(writer: SegmentWriter, base: int) -> bool:
    """Whether this segment needed it; one that was removed meanwhile does not."""
    bases = numbered(writer.directory, LOG)
    if base >= writer.active.base or base not in bases:
        return False
    segment = Segment(writer.directory, base)
    end = segment.size()
    if segment.index_problem(end) is None:
        return False
    options = writer.options
    before = maxima_before(writer.directory, bases, bases.index(base))
    index, timeindex = segment.build(end, options.index_interval_bytes, options.index_interval_records, before)
    put_small(writer.directory / name_of(base, INDEX), index)
    put_small(writer.directory / name_of(base, TIMEINDEX), timeindex)
    return True
