"""Describes the segments and frames of a log for `llog inspect` and `llog verify`. The log itself does not use it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from llog.engines.disk.format.bodies import decode_frame
from llog.engines.disk.format.files import INDEX, LOG, TIMEINDEX, file_name, file_numbers
from llog.engines.disk.format.segment import FrameStart, Segment
from llog.errors import CorruptBatch
from llog.log.engine import Bounds


class FrameInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A frame, or damaged bytes in its place: then `problem` says what is wrong, and other fields are set if known."""

    path: str
    position: int
    length: int
    start_offset: int
    end_offset: int
    records: int = 0
    append_ms: int | None = None
    max_append_ms: int | None = None
    max_timestamp_ms: int | None = None
    producer: str | None = None
    sequence: int | None = None
    problem: str | None = None


class SegmentInfo(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    base_offset: int
    end_offset: int
    bytes: int
    index_bytes: int
    timeindex_bytes: int
    sealed: bool


def inspect_segments(directory: Path, bounds: Bounds) -> list[SegmentInfo]:
    bases = [base for base in file_numbers(directory, LOG) if base <= bounds.next_offset]
    found = []
    for base, following in zip(bases, [*bases[1:], bounds.next_offset], strict=False):
        sizes = [_file_size(directory / file_name(base, suffix)) for suffix in (LOG, INDEX, TIMEINDEX)]
        if base == bases[-1]:
            sizes[0] = _end_of_frames(directory, base, bounds.next_offset)
        found.append(
            SegmentInfo(
                path=str(directory / file_name(base, LOG)),
                base_offset=base,
                end_offset=following - 1,
                bytes=sizes[0],
                index_bytes=sizes[1],
                timeindex_bytes=sizes[2],
                sealed=base != bases[-1],
            )
        )
    return found


def inspect_frames(directory: Path, bounds: Bounds, from_offset: int) -> Iterator[FrameInfo]:
    """Yield every frame that ends at `from_offset` or above, after decoding its body. Damage is yielded too, and the
    walk continues at the next frame that the index knows.
    """
    infos = inspect_segments(directory, bounds)
    offset = from_offset
    for info in infos:
        if info.end_offset < from_offset:
            continue
        if offset < info.base_offset:
            yield _damaged_range(info.path, 0, 0, offset, info.base_offset - 1, "offsets are in no segment")
        segment = Segment(directory, info.base_offset)
        end = segment.size()
        start = segment.floor(max(from_offset, info.base_offset), end)
        offset = info.base_offset
        while start.offset <= info.end_offset:
            scan = segment.scan(start, end)
            for located in scan:
                frame, problem = located.frame, None
                if frame.next_offset > from_offset:
                    try:
                        decode_frame(scan, located)
                    except CorruptBatch as error:
                        problem = str(error)
                    yield FrameInfo(
                        path=info.path,
                        position=located.position,
                        length=frame.length,
                        start_offset=frame.base_offset,
                        end_offset=frame.next_offset - 1,
                        records=frame.records,
                        append_ms=frame.append_ms,
                        max_append_ms=frame.max_append_ms,
                        max_timestamp_ms=frame.max_timestamp_ms,
                        producer=frame.producer,
                        sequence=frame.sequence if frame.producer is not None else None,
                        problem=problem,
                    )
                if scan.offset > info.end_offset:
                    break
            offset = scan.offset
            if offset > info.end_offset:
                break
            start = _next_indexed_frame(segment, scan.position, end) or FrameStart(end, info.end_offset + 1)
            why = scan.problem or "the file ends early"
            yield _damaged_range(
                info.path, scan.position, start.position - scan.position, offset, start.offset - 1, why
            )
            offset = start.offset
    if not infos and bounds.next_offset > from_offset:
        yield _damaged_range(str(directory), 0, 0, from_offset, bounds.next_offset - 1, "there is no segment")


def _next_indexed_frame(segment: Segment, position: int, end: int) -> FrameStart | None:
    """Return the first indexed frame behind `position` that exists; None if there is none."""
    for start in segment.indexed_frames(end):
        if start.position > position and segment.has_frame(start, end):
            return start
    return None


def _end_of_frames(directory: Path, base: int, next_offset: int) -> int:
    """Return where the frames below `next_offset` end; a newest segment may have zeros behind them. For a damaged
    segment, return its size.
    """
    try:
        segment = Segment(directory, base)
    except FileNotFoundError:
        return 0
    size = segment.size()
    scan = segment.scan(segment.floor(next_offset - 1, size), size)
    while scan.offset < next_offset:
        if next(iter(scan), None) is None:
            return size
    return scan.position


def _damaged_range(path: str, position: int, length: int, start: int, stop: int, problem: str) -> FrameInfo:
    return FrameInfo(path=path, position=position, length=length, start_offset=start, end_offset=stop, problem=problem)


def _file_size(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0
