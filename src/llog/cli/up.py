"""`llog up`: a broker with the upkeep of its log, in one command."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Final

import click
import msgspec

from llog.base.units import format_duration_ms
from llog.cli.common import DURATION, Invocation, new_log_notice, note, report
from llog.cli.pipeline.spark import SPARK_INSTALLATION, require_spark
from llog.cli.serve import listen_options, listen_settings, listening_line, log_kafka_address, logger, warn_if_open
from llog.config import Settings
from llog.errors import ConfigurationError

if TYPE_CHECKING:
    from llog.broker.app import Broker
    from llog.kafka.listener import KafkaPort


_SQL_INSTALLATION: Final = 'pip install "leaderless-log[sql]"'


@click.command(short_help="Serve the log over HTTP and keep it in order.")
@listen_options
@click.option(
    "--pipeline/--no-pipeline",
    default=False,
    help="Run the upkeep on Spark, as `llog pipeline run` in a process of its own. Without it, no JVM is started.",
)
@click.option(
    "--interval",
    type=DURATION,
    help="The time from one compaction to the next (LLOG_COMPACTOR_IDLE_SLEEP_MS).  [default: 30s]",
)
@click.pass_obj
def up(
    invocation: Invocation,
    host: str | None,
    port: int | None,
    role: str | None,
    pipeline: bool,
    interval: int | None,
) -> None:
    """Serve the log over HTTP and keep it in order until the process is interrupted or terminated.

    This is a broker and a compactor in one process: the compactor compacts, retains and collects, as `llog compactor`
    does in a process of its own. With --pipeline, Spark does so instead: a pipeline that dies is started again, and it
    ends when this command ends.

    \b
      llog up
      llog --data-dir /var/llog up --pipeline --port 9000
    """
    from llog.broker.server import run
    from llog.kafka.listener import KafkaPort

    if pipeline:
        _require_pipeline()
    settings = listen_settings(invocation, host, port, role)
    if interval is not None:
        settings = msgspec.structs.replace(
            settings,
            compactor_idle_sleep_ms=max(interval, 1),
            compactor_idle_jitter_ms=0,
            compactor_discovery_interval_ms=max(interval, 100),
            compactor_linger_ms=min(interval, settings.compactor_linger_ms),
        )
    if settings.workers > 1:
        raise ConfigurationError(
            f"LLOG_WORKERS is {settings.workers}, and `llog up` serves in one process: run `llog serve --workers "
            f"{settings.workers}` and, beside it, `llog compactor`"
        )
    warn_if_open(settings)
    note_new_log = new_log_notice(settings, logger.info)
    kafka = KafkaPort.open(settings)

    async def upkeep(broker: Broker) -> None:
        from llog.base.concurrency import run_until
        from llog.compactor.metrics import compactor_samples
        from llog.compactor.service import CompactorService

        if pipeline:
            await run_until(broker.stopping, _supervise_pipeline(settings))
            if broker.stopping.is_set():
                return
            logger.warning("the pipeline cannot run (see above): the upkeep continues without Spark")
        service = CompactorService(broker.log, settings, report, is_owner=True)
        broker.report.add(lambda: compactor_samples(service.metrics))
        await service.run(broker.stopping)

    def ready(address: str) -> None:
        note_new_log()
        if settings.log_format == "json":
            log_kafka_address(kafka)
            logger.info("%s", listening_line(settings, address))
        else:
            note(_introduction(settings, address, kafka, on_spark=pipeline))

    run(settings, ready=ready, beside=[upkeep] if kafka is None else [upkeep, kafka.serve])


def _require_pipeline() -> None:
    """Raise `MissingExtra` or `JavaNotFound` if the pipeline cannot run here."""
    from llog.spark.java import java_home

    require_spark()
    java_home()


async def _supervise_pipeline(settings: Settings) -> None:
    """Run the pipeline in a process of its own, restarting it when it dies; return if it cannot run at all."""
    from llog.broker.child import supervise

    interval = settings.compactor_idle_sleep_ms
    command = [sys.executable, "-m", "llog.cli.main", "pipeline", "run", "--interval", f"{interval}ms"]
    others = {name: value for name, value in os.environ.items() if not name.startswith("LLOG_")}
    await supervise("the pipeline", command, others | settings.as_environment(), report)


def _introduction(settings: Settings, address: str, kafka: KafkaPort | None, *, on_spark: bool) -> str:
    """Return what a newcomer needs: an address to open, and for each kind of user a command that works as printed."""
    local = Settings(data_dir=settings.data_dir)
    is_local = (local.meta, local.blobs) == (settings.meta, settings.blobs)
    data = settings.data_dir if is_local else f"{settings.meta} and {settings.blobs}"
    upkeep = "a Spark pipeline" if on_spark else "a compactor in this process"
    return "\n".join(
        [
            f"llog: {listening_line(settings, address)}",
            f"  open    {address}/topics",
            *([] if kafka is None else [f"  kafka   bootstrap.servers={kafka.address}"]),
            f"  data    in {data}",
            f"  upkeep  by {upkeep}, every {format_duration_ms(settings.compactor_idle_sleep_ms)}",
            "try, in another terminal:",
            *(f"  {user}:\n    {command}" for user, command in _commands(settings, address)),
            "end it with Ctrl-C",
        ]
    )


def _commands(settings: Settings, address: str) -> Iterator[tuple[str, str]]:
    """Yield the kinds of users that this broker's role serves, each with a command that works on its own."""
    python = quote(sys.executable)
    if settings.role == "read" or settings.auto_create == "off":
        yield "curl", f"curl {quote(f'{address}/topics')}"
    else:
        body = '{"topic_partitions": [{"topic": "hello", "partition": 0, "records": ["from curl"]}]}'
        url = quote(f"{address}/produce")
        yield "curl", f"curl -X POST {url} -H 'content-type: application/json' -d '{body}'"
    if settings.role == "both":
        program = (
            f'import llog; log = llog.connect("{address}"); log.execute("CREATE TOPIC IF NOT EXISTS hello"); '
            'log.execute("INSERT INTO TOPIC hello (payload) VALUES (?)", ["from Python"]); '
            'print(log.execute("SELECT offset, payload FROM TOPIC hello").fetchall())'
        )
        yield _heading("Python", "rocksdict", _SQL_INSTALLATION), f"{python} -c {quote(program)}"
        statements = (
            "CREATE TOPIC IF NOT EXISTS hello",
            "INSERT INTO TOPIC hello (payload) VALUES ('from SQL')",
            "SELECT * FROM TOPIC hello",
        )
        options = " ".join(f'-c "{statement}"' for statement in statements)
        yield _heading("SQL", "rocksdict", _SQL_INSTALLATION), f"{_llog()} sql --url {quote(address)} {options}"
    if settings.role != "write":
        program = (
            'from llog.spark.session import spark_session; spark_session("hello").read.format("llog")'
            f'.option("broker", "{address}").option("subscribePattern", "hello").load()'
            '.selectExpr("topic", "partition", "offset", "cast(value as string)").show()'
        )
        yield _heading("Spark", "pyspark", SPARK_INSTALLATION), f"{python} -c {quote(program)}"


def _heading(user: str, module: str, installation: str) -> str:
    """Return the kind of user, with the installation that must come first if the module is missing."""
    return user if find_spec(module) is not None else f"{user} (first {installation})"


def _llog() -> str:
    """Return how a shell runs this installation of `llog`."""
    script = Path(sys.executable).with_name("llog")
    if not script.exists():
        return f"{quote(sys.executable)} -m llog.cli.main"
    return "llog" if shutil.which("llog") == str(script) else quote(str(script))
