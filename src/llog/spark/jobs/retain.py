"""Applies the retention of every topic, with the partitions spread over executors."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from llog.base.concurrency import gather_bounded
from llog.base.units import format_size
from llog.config import Settings
from llog.engines.object import retention
from llog.errors import LlogError, PartitionNotInitialized, TopicNotFound
from llog.log.catalog import OBJECT, Catalog
from llog.log.engine import RetentionResult
from llog.log.log import Log
from llog.model import TopicPartition
from llog.spark.jobs.tasks import StepResult, check_reachable, chunks, first_failures, run_tasks
from llog.spark.process import run

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_CONCURRENCY = 8
_PARTITIONS_PER_TASK_MIN = 16


class Limit(NamedTuple):
    """The retention limits of one partition."""

    tp: TopicPartition
    retention_ms: int | None
    retention_bytes: int | None


class RetainTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over partitions, of which `trimmed` have a new log start."""

    partitions: int = 0
    trimmed: int = 0
    records: int = 0
    bytes: int = 0
    failures: tuple[str, ...] = ()


def retain(spark: SparkSession, settings: Settings, options: Mapping[str, Any]) -> StepResult:
    """Run the step `retain`. A partition that fails is reported and stops no other."""
    started = time.monotonic()
    result = retain_topics(spark, settings)
    return StepResult(
        name="retain",
        seconds=time.monotonic() - started,
        rows=[
            ("partitions with limits", f"{result.partitions:,}"),
            ("trimmed", f"{result.trimmed:,}"),
            ("records dropped", f"{result.records:,}"),
            ("bytes dropped", format_size(result.bytes)),
        ],
        failures=list(result.failures),
    )


def retain_topics(spark: SparkSession, settings: Settings) -> RetainTotals:
    """Raise the log start of every partition that is beyond the limits of its topic."""
    check_reachable(settings)
    limits = run(settings, _limits)
    done = run_tasks(spark, chunks(spark, limits, _PARTITIONS_PER_TASK_MIN), partial(_retain, settings))
    return RetainTotals(
        partitions=sum(each.partitions for each in done),
        trimmed=sum(each.trimmed for each in done),
        records=sum(each.records for each in done),
        bytes=sum(each.bytes for each in done),
        failures=first_failures(failure for each in done for failure in each.failures),
    )


async def _limits(log: Log) -> list[Limit]:
    return [
        Limit(TopicPartition(topic.name, partition), topic.retention_ms, topic.retention_bytes)
        for topic in await Catalog(log).topics(OBJECT)
        if topic.retention_ms is not None or topic.retention_bytes is not None
        for partition in range(topic.partitions)
    ]


def _retain(settings: Settings, limits: list[Limit]) -> RetainTotals:
    """Apply the limits to the partitions of one task, on an executor."""

    async def work(log: Log) -> RetainTotals:
        async def retain(limit: Limit) -> RetentionResult | str | None:
            try:
                return await retention.retain(
                    log,
                    limit.tp,
                    retention_ms=limit.retention_ms,
                    retention_bytes=limit.retention_bytes,
                    now_ms=log.runtime.now_ms(),
                )
            except (TopicNotFound, PartitionNotInitialized):
                return None  # deleted meanwhile
            except LlogError as error:
                return f"{limit.tp}: {error}"

        done = await gather_bounded(retain, limits, _CONCURRENCY)
        trimmed = [each for each in done if isinstance(each, RetentionResult) and each.records]
        return RetainTotals(
            partitions=len(limits),
            trimmed=len(trimmed),
            records=sum(each.records for each in trimmed),
            bytes=sum(each.bytes for each in trimmed),
            failures=first_failures(each for each in done if isinstance(each, str)),
        )

    return run(settings, work)
