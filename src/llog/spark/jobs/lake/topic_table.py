"""The steps from a topic to a table that all table formats share.

A table stores, beside its records, the position up to which it has them. A step plans the records after that position,
has tasks process them, and ends with one commit that is conditional on the position. After a crash at any point, the
position says where to continue; if two jobs work on one table, only one of them can commit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import msgspec

from llog import errors
from llog.config import Settings
from llog.errors import ConfigurationError, DataLoss, LlogError, WrongStore
from llog.log.catalog import Catalog
from llog.log.keys import LOG_ID
from llog.log.log import Log
from llog.log.pins import pin, release
from llog.model import FIRST_OFFSET, TopicPartition
from llog.spark.fetcher import PIN_LEASE_MS
from llog.spark.jobs.tasks import run_tasks
from llog.spark.limits import cut_by_bytes
from llog.spark.offsets import logger
from llog.spark.planner import ReadTask, plan_tasks, read_bounds
from llog.spark.process import run
from llog.spark.source_log import Range

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

R = TypeVar("R")

_OUR_ERROR = re.compile(r"^(?:\S+: )?llog\.errors\.(\w+): (.*)$", re.MULTILINE)


class Source(msgspec.Struct, frozen=True):
    """The topic that fills a table. A topic that was deleted and created again is another source."""

    log_id: str
    topic: str
    incarnation: int
    partitions: int


class TablePosition(msgspec.Struct, frozen=True):
    """The position of a table in its topic: the table has all records below these offsets."""

    log_id: str
    topic: str
    incarnation: int
    offsets: dict[int, int]
    """The next offset of each partition."""


class PlannedStep(NamedTuple):
    tasks: list[ReadTask]
    after: TablePosition
    """The table's position once the tasks' results are committed."""


class Parallel(Protocol):
    """Runs a function on every task and returns the results in the order of the tasks."""

    def __call__(self, work: Callable[[ReadTask], R], tasks: Sequence[ReadTask], /) -> list[R]: ...


def in_spark(spark: SparkSession) -> Parallel:
    """Return a function that runs each task as a Spark task, and raises the tasks' llog errors as themselves."""

    def run_all(work: Callable[[ReadTask], R], tasks: Sequence[ReadTask], /) -> list[R]:
        try:
            return run_tasks(spark, tasks, work)
        except Exception as error:
            raise _own_error(str(error)) or error from error

    return run_all


def in_process(work: Callable[[ReadTask], R], tasks: Sequence[ReadTask], /) -> list[R]:
    """Run all tasks one after the other in this process: for tables that are too small for Spark."""
    return [work(task) for task in tasks]


async def source_of(log: Log, topic: str) -> Source:
    found = await Catalog(log).get(topic)
    log_id = await log.meta.get(LOG_ID)
    assert log_id is not None
    return Source(log_id.value.decode(), topic, found.incarnation, found.partitions)


def check_source(where: str, position: TablePosition, source: Source) -> None:
    """Raise if the table belongs to another topic or another incarnation of it."""
    if (position.log_id, position.topic) != (source.log_id, source.topic):
        raise WrongStore(
            f"{where} is a table of topic {position.topic!r} of log {position.log_id}, "
            f"not of {source.topic!r} of log {source.log_id}: give this topic a table of its own"
        )
    if position.incarnation != source.incarnation:
        raise DataLoss(
            f"topic {source.topic!r} was deleted and created again since {where} was last written, and its offsets "
            "began anew: continue in a new table"
        )


