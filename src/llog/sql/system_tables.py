"""The tables of `system`: topics, partitions, groups, routes and tables of the log, as Arrow tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from llog.sql.topic_tables import SYSTEM, partition_rows, topic_rows

if TYPE_CHECKING:
    from llog.sql.database import Database


async def system_table(database: Database, name: str) -> pa.Table:
    """The table `system.<name>`, as of now."""
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


async def route_rows(database: Database) -> list[dict[str, Any]]:
    """None if the log never had tables."""
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
