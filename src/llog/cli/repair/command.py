"""`llog repair`: repairs what an accident has left behind."""

from __future__ import annotations

import click

from llog.cli.repair.clock import clock
from llog.cli.repair.home import home
from llog.cli.repair.index import index


@click.group(short_help="Repair what an accident has left behind.")
def repair() -> None:
    """Repair what an accident has left behind.

    Each command shows what it would do. It changes something only with --apply.
    """


repair.add_command(index)
repair.add_command(clock)
repair.add_command(home)
