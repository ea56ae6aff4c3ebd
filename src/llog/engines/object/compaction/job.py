"""One compaction, step by step. Whoever finds its breadcrumb goes on from the state it names:

WRITING_BLOB (the blob is named but may not exist) → WRITING_COMPACTED_INDEX (CAS of the run's highest index entry to
COMPACTED) → DELETING_OLD (lower index keys) → UPDATING_CURSOR → cleared. Every step may be repeated, and every change
of the breadcrumb is a CAS: who loses it has been overtaken, and stops.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from llog.batch.codecs import decoder
from llog.batch.columns import Columns
from llog.batch.format import Codec
from llog.batch.joined import Encoded, encode_run, layout_of
from llog.batch.shared import MAGIC as SHARED_MAGIC
from llog.batch.shared import Body, pack_one, unpack_header
from llog.engines.object.clocks import stamp_within
from llog.engines.object.compaction.plan import Crumb, Plan, clear, read_cursor
from llog.engines.object.reader import Piece, decode_piece
from llog.errors import (
    BlobExists,
    BlobNotFound,
    CorruptBatch,
    InconsistentReadState,
    LlogError,
    RecordTooLarge,
    VersionMismatch,
)
from llog.log.keys import PartitionKeys
from llog.log.log import Log
from llog.log.records import Compaction, CompactionState, Cursor, IndexEntry, Kind, decode, encode
from llog.model import TopicPartition
from llog.runtime import stamp_of, uuid7
from llog.stores.blobs import Buffer
from llog.stores.meta import ABSENT, Entry, confirmed

_WRITER: Final = "compactor"


class Job(NamedTuple):
    """A run whose breadcrumb is put."""

    plan: Plan
    crumb: Crumb
    cursor_version: int
    blob_there: bool
    """Somebody has put the compacted blob already: its slices need not be read."""


class Done(NamedTuple):
    records: int
    entries: int
    bytes_written: int


class Again(NamedTuple):
    """The run could not be compacted as it was; the breadcrumb is cleared."""

    stop_before: int | None = None
    damaged: str | None = None
    """A slice that the cursor has passed."""


class _Written(NamedTuple):
    """Where the records of the run lie in its blob."""

    byte_offset: int
    encoded: Encoded


Slice = Buffer | LlogError
"""The bytes of a piece, or why there are none."""


async def begin(log: Log, plan: Plan) -> Job | None:
    """Puts the breadcrumb, then looks whether the run is still the next one; None if it is not, or somebody was
    faster.
    """
    tp, keys, crumb = plan.tp, plan.keys, plan.crumb
    resumed = crumb is not None
    if crumb is None:
        stamp = stamp_within(log.runtime.now_ms(), plan.control)
        record = Compaction(
            state=CompactionState.WRITING_BLOB,
            start_offset=plan.pieces[0].start_offset,
            end_offset=plan.pieces[-1].end_offset,
            blob=keys.compacted(uuid7(stamp, log.runtime.random())),
            expected_version=plan.version,
        )
        try:
            crumb = Crumb(record, await log.meta.put(keys.compaction, encode(record), expected=ABSENT))
        except VersionMismatch:
            return None
    if crumb.record.state is not CompactionState.WRITING_BLOB:
        return Job(plan, crumb, -1, blob_there=True)
    reads = await log.meta.begin_reads()
    try:
        cursor, cursor_version = await read_cursor(log, tp, keys)
    except LlogError:
        await clear(log, keys, crumb)
        raise
    highest = await log.meta.get(keys.entry(crumb.record.end_offset))
    if not still_next(crumb.record, cursor, highest):
        await clear(log, keys, crumb)
        return None
    await (
        reads.confirm()
    )  # in an old state, every run is still the next one; the breadcrumb stays, for whoever comes next
    blob_there = resumed and await log.blobs.head(crumb.record.blob) is not None
    return Job(plan, crumb, cursor_version, blob_there)


def still_next(run: Compaction, cursor: int, highest: Entry | None) -> bool:
    """Whether the run is the next one at the cursor, and its highest entry unchanged.

    A run chosen before another compaction ended would overlap that one.
    """
    return cursor == run.start_offset and highest is not None and highest.version == run.expected_version


async def fetch(log: Log, jobs: Sequence[Job], concurrency: int) -> list[list[Slice]]:
    """The slices of all jobs, each blob being read once: near ranges of it are one request."""
    wanted: dict[str, list[tuple[int, int, IndexEntry]]] = {}
    slices: list[list[Slice]] = []
    for number, job in enumerate(jobs):
        pieces = () if job.blob_there else job.plan.pieces
        slices.append([b""] * len(pieces))
        for position, piece in enumerate(pieces):
            wanted.setdefault(piece.entry.data_uri, []).append((number, position, piece.entry))
    gate = asyncio.Semaphore(concurrency)

    async def one(data_uri: str, places: list[tuple[int, int, IndexEntry]]) -> None:
        ranges = [(entry.byte_offset, entry.byte_length) for _, _, entry in places]
        async with gate:
            found = await _get_ranges(log, data_uri, ranges)
        for (number, position, _), part in zip(places, found, strict=True):
            slices[number][position] = part

    await asyncio.gather(*(one(data_uri, places) for data_uri, places in wanted.items()))
    return slices


async def finish(log: Log, codec: Codec, job: Job, slices: list[Slice]) -> Done | Again | None:
    """Takes the job to its end from the state it is in; None if somebody else took it over. Empties `slices` as it
    goes.
    """
    keys, crumb = job.plan.keys, job.crumb
    if crumb.record.state is CompactionState.WRITING_BLOB:
        written = await _write_blob(log, codec, job, slices)
        if not isinstance(written, _Written):
            return written
        entry = _compacted_entry(log, job, written)
        following = await _advance(log, keys, crumb, CompactionState.WRITING_COMPACTED_INDEX, entry)
        if following is None:
            return None
        crumb = following
    if crumb.record.state is CompactionState.WRITING_COMPACTED_INDEX:
        if not await _publish(log, keys, crumb):
            return Again() if await clear(log, keys, crumb) else None
        following = await _advance(log, keys, crumb, CompactionState.DELETING_OLD)
        if following is None:
            return None
        crumb = following
    if crumb.record.state is CompactionState.DELETING_OLD:
        await log.meta.delete_range(keys.entry(crumb.record.start_offset), keys.entry(crumb.record.end_offset))
        following = await _advance(log, keys, crumb, CompactionState.UPDATING_CURSOR)
        if following is None:
            return None
        crumb = following
    await _raise_cursor(log, job.plan.tp, keys, crumb.record.end_offset + 1)
    await clear(log, keys, crumb)
    entry_there = crumb.record.entry
    size = 0 if entry_there is None else entry_there.byte_length
    return Done(crumb.record.end_offset - crumb.record.start_offset + 1, len(job.plan.pieces), size)


async def _get_ranges(log: Log, data_uri: str, ranges: Sequence[tuple[int, int]]) -> Sequence[Slice]:
    """One answer per range. A blob that is too short for one range says nothing about the others."""
    try:
        blob = log.blob_name(data_uri)
        return await log.blobs.get_ranges(blob, ranges)
    except CorruptBatch as error:
        if len(ranges) == 1:
            return [error]
        return [(await _get_ranges(log, data_uri, [one]))[0] for one in ranges]
    except LlogError as error:
        return [error] * len(ranges)


async def _write_blob(log: Log, codec: Codec, job: Job, slices: list[Slice]) -> _Written | Again | None:
    """Puts the compacted blob, or takes the one that is there; what is in it, or why the run must be another."""
    plan, crumb = job.plan, job.crumb
    if job.blob_there:
        return await _existing(log, job)
    parts: list[Columns] = []
    for position, piece in enumerate(plan.pieces):
        data = slices[position]
        try:
            if isinstance(data, LlogError):
                raise data
            parts.append(decode_piece(plan.tp, piece, data))
        except (BlobNotFound, CorruptBatch, InconsistentReadState) as error:
            return await _cut(log, job, piece, error)
    slices.clear()
    try:
        buffers, encoded = encode_run(parts, codec)
    except RecordTooLarge:
        if len(plan.pieces) == 1:
            raise
        half = plan.pieces[len(plan.pieces) // 2].start_offset
        return Again(stop_before=half) if await clear(log, plan.keys, crumb) else None
    # All that a header says is the same for every twin, so that their blobs are, too.
    body = _body(job, encoded, append_ms=parts[0].append_runs[0][1])
    created_at_ms = stamp_of(crumb.record.blob) or 0
    buffers, body = pack_one(body, buffers, writer=_WRITER, created_at_ms=created_at_ms)
    try:
        await log.blobs.put(crumb.record.blob, buffers)
    except BlobExists:
        return await _existing(log, job)
    return _Written(body.body_offset, encoded)


def _body(job: Job, encoded: Encoded, *, append_ms: int) -> Body:
    """The header's word on the run: with its offsets, by which a lost index entry can be put back."""
    entries = [piece.entry for piece in job.plan.pieces]
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
        start_offset=job.crumb.record.start_offset,
    )


