"""Choosing what to compact next: a run of consecutive WAL index entries from the cursor on, or an interrupted
compaction.

Planning writes no records. It puts the index entries of `pending`, moves the cursor past offsets that need no
compaction, and clears breadcrumbs of compactions that cannot be finished.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Final, NamedTuple

import msgspec

from llog.batch.format import Codec
from llog.engines.object.control_record import read_control
from llog.engines.object.pending import pending_puts
from llog.engines.object.reader import EntrySpan, span_of
from llog.errors import InconsistentReadState, PartitionNotInitialized, VersionMismatch
from llog.log.inline import is_inline
from llog.log.keys import PartitionKeys
from llog.log.log import Log
from llog.log.records import (
    Compaction,
    CompactionCursor,
    CompactionState,
    Control,
    IndexEntry,
    Kind,
    decode,
    encode,
)
from llog.model import TopicPartition
from llog.stores.meta import read_confirmed, read_confirming_errors

INDEX_PAGE: Final = 1000
_CHOOSE_ATTEMPTS: Final = 100


class CompactorOptions(msgspec.Struct, frozen=True, kw_only=True):
    max_offsets: int = 1_000_000
    max_bytes: int = 64 << 20
    min_entries: int = 2
    """A shorter run at the end of the log waits for more entries, unless it is large."""
    max_entries: int = 4096
    codec: Codec = Codec.NONE
    concurrency: int = 32
    memory_bytes_max: int = 384 << 20
    """The bytes of slices that one pass over many partitions holds at a time."""
    holder: str = ""
    """The name of this compactor in its claims, for people."""
    linger_ms: int = 0
    """How long a run at the end of the log waits for more entries, unless it is large or has many of them: a partition
    that grows slowly would otherwise become many small blobs.
    """
    linger_entries_max: int = 64
    linger_inline_bytes_max: int = 64 << 10
    """The bytes in the metadata store that may wait."""
    idle_ms: int = 60_000
    """The time without an append after which a partition's `pending` is cleared, because it keeps a shared blob
    alive, and after which even a single inline append is compacted.
    """
    merge_entries_min: int = 8
    """The number of compacted entries from which on they are merged."""
    merge_entries_max: int = 1000
    merge_offsets_max: int = 1_000_000
    merge_growth: int = 4
    """How many times the bytes of its largest entry a merge must have."""


class Breadcrumb(NamedTuple):
    """A stored breadcrumb and its version."""

    record: Compaction
    version: int


class Plan(NamedTuple):
    """A run to compact. With a breadcrumb, the compaction has begun; past WRITING_BLOB, the plan has no spans."""

    tp: TopicPartition
    keys: PartitionKeys
    spans: tuple[EntrySpan, ...]
    version: int
    """The version of the run's highest index entry."""
    control: Control
    breadcrumb: Breadcrumb | None = None
    at_tail: bool = False
    """Whether the run ends where the log ended, so that no other run follows it now."""
    merge: bool = False
    """Whether the run consists of compacted entries."""


class _Scan(NamedTuple):
    spans: list[EntrySpan]
    version: int
    at_tail: bool
    """Whether only the end of the log ended the run, so that it may still grow."""
    passed: int
    """The offset to which the cursor may move: everything below is compacted or trimmed."""
    gap: bool = False
    """Whether no entry below the limit covers the position."""


async def choose(
    log: Log,
    options: CompactorOptions,
    tp: TopicPartition,
    keys: PartitionKeys,
    *,
    force: bool = False,
    stop_before: int | None = None,
) -> Plan | None:
    """Return the next run of this partition, which ends below `stop_before`; None if nothing is worth compacting
    now.
    """
    choose_once = partial(_choose_once, log, options, tp, keys, force=force, stop_before=stop_before)
    return await read_confirming_errors(log.meta, choose_once, InconsistentReadState)


