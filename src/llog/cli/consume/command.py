"""`llog consume`: records of a topic onto standard output."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Literal

import click
import msgspec

from llog.base.units import bytes_to_json, ms_of
from llog.cli.common import Invocation, note, partitions_of, with_log
from llog.errors import InvalidArgument, OffsetOutOfRange
from llog.model import Record, TopicPartition

if TYPE_CHECKING:
    from llog.config import Settings
    from llog.engines.port import LogReader
    from llog.log.log import Log

_WAIT_SECONDS = 30.0
_READ_BYTES = 4 << 20
_WRITE_BYTES = 64 << 10

Format = Callable[[TopicPartition, Record], bytes]


@click.command(short_help="Print records of a topic, once or as they come.")
@click.argument("topic")
@click.option(
    "--from",
    "start",
    metavar="WHERE",
    default="earliest",
    show_default=True,
    help="earliest, latest, an offset, or a time such as 2026-01-31T12:00:00Z (UTC unless it says otherwise).",
)
@click.option("--partition", type=int, help="Only this partition. Default: all of them.")
@click.option("--max", "max_records", type=click.IntRange(min=1), help="Stop after so many records.")
@click.option("--follow", "-f", is_flag=True, help="Wait for more instead of stopping at the end; end it with Ctrl-C.")
@click.option(
    "--format",
    "format_name",
    type=click.Choice(["value", "json", "kv"]),
    default="value",
    show_default=True,
    help="value: a line of payload each. kv: key, tab, payload. json: everything; bytes that are no text as base64.",
)
@click.option(
    "--group", help="As a member of this consumer group: what no other member has, acknowledged when it was printed."
)
@click.option(
    "--mode",
    type=click.Choice(["claimed", "assigned"]),
    help="How the group shares the topic out: each record to one member at a time, or each partition to one "
    "member, in order. "
    "Default: as the group does already, else claimed.",
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
    """Print the records of TOPIC, each partition in its order, up to the end there is when it begins.

    With --group, processes share the records of TOPIC with each other and with all other members of the group: each
    prints what it is given. Partitions in which the group has a position start there, and --from counts for the others.
    Records are acknowledged after they were written to stdout: those of a process that is killed in between are printed
    by another a minute later, never passed over.

    \b
      llog consume orders --from 2026-01-31T12:00:00Z --format json --max 10
      llog consume orders --group billing --follow
      llog consume orders --group billing --mode assigned --follow
    """
    if mode is not None and group is None:
        raise InvalidArgument("--mode is about a consumer group: name it with --group")

    async def consumed(log: Log, _: Settings) -> None:
        if group is None:
            await printed(log)
            return
        from llog.cli.consume.group import GroupPrinter, known_mode

        chosen = mode or await known_mode(log, topic, group)
        member = GroupPrinter(log, topic, group, chosen, partition, _FORMATS[format_name])
        await member.print_all(start, max_records, follow=follow)

    async def printed(log: Log) -> None:
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
            where = "earliest"  # of partitions that are added while it follows, everything is new
            await printer.any_more(positions)

    with_log(invocation, consumed, reads_only=True)


async def start_offset(reader: LogReader, tp: TopicPartition, where: str) -> int:
    """The offset that `earliest`, `latest`, an offset or a time means in this partition."""
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
    """ISO 8601, UTC unless it names another zone; else `InvalidArgument`."""
    try:
        return ms_of(datetime.fromisoformat(text))
    except ValueError:
        raise InvalidArgument(
            f"{text[:40]!r} is no place to start: write earliest, latest, an offset, or a time such as "
            "2026-01-31T12:00:00Z"
        ) from None


class _Printer:
    def __init__(self, reader: LogReader, write: Format, max_records: int | None) -> None:
        self._reader = reader
        self._format = write
        self._left = max_records

    @property
    def finished(self) -> bool:
        """As many were printed as were wanted."""
        return self._left == 0

    async def print_all(self, positions: dict[TopicPartition, int]) -> None:
        """Prints each partition up to its end, and moves the positions on."""
        for tp, position in positions.items():
            bounds = await self._reader.bounds(tp)
            if position < bounds.log_start_offset:
                note(f"llog: {tp}: offsets {position} to {bounds.log_start_offset - 1} are gone, by retention")
            positions[tp] = await self._print(tp, max(position, bounds.log_start_offset), bounds.next_offset)
            if self.finished:
                return

    async def any_more(self, positions: dict[TopicPartition, int]) -> None:
        """Returns when one of the partitions has a record at its position; after a while in any case."""
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
        """Prints up to `stop`, or to the last record wanted; returns the next offset."""
        from llog.batch.columns import records_of, slice_columns

        while offset < stop and self._left != 0:
            batches = await self._reader.read(tp, offset, _READ_BYTES, stop=stop)
            if not batches:  # what is left below `stop` was removed by key compaction
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
    """Onto stdout, and out of this process: an ACK after it must not run ahead of what was printed."""
    data = memoryview(b"".join(lines))
    # In pieces, for there are kernels on which a write succeeds whose reader went away while it waited: the next one
    # tells.
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
