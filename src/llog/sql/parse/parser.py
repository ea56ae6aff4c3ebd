"""SQL text to statements, and parameters into statements. No I/O.

Nothing but statements or `SqlError` comes out of any text. Values of parameters never become SQL text: llog's own
statements carry them as values, and DuckDB gets them beside the text.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import islice
from typing import Final, NamedTuple

import duckdb

from llog.errors import SqlError
from llog.sql.parse.clauses import did_you_mean
from llog.sql.parse.lexer import Kind, Token, tokens_of
from llog.sql.parse.literals import plain_rows
from llog.sql.parse.parameters import bind, parameters_of, shares
from llog.sql.parse.statements import InsertTopic, Statement
from llog.sql.parse.table_statements import pointed_at, query_statement, table_statement
from llog.sql.parse.token_stream import TokenStream
from llog.sql.parse.topic_statements import FIRST_WORDS, own_statement

__all__ = ["bind", "parameters_of", "parse", "prepare", "shares"]

_CACHED_CHARACTERS_MAX: Final = 10_000
_TABLE_WORDS: Final = ("SELECT", "WITH", "VALUES", "FROM", "INSERT", "UPDATE", "DELETE", "TRUNCATE")
_KNOWN: Final = (*FIRST_WORDS, *_TABLE_WORDS)


def parse(sql: str) -> list[Statement]:
    """The statements of the text, in order; none if it has only comments."""
    return [_statement(stream) for stream in _streams(sql)]


def prepare(sql: str) -> tuple[Statement, ...]:
    """`parse`, remembered for the last short texts. Statements are not to be changed."""
    return _prepared(sql) if len(sql) < _CACHED_CHARACTERS_MAX else tuple(parse(sql))


class ErrorPlace(NamedTuple):
    """Of an error in a text: where its statement begins, and, if that is known, where in it the error is."""

    begin: int
    position: int | None


def can_be_placed(error: SqlError) -> bool:
    """Whether DuckDB raised it, and nobody has said yet where in the text that was written."""
    return not error.line and isinstance(error.__cause__, duckdb.Error)


def place_of(sql: str, number: int, said: str) -> ErrorPlace:
    """Of what DuckDB said when the statement of this number (from 0) was run."""
    stream = next(islice(_streams(sql), number, None))
    if _is_insert_topic(stream):
        _into_topic(stream)
    return ErrorPlace(stream.tokens[0].start, pointed_at(stream, stream.at, said))


def placed(sql: str, place: ErrorPlace, error: SqlError) -> SqlError:
    """The error where DuckDB said; at the statement's beginning, if that was in text of ours."""
    if place.position is None and not error.shown:
        return error
    return SqlError.at(sql, place.begin if place.position is None else place.position, error.message, error.hint)


@functools.lru_cache(maxsize=512)
def _prepared(sql: str) -> tuple[Statement, ...]:
    return tuple(parse(sql))


def _streams(sql: str) -> Iterator[TokenStream]:
    """Of each statement."""
    tokens = tokens_of(sql)
    begin = 0
    for number, token in enumerate(tokens):
        if token.kind is Kind.END or (token.kind is Kind.SYMBOL and token.value == ";"):
            if number > begin:
                end = Token(Kind.END, "", token.start, token.start)
                yield TokenStream(sql, [*tokens[begin:number], end])
            begin = number + 1


def _statement(stream: TokenStream) -> Statement:
    try:
        statement = own_statement(stream)
        if statement is not None:
            return statement
        first, second = stream.token, stream.ahead()
        if _is_insert_topic(stream):
            return _insert_topic(stream)
        if first.upper not in _TABLE_WORDS and first.upper != "(" and (first.upper, second.upper) not in _PAIRS:
            raise _unknown(stream, first, second)
        return table_statement(stream)
    except RecursionError:
        raise SqlError("nested too deeply", hint="use WITH for the inner parts") from None


_PAIRS: Final = (("CREATE", "TABLE"), ("DROP", "TABLE"))


def _is_insert_topic(stream: TokenStream) -> bool:
    return stream.token.upper == "INSERT" and stream.ahead(2).upper == "TOPIC" and stream.is_name(3)


def _into_topic(stream: TokenStream) -> tuple[str, tuple[str, ...]]:
    """The topic and the columns; the query is next."""
    if stream.ahead().upper != "INTO":
        raise stream.error("expected INSERT INTO TOPIC", token=stream.ahead())
    stream.at += 3
    topic = stream.topic()
    columns: list[str] = []
    if stream.token.upper == "(" and stream.ahead().upper not in ("SELECT", "WITH", "VALUES", "FROM", "("):
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


def _insert_topic(stream: TokenStream) -> InsertTopic:
    topic, columns = _into_topic(stream)
    first = stream.at
    if stream.token.upper not in ("VALUES", "SELECT", "WITH", "FROM", "("):
        raise stream.expected("VALUES or a query", ("VALUES", "SELECT"))
    rows = plain_rows(stream, len(columns)) if stream.accept("VALUES") else None
    ends = stream.token.kind is Kind.END
    select = query_statement(stream, first, rows if ends else None)
    return InsertTopic(topic=topic, columns=columns, select=select)


def _unknown(stream: TokenStream, first: Token, second: Token) -> SqlError:
    if first.upper in ("CREATE", "DROP", "ALTER", "CLEAR"):
        what = f"{first.upper} {second.upper}".strip()
        known = {"CREATE": ("TABLE", "TOPIC"), "DROP": ("TABLE", "TOPIC")}.get(first.upper, ("TOPIC",))
        hint = did_you_mean(second.upper, known) or f"write {' or '.join(f'{first.upper} {w}' for w in known)}"
        if what == "CREATE SCHEMA":
            hint = "a schema is there with its first table: CREATE TABLE schema.name (…)"
        return stream.error(f"{what[:80]} is not supported", hint, second)
    hint = did_you_mean(first.upper, _KNOWN) or f"statements begin with {', '.join(_KNOWN)}"
    return stream.error(
        f"{stream.sql[first.start : first.end][:40]!r} begins no statement that is supported", hint, first
    )
