"""Exactly-once writing by many tasks and one driver, any of which may die, be repeated, or come back late.

1. A task makes sure that the sink's record exists (`open_sink`), then puts its records as blobs under `sink/{sink}/`.
2. The driver CASes the record to {batch, manifest}: the blobs of the one attempt that counts. `batch` only grows, so a
   leftover driver can bring back nothing.
3. Whoever finds a manifest appends what it names, one append per partition under producer = sink and sequence = batch:
   repeating that changes nothing. Then the manifest is cleared.

A restarted driver whose batch is in the record already applies the manifest it finds and ignores its own attempt, which
may have cut the records differently. Blobs are safe from the collector once a manifest names them; before that the
record's floor, which the collector raises before it decides, makes step 2 fail instead of naming a blob that may be
gone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from llog.batch.columns import Columns, stamped
from llog.batch.format import Codec
from llog.batch.shared import Body, pack
from llog.engines.object.blob_headers import read_header
from llog.engines.object.clocks import AHEAD_MS, bounded_ms, may_commit, present_ms, stamp_within
from llog.engines.object.reader import Reader
from llog.engines.object.snapshot import take_snapshot
from llog.engines.object.writer import Uploaded, Writer
from llog.engines.port import AppendResult
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
from llog.log.keys import SINK_BLOBS, WAL, sink_key
from llog.log.log import Log
from llog.log.producers import Producer
from llog.log.records import Manifest, Sink, decode, encode
from llog.model import TopicPartition, check_topic_name
from llog.runtime import uuid7
from llog.stores.meta import ABSENT, VALUE_BYTES_MAX, confirmed

_TOUCH_INTERVAL_MS = 60_000
_ENTRY_BYTES = 300
"""An index entry in a control record, without its blob's name, at most about."""
_CONTROL_BYTES = 256 << 10
"""What is left for the rest of a control record."""


class Upload(msgspec.Struct, frozen=True):
    """One blob that a task has put, with what is in it."""

    blob: str
    bodies: tuple[Body, ...]
    clock_repairs: int = 0
    """Of the sink, when the blob's name was chosen."""


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """What a batch came to: of this attempt, or of the earlier one that counts (`repeated`)."""

    batch: int
    blobs: int
    repeated: bool


class SinkUploader:
    """The task's side: puts blobs for one sink."""

    def __init__(self, log: Log, sink: str, *, codec: Codec = Codec.NONE) -> None:
        self._log = log
        self._sink = check_sink(sink)
        self._codec = codec
        self._reader = Reader(log)
        self._known: dict[TopicPartition, tuple[str, int]] = {}

    async def upload(self, groups: Sequence[tuple[TopicPartition, Columns]]) -> Upload:
        """Puts one blob that holds all groups. Nothing is appended by this."""
        record = await open_sink(self._log, self._sink)
        now = self._log.runtime.now_ms()
        name = f"{SINK_BLOBS}{self._sink}/{uuid7(stamp_within(now, record), self._log.runtime.random())}"
        known = await self._partitions([tp for tp, _ in groups])
        parts, bodies = pack(
            [(tp, directory, stamped(part, now)) for (tp, part), (directory, _) in zip(groups, known, strict=True)],
            writer=f"sink:{self._sink}",
            created_at_ms=now,
            codec=self._codec,
            next_offsets=[next_offset for _, next_offset in known],
        )
        await self._log.blobs.put(name, parts)
        return Upload(name, tuple(bodies), record.clock_repairs)

    async def _partitions(self, tps: Sequence[TopicPartition]) -> list[tuple[str, int]]:
        """Each partition's directory, and its next offset when this task first wrote to it: it only grows."""
        new = sorted(set(tps) - self._known.keys())
        for tp, (keys, control) in zip(new, await self._reader.controls(new), strict=True):
            self._known[tp] = keys.directory, control.sequence_counter
        return [self._known[tp] for tp in tps]