async def target_of(log: Log, source: Source) -> dict[int, int]:
    """Return the present next offset of each partition, where a run ends."""
    bounds = await read_bounds(log, _partitions(source))
    return {tp.partition: each.next_offset for tp, each in bounds.items()}


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a commit and of a task, in stored bytes, and whether lost records are skipped."""

    commit_bytes_max: int
    task_bytes_max: int
    allow_gaps: bool = False


@contextmanager
def planned_step(
    settings: Settings, source: Source, before: TablePosition | None, target: dict[int, int], limits: Limits
) -> Iterator[PlannedStep]:
    """Plan the next records after `before`, and pin them while the caller works on them.

    A plan without tasks means that nothing is left below `target`. Records that retention removed before they were read
    raise `DataLoss`, or are logged and skipped.
    """
    pinned = run(settings, lambda log: pin(log, "pipeline lake", PIN_LEASE_MS))
    try:
        yield run(settings, lambda log: _plan(log, source, before, target, limits, pinned))
    finally:
        run(settings, lambda log: release(log, pinned))


async def _plan(
    log: Log, source: Source, before: TablePosition | None, target: dict[int, int], limits: Limits, pinned: str
) -> PlannedStep:
    topic = await Catalog(log).get(source.topic)
    if topic.incarnation != source.incarnation:
        raise DataLoss(
            f"topic {source.topic!r} was deleted and created again while it was read: continue in a new table"
        )
    bounds = await read_bounds(log, _partitions(source))
    starts, ends = {}, {}
    for tp, (log_start, next_offset) in bounds.items():
        # A partition that was added since was empty before. A first run has missed nothing and starts at the log start.
        start = log_start if before is None else before.offsets.get(tp.partition, FIRST_OFFSET)
        if start < log_start:
            _report_gap(f"records {start} to {log_start - 1} of {tp} are gone by retention", limits.allow_gaps)
            start = log_start
        if start > next_offset:
            raise DataLoss(
                f"the table has the records of {tp} up to {start - 1}, but the log ends at {next_offset - 1}: was its "
                "metadata restored from a backup? Records of the same offsets may differ now: continue in a new table"
            )
        starts[tp] = start
        ends[tp] = max(start, min(next_offset, target[tp.partition]))
    ends = await cut_by_bytes(log, starts, ends, limits.commit_bytes_max, fail_on_data_loss=not limits.allow_gaps)
    tasks = await plan_tasks(
        log,
        [Range(tp, starts[tp], ends[tp]) for tp in ends],
        {source.topic: topic},
        pin=pinned,
        task_bytes_max=limits.task_bytes_max,
        min_tasks=1,
        fail_on_data_loss=not limits.allow_gaps,
    )
    offsets = {tp.partition: end for tp, end in ends.items()}
    # A plan has at least one task, as Spark needs; a task without ranges has nothing to do here.
    tasks = [task for task in tasks if task.ranges]
    return PlannedStep(tasks, TablePosition(source.log_id, source.topic, source.incarnation, offsets))


def local_directory(target: str, what: str) -> Path:
    """Return the directory that `--to` names: all tasks write files there, so it must be a path they share."""
    scheme, separator, rest = target.partition("://")
    if separator and scheme != "file":
        raise ConfigurationError(
            f"{what} to {scheme}:// is not supported: give a directory (or file:///path) that the driver and all "
            "executors share"
        )
    path = Path(rest if separator else target)
    if separator and not path.is_absolute():
        raise ConfigurationError(f"{target!r} must be file:///absolute/path")
    return path.absolute()


def _partitions(source: Source) -> list[TopicPartition]:
    return [TopicPartition(source.topic, partition) for partition in range(source.partitions)]


def _report_gap(what: str, allowed: bool) -> None:
    if not allowed:
        raise DataLoss(f"{what} before they were read. Use --allow-gaps to continue without them")
    logger.warning("llog skipped: %s", what)


def _own_error(trace: str) -> LlogError | None:
    """Return the llog error that ended a task, restored from Spark's text of it; None if it was another error."""
    found = _OUR_ERROR.findall(trace)
    if not found:
        return None
    name, message = found[-1]
    kind = getattr(errors, name, None)
    if not isinstance(kind, type) or not issubclass(kind, LlogError) or kind.__init__ is not Exception.__init__:
        return LlogError(message)
    return partial(kind, message)()
