"""The repair of an index with gaps: puts lost entries back, but only on proof.

The proof that records belong to offsets is one of these:

- The breadcrumb of a compaction, or a compacted blob whose header names its offsets: both were made from the intact
  index.
- Exactly one way to fill the gap with bodies to which no entry leads, orphans included, if nothing contradicts it: not
  the next offset that the writer knew, not the maxima in the entries around the gap, no unreadable blob, no record that
  retention may have removed, no inline bytes by the running totals around the gap. Bodies that a compaction left behind
  are recognised by their bytes, which also lie in the compacted blob.

All other gaps are listed for a person to judge. A repair deletes nothing, except an entry of its own that a merge has
come to cover, and replaces only entries that are themselves damaged. Collectors may run at the same time: each of them
meets either the gap or the entry (`gaps.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from functools import partial
from typing import Final

import msgspec

from llog.batch.columns import Columns
from llog.batch.multi_batch import layout_of
from llog.engines.object.entry_bytes import read_bytes
from llog.engines.object.gaps import Gap, Gaps, subtract_range
from llog.engines.object.reader import EntrySpan, decode_span, pending_spans
from llog.engines.object.repair.candidates import (
    CANDIDATES_MAX,
    BodyLocation,
    Candidate,
    CandidateSearch,
    Surroundings,
    fills,
    find_candidates,
    have_same_records,
    occurrences,
    read_columns,
)
from llog.engines.object.repair.damaged_index import DamagedIndex, decode_if_intact, inspect_index, intact_entries
from llog.errors import (
    BlobNotFound,
    CorruptBatch,
    InconsistentReadState,
    VersionMismatch,
)
from llog.log.keys import SINK_BLOBS, WAL, PartitionKeys, end_offset_of
from llog.log.log import Log
from llog.log.records import Control, IndexEntry, Kind, decode, encode, entry_of
from llog.model import FIRST_OFFSET, TopicPartition
from llog.stores.meta import ABSENT, prefix_end, read_confirmed

_SHOWN_MAX: Final = 20
_OVERLAPS_MAX: Final = 5000
_COVERING_MAX: Final = 64


class Proof(StrEnum):
    BREADCRUMB = "breadcrumb"
    COMPACTED = "compacted blob"
    ONLY_CANDIDATE = "only candidate"


class RepairEntry(msgspec.Struct, frozen=True, kw_only=True):
    """An index entry to put, and its proof."""

    start_offset: int
    end_offset: int
    proof: Proof
    entry: IndexEntry
    expected: int
    """The version of the damaged entry that this entry replaces; `ABSENT` if there is none."""


class OpenGap(msgspec.Struct, frozen=True, kw_only=True):
    """Offsets that cannot be repaired on proof, the reason, and the bodies that may hold their records."""

    start_offset: int
    end_offset: int
    reason: str
    candidates: tuple[Candidate, ...] = ()
    candidates_left_out: int = 0


class RepairPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The repair of one partition's gaps: entries to put, and gaps that stay open."""

    topic: str
    partition: int
    directory: str
    gaps: tuple[Gap, ...]
    entries: tuple[RepairEntry, ...]
    open_gaps: tuple[OpenGap, ...]


async def plan_repairs(log: Log, tps: Sequence[TopicPartition]) -> list[RepairPlan]:
    """Return a plan for each partition whose index has gaps. Changes nothing, and reads every blob that could fill a
    gap.

    Leaves out partitions that were deleted meanwhile. Raises `StaleReads` if a read was stale, because entries may then
    only seem to be missing.
    """
    return await read_confirmed(log.meta, lambda: _plan(log, tps))


async def _plan(log: Log, tps: Sequence[TopicPartition]) -> list[RepairPlan]:
    damaged = [found for found in [await inspect_index(log, tp) for tp in tps] if found is not None and found.gaps]
    found = await find_candidates(log, [gap for each in damaged for gap in each.gaps])
    for each in damaged:
        # After the listing of the blobs, so that a body which was committed meanwhile is not taken for an orphan.
        await each.read_references(log)
    return [await _Planner(log, each, found).plan() for each in damaged if each.gaps]


