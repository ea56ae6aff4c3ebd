"""Exactly-once writing by many tasks and one driver, any of which may die, be repeated, or come back late.

1. A task makes sure that the sink's record exists (`open_sink`), then puts its records as blobs under `sink/{sink}/`.
2. The driver swaps {batch, manifest} into the record: the blobs of the one attempt that counts. `batch` only grows, so
   a leftover driver cannot bring back an older batch.
3. Any driver that finds a manifest appends its blobs, with one append per partition under producer = sink and
   sequence = batch: to repeat it changes nothing. Then the driver clears the manifest.

A restarted driver whose batch is already in the record applies the manifest there and ignores its own attempt, which
may have divided the records differently. A blob is safe from the collector once a manifest names it. Before that, the
collector raises the record's floor before it decides about blobs, so that step 2 fails instead of naming a blob that
may be gone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from llog.batch.columns import Columns, stamp
from llog.batch.format import Codec
from llog.batch.shared import Body, pack
from llog.engines.object.blob_headers import read_header
from llog.engines.object.clocks import AHEAD_MS, clamp_to_ceiling, may_commit, present_ms, stamp_within
from llog.engines.object.reader import Reader
from llog.engines.object.snapshot import take_snapshot
from llog.engines.object.writer import UploadedGroup, Writer
from llog.errors import (
    BlobCollected,
    BlobNotFound,
    InvalidArgument,
    LlogError,
    OutcomeUnknown,
    PartitionNotInitialized,
    RecordTooLarge,
    StaleWrite,
    UnknownProducer,
    VersionMismatch,
)
from llog.log.cas import Backoff, update
from llog.log.engine import AppendResult
from llog.log.inline import is_inline
from llog.log.keys import SINK_BLOBS, WAL, sink_key
from llog.log.log import Log
from llog.log.producers import Producer
from llog.log.records import Manifest, Sink, decode, encode
from llog.model import TopicPartition, check_topic_name
from llog.runtime import uuid7
from llog.stores.meta import ABSENT, VALUE_BYTES_MAX, read_confirmed

_TOUCH_INTERVAL_MS = 60_000
_ENTRY_BYTES = 300
"""About the most bytes that an index entry takes in a control record, without its blob's name."""
_CONTROL_BYTES = 256 << 10
"""The bytes reserved for the rest of a control record."""


class Upload(msgspec.Struct, frozen=True):
    """A blob that a task has put, and its bodies."""

    blob: str
    bodies: tuple[Body, ...]
    clock_repairs: int = 0
    """The sink's count when the blob's name was chosen."""


class PublishResult(msgspec.Struct, frozen=True, kw_only=True):
    """A published batch: by this attempt, or by an earlier one that counts instead (`repeated`)."""

    batch: int
    blobs: int
    repeated: bool


class SinkUploader:
    """The task's side of a sink: puts blobs."""

    def __init__(self, log: Log, sink: str, *, codec: Codec = Codec.NONE) -> None:
        self._log = log
        self._sink = check_sink(sink)
        self._codec = codec
        self._reader = Reader(log)
        self._known: dict[TopicPartition, tuple[str, int]] = {}

    async def upload(self, groups: Sequence[tuple[TopicPartition, Columns]]) -> Upload:
        """Put one blob that holds all groups. Appends nothing."""
        record = await open_sink(self._log, self._sink)
        now = self._log.runtime.now_ms()
        name = f"{SINK_BLOBS}{self._sink}/{uuid7(stamp_within(now, record), self._log.runtime.random())}"
        known = await self._partitions([tp for tp, _ in groups])
        parts, bodies = pack(
            [(tp, directory, stamp(part, now)) for (tp, part), (directory, _) in zip(groups, known, strict=True)],
            writer=f"sink:{self._sink}",
            created_at_ms=now,
            codec=self._codec,
            next_offsets=[next_offset for _, next_offset in known],
        )
        await self._log.blobs.put(name, parts)
        return Upload(name, tuple(bodies), record.clock_repairs)

    async def _partitions(self, tps: Sequence[TopicPartition]) -> list[tuple[str, int]]:
        """Return each partition's directory, and its next offset when this task first wrote to it; the present one may
        be higher.
        """
        new = sorted(set(tps) - self._known.keys())
        for tp, (keys, control) in zip(new, await self._reader.controls(new), strict=True):
            self._known[tp] = keys.directory, control.next_offset
        return [self._known[tp] for tp in tps]


