"""`llog serve`: a broker without the upkeep of object topics."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeVar

import click
import msgspec

from llog.base.logs import configure_logs
from llog.cli.common import Invocation, new_log_notice, report
from llog.config import Settings
from llog.errors import ConfigurationError

if TYPE_CHECKING:
    from llog.broker.app import Broker
    from llog.broker.server import Companion
    from llog.kafka.listener import KafkaPort

logger: Final = logging.getLogger("llog.broker")
F = TypeVar("F", bound=Callable[..., object])


def listen_options(command: F) -> F:
    """Add the options `--host`, `--port` and `--role`."""
    host = click.option("--host", help="The address to listen on (LLOG_BROKER_BIND_HOST).  [default: 127.0.0.1]")
    port = click.option(
        "--port", type=int, help="The port to listen on; 0 takes a free one (LLOG_BROKER_PORT).  [default: 8080]"
    )
    role = click.option(
        "--role",
        type=click.Choice(["both", "write", "read", "all"]),
        help="Which requests to answer: write appends and creates topics, read consumes, both (or all) does "
        "everything (LLOG_ROLE).  [default: both]",
    )
    return host(port(role(command)))


def listen_settings(
    invocation: Invocation, host: str | None, port: int | None, role: str | None, workers: int | None = None
) -> Settings:
    """Return the settings with these options, and send the log of this process where they say."""
    chosen = {
        "broker_bind_host": host,
        "broker_port": None if port is None else str(port),
        "role": role,
        "workers": None if workers is None else str(workers),
    }
    settings = msgspec.structs.replace(invocation, overrides=invocation.overrides | chosen).settings()
    configure_logs(settings.log_format, settings.log_level)
    return settings


def listening_line(settings: Settings, address: str) -> str:
    name = f" as {settings.client_identifier}" if settings.client_identifier else ""
    return f"listening on {address}{name}"


def log_kafka_address(kafka: KafkaPort | None) -> None:
    """Log where Kafka clients are served, before the line that says that the broker is ready."""
    if kafka is not None:
        logger.info("Kafka clients connect to %s", kafka.address)


def maintenance(settings: Settings) -> Companion:
    """Return the maintenance of what a broker owns, which runs beside it."""

    async def run(broker: Broker) -> None:
        from llog.base.concurrency import run_until
        from llog.broker.maintenance import Maintenance

        await run_until(broker.stopping, Maintenance(broker.log, settings, report).run_on_disk())

    return run


def warn_if_open(settings: Settings) -> None:
    from llog.broker.listeners import is_open_to_others

    if is_open_to_others(settings.broker_bind_host):
        logger.warning(
            "%s is reachable from other machines: anyone who reaches the port can read, write and delete everything",
            settings.broker_bind_host,
        )


@click.command(short_help="Serve the log over HTTP and to Kafka clients.")
@listen_options
@click.option(
    "--workers",
    type=click.IntRange(1, 64),
    help="The number of processes that serve the port together (LLOG_WORKERS).  [default: 1]",
)
@click.pass_obj
def serve(invocation: Invocation, host: str | None, port: int | None, role: str | None, workers: int | None) -> None:
    """Serve the log over HTTP, and to Kafka clients, until the process is interrupted or terminated.

    The broker serves appends, reads, topics, consumer groups and SQL. Before it ends, it finishes the requests that it
    has accepted; its exit code is 0. Any number of brokers may serve one log.

    The broker applies retention and key compaction to the disk and rocksdb topics that it owns. It does not compact,
    retain or collect object topics: `llog compactor` does so in a process of its own, `llog up` beside a broker, and
    `llog pipeline run` on Spark.

    Kafka clients connect to port 9092 (LLOG_KAFKA_PORT; 0 turns it off).

    Writing and reading can be split between processes (--role). With LLOG_TAIL_CACHE_DIR, readers on the same machine
    get recent records from there.

    With --workers, a supervisor starts this many processes on one port, and restarts one that dies. They share the
    recent records, and each answers with the metrics of all. Tables, keyed logs, and disk and rocksdb topics belong to
    one of them, to which the others send requests on.

    \b
      llog serve --port 8080
      curl -X POST http://127.0.0.1:8080/produce -H 'content-type: application/json' \\
        -d '{"topic_partitions": [{"topic": "orders", "partition": 0, "records": ["first"]}]}'
    """
    settings = listen_settings(invocation, host, port, role, workers)
    warn_if_open(settings)
    if settings.workers > 1:
        from llog.broker.workers import supervisor

        if settings.kafka_port:
            raise ConfigurationError(
                f"LLOG_KAFKA_PORT is {settings.kafka_port}, but Kafka clients are served by one process: leave it out, "
                "or start without --workers"
            )
        supervisor.run(
            settings,
            [sys.executable, "-m", "llog.cli.worker"],
            ready=lambda address: logger.info("%s", listening_line(settings, address)),
            report=report,
        )
        return
    from llog.broker.server import run
    from llog.kafka.listener import KafkaPort

    note_new_log = new_log_notice(settings, logger.info)
    kafka = KafkaPort.open(settings)

    def ready(address: str) -> None:
        note_new_log()
        log_kafka_address(kafka)
        logger.info("%s", listening_line(settings, address))

    beside = [maintenance(settings)]
    run(settings, ready=ready, beside=beside if kafka is None else [*beside, kafka.serve])