async def apply_repair(log: Log, plan: RepairPlan) -> int:
    """Put the entries of the plan and return how many; skip entries that another process has put meanwhile, and those
    of records that retention has removed or that were merged with others since the plan was made.
    """
    keys, put = PartitionKeys(plan.directory, plan.partition), 0
    found = await log.meta.get(keys.control)
    if found is None:
        return 0
    log_start_offset = decode(Control, found.value, found.key).log_start_offset
    for new in plan.entries:
        if new.end_offset < log_start_offset:
            continue
        key = keys.entry(new.end_offset)
        try:
            version = await log.meta.put(key, encode(new.entry), expected=new.expected)
        except VersionMismatch:
            continue
        if await read_confirmed(log.meta, partial(_is_covered, log, keys, new)):
            # Another repair has put the entry back long ago, and the blob may be gone since it was merged.
            try:
                await log.meta.delete(key, expected=version)
            except VersionMismatch:
                pass
            continue
        put += 1
    return put


async def _is_covered(log: Log, keys: PartitionKeys, new: RepairEntry) -> bool:
    """Return whether a higher entry covers all records of the new one."""
    above = await log.meta.range(keys.entry(new.end_offset + 1), prefix_end(keys.index), _COVERING_MAX)
    return any(end - entry.msg_count + 1 <= new.start_offset for end, entry in intact_entries(above))