async def _choose_once(
    log: Log,
    options: CompactorOptions,
    tp: TopicPartition,
    keys: PartitionKeys,
    *,
    force: bool,
    stop_before: int | None,
) -> Plan | None:
    for _ in range(_CHOOSE_ATTEMPTS):
        control = await _index_pending(log, options, tp, keys, force)
        found = await log.meta.get(keys.compaction)
        if found is not None:
            breadcrumb = Breadcrumb(decode(Compaction, found.value, found.key), found.version)
            plan = await _resume(log, tp, keys, control, breadcrumb)
            if plan is not None:
                return plan
            continue
        cursor, cursor_version = await read_cursor(log, tp, keys)
        limit = control.next_offset if control.pending is None else control.pending.start_offset
        position = max(cursor, control.log_start_offset)
        scan = await _scan(log, options, keys, position, limit, stop_before)
        if scan.gap:
            if await _has_moved(log, tp, keys, control, cursor_version):
                continue
            raise InconsistentReadState(f"the index of {tp} has a gap at offset {position}: no entry covers it")
        if scan.passed > cursor:
            await _move_cursor(log, keys, cursor_version, scan.passed)
            continue
        if not scan.spans:
            return None
        if scan.spans[0].start_offset != cursor:
            raise InconsistentReadState(
                f"the index entry of {tp} that ends at {scan.spans[0].end_offset} begins at "
                f"{scan.spans[0].start_offset}, but the compaction cursor is at {cursor}"
            )
        if scan.at_tail and not force and not _is_worthwhile(log, options, control, scan.spans):
            return None
        return Plan(tp, keys, tuple(scan.spans), scan.version, control, at_tail=scan.at_tail)
    return None


def _is_worthwhile(log: Log, options: CompactorOptions, control: Control, spans: Sequence[EntrySpan]) -> bool:
    """Return whether a run that may still grow is compacted now."""
    if sum(span.entry.byte_length for span in spans) >= options.max_bytes // 4:
        return True
    now_ms = log.runtime.now_ms()
    inline = [span.entry for span in spans if is_inline(span.entry.data_uri)]
    if len(spans) < options.min_entries:
        # Inline records for which no later append comes must not stay in the metadata store.
        return bool(inline) and not 0 <= now_ms - inline[0].append_ms < max(options.idle_ms, options.linger_ms)
    return (
        len(spans) >= options.linger_entries_max
        or not 0 <= now_ms - spans[0].entry.append_ms < options.linger_ms
        or sum(entry.byte_length for entry in inline) >= options.linger_inline_bytes_max
        or control.inline_full
    )


async def read_cursor(log: Log, tp: TopicPartition, keys: PartitionKeys) -> tuple[int, int]:
    """Return the cursor and its version."""
    cursor, version = await stored_cursor(log, tp, keys)
    return cursor.offset, version


async def stored_cursor(log: Log, tp: TopicPartition, keys: PartitionKeys) -> tuple[CompactionCursor, int]:
    """Return the cursor's record and its version."""
    found = await log.meta.get(keys.cursor)
    if found is None:
        raise no_cursor(tp)
    return decode(CompactionCursor, found.value, found.key), found.version


def no_cursor(tp: TopicPartition) -> PartitionNotInitialized:
    return PartitionNotInitialized(f"partition {tp} has no compaction cursor: it was deleted")


async def clear(log: Log, keys: PartitionKeys, breadcrumb: Breadcrumb) -> bool:
    """Delete the breadcrumb if its version is unchanged, and return whether this call did."""
    try:
        return await log.meta.delete(keys.compaction, expected=breadcrumb.version)
    except VersionMismatch:
        return False


async def _index_pending(
    log: Log, options: CompactorOptions, tp: TopicPartition, keys: PartitionKeys, force: bool
) -> Control:
    """Put what `pending` names and return the control record; clear `pending` if the partition is idle."""
    control, version = await read_control(log, tp, keys)
    if control.pending is None:
        return control
    await log.meta.put_many(pending_puts(keys, control.pending))
    age_ms = log.runtime.now_ms() - control.pending.entries[-1].append_ms
    if force or not 0 <= age_ms < options.idle_ms:
        cleared = msgspec.structs.replace(control, pending=None)
        try:
            await log.meta.put(keys.control, encode(cleared), expected=version)
        except VersionMismatch:
            return control
        return cleared
    return control


async def _has_moved(log: Log, tp: TopicPartition, keys: PartitionKeys, control: Control, cursor_version: int) -> bool:
    """Return whether retention or another compaction may have removed entries since these records were read."""
    if await log.meta.get(keys.compaction) is not None:
        return True
    _, version = await read_cursor(log, tp, keys)
    now, _ = await read_control(log, tp, keys)
    return version != cursor_version or now.log_start_offset != control.log_start_offset


