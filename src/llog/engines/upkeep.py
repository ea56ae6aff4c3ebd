"""Retention and key compaction over all topics, whatever their engines."""

from __future__ import annotations

from llog.errors import LlogError, PartitionNotInitialized
from llog.log.catalog import Catalog
from llog.log.engine import CleanResult, LogAppender, RetentionResult, engine_of
from llog.log.log import Log
from llog.log.records import Cleanup
from llog.model import TopicPartition


async def retain_all(
    log: Log, appender: LogAppender, engine: str | None = None, *, only_owned: bool = False
) -> dict[TopicPartition, RetentionResult | LlogError]:
    """Apply each topic's retention to all of its partitions, optionally for one engine only. Return a result or error
    per partition: one that fails does not stop the others.

    A partition of another process gets the error `LogOwned`, and is left to that process. `only_owned` skips topics
    whose owner this process would become, which upkeep in the background must not do.
    """
    results: dict[TopicPartition, RetentionResult | LlogError] = {}
    skipped = _unowned_engines(log) if only_owned else set()
    for topic in await Catalog(log).topics(engine):
        if (topic.retention_ms is None and topic.retention_bytes is None) or topic.engine in skipped:
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


async def release_deleted(log: Log) -> None:
    """Close the files of topics that were deleted, by this or any other process."""
    for engine in log.engines.values():
        await engine.release_deleted()


async def clean_all(
    log: Log, *, topic: str | None = None, only_owned: bool = False
) -> dict[TopicPartition, CleanResult | LlogError]:
    """Compact by key every topic whose cleanup is `compact`; or only `topic`, and then also where little is new.

    Results, errors and `only_owned` are as in `retain_all`.
    """
    results: dict[TopicPartition, CleanResult | LlogError] = {}
    skipped = _unowned_engines(log) if only_owned else set()
    for each in await Catalog(log).topics():
        if each.cleanup is not Cleanup.COMPACT or each.engine in skipped or topic not in (None, each.name):
            continue
        for partition in range(each.partitions):
            tp = TopicPartition(each.name, partition)
            try:
                results[tp] = await engine_of(log, each).clean(log, tp, force=topic is not None)
            except PartitionNotInitialized:
                continue  # deleted meanwhile
            except LlogError as error:
                results[tp] = error
    return results


def _unowned_engines(log: Log) -> set[str]:
    """Return the engines whose owner this process would become by upkeep."""
    return {name for name, engine in log.engines.items() if not engine.allows_background_upkeep}
