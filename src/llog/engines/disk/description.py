"""What a partition on disk looks like inside, for people who look: the log itself uses nothing of it."""

from __future__ import annotations

import asyncio
from itertools import islice

from llog.base.lockfile import Owner, owner_of
from llog.engines.disk.format.files import explained
from llog.engines.disk.log.inspection import Piece, SegmentInfo
from llog.engines.disk.log.reader import SegmentReader
from llog.engines.disk.topics import DiskTopics
from llog.errors import InvalidArgument
from llog.log.engine import Description
from llog.model import TopicPartition


class DiskDescription(Description, frozen=True, kw_only=True):
    """Not one moment's: each part is read on its own."""

    directory: str
    log_start_offset: int
    next_offset: int
    owner: Owner | None
    """Who opened it for writing last; it need not be there any more."""
    segments: list[SegmentInfo]
    frames: list[Piece]
    more_from: int | None
    """Where to ask on from, if there are more frames."""


async def describe_partition(
    topics: DiskTopics, tp: TopicPartition, max_frames: int, *, from_offset: int = 0
) -> DiskDescription:
    """All segments, and up to `max_frames` frames that end at `from_offset` or above."""
    if max_frames < 1:
        raise InvalidArgument(f"max_frames must be 1 or more: {max_frames}")
    place = await topics.find(tp)

    def looked(reader: SegmentReader) -> DiskDescription:
        with explained("look at", place.path):
            return described(reader)

    def described(reader: SegmentReader) -> DiskDescription:
        bounds = reader.bounds_now()
        empty = bounds.log_start_offset == bounds.next_offset
        frames = [] if empty else list(islice(reader.pieces(from_offset), max_frames + 1))
        return DiskDescription(
            topic=tp.topic,
            partition=tp.partition,
            directory=str(place.path),
            log_start_offset=bounds.log_start_offset,
            next_offset=bounds.next_offset,
            owner=owner_of(place.path),
            segments=[] if empty else reader.describe(),
            frames=frames[:max_frames],
            more_from=frames[-1].start_offset if len(frames) > max_frames else None,
        )

    with topics.segments.reading(place.path, tp) as reader:
        return await asyncio.to_thread(looked, reader)
