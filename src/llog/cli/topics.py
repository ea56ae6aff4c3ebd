"""`llog topics`: the catalog."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from llog.base.units import format_duration_ms, format_size
from llog.cli.common import DURATION, SIZE, Invocation, json_option, print_json, print_table, shown_time, with_log
from llog.errors import InvalidArgument

if TYPE_CHECKING:
    from llog.config import Settings
    from llog.log.log import Log
    from llog.log.records import Topic

_retention = click.option(
    "--retention", type=DURATION, help="Keep records so long, e.g. 7d. Applied by `llog retain`. Default: for ever."
)
_retention_bytes = click.option(
    "--retention-bytes", type=SIZE, help="Keep so much of each partition, e.g. 10GiB. Default: all of it."
)


@click.group(short_help="Create, list, describe, change and delete topics.")
def topics() -> None:
    """Create, list, describe, change and delete topics.

    A topic has one or more partitions. Each is an ordered log of its own, whose offsets are dense and start at 1.
    """


@topics.command()
@click.argument("name")
@click.option(
    "--partitions", type=int, default=1, show_default=True, help="How many; can be raised later, not lowered."
)
@_retention
@_retention_bytes
@click.option(
    "--timestamp-type",
    type=click.Choice(["create", "append"]),
    default="create",
    show_default=True,
    help="Whether retention and lookups by time go by the producer's time or by the time of the append.",
)
@click.option(
    "--engine",
    type=click.Choice(["object", "disk", "rocksdb"]),
    default="object",
    show_default=True,
    help="object: blobs and metadata, any number of writers. disk: segment files on this machine, one writing "
    "process at a time. "
    "rocksdb: with the tables of SQL, on this machine, one process at a time.",
)
@click.option(
    "--cleanup",
    type=click.Choice(["delete", "compact"]),
    default="delete",
    show_default=True,
    help="compact (disk and rocksdb): keep the newest record of each key, and drop the older ones.",
)
@click.option(
    "--delete-retention",
    type=DURATION,
    help="With --cleanup compact: keep deletions (records without a value, events of deleted rows) so long. "
    "Default: 24h.",
)
@click.pass_obj
def create(
    invocation: Invocation,
    name: str,
    partitions: int,
    retention: int | None,
    retention_bytes: int | None,
    timestamp_type: str,
    engine: str,
    cleanup: str,
    delete_retention: int | None,
) -> None:
    """Create the topic NAME.

    \b
      llog topics create orders --partitions 12 --retention 7d
      llog topics create accounts --engine disk --cleanup compact
    """
    from llog.log.catalog import Catalog
    from llog.log.records import DELETE_RETENTION_MS, Cleanup
    from llog.model import TimestampType

    if delete_retention is not None and cleanup != Cleanup.COMPACT:
        raise InvalidArgument("--delete-retention goes with --cleanup compact")

    async def made(log: Log, _: Settings) -> Topic:
        return await Catalog(log).create(
            name,
            partitions,
            retention_ms=retention,
            retention_bytes=retention_bytes,
            timestamp_type=TimestampType(timestamp_type),
            engine=engine,
            cleanup=Cleanup(cleanup),
            delete_retention_ms=DELETE_RETENTION_MS if delete_retention is None else delete_retention,
        )

    topic = with_log(invocation, made, create=True)
    click.echo(f"created topic {topic.name} with {_partitions(topic.partitions)}")


@topics.command("list")
@json_option
@click.pass_obj
def list_topics(invocation: Invocation, as_json: bool) -> None:
    """List all topics."""
    from llog.log.catalog import Catalog

    async def found(log: Log, _: Settings) -> list[Topic]:
        return await Catalog(log).topics()

    every = with_log(invocation, found, reads_only=True)
    if as_json:
        print_json([_as_dict(topic) for topic in every])
        return
    print_table(
        ["TOPIC", "PARTITIONS", "ENGINE", "RETENTION", "RETENTION BYTES", "TIMESTAMPS", "CREATED"],
        [
            [
                topic.name,
                topic.partitions,
                _engine(topic),
                _for_ever(topic.retention_ms),
                _all(topic.retention_bytes),
                topic.timestamp_type,
                shown_time(topic.created_ms),
            ]
            for topic in every
        ],
        numbers=["PARTITIONS"],
    )


@topics.command()
@click.argument("name")
@json_option
@click.pass_obj
def describe(invocation: Invocation, name: str, as_json: bool) -> None:
    """Show the settings of topic NAME and the bounds of its partitions.

    Readable are the offsets from the log start up to, and without, the next offset. `llog inspect` tells more.
    """
    from llog.engines.port import Bounds
    from llog.engines.routing import EngineReader
    from llog.log.catalog import Catalog

    async def found(log: Log, _: Settings) -> tuple[Topic, list[Bounds]]:
        topic = await Catalog(log).get(name)
        return topic, await EngineReader(log).topic_bounds(topic)

    topic, bounds = with_log(invocation, found, reads_only=True)
    if as_json:
        partitions = [{"partition": p, **each._asdict()} for p, each in enumerate(bounds)]
        print_json({**_as_dict(topic), "bounds": partitions})
        return
    click.echo(
        f"topic {topic.name}: {_partitions(topic.partitions)}, engine {_engine(topic)}, "
        f"retention {_for_ever(topic.retention_ms)}, bytes kept {_all(topic.retention_bytes)}, "
        f"timestamps by {topic.timestamp_type}, created {shown_time(topic.created_ms)}"
    )
    print_table(
        ["PARTITION", "LOG START", "NEXT OFFSET", "RECORDS"],
        [
            [p, each.log_start_offset, each.next_offset, each.next_offset - each.log_start_offset]
            for p, each in enumerate(bounds)
        ],
        numbers=["PARTITION", "LOG START", "NEXT OFFSET", "RECORDS"],
    )


@topics.command("set-retention")
@click.argument("name")
@_retention
@_retention_bytes
@click.pass_obj
def set_retention(invocation: Invocation, name: str, retention: int | None, retention_bytes: int | None) -> None:
    """Replace both retention limits of topic NAME; one that is not given is lifted."""
    from llog.log.catalog import Catalog

    async def changed(log: Log, _: Settings) -> Topic:
        return await Catalog(log).set_retention(name, retention, retention_bytes)

    topic = with_log(invocation, changed)
    size = "" if topic.retention_bytes is None else f", {format_size(topic.retention_bytes)} to a partition"
    click.echo(f"topic {name} keeps records {_for_ever(topic.retention_ms)}{size}")


@topics.command("add-partitions")
@click.argument("name")
@click.argument("partitions", type=int)
@click.pass_obj
def add_partitions(invocation: Invocation, name: str, partitions: int) -> None:
    """Grow topic NAME to PARTITIONS partitions in all.

    Keys are spread anew: records of one key before and after may lie in different partitions.
    """
    from llog.log.catalog import Catalog

    async def grown(log: Log, _: Settings) -> Topic:
        return await Catalog(log).add_partitions(name, partitions)

    click.echo(f"topic {name} has {_partitions(with_log(invocation, grown).partitions)}")


@topics.command()
@click.argument("name")
@click.option("--before", type=int, required=True, help="The offset that becomes the first one.")
@click.option("--partition", type=int, default=0, show_default=True, help="Of this partition.")
@click.pass_obj
def trim(invocation: Invocation, name: str, before: int, partition: int) -> None:
    """Remove every record of a partition of topic NAME below an offset: exactly those, and for good.

    Space comes back with the next `llog collect`; of a disk topic, by whole segments, and in RocksDB, at once.
    """
    from llog.engines.port import RetentionResult
    from llog.engines.routing import EngineAppender
    from llog.model import TopicPartition

    tp = TopicPartition(name, partition)

    async def trimmed(log: Log, _: Settings) -> RetentionResult:
        return await EngineAppender(log).trim(tp, before)

    result = with_log(invocation, trimmed)
    click.echo(f"{tp} starts at offset {result.new_start}; {result.records} offsets are gone")


@topics.command()
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.pass_obj
def delete(invocation: Invocation, name: str, yes: bool) -> None:
    """Delete topic NAME and all its records.

    They cannot be read from then on; their blobs go with the next `llog collect`, the files of a disk topic, and what
    is in RocksDB, at once. The name may be used again at once.
    """
    from llog.log.catalog import Catalog

    if not yes:
        if not sys.stdin.isatty():
            raise InvalidArgument(f"deleting {name!r} needs --yes where nobody can be asked")
        click.confirm(f"Delete topic {name} and all its records?", abort=True)

    async def deleted(log: Log, _: Settings) -> None:
        await Catalog(log).delete(name)

    with_log(invocation, deleted)
    click.echo(f"deleted topic {name}")


def _partitions(count: int) -> str:
    return f"{count} partition{'' if count == 1 else 's'}"


def _all(size: int | None) -> str:
    return "all" if size is None else format_size(size)


def _for_ever(retention_ms: int | None) -> str:
    return "for ever" if retention_ms is None else format_duration_ms(retention_ms)


def _engine(topic: Topic) -> str:
    return topic.engine if topic.cleanup == "delete" else f"{topic.engine}, {topic.cleanup}"


def _as_dict(topic: Topic) -> dict[str, object]:
    return {
        "name": topic.name,
        "partitions": topic.partitions,
        "engine": topic.engine,
        "cleanup": topic.cleanup,
        "delete_retention_ms": topic.delete_retention_ms,
        "retention_ms": topic.retention_ms,
        "retention_bytes": topic.retention_bytes,
        "timestamp_type": topic.timestamp_type,
        "created_ms": topic.created_ms,
        "incarnation": topic.incarnation,
    }
