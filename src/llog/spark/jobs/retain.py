"""Retention by the topics' own settings, the partitions spread over executors."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from llog.base.units import format_size
from llog.config import Settings
from llog.engines.object import retention
from llog.engines.port import RetentionResult
from llog.errors import LlogError, PartitionNotInitialized, TopicNotFound
from llog.log.catalog import OBJECT, Catalog
from llog.log.log import Log
from llog.model import TopicPartition
from llog.spark.jobs.results import StepResult, some
from llog.spark.jobs.tasks import check_reachable, chunks, run_tasks
from llog.spark.process import run

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_CONCURRENCY = 8
_PARTITIONS_PER_TASK_MIN = 16


class Limit(NamedTuple):
    """What one partition may keep."""

    tp: TopicPartition
    retention_ms: int | None
    retention_bytes: int | None


class Retained(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over partitions, of which `trimmed` have a new log start."""

    partitions: int = 0
    trimmed: int = 0
    records: int = 0
    bytes: int = 0
    failures: tuple[str, ...] = ()


def retain(spark: SparkSession, settings: Settings, options: Mapping[str, Any]) -> StepResult:
    """The step `retain`. A partition that fails is told and stops no other."""
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


def retain_topics(spark: SparkSession, settings: Settings) -> Retained:
    """Raises the log start of every partition whose topic has a limit."""
    check_reachable(settings)
    limits = run(settings, _limits)
    done = run_tasks(spark, chunks(spark, limits, _PARTITIONS_PER_TASK_MIN), partial(_retain, settings))
    return Retained(
        partitions=sum(each.partitions for each in done),
        trimmed=sum(each.trimmed for each in done),
        records=sum(each.records for each in done),
        bytes=sum(each.bytes for each in done),
        failures=some(failure for each in done for failure in each.failures),
    )


async def _limits(log: Log) -> list[Limit]:
    return [
        Limit(TopicPartition(topic.name, partition), topic.retention_ms, topic.retention_bytes)
        for topic in await Catalog(log).topics(OBJECT)
        if topic.retention_ms is not None or topic.retention_bytes is not None
        for partition in range(topic.partitions)
    ]


def _retain(settings: Settings, limits: list[Limit]) -> Retained:
    """One task's partitions, on an executor."""

    async def work(log: Log) -> Retained:
        gate = asyncio.Semaphore(_CONCURRENCY)

        async def one(limit: Limit) -> RetentionResult | str | None:
            async with gate:
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

        done = await asyncio.gather(*map(one, limits))
        trimmed = [each for each in done if isinstance(each, RetentionResult) and each.records]
        return Retained(
            partitions=len(limits),
            trimmed=len(trimmed),
            records=sum(each.records for each in trimmed),
            bytes=sum(each.bytes for each in trimmed),
            failures=some(each for each in done if isinstance(each, str)),
        )

    return run(settings, work)