async def open_sink(log: Log, sink: str) -> Sink:
    """Return the sink's record; create it if it does not exist, and mark it as in use.

    Call this before every upload, so that the collector knows the sink.
    """
    key = sink_key(check_sink(sink))
    backoff = Backoff(log.runtime, key)
    while True:
        found = await log.meta.get(key)
        known = decode(Sink, found.value, key) if found else None
        if known is not None and abs(log.runtime.now_ms() - known.touched_ms) < _TOUCH_INTERVAL_MS:
            return known
        now = await present_ms(log)
        ceiling = now + AHEAD_MS
        if known is None:
            # The floor keeps a leftover driver of a forgotten sink with this name from committing its old uploads.
            record = Sink(touched_ms=now, blob_floor_ms=now, blob_ceiling_ms=ceiling)
        elif abs(now - known.touched_ms) < _TOUCH_INTERVAL_MS:
            return known  # Only a wrong clock made the last touch look long ago.
        else:
            # A sink of an older version has no ceiling until a repair sets one, because the first ceiling voids its
            # uploads.
            ceiling = max(ceiling, known.blob_ceiling_ms) if known.blob_ceiling_ms else 0
            record = msgspec.structs.replace(known, touched_ms=now, blob_ceiling_ms=ceiling)
        try:
            await log.meta.put(key, encode(record), expected=found.version if found else ABSENT)
            return record
        except (VersionMismatch, OutcomeUnknown) as error:
            await backoff.wait(error)


async def publish(log: Log, sink: str, batch: int, uploads: Sequence[Upload]) -> PublishResult:
    """Append this batch of the sink exactly once, whatever earlier attempts have done.

    Raises `StaleWrite` if the sink is past this batch, and `BlobCollected` if an upload waited too long; then nothing
    was written.
    """
    key = sink_key(check_sink(sink))
    if batch < 0:
        raise InvalidArgument(f"batches of a sink count from 0: {batch}")
    bodies = {upload.blob: upload.bodies for upload in uploads}
    mine: Manifest | None = None
    backoff = Backoff(log.runtime, key)
    while True:
        found = await log.meta.get(key) or await read_confirmed(log.meta, lambda: log.meta.get(key))
        if found is None:
            if uploads:
                raise StaleWrite(f"sink {sink} is gone: its write was finished and forgotten")
            await open_sink(log, sink)  # No task had anything to upload.
            continue
        record = decode(Sink, found.value, key)
        if record.manifest is not None:
            try:
                await _apply(log, sink, record.batch, record.manifest, bodies)
            except BlobNotFound:
                if await _is_unchanged(log, key, found.version):
                    raise
                await backoff.wait()
                continue  # Another driver has applied the manifest, and the blob was compacted and collected.
            await _finish(log, key, record.batch)
        if record.batch > batch:
            raise StaleWrite(
                f"sink {sink} has come to batch {record.batch}: batch {batch} is a leftover of an older run"
            )
        if record.batch == batch:
            blobs = len(record.manifest.blobs) if record.manifest else 0
            return PublishResult(batch=batch, blobs=blobs, repeated=mine is None or record.manifest not in (None, mine))
        if record.manifest is not None:
            continue
        _check_uploads(sink, record, uploads)
        mine = await _make_manifest(log, uploads) if uploads else None
        named = msgspec.structs.replace(
            record, batch=batch, manifest=mine, touched_ms=clamp_to_ceiling(log.runtime.now_ms(), record)
        )
        try:
            await log.meta.put(key, encode(named), expected=found.version)
        except (VersionMismatch, OutcomeUnknown) as error:
            await backoff.wait(error)


async def forget_sink(log: Log, sink: str) -> None:
    """Delete the record of a finished write that nobody will repeat."""
    await log.meta.delete(sink_key(check_sink(sink)))


def check_sink(sink: str) -> str:
    return check_topic_name(sink)


def _check_uploads(sink: str, record: Sink, uploads: Sequence[Upload]) -> None:
    for upload in uploads:
        if upload.clock_repairs != record.clock_repairs:
            raise BlobCollected(
                f"blob {upload.blob} of sink {sink} was uploaded before `llog repair clock`, and its batch was not "
                "committed by then: run the batch again"
            )
        if not may_commit(record, upload.blob, upload.clock_repairs):
            raise BlobCollected(
                f"blob {upload.blob} of sink {sink} waited longer than the collector's grace period before its batch "
                "was committed: run the batch again, or raise LLOG_COLLECT_GRACE_MS"
            )