async def open_sink(log: Log, sink: str) -> Sink:
    """The sink's record, created if there is none, and marked as in use: before any upload, so that the collector knows
    of it.
    """
    key = sink_key(check_sink(sink))
    while True:
        found = await log.meta.get(key)
        known = decode(Sink, found.value, key) if found else None
        if known is not None and abs(log.runtime.now_ms() - known.touched_ms) < _TOUCH_INTERVAL_MS:
            return known
        now = await present_ms(log)
        ceiling = now + AHEAD_MS
        if known is None:
            # The floor keeps a leftover driver of a forgotten sink of this name from committing what it uploaded
            # before.
            record = Sink(touched_ms=now, blob_floor_ms=now, blob_ceiling_ms=ceiling)
        elif abs(now - known.touched_ms) < _TOUCH_INTERVAL_MS:
            return known  # only by a clock that is wrong was that long ago
        else:
            # A sink of old has no ceiling until a repair gives it one: to set the first one voids what was uploaded.
            ceiling = max(ceiling, known.blob_ceiling_ms) if known.blob_ceiling_ms else 0
            record = msgspec.structs.replace(known, touched_ms=now, blob_ceiling_ms=ceiling)
        try:
            await log.meta.put(key, encode(record), expected=found.version if found else ABSENT)
        except (VersionMismatch, OutcomeUnknown):
            continue
        return record


async def publish(log: Log, sink: str, batch: int, uploads: Sequence[Upload]) -> Published:
    """Makes this batch of the sink part of the log, once, whatever was done for it before.

    `StaleWrite` if the sink is past this batch; `BlobCollected` if an upload waited too long: then nothing was written.
    """
    key = sink_key(check_sink(sink))
    if batch < 0:
        raise InvalidArgument(f"batches of a sink count from 0: {batch}")
    bodies = {upload.blob: upload.bodies for upload in uploads}
    mine: Manifest | None = None
    while True:
        found = await log.meta.get(key) or await confirmed(log.meta, lambda: log.meta.get(key))
        if found is None:
            if uploads:
                raise StaleWrite(f"sink {sink} is gone: its write was finished and forgotten")
            await open_sink(log, sink)  # no task had anything to upload
            continue
        record = decode(Sink, found.value, key)
        if record.manifest is not None:
            try:
                await _apply(log, sink, record.batch, record.manifest, bodies)
            except BlobNotFound:
                if await _unchanged(log, key, found.version):
                    raise
                continue  # another driver has applied it since, and the blob was compacted and collected
            await _finish(log, key, record.batch)
        if record.batch > batch:
            raise StaleWrite(
                f"sink {sink} has come to batch {record.batch}: batch {batch} is a leftover of an older run"
            )
        if record.batch == batch:
            blobs = len(record.manifest.blobs) if record.manifest else 0
            return Published(batch=batch, blobs=blobs, repeated=mine is None or record.manifest not in (None, mine))
        if record.manifest is not None:
            continue
        _check_uploads(sink, record, uploads)
        mine = await _manifest(log, uploads) if uploads else None
        named = msgspec.structs.replace(
            record, batch=batch, manifest=mine, touched_ms=bounded_ms(log.runtime.now_ms(), record)
        )
        try:
            await log.meta.put(key, encode(named), expected=found.version)
        except (VersionMismatch, OutcomeUnknown):
            pass  # look again: what the record says now is what counts


async def forget_sink(log: Log, sink: str) -> None:
    """Removes the record of a finished write that nobody will repeat."""
    await log.meta.delete(sink_key(check_sink(sink)))


def check_sink(sink: str) -> str:
    return check_topic_name(sink)


def _check_uploads(sink: str, record: Sink, uploads: Sequence[Upload]) -> None:
    for upload in uploads:
        if upload.clock_repairs != record.clock_repairs:
            raise BlobCollected(
                f"blob {upload.blob} of sink {sink} was uploaded before `llog repair clock`, and its batch was not "
                "committed by then: "
                "run the batch again"
            )
        if not may_commit(record, upload.blob, upload.clock_repairs):
            raise BlobCollected(
                f"blob {upload.blob} of sink {sink} waited longer than the collector's grace period before its "
                "batch was "
                "committed: run the batch again, or raise LLOG_COLLECT_GRACE_MS"
            )


