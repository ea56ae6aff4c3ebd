"""The read path: control record → index → ranged GET → batch.

A point read costs one get of the control record, one `ceiling` in the index and one ranged GET. A read that wants more
continues with pages of the index: it fetches the blobs of a page side by side, each with one GET for all that the page
wants of it. Nothing is cached, so a reader notices trims and deletions at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from itertools import chain, groupby
from typing import NamedTuple, Protocol

import msgspec

from llog.base.concurrency import gather_bounded
from llog.batch.columns import Columns, append_times, effective_timestamps, slice_columns
from llog.batch.encodings import decoder
from llog.batch.format import ENCODING
from llog.batch.multi_batch import positions
from llog.engines.object.control_record import decode_control
from llog.engines.object.partition_keys import keys_in
from llog.engines.reading import apply_timestamp_type, iter_from, read_offset
from llog.errors import (
    BlobNotFound,
    CorruptBatch,
    InconsistentReadState,
    LlogError,
    OffsetOutOfRange,
)
from llog.log.catalog import Catalog
from llog.log.engine import Batch, Bounds, PartitionView
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


class Reader:
    """Reads any partition of a log, from any process, while others write."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._catalog = Catalog(log)

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
        self, tp: TopicPartition, offset: int, max_bytes: int = 8 << 20, *, stop: int | None = None
    ) -> list[Batch]:
        """Return batches from `offset` on, at least one if any exists, up to about `max_bytes`; none at the next
        offset.

        No batch begins at `stop` or above; the last batch may reach beyond `stop`. Timestamps are of the topic's type.
        Stops before the first unreadable record; the next read raises.
        """
        return await read_confirming_errors(
            self._log.meta, lambda: self._read(tp, offset, max_bytes, stop), *_CONFIRMED_ERRORS
        )

    async def _read(self, tp: TopicPartition, offset: int, max_bytes: int, stop: int | None) -> list[Batch]:
        partition = await self._look_up(tp)
        next_offset = partition.control.next_offset
        _check_offset(tp, offset, partition.control, end_allowed=True)
        end = next_offset if stop is None else min(stop, next_offset)
        batches: list[Batch] = []
        size, page = 0, _PAGE_ENTRIES_FIRST
        while offset < end and (not batches or size < max_bytes):
            found: list[Batch] = []
            try:
                if batches:
                    found, length = await self._read_page(partition, offset, end, max_bytes - size, page)
                    page = min(4 * page, _PAGE_ENTRIES_MAX)
                if not found:
                    found, length = await self._read_at(partition, offset, max_bytes - size)
            except LlogError:
                if not batches:
                    raise
                break
            batches += [apply_timestamp_type(partition.topic, batch) for batch in found if batch.start_offset < end]
            offset, size = found[-1].end_offset + 1, size + length
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
        batches, _ = await self._read_at(partition, high, found.entry.byte_length)
        return _first_offset_at(batches, timestamp_ms, by)

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

    async def _look_up(self, tp: TopicPartition) -> _Partition:
        topic = await self._catalog.get(tp.topic)
        keys = keys_in(topic, tp.partition)
        return _Partition(tp, topic, keys, decode_control(tp, await self._log.meta.get(keys.control)))

    async def _read_at(self, partition: _Partition, offset: int, max_bytes: int) -> tuple[list[Batch], int]:
        """Return the batches from `offset` on in the span that covers it, and the number of bytes read.

        Reads up to about `max_bytes` in one request.
        """
        missing: dict[str, None] = {}
        for attempt in range(_RESOLVE_ATTEMPTS):
            if attempt:
                partition = await self._look_up(partition.tp)
                _check_offset(partition.tp, offset, partition.control, end_allowed=False)
            async for span in self._covering(partition, offset):
                parts = _parts_from(span, offset, max_bytes)
                try:
                    found = await self._fetch(parts)
                except BlobNotFound:
                    missing[span.entry.data_uri] = None
                    # The blob was compacted and collected since the lookup, or a stalled writer left the entry: then a
                    # higher entry covers the offset.
                    continue
                return _decode_parts(partition.tp, parts, found, offset), sum(map(len, found))
        named = f"blob {', '.join(missing)} is missing" if missing else "no index entry covers it"
        raise InconsistentReadState(
            f"offset {offset} of {partition.tp} cannot be read: {named}. `llog verify` shows all damage"
        )

    async def _read_page(
        self, partition: _Partition, offset: int, end: int, max_bytes: int, entries_max: int
    ) -> tuple[list[Batch], int]:
        """Return the batches from `offset` on of the next index entries, up to about `max_bytes`, and their bytes.

        Stops before the first batch that cannot be read. Returns none if that is the batch at `offset`: `_read_at`
        looks for another entry that covers it.
        """
        keys = partition.keys
        rows = await self._log.meta.range(keys.entry(offset), prefix_end(keys.index), entries_max)
        spans = chain(map(span_of, rows), pending_spans(partition.control) if len(rows) < entries_max else ())
        parts = _consecutive_parts(spans, offset, end, max_bytes)
        blobs = [list(same) for _, same in groupby(parts, lambda part: part.entry.data_uri)]
        fetched = await gather_bounded(self._fetch_or_error, blobs, _GETS_MAX)
        batches: list[Batch] = []
        size = 0
        for same, found in zip(blobs, fetched, strict=True):
            if isinstance(found, LlogError):
                break
            try:
                batches += _decode_parts(partition.tp, same, found, offset)
            except LlogError:
                break
            size += sum(map(len, found))
            offset = batches[-1].end_offset + 1
            if offset <= same[-1].end_offset:
                break
        return batches, size

    async def _fetch(self, parts: Sequence[EntrySpan]) -> list[Buffer]:
        """Return the bytes of parts of one blob; only those of the first part if the blob is too short for the rest."""
        blob = self._log.blob_name(parts[0].entry.data_uri)
        ranges = [(part.entry.byte_offset, part.entry.byte_length) for part in parts]
        try:
            return list(await self._log.blobs.get_ranges(blob, ranges))
        except CorruptBatch:
            return list(await self._log.blobs.get_ranges(blob, ranges[:1]))

    async def _fetch_or_error(self, parts: Sequence[EntrySpan]) -> list[Buffer] | LlogError:
        try:
            return await self._fetch(parts)
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


