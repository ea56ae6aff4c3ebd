"""`llog groups`: how far consumer groups have come, on topics of every engine."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click
import msgspec

from llog.cli.common import Invocation, json_option, note, partitions_of, print_json, print_table, with_log
from llog.errors import InvalidArgument

if TYPE_CHECKING:
    from llog.config import Settings
    from llog.partition.log import Log
    from llog.topics.group_listing import GroupListing, GroupShare


@click.group(short_help="List, describe, reset and delete consumer groups.")
def groups() -> None:
    """List, describe, reset and delete consumer groups.

    A group's position in a partition is the next offset it wants. Reading with a group, by `llog consume --group` or SQL, makes one and
    moves it on.
    """


@groups.command("list")
@json_option
@click.pass_obj
def list_groups(invocation: Invocation, as_json: bool) -> None:
    """List all groups, how many records they have yet to acknowledge, and how many of those are delivered."""

    async def found(log: Log, _: Settings) -> dict[str, list[GroupShare]]:
        listing = _listing(log)
        await _tell_what_is_missing(listing)
        return {name: await listing.describe(name) for name in await listing.names()}

    rows = [_summary(name, shares) for name, shares in with_log(invocation, found).items()]
    if as_json:
        print_json(rows)
        return
    columns = ["GROUP", "TOPICS", "PARTITIONS", "LAG", "OUTSTANDING", "MEMBERS"]
    shown = [
        [row.group, ", ".join(row.topics), row.partitions, row.lag, row.outstanding, len(row.members)] for row in rows
    ]
    print_table(columns, shown, numbers=columns[2:])


@groups.command()
@click.argument("group")
@json_option
@click.pass_obj
def describe(invocation: Invocation, group: str, as_json: bool) -> None:
    """Show where GROUP is in every partition, how far behind the end, and which members are at work.

    OUTSTANDING counts the records that are delivered and not acknowledged; EXPIRED those of them that are delivered again to whoever comes.
    """

    async def found(log: Log, _: Settings) -> list[GroupShare]:
        listing = _listing(log)
        await _tell_what_is_missing(listing)
        shares = await listing.describe(group)
        if not shares:
            await _check_there(listing, group)
        return shares

    shares = with_log(invocation, found)
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
            ", ".join(map(_shown, _members(each))),
        ]
        for each in shares
    ]
    print_table(columns, rows, numbers=columns[1:7])


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
    """Move GROUP in TOPIC, back or forward, and forget its claims. Stop its consumers first: they would commit over it."""
    from llog.cli.consume import start_offset
    from llog.engines.routing import EngineReader
    from llog.topics.groups import Groups

    async def moved(log: Log, _: Settings) -> None:
        reader = EngineReader(log)
        offsets = {tp: await start_offset(reader, tp, where) for tp in await partitions_of(log, topic, partition)}
        for tp, offset in offsets.items():
            await Groups(log, reader).reset(group, tp, offset)
            click.echo(f"group {group} is at offset {offset} of {tp}")

    with_log(invocation, moved)


@groups.command()
@click.argument("group")
@click.option("--topic", help="Only on this topic. Default: on all of them.")
@click.option("--force", is_flag=True, help="Even if members are at work: they go on as a new group.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.pass_obj
def delete(invocation: Invocation, group: str, topic: str | None, force: bool, yes: bool) -> None:
    """Forget GROUP: its positions, claims and members. Refused while members are at work."""
    where = "" if topic is None else f" on topic {topic}"
    if not yes:
        if not sys.stdin.isatty():
            raise InvalidArgument(f"deleting group {group!r} needs --yes where nobody can be asked")
        click.confirm(f"Delete group {group}{where} and its positions?", abort=True)

    async def deleted(log: Log, _: Settings) -> int:
        listing = _listing(log)
        await _check_there(listing, group)
        if topic is None:
            missing = await listing.unreachable()
            if missing is not None:
                raise missing  # half of a group must not be left behind
        return await listing.delete(group, topic, force=force)

    count = with_log(invocation, deleted)
    click.echo(f"deleted group {group}{where}: {count} position{'' if count == 1 else 's'}")


class _Summary(msgspec.Struct, frozen=True, kw_only=True):
    group: str
    topics: list[str]
    partitions: int
    lag: int
    outstanding: int
    members: list[str]


def _listing(log: Log) -> GroupListing:
    from llog.topics.group_listing import GroupListing
    from llog.topics.groups import Groups

    return GroupListing(Groups(log))


async def _tell_what_is_missing(listing: GroupListing) -> None:
    missing = await listing.unreachable()
    if missing is not None:
        note(f"llog: groups on topics of engine 'rocksdb' are not shown: {missing}")


async def _check_there(listing: GroupListing, group: str) -> None:
    if group not in await listing.names():
        missing = await listing.unreachable()  # the group may be there
        raise missing or InvalidArgument(f"there is no group {group!r}: `llog groups list` shows those there are")


def _summary(name: str, shares: list[GroupShare]) -> _Summary:
    return _Summary(
        group=name,
        topics=sorted({each.topic for each in shares}),
        partitions=len(shares),
        lag=sum(each.lag or 0 for each in shares),
        outstanding=sum(each.outstanding for each in shares),
        members=sorted({member for each in shares for member in _members(each)}),
    )


def _members(share: GroupShare) -> list[str]:
    """Those who hold claims, and the one that has the partition."""
    return sorted({*share.holders, *([] if share.assigned_to is None else [share.assigned_to])})


def _shown(member: str) -> str:
    return member or "(no name)"
