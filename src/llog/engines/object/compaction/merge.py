"""Merging: joins small compacted blobs that follow one another into larger ones, so that a partition which grows slowly
does not become many small blobs.

A merge is a compaction whose run consists of COMPACTED entries below the cursor, which it does not move. After the
breadcrumb, the whole run is read again: the entries of all merges must lie inside one another or apart, because a merge
deletes every key within its range.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from llog.engines.object.compaction.plan import CompactorOptions, Plan, stored_cursor
from llog.engines.object.control_record import read_control
from llog.engines.object.reader import EntrySpan, span_of
from llog.errors import VersionMismatch
from llog.log.catalog import Catalog
from llog.log.keys import PartitionKeys
from llog.log.log import Log
from llog.log.records import Compaction, Kind, Topic, encode
from llog.model import TopicPartition
from llog.stores.meta import prefix_end

_LOOK_MAX: Final = 1000
"""The most entries among which a run is looked for, and the most that a run may have."""
_COVERING_MAX: Final = 64
_RETENTION_PARTS: Final = 10
"""Retention removes whole entries, so a merged one holds at most this part of what a topic keeps."""


class MergeLimits(NamedTuple):
    """What a merged blob may hold."""

    entries_min: int
    entries_max: int
    growth: int
    """A run has at least this many times the bytes of its largest entry, so that a record is seldom written again."""
    bytes_max: int
    offsets_max: int
    append_ms_max: int | None
    """The most time between the appends of a merged blob."""


class Choice(NamedTuple):
    run: Sequence[EntrySpan]
    """The run to merge; empty if there is none."""
    merge_from: int
    """The offset of the first entry with which a run can still begin, whatever follows later."""


def limits_of(options: CompactorOptions, topic: Topic) -> MergeLimits:
    kept_ms, kept_bytes = topic.retention_ms, topic.retention_bytes
    return MergeLimits(
        entries_min=options.merge_entries_min,
        entries_max=min(options.merge_entries_max, _LOOK_MAX),
        growth=options.merge_growth,
        bytes_max=options.max_bytes if kept_bytes is None else min(options.max_bytes, kept_bytes // _RETENTION_PARTS),
        offsets_max=options.merge_offsets_max,
        append_ms_max=None if kept_ms is None else kept_ms // _RETENTION_PARTS,
    )


async def choose_merge(log: Log, options: CompactorOptions, tp: TopicPartition, keys: PartitionKeys) -> Plan | None:
    """Return the first run of compacted entries that is worth merging; None if there is none.

    Costs a few reads, whatever the length of the log: the cursor's record remembers where runs may begin.
    """
    topic = await Catalog(log).get(tp.topic)
    if topic.directory != keys.directory:
        return None  # The topic was created again.
    control, _ = await read_control(log, tp, keys)
    cursor, version = await stored_cursor(log, tp, keys)
    position = max(cursor.merge_from, control.log_start_offset)
    if position >= cursor.offset:
        return None
    page = await log.meta.range(keys.entry(position), keys.entry(cursor.offset), _LOOK_MAX)
    choice = choose_run([span_of(found) for found in page], limits_of(options, topic))
    if choice.run:
        highest = next(found for found in page if found.key == keys.entry(choice.run[-1].end_offset))
        return Plan(tp, keys, tuple(choice.run), highest.version, control, merge=True)
    if choice.merge_from > cursor.merge_from:
        moved = msgspec.structs.replace(cursor, merge_from=choice.merge_from)
        try:
            await log.meta.put(keys.cursor, encode(moved), expected=version)
        except VersionMismatch:
            pass  # A compaction has ended meanwhile, and the merge that follows it looks again.
    return None


def choose_run(spans: Sequence[EntrySpan], limits: MergeLimits) -> Choice:
    """Choose, of consecutive index entries, the longest run that begins with the first entry with which one can."""
    merge_from = None
    for first, span in enumerate(spans):
        last, is_settled = _extend(spans, first, limits)
        if last is not None:
            return Choice(spans[first : last + 1], span.start_offset)
        if merge_from is None and not is_settled:
            merge_from = span.start_offset
    if merge_from is None:
        merge_from = spans[-1].end_offset + 1 if spans else 0
    return Choice((), merge_from)


def _extend(spans: Sequence[EntrySpan], first: int, limits: MergeLimits) -> tuple[int | None, bool]:
    """Return the last entry of the longest run that begins with the entry `first`, None if there is no run; and whether
    more entries at the end would not change that.
    """
    total = largest = 0
    found = None
    before_ms = spans[max(0, first - 1)].entry.append_ms
    for last in range(first, len(spans)):
        span, entry = spans[last], spans[last].entry
        follows = last == first or span.start_offset == spans[last - 1].end_offset + 1
        total, largest = total + entry.byte_length, max(largest, entry.byte_length)
        if (
            not follows
            or entry.kind is not Kind.COMPACTED
            or total > limits.bytes_max
            or limits.growth * largest > limits.bytes_max
            or span.end_offset - spans[first].start_offset >= limits.offsets_max
            or (limits.append_ms_max is not None and entry.append_ms - before_ms > limits.append_ms_max)
        ):
            return found, True
        count = last - first + 1
        if count >= limits.entries_min and total >= limits.growth * largest:
            found = last
        if count == limits.entries_max:
            return found, True
    return found, False


async def read_run_again(log: Log, keys: PartitionKeys, run: Compaction) -> tuple[EntrySpan, ...] | None:
    """Return the entries of a merge as they are now, once its breadcrumb is there; None if it must not go on.

    The run must consist of whole COMPACTED entries that follow one another, and of nothing else: a merge deletes every
    key of its range, and one that ended meanwhile may have put an entry there that reaches below the range. No higher
    entry may cover the run either, as happens if a stalled repair has put an entry that was merged long ago.
    """
    first, end = keys.entry(run.start_offset), keys.entry(run.end_offset) + "\x00"
    page = await log.meta.range(first, end, _LOOK_MAX + 1)
    spans = tuple(map(span_of, page))
    expected = run.start_offset
    for span in spans:
        if span.start_offset != expected or span.entry.kind is not Kind.COMPACTED:
            return None
        expected = span.end_offset + 1
    if expected != run.end_offset + 1 or page[-1].version != run.expected_version:
        return None
    above = await log.meta.range(end, prefix_end(keys.index), _COVERING_MAX)
    return None if any(span_of(found).start_offset <= run.end_offset for found in above) else spans
