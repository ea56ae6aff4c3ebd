"""The steps of the pipeline by name, and the round that runs them one after the other in one session.

A new step is one line in `STEPS`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from llog.config import Settings
from llog.errors import ConfigurationError, SparkFailed
from llog.spark.jobs.collect import collect
from llog.spark.jobs.compact import compact
from llog.spark.jobs.lake.steps import export_step, materialize_step
from llog.spark.jobs.retain import retain
from llog.spark.jobs.stats.stats import stats
from llog.spark.jobs.tasks import StepResult, in_one_line, is_alive

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["DEFAULT_STEPS", "STEPS", "Step", "StepFailure", "StepResult", "check_steps", "run_round"]

Step = Callable[["SparkSession", Settings, Mapping[str, Any]], StepResult]

STEPS: Final[dict[str, Step]] = {
    "compact": compact,
    "retain": retain,
    "collect": collect,
    "export": export_step,
    "materialize": materialize_step,
    "stats": stats,
}
DEFAULT_STEPS: Final = ("compact", "retain", "collect")


class StepFailure(msgspec.Struct, frozen=True, kw_only=True):
    """A step that raised an error; what it did before stays done."""

    name: str
    seconds: float
    error: str
    """The error in one line."""


def check_steps(names: Sequence[str]) -> None:
    for name in names:
        if name not in STEPS:
            raise ConfigurationError(f"there is no step {name!r} in the pipeline: there are {', '.join(STEPS)}")


def run_round(
    spark: SparkSession,
    settings: Settings,
    names: Sequence[str],
    options: Mapping[str, Mapping[str, Any]],
    *,
    began: Callable[[str], None] = lambda name: None,
) -> Iterator[StepResult | StepFailure]:
    """Run the steps and yield each one's result as it ends. A step that fails does not stop the others.

    Raises `SparkFailed` if the session has ended.
    """
    for name in names:
        began(name)
        started = time.monotonic()
        try:
            yield STEPS[name](spark, settings, options.get(name, {}))
        except Exception as error:
            if not is_alive(spark):
                raise SparkFailed(f"the Spark session ended during {name}: {in_one_line(error)}") from error
            yield StepFailure(name=name, seconds=time.monotonic() - started, error=in_one_line(error))
