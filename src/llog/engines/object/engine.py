"""The `object` engine: records lie in blobs, and their order in the metadata store.

The engine is leaderless: any process reads, appends to and maintains any topic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from llog.engines.object.blob_headers import BlobHeaders
from llog.engines.object.blob_reads import BlobReads
from llog.engines.object.control_record import change_control
from llog.engines.object.description import PartitionDescription, describe_partition
from llog.engines.object.reader import Reader
from llog.engines.object.verify import verify
from llog.engines.object.writer import Writer
from llog.errors import InvalidArgument
from llog.log.engine import Check, CleanResult, Verifier, WriterOptions
from llog.log.findings import VerifyReport
from llog.log.keys import PartitionKeys
from llog.log.log import Log
from llog.log.records import CompactionCursor, Control, LogState, Topic, encode
from llog.model import FIRST_OFFSET, TopicPartition
from llog.stores.meta import ABSENT, Put, prefix_end

_INITIALIZE_PAGE: Final = 10_000
"""The number of partitions that one request initialises."""


class ObjectEngine:
    has_owner: Final = False
    compacts_keys: Final = False
    keeps_groups: Final = False
    allows_background_upkeep: Final = True

    def __init__(self) -> None:
        self._blob_reads: BlobReads | None = None

    async def create(self, log: Log, topic: Topic) -> Topic:
        await self.add_partitions(log, topic, range(topic.partitions))
        return topic

    async def add_partitions(self, log: Log, topic: Topic, partitions: range) -> None:
        control, cursor = encode(Control()), encode(CompactionCursor(FIRST_OFFSET))
        for first in range(partitions.start, partitions.stop, _INITIALIZE_PAGE):
            puts = []
            for partition in range(first, min(first + _INITIALIZE_PAGE, partitions.stop)):
                keys = PartitionKeys(topic.directory, partition)
                puts += [Put(keys.cursor, cursor, ABSENT), Put(keys.control, control, ABSENT)]
            await log.meta.put_many(puts)

    async def check_removable(self, log: Log, topic: Topic) -> None:
        """Do nothing: any process can remove any topic."""

    async def remove(self, log: Log, topic: Topic) -> None:
        """Close the partitions and delete their indexes; the next collection deletes the blobs."""
        for partition in range(topic.partitions):
            keys = PartitionKeys(topic.directory, partition)
            await _close_partition(log, keys)
            await log.meta.delete_range(keys.index, prefix_end(keys.index))
            await log.meta.delete_range(keys.producers, prefix_end(keys.producers))
            for key in (keys.compaction, keys.cursor):
                await log.meta.delete(key)

    async def is_here(self) -> bool:
        return True

    def reader(self, log: Log) -> Reader:
        """Return a reader that shares its GETs with all other readers of the log."""
        if self._blob_reads is None or self._blob_reads.blobs is not log.blobs:
            self._blob_reads = BlobReads(log.blobs)
        return Reader(log, self._blob_reads)

    def appender(self, log: Log, options: WriterOptions) -> Writer:
        return Writer(log, options)

    async def describe(
        self, log: Log, tp: TopicPartition, max_pieces: int, *, from_offset: int = 0
    ) -> PartitionDescription:
        """Describe the partition, with up to `max_pieces` index entries that end at `from_offset` or above."""
        return await describe_partition(log, tp, max_pieces, from_offset=from_offset)

    def verifier(self, log: Log) -> Verifier:
        headers = BlobHeaders(log)

        async def verify_one(tp: TopicPartition, *, progress: Callable[[int], None] | None = None) -> VerifyReport:
            return await verify(log, tp, progress=progress, headers=headers)

        return verify_one

    async def clean(self, log: Log, tp: TopicPartition, *, force: bool = False) -> CleanResult:
        raise InvalidArgument(
            f"topic {tp.topic!r} keeps all records of a key, because its engine is 'object': key compaction needs "
            "engine 'disk' or 'rocksdb'"
        )

    async def release_deleted(self) -> None:
        """Do nothing: the engine keeps no files open."""

    async def take_ownership(self) -> None:
        """Do nothing: the topics of this engine have no owner."""

    def ownership_name(self, topic: Topic) -> None:
        return None

    def checks(self) -> Mapping[str, Check]:
        """Return no checks: the engine has no stores besides those of the log."""
        return {}

    async def close(self) -> None:
        """Do nothing: the engine keeps no files open."""


async def _close_partition(log: Log, keys: PartitionKeys) -> None:
    """Leave a DELETED control record behind for good, which the CAS of a stalled writer finds.

    The record keeps its producers, so that the writer of an append whose answer was lost can still learn its outcome.
    """

    def close(control: Control) -> Control:
        if control.log_state is LogState.DELETED:
            return control
        return msgspec.structs.replace(control, log_state=LogState.DELETED, pending=None)

    # Its index must stay as long as writers may append to it: a stale read shows a record that is missing, or closed.
    await change_control(log, keys, close, confirm=True)
