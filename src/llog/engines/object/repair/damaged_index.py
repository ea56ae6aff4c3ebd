"""A partition's index as a repair looks at it: with its gaps, and with entries that cannot be decoded."""

from __future__ import annotations

from collections.abc import Sequence

from llog.engines.object.gaps import Coverage, Gap, Gaps, without_trimmed
from llog.engines.object.reader import Piece, Reader, pending_pieces
from llog.engines.object.repair.candidates import Place
from llog.errors import InconsistentReadState, PartitionNotInitialized, TopicNotFound
from llog.log.keys import PartitionKeys, end_offset_of
from llog.log.log import Log
from llog.log.records import Compaction, Control, Cursor, IndexEntry, Kind, decode
from llog.model import TopicPartition
from llog.stores.meta import Entry, scan


class DamagedIndex:
    """A partition as one look found it."""

    def __init__(self, tp: TopicPartition, keys: PartitionKeys, control: Control) -> None:
        self.tp = tp
        self.keys = keys
        self.control = control
        self.gaps: list[Gap] = []
        self.cursor = 0
        self.crumb: Compaction | None = None
        self.places: set[Place] = set()
        """Where entries lead."""
        self.compacted: list[Piece] = []
        """Those whose records may have been uploaded when the lost ones were."""
        self.broken: dict[int, int] = {}
        """Versions of entries that cannot be decoded, by their ends."""

    async def read_references(self, log: Log) -> None:
        """Reads where entries lead, and which compacted ones may hold what a candidate holds."""
        windows = Gaps()
        windows.add(self.gaps)
        latest = max(gap.to_ms for gap in self.gaps)
        earliest = min(gap.from_ms for gap in self.gaps)
        before_ms = 0
        now = await log.meta.get(self.keys.control)
        pending = [] if now is None else pending_pieces(decode(Control, now.value, now.key))
        self.places.update((log.blob_name(piece.entry.data_uri), piece.entry.byte_offset) for piece in pending)
        async for item in scan(log.meta, self.keys.index):
            entry, end = decoded(item), end_offset_of(item.key)
            if entry is None:
                continue
            blob = log.blob_name(entry.data_uri)
            if windows.keeps(blob):
                self.places.add((blob, entry.byte_offset))
            if entry.kind is Kind.COMPACTED and entry.max_append_ms >= earliest and before_ms <= latest:
                self.compacted.append(Piece(end - entry.msg_count + 1, end, entry))
            before_ms = entry.append_ms


async def look_at(log: Log, tp: TopicPartition) -> DamagedIndex | None:
    """None if the partition is gone."""
    try:
        keys, control = await Reader(log).control(tp)
    except (TopicNotFound, PartitionNotInitialized):
        return None
    found = DamagedIndex(tp, keys, control)
    crumb = await log.meta.get(keys.compaction)
    found.crumb = None if crumb is None else decode(Compaction, crumb.value, crumb.key)
    cursor = await log.meta.get(keys.cursor)
    found.cursor = 0 if cursor is None else decode(Cursor, cursor.value, cursor.key).offset
    coverage = Coverage(keys, control)
    async for item in scan(log.meta, keys.index):
        entry, end = decoded(item), end_offset_of(item.key)
        if entry is None:
            found.broken[end] = item.version
        else:
            coverage.add(end, entry)
    for piece in pending_pieces(control):
        coverage.add(piece.end_offset, piece.entry)
    gaps = coverage.gaps()
    now = await log.meta.get(keys.control) if gaps else None
    found.gaps = [] if now is None else without_trimmed(gaps, decode(Control, now.value, now.key))
    return found


def intact(found: Sequence[Entry]) -> list[tuple[int, IndexEntry]]:
    """The ends and the entries of those that are not damaged."""
    return [(end_offset_of(each.key), entry) for each in found if (entry := decoded(each)) is not None]


def decoded(found: Entry) -> IndexEntry | None:
    """None if the entry is damaged."""
    try:
        return decode(IndexEntry, found.value, found.key)
    except InconsistentReadState:
        return None
