"""The records that are stored under the metadata keys: frozen structs, encoded as JSON.

A field is never renamed or reused; a new one has a default, so that older records decode. Records that a flush creates
by the thousand are exempt from garbage collection (`gc=False`): they hold only data and cannot form cycles.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Final, TypeVar

import msgspec

from llog.base.decoders import json_decoder
from llog.batch.multi_batch import BatchPart
from llog.batch.shared import Body
from llog.errors import InconsistentReadState
from llog.log.producers import ProducerState
from llog.log.record_producers import StoredProducer
from llog.model import TimestampType

T = TypeVar("T", bound=msgspec.Struct)


class LogState(StrEnum):
    OPEN = "OPEN"
    FENCED = "FENCED"
    DELETED = "DELETED"


class Kind(StrEnum):
    WAL = "WAL"
    COMPACTED = "COMPACTED"


class IndexEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """The range of bytes in one blob that holds `msg_count` records, the last at the offset in this entry's key.

    `max_append_ms` and `max_timestamp_ms` are running maxima over the partition up to here, so that the index can be
    bisected by either. `data_uri` is a full address for remote stores and relative to the root for local files; an
    inline append has its bytes there (`log/inline.py`).
    """

    kind: Kind
    data_uri: str
    byte_offset: int = 0
    byte_length: int
    msg_count: int
    encoding: str
    append_ms: int
    timestamp_min: int
    timestamp_max: int
    max_append_ms: int = 0
    max_timestamp_ms: int = 0
    parts: tuple[BatchPart, ...] = ()
    """The batches of a body that consists of several."""
    inline_total: int = 0
    """The running total of the partition's inline bytes up to here."""


def entry_of(
    body: Body,
    data_uri: str,
    kind: Kind,
    *,
    max_append_ms: int | None = None,
    max_timestamp_ms: int | None = None,
    inline_total: int = 0,
) -> IndexEntry:
    """Return the index entry of a body of this blob; its running maxima are its own times unless they are given."""
    return IndexEntry(
        kind=kind,
        data_uri=data_uri,
        byte_offset=body.body_offset,
        byte_length=body.body_length,
        msg_count=body.msg_count,
        encoding=body.encoding,
        append_ms=body.append_ms,
        timestamp_min=body.timestamp_min,
        timestamp_max=body.timestamp_max,
        max_append_ms=body.append_ms if max_append_ms is None else max_append_ms,
        max_timestamp_ms=body.timestamp_max if max_timestamp_ms is None else max_timestamp_ms,
        inline_total=inline_total,
    )


