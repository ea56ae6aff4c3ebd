"""What a partition on disk or in RocksDB looks like inside, for people who look: nothing here is used by the log
itself.
"""

from __future__ import annotations

import asyncio
from itertools import islice

import msgspec

from llog.base.lockfile import Owner, owner_of
from llog.engines.disk.engine import DiskTopics
from llog.engines.disk.format.files import explained
from llog.engines.disk.log.inspection import Piece, SegmentInfo
from llog.engines.disk.log.reader import SegmentReader
from llog.engines.rocksdb.engine import RocksTopics
from llog.engines.rocksdb.partition_state import PartitionState
from llog.engines.rocksdb.reader import fixed_from
from llog.errors import InvalidArgument
from llog.log.log import Log
from llog.model import TopicPartition


class DiskDescription(msgspec.Struct, frozen=True, kw_only=True):
    """Not one moment's: each part is read on its own."""

    topic: str
    partition: int
    directory: str
    log_start_offset: int
    next_offset: int
    owner: Owner | None
    """Who opened it for writing last; it need not be there any more."""
    segments: list[SegmentInfo]
    frames: list[Piece]
    more_from: int | None
    """Where to ask on from, if there are more frames."""


async def describe_disk_partition(
    log: Log, tp: TopicPartition, max_frames: int = 100, *, from_offset: int = 0
) -> DiskDescription:
    """All segments, and up to `max_frames` frames that end at `from_offset` or above."""
    if max_frames < 1:
        raise InvalidArgument(f"max_frames must be 1 or more: {max_frames}")
    topics = DiskTopics(log)
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


class RecordInfo(msgspec.Struct, frozen=True, kw_only=True):
    offset: int
    bytes: int
    timestamp_ms: int
    append_ms: int


class RocksDescription(msgspec.Struct, frozen=True, kw_only=True):
    topic: str
    partition: int
    directory: str
    state: PartitionState
    records: list[RecordInfo]
    more_from: int | None
    """Where to ask on from, if there are more records."""


async def describe_rocks_partition(
    log: Log, tp: TopicPartition, max_records: int = 100, *, from_offset: int = 0
) -> RocksDescription:
    """The state, and up to `max_records` records from `from_offset` on."""
    if max_records < 1:
        raise InvalidArgument(f"max_records must be 1 or more: {max_records}")
    topic, logs = await RocksTopics(log).find(tp)
    state = logs.state(topic.directory, tp.partition, str(tp))
    records = await asyncio.to_thread(
        fixed_from, logs.store, topic.directory, tp.partition, state, from_offset, max_records + 1
    )
    return RocksDescription(
        topic=tp.topic,
        partition=tp.partition,
        directory=str(logs.store.directory),
        state=state,
        records=[
            RecordInfo(offset=each.offset, bytes=each.length, timestamp_ms=each.timestamp, append_ms=each.append_ms)
            for each in records[:max_records]
        ],
        more_from=records[-1].offset if len(records) > max_records else None,
    )
