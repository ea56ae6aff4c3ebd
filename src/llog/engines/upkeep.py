"""Retention over all topics, whatever their engines, and key compaction of those that want it."""

from __future__ import annotations

from llog.engines.disk import DiskAppender
from llog.engines.segments import OpenSegments
from llog.errors import LlogError, PartitionNotInitialized, TopicNotFound
from llog.model import TopicPartition
from llog.partition.catalog import DISK, Catalog
from llog.partition.log import Log
from llog.partition.records import Cleanup
from llog.ports import LogAppender, RetentionResult
from llog.segment.cleaning import CleanResult


async def retain_all(
    log: Log, appender: LogAppender, engine: str | None = None
) -> dict[TopicPartition, RetentionResult | LlogError]:
    """Applies each topic's own settings to all its partitions, of one engine if so wanted. A partition that fails does not keep the others.

    A disk topic that another process owns is left to that one: its error is `LogOwned`.
    """
    results: dict[TopicPartition, RetentionResult | LlogError] = {}
    for topic in await Catalog(log).topics(engine):
        if topic.retention_ms is None and topic.retention_bytes is None:
            continue
        for partition in range(topic.partitions):
            tp = TopicPartition(topic.name, partition)
            try:
                results[tp] = await appender.retain(
                    tp, retention_ms=topic.retention_ms, retention_bytes=topic.retention_bytes
                )
            except (TopicNotFound, PartitionNotInitialized):
                continue  # deleted meanwhile
            except LlogError as error:
                results[tp] = error
    return results


async def let_go_of_deleted(log: Log) -> None:
    """Closes the files of disk topics that were deleted, by whomever."""
    if isinstance(log.segments, OpenSegments):
        await log.segments.let_go_of_deleted()


async def clean_all(log: Log, *, topic: str | None = None) -> dict[TopicPartition, CleanResult | LlogError]:
    """Key compaction of every disk topic whose cleanup is `compact`; all there is of `topic`, if one is named.

    A partition that fails does not keep the others. One that another process owns is left to that one: its error is `LogOwned`.
    """
    appender = DiskAppender(log)
    results: dict[TopicPartition, CleanResult | LlogError] = {}
    for each in await Catalog(log).topics(DISK):
        if each.cleanup is not Cleanup.COMPACT or topic not in (None, each.name):
            continue
        for partition in range(each.partitions):
            tp = TopicPartition(each.name, partition)
            try:
                results[tp] = await appender.clean(tp, force=topic is not None)
            except (TopicNotFound, PartitionNotInitialized):
                continue  # deleted meanwhile
            except LlogError as error:
                results[tp] = error
    return results
