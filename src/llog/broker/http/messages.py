"""What clients send, as types: anything else is refused, with the place where it differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
import pyarrow as pa
from msgspec import UNSET, Meta, UnsetType

from llog.base.decoders import json_decoder
from llog.base.units import bytes_to_json
from llog.batch.columns import Columns, columns_of
from llog.errors import InvalidArgument
from llog.log.records import DELETE_RETENTION_MS, Cleanup
from llog.model import PARTITIONS_MAX, Record, TimestampType

ITEMS_MAX: Final = 1000
WAIT_MS_MAX: Final = 60_000
FETCH_BYTES_MAX: Final = 16 << 20

T = TypeVar("T")
Partition = Annotated[int, Meta(ge=0, lt=PARTITIONS_MAX)]
FetchBytes = Annotated[int, Meta(ge=1, le=FETCH_BYTES_MAX)]


class Base64(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bytes that are no text."""

    base64: bytes


Data = str | Base64


class RecordIn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A record in full, or `{"base64": …}` alone. `"value": null` marks its key as deleted."""

    value: Data | UnsetType | None = UNSET
    base64: bytes | UnsetType = UNSET
    key: Data | None = None
    timestamp: int | None = None
    headers: tuple[tuple[str, Data | None], ...] = ()


class ProduceItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    topic: str
    partition: Partition
    records: Annotated[list[str | RecordIn], Meta(min_length=1)]


class ProduceRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    topic_partitions: Annotated[list[ProduceItem], Meta(min_length=1, max_length=ITEMS_MAX)]


class KeyedRecordIn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A record of a keyed log."""

    key: Data
    value: Data


class ConsumeItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    topic: str
    partition: Partition
    fetch_offset: Annotated[int, Meta(ge=1)]
    partition_max_bytes: FetchBytes = 1 << 20


class ConsumeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    topic_partitions: Annotated[list[ConsumeItem], Meta(min_length=1, max_length=ITEMS_MAX)]
    max_wait_ms: Annotated[int, Meta(ge=0, le=WAIT_MS_MAX)] = 0
    min_bytes: FetchBytes = 1
    max_bytes: FetchBytes = 4 << 20


class FetchQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The query of `GET /topics/{name}/partitions/{partition}/records`."""

    offset: Annotated[int, Meta(ge=1)]
    stop: Annotated[int, Meta(ge=1)] | None = None
    max_bytes: FetchBytes = 4 << 20
    max_wait_ms: Annotated[int, Meta(ge=0, le=WAIT_MS_MAX)] = 0


class TimeQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The query of `GET /topics/{name}/partitions/{partition}/offset`."""

    timestamp_ms: int


class TopicRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    partitions: Annotated[int, Meta(ge=1, le=PARTITIONS_MAX)] = 1
    retention_ms: Annotated[int, Meta(ge=0)] | None = None
    retention_bytes: Annotated[int, Meta(ge=0)] | None = None
    timestamp_type: TimestampType = TimestampType.CREATE
    engine: Literal["object", "disk", "rocksdb"] = "object"
    cleanup: Cleanup = Cleanup.DELETE
    delete_retention_ms: Annotated[int, Meta(ge=0)] = DELETE_RETENTION_MS


class SqlRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`params` are values for the places of the statements, `rows` those of many runs of one statement: as in
    `llog.sql.wire`.
    """

    sql: str
    params: list[Any] | dict[str, Any] = []
    rows: list[list[Any]] | None = None
    member: Annotated[str, Meta(max_length=200)] | None = None


class InsertQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The query of `POST /sql/insert`."""

    table: str


def decoded(kind: type[T], body: bytes | bytearray) -> T:
    """The request in this body; `InvalidArgument` says what is wrong and where."""
    try:
        return json_decoder(kind).decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgument(f"the body is not what it should be: {error}") from error


def queried(kind: type[T], query: Mapping[str, str]) -> T:
    """The parameters after the '?' of an address; `InvalidArgument` as above."""
    try:
        return msgspec.convert(dict(query), kind, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"the query is not what it should be: {error}") from error


def columns_in(records: Sequence[str | RecordIn]) -> Columns:
    """The records of one item, ready to append."""
    if all(type(record) is str for record in records):  # the common case, without an object for each
        return columns_of(())._replace(values=_text_values(records))
    return columns_of([_record(record) for record in records])


def data_in(data: Data | UnsetType | None) -> bytes | None:
    """The bytes that JSON stands for; `InvalidArgument` if it is text that is no Unicode."""
    if isinstance(data, Base64):
        return data.base64
    if not isinstance(data, str):
        return None
    try:
        return data.encode()
    except UnicodeEncodeError:
        raise InvalidArgument("a text has a lone surrogate, which is no Unicode: send base64") from None


def pairs_in(records: list[KeyedRecordIn]) -> list[tuple[bytes, bytes]]:
    return [(data_in(record.key) or b"", data_in(record.value) or b"") for record in records]


def keyed_out(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Records of a keyed log as JSON has them: an object for each, so whoever calls this bounds them."""
    keys, sequences, values = (batch.column(name).to_pylist() for name in ("key", "sequence", "value"))
    times = batch.column("append_time").cast(pa.int64()).to_pylist()
    return [
        {"sequence": sequence, "key": bytes_to_json(key), "value": bytes_to_json(value), "append_time_ms": time}
        for key, sequence, value, time in zip(keys, sequences, values, times, strict=True)
    ]


def _text_values(records: Sequence[Any]) -> pa.BinaryArray:
    try:
        return pa.array(records, pa.string()).view(pa.binary())
    except UnicodeEncodeError:
        raise InvalidArgument("a record is text with a lone surrogate, which is no Unicode: send base64") from None


def _record(record: str | RecordIn) -> Record:
    if isinstance(record, str):
        return Record(payload=data_in(record))
    if (record.value is UNSET) == (record.base64 is UNSET):
        raise InvalidArgument('a record has either "value" or "base64" (a deleted key has "value": null)')
    payload = record.base64 if isinstance(record.base64, bytes) else data_in(record.value)
    return Record(
        payload=payload,
        key=data_in(record.key),
        timestamp=record.timestamp,
        headers=tuple((name, data_in(value)) for name, value in record.headers),
    )
