"""Writes statistics to a table that grows by a file with every run.

Each row is one number: its kind (`scope`: log, topic, partition, group, bill or time), what it belongs to (`topic`,
`partition`, `consumer_group`, `at`), its name (`metric`) and its `value`. So new numbers need no new columns, and a
directory of runs is one table.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from llog.errors import ConfigurationError
from llog.spark.jobs.stats.stats import Stats

_TIME: Final = pa.timestamp("ms", tz="UTC")
SCHEMA: Final = pa.schema(
    [
        pa.field("measured_at", _TIME, nullable=False),
        pa.field("scope", pa.string(), nullable=False),
        pa.field("topic", pa.string()),
        pa.field("partition", pa.int32()),
        pa.field("consumer_group", pa.string()),
        pa.field("at", _TIME),
        pa.field("metric", pa.string(), nullable=False),
        pa.field("value", pa.float64(), nullable=False),
    ]
)


def write_parquet(measured: Stats, directory: Path) -> Path:
    """Write the file of this run and return its path. It appears atomically and never replaces another."""
    at = pa.scalar(measured.measured_ms, _TIME).as_py()
    name = f"stats-{at:%Y%m%dT%H%M%S}{measured.measured_ms % 1000:03}Z-{uuid4().hex[:8]}.parquet"
    table = pa.Table.from_pylist(list(_rows(measured)), schema=SCHEMA)
    # Query engines skip names that begin with a dot.
    hidden, final = directory / f".{name}", directory / name
    try:
        directory.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, hidden, compression="zstd")
        os.replace(hidden, final)
    except OSError as error:
        raise ConfigurationError(f"{directory} cannot be written to: {error.strerror or error}") from error
    return final


def _rows(measured: Stats) -> Iterator[dict[str, Any]]:
    def row(scope: str, metric: str, value: float, **whose: Any) -> dict[str, Any]:
        return {"measured_at": measured.measured_ms, "scope": scope, "metric": metric, "value": float(value), **whose}

    def numbers(scope: str, each: msgspec.Struct, whose: dict[str, Any], left_out: Sequence[str]) -> Iterator[Any]:
        for name in each.__struct_fields__:
            value = getattr(each, name)
            if name not in left_out and value is not None:
                yield row(scope, name, value, **whose)

    yield from numbers("log", measured.blobs, {}, ())
    for topic in measured.topics:
        yield from numbers("topic", topic, {"topic": topic.topic}, ("topic",))
    for partition in measured.partitions:
        whose = {"topic": partition.topic, "partition": partition.partition}
        yield from numbers("partition", partition, whose, ("topic", "partition"))
    for group in measured.groups:
        whose = {"topic": group.topic, "partition": group.partition, "consumer_group": group.group}
        yield from numbers("group", group, whose, ("topic", "partition", "group"))
    for line in measured.bill:
        for name in ("quantity", "price", "dollars_month"):
            yield row("bill", f"{line.item}_{name}", getattr(line, name))
    for name, timeline in measured.timelines.items():
        for moment in timeline.moments():
            for metric, value in (("records", moment.records), ("bytes", moment.bytes)):
                yield row("time", metric, value, topic=name, at=moment.start_ms)
