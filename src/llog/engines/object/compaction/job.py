"""One compaction, step by step. A compactor that finds its breadcrumb continues from the state there:

WRITING_BLOB (the blob is named but may not exist) → WRITING_COMPACTED_INDEX (CAS of the run's highest index entry to
COMPACTED) → DELETING_OLD (lower index keys) → UPDATING_CURSOR → cleared. A merge leaves UPDATING_CURSOR out. Every step
may be repeated, and every change of the breadcrumb is a CAS: a compactor that loses it has been overtaken, and stops.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from llog.base.concurrency import gather_bounded
from llog.batch.columns import Columns
from llog.batch.encodings import decoder
from llog.batch.format import Codec
from llog.batch.multi_batch import BodyLayout, encode_run, layout_of
from llog.batch.shared import MAGIC as SHARED_MAGIC
from llog.batch.shared import BlobHeader, Body, pack_encoded, pack_one, unpack_header
from llog.engines.object.clocks import stamp_within
from llog.engines.object.compaction.merge import read_run_again
from llog.engines.object.compaction.plan import Breadcrumb, Plan, clear, no_cursor, read_cursor
from llog.engines.object.control_record import read_control
from llog.engines.object.entry_bytes import location_of, read_ranges
from llog.engines.object.reader import EntrySpan, decode_span, parts_of
from llog.errors import (
    BlobExists,
    BlobNotFound,
    CorruptBatch,
    InconsistentReadState,
    LlogError,
    RecordTooLarge,
    VersionMismatch,
)
from llog.log.cas import update
from llog.log.inline import is_inline
from llog.log.keys import COMPACTED_SHARED, PartitionKeys
from llog.log.log import Log
from llog.log.records import Compaction, CompactionCursor, CompactionState, Control, IndexEntry, Kind, decode, encode
from llog.model import TopicPartition
from llog.runtime import stamp_of, uuid7
from llog.stores.blob_ranges import get_each
from llog.stores.blobs import Buffer
from llog.stores.counting import OperationCounts, measure
from llog.stores.meta import ABSENT, MetaEntry, read_confirmed

_WRITER: Final = "compactor"


class WrittenBlob(NamedTuple):
    """The layout of the compacted blob: where the records of the run lie in it."""

    byte_offset: int
    encoded: BodyLayout


class Job(NamedTuple):
    """A compaction whose breadcrumb is stored."""

    plan: Plan
    breadcrumb: Breadcrumb
    cursor_version: int
    has_blob: bool
    """Whether the compacted blob exists already, so that its slices need not be read."""
    written: WrittenBlob | None = None
    """Where the run's records lie in a blob that this compactor has put for several partitions."""


class Done(NamedTuple):
    records: int
    entries: int
    bytes_written: int


class Replan(NamedTuple):
    """The run could not be compacted as planned, and its breadcrumb is cleared: plan another run."""

    stop_before: int | None = None
    damaged: str | None = None
    """A damaged slice, which the cursor has passed; or one that keeps a run from being merged."""


Slice = Buffer | LlogError
"""The bytes of a span, or the error why they cannot be read."""


def shares_blob(plan: Plan) -> bool:
    """Return whether the run consists of inline records, which are too few for a blob of their own."""
    return plan.breadcrumb is None and all(is_inline(span.entry.data_uri) for span in plan.spans)


def shared_blob_name(log: Log, plans: Sequence[Plan]) -> str:
    stamp = stamp_within(log.runtime.now_ms(), *(plan.control for plan in plans))
    return COMPACTED_SHARED + uuid7(stamp, log.runtime.random())


