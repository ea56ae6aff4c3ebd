"""The repair of an index with gaps: puts lost entries back, and only on proof.

What counts as proof that records belong to offsets:

- the breadcrumb of a compaction, or a compacted blob whose header names its offsets: both were made from the index as
  it was;
- exactly one way to fill the gap with bodies that no entry leads to, orphans included, and nothing that speaks against
  it: not the next offset that the writer knew, not the maxima in the entries around the gap, no blob that cannot be
  read, no record that retention may have taken. What a compaction has left behind is told by its bytes, which lie in
  the compacted blob.

Everything else is listed for a person to judge. A repair deletes nothing and replaces nothing but entries that are
damaged themselves. Collectors may run beside it: each of them met the gap or the entry (`gaps.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from typing import Final

import msgspec

from llog.batch.columns import Columns
from llog.batch.joined import layout_of
from llog.engines.object.gaps import Gap, Gaps, without
from llog.engines.object.reader import Piece, decode_piece, pending_pieces
from llog.engines.object.repair.candidates import (
    CANDIDATES_MAX,
    Candidate,
    Found,
    Place,
    Surroundings,
    fills,
    find_candidates,
    occurrences,
    read_columns,
    same,
)
from llog.engines.object.repair.damaged_index import DamagedIndex, decoded, intact, look_at
from llog.errors import (
    BlobNotFound,
    CorruptBatch,
    InconsistentReadState,
    VersionMismatch,
)
from llog.log.keys import SINK_BLOBS, WAL, PartitionKeys, end_offset_of
from llog.log.log import Log
from llog.log.records import IndexEntry, Kind, encode, entry_of
from llog.model import FIRST_OFFSET, TopicPartition
from llog.stores.meta import ABSENT, after, confirmed

_SHOWN_MAX: Final = 20
_OVERLAPS_MAX: Final = 5000


class Proof(StrEnum):
    BREADCRUMB = "breadcrumb"
    COMPACTED = "compacted blob"
    ONLY_CANDIDATE = "only candidate"


class NewEntry(msgspec.Struct, frozen=True, kw_only=True):
    """An index entry to put, and what proves it."""

    start_offset: int
    end_offset: int
    proof: Proof
    entry: IndexEntry
    expected: int
    """The version of the damaged entry that it replaces; `ABSENT` if there is none."""


class OpenGap(msgspec.Struct, frozen=True, kw_only=True):
    """Offsets that cannot be repaired on proof, why, and what may hold their records."""

    start_offset: int
    end_offset: int
    reason: str
    candidates: tuple[Candidate, ...] = ()
    candidates_left_out: int = 0


class RepairPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What can be done about the gaps of one partition."""

    topic: str
    partition: int
    directory: str
    gaps: tuple[Gap, ...]
    entries: tuple[NewEntry, ...]
    open_gaps: tuple[OpenGap, ...]


async def plan_repairs(log: Log, tps: Sequence[TopicPartition]) -> list[RepairPlan]:
    """Of the partitions whose indexes have gaps, what can be done about them. Changes nothing; reads every blob that
    could fill a gap.

    Partitions that were deleted meanwhile are left out. `StaleReads` if an old state of the metadata was read, in which
    entries may be missing that are there.
    """
    return await confirmed(log.meta, lambda: _planned(log, tps))


async def _planned(log: Log, tps: Sequence[TopicPartition]) -> list[RepairPlan]:
    damaged = [found for found in [await look_at(log, tp) for tp in tps] if found is not None and found.gaps]
    found = await find_candidates(log, [gap for each in damaged for gap in each.gaps])
    for each in damaged:
        await each.read_references(
            log
        )  # after the blobs were listed: what was committed meanwhile is not taken for an orphan
    return [await _Planner(log, each, found).plan() for each in damaged]


async def apply_repair(log: Log, plan: RepairPlan) -> int:
    """Puts the entries of the plan and returns how many; those that somebody else has put meanwhile are left to
    them.
    """
    keys, put = PartitionKeys(plan.directory, plan.partition), 0
    for new in plan.entries:
        try:
            await log.meta.put(keys.entry(new.end_offset), encode(new.entry), expected=new.expected)
        except VersionMismatch:
            continue
        put += 1
    return put


