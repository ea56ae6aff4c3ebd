"""The read path: control record → index → ranged GET → batch.

A point read costs one get of the control record, one `ceiling` in the index and one ranged GET. A read that wants more
continues with pages of the index: it fetches the blobs of a page side by side, each with one GET for all that the page
wants of it. Reads that are under way together share their GETs (`blob_reads.py`). Nothing is cached, so a reader
notices trims and deletions at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from itertools import chain, groupby
from typing import NamedTuple

import msgspec

from llog.base.concurrency import gather_bounded
from llog.batch.columns import Columns, append_times, effective_timestamps, slice_columns
from llog.batch.encodings import decoder
from llog.batch.format import ENCODING
from llog.batch.multi_batch import positions
from llog.engines.object.blob_reads import BlobRead, BlobReads
from llog.engines.object.control_record import decode_control
from llog.engines.object.entry_bytes import ByteRange, location_of
from llog.engines.object.partition_keys import keys_in
from llog.engines.reading import apply_timestamp_type, iter_from, read_offset
from llog.errors import (
    BlobNotFound,
    CorruptBatch,
    InconsistentReadState,
    LlogError,
    OffsetOutOfRange,
    PartitionNotInitialized,
)
from llog.log.catalog import Catalog
from llog.log.engine import Batch, Bounds, PartitionView
from llog.log.inline import from_inline, is_inline
from llog.log.keys import PartitionKeys, end_offset_of
from llog.log.log import Log
from llog.log.records import Control, IndexEntry, Topic, decode
from llog.model import Record, TimestampType, TopicPartition
from llog.stores.blobs import Buffer
from llog.stores.meta import MetaEntry, prefix_end, read_confirming_errors

_BOUNDS_PAGE = 1000
_RESOLVE_ATTEMPTS = 3
_COVERING_MAX = 64
_PAGE_ENTRIES_FIRST = 8
_PAGE_ENTRIES_MAX = 128
_GETS_MAX = 16
"""Blobs of a page that are fetched at the same time."""
_GET_BYTES_MIN = 4 << 20
"""Bytes of a large blob that are worth a GET, for a read that may return as many."""
_CONFIRMED_ERRORS = (OffsetOutOfRange, InconsistentReadState)
"""Errors that a stale read may cause: each is raised only after a second, confirmed look."""


class EntrySpan(NamedTuple):
    """An index entry and the offsets that it covers."""

    start_offset: int
    end_offset: int
    entry: IndexEntry


class _Partition(NamedTuple):
    """A partition as one look at its metadata found it."""

    tp: TopicPartition
    topic: Topic
    keys: PartitionKeys
    control: Control


class _Wanted(NamedTuple):
    """What a read wants now: the records from `offset` on and below `end`, about `max_bytes` of them."""

    offset: int
    end: int
    max_bytes: int


class _Found(NamedTuple):
    """Batches that follow one another, and the number of bytes that were read for them."""

    batches: list[Batch]
    size: int


class KnownPartition(NamedTuple):
    """A partition that the caller of a read has looked up. The read looks again where the control record is too old."""

    topic: Topic
    control: Control

    def of(self, tp: TopicPartition) -> _Partition:
        return _Partition(tp, self.topic, keys_in(self.topic, tp.partition), self.control)


class Reader:
    """Reads any partition of a log, from any process, while others write."""

    def __init__(self, log: Log, blob_reads: BlobReads | None = None) -> None:
        """Readers with the same `blob_reads` share their GETs."""
        self._log = log
        self._catalog = Catalog(log)
        self._blob_reads = blob_reads or BlobReads(log.blobs)

    async def bounds(self, tp: TopicPartition) -> Bounds:
        return (await self.view(tp)).bounds

    async def view(self, tp: TopicPartition) -> PartitionView:
        keys, control = await self.control(tp)
        return PartitionView(keys.directory, Bounds(control.log_start_offset, control.next_offset))

    async def topic_bounds(self, topic: Topic) -> list[Bounds]:
        """Return the bounds of all partitions, in order, in few round trips."""
        tps = [TopicPartition(topic.name, partition) for partition in range(topic.partitions)]
        bounds: list[Bounds] = []
        for first in range(0, len(tps), _BOUNDS_PAGE):
            page = tps[first : first + _BOUNDS_PAGE]
            found = await self._log.meta.get_many([keys_in(topic, tp.partition).control for tp in page])
            bounds += [Bounds(each.log_start_offset, each.next_offset) for each in map(decode_control, page, found)]
        return bounds

    async def read(
        self,
        tp: TopicPartition,
        offset: int,
        max_bytes: int = 8 << 20,
        *,
        stop: int | None = None,
        known: KnownPartition | None = None,
    ) -> list[Batch]:
        """Return batches from `offset` on, at least one if any exists, up to about `max_bytes`; none at the next
        offset.

        No batch begins at `stop` or above; the last batch may reach beyond `stop`. Timestamps are of the topic's type.
        Stops before the first unreadable record; the next read raises. A partition that is `known` is not looked up
        first; `PartitionNotInitialized` if it turns out that its topic was created again.
        """
        given = [] if known is None else [known]
        with self._blob_reads.begin() as blobs:

            async def read() -> list[Batch]:
                directory = known and known.topic.directory
                partition = given.pop().of(tp) if given else await self._look_up(tp, directory)
                return await self._read(blobs, partition, offset, max_bytes, stop)

            return await read_confirming_errors(self._log.meta, read, *_CONFIRMED_ERRORS)

    async def _read(
        self, blobs: BlobRead, partition: _Partition, offset: int, max_bytes: int, stop: int | None
    ) -> list[Batch]:
        tp = partition.tp
        next_offset = partition.control.next_offset
        _check_offset(tp, offset, partition.control, end_allowed=True)
        end = next_offset if stop is None else min(stop, next_offset)
        batches: list[Batch] = []
        size, page = 0, _PAGE_ENTRIES_FIRST
        while offset < end and (not batches or size < max_bytes):
            wanted = _Wanted(offset, end, max_bytes - size)
            try:
                found = await self._read_page(blobs, partition, wanted, page) if batches else _Found([], 0)
                if found is None:
                    break
                if batches:
                    page = min(4 * page, _PAGE_ENTRIES_MAX)
                if not found.batches:
                    found = await self._read_at(blobs, partition, wanted)
            except LlogError:
                if not batches:
                    raise
                break
            batches += [apply_timestamp_type(partition.topic, each) for each in found.batches]
            offset, size = found.batches[-1].end_offset + 1, size + found.size
        return batches

    async def read_offset(self, tp: TopicPartition, offset: int) -> Record:
        return await read_offset(self, tp, offset)

    def iter_from(self, tp: TopicPartition, offset: int, stop: int | None = None) -> AsyncIterator[Batch]:
        """Iterate over the batches from `offset` up to `stop` (exclusive), or to the end as of the first read."""
        return iter_from(self, tp, offset, stop)

    async def offset_for_time(self, tp: TopicPartition, timestamp_ms: int, by: TimestampType | None = None) -> int:
        """Return the first offset whose time is at or after `timestamp_ms`, or the next offset: O(log n) lookups.

        `by` defaults to the topic's timestamp type. Times are running maxima, so a late record does not count.
        """
        if by is None:
            by = (await self._catalog.get(tp.topic)).timestamp_type
        for _ in range(_RESOLVE_ATTEMPTS - 1):
            try:
                return await self._search(tp, timestamp_ms, by)
            except (InconsistentReadState, OffsetOutOfRange):
                pass  # Records were trimmed since the control record was read: search what is left.
        chosen = by
        return await read_confirming_errors(
            self._log.meta, lambda: self._search(tp, timestamp_ms, chosen), *_CONFIRMED_ERRORS
        )

    async def _search(self, tp: TopicPartition, timestamp_ms: int, by: TimestampType) -> int:
        partition = await self._look_up(tp)
        control = partition.control
        low, high = control.log_start_offset, control.next_offset
        found: EntrySpan | None = None
        while low < high:
            span = await self._resolve(partition, (low + high) // 2)
            entry = span.entry
            running = entry.max_append_ms if by is TimestampType.APPEND else entry.max_timestamp_ms
            if running < timestamp_ms:
                low = span.end_offset + 1
            else:
                high, found = max(span.start_offset, control.log_start_offset), span
        if found is None:
            return control.next_offset
        wanted = _Wanted(high, control.next_offset, found.entry.byte_length)
        with self._blob_reads.begin() as blobs:
            return _first_offset_at((await self._read_at(blobs, partition, wanted)).batches, timestamp_ms, by)

    async def wait(self, tp: TopicPartition, past_offset: int, timeout: float) -> bool:
        """Wait up to `timeout` seconds for a record at `past_offset`, appended by any process; return whether it
        exists.
        """
        keys, control = await self.control(tp)
        if control.next_offset > past_offset:
            return True
        try:
            async with asyncio.timeout(timeout):
                async for _ in self._log.meta.watch(keys.control):
                    _, control = await self.control(tp)
                    if control.next_offset > past_offset:
                        return True
        except TimeoutError:
            return False
        return False

    async def control(self, tp: TopicPartition) -> tuple[PartitionKeys, Control]:
        """Return the partition's keys and its present control record."""
        partition = await self._look_up(tp)
        return partition.keys, partition.control

    async def controls(self, tps: Sequence[TopicPartition]) -> list[tuple[PartitionKeys, Control]]:
        """Return what `control` returns for each of these partitions, in few round trips."""
        if not tps:
            return []
        topics = await self._catalog.find(sorted({tp.topic for tp in tps}))
        keys = []
        for tp in tps:
            topic = topics[tp.topic]
            if isinstance(topic, LlogError):
                raise topic
            keys.append(keys_in(topic, tp.partition))
        found = await self._log.meta.get_many([each.control for each in keys])
        return list(zip(keys, map(decode_control, tps, found), strict=True))

    async def _look_up(self, tp: TopicPartition, directory: str | None = None) -> _Partition:
        """Return the partition as it is now; raise `PartitionNotInitialized` if it has left this directory."""
        topic = await self._catalog.get(tp.topic)
        if directory not in (None, topic.directory):
            raise PartitionNotInitialized(f"partition {tp} was deleted, and its topic was created again")
        keys = keys_in(topic, tp.partition)
        return _Partition(tp, topic, keys, decode_control(tp, await self._log.meta.get(keys.control)))

    async def _read_at(self, blobs: BlobRead, partition: _Partition, wanted: _Wanted) -> _Found:
        """Return the wanted batches of the span that covers their first offset, by one request."""
        missing: dict[str, None] = {}
        offset = wanted.offset
        for attempt in range(_RESOLVE_ATTEMPTS):
            if attempt:
                partition = await self._look_up(partition.tp, partition.keys.directory)
                _check_offset(partition.tp, offset, partition.control, end_allowed=False)
            async for span in self._covering(partition, offset):
                parts = _wanted_parts(span, wanted)
                try:
                    data = await self._fetch(blobs, parts)
                except BlobNotFound:
                    missing[span.entry.data_uri] = None
                    # The blob was compacted and collected since the lookup, or a stalled writer left the entry: then a
                    # higher entry covers the offset.
                    continue
                return _Found(_decode_parts(partition.tp, parts, data, offset), sum(map(len, data)))
        named = f"blob {', '.join(missing)} is missing" if missing else "no index entry covers it"
        raise InconsistentReadState(
            f"offset {offset} of {partition.tp} cannot be read: {named}. `llog verify` shows all damage"
        )

    async def _read_page(
        self, blobs: BlobRead, partition: _Partition, wanted: _Wanted, entries_max: int
    ) -> _Found | None:
        """Return the wanted batches of the next index entries; None if so few are wanted that they are better read
        later, together with those that follow.

        Stops before the first batch that cannot be read. Finds none if that is the first one: `_read_at` looks for
        another entry that covers it.
        """
        keys = partition.keys
        rows = await self._log.meta.range(keys.entry(wanted.offset), prefix_end(keys.index), entries_max)
        spans = chain(map(span_of, rows), pending_spans(partition.control) if len(rows) < entries_max else ())
        parts = _consecutive_parts(spans, wanted)
        if parts is None:
            return None
        same_blob = [list(same) for _, same in groupby(parts, lambda part: part.entry.data_uri)]
        fetched = await gather_bounded(lambda same: self._fetch_or_error(blobs, same), same_blob, _GETS_MAX)
        batches: list[Batch] = []
        offset, size = wanted.offset, 0
        for same, data in zip(same_blob, fetched, strict=True):
            if isinstance(data, LlogError):
                break
            try:
                batches += _decode_parts(partition.tp, same, data, offset)
            except LlogError:
                break
            size += sum(map(len, data))
            offset = batches[-1].end_offset + 1
            if offset <= same[-1].end_offset:
                break
        return _Found(batches, size)

    async def _fetch(self, blobs: BlobRead, parts: Sequence[EntrySpan]) -> list[Buffer]:
        """Return the bytes of parts of one blob: all of them, or as many as the blob has; raise if it lacks the
        first.
        """
        data_uri = parts[0].entry.data_uri
        if is_inline(data_uri):
            return [from_inline(data_uri)] * len(parts)
        blob = self._log.blob_name(data_uri)
        found = await blobs.get_ranges(blob, [(part.entry.byte_offset, part.entry.byte_length) for part in parts])
        data: list[Buffer] = []
        for each in found:
            if isinstance(each, LlogError):
                if not data:
                    raise each
                break
            data.append(each)
        return data

    async def _fetch_or_error(self, blobs: BlobRead, parts: Sequence[EntrySpan]) -> list[Buffer] | LlogError:
        try:
            return await self._fetch(blobs, parts)
        except LlogError as error:
            return error

    async def _resolve(self, partition: _Partition, offset: int) -> EntrySpan:
        """Return the span of the lowest index entry that covers `offset`."""
        async for span in self._covering(partition, offset):
            return span
        raise InconsistentReadState(
            f"offset {offset} of {partition.tp} is below its next offset, but no index entry covers it"
        )

    async def _covering(self, partition: _Partition, offset: int) -> AsyncIterator[EntrySpan]:
        """Iterate over the spans that cover `offset`, by rising end: usually one."""
        end = prefix_end(partition.keys.index)
        found = await self._log.meta.ceiling(partition.keys.entry(offset))
        steps = 0
        while found is not None and found.key < end and steps < _COVERING_MAX:
            span = span_of(found)
            if span.start_offset <= offset:
                yield span
            found = await self._log.meta.ceiling(found.key + "\x00")
            steps += 1
        for span in pending_spans(partition.control):
            if span.start_offset <= offset <= span.end_offset:
                yield span


