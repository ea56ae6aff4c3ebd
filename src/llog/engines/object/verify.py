"""Verification: walks a partition from its log start to its end and reads every record.

The walk holds a pin, so that the blobs that it resolves stay while others append, compact, trim and collect. It holds
one page of index entries and the records of one entry in memory.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Final

import msgspec

from llog.batch.multi_batch import layout_of
from llog.batch.shared import Body
from llog.engines.object.blob_headers import BlobHeaders
from llog.engines.object.clocks import Window
from llog.engines.object.collector import Listing, list_unreferenced
from llog.engines.object.entry_bytes import location_of, read_bytes
from llog.engines.object.reader import EntrySpan, Reader, decode_span, pending_spans
from llog.engines.object.repair.damaged_index import decode_if_intact
from llog.errors import (
    BlobNotFound,
    CorruptBatch,
    InconsistentReadState,
    LlogError,
    PartitionNotInitialized,
    TopicNotFound,
    WrongStore,
)
from llog.log.catalog import Catalog
from llog.log.findings import Findings, Problem, ProblemKind, VerifyReport
from llog.log.inline import describe_address, is_inline
from llog.log.keys import PartitionKeys, end_offset_of
from llog.log.log import Log
from llog.log.pins import LEASE_MS, pin, release, renew
from llog.log.records import Compaction, CompactionCursor, CompactionState, Control, IndexEntry, Kind, decode
from llog.model import FIRST_OFFSET, TopicPartition
from llog.stores.meta import prefix_end

_PAGE: Final = 1000
_LOOKAHEAD: Final = 5000
_EVERY_STAMP: Final = Window(1 << 62, 1 << 62, 1 << 62)


class OrphanCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The number of blobs that nothing names. It includes uploads under way: only a blob that stays unnamed is
    garbage.
    """

    blobs: int
    orphans: int
    orphan_bytes: int


async def verify(
    log: Log,
    tp: TopicPartition,
    *,
    progress: Callable[[int], None] | None = None,
    headers: BlobHeaders | None = None,
) -> VerifyReport:
    """Read every record below the present next offset and report damage; `progress` is called with the records read so
    far.

    Damage is never raised, but `StaleReads` is if a stale read may have looked like damage, and `TopicNotFound` if the
    topic does not exist or was deleted meanwhile. Calls that share `headers` read the header of a blob once, not once
    for each of its partitions.
    """
    walk = _Walk(log, tp, progress, headers or BlobHeaders(log))
    pin_id = await pin(log, f"verify {tp}")
    reads = await log.meta.begin_reads()
    try:
        report = await walk.run(pin_id)
    except TopicNotFound:
        raise
    except (InconsistentReadState, PartitionNotInitialized) as error:
        await Catalog(log).directory(tp)  # raises if the topic was deleted meanwhile
        report = walk.report_after(error)
    finally:
        await release(log, walk.pin_id or pin_id)
    if not report.healthy:
        await reads.confirm()
    return report


async def count_orphans(log: Log) -> OrphanCounts:
    listing = Listing()
    count = size = 0
    async for names in list_unreferenced(log, _EVERY_STAMP, listing):
        count += len(names)
        size += sum(names.values())
    return OrphanCounts(blobs=listing.candidates, orphans=count, orphan_bytes=size)