class _Planner:
    """Decides about the gaps of one partition."""

    def __init__(self, log: Log, damaged: DamagedIndex, found: Found) -> None:
        self._log = log
        self._damaged = damaged
        self._candidates = [each for each in found.candidates[damaged.keys] if each.place not in damaged.places]
        self._unreadable = found.unreadable[damaged.keys]
        self._doubt = ""
        """Why no candidate can be told from those that a compaction has left behind."""

    async def plan(self) -> RepairPlan:
        damaged, entries, open_gaps = self._damaged, [], []
        left = damaged.gaps
        for new in await self._settled():
            entries.append(new)
            left = [part for gap in left for part in without(gap, new.start_offset, new.end_offset)]
        surroundings = [await self._surroundings(gap) for gap in left]
        unplaced = await self._not_compacted(
            [each for each in self._candidates if any(around.admits(each) for around in surroundings)], entries
        )
        chosen = [self._chosen(around, unplaced) for around in surroundings]
        uses = Counter(each.place for way in chosen if isinstance(way, list) for each in way)
        for around, way in zip(surroundings, chosen, strict=True):
            if isinstance(way, list) and any(uses[each.place] > 1 for each in way):
                way = "the only candidates fit another gap as well"
            made = way if isinstance(way, str) else await self._made(around.gap, way)
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

    # --- where the offsets are known

    async def _settled(self) -> list[NewEntry]:
        """What the breadcrumb and the headers of compacted blobs prove, the longest first. Where two overlap, both are
        true.
        """
        crumb, settled = self._damaged.crumb, []
        if crumb is not None and crumb.entry is not None:
            settled.append((Proof.BREADCRUMB, Piece(crumb.start_offset, crumb.end_offset, crumb.entry)))
        for each in self._candidates:
            start = each.body.start_offset
            if start is not None:
                end = start + each.body.msg_count - 1
                found = entry_of(each.body, self._log.data_uri(each.blob), Kind.COMPACTED)
                settled.append((Proof.COMPACTED, Piece(start, end, found)))
        settled.sort(key=lambda one: one[1].start_offset - one[1].end_offset)
        chosen: list[NewEntry] = []
        for proof, piece in settled:
            if not _overlap(piece, self._damaged.gaps) or _overlap(piece, chosen):
                continue
            expected = await self._slot(piece)
            entry = None if expected is None else await self._read(proof, piece)
            if expected is not None and entry is not None:
                chosen.append(_new(proof, piece, entry, expected))
        return chosen

    async def _slot(self, piece: Piece) -> int | None:
        """The version that the piece's key must have for it to be put; None if it is in the way of what is there.

        A compacted piece may lie over leftovers of its own records, but only below the cursor, where no compaction
        begins any more.
        """
        start, end, _ = piece
        keys, control = self._damaged.keys, self._damaged.control
        if end >= control.sequence_counter or any(each.start_offset <= end for each in pending_pieces(control)):
            return None
        expected = ABSENT
        for found in await self._log.meta.range(keys.entry(start), after(keys.index), _OVERLAPS_MAX):
            entry, entry_end = decoded(found), end_offset_of(found.key)
            if entry_end == end:
                expected = found.version
            if entry is None:
                continue
            entry_start = entry_end - entry.msg_count + 1
            if entry_start > end:
                return expected
            inside = start <= entry_start and entry_end <= end
            if entry.kind is Kind.COMPACTED or not inside or self._damaged.cursor <= end:
                return None
        return expected

    async def _read(self, proof: Proof, piece: Piece) -> IndexEntry | None:
        """The entry with what only the bytes tell; None if they are damaged."""
        entry = piece.entry
        try:
            blob = self._log.blob_name(entry.data_uri)
            data = await self._log.blobs.get_range(blob, entry.byte_offset, entry.byte_length)
            columns = decode_piece(self._damaged.tp, piece, data)
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

    # --- where they are not

    async def _surroundings(self, gap: Gap) -> Surroundings:
        keys, control, meta = self._damaged.keys, self._damaged.control, self._log.meta
        before = await meta.get(keys.entry(gap.start_offset - 1))
        behind = await meta.range(keys.entry(gap.end_offset + 1), after(keys.index), 1)
        pieces = [Piece(end - entry.msg_count + 1, end, entry) for end, entry in intact(behind)]
        pieces += pending_pieces(control)
        following = next((piece.entry for piece in pieces if piece.start_offset == gap.end_offset + 1), None)
        at_end = following is None and gap.end_offset + 1 == control.sequence_counter
        return Surroundings(
            gap=gap,
            before=None if before is None else decoded(before),
            after=following,
            maxima=(control.max_append_ms, control.max_timestamp_ms) if at_end else None,
            log_start_offset=control.log_start_offset,
        )

    async def _not_compacted(self, candidates: list[Candidate], settled: Sequence[NewEntry]) -> list[Candidate]:
        """The candidates without those whose records lie in a compacted blob: a compaction has read and left them."""
        pieces = [*self._damaged.compacted, *(Piece(new.start_offset, new.end_offset, new.entry) for new in settled)]
        if not candidates or not pieces or len(candidates) > CANDIDATES_MAX:
            return candidates
        columns = {each.place: await read_columns(self._log, each) for each in candidates}
        compacted: Counter[Place] = Counter()
        for piece in pieces:
            try:
                whole = await self._columns(piece)
            except (BlobNotFound, CorruptBatch, InconsistentReadState) as error:
                self._doubt = f"which candidates were compacted cannot be told: {error}"
                return candidates
            for place, own in columns.items():
                compacted[place] += 0 if own is None else occurrences(own, whole)
        # Of two bodies with the same records, either may be the one that was compacted once.
        return [
            each
            for each in candidates
            if compacted[each.place] < sum(1 for other in columns.values() if same(columns[each.place], other))
        ]

    async def _columns(self, piece: Piece) -> Columns:
        entry = piece.entry
        blob = self._log.blob_name(entry.data_uri)
        data = await self._log.blobs.get_range(blob, entry.byte_offset, entry.byte_length)
        return decode_piece(self._damaged.tp, piece, data)

    def _chosen(self, around: Surroundings, unplaced: Sequence[Candidate]) -> list[Candidate] | str:
        """The one way to fill the gap, or why there is none that is proved."""
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
        fitting = [each for each in unplaced if around.admits(each)]
        if any(around.may_reach_below(each) for each in fitting):
            return "the log start was raised there, perhaps in the midst of the lost records"
        ways = fills(gap.start_offset, gap.end_offset, fitting, around.accepts)
        if ways is None:
            return "there are too many candidates to try"
        if len(ways) != 1:
            return "several candidates fit" if ways else "no candidate fits"
        log_start = self._damaged.control.log_start_offset
        if any((each.body.next_offset or FIRST_OFFSET) < log_start for each in ways[0]):
            return "the only candidate may be of records that were trimmed"
        return ways[0]

    async def _made(self, gap: Gap, way: Sequence[Candidate]) -> list[NewEntry] | str:
        made, start = [], gap.start_offset
        for each in way:
            kind = Kind.WAL if each.blob.startswith((WAL, SINK_BLOBS)) else Kind.COMPACTED
            unread = entry_of(each.body, self._log.data_uri(each.blob), kind)
            piece = Piece(start, start + each.body.msg_count - 1, unread)
            entry = await self._read(Proof.ONLY_CANDIDATE, piece)
            if entry is None:
                return f"the records at byte {each.body.body_offset} of blob {each.blob} are damaged"
            expected = self._damaged.broken.get(piece.end_offset, ABSENT)
            made.append(_new(Proof.ONLY_CANDIDATE, piece, entry, expected))
            start = piece.end_offset + 1
        return made

    async def _with_maxima(self, entries: Sequence[NewEntry]) -> list[NewEntry]:
        """The entries with maxima that run on from what is before each."""
        keys, done = self._damaged.keys, list[NewEntry]()
        for new in entries:
            before = await self._log.meta.floor(keys.entry(new.start_offset - 1))
            known = [each for _, each in intact([before] if before and before.key.startswith(keys.index) else [])]
            known += [done[-1].entry] if done else []
            entry = msgspec.structs.replace(
                new.entry,
                max_append_ms=max(new.entry.max_append_ms, *(each.max_append_ms for each in known), 0),
                max_timestamp_ms=max(new.entry.max_timestamp_ms, *(each.max_timestamp_ms for each in known), 0),
            )
            done.append(msgspec.structs.replace(new, entry=entry))
        return done


def _overlap(piece: Piece, others: Sequence[Gap] | Sequence[NewEntry]) -> bool:
    return any(each.start_offset <= piece.end_offset and piece.start_offset <= each.end_offset for each in others)


def _open_gap(around: Surroundings, reason: str, unplaced: Sequence[Candidate]) -> OpenGap:
    fitting = [each for each in unplaced if around.admits(each)]
    return OpenGap(
        start_offset=around.gap.start_offset,
        end_offset=around.gap.end_offset,
        reason=reason,
        candidates=tuple(fitting[:_SHOWN_MAX]),
        candidates_left_out=max(0, len(fitting) - _SHOWN_MAX),
    )


def _new(proof: Proof, piece: Piece, entry: IndexEntry, expected: int) -> NewEntry:
    return NewEntry(
        start_offset=piece.start_offset, end_offset=piece.end_offset, proof=proof, entry=entry, expected=expected
    )
