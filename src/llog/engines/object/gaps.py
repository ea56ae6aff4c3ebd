"""Gaps in a partition's index: offsets between the log start and the next offset that neither an entry nor the pending
append covers.

The protocol leaves no gaps, so a gap is damage: an index entry was lost. The lost entry's records may still lie in a
blob that nothing names any more, and `llog repair index` can find them only there. As long as a gap exists, the
collector therefore keeps every blob that could fill it:

- the compacted blobs of that partition, and those that partitions share;
- shared blobs and sinks' blobs, whose names contain no partition, if they are stamped between the append times of the
  gap's neighbours, plus or minus `SLACK_MS` for clocks that differ and writers that were slow to commit. A floor that a
  wrong clock has raised stamps blobs far ahead of their records' append times. Where entries of the partition lead to
  such blobs, the lost ones may have done so, too: all blobs up to these stamps are kept.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

import msgspec

from llog.log.keys import COMPACTED_SHARED, SINK_BLOBS, WAL, PartitionKeys
from llog.log.records import Control, IndexEntry, Kind, LogState
from llog.runtime import stamp_of

SLACK_MS: Final = 3_600_000
_NEVER_MS: Final = 1 << 62
GAPS_MAX: Final = 100
"""The most gaps listed for one partition; the last one is extended over any further gaps."""


class Gap(msgspec.Struct, frozen=True, kw_only=True):
    """Offsets that nothing covers, and the range of stamps of shared blobs that may hold their records."""

    directory: str
    partition: int
    start_offset: int
    end_offset: int
    from_ms: int
    to_ms: int

    def __str__(self) -> str:
        return f"{self.directory}/{self.partition} offsets {self.start_offset} to {self.end_offset}"


class GapFinder:
    """Finds the gaps in a scan of a partition's index. Add the entries by rising end, the pending append last."""

    def __init__(self, keys: PartitionKeys, control: Control) -> None:
        self._keys = keys
        self._control = control
        self._expected = control.log_start_offset
        """The lowest offset above all entries added so far."""
        self._before: IndexEntry | None = None
        self._gaps: list[Gap] = []
        self._ahead_ms = 0
        """The highest stamp that is far ahead of the append time of its entry."""
        self._lowest_ms: list[tuple[int, int]] = []
        """The start of each gap, and the lowest append time from there to the next gap."""

    def add(self, end_offset: int, entry: IndexEntry) -> None:
        start_offset = end_offset - entry.msg_count + 1
        if start_offset < self._expected:
            # A compacted entry, or a pending append, may reach below leftovers that lie inside it.
            self._gaps = [part for gap in self._gaps for part in subtract_range(gap, start_offset, end_offset)]
        elif start_offset > self._expected:
            self._open(start_offset - 1, entry)
        if self._lowest_ms:
            first, lowest_ms = self._lowest_ms[-1]
            self._lowest_ms[-1] = first, min(lowest_ms, entry.append_ms)
        if end_offset >= self._expected:
            self._expected, self._before = end_offset + 1, entry
        stamp = stamp_of(entry.data_uri) if entry.kind is Kind.WAL else None
        if stamp is not None and stamp > entry.append_ms + SLACK_MS:
            self._ahead_ms = max(self._ahead_ms, stamp)

    def gaps(self) -> list[Gap]:
        """Return the gaps, once all entries were added."""
        if self._expected < self._control.next_offset:
            self._open(self._control.next_offset - 1, None)
            self._expected = self._control.next_offset
        return [
            msgspec.structs.replace(gap, from_ms=self._from_ms(gap), to_ms=max(gap.to_ms, self._ahead_ms + SLACK_MS))
            for gap in self._gaps
        ]

    def _from_ms(self, gap: Gap) -> int:
        """Return the gap's earliest stamp, lowered if later entries show that a clock which was ahead was corrected."""
        behind = [lowest_ms for first, lowest_ms in self._lowest_ms if first >= gap.start_offset]
        return min([gap.from_ms, *(lowest_ms - SLACK_MS for lowest_ms in behind)])

    def _open(self, end_offset: int, after: IndexEntry | None) -> None:
        if len(self._lowest_ms) < GAPS_MAX:
            self._lowest_ms.append((self._expected, _NEVER_MS))
        before = self._before
        oldest = [entry.append_ms for entry in (before, after) if entry is not None]
        # The running maximum of the entry after the gap includes the lost entries.
        newest = [self._control.max_append_ms if after is None else after.max_append_ms, *oldest]
        gap = Gap(
            directory=self._keys.directory,
            partition=self._keys.partition,
            start_offset=self._expected,
            end_offset=end_offset,
            from_ms=0 if before is None else min(oldest) - SLACK_MS,
            to_ms=max(newest) + SLACK_MS,
        )
        if len(self._gaps) == GAPS_MAX:
            last = self._gaps.pop()
            gap = msgspec.structs.replace(
                gap,
                start_offset=last.start_offset,
                from_ms=min(gap.from_ms, last.from_ms),
                to_ms=max(gap.to_ms, last.to_ms),
            )
        self._gaps.append(gap)


class Gaps:
    """The gaps that a collection has met so far, and the blobs that it keeps for them."""

    def __init__(self, grace_ms: int = SLACK_MS) -> None:
        # Never narrower: a collection without a grace period must not make damage final.
        self._wider_ms = max(0, grace_ms - SLACK_MS)
        self._found: dict[Gap, None] = {}
        self._compacted: set[str] = set()
        self._starts: list[int] = []
        self._ends: list[int] = []

    @property
    def found(self) -> tuple[Gap, ...]:
        return tuple(self._found)

    def add(self, found: list[Gap]) -> None:
        if not found:
            return
        self._found.update(dict.fromkeys(found))
        self._compacted.update(PartitionKeys(gap.directory, gap.partition).compacted("") for gap in found)
        self._starts, self._ends = [], []
        for start, end in sorted((gap.from_ms - self._wider_ms, gap.to_ms + self._wider_ms) for gap in self._found):
            if self._ends and start <= self._ends[-1]:
                self._ends[-1] = max(end, self._ends[-1])
            else:
                self._starts.append(start)
                self._ends.append(end)

    def keeps(self, blob: str) -> bool:
        """Return whether the blob could fill one of the gaps."""
        if blob.startswith(COMPACTED_SHARED):
            return bool(self._found)
        if not blob.startswith((WAL, SINK_BLOBS)):
            return blob[: blob.rfind("/") + 1] in self._compacted
        stamp = stamp_of(blob)
        if stamp is None:
            return bool(self._found)
        position = bisect_right(self._starts, stamp) - 1
        return position >= 0 and stamp <= self._ends[position]


def subtract_trimmed(gaps: list[Gap], control: Control) -> list[Gap]:
    """Return what is left of the gaps by a control record that was read after the index, because retention may have
    removed entries during the scan.
    """
    if control.log_state is LogState.DELETED:
        return []
    return [part for gap in gaps for part in subtract_range(gap, 0, control.log_start_offset - 1)]


def subtract_range(gap: Gap, start_offset: int, end_offset: int) -> list[Gap]:
    """Return the parts of the gap that lie outside these offsets."""
    if end_offset < gap.start_offset or gap.end_offset < start_offset:
        return [gap]
    below = msgspec.structs.replace(gap, end_offset=start_offset - 1)
    above = msgspec.structs.replace(gap, start_offset=end_offset + 1)
    return [part for part in (below, above) if part.start_offset <= part.end_offset]
