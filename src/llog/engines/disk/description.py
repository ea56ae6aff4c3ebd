"""Describes how a partition is stored on disk, for people. The log itself does not use it."""

from __future__ import annotations

import asyncio
from itertools import islice

from llog.base.lockfile import Owner, owner_of
from llog.engines.disk.format.files import translate_os_errors
from llog.engines.disk.log.inspection import FrameInfo, SegmentInfo
from llog.engines.disk.log.reader import SegmentReader
from llog.engines.disk.topics import DiskTopics
from llog.errors import InvalidArgument
from llog.log.engine import Description
from llog.model import TopicPartition


class DiskDescription(Description, frozen=True, kw_only=True):
    """Not a snapshot: each part is read on its own."""

    directory: str
    log_start_offset: int
    next_offset: int
    owner: Owner | None
    """The process that opened the partition for writing last; it may have ended."""
    segments: list[SegmentInfo]
    frames: list[FrameInfo]
    more_from: int | None
    """The offset from which to ask for more frames; None if there are none."""


async def describe_partition(
    topics: DiskTopics, tp: TopicPartition, max_frames: int, *, from_offset: int = 0
) -> DiskDescription:
    """Describe all segments, and up to `max_frames` frames that end at `from_offset` or above."""
    if max_frames < 1:
        raise InvalidArgument(f"max_frames must be 1 or more: {max_frames}")
    partition = await topics.find(tp)

    def describe(reader: SegmentReader) -> DiskDescription:
        with translate_os_errors("inspect", partition.path):
            bounds = reader.bounds_now()
            is_empty = bounds.log_start_offset == bounds.next_offset
            frames = [] if is_empty else list(islice(reader.frames(from_offset), max_frames + 1))
            return DiskDescription(
                topic=tp.topic,
                partition=tp.partition,
                directory=str(partition.path),
                log_start_offset=bounds.log_start_offset,
                next_offset=bounds.next_offset,
                owner=owner_of(partition.path),
                segments=[] if is_empty else reader.describe(),
                frames=frames[:max_frames],
                more_from=frames[-1].start_offset if len(frames) > max_frames else None,
            )

    with topics.segments.borrow_reader(partition.path, tp) as reader:
        return await asyncio.to_thread(describe, reader)