async def _resume(
    log: Log, tp: TopicPartition, keys: PartitionKeys, control: Control, breadcrumb: Breadcrumb
) -> Plan | None:
    """Return the plan of the compaction that left this breadcrumb; clear the breadcrumb and return None if its run has
    changed.
    """
    record = breadcrumb.record
    plan = Plan(tp, keys, (), record.expected_version, control, breadcrumb, merge=record.merge)
    if record.state in (CompactionState.DELETING_OLD, CompactionState.UPDATING_CURSOR):
        return plan
    trimmed = control.log_start_offset > record.end_offset
    if record.state is CompactionState.WRITING_COMPACTED_INDEX:
        return None if trimmed and await _give_up_publishing(log, keys, breadcrumb) else plan
    if record.merge and not trimmed:
        return plan  # The whole run is read again before anything is done.
    spans, version = [], -1
    expected = record.start_offset
    async for span, entry_version in _entries(log, keys, record.start_offset, record.end_offset):
        if span.start_offset != expected or span.entry.kind is not Kind.WAL:
            break
        spans.append(span)
        expected, version = span.end_offset + 1, entry_version
    if trimmed or expected != record.end_offset + 1 or version != record.expected_version:
        await clear(log, keys, breadcrumb)
        return None
    return plan._replace(spans=tuple(spans))


async def _give_up_publishing(log: Log, keys: PartitionKeys, breadcrumb: Breadcrumb) -> bool:
    """Clear the breadcrumb so that no stalled twin can publish its run afterwards; return False if a twin has published
    it or has taken it over.

    A twin publishes by CAS on the highest entry at the version in the breadcrumb: to rewrite that entry unchanged gives
    it another version.
    """
    key = keys.entry(breadcrumb.record.end_offset)
    found = await read_confirmed(log.meta, lambda: log.meta.get(key))
    if found is not None and found.version == breadcrumb.record.expected_version:
        try:
            await log.meta.put(key, found.value, expected=found.version)
        except VersionMismatch:
            return False
    elif found is not None and decode(IndexEntry, found.value, key) == breadcrumb.record.entry:
        return False
    return await clear(log, keys, breadcrumb)


async def _scan(
    log: Log,
    options: CompactorOptions,
    keys: PartitionKeys,
    position: int,
    limit: int,
    stop_before: int | None,
) -> _Scan:
    """Return the WAL entries from the one that covers `position` on, up to the limits of the options."""
    spans: list[EntrySpan] = []
    version, size, at_tail, passed = -1, 0, True, 0
    if position >= limit:
        return _Scan(spans, version, at_tail, passed)
    async for span, entry_version in _entries(log, keys, position, limit - 1):
        first = spans[0].start_offset if spans else position
        if span.entry.kind is Kind.COMPACTED:
            if span.start_offset <= first:
                # The WAL entries before this one are leftovers inside its range.
                return _Scan([], -1, False, span.end_offset + 1)
            at_tail = False
            break
        if not spans:
            if span.start_offset > position:
                return _Scan([], -1, False, 0, gap=True)
            passed = span.start_offset
        elif span.start_offset != spans[-1].end_offset + 1:
            at_tail = False
            break
        offsets = span.end_offset - first + 1
        size += span.entry.byte_length
        full = offsets > options.max_offsets or size > options.max_bytes or len(spans) >= options.max_entries
        stopped = stop_before is not None and span.end_offset >= stop_before
        if stopped or (spans and full):
            at_tail = False
            break
        spans.append(span)
        version = entry_version
    return _Scan(spans, version, at_tail, passed, gap=passed == 0)


async def _entries(
    log: Log, keys: PartitionKeys, first_end: int, last_end: int
) -> AsyncIterator[tuple[EntrySpan, int]]:
    """Iterate over the index entries that end in [first_end, last_end], with their versions; one page in memory at a
    time.
    """
    key, stop = keys.entry(first_end), keys.entry(last_end + 1)
    while True:
        page = await log.meta.range(key, stop, INDEX_PAGE)
        for found in page:
            yield span_of(found), found.version
        if len(page) < INDEX_PAGE:
            return
        key = page[-1].key + "\x00"


async def _move_cursor(log: Log, keys: PartitionKeys, version: int, offset: int) -> None:
    """Move the cursor, unless another compactor has moved it. The hint for merges is lost, which costs them reads."""
    try:
        await log.meta.put(keys.cursor, encode(CompactionCursor(offset)), expected=version)
    except VersionMismatch:
        pass
