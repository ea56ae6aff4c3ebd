"""`llog inspect`: shows how partitions and blobs are stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from llog.base.units import format_size
from llog.cli.common import Invocation, format_time, json_option, partitions_of, print_json, print_table, with_log
from llog.errors import InvalidArgument

if TYPE_CHECKING:
    from llog.config import Settings
    from llog.engines.disk.description import DiskDescription
    from llog.engines.object.description import BlobDescription, PartitionDescription
    from llog.engines.rocksdb.description import RocksDescription
    from llog.log.engine import Description
    from llog.log.log import Log


@click.command(short_help="Show how partitions or a blob are stored.")
@click.argument("topic", required=False)
@click.option("--partition", type=int, help="The partition to show.  [default: all of them]")
@click.option(
    "--from-offset",
    type=int,
    default=0,
    help="Show index entries, frames or records from this offset on.",
)
@click.option(
    "--entries",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    help="The most index entries, frames or records to show of each partition.",
)
@click.option("--blob", metavar="NAME", help="Show the header of this blob instead of a topic.")
@json_option
@click.pass_obj
def inspect(
    invocation: Invocation,
    topic: str | None,
    partition: int | None,
    from_offset: int,
    entries: int,
    blob: str | None,
    as_json: bool,
) -> None:
    """Show how the partitions of TOPIC are stored.

    For an object topic, this shows the control record, pending append, compaction and index entries; for a disk topic,
    the segment files and their frames; for a rocksdb topic, the next offset and the records.

    \b
      llog inspect orders --partition 0 --from-offset 1000
      llog inspect --blob llog/wal-shared/01936b7e-0000-7000-8000-000000000000
    """
    if (topic is None) == (blob is None):
        raise InvalidArgument("name either a TOPIC or a --blob")
    if blob is not None:
        print_json(with_log(invocation, lambda log, _: _describe_blob(log, blob)))
        return

    async def describe_partitions(log: Log, _: Settings) -> list[Description]:
        from llog.log.catalog import Catalog
        from llog.log.engine import engine_of

        assert topic is not None
        engine = engine_of(log, await Catalog(log).get(topic))
        tps = await partitions_of(log, topic, partition)
        return [await engine.describe(log, tp, entries, from_offset=from_offset) for tp in tps]

    descriptions = with_log(invocation, describe_partitions, reads_only=True)
    if as_json:
        print_json(descriptions)
        return
    for number, each in enumerate(descriptions):
        if number:
            click.echo()
        _show(each)


def _show(description: Description) -> None:
    from llog.engines.disk.description import DiskDescription
    from llog.engines.object.description import PartitionDescription
    from llog.engines.rocksdb.description import RocksDescription

    match description:
        case PartitionDescription():
            _show_object(description)
        case DiskDescription():
            _show_disk(description)
        case RocksDescription():
            _show_rocks(description)


async def _describe_blob(log: Log, name: str) -> BlobDescription:
    from llog.engines.object.description import describe_blob

    return await describe_blob(log, log.blob_name(name))


def _show_object(partition: PartitionDescription) -> None:
    from llog.log.inline import describe_address, inline_bytes

    control = partition.control
    click.echo(f"{partition.topic}/{partition.partition}: {control.log_state}, in directory {partition.directory}")
    click.echo(f"  offsets     log start {control.log_start_offset}, next offset {control.next_offset}")
    click.echo(f"  newest      {format_time(control.max_timestamp_ms) or 'none'}")
    if control.pending is not None:
        click.echo(f"  pending     offsets {control.pending.start_offset} to {control.pending.end_offset}")
    click.echo(f"  compacted   below offset {partition.cursor}")
    if control.inline_total:
        until = ", blobs until they are compacted" if control.inline_full else ""
        click.echo(f"  inline      {format_size(inline_bytes(control))} not compacted{until}")
    if partition.compaction is not None:
        run = partition.compaction
        click.echo(f"  compaction  {run.state}, offsets {run.start_offset} to {run.end_offset}, blob {run.blob}")
    if partition.claim is not None:
        click.echo(f"  claim       held by {partition.claim.holder or 'a compactor'}")
    if control.producers:
        click.echo(f"  producers   {len(control.producers)}")
    if partition.entries:
        columns = ["FIRST", "LAST", "KIND", "BYTES", "ENCODING", "APPENDED", "BLOB"]
        rows = [
            [
                each.start_offset,
                each.end_offset,
                each.entry.kind,
                format_size(each.entry.byte_length),
                each.entry.encoding,
                format_time(each.entry.append_ms),
                describe_address(each.entry.data_uri),
            ]
            for each in partition.entries
        ]
        print_table(columns, rows, numbers=["FIRST", "LAST", "BYTES"])
    if partition.more_from is not None:
        click.echo(f"more index entries from offset {partition.more_from} on: --from-offset {partition.more_from}")


def _show_disk(partition: DiskDescription) -> None:
    click.echo(f"{partition.topic}/{partition.partition}: on disk, in directory {partition.directory}")
    click.echo(f"  offsets     log start {partition.log_start_offset}, next offset {partition.next_offset}")
    if partition.owner is not None:
        click.echo(f"  last owner  process {partition.owner.pid} ({partition.owner.command})")
    if partition.segments:
        columns = ["FIRST", "LAST", "BYTES", "INDEX BYTES", "SEALED", "FILE"]
        rows = [
            [
                each.base_offset,
                each.end_offset,
                format_size(each.bytes),
                format_size(each.index_bytes + each.timeindex_bytes),
                "yes" if each.sealed else "no",
                each.path,
            ]
            for each in partition.segments
        ]
        print_table(columns, rows, numbers=columns[:4])
    if partition.frames:
        columns = ["FIRST", "LAST", "RECORDS", "BYTES", "APPENDED", "PRODUCER", "AT BYTE", "PROBLEM"]
        rows = [
            [
                each.start_offset,
                each.end_offset,
                each.records,
                format_size(each.length),
                format_time(each.append_ms),
                each.producer or "",
                each.position,
                each.problem or "",
            ]
            for each in partition.frames
        ]
        print_table(columns, rows, numbers=["FIRST", "LAST", "RECORDS", "BYTES", "AT BYTE"])
    if partition.more_from is not None:
        click.echo(f"more frames from offset {partition.more_from} on: --from-offset {partition.more_from}")


def _show_rocks(partition: RocksDescription) -> None:
    state = partition.state
    click.echo(f"{partition.topic}/{partition.partition}: in the RocksDB in {partition.directory}")
    click.echo(f"  offsets     log start {state.log_start_offset}, next offset {state.next_offset}")
    click.echo(f"  newest      {format_time(state.timestamp_ms) or 'none'}")
    if state.has_gaps:
        click.echo(f"  compacted   by key, up to offset {state.compacted_through}")
    if state.producers:
        click.echo(f"  producers   {len(state.producers)}")
    if partition.records:
        columns = ["OFFSET", "BYTES", "TIMESTAMP", "APPENDED"]
        rows = [
            [each.offset, format_size(each.bytes), format_time(each.timestamp_ms), format_time(each.append_ms)]
            for each in partition.records
        ]
        print_table(columns, rows, numbers=columns[:2])
    if partition.more_from is not None:
        click.echo(f"more records from offset {partition.more_from} on: --from-offset {partition.more_from}")
