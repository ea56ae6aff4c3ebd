"""A partition's index as a repair sees it: with its gaps, and with entries that cannot be decoded."""

from __future__ import annotations

from collections.abc import Sequence

from llog.engines.object.gaps import Gap, GapFinder, Gaps, subtract_trimmed
from llog.engines.object.reader import EntrySpan, Reader, pending_spans
from llog.engines.object.repair.candidates import BodyLocation
from llog.errors import InconsistentReadState, PartitionNotInitialized, TopicNotFound
from llog.log.inline import is_inline
from llog.log.keys import PartitionKeys, end_offset_of
from llog.log.log import Log
from llog.log.records import Compaction, CompactionCursor, Control, IndexEntry, Kind, decode
from llog.model import TopicPartition
from llog.stores.meta import MetaEntry, scan


class DamagedIndex:
    """The state of a partition's index at one inspection."""

    def __init__(self, tp: TopicPartition, keys: PartitionKeys, control: Control) -> None:
        self.tp = tp
        self.keys = keys
        self.control = control
        self.gaps: list[Gap] = []
        self.cursor = 0
        self.breadcrumb: Compaction | None = None
        self.locations: set[BodyLocation] = set()
        """The bodies to which intact entries lead."""
        self.compacted: list[EntrySpan] = []
        """The compacted entries whose records may be as old as the lost ones."""
        self.broken: dict[int, int] = {}
        """The versions of entries that cannot be decoded, by their end offsets."""

    async def read_references(self, log: Log) -> None:
        """Read the bodies to which entries lead, and the compacted entries that may hold a candidate's records.

        Drops the gaps that retention has removed since the inspection.
        """
        windows = Gaps()
        windows.add(self.gaps)
        latest = max(gap.to_ms for gap in self.gaps)
        earliest = min(gap.from_ms for gap in self.gaps)
        before_ms = 0
        found = await log.meta.get(self.keys.control)
        now = None if found is None else decode(Control, found.value, found.key)
        self.gaps = [] if now is None else subtract_trimmed(self.gaps, now)
        pending = [] if now is None else pending_spans(now)
        self.locations.update(
            (log.blob_name(span.entry.data_uri), span.entry.byte_offset)
            for span in pending
            if not is_inline(span.entry.data_uri)
        )
        async for item in scan(log.meta, self.keys.index):
            entry, end = decode_if_intact(item), end_offset_of(item.key)
            if entry is None:
                continue
            if not is_inline(entry.data_uri) and windows.keeps(blob := log.blob_name(entry.data_uri)):
                self.locations.add((blob, entry.byte_offset))
            if entry.kind is Kind.COMPACTED and entry.max_append_ms >= earliest and before_ms <= latest:
                self.compacted.append(EntrySpan(end - entry.msg_count + 1, end, entry))
            before_ms = entry.append_ms


async def inspect_index(log: Log, tp: TopicPartition) -> DamagedIndex | None:
    """Read the partition's index and find its gaps; return None if the partition does not exist any more."""
    try:
        keys, control = await Reader(log).control(tp)
    except (TopicNotFound, PartitionNotInitialized):
        return None
    found = DamagedIndex(tp, keys, control)
    breadcrumb = await log.meta.get(keys.compaction)
    found.breadcrumb = None if breadcrumb is None else decode(Compaction, breadcrumb.value, breadcrumb.key)
    cursor = await log.meta.get(keys.cursor)
    found.cursor = 0 if cursor is None else decode(CompactionCursor, cursor.value, cursor.key).offset
    finder = GapFinder(keys, control)
    async for item in scan(log.meta, keys.index):
        entry, end = decode_if_intact(item), end_offset_of(item.key)
        if entry is None:
            found.broken[end] = item.version
        else:
            finder.add(end, entry)
    for span in pending_spans(control):
        finder.add(span.end_offset, span.entry)
    gaps = finder.gaps()
    now = await log.meta.get(keys.control) if gaps else None
    found.gaps = [] if now is None else subtract_trimmed(gaps, decode(Control, now.value, now.key))
    return found


def intact_entries(found: Sequence[MetaEntry]) -> list[tuple[int, IndexEntry]]:
    """Return the entries that can be decoded, with their end offsets."""
    return [(end_offset_of(each.key), entry) for each in found if (entry := decode_if_intact(each)) is not None]


def decode_if_intact(found: MetaEntry) -> IndexEntry | None:
    """Return the index entry, or None if it is damaged."""
    try:
        return decode(IndexEntry, found.value, found.key)
    except InconsistentReadState:
        return None
