"""Bodies of blobs that could fill gaps in the index, found by the headers of the blobs that the collector keeps for the
gaps.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final

import msgspec
import numpy as np
import pyarrow as pa

from llog.batch.columns import Columns, append_times, slice_columns, timestamp_bounds
from llog.batch.encodings import decoder
from llog.batch.multi_batch import layout_of
from llog.batch.shared import Body
from llog.engines.object.blob_headers import read_header
from llog.engines.object.gaps import Gap, Gaps
from llog.errors import BlobNotFound, CorruptBatch
from llog.log.inline import is_inline
from llog.log.keys import COMPACTED_SHARED, ROOT, SINK_BLOBS, WAL, PartitionKeys
from llog.log.log import Log
from llog.log.records import IndexEntry, Kind
from llog.model import FIRST_OFFSET
from llog.runtime import stamp_of

_CONCURRENCY: Final = 16
_FILL_STEPS_MAX: Final = 20_000
CANDIDATES_MAX: Final = 500
_SHARED: Final = (WAL, SINK_BLOBS, COMPACTED_SHARED)
"""The blobs that may hold records of any partition."""

BodyLocation = tuple[str, int]
"""A blob, and the byte at which a body begins in it."""


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A body of a blob. If no entry leads to it, its entry was lost, or the body was compacted, trimmed, or never
    committed.
    """

    blob: str
    writer: str
    body: Body

    @property
    def location(self) -> BodyLocation:
        return self.blob, self.body.body_offset


class CandidateSearch(msgspec.Struct, frozen=True, kw_only=True):
    candidates: dict[PartitionKeys, list[Candidate]]
    unreadable: dict[PartitionKeys, list[str]]
    """Blobs with damaged headers, which may hold more candidates."""


class Surroundings(msgspec.Struct, frozen=True, kw_only=True):
    """The neighbours of a gap, which limit what can have been in it."""

    gap: Gap
    before: IndexEntry | None
    after: IndexEntry | None
    maxima: tuple[int, int] | None
    """The maxima of the control record, if nothing follows the gap."""
    inline_total: int
    """The running total of inline bytes in the control record."""
    log_start_offset: int

    def admits(self, candidate: Candidate) -> bool:
        """Return whether the body, on its own, may lie in the gap."""
        body, gap = candidate.body, self.gap
        stamp = stamp_of(candidate.blob)
        limits = self._limits()
        return (
            body.start_offset is None
            and (body.msg_count <= gap.end_offset - gap.start_offset + 1 or self.may_reach_below(candidate))
            and (body.next_offset or FIRST_OFFSET) <= gap.end_offset
            and (stamp is None or gap.from_ms <= stamp <= gap.to_ms)
            and (limits is None or (body.append_ms <= limits[0] and body.timestamp_max <= limits[1]))
        )

    def may_reach_below(self, candidate: Candidate) -> bool:
        """Return whether the gap begins at a raised log start, which may lie in the middle of these records."""
        known = candidate.body.next_offset or FIRST_OFFSET
        return self.gap.start_offset == self.log_start_offset > known and candidate.body.msg_count > 1

    def may_have_been_inline(self) -> bool:
        """Return whether the running totals around the gap leave room for inline records, which are lost with their
        entries.
        """
        after, known = self.inline_total, 0
        if self.after is not None:
            own = self.after.byte_length if is_inline(self.after.data_uri) else 0
            after = self.after.inline_total - own
        if self.before is not None:
            known = self.before.inline_total
        return after > known

    def accepts(self, way: Sequence[Candidate]) -> bool:
        """Return whether the maxima after the gap are what they would be if these bodies had filled it."""
        limits, entry = self._limits(), self.after
        if limits is None or self.before is None or (entry is not None and entry.kind is Kind.COMPACTED):
            return True
        own = (0, 0) if entry is None else (entry.append_ms, entry.timestamp_max)
        append_ms = max(self.before.max_append_ms, own[0], *(each.body.append_ms for each in way))
        timestamp = max(self.before.max_timestamp_ms, own[1], *(each.body.timestamp_max for each in way))
        return (append_ms, timestamp) == limits

    def _limits(self) -> tuple[int, int] | None:
        return self.maxima if self.after is None else (self.after.max_append_ms, self.after.max_timestamp_ms)


async def find_candidates(log: Log, gaps: Sequence[Gap]) -> CandidateSearch:
    """Return every body of the gaps' partitions in the blobs that could fill a gap, including bodies to which entries
    lead. Reads only headers.
    """
    windows = Gaps()
    windows.add(list(gaps))
    damaged = {PartitionKeys(gap.directory, gap.partition) for gap in gaps}
    found = CandidateSearch(candidates={keys: [] for keys in damaged}, unreadable={keys: [] for keys in damaged})
    for prefix in _SHARED:
        async for name, candidates in _scan(log, prefix, windows):
            if candidates is None:  # The blob may hold records of any partition.
                for names in found.unreadable.values():
                    names.append(name)
            for each in candidates or ():
                found.candidates.get(PartitionKeys(each.body.directory, each.body.partition), []).append(each)
    for keys in damaged:
        async for name, candidates in _scan(log, keys.compacted(""), windows):
            if candidates is None:
                found.unreadable[keys].append(name)
            found.candidates[keys] += candidates or ()
    return found