class ByteRange(Protocol):
    """The bytes of a blob that hold records: of an index entry, or of an extent of a snapshot."""

    @property
    def data_uri(self) -> str: ...
    @property
    def byte_offset(self) -> int: ...
    @property
    def byte_length(self) -> int: ...
    @property
    def encoding(self) -> str: ...


def decode_range(
    tp: TopicPartition, start_offset: int, end_offset: int, byte_range: ByteRange, data: bytes | bytearray | memoryview
) -> Columns:
    """Decode the records of these offsets and check their number against the index; errors name the blob."""
    last_byte = byte_range.byte_offset + byte_range.byte_length
    where = f"blob {byte_range.data_uri} (bytes {byte_range.byte_offset} to {last_byte})"
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


def _parts_from(span: EntrySpan, offset: int, max_bytes: int) -> list[EntrySpan]:
    """Return the span's parts from the one that covers `offset` on, at least one, up to `max_bytes`."""
    parts: list[EntrySpan] = []
    size = 0
    for part in parts_of(span):
        if part.end_offset < offset:
            continue
        if parts and size + part.entry.byte_length > max_bytes:
            break
        parts.append(part)
        size += part.entry.byte_length
    return parts


def _consecutive_parts(spans: Iterable[EntrySpan], offset: int, end: int, max_bytes: int) -> list[EntrySpan]:
    """Return the parts that follow one another from `offset` on, up to `end` and about `max_bytes`.

    The spans come by rising end: of several that cover an offset, the first counts.
    """
    parts: list[EntrySpan] = []
    for span in spans:
        if span.start_offset <= offset <= span.end_offset:
            for part in _parts_from(span, offset, max_bytes):
                parts.append(part)
                max_bytes -= part.entry.byte_length
                offset = part.end_offset + 1
            if offset >= end or max_bytes <= 0:
                break
    return parts


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
