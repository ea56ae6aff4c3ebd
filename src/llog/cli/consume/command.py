"""`llog consume`: prints the records of a topic."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Literal

import click
import msgspec

from llog.base.units import bytes_to_json, epoch_ms
from llog.cli.common import Invocation, note, partitions_of, with_log
from llog.errors import InvalidArgument, OffsetOutOfRange
from llog.model import Record, TopicPartition

if TYPE_CHECKING:
    from llog.config import Settings
    from llog.log.engine import LogReader
    from llog.log.log import Log

_WAIT_SECONDS = 30.0
_READ_BYTES = 4 << 20
_WRITE_BYTES = 64 << 10

Format = Callable[[TopicPartition, Record], bytes]


@click.command(short_help="Print the records of a topic, once or as they arrive.")
@click.argument("topic")
@click.option(
    "--from",
    "start",
    metavar="WHERE",
    default="earliest",
    show_default=True,
    help="Where to start: earliest, latest, an offset, or a time such as 2026-01-31T12:00:00Z (UTC unless it names "
    "another zone).",
)
@click.option("--partition", type=int, help="The partition to print.  [default: all of them]")
@click.option("--max", "max_records", type=click.IntRange(min=1), help="Stop after this many records.")
@click.option("--follow", "-f", is_flag=True, help="Wait for more records at the end, until Ctrl-C.")
@click.option(
    "--format",
    "format_name",
    type=click.Choice(["value", "json", "kv"]),
    default="value",
    show_default=True,
    help="How to print a record. value: its value. kv: key, tab, value. json: everything, with bytes that are not "
    "text as base64.",
)
@click.option(
    "--group", help="Consume as a member of this consumer group, and acknowledge records once they are printed."
)
@click.option(
    "--mode",
    type=click.Choice(["claimed", "assigned"]),
    help="How the group divides the topic. claimed: each record goes to one member at a time. assigned: each "
    "partition goes to one member, in order.  [default: as the group does already, else claimed]",
)
@click.pass_obj
def consume(
    invocation: Invocation,
    topic: str,
    start: str,
    partition: int | None,
    max_records: int | None,
    follow: bool,
    format_name: str,
    group: str | None,
    mode: Literal["claimed", "assigned"] | None,
) -> None:
    """Print the records of TOPIC, each partition in its order, up to the end at the time of the call.

    With --group, all members of the group share the records of TOPIC: each process prints the records that the group
    delivers to it. Partitions in which the group has a position start there; --from applies to the others. Records are
    acknowledged after they were written to stdout: if a process is killed before, another one prints them a minute
    later. No record is skipped.

    \b
      llog consume orders --from 2026-01-31T12:00:00Z --format json --max 10
      llog consume orders --group billing --follow
      llog consume orders --group billing --mode assigned --follow
    """
    if mode is not None and group is None:
        raise InvalidArgument("--mode is for a consumer group: name it with --group")

    async def print_topic(log: Log, _: Settings) -> None:
        if group is None:
            await print_without_group(log)
            return
        from llog.cli.consume.group import GroupPrinter, current_mode

        chosen = mode or await current_mode(log, topic, group)
        member = GroupPrinter(log, topic, group, chosen, partition, _FORMATS[format_name])
        await member.print_all(start, max_records, follow=follow)

    async def print_without_group(log: Log) -> None:
        from llog.engines.routing import EngineReader

        reader = EngineReader(log)
        printer = _Printer(reader, _FORMATS[format_name], max_records)
        positions: dict[TopicPartition, int] = {}
        where = start
        while True:
            for tp in await partitions_of(log, topic, partition):
                if tp not in positions:
                    positions[tp] = await start_offset(reader, tp, where)
            await printer.print_all(positions)
            if not follow or printer.finished:
                return
            where = "earliest"  # every record of a partition that is added meanwhile is new
            await printer.wait_for_more(positions)

    with_log(invocation, print_topic, reads_only=True)


async def start_offset(reader: LogReader, tp: TopicPartition, where: str) -> int:
    """Return the offset that `earliest`, `latest`, an offset or a time stands for in this partition."""
    bounds = await reader.bounds(tp)
    if where == "earliest":
        return bounds.log_start_offset
    if where == "latest":
        return bounds.next_offset
    if not where.isdecimal():
        return await reader.offset_for_time(tp, parse_time_ms(where))
    offset = int(where)
    if not bounds.log_start_offset <= offset <= bounds.next_offset:
        raise OffsetOutOfRange(str(tp), offset, *bounds)
    return offset


def parse_time_ms(text: str) -> int:
    """Return the milliseconds of a time in ISO 8601, which is in UTC unless it names another zone.

    Raises `InvalidArgument` for any other text.
    """
    try:
        return epoch_ms(datetime.fromisoformat(text))
    except ValueError:
        raise InvalidArgument(
            f"{text[:40]!r} is not a position: write earliest, latest, an offset, or a time such as "
            "2026-01-31T12:00:00Z"
        ) from None


class _Printer:
    def __init__(self, reader: LogReader, write: Format, max_records: int | None) -> None:
        self._reader = reader
        self._format = write
        self._left = max_records

    @property
    def finished(self) -> bool:
        """Whether `max_records` were printed."""
        return self._left == 0

    async def print_all(self, positions: dict[TopicPartition, int]) -> None:
        """Print each partition up to its end, and advance the positions."""
        for tp, position in positions.items():
            bounds = await self._reader.bounds(tp)
            if position < bounds.log_start_offset:
                note(f"llog: {tp}: offsets {position} to {bounds.log_start_offset - 1} are gone, by retention")
            positions[tp] = await self._print(tp, max(position, bounds.log_start_offset), bounds.next_offset)
            if self.finished:
                return

    async def wait_for_more(self, positions: dict[TopicPartition, int]) -> None:
        """Wait until one of the partitions has a record at its position, but no longer than `_WAIT_SECONDS`."""
        waits = [
            asyncio.ensure_future(self._reader.wait(tp, offset, _WAIT_SECONDS)) for tp, offset in positions.items()
        ]
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
        for wait in done:
            wait.result()

    async def _print(self, tp: TopicPartition, offset: int, stop: int) -> int:
        """Print the records up to `stop`, or until `max_records` were printed; return the next offset to print."""
        from llog.batch.columns import records_of, slice_columns

        while offset < stop and self._left != 0:
            batches = await self._reader.read(tp, offset, _READ_BYTES, stop=stop)
            if not batches:  # key compaction has removed the rest below `stop`
                return stop
            for batch in batches:
                count = min(batch.columns.count, stop - batch.start_offset)
                if self._left is not None:
                    count = min(count, self._left)
                    self._left -= count
                if count <= 0:
                    break
                records = records_of(slice_columns(batch.columns, 0, count), batch.start_offset)
                write_out([self._format(tp, each) for each in records])
                offset = batch.start_offset + count
        return offset


def write_out(lines: Sequence[bytes]) -> None:
    """Write the lines to stdout and flush it, so that an ACK never precedes the output of its records."""
    data = memoryview(b"".join(lines))
    # In pieces: on some kernels a write succeeds although its reader went away while it waited, and only the next one
    # fails.
    for start in range(0, len(data), _WRITE_BYTES):
        sys.stdout.buffer.write(data[start : start + _WRITE_BYTES])
    sys.stdout.buffer.flush()


def _value(_: TopicPartition, record: Record) -> bytes:
    return (record.payload or b"") + b"\n"


def _key_value(_: TopicPartition, record: Record) -> bytes:
    return (record.key or b"") + b"\t" + (record.payload or b"") + b"\n"


def _json(tp: TopicPartition, record: Record) -> bytes:
    shown = {
        "topic": tp.topic,
        "partition": tp.partition,
        "offset": record.offset,
        "timestamp": record.timestamp,
        "key": bytes_to_json(record.key),
        "value": bytes_to_json(record.payload),
    }
    if record.headers:
        shown["headers"] = [[name, bytes_to_json(value)] for name, value in record.headers]
    return msgspec.json.encode(shown) + b"\n"


_FORMATS: dict[str, Format] = {"value": _value, "kv": _key_value, "json": _json}
