"""Retention: raises a partition's log start past what is too old or too much, then deletes the index entries below it.

`log_start_offset` in the control record decides: readers refuse what is below it from the CAS on. Entries that a crash
leaves behind are deleted by the next call; blobs go with the next collection once nothing names them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec

from llog.engines.object.partition_keys import find_keys, keys_in
from llog.engines.object.reader import Piece, pending_pieces
from llog.engines.port import RetentionResult
from llog.errors import (
    InvalidArgument,
    OffsetOutOfRange,
    OutcomeUnknown,
    PartitionNotInitialized,
    VersionMismatch,
)
from llog.log.catalog import Catalog
from llog.log.keys import PartitionKeys, end_offset_of
from llog.log.log import Log
from llog.log.records import Control, IndexEntry, LogState, decode, encode
from llog.model import FIRST_OFFSET, TimestampType, TopicPartition
from llog.stores.meta import after, certain

_PAGE = 5000


async def retain(
    log: Log,
    tp: TopicPartition,
    *,
    retention_ms: int | None,
    retention_bytes: int | None,
    now_ms: int,
) -> RetentionResult:
    """Trims whole pieces: those older than `retention_ms`, and the oldest beyond `retention_bytes`; None is no limit.

    Age is by the topic's timestamp type, as a running maximum: a late record lives as long as those before it. The
    piece that crosses `retention_bytes` is kept. Everything may go, up to the next offset.
    """
    for name, value in (("retention_ms", retention_ms), ("retention_bytes", retention_bytes)):
        if value is not None and value < 0:
            raise InvalidArgument(f"{name} must not be negative: {value}")
    topic = await Catalog(log).get(tp.topic)
    keys, by = keys_in(topic, tp.partition), topic.timestamp_type
    control, _ = await _control(log, tp, keys)
    excess = None
    if retention_bytes is not None:
        size = 0
        async for piece in _pieces(log, keys, control):
            size += piece.entry.byte_length
        excess = size - retention_bytes
    start, dropped = control.log_start_offset, 0
    async for piece in _pieces(log, keys, control):
        entry, size_through = piece.entry, dropped + piece.entry.byte_length
        newest = entry.max_append_ms if by is TimestampType.APPEND else entry.max_timestamp_ms
        too_old = retention_ms is not None and newest < now_ms - retention_ms
        too_much = excess is not None and size_through <= excess
        if not (too_old or too_much):
            break
        start, dropped = max(start, piece.end_offset + 1), size_through
    return await _raise_start(log, tp, keys, start, dropped)


async def trim(log: Log, tp: TopicPartition, before_offset: int) -> RetentionResult:
    """Removes every record below `before_offset`, exactly and at once. `OffsetOutOfRange` beyond the next offset."""
    if before_offset < FIRST_OFFSET:
        raise InvalidArgument(f"offsets start at {FIRST_OFFSET}: {before_offset}")
    keys = await find_keys(log, tp)

    async def reaching() -> Control:
        control, _ = await _control(log, tp, keys)
        if before_offset > control.sequence_counter:
            raise OffsetOutOfRange(str(tp), before_offset, control.log_start_offset, control.sequence_counter)
        return control

    control = await certain(log.meta, reaching, OffsetOutOfRange)
    dropped = 0
    async for piece in _pieces(log, keys, control):
        if piece.end_offset >= before_offset:
            break
        dropped += piece.entry.byte_length
    return await _raise_start(log, tp, keys, before_offset, dropped)


async def _control(log: Log, tp: TopicPartition, keys: PartitionKeys) -> tuple[Control, int]:
    found = await log.meta.get(keys.control)
    if found is None:
        raise PartitionNotInitialized(f"partition {tp} has no control record")
    control = decode(Control, found.value, found.key)
    if control.log_state is LogState.DELETED:
        raise PartitionNotInitialized(f"partition {tp} was deleted")
    return control, found.version


async def _pieces(log: Log, keys: PartitionKeys, control: Control) -> AsyncIterator[Piece]:
    """The pieces from the log start to the next offset of `control`, one page in memory at a time.

    Entries that a zombie left inside a compacted range are passed over, except where a page ends between the two.
    """
    start, end = keys.entry(control.log_start_offset), after(keys.index)
    covered = control.log_start_offset - 1
    while True:
        entries = await log.meta.range(start, end, _PAGE)
        page: list[Piece] = []
        lowest = control.sequence_counter
        for found in reversed(entries):
            entry = decode(IndexEntry, found.value, found.key)
            last = end_offset_of(found.key)
            first = last - entry.msg_count + 1
            if first < lowest:
                page.append(Piece(first, last, entry))
                lowest = first
        for piece in reversed(page):
            covered = max(covered, piece.end_offset)
            yield piece
        if len(entries) < _PAGE:
            break
        start = entries[-1].key + "\x00"
    for piece in pending_pieces(control):
        if piece.end_offset > covered:
            yield piece


async def _raise_start(log: Log, tp: TopicPartition, keys: PartitionKeys, start: int, dropped: int) -> RetentionResult:
    """CASes the log start up to `start`, never back, and deletes the index entries that end below it.

    Under the keys that `start` was found under: a topic that was created again meanwhile keeps its records.
    """
    while True:
        control, version = await _control(log, tp, keys)
        old = control.log_start_offset
        if start <= old:
            start = old
            break
        if start > control.sequence_counter:
            raise OffsetOutOfRange(str(tp), start, old, control.sequence_counter)
        # Nobody reads a pending append below the log start, and left there it would keep its blob for as long as nobody
        # appends.
        pending = control.pending if control.pending and control.pending.end_offset >= start else None
        changed = msgspec.structs.replace(control, log_start_offset=start, pending=pending)
        try:
            await log.meta.put(keys.control, encode(changed), expected=version)
        except (VersionMismatch, OutcomeUnknown):
            continue
        break
    await log.meta.delete_range(keys.index, keys.entry(start))
    if start == old:
        dropped = 0
    return RetentionResult(old_start=old, new_start=start, records=start - old, bytes=dropped)
