"""`llog pipeline`: upkeep of large logs on Spark, once or as a service.

Spark is imported when a command runs. A new command is one `pipeline.add_command` at the end.
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
_GRACE_HELP: Final = "Leave blobs younger than this alone, e.g. 1h (LLOG_COLLECT_GRACE_MS)."


@click.group(short_help="Upkeep of large logs on Spark.")
def pipeline() -> None:
    """Compact, retain and collect on Spark: the same work as `llog compact`, `retain` and `collect`, spread over
    executors; and tables and statistics of topics.

    Everything may run beside writers, readers, other pipelines and the commands without Spark.
    """


@pipeline.command(short_help="Do all steps, once or again and again.")
@click.option("--once", is_flag=True, help="Do one round and end.")
@click.option("--interval", type=DURATION, default="30s", show_default=True, help="From one round's begin to the next.")
@click.option(
    "--steps", metavar="NAMES", default="compact,retain,collect", show_default=True, help="Which steps, in which order."
)
@click.option(
    "--option",
    "given",
    metavar="STEP.NAME=VALUE",
    multiple=True,
    help="Option of a step, e.g. collect.grace=1h; repeatable.",
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
    """Keep a log in order: compact, retain, collect, and again after the interval, in one warm session.

    A step that fails is told in one line; the others and the next round go on. SIGTERM ends it within a step with exit
    code 0: what was under way is taken up by the next run. With --once, exit code 1 if anything failed.
    """
    names = [name.strip() for name in steps.split(",") if name.strip()]
    options, interval_ms = _step_options(given), None if once else interval
    if _until_terminated(lambda stopping: _serve(invocation, names, options, master, conf, interval_ms, stopping)):
        click.get_current_context().exit(1)


@pipeline.command(short_help="Join the small pieces of all partitions into few large blobs.")
@spark_options
@click.pass_obj
def compact(invocation: Invocation, master: str, conf: tuple[str, ...]) -> None:
    """Compact every partition that lags, until nothing is left that is worth it.

    Partitions that share blobs are compacted by one task, which reads each of them once. Exit code 1 if a partition
    failed or is damaged.
    """
    _once(invocation, "compact", {}, master, conf)


@pipeline.command(short_help="Drop records that their topics need not keep.")
@spark_options
@click.pass_obj
def retain(invocation: Invocation, master: str, conf: tuple[str, ...]) -> None:
    """Apply every topic's retention to its partitions. Exit code 1 if a partition failed."""
    _once(invocation, "retain", {}, master, conf)


@pipeline.command(short_help="Delete blobs that nothing names any more.")
@click.option("--grace", type=DURATION, help=_GRACE_HELP)
@spark_options
@click.pass_obj
def collect(invocation: Invocation, grace: int | None, master: str, conf: tuple[str, ...]) -> None:
    """Delete the blobs that no record lies in any more; listing, references and deletes are spread over executors.

    Snapshots in use (pins) keep their blobs until a later run: the service remembers which blobs wait for which pins.
    """
    _once(invocation, "collect", {"grace_ms": grace}, master, conf)


def _once(invocation: Invocation, step: str, options: Mapping[str, Any], master: str, conf: Sequence[str]) -> None:
    if _serve(invocation, [step], {step: options}, master, conf, None, threading.Event()):
        click.get_current_context().exit(1)


def _serve(
    invocation: Invocation,
    names: Sequence[str],
    options: Mapping[str, Mapping[str, Any]],
    master: str,
    conf: Sequence[str],
    interval_ms: int | None,
    stopping: threading.Event,
) -> bool:
    """Rounds until it is stopping, or one if there is no interval; whether anything failed in the last one."""
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
        with _display(spark, names) as show:
            for each in run_round(spark, settings, names, options, began=show):
                if stopping.is_set():
                    return False
                ended.append(each)
        _summarize(ended)
        failed = any(not isinstance(each, StepResult) or each.failures for each in ended)
        if interval_ms is None or stopping.wait(max(0.0, interval_ms / 1000 - (time.monotonic() - began))):
            return failed


def _summarize(ended: Sequence[StepResult | StepFailure]) -> None:
    from llog.spark.jobs.runner import StepResult

    rows, failures = [], []
    for each in ended:
        if isinstance(each, StepResult):
            told = ", ".join(f"{name} {value}" for name, value in each.rows)
            failures += [f"{each.name}: {failure}" for failure in each.failures]
        else:
            told = "failed"
            failures.append(f"{each.name}: {each.error}")
        rows.append([each.name, f"{each.seconds:.1f}", told])
    print_table(["STEP", "SECONDS", "RESULT"], rows, numbers=["SECONDS"])
    for failure in failures:
        note(f"llog: {' '.join(failure.split())}")


@contextmanager
def _display(spark: SparkSession, names: Sequence[str]) -> Iterator[Callable[[str], None]]:
    """Bars of the Spark tasks of each step, for a terminal; gives what is to be called when a step begins."""
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
    """Shows how many tasks of the running stages are done, as Spark tells."""
    tracker = spark.sparkContext.statusTracker()
    while not ended.wait(_POLL_SECONDS):
        try:
            stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
        except Exception:  # the session has ended, which the step itself will tell
            return
        running = [stage for stage in stages if stage is not None]
        if running:
            done, total = sum(each.numCompletedTasks for each in running), sum(each.numTasks for each in running)
            bar.update(bar.task_ids[-1], completed=done, total=total)


def _until_terminated(work: Callable[[threading.Event], bool]) -> bool:
    """The result of `work`; False if SIGTERM comes first, which sets the event and cancels Spark's jobs.

    It runs in a thread of its own: an exception that a signal raises in the midst of a call to the JVM leaves part of
    the answer in the connection, and the next call takes that for its own.
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
    """Ends what the worker waits for, and lets Spark's tasks end: a session that is stopped under them prints what
    breaks off.
    """
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
        note(f"llog: Spark had ended before ({type(error).__name__})")


def _step_options(given: Sequence[str]) -> dict[str, dict[str, Any]]:
    """By step. Durations are for `grace` only: what other steps take, they read themselves."""
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
                f"--option is {each!r}: of compact, retain and collect, there is collect.grace only"
            )
        else:
            chosen[option] = value
    return options


for command in (export, materialize, stats):
    pipeline.add_command(command)
