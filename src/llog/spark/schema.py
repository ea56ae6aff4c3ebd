"""The columns of the data source, which are those of Spark's `kafka` source, as types of Spark and of Arrow."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from llog.batch.columns import HEADERS_TYPE, append_times, effective_timestamps, headers_to_arrow
from llog.errors import ConfigurationError
from llog.log.engine import Batch
from llog.model import TimestampType as TopicTime

_HEADERS = ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())]))
_TIME = pa.timestamp("us", tz="UTC")
_ARROW = {
    "key": pa.binary(),
    "value": pa.binary(),
    "topic": pa.string(),
    "partition": pa.int32(),
    "offset": pa.int64(),
    "timestamp": _TIME,
    "timestampType": pa.int32(),
    "headers": HEADERS_TYPE,
}


def source_schema(*, include_headers: bool) -> StructType:
    fields = [
        StructField("key", BinaryType()),
        StructField("value", BinaryType()),
        StructField("topic", StringType()),
        StructField("partition", IntegerType()),
        StructField("offset", LongType()),
        StructField("timestamp", TimestampType()),
        StructField("timestampType", IntegerType()),
    ]
    return StructType([*fields, StructField("headers", _HEADERS)] if include_headers else fields)


def chosen_columns(schema: StructType, full: StructType | None = None) -> tuple[str, ...]:
    """Return the columns of a reader's schema, in its order: those of the `full` schema, or those in `.schema(…)`."""
    offered = {field.name.lower(): field for field in (full or source_schema(include_headers=True)).fields}
    names = []
    for field in schema.fields:
        known = offered.get(field.name.lower())
        if known is None or known.dataType != field.dataType or field.name != known.name:
            columns = ", ".join(f"{f.name} {f.dataType.simpleString()}" for f in offered.values())
            raise ConfigurationError(
                f"column {field.name} {field.dataType.simpleString()} is not one of llog's, which are: {columns}"
            )
        if not field.nullable:
            raise ConfigurationError(f"column {field.name} must be nullable in a schema for llog")
        names.append(known.name)
    return tuple(names)


def to_arrow(batch: Batch, columns: tuple[str, ...], time_type: TopicTime) -> pa.RecordBatch:
    """Return the batch in the types that Spark expects; values and keys are not copied."""
    arrays = [_column(batch, name, time_type) for name in columns]
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema([(name, _ARROW[name]) for name in columns]))


def _column(batch: Batch, name: str, time_type: TopicTime) -> pa.Array:
    records = batch.columns
    count = records.count
    match name:
        case "value":
            return records.values
        case "key":
            return records.keys if records.keys is not None else pa.nulls(count, pa.binary())
        case "topic":
            return pa.repeat(pa.scalar(batch.tp.topic, pa.string()), count)
        case "partition":
            return pa.array(np.full(count, batch.tp.partition, dtype=np.int32))
        case "offset":
            return pa.array(np.arange(batch.start_offset, batch.start_offset + count, dtype=np.int64))
        case "timestamp":
            is_append = time_type is TopicTime.APPEND
            times = append_times(records) if is_append else effective_timestamps(records).to_numpy()
            return pa.array(times * 1000).cast(_TIME)
        case "timestampType":
            return pa.array(np.full(count, 1 if time_type is TopicTime.APPEND else 0, dtype=np.int32))
        case _:
            return headers_to_arrow(records.headers, count)
