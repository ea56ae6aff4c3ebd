"""Topics and what is known of them as Arrow tables, for queries to read: `FROM TOPIC t`, and the tables of `system`."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from llog.base.units import format_size
from llog.cdc.events import MESSAGES, messages_of
from llog.engines.port import LogReader
from llog.engines.reading import iter_from
from llog.errors import LlogError, RecordTooLarge
from llog.log.catalog import Catalog
from llog.log.log import Log
from llog.log.records import Topic
from llog.model import TopicPartition

TOPIC_BYTES_MAX: Final = 256 << 20
"""What a query may read of one topic: all of it is in memory while the query runs."""

_TIME: Final = pa.timestamp("ms", "UTC")
_HEADERS: Final = pa.list_(pa.struct([("key", pa.string()), ("value", pa.string())]))

SYSTEM: Final = {
    "topics": pa.schema(
        [
            ("topic", pa.string()),
            ("engine", pa.string()),
            ("partitions", pa.int32()),
            ("cleanup", pa.string()),
            ("retention_seconds", pa.float64()),
            ("retention_max_bytes", pa.int64()),
            ("timestamp_type", pa.string()),
            ("created_at", _TIME),
        ]
    ),
    "partitions": pa.schema(
        [
            ("topic", pa.string()),
            ("partition", pa.int32()),
            ("log_start_offset", pa.int64()),
            ("next_offset", pa.int64()),
            ("problem", pa.string()),
        ]
    ),
    "topic_offsets": pa.schema(
        [
            ("topic", pa.string()),
            ("group", pa.string()),
            ("partition", pa.int32()),
            ("last_acked_offset", pa.int64()),
            ("outstanding", pa.int64()),
            ("lag", pa.int64()),
            ("mode", pa.string()),
            ("members", pa.string()),
        ]
    ),
    "routes": pa.schema(
        [
            ("topic", pa.string()),
            ("source_table", pa.string()),
            ("op", pa.string()),
            ("payload", pa.string()),
            ("filter", pa.string()),
            ("partition_by", pa.string()),
            ("problem", pa.string()),
        ]
    ),
    "tables": pa.schema(
        [("table", pa.string()), ("columns", pa.int32()), ("primary_key", pa.string()), ("definition", pa.string())]
    ),
}
"""What can be shown, and, but for `tables`, queried as `system.<name>`."""


def topic_rows(topics: Iterable[Topic]) -> Iterable[dict[str, Any]]:
    for topic in topics:
        yield {
            "topic": topic.name,
            "engine": topic.engine,
            "partitions": topic.partitions,
            "cleanup": topic.cleanup.value,
            "retention_seconds": None if topic.retention_ms is None else topic.retention_ms / 1000,
            "retention_max_bytes": topic.retention_bytes,
            "timestamp_type": topic.timestamp_type.value,
            "created_at": topic.created_ms,
        }


async def partition_rows(log: Log, reader: LogReader) -> list[dict[str, Any]]:
    """Bounds of every partition; a `problem` instead where they are not to be had here."""
    rows: list[dict[str, Any]] = []
    for topic in await Catalog(log).topics():
        for partition in range(topic.partitions):
            row: dict[str, Any] = {"topic": topic.name, "partition": partition}
            try:
                row |= (await reader.bounds(TopicPartition(topic.name, partition)))._asdict()
            except LlogError as error:
                row["problem"] = str(error)
            rows.append(row)
    return rows


async def topic_table(log: Log, reader: LogReader, name: str) -> pa.Table:
    """All records of a topic, by partition and offset. `RecordTooLarge` beyond `TOPIC_BYTES_MAX`."""
    topic = await Catalog(log).get(name)
    found = [as_text(MESSAGES.empty_table())]
    size = 0
    for partition in range(topic.partitions):
        tp = TopicPartition(name, partition)
        async for batch in iter_from(reader, tp, (await reader.bounds(tp)).log_start_offset):
            messages = messages_of(batch)
            size += messages.nbytes
            if size > TOPIC_BYTES_MAX:
                raise RecordTooLarge(
                    f"topic {name!r} has more than the {format_size(TOPIC_BYTES_MAX)} that a query reads at once: "
                    "read parts of it by "
                    "CONSUME … FROM OFFSET, or all of it by Spark"
                )
            found.append(as_text(messages))
    return pa.concat_tables(found)


def as_text(messages: pa.Table) -> pa.Table:
    """With keys, payloads and headers as text, so that SQL can look into them. Bytes that are no text are shown as
    base64.
    """
    for name, convert in _TEXT.items():
        place = messages.schema.get_field_index(name)
        messages = messages.set_column(place, name, convert(messages.column(place)))
    return messages


def _text(column: pa.ChunkedArray) -> pa.ChunkedArray:
    try:
        return pc.cast(column, pa.string())
    except pa.ArrowInvalid:
        return pa.chunked_array([[_readable(each) for each in column.to_pylist()]], pa.string())


def _readable(data: bytes | None) -> str | None:
    if data is None:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return base64.b64encode(data).decode()


def _headers(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return pa.chunked_array([_header_lists(chunk) for chunk in column.chunks], _HEADERS)


def _header_lists(lists: pa.ListArray) -> pa.ListArray:
    if lists.null_count == len(lists):
        return pa.nulls(len(lists), _HEADERS)
    keys, values = lists.flatten().flatten()
    texts = _text(pa.chunked_array([values])).combine_chunks()
    items = pa.StructArray.from_arrays([keys, texts], fields=list(_HEADERS.value_type))
    lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy()
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    return pa.ListArray.from_arrays(offsets, items, mask=lists.is_null())


_TEXT: Final = {"key": _text, "payload": _text, "headers": _headers}
