"""`llog repair home`: lets another directory take the place of one that is lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from llog.cli.common import Invocation, note, with_log
from llog.errors import ConfigurationError

if TYPE_CHECKING:
    from llog.config import Settings
    from llog.log.log import Log


@click.command(short_help="Forget a directory that is lost, so that another one can take its place.")
@click.argument("what", type=click.Choice(["rocksdb", "keyed"]))
@click.option("--apply", is_flag=True, help="Do it; without this, nothing is changed.")
@click.pass_obj
def home(invocation: Invocation, what: str, apply: bool) -> None:
    """Forget which directory holds the RocksDB of the log, or the keyed log that LLOG_KEYED names.

    Only if that directory is lost, and cannot be brought back from a copy: all that was in it is then gone for this
    log. The next process that uses it decides where it is from then on. Refused while a process has it open.

    \b
      llog repair home rocksdb --apply
    """
    found = with_log(invocation, lambda log, settings: _forgotten(log, settings, what, apply))
    if found is None:
        click.echo("no directory is recorded: the next process that uses it decides")
        return
    click.echo(f"it is in the directory whose file ~id has the id {found}")
    note(
        "forgotten: the next process that uses it decides where it is"
        if apply
        else "nothing was changed: --apply does it"
    )


async def _forgotten(log: Log, settings: Settings, what: str, apply: bool) -> str | None:
    from llog.log.owners import keyed_of

    if what == "keyed":
        if settings.keyed is None:
            raise ConfigurationError("no keyed log is named: set LLOG_KEYED")
        what = keyed_of(settings.keyed)
    assert log.owners is not None
    found = await log.owners.home(what)
    if found is not None and apply:
        await log.owners.forget(what, "it")
    return found
