"""`KeyedLogReader`: everything that can be read of a keyed log, from any process, while its writer writes.

A reader sees the log as it was at most its refresh interval ago. It only ever sees whole appends, in the order of their
sequences, and a segment that is deleted meanwhile either whole or not at all.
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
    escaped,
    listing_key,
    newer,
    segment_key,
    sequence_suffix,
)
from llog.keyed.listing import Listing, merged
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
    checked_key,
)
from llog.keyed.runs import peek, sequences_of
from llog.keyed.scanner import batches, entries_of, limited
from llog.keyed.segments import Bounds, Segments, state_of
from llog.keyed.slate import Database, Place, Rows, exists, locate, open_view, refresh_interval
from llog.runtime import Runtime, SystemRuntime

Found = AsyncIterator[pa.RecordBatch]
COUNTS_AT_ONCE: Final = 16
PLAIN: Final = ScanOptions()


class KeyedLogReader:
    """All reads. Made by `open`; used on the event loop that opened it, in the process that did."""

    def __init__(self, database: Database, place: Place, config: Config, runtime: Runtime) -> None:
        self.url = place.url
        self.segments_read = 0
        """How many segments all scans and counts have looked into: what a range costs."""
        self._database = database
        self._place = place
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
        """`KeyedLogNotFound` if there is none yet, `WrongStore` if there is something else or a newer format.

        The credentials of a bucket are those of `settings`, by default of the `LLOG_…` variables.
        """
        config = config or Config()
        place = locate(url, settings)
        if not await exists(place):
            raise KeyedLogNotFound(f"there is no keyed log at {url}: its writer makes it")
        database = await open_view(place, config.storage)
        try:
            if not await has_begun(database):
                raise KeyedLogNotFound(f"the keyed log at {url} is not begun yet: its writer does that")
            reader = cls(database, place, config, runtime or SystemRuntime())
            await reader._segments.refresh(database)
        except BaseException:
            with suppress(LlogError):
                await database.close()
            raise
        return reader

    async def close(self) -> None:
        """Idempotent. Calls after it are refused."""
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
        """SlateDB's counters by name and labels, among them the requests to the object store."""
        return self._database.metrics()

    # One key's log

    async def scan(
        self, key: bytes, seq_range: Ranges = None, *, time_range: TimeRange | None = None
    ) -> AsyncIterator[LogEntry]:
        """The records of `key` in the order of their sequences. An empty or inverted range has none."""
        async for batch in self.scan_batches(key, seq_range, _options(time_range)):
            for entry in entries_of(batch):
                yield entry

    async def scan_with_options(self, key: bytes, seq_range: Ranges, options: ScanOptions) -> AsyncIterator[LogEntry]:
        async for batch in self.scan_batches(key, seq_range, options):
            for entry in entries_of(batch):
                yield entry

    def scan_batches(self, key: bytes, seq_range: Ranges = None, options: ScanOptions = PLAIN) -> Found:
        """The same as Arrow batches with the columns key, sequence, value and append_time."""
        checked_key(key)
        bounds = bounds_of(seq_range)

        def rows(segment_id: int, durable: bool) -> Awaitable[Rows]:
            return self._database.rows_of(entry_prefix(segment_id, key), sequence_suffix(bounds[0]), durable=durable)

        return self._scan(rows, bounds, options, one_key=True)

    async def count(self, key: bytes, seq_range: Ranges = None, approximate: bool = False) -> int:
        """How many records `scan` would yield, without scanning: two seeks at most for each segment."""
        return await self.count_with_options(key, seq_range, CountOptions(approximate=approximate))

    async def count_with_options(self, key: bytes, seq_range: Ranges, options: CountOptions) -> int:
        checked_key(key)
        bounds = bounds_of(seq_range)
        segments = await self._segments_now()
        wanted = [(each, segments.meta(each).start_seq, segments.end_seq(each)) for each in segments.within(bounds)]
        total = 0
        for start in range(0, len(wanted), COUNTS_AT_ONCE):
            some = wanted[start : start + COUNTS_AT_ONCE]
            total += sum(await asyncio.gather(*(self._counted(key, bounds, options, *each) for each in some)))
        return total

    # Many keys

    async def scan_prefix(
        self, prefix: bytes, seq_range: Ranges = None, *, time_range: TimeRange | None = None
    ) -> AsyncIterator[LogEntry]:
        """The records of all keys that begin with `prefix`: by segment, in it by key, of a key by sequence."""
        async for batch in self.scan_prefix_batches(prefix, seq_range, _options(time_range)):
            for entry in entries_of(batch):
                yield entry

    def scan_prefix_batches(self, prefix: bytes, seq_range: Ranges = None, options: ScanOptions = PLAIN) -> Found:
        checked_key(prefix, "a prefix")
        start = escaped(prefix)

        def rows(segment_id: int, durable: bool) -> Awaitable[Rows]:
            first = segment_key(ENTRY, segment_id) + start
            return self._database.rows(first, after_prefix(first), durable=durable)

        return self._scan(rows, bounds_of(seq_range), options, one_key=False)

    async def scan_keys(
        self, key_range: KeyRange, seq_range: Ranges = None, *, time_range: TimeRange | None = None
    ) -> AsyncIterator[LogEntry]:
        """The records of a range of keys, in the order of `scan_prefix`."""
        async for batch in self.scan_keys_batches(key_range, seq_range, _options(time_range)):
            for entry in entries_of(batch):
                yield entry

    def scan_keys_batches(self, key_range: KeyRange, seq_range: Ranges = None, options: ScanOptions = PLAIN) -> Found:
        start, end = _key_bounds(key_range)

        def rows(segment_id: int, durable: bool) -> Awaitable[Rows]:
            last = after_prefix(segment_key(ENTRY, segment_id)) if end is None else entry_prefix(segment_id, end)
            return self._database.rows(entry_prefix(segment_id, start), last, durable=durable)

        bounds = bounds_of(seq_range) if end is None or start < end else (0, 0)
        return self._scan(rows, bounds, options, one_key=False)

    async def keys(self, prefix: bytes = b"", segment_range: Ranges = None) -> AsyncIterator[bytes]:
        """The distinct keys that begin with `prefix` and have records in these segments, in the order of their
        bytes.
        """
        async for page in self.keys_batches(prefix, segment_range):
            for key in page.to_pylist():
                yield key

    async def keys_batches(self, prefix: bytes = b"", segment_range: Ranges = None) -> AsyncIterator[pa.BinaryArray]:
        """The same as Arrow arrays."""
        checked_key(prefix, "a prefix")
        segments = await self._segments_now()
        listings = []
        for segment_id in segments.within(ids=bounds_of(segment_range, "segment")):
            first = listing_key(segment_id, prefix)
            listings.append(Listing(await self._database.rows(first, after_prefix(first))))
            if not await self._is_live(segment_id):
                listings.pop()
        async for page in merged(listings):
            yield pa.array(page, pa.binary())

    # Segments

    async def segments(self, seq_range: Ranges = None, time_range: TimeRange | None = None) -> list[Segment]:
        """The segments that may hold records of these ranges, oldest first."""
        segments = await self._segments_now()
        wanted = segments.within(bounds_of(seq_range), bounds_of(time_range, "time"))
        return [segments.described(segment_id) for segment_id in wanted]

    async def next_sequence(self) -> int:
        """The sequence after the last durable record. All below it can be read; the next append gets this or a higher
        one.
        """
        return (await self._segments_now()).next_seq

    # Following

    async def tail(
        self, key: bytes | None = None, *, prefix: bytes | None = None, after: int | None = None
    ) -> AsyncIterator[LogEntry]:
        """Records of a key, or of all keys with a prefix, in the order of their sequences, for ever.

        It begins behind the sequence `after`: whoever passes the last one it has dealt with goes on without loss or
        repetition. -1 begins with the oldest record there is, None with the next one appended. Deleted segments are
        passed over.
        """
        async for batch in self.tail_batches(key, prefix=prefix, after=after):
            for entry in entries_of(batch):
                yield entry

    def tail_batches(self, key: bytes | None = None, *, prefix: bytes | None = None, after: int | None = None) -> Found:
        """The same as Arrow batches."""
        if (key is None) == (prefix is None):
            raise InvalidArgument("a tail follows either a key or a prefix: give one of them")
        if after is not None and (type(after) is not int or after < -1):
            raise InvalidArgument(
                f"a tail begins after sequence {after!r}: it must be a sequence, or -1 for the oldest record"
            )
        if key is not None:
            checked_key(key)
            return follower.follow_key(self, key, after)
        assert prefix is not None
        return follower.follow_prefix(self, checked_key(prefix, "a prefix"), after)

    async def wait(self) -> None:
        """Until there may be more to read."""
        await self._runtime.sleep(refresh_interval(self._place, self._config.storage).total_seconds())

    # What a writer knows better

    async def _segments_now(self) -> Segments:
        self._check_open()
        await self._segments.refresh(self._database)
        return self._segments

    async def _is_live(self, segment_id: int) -> bool:
        """Asked after rows were opened: if the segment is not deleted now, none of its entries was gone then."""
        return segment_id >= (await state_of(self._database)).first_id

    def _check_open(self) -> None:
        if self._closed:
            raise StoreUnavailable(f"the keyed log at {self.url} is closed: open it again")

    def _visible_end(self, durable: bool) -> int:
        """Sequences below it may be yielded: a scan goes from segment to segment, and must not pass over one that comes
        later.
        """
        return NUMBER_MAX

    # How it is read

    def _scan(
        self, rows: Callable[[int, bool], Awaitable[Rows]], bounds: Bounds, options: ScanOptions, *, one_key: bool
    ) -> Found:
        times = bounds_of(options.time_range, "time")

        async def found() -> Found:
            segments = await self._segments_now()
            sequences = (bounds[0], min(bounds[1], self._visible_end(options.durable)))
            for segment_id in segments.within(sequences, times):
                opened = await rows(segment_id, options.durable)
                self.segments_read += 1
                if await self._is_live(segment_id):
                    async for batch in batches(opened, sequences, times, options, one_key=one_key):
                        yield batch

        return limited(found(), options.limit)

    async def _counted(
        self, key: bytes, bounds: Bounds, options: CountOptions, segment_id: int, start_seq: int, end_seq: int
    ) -> int:
        self.segments_read += 1
        prefix = entry_prefix(segment_id, key)
        below = end_seq if bounds[1] >= end_seq else bounds[1]
        count = await self._count_below(prefix, None if below == end_seq else below, options)
        if count and bounds[0] > start_seq:
            # Records below the start that came since the first look: then there were none from the start on.
            count = max(0, count - await self._count_below(prefix, bounds[0], options))
        return count if await self._is_live(segment_id) else 0

    async def _count_below(self, prefix: bytes, sequence: int | None, options: CountOptions) -> int:
        """Records of a key in a segment below a sequence; None: all of them."""
        if sequence is not None:
            rows = await self._database.rows_of(prefix, sequence_suffix(sequence), durable=options.durable)
            row = await rows.first()
            if row is not None:
                head = peek(row.value)
                if sequence <= head.first:
                    within = 0
                elif options.approximate:
                    within = min(sequence - head.first, head.records)
                else:
                    within = int(np.searchsorted(sequences_of(row.value), sequence))
                return head.total - head.records + within
        rows = await self._database.rows_of(prefix, durable=options.durable, last_first=True)
        row = await rows.first()
        return 0 if row is None else peek(row.value).total


def _options(time_range: TimeRange | None) -> ScanOptions:
    return PLAIN if time_range is None else ScanOptions(time_range=time_range)


def _key_bounds(key_range: KeyRange) -> tuple[bytes, bytes | None]:
    if not isinstance(key_range, KeyRange):
        raise InvalidArgument(f"a range of keys is {type(key_range).__name__}: use KeyRange(start, end)")
    # One byte more than a key may have: behind the longest key is where the rest begins.
    start = checked_key(key_range.start or b"", "the start of a range of keys", KEY_BYTES_MAX + 1)
    end = key_range.end
    return start, None if end is None else checked_key(end, "the end of a range of keys", KEY_BYTES_MAX + 1)


async def has_begun(database: Database) -> bool:
    """Whether the log is made; `WrongStore` if the database is of a newer version or not a keyed log."""
    rows = await database.rows(b"\x00", None)
    first = await rows.first()
    if first is None:
        return False
    if await (await database.rows(BEYOND_KEYS, None)).first() is not None:
        raise newer(database.where, f"keys of version {BEYOND_KEYS[0]} or higher")
    check_marker(await database.get(MARKER_KEY), database.where)
    return True
