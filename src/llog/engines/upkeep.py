"""Retention over all topics, whatever their engines, and key compaction of those that want it."""

from __future__ import annotations

from llog.engines.port import CleanResult, LogAppender, RetentionResult
from llog.errors import LlogError, PartitionNotInitialized
from llog.log.catalog import Catalog
from llog.log.engine import engine_of
from llog.log.log import Log
from llog.log.records import Cleanup
from llog.model import TopicPartition


async def retain_all(
    log: Log, appender: LogAppender, engine: str | None = None, *, only_owned: bool = False
) -> dict[TopicPartition, RetentionResult | LlogError]:
    """Applies each topic's own settings to all its partitions, of one engine if so wanted. A partition that fails does
    not keep the others.

    A topic that another process owns is left to that one: its error is `LogOwned`. With `only_owned`, topics that this
    process would become the owner of are left alone: upkeep in the background must not.
    """
    results: dict[TopicPartition, RetentionResult | LlogError] = {}
    left_alone = _not_taken_up(log) if only_owned else set()
    for topic in await Catalog(log).topics(engine):
        if (topic.retention_ms is None and topic.retention_bytes is None) or topic.engine in left_alone:
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
    """Closes the files of topics that were deleted, by whatever process."""
    for engine in log.engines.values():
        await engine.release_deleted()


async def clean_all(
    log: Log, *, topic: str | None = None, only_owned: bool = False
) -> dict[TopicPartition, CleanResult | LlogError]:
    """Key compaction of every topic whose cleanup is `compact`; all there is of `topic`, if one is named.

    A partition that fails does not keep the others. One that another process owns is left to that one: its error is
    `LogOwned`. `only_owned` is as in `retain_all`.
    """
    results: dict[TopicPartition, CleanResult | LlogError] = {}
    left_alone = _not_taken_up(log) if only_owned else set()
    for each in await Catalog(log).topics():
        if each.cleanup is not Cleanup.COMPACT or each.engine in left_alone or topic not in (None, each.name):
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


def _not_taken_up(log: Log) -> set[str]:
    """The engines whose topics upkeep would make this process own."""
    return {name for name, engine in log.engines.items() if not engine.is_taken_up}
