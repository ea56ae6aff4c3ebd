"""What the jobs share: work spread over executors, the results of steps, optional packages, and errors in one line."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from llog.config import Settings
from llog.errors import ConfigurationError, MissingExtra
from llog.log.opening import addresses

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

T = TypeVar("T")
R = TypeVar("R")

_TASKS_PER_CORE = 4
_LINE_MAX = 500
_FAILURES_MAX = 100
_OURS = re.compile(r"^(?:\w+\.)*llog\.errors\.\w+: (.+)$", re.MULTILINE)
_RAISED = re.compile(r"^(?:Caused by: |: )?[\w.$]+(?:Exception|Error): (.+)$", re.MULTILINE)


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a step of the pipeline."""

    name: str
    seconds: float
    rows: list[tuple[str, str]]
    """The names and values to print, in order."""
    failures: list[str] = []
    """What the step could not do, one line each; the rest is done."""


def first_failures(failures: Iterable[str]) -> tuple[str, ...]:
    """Return the first `_FAILURES_MAX` failures: thousands of partitions may fail for the same reason."""
    return tuple(islice(failures, _FAILURES_MAX))


def optional_module(name: str, extra: str, what: str) -> Any:
    """Import a module of an optional package; raise `MissingExtra`, which names the extra to install, without it."""
    try:
        return import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise MissingExtra(
            f'{what} needs the package {package}, which is not installed: pip install "leaderless-log[{extra}]"'
        ) from error


def check_reachable(settings: Settings) -> None:
    """Raise `ConfigurationError` for stores in this process's memory, which Spark's tasks cannot reach."""
    if addresses(settings)[0].scheme == "memory":
        raise ConfigurationError(
            f"LLOG_META is {settings.meta}, which only this process can see, but Spark's tasks run in other processes: "
            "use sqlite:///path"
        )


def run_tasks(spark: SparkSession, tasks: Sequence[T], run: Callable[[T], R]) -> list[R]:
    """Run each task as a Spark task and return the results.

    Tasks, results and `run`, a function of an importable module, are pickled.
    """
    if not tasks:
        return []
    result: list[R] = spark.sparkContext.parallelize(tasks, len(tasks)).map(run).collect()
    return result


def scatter(
    spark: SparkSession, tasks: Sequence[T], rows: Callable[[T], Iterator[pa.RecordBatch]], schema: str
) -> DataFrame:
    """Return a frame of the rows that the tasks yield, each in a Spark task of its own, without the driver."""

    def run_task(numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in numbers:
            for number in batch.column(0).to_pylist():
                yield from rows(tasks[number])

    # A range has exactly the requested partitions; Spark would regroup a list of rows.
    return spark.range(0, len(tasks), 1, max(1, len(tasks))).mapInArrow(run_task, schema)


def chunks(spark: SparkSession, items: Sequence[T], smallest: int = 1) -> list[list[T]]:
    """Return the items, in order, in a few chunks per core, each of at least `smallest` items."""
    wanted = spark.sparkContext.defaultParallelism * _TASKS_PER_CORE
    size = max(smallest, -(-len(items) // wanted))
    return [list(items[first : first + size]) for first in range(0, len(items), size)]


def in_one_line(error: BaseException) -> str:
    """Return the message of an error without the stack traces of Python and the JVM."""
    text = str(error)
    messages = _OURS.findall(text) or _RAISED.findall(text)
    line = " ".join((messages[-1] if messages else text.strip().partition("\n")[0]).split())
    return line[:_LINE_MAX] or type(error).__name__


def is_alive(spark: SparkSession) -> bool:
    """Whether the session can still be used: its JVM may have died, or its master may have dropped it."""
    context: Any = spark.sparkContext
    try:
        return context._jsc is not None and not context._jsc.sc().isStopped()
    except Exception:  # whatever the broken connection to the JVM raises
        return False
