"""`KeyedLogReader`: reads a keyed log from any process, while its writer writes.

A reader sees the log as it was at most its refresh interval ago. It sees only whole appends, in the order of their
sequences, and sees a segment that is deleted meanwhile either whole or not at all.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

import numpy as np
import pyarrow as pa

from llog.base.durable import OpenedFile
from llog.config import Settings
from llog.errors import InvalidArgument, KeyedLogNotFound, LlogError, StoreUnavailable
from llog.keyed import follower
from llog.keyed.encoding import (
    BEYOND_KEYS,
    ENTRY,
    MARKER_KEY,
    after_prefix,
    check_marker,
    entry_prefix,
    escape,
    listing_key,
    newer_format_error,
    segment_key,
    sequence_suffix,
)
from llog.keyed.listing import Listing, merge_listings
from llog.keyed.model import (
    KEY_BYTES_MAX,
    NUMBER_MAX,
    Config,
    CountOptions,
    KeyRange,
    LogEntry,
    Ranges,
    ScanOptions,
    Segment,
    TimeRange,
    bounds_of,
    check_key,
)
from llog.keyed.runs import decode_head, sequences_of
from llog.keyed.scanner import decode_rows, entries_of, limit_records
from llog.keyed.segments import Interval, Segments, state_of
from llog.keyed.slate import Database, DatabaseLocation, Rows, exists, locate, open_view, refresh_interval
from llog.runtime import Runtime, SystemRuntime

Batches = AsyncIterator[pa.RecordBatch]
COUNTS_AT_ONCE: Final = 16
DEFAULT_SCAN: Final = ScanOptions()


class KeyedLogReader:
    """Reads a keyed log. Create it with `open`, and use it on the event loop and in the process that opened it."""

    def __init__(self, database: Database, location: DatabaseLocation, config: Config, runtime: Runtime) -> None:
        self.url = location.url
        self.segments_read = 0
        """The number of segments that all scans and counts have read: the cost of their ranges."""
        self._database = database
        self._location = location
        self._config = config
        self._runtime = runtime
        self._segments = Segments()
        self._closed = False

    @classmethod
    async def open(
        cls,
        url: str,
        config: Config | None = None,
        *,
        settings: Settings | None = None,
        runtime: Runtime | None = None,
    ) -> Self:
        """Open a log for reading. Raises `KeyedLogNotFound` if there is none yet, and `WrongStore` if the address holds
        something else or a newer format.

        The credentials of a bucket come from `settings`, by default from the `LLOG_…` variables.
        """
        config = config or Config()
        location = locate(url, settings)
        if not await exists(location):
            raise KeyedLogNotFound(f"there is no keyed log at {url}: its first writer creates it")
        database = await open_view(location, config.storage)
        try:
            if not await is_initialized(database):
                raise KeyedLogNotFound(f"the keyed log at {url} is not complete yet: its first writer is creating it")
            reader = cls(database, location, config, runtime or SystemRuntime())
            await reader._segments.refresh(database)
        except BaseException:
            with suppress(LlogError):
                await database.close()
            raise
        return reader

    async def close(self) -> None:
        """Close the log; later calls raise. Idempotent."""
        if not self._closed:
            self._closed = True
            await self._database.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def file(self) -> OpenedFile | None:
        """The directory, if the log is in local files."""
        return self._database.file

    def metrics(self) -> dict[str, int]:
        """Return SlateDB's counters by name and labels, among them the requests to the object store."""
        return self._database.metrics()

    # One key's log

    async def scan(
        self, key: bytes, seq_range: Ranges = None, *, time_range: TimeRange | None = None
    ) -> AsyncIterator[LogEntry]:
        """Yield the records of `key` in the order of their sequences. An empty or inverted range has none."""
        async for batch in self.scan_batches(key, seq_range, scan_options(time_range)):
            for entry in entries_of(batch):
                yield entry

    async def scan_with_options(self, key: bytes, seq_range: Ranges, options: ScanOptions) -> AsyncIterator[LogEntry]:
        async for batch in self.scan_batches(key, seq_range, options):
            for entry in entries_of(batch):
                yield entry

    def scan_batches(self, key: bytes, seq_range: Ranges = None, options: ScanOptions = DEFAULT_SCAN) -> Batches:
        """Like `scan`, as Arrow batches with the columns key, sequence, value and append_time."""
        check_key(key)
        bounds = bounds_of(seq_range)

        def rows(segment_id: int, durable: bool) -> Awaitable[Rows]:
            return self._database.rows_with_prefix(
                entry_prefix(segment_id, key), sequence_suffix(bounds[0]), durable=durable
            )

        return self._scan(rows, bounds, options, one_key=True)

    async def count(self, key: bytes, seq_range: Ranges = None, approximate: bool = False) -> int:
        """Return how many records `scan` would yield, without scanning: at most two seeks per segment."""
        return await self.count_with_options(key, seq_range, CountOptions(approximate=approximate))

    async def count_with_options(self, key: bytes, seq_range: Ranges, options: CountOptions) -> int:
        check_key(key)
        bounds = bounds_of(seq_range)
        segments = await self._current_segments()
        wanted = [(each, segments.meta(each).start_seq, segments.end_seq(each)) for each in segments.within(bounds)]
        total = 0
        for start in range(0, len(wanted), COUNTS_AT_ONCE):
            some = wanted[start : start + COUNTS_AT_ONCE]
            total += sum(await asyncio.gather(*(self._count_in_segment(key, bounds, options, *each) for each in some)))
        return total

    # Many keys

    async def scan_prefix(
        self, prefix: bytes, seq_range: Ranges = None, *, time_range: TimeRange | None = None
    ) -> AsyncIterator[LogEntry]:
        """Yield the records of all keys that begin with `prefix`, ordered by segment, then key, then sequence."""
        async for batch in self.scan_prefix_batches(prefix, seq_range, scan_options(time_range)):
            for entry in entries_of(batch):
                yield entry

    def scan_prefix_batches(
        self, prefix: bytes, seq_range: Ranges = None, options: ScanOptions = DEFAULT_SCAN
    ) -> Batches:
        check_key(prefix, "a prefix")
        start = escape(prefix)

        def rows(segment_id: int, durable: bool) -> Awaitable[Rows]:
            first = segment_key(ENTRY, segment_id) + start
            return self._database.rows(first, after_prefix(first), durable=durable)

        return self._scan(rows, bounds_of(seq_range), options, one_key=False)

    async def scan_keys(
        self, key_range: KeyRange, seq_range: Ranges = None, *, time_range: TimeRange | None = None
    ) -> AsyncIterator[LogEntry]:
        """Yield the records of a range of keys, in the order of `scan_prefix`."""
        async for batch in self.scan_keys_batches(key_range, seq_range, scan_options(time_range)):
            for entry in entries_of(batch):
                yield entry

    def scan_keys_batches(
        self, key_range: KeyRange, seq_range: Ranges = None, options: ScanOptions = DEFAULT_SCAN
    ) -> Batches:
        start, end = _key_bounds(key_range)

        def rows(segment_id: int, durable: bool) -> Awaitable[Rows]:
            last = after_prefix(segment_key(ENTRY, segment_id)) if end is None else entry_prefix(segment_id, end)
            return self._database.rows(entry_prefix(segment_id, start), last, durable=durable)

        bounds = bounds_of(seq_range) if end is None or start < end else (0, 0)
        return self._scan(rows, bounds, options, one_key=False)

    async def keys(self, prefix: bytes = b"", segment_range: Ranges = None) -> AsyncIterator[bytes]:
        """Yield the distinct keys that begin with `prefix` and have records in these segments, in the order of their
        bytes.
        """
        async for page in self.keys_batches(prefix, segment_range):
            for key in page.to_pylist():
                yield key

    async def keys_batches(self, prefix: bytes = b"", segment_range: Ranges = None) -> AsyncIterator[pa.BinaryArray]:
        """Like `keys`, as Arrow arrays."""
        check_key(prefix, "a prefix")
        segments = await self._current_segments()
        listings = []
        for segment_id in segments.within(ids=bounds_of(segment_range, "segment")):
            first = listing_key(segment_id, prefix)
            listings.append(Listing(await self._database.rows(first, after_prefix(first))))
            if not await self._is_live(segment_id):
                listings.pop()
        async for page in merge_listings(listings):
            yield pa.array(page, pa.binary())

    # Segments

    async def segments(self, seq_range: Ranges = None, time_range: TimeRange | None = None) -> list[Segment]:
        """Return the segments that may hold records of these ranges, oldest first."""
        segments = await self._current_segments()
        wanted = segments.within(bounds_of(seq_range), bounds_of(time_range, "time"))
        return [segments.describe(segment_id) for segment_id in wanted]

    async def next_sequence(self) -> int:
        """Return the sequence after the last durable record. All records below it can be read; the next append gets
        this sequence or a higher one.
        """
        return (await self._current_segments()).next_seq

    # Following

    async def tail(
        self, key: bytes | None = None, *, prefix: bytes | None = None, after: int | None = None
    ) -> AsyncIterator[LogEntry]:
        """Yield the records of a key, or of all keys with a prefix, in the order of their sequences, for ever.

        The tail begins behind the sequence `after`: a caller that passes the last one it has processed continues
        without loss or repetition. -1 begins with the oldest record, None with the next one appended. Deleted segments
        are skipped.
        """
        async for batch in self.tail_batches(key, prefix=prefix, after=after):
            for entry in entries_of(batch):
                yield entry

    def tail_batches(
        self, key: bytes | None = None, *, prefix: bytes | None = None, after: int | None = None
    ) -> Batches:
        """Like `tail`, as Arrow batches."""
        if (key is None) == (prefix is None):
            raise InvalidArgument("a tail follows either a key or a prefix: give one of them")
        if after is not None and (type(after) is not int or after < -1):
            raise InvalidArgument(
                f"a tail begins after sequence {after!r}: it must be a sequence, or -1 for the oldest record"
            )
        if key is not None:
            check_key(key)
            return follower.follow_key(self, key, after)
        assert prefix is not None
        return follower.follow_prefix(self, check_key(prefix, "a prefix"), after)

    async def wait(self) -> None:
        """Wait until there may be more to read."""
        await self._runtime.sleep(refresh_interval(self._location, self._config.storage).total_seconds())

    # Overridden by the writer, which knows more

    async def _current_segments(self) -> Segments:
        self._check_open()
        await self._segments.refresh(self._database)
        return self._segments

    async def _is_live(self, segment_id: int) -> bool:
        """Whether the segment is not deleted. If it is live after its rows were opened, none of them was missing."""
        return segment_id >= (await state_of(self._database)).first_id

    def _check_open(self) -> None:
        if self._closed:
            raise StoreUnavailable(f"the keyed log at {self.url} is closed: open it again")

    def _visible_end(self, durable: bool) -> int:
        """Return the end of the sequences that a scan may yield: since it goes from segment to segment, it must not
        skip a record that becomes visible later.
        """
        return NUMBER_MAX

    # Scans and counts

    def _scan(
        self, rows: Callable[[int, bool], Awaitable[Rows]], bounds: Interval, options: ScanOptions, *, one_key: bool
    ) -> Batches:
        times = bounds_of(options.time_range, "time")

        async def read_segments() -> Batches:
            segments = await self._current_segments()
            sequences = (bounds[0], min(bounds[1], self._visible_end(options.durable)))
            for segment_id in segments.within(sequences, times):
                opened = await rows(segment_id, options.durable)
                self.segments_read += 1
                if await self._is_live(segment_id):
                    async for batch in decode_rows(opened, sequences, times, options, one_key=one_key):
                        yield batch

        return limit_records(read_segments(), options.limit)

    async def _count_in_segment(
        self, key: bytes, bounds: Interval, options: CountOptions, segment_id: int, start_seq: int, end_seq: int
    ) -> int:
        self.segments_read += 1
        prefix = entry_prefix(segment_id, key)
        below = end_seq if bounds[1] >= end_seq else bounds[1]
        count = await self._count_below(prefix, None if below == end_seq else below, options)
        if count and bounds[0] > start_seq:
            # If this is negative, records below the start were appended since the first count, and none follow.
            count = max(0, count - await self._count_below(prefix, bounds[0], options))
        return count if await self._is_live(segment_id) else 0

    async def _count_below(self, prefix: bytes, sequence: int | None, options: CountOptions) -> int:
        """Count the records of a key in a segment below a sequence, or all if that is None."""
        if sequence is not None:
            rows = await self._database.rows_with_prefix(prefix, sequence_suffix(sequence), durable=options.durable)
            row = await rows.first()
            if row is not None:
                head = decode_head(row.value)
                if sequence <= head.first:
                    within = 0
                elif options.approximate:
                    within = min(sequence - head.first, head.records)
                else:
                    within = int(np.searchsorted(sequences_of(row.value), sequence))
                return head.total - head.records + within
        rows = await self._database.rows_with_prefix(prefix, durable=options.durable, last_first=True)
        row = await rows.first()
        return 0 if row is None else decode_head(row.value).total


def scan_options(time_range: TimeRange | None) -> ScanOptions:
    return DEFAULT_SCAN if time_range is None else ScanOptions(time_range=time_range)


def _key_bounds(key_range: KeyRange) -> tuple[bytes, bytes | None]:
    if not isinstance(key_range, KeyRange):
        raise InvalidArgument(f"a range of keys is {type(key_range).__name__}: use KeyRange(start, end)")
    # One byte more than a key may have, so that a range can begin right behind the longest key.
    start = check_key(key_range.start or b"", "the start of a range of keys", KEY_BYTES_MAX + 1)
    end = key_range.end
    return start, None if end is None else check_key(end, "the end of a range of keys", KEY_BYTES_MAX + 1)


async def is_initialized(database: Database) -> bool:
    """Whether the database holds a keyed log. Raises `WrongStore` if it is of a newer version, or something else."""
    rows = await database.rows(b"\x00", None)
    first = await rows.first()
    if first is None:
        return False
    if await (await database.rows(BEYOND_KEYS, None)).first() is not None:
        raise newer_format_error(database.where, f"keys of version {BEYOND_KEYS[0]} or higher")
    check_marker(await database.get(MARKER_KEY), database.where)
    return True
