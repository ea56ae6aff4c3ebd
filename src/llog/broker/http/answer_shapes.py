"""What JSON answers look like, for the OpenAPI document. A member with the default UNSET may be absent."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from llog.broker.http.json_records import Base64
from llog.broker.http.operations import ItemError
from llog.groups.acks import HeldRange
from llog.groups.listing import GroupProgress
from llog.log.records import Cleanup
from llog.model import TimestampType

Bytes = str | Base64
Headers = list[tuple[str, Bytes | None]]


class PlacedRecord(msgspec.Struct, frozen=True):
    """Where a record is, or why it was not appended."""

    partition: int
    offset: int | UnsetType = UNSET
    error: ItemError | UnsetType = UNSET


class ProducedItem(msgspec.Struct, frozen=True):
    """The outcome of an item: of one partition, or of each record if the item named no partition."""

    topic: str
    partition: int | UnsetType = UNSET
    start_offset: int | UnsetType = UNSET
    end_offset: int | UnsetType = UNSET
    repeated: bool | UnsetType = UNSET
    error: ItemError | UnsetType = UNSET
    records: list[PlacedRecord] | UnsetType = UNSET


class ProduceAnswer(msgspec.Struct, frozen=True):
    topic_partitions: list[ProducedItem]


class TopicRecordsAnswer(msgspec.Struct, frozen=True):
    topic: str
    records: list[PlacedRecord]
    error: ItemError | UnsetType = UNSET
    repeated: bool | UnsetType = UNSET


class PartitionAppendAnswer(msgspec.Struct, frozen=True):
    topic: str
    partition: int
    start_offset: int
    end_offset: int
    repeated: bool | UnsetType = UNSET


class ConsumedRecord(msgspec.Struct, frozen=True):
    offset: int
    payload: Bytes | None
    key: Bytes | None
    timestamp: int
    headers: Headers


class ConsumedItem(msgspec.Struct, frozen=True):
    topic: str
    partition: int
    next_fetch_offset: int | UnsetType = UNSET
    records: list[ConsumedRecord] | UnsetType = UNSET
    error: ItemError | UnsetType = UNSET
    high_watermark: int | UnsetType = UNSET
    log_start_offset: int | UnsetType = UNSET


class ConsumeAnswer(msgspec.Struct, frozen=True):
    topic_partitions: list[ConsumedItem]


class ReadRecord(msgspec.Struct, frozen=True):
    """A record. Its value is JSON if it is JSON, else text or base64."""

    offset: int
    timestamp: int
    key: Bytes | None
    value: Any
    headers: Headers


class PartitionRecordsAnswer(msgspec.Struct, frozen=True):
    topic: str
    partition: int
    log_start_offset: int
    next_offset: int
    next_fetch_offset: int
    records: list[ReadRecord]


class OffsetAnswer(msgspec.Struct, frozen=True):
    offset: int


class TopicAnswer(msgspec.Struct, frozen=True):
    name: str
    partitions: int
    engine: str
    incarnation: int
    directory: str
    retention_ms: int | None
    retention_bytes: int | None
    timestamp_type: TimestampType
    cleanup: Cleanup
    delete_retention_ms: int
    created_ms: int


class TopicsAnswer(msgspec.Struct, frozen=True):
    topics: list[TopicAnswer]


class PartitionBounds(msgspec.Struct, frozen=True):
    partition: int
    log_start_offset: int
    next_offset: int


class TopicOwner(msgspec.Struct, frozen=True):
    address: str | None
    host: str
    pid: int


class DescribedTopic(TopicAnswer, frozen=True):
    bounds: list[PartitionBounds]
    owner: TopicOwner | UnsetType | None = UNSET


class FenceAnswer(msgspec.Struct, frozen=True):
    topic: str
    partitions: list[int]
    state: Literal["fenced", "open"]


class Message(msgspec.Struct, frozen=True):
    """A record that was delivered to a member of a group."""

    topic_id: str
    partition_id: int
    offset: int
    message_id: str | None
    source_table: str | None
    op: str | None
    ts: str | int
    payload_mode: str | None
    key: Bytes | None
    payload: Any
    headers: Headers
    attempt: int


class MessagesAnswer(msgspec.Struct, frozen=True):
    messages: list[Message]
    member: str


class AckAnswer(msgspec.Struct, frozen=True):
    committed: dict[str, int]
    held_by_others: dict[str, list[HeldRange]] | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET


class ReleaseAnswer(msgspec.Struct, frozen=True):
    released: bool


class HeartbeatAnswer(msgspec.Struct, frozen=True):
    partitions: list[int]


class LeaveAnswer(msgspec.Struct, frozen=True):
    pass


class GroupsAnswer(msgspec.Struct, frozen=True):
    groups: dict[str, list[GroupProgress]]
    missing: str | None


class ResetAnswer(msgspec.Struct, frozen=True):
    offsets: dict[str, int]


class DeletedAnswer(msgspec.Struct, frozen=True):
    deleted: int


class SqlColumn(msgspec.Struct, frozen=True):
    name: str
    type: str


class SqlResult(msgspec.Struct, frozen=True):
    kind: str
    columns: list[SqlColumn]
    rows: list[list[Any]]
    changed: int
    warnings: list[str] | UnsetType = UNSET
    member: str | UnsetType = UNSET


class SqlAnswer(msgspec.Struct, frozen=True):
    results: list[SqlResult]
    ms: float


class NamesAnswer(msgspec.Struct, frozen=True):
    tables: dict[str, list[str]]
    topics: list[str]
    groups: list[str]


class KeyedAppendAnswer(msgspec.Struct, frozen=True):
    first_sequence: int
    last_sequence: int
    records: int


class SealAnswer(msgspec.Struct, frozen=True):
    sealed: int | None


class KeyedRecord(msgspec.Struct, frozen=True):
    sequence: int
    key: Bytes
    value: Bytes
    append_time_ms: int


class ScanAnswer(msgspec.Struct, frozen=True):
    records: list[KeyedRecord]
    cursor: str | None


class CountAnswer(msgspec.Struct, frozen=True):
    count: int


class KeysAnswer(msgspec.Struct, frozen=True):
    keys: list[Bytes]
    more: bool


class KeyedSegment(msgspec.Struct, frozen=True):
    segment_id: int
    start_seq: int
    end_seq: int
    start_time_ms: int
    end_time_ms: int | None
    records: int
    size: int
    user_meta: Bytes | None


class SegmentsAnswer(msgspec.Struct, frozen=True):
    segments: list[KeyedSegment]


class StatusAnswer(msgspec.Struct, frozen=True):
    status: Literal["ok", "ready"]