async def _make_manifest(log: Log, uploads: Sequence[Upload]) -> Manifest:
    bodies = [(TopicPartition(body.topic, body.partition), body) for upload in uploads for body in upload.bodies]
    tps = sorted({tp for tp, _ in bodies})
    found = dict(zip(tps, await Reader(log).controls(tps), strict=True))
    for tp, body in bodies:
        keys, _ = found[tp]
        if keys.directory != body.directory:
            raise PartitionNotInitialized(
                f"topic {tp.topic!r} was deleted and created again after records were uploaded for it: write them again"
            )
    since = {str(tp): control.next_offset for tp, (_, control) in found.items()}
    manifest = Manifest(blobs=tuple(upload.blob for upload in uploads), since=since)
    _check_size(log, manifest, uploads)
    return manifest


def _check_size(log: Log, manifest: Manifest, uploads: Sequence[Upload]) -> None:
    """Raise `RecordTooLarge` before the record names a manifest that could never be applied, which would stop its
    sink.
    """
    bodies = Counter((body.topic, body.partition) for upload in uploads for body in upload.bodies)
    bodies_most = max(bodies.values())
    entry_bytes = _ENTRY_BYTES + max(len(log.data_uri(blob)) for blob in manifest.blobs)
    if max(bodies_most * entry_bytes, len(encode(manifest))) > VALUE_BYTES_MAX - _CONTROL_BYTES:
        raise RecordTooLarge(
            f"a batch of {len(uploads)} uploads, {bodies_most} of them to one partition, is too many to append at "
            "once: raise uploadBytes, write with fewer tasks, or write less at a time"
        )


async def _apply(log: Log, sink: str, batch: int, manifest: Manifest, known: Mapping[str, tuple[Body, ...]]) -> None:
    """Append the blobs of the manifest, with one append per partition, in the manifest's order.

    The records of a topic that was deleted since then are dropped, after the reads that miss the topic were confirmed.
    """
    reads = await log.meta.begin_reads()
    sources: dict[TopicPartition, list[tuple[str, Body]]] = {}
    for blob in manifest.blobs:
        for body in known.get(blob) or (await read_header(log, blob)).partitions:
            sources.setdefault(TopicPartition(body.topic, body.partition), []).append((blob, body))
    uploads = [
        UploadedGroup(
            tp, bodies, Producer(id=f"sink:{sink}", sequence=batch, since=manifest.since[str(tp)], dense=False)
        )
        for tp, bodies in sources.items()
    ]
    writer = Writer(log)
    again: list[UploadedGroup] = []
    is_gone = False
    for upload, result in zip(uploads, await writer.append_uploaded(uploads), strict=True):
        if isinstance(result, UnknownProducer):
            try:
                still = await _resume_producer(log, upload.tp, upload.producer, {blob for blob, _ in upload.sources})
            except PartitionNotInitialized:
                is_gone = True
                continue
            if still is not None:
                again.append(upload._replace(producer=still))
        else:
            is_gone |= _is_gone(result)
    for result in await writer.append_uploaded(again):
        is_gone |= _is_gone(result)
    if is_gone:
        await reads.confirm()


def _is_gone(result: AppendResult | LlogError) -> bool:
    """Return whether the append found no topic; raise every other error."""
    if isinstance(result, LlogError) and not isinstance(result, PartitionNotInitialized):
        raise result
    return isinstance(result, LlogError)


async def _resume_producer(log: Log, tp: TopicPartition, producer: Producer, blobs: set[str]) -> Producer | None:
    """Return a forgotten producer with a `since` up to which it has not appended; None if it has appended.

    The index decides, as long as the records since then are neither compacted nor trimmed: after that, raises
    `UnknownProducer`.
    """
    log_start, stop = await Reader(log).bounds(tp)
    if log_start <= producer.since:
        uris = {extent.data_uri for extent in await take_snapshot(log, tp, producer.since, stop)}
        names = {log.blob_name(uri) for uri in uris if not is_inline(uri)}
        if names & blobs:
            return None
        if all(name.startswith((WAL, SINK_BLOBS)) for name in names):
            return msgspec.structs.replace(producer, since=stop)
    raise UnknownProducer(
        f"{tp} no longer shows whether batch {producer.sequence} of {producer.id} was appended: look for its records "
        f"from offset {producer.since} on, and start the query over with a new checkpoint"
    )


async def _is_unchanged(log: Log, key: str, version: int) -> bool:
    found = await read_confirmed(log.meta, lambda: log.meta.get(key))
    return found is not None and found.version == version


async def _finish(log: Log, key: str, batch: int) -> None:
    """Clear the manifest of this batch, which is completely applied."""

    def clear(record: Sink) -> Sink:
        if record.batch != batch or record.manifest is None:
            return record
        now = clamp_to_ceiling(log.runtime.now_ms(), record)
        return msgspec.structs.replace(record, manifest=None, finished_ms=max(now, record.finished_ms), touched_ms=now)

    await update(log, key, Sink, clear)
