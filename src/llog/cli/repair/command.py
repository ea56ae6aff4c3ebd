"""`llog repair`: puts right what an accident has left behind. Each command shows what it would do, and does it with
`--apply`.
"""

from __future__ import annotations

import click

from llog.cli.repair.clock import clock
from llog.cli.repair.home import home
from llog.cli.repair.index import index


@click.group(short_help="Put right what an accident has left behind.")
def repair() -> None:
    """Put right what an accident has left behind.

    Each command shows what it would do and changes nothing, unless it is told to with --apply.
    """


repair.add_command(index)
repair.add_command(clock)
repair.add_command(home)
