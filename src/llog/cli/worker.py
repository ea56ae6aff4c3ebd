"""One worker of `llog serve --workers`, which the supervisor starts: `python -m llog.cli.worker PLAN`."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import click
import msgspec

from llog.base.logs import configure_logs
from llog.broker.workers.plan import WorkerPlan
from llog.cli.common import new_log_notice
from llog.cli.serve import logger, maintenance
from llog.config import Settings
from llog.config.loading import load_settings
from llog.errors import LlogError


def run(plan: WorkerPlan, settings: Settings) -> None:
    """Serve as the worker of this plan until SIGTERM."""
    from llog.broker.server import run_loop, serve_broker

    note_new_log = new_log_notice(settings, logger.info) if plan.number == 0 else None

    def ready(_: str) -> None:
        if note_new_log is not None:
            note_new_log()
        os.write(plan.ready_pipe, f"{plan.number}\n".encode())
        os.close(plan.ready_pipe)

    listeners = [socket.socket(fileno=each) for each in (plan.listener, plan.own_listener)]
    run_loop(serve_broker(settings, listeners, ready, [maintenance(settings)], plan))


def main(path: str) -> int:
    """Return the exit code."""
    plan = WorkerPlan.read(Path(path))
    for each in (plan.listener, plan.own_listener, plan.ready_pipe):
        os.set_inheritable(each, False)
    try:
        settings = load_settings()
        configure_logs(settings.log_format, settings.log_level)
        if plan.number:  # what concerns the log as a whole is measured by one of them
            settings = msgspec.structs.replace(settings, footprint_interval_ms=0, group_lag_interval_ms=0)
        run(plan, settings)
    except LlogError as error:
        click.echo(f"llog: worker {plan.number}: {' '.join(str(error).split())}", err=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
