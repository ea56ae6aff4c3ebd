"""The tables of `system`: the topics, partitions, groups, routes and tables of the log, as Arrow tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from llog.errors import LlogError
from llog.log.catalog import Catalog
from llog.log.engine import LogReader
from llog.log.log import Log
from llog.log.records import Topic
from llog.model import TopicPartition

if TYPE_CHECKING:
    from llog.sql.database import Database


_TIME: Final = pa.timestamp("ms", "UTC")
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
"""What SHOW lists. All but `tables` can also be queried as `system.<name>`."""


async def system_table(database: Database, name: str) -> pa.Table:
    """Return the table `system.<name>` as of now."""
    rows: Iterable[Mapping[str, Any]]
    match name:
        case "topics":
            rows = topic_rows(await database.catalog.topics())
        case "partitions":
            rows = await partition_rows(database.log, database.reader)
        case "topic_offsets":
            rows = await _group_rows(database)
        case "routes":
            rows = await route_rows(database)
        case _:
            rows = await _table_rows(database)
    return pa.Table.from_pylist(list(rows), schema=SYSTEM[name])


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
    """Return the bounds of every partition, or a `problem` where this process cannot read them."""
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


async def route_rows(database: Database) -> list[dict[str, Any]]:
    """Return the routes with the relay's problems; none if the log never had tables."""
    if not database.may_have_tables:
        return []
    opened = await database.require_tables()
    return [
        {
            "topic": each.topic,
            "source_table": each.table,
            "op": each.op,
            "payload": each.payload,
            "filter": each.where,
            "partition_by": each.partition_by,
            "problem": opened.relay.problem(each.directory),
        }
        for each in (await database.sources()).routes.all()
    ]


async def _table_rows(database: Database) -> list[dict[str, Any]]:
    if not database.may_have_tables:
        return []
    opened = await database.require_tables()
    return [
        {
            "table": each.name,
            "columns": len(each.columns),
            "primary_key": ", ".join(each.primary_key),
            "definition": each.ddl,
        }
        for each in opened.tables.definitions().values()
    ]


async def _group_rows(database: Database) -> list[dict[str, Any]]:
    rows = []
    for group in await database.groups.names():
        for each in await database.groups.describe(group):
            offset = each.offset
            rows.append(
                {
                    "topic": each.topic,
                    "group": group,
                    "partition": each.partition,
                    "last_acked_offset": None if offset is None else offset - 1,
                    "outstanding": each.outstanding,
                    "lag": each.lag,
                    "mode": each.mode or None,
                    "members": ", ".join(each.members) or None,
                }
            )
    return rows
