"""What is stored under the keys: frozen structs, JSON on the wire, bounded when read back.

A field is never renamed or reused; a new one has a default, so that older records decode. Those that a flush makes by
the thousand are left out of garbage collection (`gc=False`): they hold data alone, so nothing can come to refer to
itself.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, TypeVar

import msgspec

from llog.base.decoders import json_decoder
from llog.batch.joined import Part
from llog.batch.shared import Body
from llog.errors import InconsistentReadState
from llog.log.producers import ProducerState
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
    """Where `msg_count` records lie that end at the offset in this entry's key: a range of bytes in one blob.

    `max_append_ms` and `max_timestamp_ms` are running maxima over the partition up to here, so that the index can be
    bisected by either. `data_uri` is a full address for remote stores and relative to the root for local files.
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
    parts: tuple[Part, ...] = ()
    """The batches of a body that has several."""


def entry_of(
    body: Body, data_uri: str, kind: Kind, *, max_append_ms: int | None = None, max_timestamp_ms: int | None = None
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
    )


class Pending(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The newest append, whose index entries the next writer (or a compactor) puts."""

    start_offset: int
    entries: tuple[IndexEntry, ...]

    @property
    def end_offset(self) -> int:
        return self.start_offset + sum(entry.msg_count for entry in self.entries) - 1


class Control(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """The partition's one contended record: its CAS is the commit point of every append."""

    log_state: LogState = LogState.OPEN
    sequence_counter: int = 1
    log_start_offset: int = 1
    pending: Pending | None = None
    blob_floor_ms: int = 0
    """A blob stamped below it is uploaded again under another name."""
    blob_ceiling_ms: int = 0
    """So is a blob stamped above it; 0 is no ceiling."""
    clock_repairs: int = 0
    """How often the floor or the ceiling was lowered. A blob whose name was chosen before the last time is uploaded
    again, too.
    """
    max_append_ms: int = 0
    max_timestamp_ms: int = 0
    producers: dict[str, ProducerState] = {}
    evicted_through: int = 0
    writers: dict[str, ProducerState] = {}
    writers_evicted_through: int = 0


class Cursor(msgspec.Struct, frozen=True):
    offset: int


class CompactorClaim(msgspec.Struct, frozen=True, omit_defaults=True):
    """The value of a compactor's claim, which excludes others by being there."""

    holder: str = ""


class CompactionState(StrEnum):
    WRITING_BLOB = "WRITING_BLOB"
    WRITING_COMPACTED_INDEX = "WRITING_COMPACTED_INDEX"
    DELETING_OLD = "DELETING_OLD"
    UPDATING_CURSOR = "UPDATING_CURSOR"


class Compaction(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The durable breadcrumb of one compaction: names its blob before that exists, so that the collector spares it."""

    state: CompactionState
    start_offset: int
    end_offset: int
    blob: str
    expected_version: int
    """Version of the run's highest index entry when the run was chosen."""
    entry: IndexEntry | None = None
    """The COMPACTED entry, once the blob is written."""


class Cleanup(StrEnum):
    """What becomes of old records: dropped by the limits of retention, or, by key, all but the newest of each key."""

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
    """Of a disk topic, the id of the directory that holds its files; none if the topic was made before directories had
    one.
    """
    retention_ms: int | None = None
    retention_bytes: int | None = None
    timestamp_type: TimestampType = TimestampType.CREATE
    cleanup: Cleanup = Cleanup.DELETE
    delete_retention_ms: int = DELETE_RETENTION_MS
    """How long key compaction keeps a deletion (a record without a payload), so that readers get to see it."""
    created_ms: int = 0
    deleted: bool = False
    swept: bool = False
    """Set on a tombstone once every partition of the deleted topic is closed and its index is gone."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The blobs of the one attempt of a sink's batch that counts, and each partition's next offset when it was
    chosen.
    """

    blobs: tuple[str, ...]
    since: dict[str, int]
    """`{topic}/{partition}` → the partition's next offset, which tells a first application from a repeated one."""


class Sink(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """State of one exactly-once writer. `batch` only grows, so that a zombie driver cannot bring back an older one."""

    batch: int = -1
    manifest: Manifest | None = None
    """Not yet applied wholly; None once it is."""
    blob_floor_ms: int = 0
    blob_ceiling_ms: int = 0
    clock_repairs: int = 0
    """These three bound what the batch may name as those of `Control` do."""
    finished_ms: int = 0
    """Uploads stamped up to here belong to finished batches."""
    touched_ms: int = 0


class Pin(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot in use. It counts until `expires_ms`; its readers renew it."""

    started_ms: int
    expires_ms: int
    owner: str


class LogFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The format of a log's keys, records and blobs. It grows when a process that does not know the new one would do
    harm.
    """

    number: int = 1
    needs: str = "0.1.0"
    """The lowest version of llog that knows this format."""


def encode(record: msgspec.Struct) -> bytes:
    return msgspec.json.encode(record)


def decode(kind: type[T], data: bytes, key: str) -> T:
    """The record stored under `key`; damage is an error that names it."""
    try:
        record = json_decoder(kind).decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InconsistentReadState(f"metadata key {key} does not hold a {kind.__name__}: {error}") from error
    return record