class _Walk:
    def __init__(
        self, log: Log, tp: TopicPartition, progress: Callable[[int], None] | None, headers: BlobHeaders
    ) -> None:
        self.pin_id = ""
        self._log = log
        self._tp = tp
        self._headers = headers
        self._progress = progress
        self._renewed_ms = log.runtime.now_ms()
        self._expected = FIRST_OFFSET
        """The lowest offset that no entry so far accounts for."""
        self._newest = (0, 0)
        self._inline_total = 0
        self._found = Findings(tp)

    async def run(self, pin_id: str) -> VerifyReport:
        self.pin_id = pin_id
        keys, control = await Reader(self._log).control(self._tp)
        self._expected = control.log_start_offset
        self._check_control(control)
        async for span in self._index(keys, control.log_start_offset):
            if self._expected >= control.next_offset:
                break
            await self._visit(keys, span)
        for span in pending_spans(control):
            if span.end_offset >= self._expected:
                await self._visit(keys, span)
        if self._expected < control.next_offset:
            await self._report_gap(control.next_offset)
        await self._check_compaction(keys)
        return self._found.report()

    def report_after(self, error: LlogError) -> VerifyReport:
        """Return the findings so far, with the error of the control record that ended the walk."""
        self._report(ProblemKind.CONTROL, 0, 0, str(error))
        return self._found.report()

    async def _visit(self, keys: PartitionKeys, span: EntrySpan) -> None:
        start, end, entry = span
        if start > self._expected:
            if await self._is_covered(keys, span, self._expected):
                self._report_stale(span)
                return
            await self._report_gap(start)
            if end < self._expected:
                return  # The span was trimmed meanwhile.
        elif start < self._expected and self._found.pieces:
            if entry.kind is Kind.COMPACTED:
                await self._report_inside(keys, span)
            else:
                self._report(
                    ProblemKind.OVERLAP, start, self._expected - 1, f"the entry that ends at {end} begins too low"
                )
        await self._renew()
        trouble = await self._check_bytes(span)
        if trouble is not None and await self._is_covered(keys, span, start):
            self._report_stale(span)
            return
        if trouble is not None:
            self._report(trouble[0], start, end, trouble[1])
        else:
            self._found.records += end - max(start, self._expected) + 1
            self._found.bytes += entry.byte_length
            await self._check_header(keys, span)
        self._found.pieces += 1
        self._check_times(span)
        self._check_inline_total(span)
        self._expected = end + 1
        if self._progress is not None:
            self._progress(self._found.records)

    async def _check_bytes(self, span: EntrySpan) -> tuple[ProblemKind, str] | None:
        """Return what is wrong with the bytes of a span, its checksum or its record count; None if nothing is."""
        entry = span.entry
        try:
            data = await read_bytes(self._log, entry)
            if len(data) != entry.byte_length:
                raise InconsistentReadState(f"{location_of(entry)} has {len(data)} bytes, not {entry.byte_length}")
            decode_span(self._tp, span, data)
            if entry.parts != layout_of(data).parts:
                raise InconsistentReadState(f"{location_of(entry)} has other batches than its index entry says")
        except (BlobNotFound, WrongStore) as error:
            return ProblemKind.MISSING_BLOB, str(error)
        except CorruptBatch as error:
            return ProblemKind.CORRUPT, str(error)
        except InconsistentReadState as error:
            return ProblemKind.COUNT_MISMATCH, str(error)
        return None

    async def _check_header(self, keys: PartitionKeys, span: EntrySpan) -> None:
        """Report a blob header that contradicts the index entry. Inline records and compacted blobs of older versions
        have no header.
        """
        entry = span.entry
        if entry.byte_offset == 0:
            return
        try:
            body = await self._headers.body_at(self._log.blob_name(entry.data_uri), entry.byte_offset)
        except CorruptBatch as error:
            self._report(ProblemKind.HEADER, *span[:2], f"blob {entry.data_uri}: {error}")
            return
        except BlobNotFound:
            return  # The blob was collected since its records were read.
        if body is None or not _agree(keys, span, body):
            detail = f"the header of blob {entry.data_uri} does not name these records at byte {entry.byte_offset}"
            self._report(ProblemKind.HEADER, *span[:2], detail)

    async def _is_covered(self, keys: PartitionKeys, span: EntrySpan, offset: int) -> bool:
        """Return whether a later index entry covers `offset` and the whole span."""
        key = keys.entry(span.end_offset) + "\x00"
        for found in await self._log.meta.range(key, prefix_end(keys.index), _LOOKAHEAD):
            entry = decode_if_intact(found)
            if entry is not None and end_offset_of(found.key) - entry.msg_count + 1 <= min(offset, span.start_offset):
                return True
        return False

    async def _report_inside(self, keys: PartitionKeys, compacted: EntrySpan) -> None:
        """Report the entries inside the range of a COMPACTED one: as leftovers, or as an overlap if they reach out of
        the range.

        Finds none if the compaction ended while the walk passed.
        """
        low, high = keys.entry(compacted.start_offset), keys.entry(compacted.end_offset)
        for found in await self._log.meta.range(low, high, _LOOKAHEAD):
            entry, end = decode_if_intact(found), end_offset_of(found.key)
            if entry is None:
                continue
            span = EntrySpan(end - entry.msg_count + 1, end, entry)
            if span.start_offset >= compacted.start_offset:
                self._report_stale(span)
            else:
                self._report(
                    ProblemKind.OVERLAP,
                    compacted.start_offset,
                    end,
                    f"two entries cover this, ending at {end} and {compacted.end_offset}",
                )

    async def _report_gap(self, until: int) -> None:
        """Report a gap from the expected offset to below `until`, unless these offsets were trimmed meanwhile."""
        _, control = await Reader(self._log).control(self._tp)
        self._expected = max(self._expected, control.log_start_offset)
        if self._expected < until:
            self._report(
                ProblemKind.GAP,
                self._expected,
                until - 1,
                "no index entry covers these offsets: `llog repair index` shows what can be put back",
            )
            self._expected = until

    def _check_control(self, control: Control) -> None:
        start, following = control.log_start_offset, control.next_offset
        if not FIRST_OFFSET <= start <= following:
            self._report(ProblemKind.CONTROL, start, following, "the log start is not between 1 and the next offset")
        if control.pending is not None and control.pending.end_offset != following - 1:
            detail = f"`pending` ends at {control.pending.end_offset}, but the next offset is {following}"
            self._report(ProblemKind.CONTROL, control.pending.start_offset, control.pending.end_offset, detail)
        if not 0 <= control.inline_compacted <= control.inline_total:
            detail = f"{control.inline_compacted} of {control.inline_total} inline bytes count as compacted or trimmed"
            self._report(ProblemKind.CONTROL, 0, 0, detail)
        for name, state in control.producers.items():
            if state.last and state.last[-1].end_offset >= following:
                detail = f"producer {name} is remembered beyond the next offset {following}"
                self._report(ProblemKind.CONTROL, state.last[-1].start_offset, state.last[-1].end_offset, detail)

    def _check_times(self, span: EntrySpan) -> None:
        times = span.entry.max_append_ms, span.entry.max_timestamp_ms
        if times[0] < self._newest[0] or times[1] < self._newest[1]:
            detail = (
                f"the running maxima {times} are below {self._newest} of the entry before: lookups by time go wrong"
            )
            self._report(ProblemKind.TIME_ORDER, span.start_offset, span.end_offset, detail)
        self._newest = max(times[0], self._newest[0]), max(times[1], self._newest[1])

    def _check_inline_total(self, span: EntrySpan) -> None:
        """Report a running total of inline bytes that is lower than the entries up to this one need."""
        entry = span.entry
        needed = self._inline_total + (entry.byte_length if is_inline(entry.data_uri) else 0)
        if self._found.pieces > 1 and entry.inline_total < needed:
            detail = (
                f"the running total of inline bytes is {entry.inline_total}, but the entries up to here need {needed}"
            )
            self._report(ProblemKind.INLINE_TOTAL, span.start_offset, span.end_offset, detail)
        self._inline_total = max(entry.inline_total, self._inline_total)

    async def _check_compaction(self, keys: PartitionKeys) -> None:
        """Check the cursor and the breadcrumb against a control record that is read after them and can only be
        ahead.
        """
        cursor = await self._log.meta.get(keys.cursor)
        breadcrumb = await self._log.meta.get(keys.compaction)
        following = (await Reader(self._log).control(self._tp))[1].next_offset
        if cursor is None:
            self._report(ProblemKind.CURSOR, FIRST_OFFSET, following - 1, "there is no compaction cursor")
        else:
            offset = decode(CompactionCursor, cursor.value, cursor.key).offset
            if not FIRST_OFFSET <= offset <= following:
                detail = f"the compaction cursor is at {offset}, beyond the next offset {following}"
                self._report(ProblemKind.CURSOR, offset, offset, detail)
        if breadcrumb is None:
            return
        record = decode(Compaction, breadcrumb.value, breadcrumb.key)
        detail = ""
        if not FIRST_OFFSET <= record.start_offset <= record.end_offset < following:
            detail = f"it is not within the log, whose next offset is {following}"
        elif record.state is not CompactionState.WRITING_BLOB and await self._log.blobs.head(record.blob) is None:
            detail = f"its blob {record.blob} is missing in state {record.state}"
        if detail and await self._log.meta.get(keys.compaction) == breadcrumb:
            self._report(ProblemKind.BREADCRUMB, record.start_offset, record.end_offset, f"compaction: {detail}")

    async def _index(self, keys: PartitionKeys, start_offset: int) -> AsyncIterator[EntrySpan]:
        key, end = keys.entry(start_offset), prefix_end(keys.index)
        while True:
            page = await self._log.meta.range(key, end, _PAGE)
            for found in page:
                last = end_offset_of(found.key)
                try:
                    entry = decode(IndexEntry, found.value, found.key)
                except InconsistentReadState as error:
                    self._report(ProblemKind.CORRUPT, last, last, str(error))
                    continue
                yield EntrySpan(last - entry.msg_count + 1, last, entry)
            if len(page) < _PAGE:
                return
            key = page[-1].key + "\x00"

    async def _renew(self) -> None:
        """Renew the pin; replace one that has ended, since the walk resolves each page anew."""
        now = self._log.runtime.now_ms()
        if 0 <= now - self._renewed_ms < LEASE_MS // 4:
            return
        self._renewed_ms = now
        if not await renew(self._log, self.pin_id):
            self.pin_id = await pin(self._log, f"verify {self._tp}")

    def _report_stale(self, span: EntrySpan) -> None:
        detail = f"a leftover inside a compacted range, naming {describe_address(span.entry.data_uri)}"
        self._report(ProblemKind.STALE_ENTRY, span.start_offset, span.end_offset, detail)

    def _report(self, kind: ProblemKind, start_offset: int, end_offset: int, detail: str) -> None:
        problem = Problem(kind=kind, start_offset=start_offset, end_offset=end_offset, detail=detail)
        if problem not in self._found.problems:
            # The walk meets a leftover twice: in order, and under the entry that covers it.
            self._found.add(problem)


def _agree(keys: PartitionKeys, span: EntrySpan, body: Body) -> bool:
    """Return whether the index entry and the blob's header describe the same records."""
    entry = span.entry
    here = (keys.directory, keys.partition, entry.byte_length, entry.msg_count, entry.encoding)
    there = (body.directory, body.partition, body.body_length, body.msg_count, body.encoding)
    placed = body.start_offset in (None, span.start_offset)
    return here == there and placed and (body.next_offset is None or body.next_offset <= span.start_offset)
