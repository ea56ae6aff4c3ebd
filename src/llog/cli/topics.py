"""`llog topics`: the topics of the log and their options."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from llog.base.units import format_duration_ms, format_size
from llog.cli.common import DURATION, SIZE, Invocation, format_time, json_option, print_json, print_table, with_log
from llog.errors import InvalidArgument

if TYPE_CHECKING:
    from llog.config import Settings
    from llog.log.log import Log
    from llog.log.records import Topic

_retention = click.option(
    "--retention",
    type=DURATION,
    help="How long to keep records, e.g. 7d; `llog up` and `llog retain` apply it.  [default: for ever]",
)
_retention_bytes = click.option(
    "--retention-bytes", type=SIZE, help="How much of each partition to keep, e.g. 10GiB.  [default: everything]"
)


@click.group(short_help="Create, list, describe, change, fence and delete topics.")
def topics() -> None:
    """Create, list, describe, change, fence and delete topics.

    A topic has one or more partitions. Each partition is an ordered log of its own, whose offsets start at 1.
    """


@topics.command(short_help="Create a topic.")
@click.argument("name")
@click.option(
    "--partitions",
    type=int,
    default=1,
    show_default=True,
    help="The number of partitions. It can be raised later, but not lowered.",
)
@_retention
@_retention_bytes
@click.option(
    "--timestamp-type",
    type=click.Choice(["create", "append"]),
    default="create",
    show_default=True,
    help="The timestamp that retention and lookups by time use: the producer's (create), or the time of the append.",
)
@click.option(
    "--engine",
    type=click.Choice(["object", "disk", "rocksdb"]),
    default="object",
    show_default=True,
    help="Where the topic is stored. object: in the blob store, with any number of writers. disk: in segment files on "
    "this machine, with one writing process at a time. rocksdb: beside the tables of SQL on this machine, with one "
    "process at a time.",
)
@click.option(
    "--cleanup",
    type=click.Choice(["delete", "compact"]),
    default="delete",
    show_default=True,
    help="delete: retention removes old records. compact (disk and rocksdb): key compaction also removes all but the "
    "newest record of each key.",
)
@click.option(
    "--delete-retention",
    type=DURATION,
    help="With --cleanup compact, how long to keep deletions: records without a value, and events of deleted rows.  "
    "[default: 24h]",
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
        raise InvalidArgument("--delete-retention needs --cleanup compact: add it, or leave --delete-retention out")

    async def create_topic(log: Log, _: Settings) -> Topic:
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

    topic = with_log(invocation, create_topic, create=True)
    click.echo(f"created topic {topic.name} with {_partition_count(topic.partitions)}")


@topics.command("list")
@json_option
@click.pass_obj
def list_topics(invocation: Invocation, as_json: bool) -> None:
    """List all topics and their options."""
    from llog.log.catalog import Catalog
    from llog.log.records import topic_fields

    async def read_topics(log: Log, _: Settings) -> list[Topic]:
        return await Catalog(log).topics()

    found = with_log(invocation, read_topics, reads_only=True)
    if as_json:
        print_json([topic_fields(topic) for topic in found])
        return
    print_table(
        ["TOPIC", "PARTITIONS", "ENGINE", "RETENTION", "RETENTION BYTES", "TIMESTAMPS", "CREATED"],
        [
            [
                topic.name,
                topic.partitions,
                _engine(topic),
                _retention_time(topic),
                _retention_size(topic),
                topic.timestamp_type,
                format_time(topic.created_ms),
            ]
            for topic in found
        ],
        numbers=["PARTITIONS"],
    )


@topics.command(short_help="Show the options and bounds of a topic.")
@click.argument("name")
@json_option
@click.pass_obj
def describe(invocation: Invocation, name: str, as_json: bool) -> None:
    """Show the options of topic NAME and the bounds of its partitions.

    The offsets from the log start up to, but not including, the next offset can be read. `llog inspect` shows how the
    partitions are stored.
    """
    from llog.engines.routing import EngineReader
    from llog.log.catalog import Catalog
    from llog.log.engine import Bounds
    from llog.log.records import topic_fields

    async def read_bounds(log: Log, _: Settings) -> tuple[Topic, list[Bounds]]:
        topic = await Catalog(log).get(name)
        return topic, await EngineReader(log).topic_bounds(topic)

    topic, bounds = with_log(invocation, read_bounds, reads_only=True)
    if as_json:
        partitions = [{"partition": p, **each._asdict()} for p, each in enumerate(bounds)]
        print_json({**topic_fields(topic), "bounds": partitions})
        return
    click.echo(
        f"topic {topic.name}: {_partition_count(topic.partitions)}, engine {_engine(topic)}, "
        f"retention {_retention_time(topic)}, bytes kept {_retention_size(topic)}, "
        f"timestamps by {topic.timestamp_type}, created {format_time(topic.created_ms)}"
    )
    print_table(
        ["PARTITION", "LOG START", "NEXT OFFSET", "RECORDS"],
        [
            [p, each.log_start_offset, each.next_offset, each.next_offset - each.log_start_offset]
            for p, each in enumerate(bounds)
        ],
        numbers=["PARTITION", "LOG START", "NEXT OFFSET", "RECORDS"],
    )


@topics.command("set-retention", short_help="Replace the retention limits of a topic.")
@click.argument("name")
@_retention
@_retention_bytes
@click.pass_obj
def set_retention(invocation: Invocation, name: str, retention: int | None, retention_bytes: int | None) -> None:
    """Replace both retention limits of topic NAME. A limit that is not given is removed."""
    from llog.log.catalog import Catalog

    async def replace_limits(log: Log, _: Settings) -> Topic:
        return await Catalog(log).set_retention(name, retention, retention_bytes)

    topic = with_log(invocation, replace_limits)
    size = "" if topic.retention_bytes is None else f", {format_size(topic.retention_bytes)} to a partition"
    click.echo(f"topic {name} keeps records {_retention_time(topic)}{size}")


@topics.command("add-partitions", short_help="Add partitions to a topic.")
@click.argument("name")
@click.argument("partitions", type=int)
@click.pass_obj
def add_partitions(invocation: Invocation, name: str, partitions: int) -> None:
    """Grow topic NAME to a total of PARTITIONS partitions.

    Keys are distributed anew: the records of a key from before and after may be in different partitions.
    """
    from llog.log.catalog import Catalog

    async def grow_topic(log: Log, _: Settings) -> Topic:
        return await Catalog(log).add_partitions(name, partitions)

    click.echo(f"topic {name} has {_partition_count(with_log(invocation, grow_topic).partitions)}")


@topics.command(short_help="Remove the records of a partition below an offset.")
@click.argument("name")
@click.option("--before", type=int, required=True, help="The offset that becomes the log start.")
@click.option("--partition", type=int, default=0, show_default=True, help="The partition to trim.")
@click.pass_obj
def trim(invocation: Invocation, name: str, before: int, partition: int) -> None:
    """Remove the records of a partition of topic NAME below an offset, for good.

    `llog collect` frees the space of an object topic; a disk topic frees whole segments; a rocksdb topic frees it at
    once.
    """
    from llog.engines.routing import EngineAppender
    from llog.log.engine import RetentionResult
    from llog.model import TopicPartition

    tp = TopicPartition(name, partition)

    async def trim_partition(log: Log, _: Settings) -> RetentionResult:
        return await EngineAppender(log).trim(tp, before)

    result = with_log(invocation, trim_partition)
    click.echo(f"{tp} starts at offset {result.new_start}; {result.records} offsets are gone")


_fenced_partition = click.option("--partition", type=int, help="Only this partition.  [default: all partitions]")


@topics.command(short_help="Stop all appends to a topic.")
@click.argument("name")
@_fenced_partition
@click.pass_obj
def fence(invocation: Invocation, name: str, partition: int | None) -> None:
    """Stop all appends to topic NAME, by any process, until it is unfenced. Reads continue.

    Appends are refused with partition_fenced once this has returned. Partitions that are added later are not fenced.
    Only topics of engine object can be fenced; `llog inspect` shows which partitions are.
    """
    from llog.engines.object.fencing import fence_topic

    async def fence_partitions(log: Log, _: Settings) -> list[int]:
        return await fence_topic(log, name, partition)

    click.echo(f"fenced {_partitions_of(name, with_log(invocation, fence_partitions))}")


@topics.command(short_help="Let appends to a topic that was fenced commit again.")
@click.argument("name")
@_fenced_partition
@click.pass_obj
def unfence(invocation: Invocation, name: str, partition: int | None) -> None:
    """Let appends to topic NAME commit again."""
    from llog.engines.object.fencing import unfence_topic

    async def unfence_partitions(log: Log, _: Settings) -> list[int]:
        return await unfence_topic(log, name, partition)

    click.echo(f"unfenced {_partitions_of(name, with_log(invocation, unfence_partitions))}")


@topics.command(short_help="Delete a topic and all its records.")
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@click.pass_obj
def delete(invocation: Invocation, name: str, yes: bool) -> None:
    """Delete topic NAME and all its records.

    The records cannot be read any more, and the name is free at once. `llog collect` deletes the blobs of an object
    topic; the records of a disk or rocksdb topic are deleted at once.
    """
    from llog.log.catalog import Catalog

    if not yes:
        if not sys.stdin.isatty():
            raise InvalidArgument(f"deleting topic {name!r} needs --yes if stdin is not a terminal")
        click.confirm(f"Delete topic {name} and all its records?", abort=True)

    async def delete_topic(log: Log, _: Settings) -> None:
        await Catalog(log).delete(name)

    with_log(invocation, delete_topic)
    click.echo(f"deleted topic {name}")


def _partitions_of(name: str, partitions: list[int]) -> str:
    return f"{name}/{partitions[0]}" if len(partitions) == 1 else f"{len(partitions)} partitions of {name}"


def _partition_count(count: int) -> str:
    return f"{count} partition{'' if count == 1 else 's'}"


def _retention_size(topic: Topic) -> str:
    return "all" if topic.retention_bytes is None else format_size(topic.retention_bytes)


def _retention_time(topic: Topic) -> str:
    return "for ever" if topic.retention_ms is None else format_duration_ms(topic.retention_ms)


def _engine(topic: Topic) -> str:
    return topic.engine if topic.cleanup == "delete" else f"{topic.engine}, {topic.cleanup}"