async def begin(log: Log, plan: Plan, shared_blob: str | None = None) -> Job | None:
    """Put the breadcrumb, then check that the run is still the next one; return None if it is not, or if another
    compactor was faster. A new run goes into `shared_blob`, if there is one.
    """
    tp, keys, breadcrumb = plan.tp, plan.keys, plan.breadcrumb
    resumed = breadcrumb is not None
    if breadcrumb is None:
        stamp = stamp_within(log.runtime.now_ms(), plan.control)
        record = Compaction(
            state=CompactionState.WRITING_BLOB,
            start_offset=plan.spans[0].start_offset,
            end_offset=plan.spans[-1].end_offset,
            blob=shared_blob or keys.compacted(uuid7(stamp, log.runtime.random())),
            expected_version=plan.version,
            merge=plan.merge,
        )
        try:
            breadcrumb = Breadcrumb(record, await log.meta.put(keys.compaction, encode(record), expected=ABSENT))
        except VersionMismatch:
            return None
    if breadcrumb.record.state is not CompactionState.WRITING_BLOB:
        return Job(plan, breadcrumb, -1, has_blob=True)
    if breadcrumb.record.merge:
        return await _begin_merge(log, plan, breadcrumb, resumed=resumed)
    reads = await log.meta.begin_reads()
    try:
        cursor, cursor_version = await read_cursor(log, tp, keys)
    except LlogError:
        await clear(log, keys, breadcrumb)
        raise
    highest = await log.meta.get(keys.entry(breadcrumb.record.end_offset))
    if not is_still_next(breadcrumb.record, cursor, highest):
        await clear(log, keys, breadcrumb)
        return None
    # In a stale read, every run is still the next one. The breadcrumb stays for the next compactor.
    await reads.confirm()
    has_blob = resumed and await log.blobs.head(breadcrumb.record.blob) is not None
    return Job(plan, breadcrumb, cursor_version, has_blob)


async def _begin_merge(log: Log, plan: Plan, breadcrumb: Breadcrumb, *, resumed: bool) -> Job | None:
    """Read the whole run again, now that no other compaction can begin; return None if it has changed."""
    reads = await log.meta.begin_reads()
    spans = await read_run_again(log, plan.keys, breadcrumb.record)
    if spans is None:
        await clear(log, plan.keys, breadcrumb)
        return None
    # A stale read would show entries that another merge has joined meanwhile.
    await reads.confirm()
    has_blob = resumed and await log.blobs.head(breadcrumb.record.blob) is not None
    return Job(plan._replace(spans=spans), breadcrumb, -1, has_blob)


def is_still_next(run: Compaction, cursor: int, highest: MetaEntry | None) -> bool:
    """Return whether the run begins at the cursor and its highest entry is unchanged.

    A run that was chosen before another compaction ended would overlap that compaction.
    """
    return cursor == run.start_offset and highest is not None and highest.version == run.expected_version


async def fetch(log: Log, jobs: Sequence[Job], concurrency: int) -> list[list[Slice]]:
    """Read the slices of all jobs. Each blob is read once, and ranges that are near each other in one request."""
    wanted: dict[str, list[tuple[int, int, IndexEntry]]] = {}
    slices: list[list[Slice]] = []
    for number, job in enumerate(jobs):
        spans = () if job.has_blob else job.plan.spans
        slices.append([b""] * len(spans))
        for position, span in enumerate(spans):
            wanted.setdefault(span.entry.data_uri, []).append((number, position, span.entry))

    async def fetch_blob(data_uri: str) -> None:
        places = wanted[data_uri]
        found = await _get_ranges(log, data_uri, [(entry.byte_offset, entry.byte_length) for _, _, entry in places])
        for (number, position, _), part in zip(places, found, strict=True):
            slices[number][position] = part

    await gather_bounded(fetch_blob, wanted, concurrency)
    return slices


async def write_shared_blob(
    log: Log, codec: Codec, jobs: Sequence[Job], slices: Sequence[Sequence[Slice]]
) -> list[Job]:
    """Put one blob with the runs of all these jobs, whose breadcrumbs name it; return the jobs with their layouts.

    A job whose slices are damaged is left as it is. So are all jobs if another compactor, which has resumed one of
    them, was faster: each then looks for its run in the blob that exists.
    """
    encoded: list[tuple[Body, Sequence[Buffer]]] = []
    layouts: list[tuple[int, BodyLayout]] = []
    for number, (job, own) in enumerate(zip(jobs, slices, strict=True)):
        try:
            parts = [part for position, data in enumerate(own) for part in _decode(job, position, data)]
        except (CorruptBatch, InconsistentReadState):
            continue
        buffers, layout = encode_run(parts, codec)
        encoded.append((_body(job, layout, append_ms=parts[0].append_runs[0][1]), buffers))
        layouts.append((number, layout))
    written = list(jobs)
    if not encoded:
        return written
    blob = jobs[0].breadcrumb.record.blob
    buffers, bodies = pack_encoded(encoded, writer=_WRITER, created_at_ms=stamp_of(blob) or 0)
    try:
        await log.blobs.put(blob, buffers)
    except BlobExists:
        return written
    for (number, layout), body in zip(layouts, bodies, strict=True):
        written[number] = jobs[number]._replace(written=WrittenBlob(body.body_offset, layout))
    return written


