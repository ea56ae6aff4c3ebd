"""Trim and retention: first the log start is raised, then whole segments below it are removed, lowest first."""

from __future__ import annotations

import errno
import os
from itertools import pairwise

from llog.engines.disk.format.files import LOG, file_name, file_numbers, translate_os_errors
from llog.engines.disk.format.index import Maxima
from llog.engines.disk.log.recovery import maxima_before, remove_segments_below
from llog.engines.disk.log.replacement import complete_committed
from llog.engines.disk.log.writer import SegmentWriter
from llog.errors import InvalidArgument, OffsetOutOfRange
from llog.log.engine import RetentionResult
from llog.model import FIRST_OFFSET, TimestampType


def trim(writer: SegmentWriter, before_offset: int) -> RetentionResult:
    """Remove exactly the records below `before_offset`. Raises `OffsetOutOfRange` above the next offset."""
    if before_offset < FIRST_OFFSET:
        raise InvalidArgument(f"offsets start at {FIRST_OFFSET}: {before_offset}")
    with writer.mutex:
        writer.check_open()
        bounds = writer.bounds
        if before_offset > bounds.next_offset:
            raise OffsetOutOfRange(writer.what, before_offset, *bounds)
        with translate_os_errors("trim", writer.directory):
            complete_committed(writer.directory)
        if before_offset == bounds.next_offset:
            writer.roll()
        return _raise_start(writer, before_offset)


def retain(
    writer: SegmentWriter,
    *,
    retention_ms: int | None,
    retention_bytes: int | None,
    now_ms: int,
    by: TimestampType,
) -> RetentionResult:
    """Remove whole segments: those older than `retention_ms`, and the oldest beyond `retention_bytes`; None is no
    limit.

    A segment's age is the running maximum of the times that `by` names. The segment that crosses `retention_bytes`
    stays. The newest segment is sealed first if it must go as well.
    """
    for name, value in (("retention_ms", retention_ms), ("retention_bytes", retention_bytes)):
        if value is not None and value < 0:
            raise InvalidArgument(f"{name} must not be negative: {value}")
    with writer.mutex, translate_os_errors("inspect", writer.directory):
        writer.check_open()
        complete_committed(writer.directory)
        bases = file_numbers(writer.directory, LOG)
        sizes = [os.stat(writer.directory / file_name(base, LOG)).st_size for base in bases[:-1]]
        sizes.append(writer.active.position)
        excess = None if retention_bytes is None else sum(sizes) - retention_bytes
        dropped, gone = 0, 0
        for number, size in enumerate(sizes):
            newest = _maxima_through(writer, bases, number).time(by)
            too_old = retention_ms is not None and newest < now_ms - retention_ms
            too_much = excess is not None and dropped + size <= excess
            if not (too_old or too_much):
                break
            dropped += size
            gone = number + 1
        if gone == len(bases):
            if not writer.active.position:
                gone -= 1
            else:
                writer.roll()
                bases.append(writer.active.base)
        return _raise_start(writer, max(bases[gone], writer.log_start))


def _raise_start(writer: SegmentWriter, offset: int) -> RetentionResult:
    with translate_os_errors("trim", writer.directory):
        old = writer.log_start
        bases = file_numbers(writer.directory, LOG)
        size = sum(
            os.stat(writer.directory / file_name(base, LOG)).st_size
            for base, following in pairwise(bases)
            if following <= offset
        )
        if offset > old:
            try:
                writer.raise_start(offset)
            except OSError as error:
                if error.errno != errno.ENOSPC or len(bases) < 2 or bases[1] > offset:
                    raise
                # A full disk cannot store the new log start: remove the first segment without it, which makes room,
                # and the log starts with the next segment.
                bases = remove_segments_below(writer.directory, bases, bases[1])
                writer.raise_start(offset)
        remove_segments_below(writer.directory, bases, max(offset, old))
        start = max(offset, old)
        return RetentionResult(old_start=old, new_start=start, records=start - old, bytes=size)


def _maxima_through(writer: SegmentWriter, bases: list[int], number: int) -> Maxima:
    if number == len(bases) - 1:
        return writer.state.maxima
    return maxima_before(writer.directory, bases, number + 1)
