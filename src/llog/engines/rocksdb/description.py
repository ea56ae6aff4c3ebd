"""Describes how a partition is stored in RocksDB, for people. The log itself does not use it."""

from __future__ import annotations

import asyncio

import msgspec

from llog.engines.rocksdb.partition_state import PartitionState
from llog.engines.rocksdb.reader import headers_from
from llog.engines.rocksdb.topics import RocksTopics
from llog.errors import InvalidArgument
from llog.log.engine import Description
from llog.model import TopicPartition


class RecordInfo(msgspec.Struct, frozen=True, kw_only=True):
    offset: int
    bytes: int
    timestamp_ms: int
    append_ms: int


class RocksDescription(Description, frozen=True, kw_only=True):
    directory: str
    state: PartitionState
    records: list[RecordInfo]
    more_from: int | None
    """The offset from which to ask for more records; None if there are none."""


async def describe_partition(
    topics: RocksTopics, tp: TopicPartition, max_records: int, *, from_offset: int = 0
) -> RocksDescription:
    """Describe the partition's state, and up to `max_records` records from `from_offset` on."""
    if max_records < 1:
        raise InvalidArgument(f"max_records must be 1 or more: {max_records}")
    topic, logs = await topics.find(tp)
    state = logs.state(topic.directory, tp.partition, str(tp))
    records = await asyncio.to_thread(
        headers_from, logs.store, topic.directory, tp.partition, state, from_offset, max_records + 1
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