async def _manifest(log: Log, uploads: Sequence[Upload]) -> Manifest:
    bodies = [(TopicPartition(body.topic, body.partition), body) for upload in uploads for body in upload.bodies]
    tps = sorted({tp for tp, _ in bodies})
    found = dict(zip(tps, await Reader(log).controls(tps), strict=True))
    for tp, body in bodies:
        keys, _ = found[tp]
        if keys.directory != body.directory:
            raise PartitionNotInitialized(
                f"topic {tp.topic!r} was deleted and created again after records were uploaded for it: write them again"
            )
    since = {str(tp): control.sequence_counter for tp, (_, control) in found.items()}
    manifest = Manifest(blobs=tuple(upload.blob for upload in uploads), since=since)
    _check_size(log, manifest, uploads)
    return manifest


def _check_size(log: Log, manifest: Manifest, uploads: Sequence[Upload]) -> None:
    """Before the manifest is named: one that cannot be applied would stop its sink for good."""
    pieces = Counter((body.topic, body.partition) for upload in uploads for body in upload.bodies)
    entry_bytes = _ENTRY_BYTES + max(len(log.data_uri(blob)) for blob in manifest.blobs)
    most = max(pieces.values()) * entry_bytes
    if max(most, len(encode(manifest))) > VALUE_BYTES_MAX - _CONTROL_BYTES:
        raise RecordTooLarge(
            f"a batch of {len(uploads)} uploads, {max(pieces.values())} of them to one partition, is too many to "
            "append at "
            "once: raise uploadBytes, write with fewer tasks, or write less at a time"
        )


async def _apply(log: Log, sink: str, batch: int, manifest: Manifest, known: Mapping[str, tuple[Body, ...]]) -> None:
    """Appends what the manifest names: per partition in one append, in the manifest's order.

    A topic that was deleted since then takes its records with it, unless only an old state of the metadata shows none.
    """
    reads = await log.meta.begin_reads()
    sources: dict[TopicPartition, list[tuple[str, Body]]] = {}
    for blob in manifest.blobs:
        for body in known.get(blob) or (await read_header(log, blob)).partitions:
            sources.setdefault(TopicPartition(body.topic, body.partition), []).append((blob, body))
    uploads = [
        Uploaded(tp, bodies, Producer(id=f"sink:{sink}", sequence=batch, since=manifest.since[str(tp)], dense=False))
        for tp, bodies in sources.items()
    ]
    writer = Writer(log)
    again: list[Uploaded] = []
    is_gone = False
    for upload, result in zip(uploads, await writer.append_uploaded(uploads), strict=True):
        if isinstance(result, UnknownProducer):
            try:
                still = await _still_to_append(log, upload.tp, upload.producer, {blob for blob, _ in upload.sources})
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
    """Whether the append found no topic; raises every other error."""
    if isinstance(result, LlogError) and not isinstance(result, PartitionNotInitialized):
        raise result
    return isinstance(result, LlogError)


async def _still_to_append(log: Log, tp: TopicPartition, producer: Producer, blobs: set[str]) -> Producer | None:
    """A producer that the partition has forgotten, from where it is known not to have appended; None if it has
    appended.

    The index tells as long as what came since then is neither compacted nor trimmed: after that, `UnknownProducer`.
    """
    log_start, stop = await Reader(log).bounds(tp)
    if log_start <= producer.since:
        names = {log.blob_name(extent.data_uri) for extent in await take_snapshot(log, tp, producer.since, stop)}
        if names & blobs:
            return None
        if all(name.startswith((WAL, SINK_BLOBS)) for name in names):
            return msgspec.structs.replace(producer, since=stop)
    raise UnknownProducer(
        f"whether batch {producer.sequence} of {producer.id} was appended to {tp} cannot be told any more: look "
        "for its records from "
        f"offset {producer.since} on, and start the query over with a new checkpoint"
    )


async def _unchanged(log: Log, key: str, version: int) -> bool:
    found = await confirmed(log.meta, lambda: log.meta.get(key))
    return found is not None and found.version == version


async def _finish(log: Log, key: str, batch: int) -> None:
    """Clears the manifest of this batch, which is applied wholly."""
    while True:
        found = await log.meta.get(key)
        record = decode(Sink, found.value, key) if found else None
        if found is None or record is None or record.batch != batch or record.manifest is None:
            return
        now = bounded_ms(log.runtime.now_ms(), record)
        done = msgspec.structs.replace(record, manifest=None, finished_ms=max(now, record.finished_ms), touched_ms=now)
        try:
            await log.meta.put(key, encode(done), expected=found.version)
        except (VersionMismatch, OutcomeUnknown):
            continue
        return
