"""`llog pipeline`: jobs on Spark: upkeep once or as a service, tables and statistics.

Spark is imported when a command runs. A new command is added to the group at the end of this module.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final

import click

from llog.base.units import parse_duration_ms
from llog.cli.common import DURATION, Invocation, note, print_table, progress
from llog.cli.pipeline.lake import export, materialize
from llog.cli.pipeline.spark import open_session, require_spark, spark_options
from llog.cli.pipeline.stats import stats
from llog.errors import ConfigurationError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from rich.progress import Progress

    from llog.spark.jobs.runner import StepFailure, StepResult

_POLL_SECONDS: Final = 0.3
_STOP_SECONDS_MAX: Final = 10


@click.group(short_help="Run upkeep, tables and statistics on Spark.")
def pipeline() -> None:
    """Run upkeep, tables and statistics on Spark.

    `compact`, `retain` and `collect` do the same work as the commands of these names without Spark, spread over
    executors. Everything may run beside writers, readers, other pipelines and the commands without Spark.
    """


@pipeline.command(short_help="Run the upkeep steps, once or repeatedly.")
@click.option("--once", is_flag=True, help="Run one round and end.")
@click.option(
    "--interval",
    type=DURATION,
    default="30s",
    show_default=True,
    help="The time from the beginning of one round to the next.",
)
@click.option(
    "--steps",
    metavar="NAMES",
    default="compact,retain,collect",
    show_default=True,
    help="The steps, in their order: compact, retain, collect, export, materialize and stats.",
)
@click.option(
    "--option",
    "given",
    metavar="STEP.NAME=VALUE",
    multiple=True,
    help="An option of a step, e.g. collect.grace=1h; repeatable.",
)
@spark_options
@click.pass_obj
def run(
    invocation: Invocation,
    once: bool,
    interval: int,
    steps: str,
    given: tuple[str, ...],
    master: str,
    conf: tuple[str, ...],
) -> None:
    """Run the steps, and run them again after the interval, in one Spark session.

    A step that fails is reported in one line; the other steps and the next round go on. SIGTERM ends the command
    within a step, with exit code 0; the next run continues the unfinished work. With --once, exit code 1 if anything
    failed.

    \b
      llog pipeline run --interval 1m
      llog pipeline run --once --steps compact,collect --option collect.grace=2h
    """
    names = [name.strip() for name in steps.split(",") if name.strip()]
    options, interval_ms = _parse_step_options(given), None if once else interval
    if _run_until_sigterm(
        lambda stopping: _run_rounds(invocation, names, options, master, conf, interval_ms, stopping)
    ):
        click.get_current_context().exit(1)


@pipeline.command(short_help="Join small ranges of records into few large blobs.")
@spark_options
@click.pass_obj
def compact(invocation: Invocation, master: str, conf: tuple[str, ...]) -> None:
    """Compact every partition that lags, until no compaction is worthwhile any more.

    One task compacts the partitions that share blobs, and reads each blob once. Exit code 1 if a partition failed or is
    damaged.
    """
    _run_step(invocation, "compact", {}, master, conf)


@pipeline.command(short_help="Remove records beyond the retention of their topics.")
@spark_options
@click.pass_obj
def retain(invocation: Invocation, master: str, conf: tuple[str, ...]) -> None:
    """Remove the records that are beyond the time or size limit of their topic. Exit code 1 if a partition failed."""
    _run_step(invocation, "retain", {}, master, conf)


@pipeline.command(short_help="Delete unreferenced blobs.")
@click.option(
    "--grace",
    type=DURATION,
    help="How old a blob must be to be deleted, e.g. 1h; longer than any append or compaction takes "
    "(LLOG_COLLECT_GRACE_MS).  [default: 1h]",
)
@spark_options
@click.pass_obj
def collect(invocation: Invocation, grace: int | None, master: str, conf: tuple[str, ...]) -> None:
    """Delete the blobs that nothing refers to; executors share the listing, the search for references and the deletes.

    Pins keep the blobs of snapshots in use until a later run: `llog pipeline run` remembers which blobs wait for which
    pins.
    """
    _run_step(invocation, "collect", {"grace_ms": grace}, master, conf)


def _run_step(invocation: Invocation, step: str, options: Mapping[str, Any], master: str, conf: Sequence[str]) -> None:
    if _run_rounds(invocation, [step], {step: options}, master, conf, None, threading.Event()):
        click.get_current_context().exit(1)


def _run_rounds(
    invocation: Invocation,
    names: Sequence[str],
    options: Mapping[str, Mapping[str, Any]],
    master: str,
    conf: Sequence[str],
    interval_ms: int | None,
    stopping: threading.Event,
) -> bool:
    """Run rounds until `stopping` is set, or one round without an interval; return whether the last one failed."""
    require_spark()
    from llog.log.opening import require_log
    from llog.spark.jobs.runner import StepResult, check_steps, run_round
    from llog.spark.jobs.tasks import check_reachable

    settings = invocation.settings()
    check_steps([*names, *options])
    check_reachable(settings)
    with progress("starting Spark"):
        spark = open_session(f"llog pipeline {' '.join(names)}", master, conf, settings)
    while True:
        require_log(settings)
        began = time.monotonic()
        ended: list[StepResult | StepFailure] = []
        with _progress_bars(spark, names) as step_began:
            for each in run_round(spark, settings, names, options, began=step_began):
                if stopping.is_set():
                    return False
                ended.append(each)
        _print_summary(ended)
        failed = any(not isinstance(each, StepResult) or each.failures for each in ended)
        if interval_ms is None or stopping.wait(max(0.0, interval_ms / 1000 - (time.monotonic() - began))):
            return failed


def _print_summary(ended: Sequence[StepResult | StepFailure]) -> None:
    from llog.spark.jobs.runner import StepResult

    rows, failures = [], []
    for each in ended:
        if isinstance(each, StepResult):
            result = ", ".join(f"{name} {value}" for name, value in each.rows)
            failures += [f"{each.name}: {failure}" for failure in each.failures]
        else:
            result = "failed"
            failures.append(f"{each.name}: {each.error}")
        rows.append([each.name, f"{each.seconds:.1f}", result])
    print_table(["STEP", "SECONDS", "RESULT"], rows, numbers=["SECONDS"])
    for failure in failures:
        note(f"llog: {' '.join(failure.split())}")


@contextmanager
def _progress_bars(spark: SparkSession, names: Sequence[str]) -> Iterator[Callable[[str], None]]:
    """Show a bar of the Spark tasks of each step on a terminal; yield the function to call when a step begins."""
    bar = progress(names[0] if names else "nothing", total=0)
    if bar.disable:
        yield lambda name: None
        return
    ended = threading.Event()
    poller = threading.Thread(target=_poll, args=(spark, bar, ended), name="llog-progress", daemon=True)

    def began(name: str) -> None:
        bar.reset(bar.task_ids[-1], description=f"{name} ({names.index(name) + 1} of {len(names)})", total=None)

    with bar:
        poller.start()
        try:
            yield began
        finally:
            ended.set()
            poller.join()


def _poll(spark: SparkSession, bar: Progress, ended: threading.Event) -> None:
    """Update the bar with the tasks that are done in Spark's running stages, until `ended` is set."""
    tracker = spark.sparkContext.statusTracker()
    while not ended.wait(_POLL_SECONDS):
        try:
            stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
        except Exception:  # the session has ended, which the step itself will report
            return
        running = [stage for stage in stages if stage is not None]
        if running:
            done, total = sum(each.numCompletedTasks for each in running), sum(each.numTasks for each in running)
            bar.update(bar.task_ids[-1], completed=done, total=total)


