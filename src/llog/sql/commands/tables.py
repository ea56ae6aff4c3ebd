"""Statements that DuckDB runs: on tables, and queries of tables, topics and the tables of `system`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from llog.errors import SqlError
from llog.sql.commands.command import Command, Section, Usage
from llog.sql.parse.parameters import Params
from llog.sql.parse.statements import TableStatement
from llog.sql.parse.token_stream import TokenStream
from llog.sql.result import Result
from llog.sql.system_tables import system_table
from llog.sql.topic_tables import topic_table
from llog.sql.workers.thread_pools import Pool

if TYPE_CHECKING:
    from llog.sql.session import DatabaseSession

KEYWORDS: Final = tuple(
    re.findall(
        r"\w+",
        """
        AND AS ASC BETWEEN BIGINT BLOB BOOLEAN BY CASE COUNT DATE DEFAULT DESC DISTINCT DOUBLE ELSE END FULL
        GROUP HAVING IN INNER INTEGER IS JOIN JSON KEY LEFT LIKE LIMIT NOT NULL OFFSET ON OR ORDER PRIMARY RIGHT
        THEN TIMESTAMP UNION USING VARCHAR WHEN WHERE WITH
        """,
    )
)
"""Words of DuckDB's SQL that the shell completes, in addition to those of the usages."""


def _parse(stream: TokenStream) -> TableStatement:
    from llog.sql.parse.table_statements import table_statement  # loads sqlglot and DuckDB

    statement = table_statement(stream)
    stream.skip_to_end()
    return statement


async def _run(session: DatabaseSession, statement: TableStatement, params: Params) -> Result:
    if statement.kind == "SELECT":
        return Result("SELECT", await query(session, statement, params))
    extra = await _extra_tables(session, statement)
    opened, table_session = await session.tables()
    tables = opened.tables
    if statement.kind in ("CREATE TABLE", "DROP TABLE"):
        if table_session.in_transaction:
            raise SqlError(f"{statement.kind} cannot be part of a transaction", hint="COMMIT or ROLLBACK first")
        if statement.kind == "DROP TABLE":
            await session.database.sources()  # routes to deleted topics must not keep the table
        define = tables.create if statement.kind == "CREATE TABLE" else tables.drop
        await session.change(lambda: define(statement))
        return Result(statement.kind)
    executed = await session.change(lambda: tables.execute(table_session, statement, params or None, extra))
    opened.relay.poke()
    return Result(statement.kind, executed.rows, executed.count)


async def query(session: DatabaseSession, statement: TableStatement, params: Params) -> pa.Table:
    """Return the rows of a SELECT, as the session's transaction sees them if one is open."""
    extra = await _extra_tables(session, statement)
    threads = session.database.threads
    if not statement.tables:
        mirror = session.database.tableless_mirror()
        return await threads.run(Pool.QUERY, lambda: mirror.fetch_once(statement.sql, params or None, extra))
    opened, table_session = await session.tables()
    pool = Pool.TRANSACTION if table_session.in_transaction else Pool.QUERY
    return await threads.run(pool, lambda: opened.tables.select(table_session, statement, params or None, extra))


async def _extra_tables(session: DatabaseSession, statement: TableStatement) -> dict[str, pa.Table]:
    """Return the topics and system tables that a statement reads, by the names that stand for them in its text."""
    database = session.database
    extra = {name: await system_table(database, table) for name, table in statement.system.items()}
    for name, topic in statement.topics.items():
        extra[name] = await topic_table(database.log, database.reader, topic)
    return extra


DEFINITION: Final = Command(
    statement=TableStatement,
    begins=("CREATE TABLE", "DROP TABLE"),
    parse=_parse,
    run=_run,
    usages=(
        Usage(
            Section.TABLES,
            "CREATE TABLE [IF NOT EXISTS] t (…)",
            "Takes columns with types, `PRIMARY KEY`, `NOT NULL`, `DEFAULT` and `CHECK`.",
        ),
        Usage(Section.TABLES, "DROP TABLE [IF EXISTS] t"),
    ),
    runs_in_transaction=True,
    changes_names=True,
)
QUERY: Final = Command(
    statement=TableStatement,
    begins=("SELECT", "WITH", "VALUES", "FROM", "(", "INSERT", "UPDATE", "DELETE", "TRUNCATE"),
    parse=_parse,
    run=_run,
    usages=(
        Usage(
            Section.TABLES,
            "INSERT [OR REPLACE | OR IGNORE] INTO t [(columns)] VALUES … | query [ON CONFLICT …] [RETURNING …]",
        ),
        Usage(Section.TABLES, "UPDATE t SET … [FROM …] [WHERE …] [RETURNING …]"),
        Usage(Section.TABLES, "DELETE FROM t [USING …] [WHERE …] [RETURNING …]"),
        Usage(Section.TABLES, "TRUNCATE t", "Deletes all rows."),
        Usage(Section.TABLES, "SELECT …", "Any query of DuckDB, also one that begins with `WITH`, `FROM` or `VALUES`."),
        Usage(
            Section.TOPICS,
            "SELECT … FROM TOPIC t",
            "Reads a topic of up to 256 MiB as a table. Its columns are `topic`, `partition`, `offset`, `ts`, `key`, "
            "`payload`, `message_id`, `source_table`, `op`, `payload_mode` and `headers`.",
        ),
        Usage(
            Section.TOPICS,
            "SELECT … FROM system.topics",
            "Also `system.partitions`, `system.routes` and `system.topic_offsets`.",
        ),
    ),
    runs_in_transaction=True,
)
COMMANDS: Final = (DEFINITION, QUERY)
