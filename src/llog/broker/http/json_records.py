"""Records as JSON, in requests and in answers: of topics, and of keyed logs.

Bytes that are text are a JSON string, other bytes `{"base64": …}`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Final, Literal

import msgspec
import pyarrow as pa
from msgspec import UNSET, UnsetType

from llog.base.units import bytes_to_json
from llog.batch.columns import Columns, columns_of, decode_headers
from llog.errors import InvalidArgument
from llog.log.engine import Batch
from llog.model import Record

JSON_RECORD_OVERHEAD: Final = 80
"""Bytes that a record counts for besides its own in JSON: about what its field names take."""
ValueForm = Literal["json", "text"]
"""How values are shown: those that are JSON as JSON, or all of them as text."""


_RECORDS_FEW: Final = 256
"""Up to this many ASCII records become an array faster without Arrow's own conversion."""
_BINARY: Final = pa.binary()


class Base64(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bytes that are not text."""

    base64: bytes


Data = str | Base64


class JsonRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A record in full, or `{"base64": …}` alone. `"value": null` marks its key as deleted."""

    value: Data | UnsetType | None = UNSET
    base64: bytes | UnsetType = UNSET
    key: Data | None = None
    timestamp: int | None = None
    headers: tuple[tuple[str, Data | None], ...] = ()


class JsonKeyedRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A record of a keyed log."""

    key: Data
    value: Data


def bytes_from_json(data: Data | UnsetType | None) -> bytes | None:
    """Return the bytes that JSON stands for; `InvalidArgument` if they are text that is not Unicode."""
    if isinstance(data, Base64):
        return data.base64
    if not isinstance(data, str):
        return None
    try:
        return data.encode()
    except UnicodeEncodeError:
        raise InvalidArgument("a text has a lone surrogate, which is no Unicode: send base64") from None


def columns_from_json(records: Sequence[str | JsonRecord]) -> Columns:
    """Return the records of one item, ready to append."""
    try:
        text = "".join(records)  # type: ignore[arg-type]  # the common case, without an object for each
    except TypeError:
        return columns_of([_record(record) for record in records])
    return Columns(_text_values(records, text), None, None, None, ())


def records_to_json(batch: Batch) -> list[dict[str, Any]]:
    """Return an object for each record of the batch; the caller bounds their number."""
    columns = batch.columns
    count = columns.count
    keys = [None] * count if columns.keys is None else columns.keys.to_pylist()
    headers = [b""] * count if columns.headers is None else columns.headers.to_pylist()
    if columns.timestamps is None:
        times = [ms for length, ms in columns.append_runs for _ in range(length)]
    else:
        times = columns.timestamps.to_pylist()
    return [
        {
            "offset": offset,
            "payload": bytes_to_json(value),
            "key": bytes_to_json(key),
            "timestamp": ms,
            "headers": [[name, bytes_to_json(data)] for name, data in decode_headers(encoded)],
        }
        for offset, (value, key, ms, encoded) in enumerate(
            zip(columns.values.to_pylist(), keys, times, headers, strict=True), batch.start_offset
        )
    ]


def values_to_json(batch: Batch, form: ValueForm) -> list[dict[str, Any]]:
    """Return an object for each record of the batch, as people read it; the caller bounds their number."""
    return [
        {
            "offset": record["offset"],
            "timestamp": record["timestamp"],
            "key": record["key"],
            "value": value_to_json(value) if form == "json" else record["payload"],
            "headers": record["headers"],
        }
        for record, value in zip(records_to_json(batch), batch.columns.values.to_pylist(), strict=True)
    ]


def value_to_json(value: bytes | None) -> Any:
    """Return a value as it is if it is JSON, else as text or `{"base64": …}`."""
    if value is None:
        return None
    try:
        msgspec.json.decode(value)  # the whole of it: what is put into the answer as it is must be JSON
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return bytes_to_json(value)
    return msgspec.Raw(value)


def keyed_pairs_from_json(records: Sequence[JsonKeyedRecord]) -> list[tuple[bytes, bytes]]:
    """Return the key and the value of each record."""
    return [(bytes_from_json(record.key) or b"", bytes_from_json(record.value) or b"") for record in records]


def keyed_records_to_json(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Return an object for each record of a keyed log; the caller bounds their number."""
    keys, sequences, values = (batch.column(name).to_pylist() for name in ("key", "sequence", "value"))
    times = batch.column("append_time").cast(pa.int64()).to_pylist()
    return [
        {"sequence": sequence, "key": bytes_to_json(key), "value": bytes_to_json(value), "append_time_ms": time}
        for key, sequence, value, time in zip(keys, sequences, values, times, strict=True)
    ]


def _text_values(records: Sequence[Any], text: str) -> pa.BinaryArray:
    """Return the values of records that are all text; `text` is all of them together."""
    if len(records) <= _RECORDS_FEW and text.isascii():
        ends = pa.py_buffer(array("i", accumulate(map(len, records), initial=0)))
        return pa.Array.from_buffers(_BINARY, len(records), [None, ends, pa.py_buffer(text.encode())])
    try:
        return pa.array(records, pa.string()).view(pa.binary())
    except UnicodeEncodeError:
        raise InvalidArgument("a record is text with a lone surrogate, which is no Unicode: send base64") from None


def _record(record: str | JsonRecord) -> Record:
    if isinstance(record, str):
        return Record(payload=bytes_from_json(record))
    if (record.value is UNSET) == (record.base64 is UNSET):
        raise InvalidArgument('a record has either "value" or "base64" (a deleted key has "value": null)')
    payload = record.base64 if isinstance(record.base64, bytes) else bytes_from_json(record.value)
    return Record(
        payload=payload,
        key=bytes_from_json(record.key),
        timestamp=record.timestamp,
        headers=tuple((name, bytes_from_json(value)) for name, value in record.headers),
    )