def decode_range(
    tp: TopicPartition, start_offset: int, end_offset: int, byte_range: ByteRange, data: bytes | bytearray | memoryview
) -> Columns:
    """Decode the records of these offsets and check their number against the index; errors name the place."""
    where = location_of(byte_range)
    try:
        columns = decoder(byte_range.encoding)(data)
    except CorruptBatch as error:
        raise CorruptBatch(f"offsets {start_offset} to {end_offset} of {tp} are damaged in {where}: {error}") from error
    expected = end_offset - start_offset + 1
    if columns.count != expected:
        raise InconsistentReadState(f"{where} holds {columns.count} records where the index of {tp} says {expected}")
    return columns


def decode_span(tp: TopicPartition, span: EntrySpan, data: bytes | bytearray | memoryview) -> Columns:
    return decode_range(tp, span.start_offset, span.end_offset, span.entry, data)


def parts_of(span: EntrySpan) -> list[EntrySpan]:
    """Split a span into one for each of its batches."""
    entry = span.entry
    if not entry.parts:
        return [span]
    spans, start = [], span.start_offset
    for position, (count, length) in zip(positions(entry.parts), entry.parts, strict=True):
        own = msgspec.structs.replace(
            entry,
            byte_offset=entry.byte_offset + position,
            byte_length=length,
            msg_count=count,
            encoding=ENCODING,
            parts=(),
        )
        spans.append(EntrySpan(start, start + count - 1, own))
        start += count
    return spans


