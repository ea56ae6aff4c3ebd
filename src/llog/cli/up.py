"""`llog up`: a broker with everything that keeps its log in order, in one command."""

from __future__ import annotations

import os
import shutil
import sys
from importlib.util import find_spec
from shlex import quote
from typing import TYPE_CHECKING

import click
import msgspec

from llog.cli.common import DURATION, Invocation, note, noting_new_log
from llog.cli.serve import listen_options, listen_settings, listening_line, warn_if_open
from llog.config import Settings
from llog.errors import JavaNotFound, MissingExtra
from llog.units import format_duration_ms

if TYPE_CHECKING:
    from llog.partition.log import Log


@click.command(short_help="Start a broker and the upkeep of its log: everything in one command.")
@listen_options
@click.option(
    "--pipeline/--no-pipeline",
    default=None,
    help="Keep the log in order by `llog pipeline run`, on Spark, in a process of its own. Default: if Spark is installed.",
)
@click.option(
    "--interval",
    type=DURATION,
    help="From one compaction to the next (LLOG_COMPACTOR_IDLE_SLEEP_MS; default 30s).",
)
@click.pass_obj
def up(
    invocation: Invocation,
    host: str | None,
    port: int | None,
    role: str | None,
    pipeline: bool | None,
    interval: int | None,
) -> None:
    """Serve the log over HTTP and keep it in order: compact, retain and collect, until it is interrupted or terminated.

    Without Spark, the upkeep runs in the broker's own process. A pipeline that dies is started again; it ends with this command,
    however that ends.

    \b
      llog up
      llog --data-dir /var/llog up --no-pipeline --port 9000
    """
    from llog.broker.server import run

    settings = listen_settings(invocation, host, port, role)
    if interval is not None:
        settings = msgspec.structs.replace(
            settings, compactor_idle_sleep_ms=max(interval, 1), compactor_idle_jitter_ms=0
        )
    on_spark = _is_on_spark(pipeline)
    warn_if_open(settings)
    note_new_log = noting_new_log(settings)

    async def upkeep(log: Log) -> None:
        from llog.broker.maintenance import Maintenance

        if on_spark:
            await _pipeline(settings)
            note("llog: the pipeline cannot run as things are (see above): the upkeep goes on without Spark")
        await Maintenance(log, settings, _report).run()

    def ready(address: str) -> None:
        note_new_log()
        _tell(settings, address, on_spark)

    run(settings, ready=ready, beside=[upkeep])


def _is_on_spark(wanted: bool | None) -> bool:
    """Whether to run the pipeline; an error if it is wanted and cannot be had."""
    from llog.spark.java import java_home

    if wanted is False:
        return False
    try:
        if find_spec("pyspark") is None:
            raise MissingExtra('the pipeline needs Spark: pip install "leaderless-log[spark]"')
        java_home()
    except (JavaNotFound, MissingExtra) as error:
        if wanted:
            raise
        note(f"llog: upkeep without Spark: {error}")
        return False
    return True


async def _pipeline(settings: Settings) -> None:
    from llog.broker.child import supervise

    interval = settings.compactor_idle_sleep_ms
    command = [sys.executable, "-m", "llog.cli.main", "pipeline", "run", "--interval", f"{interval}ms"]
    others = {name: value for name, value in os.environ.items() if not name.startswith("LLOG_")}
    await supervise("the pipeline", command, others | settings.as_environment(), _report)


def _report(message: str) -> None:
    note(f"llog: {' '.join(message.split())}")


def _tell(settings: Settings, address: str, on_spark: bool) -> None:
    local = Settings(data_dir=settings.data_dir)
    if (local.meta, local.blobs) == (settings.meta, settings.blobs):
        where, options = f"in {settings.data_dir}", f"--data-dir {quote(settings.data_dir)}"
    else:
        where = f"in {settings.meta} and {settings.blobs}"
        options = f"--meta {quote(settings.meta)} --blobs {quote(settings.blobs)}"
    upkeep = "a Spark pipeline" if on_spark else "this process"
    body = '{"topic_partitions": [{"topic": "hello", "partition": 0, %s}]}'
    command = "llog" if shutil.which("llog") else f"{quote(sys.executable)} -m llog.cli.main"
    post = f"curl -X POST {address}/%s -H 'content-type: application/json' -d '{body}'"
    tries = [f"{command} {options} consume hello --follow"]
    if settings.role != "write":
        tries.insert(0, post % ("consume", '"fetch_offset": 1'))
    if settings.role != "read":
        tries.insert(0, post % ("produce", '"records": ["hello"]'))
    shown = "\n  ".join(tries)
    note(
        f"""llog: {listening_line(settings, address)}
  data    {where}
  upkeep  by {upkeep}, every {format_duration_ms(settings.compactor_idle_sleep_ms)}
try:
  {shown}
end it with Ctrl-C"""
    )
