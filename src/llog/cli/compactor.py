"""`llog compactor`: the service that keeps the object topics of a log in order."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

import click
import msgspec

from llog.base.logs import configure_logs
from llog.base.units import format_size
from llog.cli.common import Invocation, json_option, print_json, report
from llog.config import Settings

if TYPE_CHECKING:
    from llog.compactor.metrics import CompactorMetrics

logger: Final = logging.getLogger("llog.compactor")


@click.command(short_help="Keep the log compact as a service of its own.")
@click.option(
    "--host", help="The address to listen on, for health and metrics (LLOG_COMPACTOR_BIND_HOST).  [default: 127.0.0.1]"
)
@click.option(
    "--port", type=int, help="The port to listen on; 0 takes a free one (LLOG_COMPACTOR_PORT).  [default: 8081]"
)
@click.option(
    "--workers",
    type=int,
    help="How many workers compact at once, each up to 64 partitions (LLOG_COMPACTOR_WORKERS).  [default: 4]",
)
@click.option(
    "--once", is_flag=True, help="Compact, retain and collect once, then exit; for cron. Nothing listens meanwhile."
)
@json_option
@click.pass_obj
def compactor(
    invocation: Invocation, host: str | None, port: int | None, workers: int | None, once: bool, as_json: bool
) -> None:
    """Compact, retain and collect the object topics of a log until the process is interrupted or terminated.

    The service discovers all partitions by itself. Any number of them may work on one log, on any machines: each leaves
    a partition alone while another one has claimed it, and one of them retains and collects for all. If one is killed,
    another finishes what it began. It needs neither a broker nor Spark.

    It answers /health, /ready, /metrics and /metrics/prometheus. On SIGTERM or SIGINT it finishes the compactions that
    have begun, gives its claims back and exits with 0; a second signal does not wait for them.

    With --once, the exit code is 1 if something failed or is damaged. --json prints what was done as JSON.

    \b
      llog compactor
      llog --meta postgresql://llog@db/llog --blobs s3://bucket/llog compactor --port 9101
      llog compactor --once
    """
    chosen = {
        "compactor_bind_host": host,
        "compactor_port": None if port is None else str(port),
        "compactor_workers": None if workers is None else str(workers),
    }
    settings = msgspec.structs.replace(invocation, overrides=invocation.overrides | chosen).settings()
    configure_logs(settings.log_format, settings.log_level)
    if as_json and not once:
        raise click.UsageError("--json needs --once: a service reports through /metrics")
    if once:
        failures, metrics = _run_once(settings)
        summary = _summary(metrics)
        if as_json:
            print_json(summary)
        else:
            click.echo(
                f"compacted {summary['runs']} runs ({summary['records']} records, "
                f"{format_size(summary['bytes_written'])}); trimmed {summary['trimmed_records']} records; "
                f"deleted {summary['deleted_blobs']} blobs ({format_size(summary['deleted_bytes'])})"
            )
        if failures:
            click.get_current_context().exit(1)
        return
    from llog.broker.listeners import is_open_to_others
    from llog.compactor.server import run

    if is_open_to_others(settings.compactor_bind_host):
        logger.warning("%s is reachable from other machines: they can read the metrics", settings.compactor_bind_host)
    name = settings.compactor_id or settings.client_name
    run(settings, ready=lambda address: logger.info("compactor %s listening on %s", name, address), report=report)


def _run_once(settings: Settings) -> tuple[int, CompactorMetrics]:
    from llog.compactor.service import CompactorService, service_options
    from llog.log.opening import opened_log, require_log

    async def run() -> tuple[int, CompactorMetrics]:
        require_log(settings)
        async with opened_log(settings) as log:
            options = msgspec.structs.replace(service_options(settings), linger_ms=0)
            service = CompactorService(log, settings, report, options)
            await service.run_once()
            return service.failures, service.metrics

    return asyncio.run(run())


def _summary(metrics: CompactorMetrics) -> dict[str, int]:
    return {
        "runs": metrics.runs["compacted"],
        "records": int(metrics.run_records.sum),
        "bytes_read": int(metrics.run_read_bytes.sum),
        "bytes_written": int(metrics.run_written_bytes.sum),
        "claimed_elsewhere": metrics.runs["claimed"],
        "failed": metrics.runs["failed"],
        "damaged": metrics.damaged,
        "trimmed_records": metrics.trimmed_records,
        "deleted_blobs": metrics.deleted_blobs,
        "deleted_bytes": metrics.deleted_bytes,
    }
