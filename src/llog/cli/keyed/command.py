"""`llog keyed`: a log for every key."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, TypeVar

import click
import msgspec

from llog.base.units import bytes_to_json, format_size
from llog.cli.common import Invocation, format_time, json_option, note, print_json, print_table
from llog.cli.consume.command import write_out
from llog.cli.keyed.records import from_json, key_bytes, key_or_prefix, pairs_of, parse_ranges, print_records, splitter
from llog.errors import ConfigurationError, InvalidArgument, LogNotFound
from llog.log.opening import opened_owners

if TYPE_CHECKING:
    from llog.config import Settings
    from llog.keyed import KeyedLog, KeyedLogReader

R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., object])

url_option = click.option("--url", metavar="URL", help="The keyed log, e.g. file:///var/llog/keyed (LLOG_KEYED).")
prefix_option = click.option("--prefix", metavar="TEXT", help="Select all keys that begin with this; '' for every key.")
base64_option = click.option("--base64", "as_base64", is_flag=True, help="Read the key or prefix as base64url.")
take_over_option = click.option(
    "--take-over", is_flag=True, help="Write even if another process writes the log; that process is fenced."
)
format_option = click.option(
    "--format",
    "form",
    type=click.Choice(["kv", "value", "json"]),
    default="kv",
    show_default=True,
    help="How to print a record. kv: key, tab, value. value: its value. json: everything, with bytes that are not "
    "text as base64.",
)


def range_options(command: F) -> F:
    """Add the options `--from` and `--to`."""
    what = "a sequence, or a time such as 2026-01-31T12:00:00Z"
    start = click.option("--from", "start", metavar="WHERE", help=f"Where to start: {what}.")
    end = click.option("--to", "end", metavar="WHERE", help=f"Where to stop, itself not included: {what}.")
    return start(end(command))


@click.group(short_help="Append to, scan and follow a keyed log.")
def keyed() -> None:
    """Append to, scan and follow a keyed log: one log for every key, for millions of keys.

    --url or LLOG_KEYED names the keyed log. It has one writer at a time: while a broker writes it, `append` and `seal`
    are refused with the broker's address. For a keyed log in a bucket, LLOG_META must name the metadata store of its
    brokers, which records the writer; if no broker serves the log, use --take-over. Reading is always possible.

    \b
      export LLOG_KEYED=file:///var/llog/keyed
      printf 'sensor-1\\t20.5\\nsensor-2\\t19\\n' | llog keyed append
      llog keyed scan sensor-1
    """


@keyed.command(short_help="Append records of stdin or arguments.")
@click.argument("records", nargs=-1)
@url_option
@click.option("--key-separator", metavar="TEXT", default="\t", help="The text between key and value.  [default: a tab]")
@click.option(
    "--format",
    "form",
    type=click.Choice(["kv", "json"]),
    default="kv",
    show_default=True,
    help='The format of a record. kv: key, separator, value. json: {"key": …, "value": …}, with bytes that are not '
    'text as {"base64": …}.',
)
@take_over_option
@click.pass_obj
def append(
    invocation: Invocation, records: tuple[str, ...], url: str | None, key_separator: str, form: str, take_over: bool
) -> None:
    """Append RECORDS, or the lines of standard input: each is a key, a tab and a value, or JSON.

    Records are appended in their order and in batches; a batch is appended as a whole or not at all. The summary on
    stderr counts the durable records, also after a failure.

    \b
      llog keyed append --key-separator = sensor-1=20.5 sensor-2=19
      llog keyed append --format json < records.jsonl
    """
    if key_separator == "":
        raise InvalidArgument("--key-separator is empty: name the text between key and value")
    split = from_json if form == "json" else splitter(os.fsencode(key_separator))
    given = [split(os.fsencode(record)) for record in records]  # before another writer is fenced

    async def append_records(log: KeyedLog, settings: Settings) -> None:
        total, size, appends = 0, 0, 0
        try:
            async for pairs in pairs_of(given, split, settings):
                await log.append(pairs)
                total, appends = total + len(pairs), appends + 1
                size += sum(len(key) + len(value) for key, value in pairs)
        finally:
            note(f"appended {total} records ({format_size(size)}) to {log.url} in {appends} appends")

    _with_writer(invocation, url, append_records, take_over=take_over)


@keyed.command(short_help="Print the records of a key, or of all keys with a prefix.")
@click.argument("key", required=False)
@prefix_option
@base64_option
@range_options
@click.option("--limit", type=click.IntRange(min=1), help="Stop after this many records.")
@format_option
@url_option
@click.pass_obj
def scan(
    invocation: Invocation,
    key: str | None,
    prefix: str | None,
    as_base64: bool,
    start: str | None,
    end: str | None,
    limit: int | None,
    form: str,
    url: str | None,
) -> None:
    """Print the records of KEY in the order of their sequences.

    With --prefix, print the records of all matching keys, by segment and within a segment by key.

    \b
      llog keyed scan sensor-1 --from 2026-01-31T12:00:00Z --limit 10
      llog keyed scan --prefix sensor- --format json
    """
    one, many = key_or_prefix(key, prefix, as_base64)
    sequences, times = parse_ranges(start, end)

    async def scan_records(log: KeyedLogReader, _: Settings) -> None:
        from llog.keyed import ScanOptions

        options = ScanOptions(time_range=times, limit=limit)
        if one is not None:
            await print_records(log.scan_batches(one, sequences, options), form)
        else:
            await print_records(log.scan_prefix_batches(many or b"", sequences, options), form)

    _with_reader(invocation, url, scan_records)


@keyed.command(short_help="Count the records of a key.")
@click.argument("key")
@base64_option
@click.option("--from", "start", type=click.IntRange(min=0), help="The first sequence to count.")
@click.option("--to", "end", type=click.IntRange(min=0), help="The sequence to stop at, itself not included.")
@click.option("--approximate", is_flag=True, help="Read less; the count may be off by up to one run at each end.")
@url_option
@click.pass_obj
def count(
    invocation: Invocation,
    key: str,
    as_base64: bool,
    start: int | None,
    end: int | None,
    approximate: bool,
    url: str | None,
) -> None:
    """Print the number of records of KEY.

    The records are not scanned: counting a million costs the same as counting a thousand.

    \b
      llog keyed count sensor-1 --from 1000
    """
    wanted = key_bytes(key, as_base64)

    async def count_records(log: KeyedLogReader, _: Settings) -> int:
        from llog.keyed import SeqRange

        return await log.count(wanted, SeqRange(start, end), approximate)

    click.echo(_with_reader(invocation, url, count_records))


@keyed.command(short_help="List the keys.")
@prefix_option
@base64_option
@click.option(
    "--from-segment", type=click.IntRange(min=0), help="Skip keys without records in this segment or a later one."
)
@click.option("--limit", type=click.IntRange(min=1), help="Stop after this many keys.")
@click.option(
    "--json", "as_json", is_flag=True, help='Print each key as JSON, with keys that are not text as {"base64": …}.'
)
@url_option
@click.pass_obj
def keys(
    invocation: Invocation,
    prefix: str | None,
    as_base64: bool,
    from_segment: int | None,
    limit: int | None,
    as_json: bool,
    url: str | None,
) -> None:
    """Print every key on a line of its own, in the order of their bytes.

    \b
      llog keyed keys --prefix sensor- --limit 100
    """
    wanted = key_bytes(prefix or "", as_base64)

    async def list_keys(log: KeyedLogReader, _: Settings) -> None:
        from llog.keyed import SeqRange

        left = limit
        async for page in log.keys_batches(wanted, SeqRange(from_segment)):
            found = page.to_pylist()[:left]
            write_out([(msgspec.json.encode(bytes_to_json(key)) if as_json else key) + b"\n" for key in found])
            if left is not None:
                left -= len(found)
                if left == 0:
                    return

    _with_reader(invocation, url, list_keys)


@keyed.command(short_help="List the segments.")
@range_options
@json_option
@url_option
@click.pass_obj
def segments(invocation: Invocation, start: str | None, end: str | None, as_json: bool, url: str | None) -> None:
    """List the segments, or those that may hold records of a range.

    \b
      llog keyed segments --from 2026-01-31T12:00:00Z
    """
    sequences, times = parse_ranges(start, end)

    async def list_segments(log: KeyedLogReader, _: Settings) -> None:
        found = await log.segments(sequences, times)
        if as_json:
            print_json([msgspec.structs.asdict(each) | {"user_meta": bytes_to_json(each.user_meta)} for each in found])
            return
        columns = ["segment", "sequences", "records", "size", "started", "sealed", "user meta"]
        rows = [
            [
                each.segment_id,
                f"{each.start_seq} to {each.end_seq - 1}" if each.records else "",
                each.records,
                format_size(each.size),
                format_time(each.start_time_ms),
                format_time(each.end_time_ms),
                None if each.user_meta is None else each.user_meta.decode(errors="backslashreplace"),
            ]
            for each in found
        ]
        print_table(columns, rows, numbers=["segment", "records", "size"])

    _with_reader(invocation, url, list_segments)


@keyed.command(short_help="Seal the active segment and start the next one.")
@click.option("--user-meta", metavar="TEXT", help="A text to store with the sealed segment.")
@url_option
@take_over_option
@click.pass_obj
def seal(invocation: Invocation, user_meta: str | None, url: str | None, take_over: bool) -> None:
    """Seal the active segment, start the next one, and print the id of the sealed one."""

    async def seal_segment(log: KeyedLog, _: Settings) -> int:
        return await log.seal_segment(None if user_meta is None else os.fsencode(user_meta))

    click.echo(_with_writer(invocation, url, seal_segment, take_over=take_over))


@keyed.command(short_help="Print records as they are appended.")
@click.argument("key", required=False)
@prefix_option
@base64_option
@click.option(
    "--after",
    type=click.IntRange(min=-1),
    help="Start after this sequence; -1 starts at the oldest record.  [default: only new records]",
)
@click.option("--max", "max_records", type=click.IntRange(min=1), help="Stop after this many records.")
@format_option
@url_option
@click.pass_obj
def tail(
    invocation: Invocation,
    key: str | None,
    prefix: str | None,
    as_base64: bool,
    after: int | None,
    max_records: int | None,
    form: str,
    url: str | None,
) -> None:
    """Print the records of KEY, or of all keys with --prefix, in the order of their sequences, until Ctrl-C.

    To continue without loss or repetition, pass the last sequence that was printed as --after (--format json shows
    sequences).

    \b
      llog keyed tail --prefix sensor- --after -1 --format json
    """
    one, many = key_or_prefix(key, prefix, as_base64)

    async def follow(log: KeyedLogReader, _: Settings) -> None:
        await print_records(log.tail_batches(one, prefix=many, after=after), form, max_records)

    _with_reader(invocation, url, follow)


def _with_reader(
    invocation: Invocation, url: str | None, operation: Callable[[KeyedLogReader, Settings], Awaitable[R]]
) -> R:
    async def run() -> R:
        from llog.keyed import KeyedLogReader

        settings, address = _settings(invocation, url)
        async with await KeyedLogReader.open(address, settings=settings) as log:
            return await operation(log, settings)

    return asyncio.run(run())


def _with_writer(
    invocation: Invocation,
    url: str | None,
    operation: Callable[[KeyedLog, Settings], Awaitable[R]],
    *,
    take_over: bool,
) -> R:
    async def run() -> R:
        from llog.keyed import KeyedLog

        settings, address = _settings(invocation, url)
        async with AsyncExitStack() as stack:
            owners = None
            with suppress(LogNotFound):
                owners = await stack.enter_async_context(opened_owners(settings))
            opening = KeyedLog.open(address, settings=settings, owners=owners, take_over=take_over)
            return await operation(await stack.enter_async_context(await opening), settings)

    return asyncio.run(run())


def _settings(invocation: Invocation, url: str | None) -> tuple[Settings, str]:
    """Return the settings and the address of the keyed log; `ConfigurationError` if none is named."""
    settings = msgspec.structs.replace(invocation, overrides=invocation.overrides | {"keyed": url}).settings()
    if settings.keyed is None:
        raise ConfigurationError(
            "no keyed log is named: give --url file:///absolute/dir or s3://bucket/prefix, or set LLOG_KEYED"
        )
    return settings, settings.keyed
