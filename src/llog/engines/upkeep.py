"""Retention over all topics, whatever their engines, and key compaction of those that want it."""

from __future__ import annotations

from llog.engines.disk.engine import DiskAppender
from llog.engines.disk.open_segments import OpenSegments
from llog.engines.port import CleanResult, LogAppender, RetentionResult
from llog.engines.rocksdb.engine import OpenRocks, RocksAppender
from llog.errors import LlogError, PartitionNotInitialized
from llog.log.catalog import COMPACTING, DISK, ROCKSDB, Catalog
from llog.log.log import Log
from llog.log.records import Cleanup, Topic
from llog.model import TopicPartition


async def retain_all(
    log: Log, appender: LogAppender, engine: str | None = None, *, only_owned: bool = False
) -> dict[TopicPartition, RetentionResult | LlogError]:
    """Applies each topic's own settings to all its partitions, of one engine if so wanted. A partition that fails does
    not keep the others.

    A topic that another process owns is left to that one: its error is `LogOwned`. With `only_owned`, what is in
    RocksDB is left alone unless this process has it open: upkeep in the background must not become its owner.
    """
    results: dict[TopicPartition, RetentionResult | LlogError] = {}
    for topic in await Catalog(log).topics(engine):
        if (topic.retention_ms is None and topic.retention_bytes is None) or (only_owned and _is_free(log, topic)):
            continue
        for partition in range(topic.partitions):
            tp = TopicPartition(topic.name, partition)
            try:
                results[tp] = await appender.retain(
                    tp, retention_ms=topic.retention_ms, retention_bytes=topic.retention_bytes
                )
            except PartitionNotInitialized:
                continue  # deleted meanwhile
            except LlogError as error:
                results[tp] = error
    return results


async def let_go_of_deleted(log: Log) -> None:
    """Closes the files of disk topics that were deleted, by whomever."""
    if isinstance(log.segments, OpenSegments):
        await log.segments.let_go_of_deleted()


async def clean_all(
    log: Log, *, topic: str | None = None, only_owned: bool = False
) -> dict[TopicPartition, CleanResult | LlogError]:
    """Key compaction of every topic whose cleanup is `compact`; all there is of `topic`, if one is named.

    A partition that fails does not keep the others. One that another process owns is left to that one: its error is
    `LogOwned`. `only_owned` is as in `retain_all`.
    """
    appenders: dict[str, DiskAppender | RocksAppender] = {DISK: DiskAppender(log), ROCKSDB: RocksAppender(log)}
    results: dict[TopicPartition, CleanResult | LlogError] = {}
    for each in await Catalog(log).topics():
        if each.engine not in COMPACTING or each.cleanup is not Cleanup.COMPACT or topic not in (None, each.name):
            continue
        if only_owned and _is_free(log, each):
            continue
        for partition in range(each.partitions):
            tp = TopicPartition(each.name, partition)
            try:
                results[tp] = await appenders[each.engine].clean(tp, force=topic is not None)
            except PartitionNotInitialized:
                continue  # deleted meanwhile
            except LlogError as error:
                results[tp] = error
    return results


def _is_free(log: Log, topic: Topic) -> bool:
    """Whether the topic is in a RocksDB that this process has not opened."""
    return topic.engine == ROCKSDB and not (isinstance(log.rocks, OpenRocks) and log.rocks.known is not None)
