"""What clients of a keyed log send and get: bodies, parameters, and records as JSON and as Arrow.

Keys and values are any bytes. In JSON they are text, or `{"base64": …}`; in an address, percent-encoded bytes
(`key=%FF`), or base64url under the name with `64` behind it (`key64=_w`), for clients that can only encode text.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, TypeVar
from urllib.parse import parse_qsl

import msgspec
import pyarrow as pa
from msgspec import Meta
from starlette.requests import Request

from llog.base.units import bytes_to_json, parse_base64url
from llog.broker.http.arrow import decode_stream
from llog.broker.http.events import HeartbeatMs
from llog.broker.http.json_records import Data, JsonKeyedRecord
from llog.broker.http.requests import FetchBytes, decode_query
from llog.errors import InvalidArgument
from llog.keyed.model import NUMBER_MAX, Segment

PAGE_MAX: Final = 100_000
USER_META_BYTES_MAX: Final = 64 << 10
_PARAMETERS_MAX: Final = 16
_BYTES: Final = ("key", "prefix", "key_start", "key_end", "after_key")
_BASE64: Final = {f"{name}64": name for name in _BYTES}
_KINDS: Final = (pa.binary(), pa.string(), pa.large_binary(), pa.large_string())

T = TypeVar("T")
Number = Annotated[int, Meta(ge=0, le=NUMBER_MAX)]
After = Annotated[int, Meta(ge=-1, le=NUMBER_MAX)]
Limit = Annotated[int, Meta(ge=1, le=PAGE_MAX)]

KEYS_SCHEMA: Final = pa.schema([pa.field("key", pa.binary(), nullable=False)])
SEGMENTS_SCHEMA: Final = pa.schema(
    [
        pa.field("segment_id", pa.int64(), nullable=False),
        pa.field("start_seq", pa.int64(), nullable=False),
        pa.field("end_seq", pa.int64(), nullable=False),
        pa.field("start_time_ms", pa.int64(), nullable=False),
        pa.field("end_time_ms", pa.int64()),
        pa.field("records", pa.int64(), nullable=False),
        pa.field("size", pa.int64(), nullable=False),
        pa.field("user_meta", pa.binary()),
    ]
)


class AppendRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    records: Annotated[list[JsonKeyedRecord], Meta(min_length=1)]
    await_durable: bool = True


class AppendQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The query beside an Arrow body."""

    await_durable: bool = True


class SealRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    user_meta: Data | None = None


class ScanQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    key: bytes | None = None
    prefix: bytes | None = None
    key_start: bytes | None = None
    key_end: bytes | None = None
    start: Number | None = None
    end: Number | None = None
    start_time_ms: Number | None = None
    end_time_ms: Number | None = None
    limit: Limit = 1000
    max_bytes: FetchBytes = 4 << 20
    cursor: str | None = None

    def __post_init__(self) -> None:
        is_range = self.key_start is not None or self.key_end is not None
        if (self.key is not None) + (self.prefix is not None) + is_range != 1:
            raise ValueError("give one of key, prefix, and key_start with key_end (prefix= selects every key)")


class CountQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    key: bytes
    start: Number | None = None
    end: Number | None = None
    approximate: bool = False


class KeysQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    prefix: bytes = b""
    after_key: bytes | None = None
    segment_start: Number | None = None
    segment_end: Number | None = None
    limit: Limit = 1000


class SegmentsQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    start: Number | None = None
    end: Number | None = None
    start_time_ms: Number | None = None
    end_time_ms: Number | None = None


class TailQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    key: bytes | None = None
    prefix: bytes | None = None
    after: After | None = None
    heartbeat_ms: HeartbeatMs = 15_000

    def __post_init__(self) -> None:
        if (self.key is None) == (self.prefix is None):
            raise ValueError("give either key or prefix (prefix= follows every key)")


class LastEvent(msgspec.Struct, frozen=True):
    """The header `Last-Event-ID` of a client that reconnects."""

    last_event_id: After


def decode_parameters(kind: type[T], request: Request) -> T:
    """Return the query of a request, in which a name may occur once; `InvalidArgument` says what is wrong with it."""
    found: dict[str, Any] = {}
    try:
        query = request.scope["query_string"].decode("ascii")
        pairs = parse_qsl(query, keep_blank_values=True, encoding="latin-1", max_num_fields=_PARAMETERS_MAX)
        for name, text in pairs:
            value = text.encode("latin-1")
            field = _BASE64.get(name, name)
            if field in found:
                raise InvalidArgument(f"the query has {field[:40]!r} more than once: give it once")
            if name in _BASE64:
                found[field] = _decode_base64(name, text)
            else:
                found[field] = value if name in _BYTES else value.decode()
    except UnicodeError:
        raise InvalidArgument("the query has bytes that are no text: percent-encode them, in keys only") from None
    except ValueError as error:
        raise InvalidArgument(f"the query is not what it should be: {error}") from None
    return decode_query(kind, found)


def _decode_base64(name: str, text: str) -> bytes:
    try:
        return parse_base64url(text)
    except InvalidArgument as error:
        raise InvalidArgument(f"{name} is wrong: {error}") from None


def decode_keyed_records(body: bytearray) -> pa.Table:
    """Return the columns `key` and `value` of an Arrow stream. The other columns of an answer are ignored."""
    return decode_stream(body, _check_columns, lambda table, _: table.select(["key", "value"]))


def _check_columns(schema: pa.Schema) -> None:
    names = schema.names
    if len(set(names)) < len(names) or not {"key", "value"} <= set(names) <= {
        "key",
        "value",
        "sequence",
        "append_time",
    }:
        raise InvalidArgument(
            f"the Arrow stream has the columns {', '.join(names)[:200]}: there must be key and value; sequence and "
            "append_time may be there and are ignored"
        )
    for field in schema:
        fixed = {"sequence": (pa.int64(),), "append_time": (pa.timestamp("ms", tz="UTC"),)}
        if field.type not in fixed.get(field.name, _KINDS):
            raise InvalidArgument(
                f"the Arrow stream has a column {field.name!r} of type {str(field.type)[:200]}: key and value are "
                "binary or string"
            )


def segment_to_json(segment: Segment) -> dict[str, Any]:
    return msgspec.structs.asdict(segment) | {"user_meta": bytes_to_json(segment.user_meta)}
