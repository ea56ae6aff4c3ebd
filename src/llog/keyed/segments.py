"""The segments of a log as one process knows them, and which of them a range needs.

Ids are dense: only the oldest segments are deleted. Start sequences and start times never decrease.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from llog.errors import CorruptBatch
from llog.keyed.encoding import (
    SEGMENT_META,
    SEGMENT_TOTALS,
    STATE_KEY,
    LogState,
    SegmentMeta,
    SegmentTotals,
    after_prefix,
    decode_meta,
    decode_state,
    decode_totals,
    segment_key,
    segment_of,
)
from llog.keyed.model import NUMBER_MAX, Segment
from llog.keyed.slate import PAGE_ROWS_MAX, Database

Interval = tuple[int, int]
"""Start (inclusive) and end (exclusive)."""
EVERYTHING: Interval = (0, NUMBER_MAX)


class Segments:
    """Live segments, oldest first."""

    def __init__(self) -> None:
        self.first_id = 0
        self._start_seqs: list[int] = []
        self._start_times: list[int] = []
        self._user_metas: list[bytes | None] = []
        self._totals: list[SegmentTotals | None] = []

    def __len__(self) -> int:
        return len(self._start_seqs)

    def __contains__(self, segment_id: int) -> bool:
        return self.first_id <= segment_id < self.first_id + len(self)

    @property
    def active_id(self) -> int:
        return self.first_id + len(self) - 1

    @property
    def next_seq(self) -> int:
        """The sequence after the last one appended."""
        totals = self._totals[-1]
        return self._start_seqs[-1] if totals is None else totals.end_seq

    @property
    def last_ms(self) -> int:
        """The time of the last append or seal."""
        totals = self._totals[-1]
        return self._start_times[-1] if totals is None else max(totals.append_ms, self._start_times[-1])

    def set(self, segment_id: int, meta: SegmentMeta) -> None:
        """Add the next segment, or update a known one. Segments between the known ones and this one were deleted."""
        if segment_id > self.active_id + 1:
            self.drop(segment_id)
        if not len(self):
            self.first_id = segment_id
        index = segment_id - self.first_id
        if index < 0:
            return
        if index == len(self):
            self._start_seqs.append(meta.start_seq)
            self._start_times.append(meta.start_time_ms)
            self._user_metas.append(meta.user_meta)
            self._totals.append(None)
        else:
            self._user_metas[index] = meta.user_meta

    def set_totals(self, segment_id: int, totals: SegmentTotals) -> None:
        if segment_id in self:
            self._totals[segment_id - self.first_id] = totals

    def meta(self, segment_id: int) -> SegmentMeta:
        index = segment_id - self.first_id
        return SegmentMeta(self._start_seqs[index], self._start_times[index], self._user_metas[index])

    def totals(self, segment_id: int) -> SegmentTotals:
        index = segment_id - self.first_id
        return self._totals[index] or SegmentTotals(self._start_seqs[index], 0, 0, self._start_times[index])

    def drop(self, before: int) -> None:
        """Forget the segments below `before`."""
        gone = max(0, min(before - self.first_id, len(self)))
        for column in (self._start_seqs, self._start_times, self._user_metas, self._totals):
            del column[:gone]
        self.first_id += gone

    def within(
        self, sequences: Interval = EVERYTHING, times: Interval = EVERYTHING, ids: Interval = EVERYTHING
    ) -> range:
        """Return the ids of the segments that may hold records in all three ranges."""
        if not len(self) or any(start >= end for start, end in (sequences, times, ids)):
            return range(0)
        # An append may have the same time as the start of the next segment, so a time may lie in two segments.
        behind = bisect_right(self._start_seqs, sequences[0]) if sequences[0] > self._start_seqs[0] else 1
        lowest = max(behind, bisect_left(self._start_times, times[0]), 1) - 1
        highest = min(bisect_left(self._start_seqs, sequences[1]), bisect_left(self._start_times, times[1]))
        return range(max(self.first_id + lowest, ids[0]), min(self.first_id + highest, ids[1]))

    def end_seq(self, segment_id: int) -> int:
        """Return where the next segment starts; for the active segment, `NUMBER_MAX`."""
        index = segment_id - self.first_id + 1
        return self._start_seqs[index] if index < len(self) else NUMBER_MAX

    def describe(self, segment_id: int) -> Segment:
        meta, totals, active = self.meta(segment_id), self.totals(segment_id), segment_id == self.active_id
        return Segment(
            segment_id=segment_id,
            start_seq=meta.start_seq,
            end_seq=totals.end_seq if active else self.end_seq(segment_id),
            start_time_ms=meta.start_time_ms,
            end_time_ms=None if active else self._start_times[segment_id - self.first_id + 1],
            records=totals.records,
            size=totals.size,
            user_meta=meta.user_meta,
        )

    def state(self) -> LogState:
        return LogState(self.first_id, self.active_id, self.totals(self.active_id))

    async def refresh(self, database: Database) -> None:
        """Update from the database: one read, and, if there are new segments, those and the newest known one."""
        state = await state_of(database)
        if state.active_id > self.active_id or not len(self):
            known = max(self.active_id, state.first_id)
            metas = await _records(database, SEGMENT_META, known)
            totals = await _records(database, SEGMENT_TOTALS, known)
            for segment_id, value in metas:
                self.set(segment_id, decode_meta(value))
            if state.active_id >= self.active_id:  # else a concurrent refresh has read a later state
                self.set_totals(state.active_id, state.totals)
            for segment_id, value in totals:
                self.set_totals(segment_id, decode_totals(value))
        elif state.active_id == self.active_id:
            self.set_totals(state.active_id, state.totals)
        self.drop(state.first_id)


async def state_of(database: Database) -> LogState:
    value = await database.get(STATE_KEY)
    if value is None:
        raise CorruptBatch(f"{database.where} has no log state: the database is damaged")
    return decode_state(value)


async def _records(database: Database, kind: int, first_id: int) -> list[tuple[int, bytes]]:
    start = segment_key(kind, first_id)
    rows = await database.rows(start, after_prefix(start[:2]))
    found: list[tuple[int, bytes]] = []
    while page := await rows.page(PAGE_ROWS_MAX):
        found += [(segment_of(row.key), row.value) for row in page]
    return found
