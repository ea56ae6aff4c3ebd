"""SHOW, DESCRIBE and the tables of `system`: what there is, as Arrow tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from llog.errors import InvalidArgument, TableNotFound, TopicNotFound
from llog.sql.parse import statements as sql
from llog.sql.tables.definitions import TableDefinition, with_schema
from llog.sql.topic_tables import SYSTEM, partition_rows, topic_rows

if TYPE_CHECKING:
    from llog.sql.database import Database

SHOWN: Final = {
    sql.Shown.TOPICS: "topics",
    sql.Shown.TABLES: "tables",
    sql.Shown.ROUTES: "routes",
    sql.Shown.GROUPS: "topic_offsets",
    sql.Shown.PARTITIONS: "partitions",
}


async def system(database: Database, name: str) -> pa.Table:
    """The table `system.<name>`."""
    rows: Iterable[Mapping[str, Any]]
    if name == "topics":
        rows = topic_rows(await database.catalog.topics())
    elif name == "partitions":
        rows = await partition_rows(database.log, database.reader)
    elif name == "topic_offsets":
        rows = await _group_rows(database)
    else:
        rows = await _held_rows(database, name)
    return pa.Table.from_pylist(list(rows), schema=SYSTEM[name])


async def describe(database: Database, statement: sql.Describe) -> pa.Table:
    """The columns of a table, or the settings of a topic."""
    if not statement.is_topic and database.may_have_tables:
        held = await database.held()
        try:
            return _columns(held.tables.definition(with_schema(statement.name)))
        except TableNotFound as error:
            try:
                return await _topic(database, statement.name)
            except (TopicNotFound, InvalidArgument):
                raise error from None
    return await _topic(database, statement.name)


async def _topic(database: Database, name: str) -> pa.Table:
    [row] = pa.Table.from_pylist(
        list(topic_rows([await database.catalog.get(name)])), schema=SYSTEM["topics"]
    ).to_pylist()
    shown = {key: None if value is None else str(value) for key, value in row.items()}
    routes = [each for each in await _held_rows(database, "routes") if each["topic"] == name]
    shown |= {f"source {each['source_table']} on {each['op']}": each["payload"] for each in routes}
    return pa.table({"property": list(shown), "value": pa.array(list(shown.values()), pa.string())})


def _columns(definition: TableDefinition) -> pa.Table:
    columns = definition.columns
    return pa.table(
        {
            "column": [each.name for each in columns],
            "type": [each.type for each in columns],
            "nullable": [each.nullable for each in columns],
            "key": ["primary key" if each.name in definition.primary_key else None for each in columns],
            "default": pa.array([each.default for each in columns], pa.string()),
        }
    )


async def _held_rows(database: Database, name: str) -> list[dict[str, Any]]:
    """Of what is in RocksDB; none if there never was one."""
    if not database.may_have_tables:
        return []
    held = await database.held()
    if name == "tables":
        return [
            {
                "table": each.name,
                "columns": len(each.columns),
                "primary_key": ", ".join(each.primary_key),
                "definition": each.ddl,
            }
            for each in held.tables.definitions().values()
        ]
    return [
        {
            "topic": each.topic,
            "source_table": each.table,
            "op": each.op,
            "payload": each.payload,
            "filter": each.where,
            "partition_by": each.partition_by,
            "problem": held.relay.problem(each.directory),
        }
        for each in (await database.sources()).routes.all()
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