async def finish(
    log: Log, codec: Codec, job: Job, slices: list[Slice], stages: OperationCounts
) -> Done | Replan | None:
    """Finish the job from its present state, and measure its stages; return None if another compactor took it over.
    Empties `slices`.
    """
    breadcrumb = job.breadcrumb
    if breadcrumb.record.state is CompactionState.WRITING_BLOB:
        with measure(stages, "write"):
            written = await _write_blob(log, codec, job, slices)
        if not isinstance(written, WrittenBlob):
            return written
        entry = _compacted_entry(log, job, written)
        following = await _advance(log, job.plan.keys, breadcrumb, CompactionState.WRITING_COMPACTED_INDEX, entry)
        if following is None:
            return None
        breadcrumb = following
    with measure(stages, "publish"):
        return await _finish_written(log, job, breadcrumb)


async def _finish_written(log: Log, job: Job, breadcrumb: Breadcrumb) -> Done | Replan | None:
    """Finish a job whose blob exists."""
    keys = job.plan.keys
    if breadcrumb.record.state is CompactionState.WRITING_COMPACTED_INDEX:
        if not await _publish(log, keys, breadcrumb):
            if breadcrumb.record.merge:
                await _require_highest_entry(log, job.plan.tp, keys, breadcrumb)
            return Replan() if await clear(log, keys, breadcrumb) else None
        following = await _advance(log, keys, breadcrumb, CompactionState.DELETING_OLD)
        if following is None:
            return None
        breadcrumb = following
    if breadcrumb.record.state is CompactionState.DELETING_OLD:
        await log.meta.delete_range(
            keys.entry(breadcrumb.record.start_offset), keys.entry(breadcrumb.record.end_offset)
        )
    entry_there = breadcrumb.record.entry
    if breadcrumb.record.merge:
        await clear(log, keys, breadcrumb)
        return _done(job, breadcrumb)
    if breadcrumb.record.state is CompactionState.DELETING_OLD:
        following = await _advance(log, keys, breadcrumb, CompactionState.UPDATING_CURSOR)
        if following is None:
            return None
        breadcrumb = following
    await _raise_cursor(log, job.plan.tp, keys, breadcrumb.record.end_offset + 1)
    if entry_there is not None and entry_there.inline_total > job.plan.control.inline_compacted:
        await count_inline(log, keys, entry_there)
    await clear(log, keys, breadcrumb)
    return _done(job, breadcrumb)


def _done(job: Job, breadcrumb: Breadcrumb) -> Done:
    record = breadcrumb.record
    size = 0 if record.entry is None else record.entry.byte_length
    return Done(record.end_offset - record.start_offset + 1, len(job.plan.spans), size)


async def _get_ranges(log: Log, data_uri: str, ranges: Sequence[tuple[int, int]]) -> Sequence[Slice]:
    """Read the ranges of one blob; return one slice or error for each."""
    try:
        if is_inline(data_uri):
            return await read_ranges(log, data_uri, ranges)
        return await get_each(log.blobs, log.blob_name(data_uri), ranges)
    except LlogError as error:
        return [error] * len(ranges)


