"""`llog groups`: the consumer groups of topics of every engine."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click
import msgspec

from llog.cli.common import Invocation, json_option, note, partitions_of, print_json, print_table, with_log
from llog.errors import InvalidArgument, LlogError
from llog.model import TopicPartition

if TYPE_CHECKING:
    from llog.config import Settings
    from llog.groups.listing import GroupListing, GroupProgress
    from llog.groups.options import Start
    from llog.log.log import Log


@click.group(short_help="List, describe, reset and delete consumer groups.")
def groups() -> None:
    """List, describe, reset and delete consumer groups.

    A group's position in a partition is the lowest offset that it has not acknowledged. Consuming with a group, by
    `llog consume --group`, SQL or HTTP, creates the group and advances its positions. While a broker owns the topics
    of engine rocksdb, their groups are reached through that broker: --url.
    """


url_option = click.option("--url", metavar="URL", help="Use the broker at http://host:port instead of the stores.")


@groups.command("list", short_help="List all groups and their lag.")
@json_option
@url_option
@click.pass_obj
def list_groups(invocation: Invocation, as_json: bool, url: str | None) -> None:
    """List all groups, how many records they have not acknowledged, and how many of those are delivered."""

    async def read_groups(log: Log, _: Settings) -> dict[str, list[GroupProgress]]:
        listing = _listing(log)
        _note_missing(await listing.unreachable())
        return {name: await listing.describe(name) for name in await listing.names()}

    shares_of = with_log(invocation, read_groups, reads_only=True) if url is None else _read_through_broker(url)
    rows = [_summary(name, shares) for name, shares in shares_of.items()]
    if as_json:
        print_json(rows)
        return
    columns = ["GROUP", "TOPICS", "PARTITIONS", "LAG", "OUTSTANDING", "MEMBERS"]
    cells = [
        [row.group, ", ".join(row.topics), row.partitions, row.lag, row.outstanding, len(row.members)] for row in rows
    ]
    print_table(columns, cells, numbers=columns[2:])


@groups.command(short_help="Show the positions, lag and members of a group.")
@click.argument("group")
@json_option
@url_option
@click.pass_obj
def describe(invocation: Invocation, group: str, as_json: bool, url: str | None) -> None:
    """Show the position of GROUP in every partition, its lag, and its active members.

    OUTSTANDING counts the records that are delivered and not acknowledged; EXPIRED counts those of them that the next
    member to consume gets again.
    """

    async def read_shares(log: Log, _: Settings) -> list[GroupProgress]:
        listing = _listing(log)
        _note_missing(await listing.unreachable())
        shares = await listing.describe(group)
        if not shares:
            await listing.check_exists(group)
        return shares

    if url is None:
        shares = with_log(invocation, read_shares, reads_only=True)
    else:
        shares = _read_through_broker(url, group)[group]
    if as_json:
        print_json(shares)
        return
    columns = ["TOPIC", "PARTITION", "POSITION", "NEXT OFFSET", "LAG", "OUTSTANDING", "EXPIRED", "MODE", "MEMBERS"]
    rows = [
        [
            each.topic,
            each.partition,
            each.offset,
            each.next_offset,
            each.lag,
            each.outstanding,
            each.expired,
            each.mode or "plain",
            ", ".join(member or "(no name)" for member in each.members),
        ]
        for each in shares
    ]
    print_table(columns, rows, numbers=columns[1:7])


@groups.command(short_help="Move a group to another position in a topic.")
@click.argument("group")
@click.argument("topic")
@click.option("--partition", type=int, help="The partition to reset.  [default: all of them]")
@click.option(
    "--to",
    "where",
    metavar="WHERE",
    required=True,
    help="The new position: earliest, latest, an offset, or a time such as 2026-01-31T12:00:00Z.",
)
@url_option
@click.pass_obj
def reset(invocation: Invocation, group: str, topic: str, partition: int | None, where: str, url: str | None) -> None:
    """Move GROUP to another position in TOPIC, and drop its claims.

    Stop the group's consumers first: otherwise their commits replace the new position.
    """
    from llog.cli.consume.command import start_offset
    from llog.engines.routing import EngineReader
    from llog.groups.groups import Groups

    async def move_group(log: Log, _: Settings) -> None:
        reader = EngineReader(log)
        offsets = {tp: await start_offset(reader, tp, where) for tp in await partitions_of(log, topic, partition)}
        for tp, offset in offsets.items():
            await (await Groups(log, reader).partition(group, tp)).reset(offset)
            click.echo(f"group {group} is at offset {offset} of {tp}")

    if url is None:
        with_log(invocation, move_group)
        return
    from llog.client.remote.groups import RemoteGroups

    for each, offset in RemoteGroups(url).reset(group, topic, _start(where), partition).items():
        click.echo(f"group {group} is at offset {offset} of {TopicPartition(topic, each)}")


@groups.command(short_help="Delete a group and its positions.")
@click.argument("group")
@click.option("--topic", help="The topic to delete the group from.  [default: all of them]")
@click.option("--force", is_flag=True, help="Delete even if members are active; they continue as a new group.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@url_option
@click.pass_obj
def delete(invocation: Invocation, group: str, topic: str | None, force: bool, yes: bool, url: str | None) -> None:
    """Delete GROUP: its positions, claims and members. Refused while members are active."""
    where = "" if topic is None else f" on topic {topic}"
    if not yes:
        if not sys.stdin.isatty():
            raise InvalidArgument(f"deleting group {group!r} needs --yes if stdin is not a terminal")
        click.confirm(f"Delete group {group}{where} and its positions?", abort=True)

    async def delete_group(log: Log, _: Settings) -> int:
        return await _listing(log).delete_completely(group, topic, force=force)

    if url is None:
        count = with_log(invocation, delete_group)
    else:
        from llog.client.remote.groups import RemoteGroups

        count = RemoteGroups(url).delete(group, topic, force=force)
    click.echo(f"deleted group {group}{where}: {count} position{'' if count == 1 else 's'}")


class _Summary(msgspec.Struct, frozen=True, kw_only=True):
    group: str
    topics: list[str]
    partitions: int
    lag: int
    outstanding: int
    members: list[str]


def _listing(log: Log) -> GroupListing:
    from llog.groups.groups import Groups
    from llog.groups.listing import GroupListing

    return GroupListing(Groups(log))


def _read_through_broker(url: str, group: str | None = None) -> dict[str, list[GroupProgress]]:
    from llog.client.remote.groups import RemoteGroups

    found = RemoteGroups(url).list(group)
    _note_missing(found.missing)
    return found.groups


def _note_missing(missing: LlogError | str | None) -> None:
    if missing is not None:
        note(f"llog: groups on topics of engine 'rocksdb' are not shown: {missing}")


def _start(where: str) -> Start:
    from llog.cli.consume.command import parse_time_ms
    from llog.groups.options import Start

    match where:
        case "earliest":
            return Start("earliest")
        case "latest":
            return Start("latest")
        case _:
            return Start("offset", int(where)) if where.isdecimal() else Start("timestamp", parse_time_ms(where))


def _summary(name: str, shares: list[GroupProgress]) -> _Summary:
    return _Summary(
        group=name,
        topics=sorted({each.topic for each in shares}),
        partitions=len(shares),
        lag=sum(each.lag or 0 for each in shares),
        outstanding=sum(each.outstanding for each in shares),
        members=sorted({member for each in shares for member in each.members}),
    )
