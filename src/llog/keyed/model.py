"""The data that callers of a keyed log pass and get, and the checks of what they pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Final, NamedTuple, TypeAlias

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from llog.batch.columns import COLUMN_BYTES_MAX
from llog.errors import InvalidArgument, RecordTooLarge

KEY_BYTES_MAX: Final = 64 << 10
VALUE_BYTES_MAX: Final = 16 << 20
NUMBER_MAX: Final = (1 << 63) - 1
"""The highest sequence, segment id or time: Arrow, Spark and JSON readers hold them as signed numbers."""


class Record(NamedTuple):
    """A value to append to its key's log. Any pair of bytes can take its place."""

    key: bytes
    value: bytes


class LogEntry(NamedTuple):
    """A record of a key's log."""

    key: bytes
    sequence: int
    value: bytes


class SeqRange(NamedTuple):
    """Sequences (or segment ids) from `start` up to, but excluding, `end`; None is open. A range that ends before it
    starts is empty.
    """

    start: int | None = None
    end: int | None = None


class TimeRange(NamedTuple):
    """Append times in ms since 1970 from `start` up to, but excluding, `end`; None is open."""

    start: int | None = None
    end: int | None = None


class KeyRange(NamedTuple):
    """Keys from `start` up to, but excluding, `end`, in the order of their bytes; None is open."""

    start: bytes | None = None
    end: bytes | None = None


ALL: Final = SeqRange()
Ranges = SeqRange | range | None
Records: TypeAlias = "Iterable[tuple[bytes, bytes]] | pa.RecordBatch | pa.Table"


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """One segment. A sealed segment ends, in sequences and time, where the next one starts; the active one ends at the
    log's next sequence.
    """

    segment_id: int
    start_seq: int
    end_seq: int
    start_time_ms: int
    end_time_ms: int | None
    """None if the segment is active, and still grows."""
    records: int
    size: int
    """Bytes of keys and values, a key counted with each of its records."""
    user_meta: bytes | None = None


class WriteOptions(msgspec.Struct, frozen=True):
    await_durable: bool = True
    """If False, the append returns before it is durable, and is lost if the writer dies or is fenced before a
    `flush`.
    """


class ScanOptions(msgspec.Struct, frozen=True):
    time_range: TimeRange = TimeRange()
    """Only records appended in this range. Segments of other times are not read."""
    limit: int | None = None
    """The maximum number of records."""
    durable: bool = True
    """If False, also yields this writer's appends that are not durable yet. Other processes never see those."""
    batch_bytes: int = 8 << 20
    """About how many bytes are read and yielded at a time."""


class CountOptions(msgspec.Struct, frozen=True):
    approximate: bool = False
    """If True, decodes no run: the count is off by less than one run at each end of the range."""
    durable: bool = True


class StorageConfig(msgspec.Struct, frozen=True):
    """How SlateDB stores. None chooses a value that fits the address: local, or a bucket."""

    flush_interval: timedelta | None = None
    """How long appends accumulate before they are made durable together: 5 ms locally, 50 ms in a bucket."""
    refresh_interval: timedelta | None = None
    """How far a reader may lag behind the writer: 50 ms locally, 1 s in a bucket (each refresh costs requests)."""
    unflushed_bytes_max: int = 256 << 20
    """How many bytes may wait in memory for their table; beyond that, appends wait."""
    table_bytes: int = 32 << 20
    """About the size of a new table."""
    key_filter: bool = True
    """Whether tables have bloom filters on the log key, so that scans of a key skip tables without it. They cost the
    writer about 20 µs per entry.
    """
    counted_keys_max: int = 2_000_000
    """For how many keys the writer remembers the record count (about 200 bytes each); each other key costs a seek."""


class SegmentConfig(msgspec.Struct, frozen=True):
    """When to start a new segment: before the first append after one of these limits is reached. Without limits, only
    `seal_segment` starts one.
    """

    seal_interval: timedelta | None = None
    seal_bytes: int | None = None
    seal_records: int | None = None

    def __post_init__(self) -> None:
        interval = None if self.seal_interval is None else self.seal_interval.total_seconds()
        limits = {"seal_interval": interval, "seal_bytes": self.seal_bytes, "seal_records": self.seal_records}
        for name, limit in limits.items():
            if limit is not None and limit <= 0:
                raise InvalidArgument(f"{name} is {limit}: it must be more than zero, or None for no limit")


