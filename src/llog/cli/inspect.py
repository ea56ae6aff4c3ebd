"""`llog inspect`: what is stored for a partition, or in a blob, as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from llog.base.units import format_size
from llog.cli.common import Invocation, json_option, partitions_of, print_json, print_table, shown_time, with_log
from llog.errors import InvalidArgument

if TYPE_CHECKING:
    from llog.config import Settings
    from llog.engines.disk.description import DiskDescription
    from llog.engines.object.description import BlobDescription, PartitionDescription
    from llog.engines.rocksdb.description import RocksDescription
    from llog.log.engine import Description
    from llog.log.log import Log


@click.command(short_help="Show control record, compaction and index entries of partitions, or a blob.")
@click.argument("topic", required=False)
@click.option("--partition", type=int, help="Only this partition. Default: all of them.")
@click.option(
    "--from-offset",
    type=int,
    default=0,
    help="Show index entries, frames or records from the one that covers this offset on.",
)
@click.option(
    "--entries",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    help="At most so many index entries, frames or records each.",
)
@click.option("--blob", metavar="NAME", help="Show what this blob says about itself instead.")
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
    """Show how the partitions of TOPIC are stored: control record, pending append, compaction, index entries; of a disk
    topic, its segment files and the frames in them; in RocksDB, the counter and the records.

    \b
      llog inspect orders --partition 0 --from-offset 1000
      llog inspect --blob llog/wal-shared/01936b7e-0000-7000-8000-000000000000
    """
    if (topic is None) == (blob is None):
        raise InvalidArgument("name either a TOPIC or a --blob")
    if blob is not None:
        print_json(with_log(invocation, lambda log, _: _blob(log, blob)))
        return

    async def described(log: Log, _: Settings) -> list[Description]:
        from llog.log.catalog import Catalog
        from llog.log.engine import engine_of

        assert topic is not None
        engine = engine_of(log, await Catalog(log).get(topic))
        tps = await partitions_of(log, topic, partition)
        return [await engine.describe(log, tp, entries, from_offset=from_offset) for tp in tps]

    found = with_log(invocation, described, reads_only=True)
    if as_json:
        print_json(found)
        return
    for number, each in enumerate(found):
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


async def _blob(log: Log, name: str) -> BlobDescription:
    from llog.engines.object.description import describe_blob

    return await describe_blob(log, log.blob_name(name))


def _show_object(partition: PartitionDescription) -> None:
    control = partition.control
    click.echo(f"{partition.topic}/{partition.partition}: {control.log_state}, in directory {partition.directory}")
    click.echo(f"  offsets     {control.log_start_offset} up to, without, {control.sequence_counter}")
    click.echo(f"  newest      {shown_time(control.max_timestamp_ms) or 'none'}")
    if control.pending is not None:
        click.echo(f"  pending     offsets {control.pending.start_offset} to {control.pending.end_offset}")
    click.echo(f"  compacted   up to, without, offset {partition.cursor}")
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
                shown_time(each.entry.append_ms),
                each.entry.data_uri,
            ]
            for each in partition.entries
        ]
        print_table(columns, rows, numbers=["FIRST", "LAST", "BYTES"])
    if partition.more_from is not None:
        click.echo(f"more index entries from offset {partition.more_from} on: --from-offset {partition.more_from}")


def _show_disk(partition: DiskDescription) -> None:
    click.echo(f"{partition.topic}/{partition.partition}: on disk, in directory {partition.directory}")
    click.echo(f"  offsets     {partition.log_start_offset} up to, without, {partition.next_offset}")
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
                shown_time(each.append_ms),
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
    click.echo(f"  offsets     {state.log_start_offset} up to, without, {state.next_offset}")
    click.echo(f"  newest      {shown_time(state.timestamp_ms) or 'none'}")
    if state.has_gaps:
        click.echo(f"  compacted   by key, up to offset {state.compacted_through}")
    if state.producers:
        click.echo(f"  producers   {len(state.producers)}")
    if partition.records:
        columns = ["OFFSET", "BYTES", "TIMESTAMP", "APPENDED"]
        rows = [
            [each.offset, format_size(each.bytes), shown_time(each.timestamp_ms), shown_time(each.append_ms)]
            for each in partition.records
        ]
        print_table(columns, rows, numbers=columns[:2])
    if partition.more_from is not None:
        click.echo(f"more records from offset {partition.more_from} on: --from-offset {partition.more_from}")
