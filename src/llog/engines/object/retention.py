"""Retention: raises a partition's log start past records that are too old or too many, then deletes the index entries
below it.

`log_start_offset` in the control record decides: from its CAS on, readers refuse offsets below it. The next call
deletes entries that a crash left behind; the next collection deletes blobs that nothing names any more.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec

from llog.engines.object.control_record import read_control, update_control
from llog.engines.object.partition_keys import find_keys, keys_in
from llog.engines.object.reader import EntrySpan, pending_spans, span_of
from llog.errors import InvalidArgument, OffsetOutOfRange
from llog.log.catalog import Catalog
from llog.log.engine import RetentionResult
from llog.log.keys import PartitionKeys
from llog.log.log import Log
from llog.log.records import Control
from llog.model import FIRST_OFFSET, TimestampType, TopicPartition
from llog.stores.meta import prefix_end, read_confirming_errors

_PAGE = 5000


async def retain(
    log: Log,
    tp: TopicPartition,
    *,
    retention_ms: int | None,
    retention_bytes: int | None,
    now_ms: int,
) -> RetentionResult:
    """Trim the spans of whole index entries: those older than `retention_ms`, and the oldest beyond `retention_bytes`;
    None is no limit.

    Age is by the topic's timestamp type, as a running maximum: a late record lives as long as those before it. The span
    that crosses `retention_bytes` is kept. All records up to the next offset may be trimmed.
    """
    for name, value in (("retention_ms", retention_ms), ("retention_bytes", retention_bytes)):
        if value is not None and value < 0:
            raise InvalidArgument(f"{name} must not be negative: {value}")
    topic = await Catalog(log).get(tp.topic)
    keys, by = keys_in(topic, tp.partition), topic.timestamp_type
    control, _ = await read_control(log, tp, keys)
    excess = None
    if retention_bytes is not None:
        size = 0
        async for span in _spans(log, keys, control):
            size += span.entry.byte_length
        excess = size - retention_bytes
    start, dropped, inline_total = control.log_start_offset, 0, 0
    async for span in _spans(log, keys, control):
        entry, size_through = span.entry, dropped + span.entry.byte_length
        newest = entry.max_append_ms if by is TimestampType.APPEND else entry.max_timestamp_ms
        too_old = retention_ms is not None and newest < now_ms - retention_ms
        too_much = excess is not None and size_through <= excess
        if not (too_old or too_much):
            break
        start, dropped, inline_total = max(start, span.end_offset + 1), size_through, entry.inline_total
    return await _raise_start(log, tp, keys, start, dropped, inline_total)


async def trim(log: Log, tp: TopicPartition, before_offset: int) -> RetentionResult:
    """Remove exactly the records below `before_offset`; raise `OffsetOutOfRange` beyond the next offset."""
    if before_offset < FIRST_OFFSET:
        raise InvalidArgument(f"offsets start at {FIRST_OFFSET}: {before_offset}")
    keys = await find_keys(log, tp)

    async def read_checked_control() -> Control:
        control, _ = await read_control(log, tp, keys)
        if before_offset > control.next_offset:
            raise OffsetOutOfRange(str(tp), before_offset, control.log_start_offset, control.next_offset)
        return control

    control = await read_confirming_errors(log.meta, read_checked_control, OffsetOutOfRange)
    dropped = inline_total = 0
    async for span in _spans(log, keys, control):
        if span.end_offset >= before_offset:
            break
        dropped += span.entry.byte_length
        inline_total = span.entry.inline_total
    return await _raise_start(log, tp, keys, before_offset, dropped, inline_total)


async def _spans(log: Log, keys: PartitionKeys, control: Control) -> AsyncIterator[EntrySpan]:
    """Iterate over the spans from the log start to the next offset of `control`, with one page in memory at a time.

    Skips entries that a stalled writer left inside a compacted range, except where a page ends between the two.
    """
    start, end = keys.entry(control.log_start_offset), prefix_end(keys.index)
    covered = control.log_start_offset - 1
    while True:
        entries = await log.meta.range(start, end, _PAGE)
        page: list[EntrySpan] = []
        lowest = control.next_offset
        for found in reversed(entries):
            span = span_of(found)
            if span.start_offset < lowest:
                page.append(span)
                lowest = span.start_offset
        for span in reversed(page):
            covered = max(covered, span.end_offset)
            yield span
        if len(entries) < _PAGE:
            break
        start = entries[-1].key + "\x00"
    for span in pending_spans(control):
        if span.end_offset > covered:
            yield span


async def _raise_start(
    log: Log, tp: TopicPartition, keys: PartitionKeys, start: int, dropped: int, inline_total: int
) -> RetentionResult:
    """Raise the log start to `start` by CAS, never lower it, and delete the index entries that end below it, of which
    the last has this running total of inline bytes.

    Works on the keys under which `start` was found: a topic that was created again meanwhile keeps its records.
    """

    def raise_start(control: Control) -> Control:
        if start <= control.log_start_offset:
            return control
        if start > control.next_offset:
            raise OffsetOutOfRange(str(tp), start, control.log_start_offset, control.next_offset)
        # Nobody reads a pending append below the log start; left there, it would keep its blob until the next append.
        pending = control.pending if control.pending and control.pending.end_offset >= start else None
        trimmed = control.inline_total if start == control.next_offset else inline_total
        return msgspec.structs.replace(
            control,
            log_start_offset=start,
            pending=pending,
            inline_compacted=max(control.inline_compacted, trimmed),
        )

    change = await update_control(log, tp, keys, raise_start)
    old, new = change.old.log_start_offset, change.new.log_start_offset
    await log.meta.delete_range(keys.index, keys.entry(new))
    return RetentionResult(old_start=old, new_start=new, records=new - old, bytes=0 if new == old else dropped)
