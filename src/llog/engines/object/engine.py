"""The engine `object`: records in blobs, their order in the metadata store. It is leaderless: any process reads,
appends to and maintains any topic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from llog.engines.object.blob_headers import Headers
from llog.engines.object.description import PartitionDescription, describe_partition
from llog.engines.object.reader import Reader
from llog.engines.object.verify import verify
from llog.engines.object.writer import Writer
from llog.engines.port import CleanResult, WriterOptions
from llog.errors import InvalidArgument, VersionMismatch
from llog.log.engine import Check, Verifier
from llog.log.findings import VerifyReport
from llog.log.keys import PartitionKeys
from llog.log.log import Log
from llog.log.records import Control, Cursor, LogState, Topic, decode, encode
from llog.model import FIRST_OFFSET, TopicPartition
from llog.stores.meta import ABSENT, MetaStore, Put, after

_INITIALIZE_PAGE: Final = 10_000
"""Partitions that one request initialises."""


class ObjectEngine:
    has_owner: Final = False
    compacts_keys: Final = False
    keeps_groups: Final = False
    is_taken_up: Final = True

    async def create(self, log: Log, topic: Topic) -> Topic:
        await self.add_partitions(log, topic, range(topic.partitions))
        return topic

    async def add_partitions(self, log: Log, topic: Topic, partitions: range) -> None:
        control, cursor = encode(Control()), encode(Cursor(FIRST_OFFSET))
        for first in range(partitions.start, partitions.stop, _INITIALIZE_PAGE):
            puts = []
            for partition in range(first, min(first + _INITIALIZE_PAGE, partitions.stop)):
                keys = PartitionKeys(topic.directory, partition)
                puts += [Put(keys.cursor, cursor, ABSENT), Put(keys.control, control, ABSENT)]
            await log.meta.put_many(puts)

    async def check_removable(self, log: Log, topic: Topic) -> None:
        """Any process removes any topic."""

    async def remove(self, log: Log, topic: Topic) -> None:
        """Closes the partitions and removes their index; the next collection removes the blobs."""
        for partition in range(topic.partitions):
            keys = PartitionKeys(topic.directory, partition)
            await _close_partition(log.meta, keys)
            await log.meta.delete_range(keys.index, after(keys.index))
            for key in (keys.compaction, keys.cursor):
                await log.meta.delete(key)

    async def is_here(self) -> bool:
        return True

    def reader(self, log: Log) -> Reader:
        return Reader(log)

    def appender(self, log: Log, options: WriterOptions) -> Writer:
        return Writer(log, options)

    async def describe(
        self, log: Log, tp: TopicPartition, max_pieces: int, *, from_offset: int = 0
    ) -> PartitionDescription:
        """Up to `max_pieces` index entries that end at `from_offset` or above, and everything else that is stored."""
        return await describe_partition(log, tp, max_pieces, from_offset=from_offset)

    def verifier(self, log: Log) -> Verifier:
        headers = Headers(log)

        async def verify_one(tp: TopicPartition, *, progress: Callable[[int], None] | None = None) -> VerifyReport:
            return await verify(log, tp, progress=progress, headers=headers)

        return verify_one

    async def clean(self, log: Log, tp: TopicPartition, *, force: bool = False) -> CleanResult:
        raise InvalidArgument(f"topic {tp.topic!r} keeps all records of a key: it is of engine 'object'")

    async def release_deleted(self) -> None:
        """Nothing is open."""

    async def take_up(self) -> None:
        """There is nothing to own."""

    def owner_key(self, topic: Topic) -> None:
        return None

    def checks(self) -> Mapping[str, Check]:
        """The stores of the log are all that it has."""
        return {}

    async def close(self) -> None:
        """Nothing is open."""


async def _close_partition(meta: MetaStore, keys: PartitionKeys) -> None:
    """Leaves a DELETED control record behind, for good: a stalled writer's CAS must find it.

    It keeps the producers, so that an append whose answer was lost can still be told from one that never happened.
    """
    while True:
        found = await meta.get(keys.control)
        if found is None:
            return
        control = decode(Control, found.value, found.key)
        if control.log_state is LogState.DELETED:
            return
        closed = msgspec.structs.replace(control, log_state=LogState.DELETED, pending=None)
        try:
            await meta.put(keys.control, encode(closed), expected=found.version)
        except VersionMismatch:
            continue