def _run_until_sigterm(work: Callable[[threading.Event], bool]) -> bool:
    """Return the result of `work`, or False if SIGTERM comes first, which sets the event and cancels Spark's jobs.

    `work` runs in a thread of its own: an exception that a signal raises in the midst of a call to the JVM would leave
    part of the answer in the connection, where the next call would take it for its own.
    """
    ends: SimpleQueue[Future[bool] | None] = SimpleQueue()
    future, stopping = Future[bool](), threading.Event()

    def run_work() -> None:
        try:
            future.set_result(work(stopping))
        except BaseException as error:
            future.set_exception(error)
        ends.put(future)

    before = signal.signal(signal.SIGTERM, lambda number, frame: ends.put(None))
    worker = threading.Thread(target=run_work, name="llog-pipeline", daemon=True)
    try:
        worker.start()
        ended = ends.get()
        if ended is not None:
            return ended.result()
        note("llog: terminated")
        return False
    finally:
        if not future.done():
            stopping.set()
            _cancel_jobs(worker)
        signal.signal(signal.SIGTERM, before)


def _cancel_jobs(worker: threading.Thread) -> None:
    """Cancel Spark's jobs and wait for their tasks: a session that is stopped under running tasks prints errors."""
    from pyspark import SparkContext

    context: Any = SparkContext._active_spark_context
    deadline = time.monotonic() + _STOP_SECONDS_MAX
    try:
        while context is not None and time.monotonic() < deadline:
            context.cancelAllJobs()
            worker.join(_POLL_SECONDS)
            executors = context._jsc.sc().statusTracker().getExecutorInfos()
            if not worker.is_alive() and not any(executor.numRunningTasks() for executor in executors):
                return
    except Exception as error:  # the same signal may have ended the JVM
        note(f"llog: Spark had already ended ({type(error).__name__})")


def _parse_step_options(given: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the options by step. Only `collect.grace` is parsed here; steps with other options parse them."""
    options: dict[str, dict[str, Any]] = {}
    for each in given:
        name, separator, value = each.partition("=")
        step, dot, option = name.partition(".")
        if not separator or not dot or not option:
            raise ConfigurationError(f"--option is {each!r}: write it like collect.grace=1h")
        chosen = options.setdefault(step, {})
        if (step, option) == ("collect", "grace"):
            chosen["grace_ms"] = parse_duration_ms(value)
        elif step in ("compact", "retain", "collect"):
            raise ConfigurationError(
                f"--option is {each!r}: collect.grace is the only option of compact, retain and collect"
            )
        else:
            chosen[option] = value
    return options


for command in (export, materialize, stats):
    pipeline.add_command(command)
