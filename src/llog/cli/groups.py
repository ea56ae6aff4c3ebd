"""`llog groups`: how far consumer groups have come."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from llog.cli.common import Invocation, json_option, partitions_of, print_json, print_table, with_log
from llog.errors import InvalidArgument

if TYPE_CHECKING:
    from llog.config import Settings
    from llog.partition.groups import GroupLag
    from llog.partition.log import Log


@click.group(short_help="List, describe and reset consumer groups.")
def groups() -> None:
    """List, describe and reset consumer groups.

    A group's position in a partition is the next offset it wants. `llog consume --group` makes one and moves it on.
    """


@groups.command("list")
@json_option
@click.pass_obj
def list_groups(invocation: Invocation, as_json: bool) -> None:
    """List all groups and how many records they have yet to read."""
    from llog.engines.routing import EngineReader
    from llog.partition import groups as core

    async def found(log: Log, _: Settings) -> dict[str, list[GroupLag]]:
        reader = EngineReader(log)
        return {name: await core.lag(log, name, reader) for name in await core.groups(log)}

    every = with_log(invocation, found)
    if as_json:
        print_json([{"group": name, "lag": sum(each.lag for each in lags)} for name, lags in every.items()])
        return
    print_table(
        ["GROUP", "PARTITIONS", "LAG"],
        [[name, len(lags), sum(each.lag for each in lags)] for name, lags in every.items()],
        numbers=["PARTITIONS", "LAG"],
    )


@groups.command()
@click.argument("group")
@json_option
@click.pass_obj
def describe(invocation: Invocation, group: str, as_json: bool) -> None:
    """Show where GROUP is in every partition, and how far behind the end."""
    from llog.engines.routing import EngineReader
    from llog.partition import groups as core

    async def found(log: Log, _: Settings) -> list[GroupLag]:
        lags = await core.lag(log, group, EngineReader(log))
        if not lags and group not in await core.groups(log):
            raise InvalidArgument(f"there is no group {group!r}: `llog groups list` shows those there are")
        return lags

    lags = with_log(invocation, found)
    if as_json:
        print_json(lags)
        return
    columns = ["TOPIC", "PARTITION", "POSITION", "NEXT OFFSET", "LAG"]
    rows = [[each.topic, each.partition, each.offset, each.next_offset, each.lag] for each in lags]
    print_table(columns, rows, numbers=columns[1:])


@groups.command()
@click.argument("group")
@click.argument("topic")
@click.option("--partition", type=int, help="Only this partition. Default: all of them.")
@click.option(
    "--to",
    "where",
    metavar="WHERE",
    required=True,
    help="earliest, latest, an offset, or a time such as 2026-01-31T12:00:00Z.",
)
@click.pass_obj
def reset(invocation: Invocation, group: str, topic: str, partition: int | None, where: str) -> None:
    """Move GROUP in TOPIC, back or forward. Stop its consumers first: they would commit over it."""
    from llog.cli.consume import start_offset
    from llog.engines.routing import EngineReader
    from llog.partition import groups as core

    async def moved(log: Log, _: Settings) -> None:
        reader = EngineReader(log)
        offsets = {tp: await start_offset(reader, tp, where) for tp in await partitions_of(log, topic, partition)}
        for tp, offset in offsets.items():
            await core.reset(log, group, tp, offset, reader)
            click.echo(f"group {group} is at offset {offset} of {tp}")

    with_log(invocation, moved)