async def _existing(log: Log, job: Job) -> _Written | Again | None:
    """What is in the blob that a twin has put; if it is not these records, another run gets another name."""
    record = job.crumb.record
    try:
        data = memoryview(await log.blobs.get(record.blob))
        position = 0
        if bytes(data[: len(SHARED_MAGIC)]) == SHARED_MAGIC:  # without a header if an older version put it
            body = unpack_header(data).partitions[0]
            position, data = body.body_offset, data[body.body_offset : body.body_offset + body.body_length]
        encoded = layout_of(data)
        if decoder(encoded.encoding)(data).count == record.end_offset - record.start_offset + 1:
            return _Written(position, encoded)
    except (BlobNotFound, CorruptBatch):
        pass
    return Again() if await clear(log, job.plan.keys, job.crumb) else None


async def _cut(log: Log, job: Job, piece: Piece, error: LlogError) -> Again | None:
    """A damaged slice stays as it is: the run ends before it, or the cursor passes it if it is the first."""
    keys, first = job.plan.keys, job.plan.pieces[0]
    if not await clear(log, keys, job.crumb):
        return None
    if piece != first:
        return Again(stop_before=piece.start_offset)
    found = await confirmed(log.meta, lambda: log.meta.get(keys.entry(piece.end_offset)))
    if found is None or decode(IndexEntry, found.value, found.key) != piece.entry:
        return Again()  # trimmed or compacted meanwhile, not damaged
    try:
        await log.meta.put(keys.cursor, encode(Cursor(piece.end_offset + 1)), expected=job.cursor_version)
    except VersionMismatch:
        return Again()
    what = f"offsets {piece.start_offset} to {piece.end_offset} of {job.plan.tp}"
    return Again(damaged=f"{what} in blob {piece.entry.data_uri}: {error}")


