"""INSERT INTO TOPIC, which appends the rows of VALUES or of a query to a topic of any engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from llog.batch.columns import Columns
from llog.batch.partitioning import partitions_for_keys
from llog.errors import InvalidArgument, LlogError, PartlyAppended, SqlError
from llog.log.engine import AppendGroup, AppendResult
from llog.log.records import Topic
from llog.sql.commands.command import Command, Section, Usage
from llog.sql.commands.tables import query
from llog.sql.parse.clauses import time_ms
from llog.sql.parse.lexer import Kind
from llog.sql.parse.literals import parse_plain_rows
from llog.sql.parse.parameters import Params
from llog.sql.parse.statements import TableStatement
from llog.sql.parse.token_stream import TokenStream
from llog.sql.result import Result

if TYPE_CHECKING:
    from llog.sql.session import DatabaseSession

_COLUMNS: Final = {"key": pa.binary(), "payload": pa.binary(), "partition": pa.int64(), "ts": pa.timestamp("ms", "UTC")}
_UNNAMED_COLUMNS: Final = {1: ("payload",), 2: ("key", "payload")}
"""Number of values → their columns, if the statement names none."""
_QUERY_WORDS: Final = ("VALUES", "SELECT", "WITH", "FROM", "(")


class InsertTopic(msgspec.Struct, frozen=True, kw_only=True):
    topic: str
    columns: tuple[str, ...] = ()
    select: TableStatement
    """The query that returns the rows. Its parameters are those of the statement."""


def _is_next(stream: TokenStream) -> bool:
    """Whether a topic's name follows TOPIC: `INSERT INTO topic VALUES …` inserts into a table named topic."""
    return stream.ahead(2).upper == "TOPIC" and stream.is_name(3)


def skip_to_query(stream: TokenStream) -> tuple[str, tuple[str, ...]]:
    """Read the topic and the columns, up to VALUES or the query, and return both."""
    if stream.ahead().upper != "INTO":
        raise stream.error("expected INSERT INTO TOPIC", token=stream.ahead())
    stream.at += 3
    topic = stream.topic()
    columns: list[str] = []
    if stream.token.upper == "(" and stream.ahead().upper not in _QUERY_WORDS:
        stream.take()
        while True:
            token = stream.token
            columns.append(stream.name("the name of a column").lower())
            if columns[-1] in columns[:-1]:
                raise stream.error(f"the column {columns[-1]!r} is named twice", token=token)
            if not stream.accept(","):
                break
        stream.expect(")")
    return topic, tuple(columns)


def _parse(stream: TokenStream) -> InsertTopic:
    from llog.sql.parse.table_statements import query_statement  # loads sqlglot and DuckDB

    topic, columns = skip_to_query(stream)
    first = stream.at
    if stream.token.upper not in _QUERY_WORDS:
        raise stream.expected("VALUES or a query", ("VALUES", "SELECT"))
    rows = parse_plain_rows(stream, len(columns)) if stream.accept("VALUES") else None
    select = query_statement(stream, first, rows if stream.token.kind is Kind.END else None)
    stream.skip_to_end()
    return InsertTopic(topic=topic, columns=columns, select=select)


async def _run(session: DatabaseSession, statement: InsertTopic, params: Params) -> Result:
    """Append each row to the partition it names, else to its key's, else to one chosen for the whole statement."""
    database = session.database
    rows = await query(session, statement.select, params)
    topic = await database.catalog.get(statement.topic)
    typed = _typed_columns(statement, rows)
    if not rows.num_rows:
        return Result("INSERT INTO TOPIC")
    columns = Columns(typed["payload"], typed.get("key"), typed.get("ts"), None, ())
    choose = database.log.runtime.random().randrange
    groups = [
        AppendGroup(topic=topic.name, partition=partition, records=_take(columns, row_numbers))
        for partition, row_numbers in _rows_by_partition(topic, typed, rows.num_rows, choose)
    ]
    results = await database.appender.append(groups)
    failed = [result for result in results if isinstance(result, LlogError)]
    appended = [result for result in results if isinstance(result, AppendResult)]
    if failed:
        raise PartlyAppended(len(appended), list(results), failed[0]) if appended else failed[0]
    table = pa.table(
        {
            "partition": pa.array([each.partition for each in appended], pa.int32()),
            "first_offset": [each.start_offset for each in appended],
            "last_offset": [each.end_offset for each in appended],
        }
    )
    return Result("INSERT INTO TOPIC", table, rows.num_rows)


def _typed_columns(statement: InsertTopic, rows: pa.Table) -> dict[str, Any]:
    """Return the query's columns by name, cast to the types of a record's fields."""
    names = statement.columns or _UNNAMED_COLUMNS.get(rows.num_columns, ())
    unknown = [name for name in names if name not in _COLUMNS]
    if unknown or len(names) != rows.num_columns or "payload" not in names or len(set(names)) != len(names):
        raise SqlError(
            f"INSERT INTO TOPIC has {rows.num_columns} values for the columns ({', '.join(names)})",
            hint="a topic has the column payload, and optionally key, partition and ts: INSERT INTO TOPIC t "
            "(key, payload) VALUES (…)",
        )
    typed = {}
    for name, column in zip(names, rows.columns, strict=True):
        try:
            if name == "ts" and pa.types.is_string(column.type):
                column = pa.chunked_array(
                    [[None if each is None else time_ms(each) for each in column.to_pylist()]], pa.int64()
                )
            if _COLUMNS[name] == pa.binary():
                column = column if pa.types.is_binary(column.type) else column.cast(pa.string())
            is_exact = not pa.types.is_timestamp(column.type)  # times of records are cut to milliseconds
            cast = column.cast(_COLUMNS[name], safe=is_exact).combine_chunks()
        except InvalidArgument as error:
            raise SqlError(f"column ts of INSERT INTO TOPIC {error}") from error
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise SqlError(
                f"column {name} of INSERT INTO TOPIC has values of type {column.type}: {error}",
                hint="cast it to text: …::JSON" if pa.types.is_nested(column.type) else "",
            ) from error
        typed[name] = cast.cast(pa.int64()) if name == "ts" else cast
    return typed


def _rows_by_partition(
    topic: Topic, typed: dict[str, Any], count: int, choose: Callable[[int], int]
) -> list[tuple[int, Any]]:
    """Return each partition with the numbers of its rows, in their order."""
    partitions = np.full(count, -1)
    if "key" in typed:
        partitions = partitions_for_keys(typed["key"], topic.partitions)
    partitions[partitions < 0] = choose(topic.partitions)
    if "partition" in typed:
        partitions = pc.coalesce(typed["partition"], pa.array(partitions)).to_numpy()
    return [(int(each), np.flatnonzero(partitions == each)) for each in np.unique(partitions)]


def _take(columns: Columns, row_numbers: Any) -> Columns:
    rows = pa.array(row_numbers)
    return columns._replace(
        values=columns.values.take(rows),
        keys=None if columns.keys is None else columns.keys.take(rows),
        timestamps=None if columns.timestamps is None else columns.timestamps.take(rows),
    )


INSERT_TOPIC: Final = Command(
    statement=InsertTopic,
    begins=("INSERT",),
    is_next=_is_next,
    parse=_parse,
    run=_run,
    usages=(
        Usage(
            Section.TOPICS,
            "INSERT INTO TOPIC t [(key, payload)] VALUES … | query",
            "The columns are `payload`, `key`, `partition` and `ts`. Without names, one value is the `payload`, "
            "two are `key, payload`.",
        ),
    ),
)
COMMANDS: Final = (INSERT_TOPIC,)