class _Planner:
    """Plans the repair of one partition's gaps."""

    def __init__(self, log: Log, damaged: DamagedIndex, found: CandidateSearch) -> None:
        self._log = log
        self._damaged = damaged
        self._candidates = [each for each in found.candidates[damaged.keys] if each.location not in damaged.locations]
        self._unreadable = found.unreadable[damaged.keys]
        self._doubt = ""
        """Why candidates cannot be distinguished from bodies that a compaction left behind; empty if they can."""

    async def plan(self) -> RepairPlan:
        damaged, entries, open_gaps = self._damaged, [], []
        left = damaged.gaps
        for new in await self._proven_entries():
            entries.append(new)
            left = [part for gap in left for part in subtract_range(gap, new.start_offset, new.end_offset)]
        surroundings = [await self._surroundings(gap) for gap in left]
        unplaced = await self._without_compacted(
            [each for each in self._candidates if any(around.admits(each) for around in surroundings)], entries
        )
        chosen = [self._choose_fill(around, unplaced) for around in surroundings]
        uses = Counter(each.location for way in chosen if isinstance(way, list) for each in way)
        for around, way in zip(surroundings, chosen, strict=True):
            if isinstance(way, list) and any(uses[each.location] > 1 for each in way):
                way = "the only candidates fit another gap as well"
            made = way if isinstance(way, str) else await self._build_entries(around.gap, way)
            if isinstance(made, str):
                open_gaps.append(_open_gap(around, made, unplaced))
            else:
                entries += made
        return RepairPlan(
            topic=damaged.tp.topic,
            partition=damaged.tp.partition,
            directory=damaged.keys.directory,
            gaps=tuple(damaged.gaps),
            entries=tuple(await self._with_maxima(sorted(entries, key=lambda new: new.end_offset))),
            open_gaps=tuple(open_gaps),
        )

    # --- entries with known offsets

    async def _proven_entries(self) -> list[RepairEntry]:
        """Return the entries that the breadcrumb and the headers of compacted blobs prove, the longest first. Where two
        overlap, both are true.
        """
        breadcrumb, settled = self._damaged.breadcrumb, []
        if breadcrumb is not None and breadcrumb.entry is not None:
            settled.append(
                (Proof.BREADCRUMB, EntrySpan(breadcrumb.start_offset, breadcrumb.end_offset, breadcrumb.entry))
            )
        for each in self._candidates:
            start = each.body.start_offset
            if start is not None:
                end = start + each.body.msg_count - 1
                found = entry_of(each.body, self._log.data_uri(each.blob), Kind.COMPACTED)
                settled.append((Proof.COMPACTED, EntrySpan(start, end, found)))
        settled.sort(key=lambda one: one[1].start_offset - one[1].end_offset)
        chosen: list[RepairEntry] = []
        for proof, span in settled:
            if not _overlap(span, self._damaged.gaps) or _overlap(span, chosen):
                continue
            expected = await self._expected_version(proof, span)
            entry = None if expected is None else await self._read(proof, span)
            if expected is not None and entry is not None:
                chosen.append(_repair_entry(proof, span, entry, expected))
        return chosen

    async def _expected_version(self, proof: Proof, span: EntrySpan) -> int | None:
        """Return the version that the span's key must have for the entry to be put; None if the span conflicts with
        other entries.

        A compacted span may cover leftovers of its own records, but only below the cursor, where only merges begin.
        They join nothing with WAL entries, nor with compacted ones whose blobs are gone; and no merge begins beside the
        breadcrumb of another.
        """
        start, end, _ = span
        is_merging = (
            proof is Proof.BREADCRUMB and self._damaged.breadcrumb is not None and self._damaged.breadcrumb.merge
        )
        keys, control = self._damaged.keys, self._damaged.control
        if end >= control.next_offset or any(each.start_offset <= end for each in pending_spans(control)):
            return None
        expected = ABSENT
        for found in await self._log.meta.range(keys.entry(start), prefix_end(keys.index), _OVERLAPS_MAX):
            entry, entry_end = decode_if_intact(found), end_offset_of(found.key)
            if entry_end == end:
                expected = found.version
            if entry is None:
                continue
            entry_start = entry_end - entry.msg_count + 1
            if entry_start > end:
                if entry.kind is Kind.COMPACTED:
                    return expected
                continue  # it may be a leftover inside a higher entry, which reaches below it
            inside = start <= entry_start and entry_end <= end
            if not inside or self._damaged.cursor <= end:
                return None
            if entry.kind is Kind.COMPACTED and not (is_merging or await self._is_gone(entry)):
                return None
        return expected

    async def _is_gone(self, entry: IndexEntry) -> bool:
        return await self._log.blobs.head(self._log.blob_name(entry.data_uri)) is None

    async def _read(self, proof: Proof, span: EntrySpan) -> IndexEntry | None:
        """Return the entry, completed with times and parts from its bytes; None if the bytes are damaged."""
        entry = span.entry
        try:
            data = await read_bytes(self._log, entry)
            columns = decode_span(self._damaged.tp, span, data)
            if proof is Proof.BREADCRUMB:
                return entry
            return msgspec.structs.replace(
                entry,
                append_ms=columns.append_runs[-1][1],
                max_append_ms=max(append_ms for _, append_ms in columns.append_runs),
                parts=layout_of(data).parts,
            )
        except (BlobNotFound, CorruptBatch, InconsistentReadState):
            return None

    # --- entries with unknown offsets

    async def _surroundings(self, gap: Gap) -> Surroundings:
        keys, control, meta = self._damaged.keys, self._damaged.control, self._log.meta
        before = await meta.get(keys.entry(gap.start_offset - 1))
        behind = await meta.range(keys.entry(gap.end_offset + 1), prefix_end(keys.index), 1)
        spans = [EntrySpan(end - entry.msg_count + 1, end, entry) for end, entry in intact_entries(behind)]
        spans += pending_spans(control)
        following = next((span.entry for span in spans if span.start_offset == gap.end_offset + 1), None)
        at_end = following is None and gap.end_offset + 1 == control.next_offset
        return Surroundings(
            gap=gap,
            before=None if before is None else decode_if_intact(before),
            after=following,
            maxima=(control.max_append_ms, control.max_timestamp_ms) if at_end else None,
            inline_total=control.inline_total,
            log_start_offset=control.log_start_offset,
        )

    async def _without_compacted(self, candidates: list[Candidate], settled: Sequence[RepairEntry]) -> list[Candidate]:
        """Return the candidates without those whose records also lie in a compacted blob, which a compaction left
        behind.
        """
        spans = [*self._damaged.compacted, *(EntrySpan(new.start_offset, new.end_offset, new.entry) for new in settled)]
        if not candidates or not spans or len(candidates) > CANDIDATES_MAX:
            return candidates
        columns = {each.location: await read_columns(self._log, each) for each in candidates}
        compacted: Counter[BodyLocation] = Counter()
        for span in spans:
            try:
                whole = await self._columns(span)
            except (BlobNotFound, CorruptBatch, InconsistentReadState) as error:
                self._doubt = f"it is unknown which candidates were compacted: {error}"
                return candidates
            for location, own in columns.items():
                compacted[location] += 0 if own is None else occurrences(own, whole)
        # Of two bodies with the same records, either may be the one that was compacted.
        return [
            each
            for each in candidates
            if compacted[each.location]
            < sum(1 for other in columns.values() if have_same_records(columns[each.location], other))
        ]

    async def _columns(self, span: EntrySpan) -> Columns:
        return decode_span(self._damaged.tp, span, await read_bytes(self._log, span.entry))

    def _choose_fill(self, around: Surroundings, unplaced: Sequence[Candidate]) -> list[Candidate] | str:
        """Return the one way to fill the gap, or the reason why none is proved."""
        gap = around.gap
        windows = Gaps()
        windows.add([gap])
        unreadable = [name for name in self._unreadable if windows.keeps(name)]
        if unreadable:
            return (
                f"{len(unreadable)} blobs that could hold the records have damaged headers, the first is "
                f"{unreadable[0]}"
            )
        if self._doubt:
            return self._doubt
        if around.may_have_been_inline():
            return "the lost entries may have held their records themselves, and any candidate may be another's"
        fitting = [each for each in unplaced if around.admits(each)]
        if any(around.may_reach_below(each) for each in fitting):
            return "the log start was raised there, perhaps in the middle of the lost records"
        ways = fills(gap.start_offset, gap.end_offset, fitting, around.accepts)
        if ways is None:
            return "there are too many candidates to try"
        if len(ways) != 1:
            return "several candidates fit" if ways else "no candidate fits"
        log_start = self._damaged.control.log_start_offset
        if any((each.body.next_offset or FIRST_OFFSET) < log_start for each in ways[0]):
            return "the only candidate may consist of records that were trimmed"
        return ways[0]

    async def _build_entries(self, gap: Gap, way: Sequence[Candidate]) -> list[RepairEntry] | str:
        made, start = [], gap.start_offset
        for each in way:
            kind = Kind.WAL if each.blob.startswith((WAL, SINK_BLOBS)) else Kind.COMPACTED
            unread = entry_of(each.body, self._log.data_uri(each.blob), kind)
            span = EntrySpan(start, start + each.body.msg_count - 1, unread)
            entry = await self._read(Proof.ONLY_CANDIDATE, span)
            if entry is None:
                return f"the records at byte {each.body.body_offset} of blob {each.blob} are damaged"
            expected = self._damaged.broken.get(span.end_offset, ABSENT)
            made.append(_repair_entry(Proof.ONLY_CANDIDATE, span, entry, expected))
            start = span.end_offset + 1
        return made

    async def _with_maxima(self, entries: Sequence[RepairEntry]) -> list[RepairEntry]:
        """Return the entries with running maxima that continue those of the entries before them."""
        keys, done = self._damaged.keys, list[RepairEntry]()
        for new in entries:
            before = await self._log.meta.floor(keys.entry(new.start_offset - 1))
            known = [
                each for _, each in intact_entries([before] if before and before.key.startswith(keys.index) else [])
            ]
            known += [done[-1].entry] if done else []
            entry = msgspec.structs.replace(
                new.entry,
                max_append_ms=max(new.entry.max_append_ms, *(each.max_append_ms for each in known), 0),
                max_timestamp_ms=max(new.entry.max_timestamp_ms, *(each.max_timestamp_ms for each in known), 0),
                inline_total=max(new.entry.inline_total, *(each.inline_total for each in known), 0),
            )
            done.append(msgspec.structs.replace(new, entry=entry))
        return done


def _overlap(span: EntrySpan, others: Sequence[Gap] | Sequence[RepairEntry]) -> bool:
    return any(each.start_offset <= span.end_offset and span.start_offset <= each.end_offset for each in others)


def _open_gap(around: Surroundings, reason: str, unplaced: Sequence[Candidate]) -> OpenGap:
    fitting = [each for each in unplaced if around.admits(each)]
    return OpenGap(
        start_offset=around.gap.start_offset,
        end_offset=around.gap.end_offset,
        reason=reason,
        candidates=tuple(fitting[:_SHOWN_MAX]),
        candidates_left_out=max(0, len(fitting) - _SHOWN_MAX),
    )


def _repair_entry(proof: Proof, span: EntrySpan, entry: IndexEntry, expected: int) -> RepairEntry:
    return RepairEntry(
        start_offset=span.start_offset, end_offset=span.end_offset, proof=proof, entry=entry, expected=expected
    )
