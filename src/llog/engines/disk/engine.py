"""The engine `disk`: a topic's partitions as segment files in directories of one machine.

A partition is at `{segments}/{topic directory}/{partition}/`. The first process that appends to it owns it, by a lock,
until it closes its log; any process of the machine reads it meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from llog.engines.disk.description import DiskDescription, describe_partition
from llog.engines.disk.directories import make_directories, remove_directories, topic_path
from llog.engines.disk.segment_pool import SegmentPool
from llog.engines.disk.topic_appender import DiskAppender
from llog.engines.disk.topic_reader import DiskReader
from llog.engines.disk.topics import DiskTopics
from llog.engines.disk.verify import verify
from llog.engines.verify import verify_or_report
from llog.log.engine import Check, CleanResult, Verifier, WriterOptions
from llog.log.findings import VerifyReport
from llog.log.log import Log
from llog.log.owners import disk_ownership
from llog.log.records import Topic
from llog.model import TopicPartition


class DiskEngine:
    """`segments` are the files of this machine, or None if no setting names their directory."""

    has_owner: Final = True
    compacts_keys: Final = True
    keeps_groups: Final = False
    allows_background_upkeep: Final = True  # upkeep only borrows the writers

    def __init__(self, segments: SegmentPool | None = None) -> None:
        self.segments = segments

    async def create(self, log: Log, topic: Topic) -> Topic:
        if self.segments is not None:
            topic = msgspec.structs.replace(topic, home=await self.segments.ensure_directory() or "")
        path = await topic_path(log, self.segments, topic)
        await asyncio.to_thread(make_directories, path, range(topic.partitions), new=True)
        return topic

    async def add_partitions(self, log: Log, topic: Topic, partitions: range) -> None:
        path = await topic_path(log, self.segments, topic)
        await asyncio.to_thread(make_directories, path, partitions, new=False)

    async def check_removable(self, log: Log, topic: Topic) -> None:
        await topic_path(log, self.segments, topic)

    async def remove(self, log: Log, topic: Topic) -> None:
        """Remove the topic's files. A process that has them open finds them gone."""
        await asyncio.to_thread(remove_directories, await topic_path(log, self.segments, topic))

    async def is_here(self) -> bool:
        return self.segments is not None

    def reader(self, log: Log) -> DiskReader:
        return DiskReader(log, self.segments)

    def appender(self, log: Log, options: WriterOptions) -> DiskAppender:
        return DiskAppender(log, self.segments, options.append_bytes_max)

    async def describe(self, log: Log, tp: TopicPartition, max_pieces: int, *, from_offset: int = 0) -> DiskDescription:
        """Describe all segments, and up to `max_pieces` frames that end at `from_offset` or above."""
        return await describe_partition(DiskTopics(log, self.segments), tp, max_pieces, from_offset=from_offset)

    def verifier(self, log: Log) -> Verifier:
        topics = DiskTopics(log, self.segments)

        async def verify_one(tp: TopicPartition, *, progress: Callable[[int], None] | None = None) -> VerifyReport:
            return await verify_or_report(tp, verify(topics, tp, progress))

        return verify_one

    async def clean(self, log: Log, tp: TopicPartition, *, force: bool = False) -> CleanResult:
        """Compact by key. Without `force`, the newest segment is left alone, too."""
        return await DiskAppender(log, self.segments).clean(tp, force=force)

    async def release_deleted(self) -> None:
        if self.segments is not None:
            await self.segments.close_deleted()

    async def take_ownership(self) -> None:
        if self.segments is not None:
            await self.segments.take_ownership()

    def ownership_name(self, topic: Topic) -> str:
        return disk_ownership(topic.home)

    def checks(self) -> Mapping[str, Check]:
        return {} if self.segments is None else {"disk topics": self.segments.check}

    async def close(self) -> None:
        if self.segments is not None:
            await self.segments.close()