async def read_columns(log: Log, candidate: Candidate) -> Columns | None:
    """Return the records of the body; None if it is damaged, or its record count differs from the header's."""
    body = candidate.body
    try:
        data = await log.blobs.get_range(candidate.blob, body.body_offset, body.body_length)
        columns = decoder(body.encoding)(data)
    except (BlobNotFound, CorruptBatch):
        return None
    return columns if columns.count == body.msg_count else None


def occurrences(own: Columns, whole: Columns) -> int:
    """Return how often the records of a body occur in `whole`, with the same append times, keys and values."""
    if own.count > whole.count:
        return 0
    starts = np.flatnonzero(append_times(whole)[: whole.count - own.count + 1] == own.append_runs[0][1]).tolist()
    return sum(have_same_records(own, slice_columns(whole, start, start + own.count)) for start in starts)


def have_same_records(one: Columns | None, other: Columns | None) -> bool:
    """Return whether both are readable and have the same append times, keys and values."""
    if one is None or other is None or one.append_runs != other.append_runs:
        return False
    return bool(one.values.equals(other.values) and _keys(one).equals(_keys(other)))


def _keys(columns: Columns) -> pa.BinaryArray:
    return pa.nulls(columns.count, pa.binary()) if columns.keys is None else columns.keys


def fills(
    start_offset: int, end_offset: int, candidates: Sequence[Candidate], accept: Callable[[Sequence[Candidate]], bool]
) -> list[list[Candidate]] | None:
    """Return up to two acceptable ways to fill these offsets with consecutive whole bodies; None if there are too many
    to try.

    A body lies at or above the next offset that its writer knew.
    """
    if len(candidates) > CANDIDATES_MAX:
        return None
    found: list[list[Candidate]] = []
    steps = 0

    def extend(position: int, chosen: list[Candidate]) -> None:
        nonlocal steps
        if position > end_offset:
            found.extend([list(chosen)] if accept(chosen) else [])
            return
        for candidate in candidates:
            steps += 1
            if steps > _FILL_STEPS_MAX or len(found) > 1:
                return
            body = candidate.body
            if body.msg_count > end_offset - position + 1 or (body.next_offset or 0) > position or candidate in chosen:
                continue
            chosen.append(candidate)
            extend(position + body.msg_count, chosen)
            chosen.pop()

    extend(start_offset, [])
    return None if steps > _FILL_STEPS_MAX else found


async def _scan(log: Log, prefix: str, windows: Gaps) -> AsyncIterator[tuple[str, list[Candidate] | None]]:
    """Iterate over the blobs below `prefix` that could fill a gap, with their bodies; None if the header cannot be
    read.
    """
    async for page in log.blobs.list(prefix):
        names = [info.name for info in page if windows.keeps(info.name)]
        for first in range(0, len(names), _CONCURRENCY):
            some = names[first : first + _CONCURRENCY]
            for name, candidates in zip(some, await asyncio.gather(*(_read_bodies(log, n) for n in some)), strict=True):
                yield name, candidates


async def _read_bodies(log: Log, name: str) -> list[Candidate] | None:
    try:
        header = await read_header(log, name)
    except BlobNotFound:
        return []
    except CorruptBatch:
        return None if name.startswith(_SHARED) else await _headerless_body(log, name)
    return [Candidate(blob=name, writer=header.writer, body=body) for body in header.partitions]


async def _headerless_body(log: Log, name: str) -> list[Candidate] | None:
    """Return the one body of a compacted blob of an older version, which has no header; None if it is damaged."""
    directory, _, rest = name.removeprefix(ROOT).partition("/partitions/")
    try:
        data = await log.blobs.get(name)
        encoded = layout_of(data)
        columns = decoder(encoded.encoding)(data)
    except BlobNotFound:
        return []
    except CorruptBatch:
        return None
    timestamp_min, timestamp_max = timestamp_bounds(columns)
    body = Body(
        topic=directory.partition("~")[0],
        partition=int(rest.partition("/")[0]),
        directory=directory,
        msg_count=columns.count,
        encoding=encoded.encoding,
        body_offset=0,
        body_length=encoded.byte_length,
        append_ms=columns.append_runs[0][1],
        timestamp_min=timestamp_min,
        timestamp_max=timestamp_max,
    )
    return [Candidate(blob=name, writer="", body=body)]