class Pending(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """The newest append. The next writer, or a compactor, puts its index entries and the states of its producers."""

    start_offset: int
    entries: tuple[IndexEntry, ...]
    producers: tuple[StoredProducer, ...] = ()
    """The producers of records whose parts are in the append, each with its state after it."""

    @property
    def end_offset(self) -> int:
        return self.start_offset + sum(entry.msg_count for entry in self.entries) - 1


class Control(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """The partition's one contended record: its CAS is the commit point of every append."""

    log_state: LogState = LogState.OPEN
    next_offset: int = msgspec.field(default=1, name="sequence_counter")
    log_start_offset: int = 1
    pending: Pending | None = None
    blob_floor_ms: int = 0
    """A blob stamped below the floor is uploaded again under another name."""
    blob_ceiling_ms: int = 0
    """A blob stamped above the ceiling is uploaded again, too; 0 means no ceiling."""
    clock_repairs: int = 0
    """How often the floor or the ceiling was lowered. A blob whose name was chosen before the last repair is uploaded
    again.
    """
    max_append_ms: int = 0
    max_timestamp_ms: int = 0
    producers: dict[str, ProducerState] = {}
    evicted_through: int = 0
    producers_expired_through: int = 0
    """The states of producers of records that end at or below this offset are forgotten."""
    writers: dict[str, ProducerState] = {}
    writers_evicted_through: int = 0
    inline_total: int = 0
    """The inline bytes of all appends."""
    inline_compacted: int = 0
    """The running total of the newest entry that was compacted or trimmed: it only grows, and is raised to a maximum,
    so that a compaction which is resumed counts once.
    """
    inline_full: bool = False
    """Whether appends put blobs until `inline_compacted` has reached `inline_total`."""


class CompactionCursor(msgspec.Struct, frozen=True, omit_defaults=True):
    offset: int
    merge_from: int = 0
    """Entries that end below this offset need not be looked at for merges. Only a hint: it may be lost."""


class CompactorClaim(msgspec.Struct, frozen=True, omit_defaults=True):
    """The value of a compactor's claim; the presence of its key excludes other compactors."""

    holder: str = ""


class CompactionState(StrEnum):
    WRITING_BLOB = "WRITING_BLOB"
    WRITING_COMPACTED_INDEX = "WRITING_COMPACTED_INDEX"
    DELETING_OLD = "DELETING_OLD"
    UPDATING_CURSOR = "UPDATING_CURSOR"


class Compaction(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The durable breadcrumb of one compaction. It names the blob before the blob exists, so that the collector spares
    it.
    """

    state: CompactionState
    start_offset: int
    end_offset: int
    blob: str
    expected_version: int
    """Version of the run's highest index entry when the run was chosen."""
    entry: IndexEntry | None = None
    """The COMPACTED entry, once the blob is written."""
    merge: bool = False
    """Whether the run consists of COMPACTED entries below the cursor."""


class Cleanup(StrEnum):
    """How old records are removed: by the limits of retention, or all but the newest record of each key."""

    DELETE = "delete"
    COMPACT = "compact"


DELETE_RETENTION_MS: Final = 86_400_000


class Topic(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A catalog entry. `deleted` is a tombstone: the name may be created again under the next incarnation."""

    name: str
    partitions: int
    incarnation: int = 1
    directory: str
    engine: str = "object"
    home: str = ""
    """The id of the directory that holds a disk topic's files; empty if the topic is older than directory ids."""
    retention_ms: int | None = None
    retention_bytes: int | None = None
    timestamp_type: TimestampType = TimestampType.CREATE
    cleanup: Cleanup = Cleanup.DELETE
    delete_retention_ms: int = DELETE_RETENTION_MS
    """How long key compaction keeps a deletion (a record without a payload), so that readers see it."""
    created_ms: int = 0
    deleted: bool = False
    swept: bool = False
    """Set on a tombstone once every partition of the deleted topic is closed and its index deleted."""


def topic_fields(topic: Topic) -> dict[str, Any]:
    """Return what interfaces show of a topic, under the names of its fields."""
    return {
        "name": topic.name,
        "partitions": topic.partitions,
        "engine": topic.engine,
        "incarnation": topic.incarnation,
        "directory": topic.directory,
        "retention_ms": topic.retention_ms,
        "retention_bytes": topic.retention_bytes,
        "timestamp_type": topic.timestamp_type,
        "cleanup": topic.cleanup,
        "delete_retention_ms": topic.delete_retention_ms,
        "created_ms": topic.created_ms,
    }


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The blobs of the one attempt at a sink's batch that counts, and each partition's next offset at that moment."""

    blobs: tuple[str, ...]
    since: dict[str, int]
    """`{topic}/{partition}` → the partition's next offset, which distinguishes a first application from a repeat."""


class Sink(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """State of one exactly-once writer. `batch` only grows, so that a stalled driver cannot bring back an older one."""

    batch: int = -1
    manifest: Manifest | None = None
    """The manifest that is not completely applied; None once it is."""
    blob_floor_ms: int = 0
    blob_ceiling_ms: int = 0
    clock_repairs: int = 0
    """The floor, the ceiling and the repairs bound the blobs of the batch as those of `Control` do."""
    finished_ms: int = 0
    """Uploads stamped up to here belong to finished batches."""
    touched_ms: int = 0


class Pin(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot in use. It counts until `expires_ms`; its readers renew it."""

    started_ms: int
    expires_ms: int
    owner: str


class LogFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The format of a log's keys, records and blobs. Its number grows when a process that does not know the new format
    would do harm.
    """

    number: int = 1
    needs: str = "0.1.0"
    """The lowest version of llog that knows this format."""


def encode(record: msgspec.Struct) -> bytes:
    return msgspec.json.encode(record)


def decode(kind: type[T], data: bytes, key: str) -> T:
    """Return the record stored under `key`; raise an error that names the key if the record is damaged."""
    try:
        record = json_decoder(kind).decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InconsistentReadState(f"metadata key {key} does not hold a {kind.__name__}: {error}") from error
    return record
