"""The read path: control record → index → ranged GET → batch.

A point read costs one control get, one ceiling and one ranged GET. Nothing is cached: what was trimmed or deleted is
noticed at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple, Protocol

import msgspec

from llog.batch.codecs import decoder
from llog.batch.columns import Columns, append_times, effective_timestamps, slice_columns
from llog.batch.format import ENCODING
from llog.batch.joined import positions
from llog.engines.object.partition_keys import keys_in
from llog.engines.port import Batch, Bounds, Look
from llog.engines.reading import iter_from, read_offset, with_times_of
from llog.errors import (
    BlobNotFound,
    CorruptBatch,
    InconsistentReadState,
    LlogError,
    OffsetOutOfRange,
    PartitionNotInitialized,
)
from llog.log.catalog import Catalog
from llog.log.keys import PartitionKeys, end_offset_of
from llog.log.log import Log
from llog.log.records import Control, IndexEntry, LogState, Topic, decode
from llog.model import Record, TimestampType, TopicPartition
from llog.stores.blobs import Buffer
from llog.stores.meta import Entry, after, certain

_BOUNDS_PAGE = 1000
_RESOLVE_ATTEMPTS = 3
_COVERING_MAX = 64
_VERDICTS = (OffsetOutOfRange, InconsistentReadState)
"""What an old state of the metadata may look like: each is looked for again before it is raised."""


class Piece(NamedTuple):
    """Consecutive records and where they lie."""

    start_offset: int
    end_offset: int
    entry: IndexEntry


class Reader:
    """Reads any partition of a log, from any process, while others write."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._catalog = Catalog(log)

    async def bounds(self, tp: TopicPartition) -> Bounds:
        return (await self.look(tp)).bounds

    async def look(self, tp: TopicPartition) -> Look:
        keys, control = await self.control(tp)
        return Look(keys.directory, Bounds(control.log_start_offset, control.sequence_counter))

    async def topic_bounds(self, topic: Topic) -> list[Bounds]:
        """The bounds of all partitions, in their order, in few round trips."""
        tps = [TopicPartition(topic.name, partition) for partition in range(topic.partitions)]
        bounds: list[Bounds] = []
        for first in range(0, len(tps), _BOUNDS_PAGE):
            page = tps[first : first + _BOUNDS_PAGE]
            found = await self._log.meta.get_many([keys_in(topic, tp.partition).control for tp in page])
            bounds += [Bounds(each.log_start_offset, each.sequence_counter) for each in map(_control_in, page, found)]
        return bounds

    async def read(
        self, tp: TopicPartition, offset: int, max_bytes: int = 8 << 20, *, stop: int | None = None
    ) -> list[Batch]:
        """Batches from `offset` on, at least one if there is one, up to about `max_bytes`; none at the next offset.

        No batch begins at `stop` or above it; the last one may reach beyond. Timestamps are of the topic's kind.
        What cannot be read ends it, and is an error of the read that begins there: all before it can be had.
        """
        return await certain(self._log.meta, lambda: self._read(tp, offset, max_bytes, stop), *_VERDICTS)

    async def _read(self, tp: TopicPartition, offset: int, max_bytes: int, stop: int | None) -> list[Batch]:
        topic, keys, control = await self._looked_up(tp)
        _check_offset(tp, offset, control, end_allowed=True)
        batches: list[Batch] = []
        size = 0
        end = control.sequence_counter if stop is None else min(stop, control.sequence_counter)
        while offset < end and (not batches or size < max_bytes):
            try:
                found, length = await self._read_at(tp, keys, control, offset, max_bytes - size)
            except LlogError:
                if not batches:
                    raise
                break
            batches += [with_times_of(topic, batch) for batch in found if batch.start_offset < end]
            offset, size = found[-1].end_offset + 1, size + length
        return batches

    async def read_offset(self, tp: TopicPartition, offset: int) -> Record:
        return await read_offset(self, tp, offset)

    def iter_from(self, tp: TopicPartition, offset: int, stop: int | None = None) -> AsyncIterator[Batch]:
        """Batches from `offset` up to `stop` (exclusive), or to what was the end when this began."""
        return iter_from(self, tp, offset, stop)

    async def offset_for_time(self, tp: TopicPartition, timestamp_ms: int, by: TimestampType | None = None) -> int:
        """The first offset whose time is at or after this, the next offset if there is none: O(log n) lookups.

        `by` is the topic's own timestamp type unless given. Times are running maxima, so that a late record does not
        count.
        """
        if by is None:
            by = (await self._catalog.get(tp.topic)).timestamp_type
        for _ in range(_RESOLVE_ATTEMPTS - 1):
            try:
                return await self._search(tp, timestamp_ms, by)
            except (InconsistentReadState, OffsetOutOfRange):
                pass  # trimmed since the control record was read: search what is left
        chosen = by
        return await certain(self._log.meta, lambda: self._search(tp, timestamp_ms, chosen), *_VERDICTS)

    async def _search(self, tp: TopicPartition, timestamp_ms: int, by: TimestampType) -> int:
        keys, control = await self.control(tp)
        low, high = control.log_start_offset, control.sequence_counter
        found: Piece | None = None
        while low < high:
            piece = await self._resolve(tp, keys, control, (low + high) // 2)
            entry = piece.entry
            running = entry.max_append_ms if by is TimestampType.APPEND else entry.max_timestamp_ms
            if running < timestamp_ms:
                low = piece.end_offset + 1
            else:
                high, found = max(piece.start_offset, control.log_start_offset), piece
        if found is None:
            return control.sequence_counter
        batches, _ = await self._read_at(tp, keys, control, high, found.entry.byte_length)
        return _first_at(batches, timestamp_ms, by)

    async def wait(self, tp: TopicPartition, past_offset: int, timeout: float) -> bool:
        """Whether the partition has a record at `past_offset` within `timeout` seconds: wakes on an append of any
        process.
        """
        keys, control = await self.control(tp)
        if control.sequence_counter > past_offset:
            return True
        try:
            async with asyncio.timeout(timeout):
                async for _ in self._log.meta.watch(keys.control):
                    _, control = await self.control(tp)
                    if control.sequence_counter > past_offset:
                        return True
        except TimeoutError:
            return False
        return False

    async def control(self, tp: TopicPartition) -> tuple[PartitionKeys, Control]:
        """The partition's keys and its control record as it is now."""
        _, keys, control = await self._looked_up(tp)
        return keys, control

    async def controls(self, tps: Sequence[TopicPartition]) -> list[tuple[PartitionKeys, Control]]:
        """What `control` returns for each of these, in few round trips."""
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
        return list(zip(keys, map(_control_in, tps, found), strict=True))

    async def _looked_up(self, tp: TopicPartition) -> tuple[Topic, PartitionKeys, Control]:
        topic = await self._catalog.get(tp.topic)
        keys = keys_in(topic, tp.partition)
        return topic, keys, _control_in(tp, await self._log.meta.get(keys.control))

    async def _read_at(
        self, tp: TopicPartition, keys: PartitionKeys, control: Control, offset: int, max_bytes: int = 1
    ) -> tuple[list[Batch], int]:
        """Batches from `offset` on of the piece that covers it, in one request of up to about `max_bytes`, and its
        bytes.
        """
        missing: dict[str, None] = {}
        for attempt in range(_RESOLVE_ATTEMPTS):
            if attempt:
                keys, control = await self.control(tp)
                _check_offset(tp, offset, control, end_allowed=False)
            async for piece in self._covering(keys, control, offset):
                parts = _some_parts(piece, offset, max_bytes)
                try:
                    found = await self._fetch(parts)
                except BlobNotFound:
                    missing[piece.entry.data_uri] = None
                    # Compacted and collected since it was looked up, or a zombie's entry: a higher one covers it
                    continue
                return _decoded(tp, parts, found, offset), sum(map(len, found))
        named = f"blob {', '.join(missing)} is missing" if missing else "no index entry covers it"
        raise InconsistentReadState(f"offset {offset} of {tp} cannot be read: {named}. `llog verify` shows all damage")

    async def _fetch(self, parts: Sequence[Piece]) -> list[Buffer]:
        """The bytes of parts of one blob; only the first's if the blob is too short for the others."""
        blob = self._log.blob_name(parts[0].entry.data_uri)
        ranges = [(part.entry.byte_offset, part.entry.byte_length) for part in parts]
        try:
            return list(await self._log.blobs.get_ranges(blob, ranges))
        except CorruptBatch:
            return list(await self._log.blobs.get_ranges(blob, ranges[:1]))

    async def _resolve(self, tp: TopicPartition, keys: PartitionKeys, control: Control, offset: int) -> Piece:
        """The piece that covers `offset`, by the lowest index entry that does."""
        async for piece in self._covering(keys, control, offset):
            return piece
        raise InconsistentReadState(f"offset {offset} of {tp} is below its next offset, but no index entry covers it")

    async def _covering(self, keys: PartitionKeys, control: Control, offset: int) -> AsyncIterator[Piece]:
        """The pieces that cover `offset`, by rising end: usually one."""
        key, end = keys.entry(offset), after(keys.index)
        found = await self._log.meta.ceiling(key)
        steps = 0
        while found is not None and found.key < end and steps < _COVERING_MAX:
            entry = decode(IndexEntry, found.value, found.key)
            last = end_offset_of(found.key)
            if last - entry.msg_count + 1 <= offset:
                yield Piece(last - entry.msg_count + 1, last, entry)
            found = await self._log.meta.ceiling(found.key + "\x00")
            steps += 1
        for piece in pending_pieces(control):
            if piece.start_offset <= offset <= piece.end_offset:
                yield piece


class Located(Protocol):
    """Where records lie: an index entry, or an extent of a snapshot."""

    @property
    def data_uri(self) -> str: ...
    @property
    def byte_offset(self) -> int: ...
    @property
    def byte_length(self) -> int: ...
    @property
    def encoding(self) -> str: ...


def decode_located(
    tp: TopicPartition, start_offset: int, end_offset: int, located: Located, data: bytes | bytearray | memoryview
) -> Columns:
    """The records of these offsets, checked against what the index says of them; errors name the blob."""
    last_byte = located.byte_offset + located.byte_length
    where = f"blob {located.data_uri} (bytes {located.byte_offset} to {last_byte})"
    try:
        columns = decoder(located.encoding)(data)
    except CorruptBatch as error:
        raise CorruptBatch(f"offsets {start_offset} to {end_offset} of {tp} are damaged in {where}: {error}") from error
    expected = end_offset - start_offset + 1
    if columns.count != expected:
        raise InconsistentReadState(f"{where} holds {columns.count} records where the index of {tp} says {expected}")
    return columns


def decode_piece(tp: TopicPartition, piece: Piece, data: bytes | bytearray | memoryview) -> Columns:
    return decode_located(tp, piece.start_offset, piece.end_offset, piece.entry, data)


def parts_of(piece: Piece) -> list[Piece]:
    """The piece cut into those of its single batches."""
    entry = piece.entry
    if not entry.parts:
        return [piece]
    pieces, start = [], piece.start_offset
    for position, (count, length) in zip(positions(entry.parts), entry.parts, strict=True):
        own = msgspec.structs.replace(
            entry,
            byte_offset=entry.byte_offset + position,
            byte_length=length,
            msg_count=count,
            encoding=ENCODING,
            parts=(),
        )
        pieces.append(Piece(start, start + count - 1, own))
        start += count
    return pieces


def _some_parts(piece: Piece, offset: int, max_bytes: int) -> list[Piece]:
    """From the one that covers `offset` on, at least that one."""
    parts: list[Piece] = []
    size = 0
    for part in parts_of(piece):
        if part.end_offset < offset:
            continue
        if parts and size + part.entry.byte_length > max_bytes:
            break
        parts.append(part)
        size += part.entry.byte_length
    return parts


def _decoded(tp: TopicPartition, parts: Sequence[Piece], found: Sequence[Buffer], offset: int) -> list[Batch]:
    """The records from `offset` on. What is damaged ends it: an error if it is the first."""
    batches: list[Batch] = []
    for part, data in zip(parts, found, strict=False):
        try:
            columns = decode_piece(tp, part, data)
        except LlogError:
            if not batches:
                raise
            break
        start = max(offset, part.start_offset)
        batches.append(Batch(tp, start, slice_columns(columns, start - part.start_offset, columns.count)))
    return batches


def _first_at(batches: Sequence[Batch], timestamp_ms: int, by: TimestampType) -> int:
    for batch in batches:
        columns = batch.columns
        times = append_times(columns) if by is TimestampType.APPEND else effective_timestamps(columns).to_numpy()
        found = (times >= timestamp_ms).nonzero()[0]
        if len(found):
            return batch.start_offset + int(found[0])
    return batches[0].start_offset


def pending_pieces(control: Control) -> list[Piece]:
    pieces: list[Piece] = []
    if control.pending is not None:
        end = control.pending.start_offset - 1
        for entry in control.pending.entries:
            pieces.append(Piece(end + 1, end + entry.msg_count, entry))
            end += entry.msg_count
    return pieces


def _control_in(tp: TopicPartition, found: Entry | None) -> Control:
    if found is None:
        raise PartitionNotInitialized(f"partition {tp} has no control record")
    control = decode(Control, found.value, found.key)
    if control.log_state is LogState.DELETED:
        raise PartitionNotInitialized(f"partition {tp} was deleted")
    return control


def _check_offset(tp: TopicPartition, offset: int, control: Control, *, end_allowed: bool) -> None:
    high = control.sequence_counter + (1 if end_allowed else 0)
    if not control.log_start_offset <= offset < high:
        raise OffsetOutOfRange(str(tp), offset, control.log_start_offset, control.sequence_counter)