class RetentionConfig(msgspec.Struct, frozen=True):
    """The limits of `retain`. It deletes whole sealed segments, oldest first, and never the active one."""

    max_age: timedelta | None = None
    """Segments whose last record is older are deleted."""
    max_bytes: int | None = None
    """Segments are deleted while all together are larger."""

    def __post_init__(self) -> None:
        age = None if self.max_age is None else self.max_age.total_seconds()
        for name, limit in {"max_age": age, "max_bytes": self.max_bytes}.items():
            if limit is not None and limit < 0:
                raise InvalidArgument(f"{name} is {limit}: it must not be negative; None is no limit")


class Config(msgspec.Struct, frozen=True):
    storage: StorageConfig = StorageConfig()
    segmentation: SegmentConfig = SegmentConfig()
    retention: RetentionConfig = RetentionConfig()


def bounds_of(numbers: Ranges | TimeRange, what: str = "sequence") -> tuple[int, int]:
    """Return the start and end of a range, the end not below the start. Raises `InvalidArgument` if they are not whole
    numbers.
    """
    if numbers is None:
        return 0, NUMBER_MAX
    if isinstance(numbers, range):
        if numbers.step != 1:
            raise InvalidArgument(f"a range of {what}s has step {numbers.step}: only step 1 is possible")
        start, end = numbers.start, numbers.stop
    elif isinstance(numbers, SeqRange | TimeRange):
        start = 0 if numbers.start is None else numbers.start
        end = NUMBER_MAX if numbers.end is None else numbers.end
    else:
        raise InvalidArgument(f"a range of {what}s is {type(numbers).__name__}: use range, SeqRange or TimeRange")
    if type(start) is not int or type(end) is not int:
        raise InvalidArgument(f"a range of {what}s is from {start!r} to {end!r}: both must be whole numbers")
    start, end = max(start, 0), min(end, NUMBER_MAX)
    return start, max(start, end)


def check_key(key: bytes, what: str = "a key", most: int = KEY_BYTES_MAX) -> bytes:
    """Return the key, or raise if it is not bytes or is longer than 64 KiB. A key may be empty."""
    if not isinstance(key, bytes):
        raise InvalidArgument(f"{what} is {type(key).__name__}, not bytes")
    if len(key) > most:
        raise RecordTooLarge(f"{what} has {len(key)} bytes, more than {most}: shorten it")
    return key


def columns_of(records: Records) -> tuple[pa.BinaryArray, pa.BinaryArray]:
    """Return keys and values as Arrow columns, checked. Only Python pairs need a loop, to split them."""
    if isinstance(records, (pa.RecordBatch, pa.Table)):
        keys, values = _column(records, "key"), _column(records, "value")
    else:
        keys, values = _split_pairs(records)
    for what, array, limit in (("key", keys, KEY_BYTES_MAX), ("value", values, VALUE_BYTES_MAX)):
        if array.null_count:
            raise InvalidArgument(
                f"{array.null_count} records have no {what}: give every record one, which may be empty"
            )
        longest = pc.max(pc.binary_length(array)).as_py() or 0
        if longest > limit:
            raise RecordTooLarge(f"a {what} has {longest} bytes, more than {limit}: shorten it")
    return keys, values


def _split_pairs(records: Iterable[tuple[bytes, bytes]]) -> tuple[pa.BinaryArray, pa.BinaryArray]:
    try:
        records = list(records)  # an iterator, such as zip(), can be read only once
        keys = [key for key, _ in records]
        values = [value for _, value in records]
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"records are pairs of key and value, both bytes: {error}") from error
    for what, column in (("key", keys), ("value", values)):
        for kind in set(map(type, column)):
            if kind is not bytes:  # Arrow would accept text as bytes
                raise InvalidArgument(f"the {what} of a record is {kind.__name__}, not bytes")
    return _binary(keys), _binary(values)


def _binary(column: Sequence[bytes]) -> pa.BinaryArray:
    array = pa.array(column, pa.binary())
    if isinstance(array, pa.ChunkedArray):
        raise RecordTooLarge(f"{len(column)} records have more than {COLUMN_BYTES_MAX} bytes: append fewer at a time")
    return array


def _column(records: pa.RecordBatch | pa.Table, name: str) -> pa.BinaryArray:
    if name not in records.schema.names:
        raise InvalidArgument(f"records have columns {', '.join(records.schema.names)}, but none named {name!r}")
    column = records.column(name)
    kinds = (pa.binary(), pa.string(), pa.large_binary(), pa.large_string())
    if column.type not in kinds:
        raise InvalidArgument(f"column {name!r} of records is {column.type}: it must be binary or string")
    if column.nbytes > COLUMN_BYTES_MAX:
        raise RecordTooLarge(
            f"column {name!r} of records has more than {COLUMN_BYTES_MAX} bytes: append fewer at a time"
        )
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    return column if column.type == pa.binary() else column.cast(pa.binary())
