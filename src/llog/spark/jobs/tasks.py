"""Independent work spread over executors, and what is left of an error after it has come back through the JVM."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from llog.config import Settings
from llog.errors import ConfigurationError
from llog.log.opening import addresses

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

T = TypeVar("T")
R = TypeVar("R")

_TASKS_PER_CORE = 4
_LINE_MAX = 500
_OURS = re.compile(r"^(?:\w+\.)*llog\.errors\.\w+: (.+)$", re.MULTILINE)
_RAISED = re.compile(r"^(?:Caused by: |: )?[\w.$]+(?:Exception|Error): (.+)$", re.MULTILINE)


def check_reachable(settings: Settings) -> None:
    """Refuses stores that live in this process, for the tasks run in others."""
    if addresses(settings)[0].scheme == "memory":
        raise ConfigurationError(
            f"LLOG_META is {settings.meta}, which other processes cannot see, and Spark's tasks run in others: use "
            "sqlite:///path"
        )


def run_tasks(spark: SparkSession, tasks: Sequence[T], run: Callable[[T], R]) -> list[R]:
    """The result of each task, one Spark task for each. Tasks, results and a `run` of an importable module are
    pickled.
    """
    if not tasks:
        return []
    result: list[R] = spark.sparkContext.parallelize(tasks, len(tasks)).map(run).collect()
    return result


def scattered(
    spark: SparkSession, tasks: Sequence[T], rows: Callable[[T], Iterator[pa.RecordBatch]], schema: str
) -> DataFrame:
    """The rows that the tasks make, each in a Spark task of its own: none passes through the driver."""

    def made(numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in numbers:
            for number in batch.column(0).to_pylist():
                yield from rows(tasks[number])

    # A range has the very partitions it was asked for; a list of rows is put together as Spark likes.
    return spark.range(0, len(tasks), 1, max(1, len(tasks))).mapInArrow(made, schema)


def chunks(spark: SparkSession, items: Sequence[T], smallest: int = 1) -> list[list[T]]:
    """The items, in order, in a few chunks per core of at least `smallest`."""
    wanted = spark.sparkContext.defaultParallelism * _TASKS_PER_CORE
    size = max(smallest, -(-len(items) // wanted))
    return [list(items[first : first + size]) for first in range(0, len(items), size)]


def in_one_line(error: BaseException) -> str:
    """What an error says, without the stack traces of the two languages it went through."""
    text = str(error)
    told = _OURS.findall(text) or _RAISED.findall(text)
    line = " ".join((told[-1] if told else text.strip().partition("\n")[0]).split())
    return line[:_LINE_MAX] or type(error).__name__


def is_alive(spark: SparkSession) -> bool:
    """Whether the session can still be used: not after its JVM died or its master gave it up."""
    context: Any = spark.sparkContext
    try:
        return context._jsc is not None and not context._jsc.sc().isStopped()
    except Exception:  # whatever the broken connection to the JVM raises
        return False
