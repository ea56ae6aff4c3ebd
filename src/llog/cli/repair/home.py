"""`llog repair home`: lets another directory take the place of a lost one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from llog.cli.common import Invocation, note, with_log
from llog.errors import ConfigurationError

if TYPE_CHECKING:
    from llog.config import Settings
    from llog.log.log import Log


@click.command(short_help="Forget a lost directory, so that another one can take its place.")
@click.argument("what", type=click.Choice(["rocksdb", "keyed"]))
@click.option("--apply", is_flag=True, help="Forget the directory; without it, nothing is changed.")
@click.pass_obj
def home(invocation: Invocation, what: str, apply: bool) -> None:
    """Forget which directory holds the RocksDB of the log (rocksdb), or the keyed log that LLOG_KEYED names (keyed).

    Use it only if that directory is lost and cannot be restored from a copy: its contents are then gone for this log,
    and the next process that opens the RocksDB or keyed log records its own directory. Refused while a process has it
    open.

    \b
      llog repair home rocksdb --apply
    """
    found = with_log(invocation, lambda log, settings: _find_and_forget(log, settings, what, apply))
    if found is None:
        click.echo(f"no directory is recorded for {what}: the next process that opens it records its own")
        return
    click.echo(f"the directory of {what} is the one whose file ~id has the id {found}")
    note(
        "forgotten: the next process that opens it records its own directory"
        if apply
        else "nothing was changed: --apply forgets it"
    )


async def _find_and_forget(log: Log, settings: Settings, what: str, apply: bool) -> str | None:
    from llog.log.owners import keyed_ownership

    if what == "keyed":
        if settings.keyed is None:
            raise ConfigurationError("no keyed log is named: set LLOG_KEYED")
        what = keyed_ownership(settings.keyed)
    assert log.owners is not None
    found = await log.owners.home(what)
    if found is not None and apply:
        await log.owners.forget(what, "it")
    return found
