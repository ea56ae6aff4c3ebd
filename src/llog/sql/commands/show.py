"""SHOW and DESCRIBE, which list and describe tables, topics, routes, groups and partitions."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Final

import msgspec
import pyarrow as pa

from llog.errors import InvalidArgument, TableNotFound, TopicNotFound
from llog.sql.commands.command import Command, Section, Usage
from llog.sql.parse.parameters import Params
from llog.sql.parse.renderer import with_schema
from llog.sql.parse.token_stream import TokenStream
from llog.sql.result import Result
from llog.sql.system_tables import SYSTEM, route_rows, system_table, topic_rows

if TYPE_CHECKING:
    from llog.sql.database import Database
    from llog.sql.session import DatabaseSession
    from llog.sql.tables.definitions import TableDefinition


class Listing(StrEnum):
    """What SHOW lists, as written after it."""

    TOPICS = "topics"
    TABLES = "tables"
    ROUTES = "routes"
    GROUPS = "consumer groups"
    PARTITIONS = "partitions"


_SYSTEM_TABLES: Final = {
    Listing.TOPICS: "topics",
    Listing.TABLES: "tables",
    Listing.ROUTES: "routes",
    Listing.GROUPS: "topic_offsets",
    Listing.PARTITIONS: "partitions",
}


class Show(msgspec.Struct, frozen=True, kw_only=True):
    what: Listing


class Describe(msgspec.Struct, frozen=True, kw_only=True):
    """Describes a table or a topic; `is_topic` if the statement says TOPIC."""

    name: str
    is_topic: bool = False


def _parse_show(stream: TokenStream) -> Show:
    stream.expect("SHOW")
    for listing in Listing:
        if stream.accept(*listing.value.upper().split()):
            return Show(what=listing)
    known = [listing.value.upper() for listing in Listing]
    hint = "write SHOW CONSUMER GROUPS" if stream.token.upper == "CONSUMER" else ""
    raise stream.expected(", ".join(known), [*known, "CONSUMER"], hint)


def _parse_describe(stream: TokenStream) -> Describe:
    stream.take()
    kind = ""
    if stream.token.upper in ("TOPIC", "TABLE") and stream.is_name(1):
        kind = stream.take().upper
    if kind == "TABLE":
        return Describe(name=stream.table())
    return Describe(name=stream.topic(), is_topic=True) if kind else Describe(name=stream.table_or_topic())


async def _run_show(session: DatabaseSession, statement: Show, _: Params) -> Result:
    return Result("SHOW", await system_table(session.database, _SYSTEM_TABLES[statement.what]))


async def _run_describe(session: DatabaseSession, statement: Describe, _: Params) -> Result:
    return Result("DESCRIBE", await _describe(session.database, statement))


async def _describe(database: Database, statement: Describe) -> pa.Table:
    """Return the columns of a table, or the options of a topic."""
    if not statement.is_topic and database.may_have_tables:
        opened = await database.require_tables()
        try:
            return _table_columns(opened.tables.definition(with_schema(statement.name)))
        except TableNotFound as error:
            try:
                return await _topic_properties(database, statement.name)
            except (TopicNotFound, InvalidArgument):
                raise error from None
    return await _topic_properties(database, statement.name)


async def _topic_properties(database: Database, name: str) -> pa.Table:
    rows = list(topic_rows([await database.catalog.get(name)]))
    [row] = pa.Table.from_pylist(rows, schema=SYSTEM["topics"]).to_pylist()
    properties = {key: None if value is None else str(value) for key, value in row.items()}
    routes = [each for each in await route_rows(database) if each["topic"] == name]
    properties |= {f"source {each['source_table']} on {each['op']}": each["payload"] for each in routes}
    return pa.table({"property": list(properties), "value": pa.array(list(properties.values()), pa.string())})


def _table_columns(definition: TableDefinition) -> pa.Table:
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


SHOW: Final = Command(
    statement=Show,
    begins=("SHOW",),
    parse=_parse_show,
    run=_run_show,
    usages=(Usage(Section.TOPICS, "SHOW TOPICS | TABLES | ROUTES | CONSUMER GROUPS | PARTITIONS", "Lists them."),),
    runs_in_transaction=True,
)
DESCRIBE: Final = Command(
    statement=Describe,
    begins=("DESCRIBE", "DESC"),
    parse=_parse_describe,
    run=_run_describe,
    usages=(
        Usage(
            Section.TOPICS, "DESCRIBE [TOPIC | TABLE] name", "Shows the options of a topic, or the columns of a table."
        ),
    ),
    runs_in_transaction=True,
)
COMMANDS: Final = (SHOW, DESCRIBE)
