"""Topics as Arrow tables, for `FROM TOPIC t` and the messages of CONSUME."""

from __future__ import annotations

import base64
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from llog.base.units import format_size
from llog.cdc.events import MESSAGE_SCHEMA, messages_of
from llog.engines.reading import iter_from
from llog.errors import RecordTooLarge
from llog.log.catalog import Catalog
from llog.log.engine import LogReader
from llog.log.log import Log
from llog.model import TopicPartition

TOPIC_BYTES_MAX: Final = 256 << 20
"""How much a query may read of one topic, all of which is in memory while the query runs."""

_HEADERS: Final = pa.list_(pa.struct([("key", pa.string()), ("value", pa.string())]))


async def topic_table(log: Log, reader: LogReader, name: str) -> pa.Table:
    """Return all records of a topic by partition and offset. Raises `RecordTooLarge` beyond `TOPIC_BYTES_MAX`."""
    topic = await Catalog(log).get(name)
    tables = [as_text(MESSAGE_SCHEMA.empty_table())]
    size = 0
    for partition in range(topic.partitions):
        tp = TopicPartition(name, partition)
        async for batch in iter_from(reader, tp, (await reader.bounds(tp)).log_start_offset):
            messages = messages_of(batch)
            size += messages.nbytes
            if size > TOPIC_BYTES_MAX:
                raise RecordTooLarge(
                    f"topic {name!r} has more than the {format_size(TOPIC_BYTES_MAX)} that a query can read: read "
                    "parts of it with CONSUME … FROM OFFSET, or all of it with Spark"
                )
            tables.append(as_text(messages))
    return pa.concat_tables(tables)


def as_text(messages: pa.Table) -> pa.Table:
    """Return the messages with keys, payloads and headers as text; bytes that are not UTF-8 become base64."""
    for name, convert in _TEXT.items():
        place = messages.schema.get_field_index(name)
        messages = messages.set_column(place, name, convert(messages.column(place)))
    return messages


def _text(column: pa.ChunkedArray) -> pa.ChunkedArray:
    try:
        return pc.cast(column, pa.string())
    except pa.ArrowInvalid:
        return pa.chunked_array([[_text_or_base64(each) for each in column.to_pylist()]], pa.string())


def _text_or_base64(data: bytes | None) -> str | None:
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