def _wanted_parts(span: EntrySpan, wanted: _Wanted) -> list[EntrySpan]:
    """Return the span's parts from the one that covers the first wanted offset on: at least one.

    Takes the rest along if it would be a small GET, unless little is wanted anyway.
    """
    parts = [part for part in parts_of(span) if part.end_offset >= wanted.offset and part.start_offset < wanted.end]
    size, rest = 0, _byte_size(parts)
    for number, part in enumerate(parts, 1):
        size += part.entry.byte_length
        rest -= part.entry.byte_length
        if size >= wanted.max_bytes and (rest >= _GET_BYTES_MIN or wanted.max_bytes < _GET_BYTES_MIN):
            return parts[:number]
    return parts


def _consecutive_parts(spans: Iterable[EntrySpan], wanted: _Wanted) -> list[EntrySpan] | None:
    """Return the wanted parts, which follow one another; None if a small piece of one span is all that is wanted.

    The spans come by rising end: of several that cover an offset, the first counts.
    """
    parts: list[EntrySpan] = []
    for span in spans:
        if span.start_offset <= wanted.offset <= span.end_offset:
            found = _wanted_parts(span, wanted)
            size, following = _byte_size(found), found[-1].end_offset + 1
            if following <= span.end_offset and following < wanted.end and size < _GET_BYTES_MIN:
                return parts or None
            parts += found
            wanted = _Wanted(following, wanted.end, wanted.max_bytes - size)
            if following >= wanted.end or wanted.max_bytes <= 0:
                break
    return parts