def _compacted_entry(log: Log, job: Job, written: _Written) -> IndexEntry:
    encoded = written.encoded
    entries = [piece.entry for piece in job.plan.pieces]
    return IndexEntry(
        kind=Kind.COMPACTED,
        data_uri=log.data_uri(job.crumb.record.blob),
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
    )


async def _advance(
    log: Log, keys: PartitionKeys, crumb: Crumb, state: CompactionState, entry: IndexEntry | None = None
) -> Crumb | None:
    """The breadcrumb in its next state; None if it is no longer ours."""
    record = msgspec.structs.replace(crumb.record, state=state, entry=entry or crumb.record.entry)
    try:
        return Crumb(record, await log.meta.put(keys.compaction, encode(record), expected=crumb.version))
    except VersionMismatch:
        return None


async def _publish(log: Log, keys: PartitionKeys, crumb: Crumb) -> bool:
    """Makes the highest entry COMPACTED; False if it is not the one that the run was chosen with, and can never be
    again.
    """
    record = crumb.record
    if record.entry is None:
        raise InconsistentReadState(f"metadata key {keys.compaction} is in state {record.state} without an index entry")
    key = keys.entry(record.end_offset)
    try:
        await log.meta.put(key, encode(record.entry), expected=record.expected_version)
    except VersionMismatch:
        # In an old state, what a twin has published is not there yet, and the breadcrumb must not be cleared for that.
        found = await confirmed(log.meta, lambda: log.meta.get(key))
        return found is not None and decode(IndexEntry, found.value, key) == record.entry
    return True


async def _raise_cursor(log: Log, tp: TopicPartition, keys: PartitionKeys, offset: int) -> None:
    """To `offset` at least: it never goes back."""
    while True:
        cursor, version = await read_cursor(log, tp, keys)
        if cursor >= offset:
            return
        try:
            await log.meta.put(keys.cursor, encode(Cursor(offset)), expected=version)
        except VersionMismatch:
            continue
        return
