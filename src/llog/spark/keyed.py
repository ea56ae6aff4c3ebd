"""The data source `llog-keyed`: batch reads of a keyed log, split by segment, as Arrow.

The plan of a read fixes its segments and its end, which is the next sequence at that time. A task reads its segments
up to that end or fails: it waits until it sees what the plan saw, and raises `DataLoss` if a segment was deleted since.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import msgspec
import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import BinaryType, LongType, StructField, StructType, TimestampType

from llog.api.portal import run
from llog.base.units import parse_base64url, parse_duration_ms, parse_size
from llog.config import Settings
from llog.config.loading import load_settings
from llog.config.locations import parse_address
from llog.errors import ConfigurationError, DataLoss, InvalidArgument
from llog.runtime import SystemRuntime
from llog.spark.schema import chosen_columns

if TYPE_CHECKING:
    from llog.keyed import KeyedLogReader, Segment, SeqRange, TimeRange

T = TypeVar("T")

SCHEMA: Final = StructType(
    [
        StructField("key", BinaryType()),
        StructField("sequence", LongType()),
        StructField("value", BinaryType()),
        StructField("append_time", TimestampType()),
        StructField("segment", LongType()),
    ]
)
KEY_TASKS_MAX: Final = 64
"""The most tasks that read one key: each of them opens the log, and a segment holds little of a key."""
_ARROW: Final = {
    "key": pa.binary(),
    "sequence": pa.int64(),
    "value": pa.binary(),
    "append_time": pa.timestamp("us", tz="UTC"),
    "segment": pa.int64(),
}
_NUMBER_MAX: Final = (1 << 63) - 1
_KEYS: Final = ("key", "keyBase64", "prefix", "prefixBase64")
_SEQUENCES: Final = ("startingSequence", "endingSequence")
_TIMES: Final = ("startingTimestamp", "endingTimestamp")
_OPTIONS: Final = ("url", *_KEYS, *_SEQUENCES, *_TIMES, "maxPartitionBytes")


class KeyedOptions(msgspec.Struct, frozen=True, kw_only=True):
    settings: Settings
    url: str
    key: bytes | None
    prefix: bytes
    """The prefix of the keys to read if `key` is None; an empty prefix selects every key."""
    sequences: tuple[int | None, int | None]
    times_ms: tuple[int | None, int | None]
    partition_bytes_max: int


class SegmentRange(NamedTuple):
    """Sequences [start, stop) of a segment."""

    segment_id: int
    start: int
    stop: int


class KeyedTask(InputPartition):  # type: ignore[misc]
    """The ranges that one Spark task reads."""

    def __init__(self, ranges: Sequence[SegmentRange]) -> None:
        super().__init__(None)
        self.ranges = tuple(ranges)


class LlogKeyedDataSource(DataSource):  # type: ignore[misc]
    """`spark.read.format("llog-keyed")`."""

    settings: Settings | None = None
    """The settings of the driver, which `register` adds."""

    @classmethod
    def name(cls) -> str:
        return "llog-keyed"

    def schema(self) -> StructType:
        """Return the schema. `load()` calls this unless the user names a schema: mistakes show up here first."""
        run(_check_log_exists(keyed_options(self.options, self.settings)))
        return SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:
        return LlogKeyedReader(keyed_options(self.options, self.settings), schema)


class LlogKeyedReader(DataSourceReader):  # type: ignore[misc]
    def __init__(self, options: KeyedOptions, schema: StructType) -> None:
        self._options = options
        self._columns = chosen_columns(schema, SCHEMA)

    def partitions(self) -> list[KeyedTask]:
        return run(_plan_tasks(self._options))

    def read(self, partition: KeyedTask) -> Iterator[pa.RecordBatch]:
        log = run(_open_reader(self._options))
        try:
            for wanted in partition.ranges:
                yield from self._read(log, wanted)
        finally:
            run(log.close())

    def _read(self, log: KeyedLogReader, wanted: SegmentRange) -> Iterator[pa.RecordBatch]:
        batches = run(_begin_scan(log, self._options, wanted))
        is_empty = True
        while (batch := run(_next_batch(batches))) is not None:
            is_empty = False
            yield to_arrow(batch, wanted.segment_id, self._columns)
        if is_empty and not run(_segment_exists(log, wanted)):
            raise DataLoss(
                f"segment {wanted.segment_id} of {log.url} was deleted before it was read: start the read again"
            )


def keyed_options(options: Mapping[str, str], settings: Settings | None = None) -> KeyedOptions:
    """Return the options of a read, checked without opening the log. Spark passes their names in lower case.

    `settings` are those of this process by default.
    """
    spelled = {name.lower(): name for name in _OPTIONS}
    for name in sorted(options):
        if name.lower() not in spelled:
            near = get_close_matches(name.lower(), spelled, 1)
            hint = f" (did you mean {spelled[near[0]]}?)" if near else ""
            raise ConfigurationError(
                f"option {name!r} is unknown for a read of llog-keyed{hint}. Known are: {', '.join(sorted(_OPTIONS))}"
            )
    given = {spelled[name.lower()]: value for name, value in options.items()}
    named = {"keyed": given["url"]} if "url" in given else {}
    settings = load_settings(named) if settings is None else msgspec.structs.replace(settings, **named)
    if settings.keyed is None:
        raise ConfigurationError(
            "no keyed log is named: give the option url (file:///absolute/dir or s3://bucket/prefix), or set LLOG_KEYED"
        )
    if parse_address("keyed", settings.keyed).scheme == "memory":
        raise ConfigurationError(
            f"the keyed log at {settings.keyed} lives in one process, and Spark runs in several: name another by "
            "the option url"
        )
    if sum(name in given for name in _KEYS) > 1:
        raise ConfigurationError(f"give one of the options {', '.join(_KEYS)}, or none of them to read every key")
    key = given["key"].encode() if "key" in given else _parse_option(given, "keyBase64", parse_base64url)
    prefix = given["prefix"].encode() if "prefix" in given else _parse_option(given, "prefixBase64", parse_base64url)
    start, end = (_parse_option(given, name, _parse_sequence) for name in _SEQUENCES)
    since, until = (_parse_option(given, name, _parse_time_ms) for name in _TIMES)
    size = _parse_option(given, "maxPartitionBytes", parse_size)
    return KeyedOptions(
        settings=settings,
        url=settings.keyed,
        key=key,
        prefix=prefix or b"",
        sequences=(start, end),
        times_ms=(since, until),
        partition_bytes_max=128 << 20 if size is None else size,
    )


def pack_tasks(segments: Sequence[Segment], end: int, options: KeyedOptions) -> list[KeyedTask]:
    """Return tasks of neighbouring segments, each up to `partition_bytes_max`.

    For a single key, segments are packed into at most `KEY_TASKS_MAX` tasks.
    """
    start, stop = options.sequences
    low, high = start or 0, min(end, _NUMBER_MAX if stop is None else stop)
    per_task = -(-len(segments) // KEY_TASKS_MAX) if options.key is not None else len(segments)
    tasks: list[list[SegmentRange]] = []
    size = 0
    for segment in segments:
        wanted = SegmentRange(segment.segment_id, max(low, segment.start_seq), min(high, segment.end_seq))
        if wanted.start >= wanted.stop or not segment.records:
            continue
        # A read of one key reads little of a segment, whatever its size.
        fits = options.key is not None or size + segment.size <= options.partition_bytes_max
        if tasks and fits and len(tasks[-1]) < per_task:
            tasks[-1].append(wanted)
            size += segment.size
        else:
            tasks.append([wanted])
            size = segment.size
    # Without a task, Spark would create one of its own, which has no ranges.
    return [KeyedTask(ranges) for ranges in tasks or [[]]]


def to_arrow(batch: pa.RecordBatch, segment_id: int, columns: Sequence[str]) -> pa.RecordBatch:
    """Return the batch in the types that Spark expects; keys and values are not copied."""
    arrays = []
    for name in columns:
        if name == "segment":
            arrays.append(pa.array(np.full(batch.num_rows, segment_id, dtype=np.int64)))
        else:
            arrays.append(batch.column(name).cast(_ARROW[name]))
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema([(name, _ARROW[name]) for name in columns]))


async def _open_reader(options: KeyedOptions) -> KeyedLogReader:
    from llog.keyed import KeyedLogReader

    return await KeyedLogReader.open(options.url, settings=options.settings)


async def _check_log_exists(options: KeyedOptions) -> None:
    """Raise if the keyed log does not exist."""
    await (await _open_reader(options)).close()


async def _plan_tasks(options: KeyedOptions) -> list[KeyedTask]:
    async with await _open_reader(options) as log:
        end = await log.next_sequence()
        return pack_tasks(await log.segments(*_ranges(options)), end, options)


def _ranges(options: KeyedOptions) -> tuple[SeqRange, TimeRange]:
    from llog.keyed import SeqRange, TimeRange

    return SeqRange(*options.sequences), TimeRange(*options.times_ms)


async def _begin_scan(
    log: KeyedLogReader, options: KeyedOptions, wanted: SegmentRange
) -> AsyncIterator[pa.RecordBatch]:
    from llog.keyed import ScanOptions, SeqRange
    from llog.keyed.follower import wait_for_sequence

    await wait_for_sequence(log, wanted.stop)
    sequences, scan_options = SeqRange(wanted.start, wanted.stop), ScanOptions(time_range=_ranges(options)[1])
    if options.key is not None:
        return log.scan_batches(options.key, sequences, scan_options)
    return log.scan_prefix_batches(options.prefix, sequences, scan_options)


async def _next_batch(batches: AsyncIterator[pa.RecordBatch]) -> pa.RecordBatch | None:
    return await anext(batches, None)


async def _segment_exists(log: KeyedLogReader, wanted: SegmentRange) -> bool:
    segments = await log.segments(range(wanted.start, wanted.stop))
    return any(segment.segment_id == wanted.segment_id for segment in segments)


def _parse_option(given: Mapping[str, str], name: str, parse: Callable[[str], T]) -> T | None:
    if name not in given:
        return None
    try:
        return parse(given[name])
    except InvalidArgument as error:
        raise ConfigurationError(f"option {name}: {error}") from error


def _parse_sequence(text: str) -> int:
    if not (text.isascii() and text.strip().isdecimal()) or int(text) > _NUMBER_MAX:
        raise InvalidArgument(f"{text[:40]!r} is not a sequence: write a whole number from 0")
    return int(text)


def _parse_time_ms(text: str) -> int:
    """Return the milliseconds since 1970 of a time, which may be a time ago such as -10m."""
    if text.startswith("-"):
        return max(0, SystemRuntime().now_ms() - parse_duration_ms(text[1:]))
    if not (text.isascii() and text.strip().isdecimal()) or int(text) > _NUMBER_MAX:
        raise InvalidArgument(f"{text[:40]!r} is not a time: write ms since 1970, or a time ago such as -10m")
    return int(text)
