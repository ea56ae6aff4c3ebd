"""Keys, ranges and records of a keyed log, as the command line reads and prints them."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from llog.base.units import parse_base64url
from llog.cli.consume.command import parse_time_ms, write_out
from llog.errors import InvalidArgument

if TYPE_CHECKING:
    import pyarrow as pa

    from llog.config import Settings
    from llog.keyed import SeqRange, TimeRange

Pair = tuple[bytes, bytes]
Split = Callable[[bytes], Pair]


def key_or_prefix(key: str | None, prefix: str | None, as_base64: bool) -> tuple[bytes | None, bytes | None]:
    """Return key and prefix, one of which is None; `InvalidArgument` unless exactly one is given."""
    if key is not None and prefix is None:
        return key_bytes(key, as_base64), None
    if prefix is not None and key is None:
        return None, key_bytes(prefix, as_base64)
    raise InvalidArgument("give either KEY or --prefix (--prefix '' is every key)")


def key_bytes(text: str, as_base64: bool) -> bytes:
    return parse_base64url(text) if as_base64 else os.fsencode(text)


def parse_ranges(start: str | None, end: str | None) -> tuple[SeqRange, TimeRange]:
    """Return the ranges of sequences and of times that `--from` and `--to` name."""
    from llog.keyed import SeqRange, TimeRange

    (first, since), (last, until) = _parse_bound(start, "--from"), _parse_bound(end, "--to")
    return SeqRange(first, last), TimeRange(since, until)


def _parse_bound(text: str | None, option: str) -> tuple[int | None, int | None]:
    """Return a sequence, or a time in milliseconds; the other is None."""
    if text is None:
        return None, None
    if text.isascii() and text.isdecimal():
        return int(text), None
    try:
        return None, parse_time_ms(text)
    except InvalidArgument:
        raise InvalidArgument(
            f"{option} is {text[:40]!r}: write a sequence, or a time such as 2026-01-31T12:00:00Z"
        ) from None


async def pairs_of(given: Sequence[Pair], split: Split, settings: Settings) -> AsyncIterator[Sequence[Pair]]:
    """Yield the given pairs or, if there are none, those of standard input in batches."""
    from llog.cli.produce import line_batches

    if given:
        yield given
        return
    async for lines in line_batches((), settings):
        yield [split(line) for line in lines]


def splitter(separator: bytes) -> Split:
    """Return a function that splits a line at its first separator."""

    def split(line: bytes) -> Pair:
        key, found, value = line.partition(separator)
        if not found:
            raise InvalidArgument(
                f"the record {_excerpt(line)} has no key: {separator.decode(errors='replace')!r} is not in it. Correct "
                "the record, or --key-separator"
            )
        return key, value

    return split


def from_json(line: bytes) -> Pair:
    from llog.broker.http.json_records import JsonKeyedRecord, keyed_pairs_from_json

    try:
        record = msgspec.json.decode(line, type=JsonKeyedRecord)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgument(f'the record {_excerpt(line)} is not {{"key": …, "value": …}}: {error}') from None
    return keyed_pairs_from_json([record])[0]


def _excerpt(line: bytes) -> str:
    return repr(line[:60].decode(errors="replace"))


async def print_records(batches: AsyncIterator[pa.RecordBatch], form: str, max_records: int | None = None) -> None:
    """Print records as they arrive, up to `max_records`."""
    left = max_records
    async for batch in batches:
        if left is not None:
            batch = batch.slice(0, left)
            left -= batch.num_rows
        write_out(_format_records(batch, form))
        if left == 0:
            return


def _format_records(batch: Any, form: str) -> list[bytes]:
    if form == "json":
        from llog.broker.http.json_records import keyed_records_to_json

        return [msgspec.json.encode(each) + b"\n" for each in keyed_records_to_json(batch)]
    values = batch.column("value").to_pylist()
    if form == "value":
        return [value + b"\n" for value in values]
    return [key + b"\t" + value + b"\n" for key, value in zip(batch.column("key").to_pylist(), values, strict=True)]