def _byte_size(parts: Sequence[EntrySpan]) -> int:
    return sum(part.entry.byte_length for part in parts)


def _decode_parts(tp: TopicPartition, parts: Sequence[EntrySpan], found: Sequence[Buffer], offset: int) -> list[Batch]:
    """Decode the records from `offset` on. Stops before the first damaged part, and raises if that is the first
    one.
    """
    batches: list[Batch] = []
    for part, data in zip(parts, found, strict=False):
        try:
            columns = decode_span(tp, part, data)
        except LlogError:
            if not batches:
                raise
            break
        start = max(offset, part.start_offset)
        batches.append(Batch(tp, start, slice_columns(columns, start - part.start_offset, columns.count)))
        offset = part.end_offset + 1
    return batches


def _first_offset_at(batches: Sequence[Batch], timestamp_ms: int, by: TimestampType) -> int:
    for batch in batches:
        columns = batch.columns
        times = append_times(columns) if by is TimestampType.APPEND else effective_timestamps(columns).to_numpy()
        found = (times >= timestamp_ms).nonzero()[0]
        if len(found):
            return batch.start_offset + int(found[0])
    return batches[0].start_offset


def span_of(found: MetaEntry) -> EntrySpan:
    """Return the span of a stored index entry."""
    entry, end = decode(IndexEntry, found.value, found.key), end_offset_of(found.key)
    return EntrySpan(end - entry.msg_count + 1, end, entry)


def pending_spans(control: Control) -> list[EntrySpan]:
    spans: list[EntrySpan] = []
    if control.pending is not None:
        end = control.pending.start_offset - 1
        for entry in control.pending.entries:
            spans.append(EntrySpan(end + 1, end + entry.msg_count, entry))
            end += entry.msg_count
    return spans


def _check_offset(tp: TopicPartition, offset: int, control: Control, *, end_allowed: bool) -> None:
    high = control.next_offset + (1 if end_allowed else 0)
    if not control.log_start_offset <= offset < high:
        raise OffsetOutOfRange(str(tp), offset, control.log_start_offset, control.next_offset)
