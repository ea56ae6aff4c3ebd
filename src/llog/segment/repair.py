"""Indexes of sealed segments that are missing or damaged, made again on disk. Readers make their own in memory until then."""

from __future__ import annotations

from llog.segment.files import INDEX, LOG, TIMEINDEX, explained, name_of, numbered, put_small
from llog.segment.recovery import maxima_before
from llog.segment.segments import Segment
from llog.segment.writer import SegmentWriter


def rebuild_indexes(writer: SegmentWriter) -> int:
    """How many segments needed it. Reads the indexes of all sealed segments, and the headers of those segments only."""
    rebuilt = 0
    with writer.mutex, explained("index", writer.directory):
        options = writer.options
        bases = numbered(writer.directory, LOG)
        for number, base in enumerate(bases):
            if base >= writer.active.base:
                break
            segment = Segment(writer.directory, base)
            end = segment.size()
            if segment.index_problem(end) is None:
                continue
            before = maxima_before(writer.directory, bases, number)
            index, timeindex = segment.build(end, options.index_interval_bytes, options.index_interval_records, before)
            put_small(writer.directory / name_of(base, INDEX), index)
            put_small(writer.directory / name_of(base, TIMEINDEX), timeindex)
            rebuilt += 1
    return rebuilt