async def _write_blob(log: Log, codec: Codec, job: Job, slices: list[Slice]) -> WrittenBlob | Replan | None:
    """Put the compacted blob, or use the one that exists; return its layout, or how to plan another run."""
    plan, breadcrumb = job.plan, job.breadcrumb
    if job.written is not None:
        return job.written
    if job.has_blob:
        return await _read_existing_blob(log, job)
    parts: list[Columns] = []
    for position, span in enumerate(plan.spans):
        try:
            parts += _decode(job, position, slices[position])
        except (BlobNotFound, CorruptBatch, InconsistentReadState) as error:
            return await _cut_before_damage(log, job, span, error)
    slices.clear()
    try:
        buffers, encoded = encode_run(parts, codec)
    except RecordTooLarge:
        if plan.merge:
            return Replan() if await clear(log, plan.keys, breadcrumb) else None
        if len(plan.spans) == 1:
            raise
        half = plan.spans[len(plan.spans) // 2].start_offset
        return Replan(stop_before=half) if await clear(log, plan.keys, breadcrumb) else None
    # Every twin writes the same header, so that their blobs are the same.
    body = _body(job, encoded, append_ms=parts[0].append_runs[0][1])
    created_at_ms = stamp_of(breadcrumb.record.blob) or 0
    buffers, body = pack_one(body, buffers, writer=_WRITER, created_at_ms=created_at_ms)
    try:
        await log.blobs.put(breadcrumb.record.blob, buffers)
    except BlobExists:
        return await _read_existing_blob(log, job)
    return WrittenBlob(body.body_offset, encoded)


def _decode(job: Job, position: int, data: Slice) -> list[Columns]:
    """Return the records of a slice: one part for each of its batches, so that those of the new blob are not larger."""
    if isinstance(data, LlogError):
        raise data
    span, view = job.plan.spans[position], memoryview(data).cast("B")
    parts = parts_of(span)
    if len(parts) == 1:
        return [decode_span(job.plan.tp, span, view)]
    starts = [part.entry.byte_offset - span.entry.byte_offset for part in parts]
    return [
        decode_span(job.plan.tp, part, view[start : start + part.entry.byte_length])
        for start, part in zip(starts, parts, strict=True)
    ]


def _body(job: Job, encoded: BodyLayout, *, append_ms: int) -> Body:
    """Return the run's description for the blob header; its offsets allow to put a lost index entry back."""
    entries = [span.entry for span in job.plan.spans]
    return Body(
        topic=job.plan.tp.topic,
        partition=job.plan.tp.partition,
        directory=job.plan.keys.directory,
        msg_count=sum(entry.msg_count for entry in entries),
        encoding=encoded.encoding,
        body_offset=0,
        body_length=encoded.byte_length,
        append_ms=append_ms,
        timestamp_min=min(entry.timestamp_min for entry in entries),
        timestamp_max=max(entry.timestamp_max for entry in entries),
        start_offset=job.breadcrumb.record.start_offset,
    )


async def _read_existing_blob(log: Log, job: Job) -> WrittenBlob | Replan | None:
    """Return the layout of the blob that a twin has put; if it does not hold the run's records, clear the breadcrumb
    and plan again under another name.
    """
    record = job.breadcrumb.record
    try:
        data = memoryview(await log.blobs.get(record.blob))
        position = 0
        if bytes(data[: len(SHARED_MAGIC)]) == SHARED_MAGIC:  # Blobs of older versions have no header.
            body = _own_body(job, unpack_header(data))
            position, data = body.body_offset, data[body.body_offset : body.body_offset + body.body_length]
        encoded = layout_of(data)
        if decoder(encoded.encoding)(data).count == record.end_offset - record.start_offset + 1:
            return WrittenBlob(position, encoded)
    except (BlobNotFound, CorruptBatch):
        pass
    return Replan() if await clear(log, job.plan.keys, job.breadcrumb) else None


def _own_body(job: Job, header: BlobHeader) -> Body:
    """Return the body of the job's run; raise `CorruptBatch` if the blob does not have it, because the compactor that
    put it had resumed another partition's run.
    """
    keys, start = job.plan.keys, job.breadcrumb.record.start_offset
    for body in header.partitions:
        if (body.directory, body.partition) == (keys.directory, keys.partition) and body.start_offset in (None, start):
            return body
    raise CorruptBatch(f"blob {job.breadcrumb.record.blob} has no records of {job.plan.tp} from offset {start} on")


async def _cut_before_damage(log: Log, job: Job, span: EntrySpan, error: LlogError) -> Replan | None:
    """Leave a damaged slice as it is: end the run before it, or move the cursor past it if it is the first. A merge is
    given up, and moves no cursor.
    """
    keys, first = job.plan.keys, job.plan.spans[0]
    if not await clear(log, keys, job.breadcrumb):
        return None
    if span != first and not job.plan.merge:
        return Replan(stop_before=span.start_offset)
    found = await read_confirmed(log.meta, lambda: log.meta.get(keys.entry(span.end_offset)))
    if found is None or decode(IndexEntry, found.value, found.key) != span.entry:
        return Replan()  # The entry was trimmed or compacted meanwhile; it is not damaged.
    if not job.plan.merge:
        try:
            await log.meta.put(keys.cursor, encode(CompactionCursor(span.end_offset + 1)), expected=job.cursor_version)
        except VersionMismatch:
            return Replan()
    what = f"offsets {span.start_offset} to {span.end_offset} of {job.plan.tp}"
    return Replan(damaged=f"{what} in {location_of(span.entry)}: {error}")


def _compacted_entry(log: Log, job: Job, written: WrittenBlob) -> IndexEntry:
    encoded = written.encoded
    entries = [span.entry for span in job.plan.spans]
    return IndexEntry(
        kind=Kind.COMPACTED,
        data_uri=log.data_uri(job.breadcrumb.record.blob),
        byte_offset=written.byte_offset,
        byte_length=encoded.byte_length,
        msg_count=sum(entry.msg_count for entry in entries),
        encoding=encoded.encoding,
        append_ms=entries[-1].append_ms,
        timestamp_min=min(entry.timestamp_min for entry in entries),
        timestamp_max=max(entry.timestamp_max for entry in entries),
        max_append_ms=entries[-1].max_append_ms,
        max_timestamp_ms=entries[-1].max_timestamp_ms,
        parts=encoded.parts,
        inline_total=entries[-1].inline_total,
    )


async def _advance(
    log: Log, keys: PartitionKeys, breadcrumb: Breadcrumb, state: CompactionState, entry: IndexEntry | None = None
) -> Breadcrumb | None:
    """Put the breadcrumb in its next state and return it; return None if another compactor took it over."""
    record = msgspec.structs.replace(breadcrumb.record, state=state, entry=entry or breadcrumb.record.entry)
    try:
        return Breadcrumb(record, await log.meta.put(keys.compaction, encode(record), expected=breadcrumb.version))
    except VersionMismatch:
        return None


async def _publish(log: Log, keys: PartitionKeys, breadcrumb: Breadcrumb) -> bool:
    """Make the run's highest entry COMPACTED; return False if the entry has changed since the run was chosen, which is
    final.
    """
    record = breadcrumb.record
    if record.entry is None:
        raise InconsistentReadState(f"metadata key {keys.compaction} is in state {record.state} without an index entry")
    key = keys.entry(record.end_offset)
    try:
        await log.meta.put(key, encode(record.entry), expected=record.expected_version)
    except VersionMismatch:
        # A stale read would not show what a twin has published, and the breadcrumb must not be cleared for that.
        found = await read_confirmed(log.meta, lambda: log.meta.get(key))
        return found is not None and decode(IndexEntry, found.value, key) == record.entry
    return True


async def _require_highest_entry(log: Log, tp: TopicPartition, keys: PartitionKeys, breadcrumb: Breadcrumb) -> None:
    """Raise `InconsistentReadState` if the highest entry of a merge was lost, perhaps after a twin had published it.

    The breadcrumb then stays until a repair has put the entry back. Without it, another merge could take the lower
    entries of the run, and the entry that is put back would overlap its result.
    """
    end = breadcrumb.record.end_offset

    async def is_lost() -> bool:
        found = await log.meta.get(keys.entry(end))
        control, _ = await read_control(log, tp, keys)
        there = await log.meta.get(keys.compaction)
        is_ours = there is not None and there.version == breadcrumb.version  # Else a twin has finished the merge.
        return found is None and control.log_start_offset <= end and is_ours

    if await read_confirmed(log.meta, is_lost):
        raise InconsistentReadState(
            f"the index of {tp} has lost the entry that ends at {end}, which was being merged: `llog repair index` "
            "shows what can be put back"
        )


async def count_inline(log: Log, keys: PartitionKeys, entry: IndexEntry) -> None:
    """Count the inline bytes up to this compacted entry as compacted, after the entries that held them are deleted.

    The count is raised to a running total, so that a compaction which is resumed counts once.
    """

    def raise_count(control: Control) -> Control:
        counted = max(control.inline_compacted, entry.inline_total)
        return msgspec.structs.replace(control, inline_compacted=counted)

    await update(log, keys.control, Control, raise_count)


async def _raise_cursor(log: Log, tp: TopicPartition, keys: PartitionKeys, offset: int) -> None:
    """Raise the cursor to `offset` at least; it never goes back."""

    def raise_offset(cursor: CompactionCursor) -> CompactionCursor:
        return msgspec.structs.replace(cursor, offset=max(cursor.offset, offset))

    change = await update(log, keys.cursor, CompactionCursor, raise_offset)
    if change is None:
        raise no_cursor(tp)
