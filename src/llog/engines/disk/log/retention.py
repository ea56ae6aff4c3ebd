"""Trimming and retention: the log start moves first, then whole segments below it are removed, lowest first."""

from __future__ import annotations

import errno
import os
from itertools import pairwise

from llog.engines.disk.format.files import LOG, explained, name_of, numbered
from llog.engines.disk.format.index import Maxima
from llog.engines.disk.log.recovery import drop_below, maxima_before
from llog.engines.disk.log.replacement import carry_on
from llog.engines.disk.log.writer import SegmentWriter
from llog.engines.port import RetentionResult
from llog.errors import InvalidArgument, OffsetOutOfRange
from llog.model import FIRST_OFFSET, TimestampType


def trim(writer: SegmentWriter, before_offset: int) -> RetentionResult:
    """Removes every record below `before_offset`, exactly and at once. `OffsetOutOfRange` beyond the next offset."""
    if before_offset < FIRST_OFFSET:
        raise InvalidArgument(f"offsets start at {FIRST_OFFSET}: {before_offset}")
    with writer.mutex:
        writer.check_open()
        bounds = writer.bounds
        if before_offset > bounds.next_offset:
            raise OffsetOutOfRange(writer.what, before_offset, *bounds)
        with explained("trim", writer.directory):
            carry_on(writer.directory)
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
    """Removes whole segments: those older than `retention_ms`, and the oldest beyond `retention_bytes`; None is no
    limit.

    Age is by `by`, as a running maximum. The segment that crosses `retention_bytes` is kept. The newest one is sealed
    first if all of it is too old or too much.
    """
    for name, value in (("retention_ms", retention_ms), ("retention_bytes", retention_bytes)):
        if value is not None and value < 0:
            raise InvalidArgument(f"{name} must not be negative: {value}")
    with writer.mutex, explained("look at", writer.directory):
        writer.check_open()
        carry_on(writer.directory)
        bases = numbered(writer.directory, LOG)
        sizes = [os.stat(writer.directory / name_of(base, LOG)).st_size for base in bases[:-1]]
        sizes.append(writer.active.position)
        excess = None if retention_bytes is None else sum(sizes) - retention_bytes
        dropped, gone = 0, 0
        for number, size in enumerate(sizes):
            newest = _time(_maxima_through(writer, bases, number), by)
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
    with explained("trim", writer.directory):
        old = writer.log_start
        bases = numbered(writer.directory, LOG)
        size = sum(
            os.stat(writer.directory / name_of(base, LOG)).st_size
            for base, following in pairwise(bases)
            if following <= offset
        )
        if offset > old:
            try:
                writer.raise_start(offset)
            except OSError as error:
                if error.errno != errno.ENOSPC or len(bases) < 2 or bases[1] > offset:
                    raise
                # On a full disk nothing can be noted: the first segment goes without, the log begins with the next one
                # then.
                bases = drop_below(writer.directory, bases, bases[1])
                writer.raise_start(offset)
        drop_below(writer.directory, bases, max(offset, old))
        start = max(offset, old)
        return RetentionResult(old_start=old, new_start=start, records=start - old, bytes=size)


def _maxima_through(writer: SegmentWriter, bases: list[int], number: int) -> Maxima:
    if number == len(bases) - 1:
        return writer.state.maxima
    return maxima_before(writer.directory, bases, number + 1)


def _time(maxima: Maxima, by: TimestampType) -> int:
    return maxima.append_ms if by is TimestampType.APPEND else maxima.timestamp_ms
