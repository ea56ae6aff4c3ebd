"""Parses SQL text into statements. No I/O.

Every text yields statements or raises `SqlError`. Values of parameters never become SQL text: llog's own statements
carry them as values, and DuckDB gets them apart from the text.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import islice
from typing import Final, NamedTuple

import duckdb

from llog.errors import SqlError
from llog.sql.commands import insert_topic
from llog.sql.commands.registry import FIRST_WORDS, next_command, second_words
from llog.sql.parse.clauses import did_you_mean
from llog.sql.parse.lexer import Kind, Token, tokenize
from llog.sql.parse.statements import Statement
from llog.sql.parse.table_statements import duckdb_error_start
from llog.sql.parse.token_stream import TokenStream

_CACHED_CHARACTERS_MAX: Final = 10_000


def parse(sql: str) -> list[Statement]:
    """Return the statements of the text, in order; none if it has only comments."""
    return [_parse_statement(stream) for stream in _token_streams(sql)]


def prepare(sql: str) -> tuple[Statement, ...]:
    """Return the statements of the text, as `parse` does, and remember those of recent short texts."""
    return _parse_cached(sql) if len(sql) < _CACHED_CHARACTERS_MAX else tuple(parse(sql))


class ErrorPosition(NamedTuple):
    """Where in a text the failed statement begins, and where the error is, if that is known."""

    statement: int
    error: int | None


def lacks_position(error: SqlError) -> bool:
    """Whether the error comes from DuckDB and does not name a line of the text yet."""
    return not error.line and isinstance(error.__cause__, duckdb.Error)


def error_position(sql: str, number: int, message: str) -> ErrorPosition:
    """Return the position of DuckDB's error with this message in the statement of this number, counted from 0."""
    stream = next(islice(_token_streams(sql), number, None))
    if next_command(stream) is insert_topic.INSERT_TOPIC:
        insert_topic.skip_to_query(stream)
    return ErrorPosition(stream.tokens[0].start, duckdb_error_start(stream, stream.at, message))


def with_position(sql: str, position: ErrorPosition, error: SqlError) -> SqlError:
    """Return the error with its line and column, or those of the statement if DuckDB points at text that llog added."""
    if position.error is None and not error.shown:
        return error
    at = position.statement if position.error is None else position.error
    return SqlError.at(sql, at, error.message, error.hint)


@functools.lru_cache(maxsize=512)
def _parse_cached(sql: str) -> tuple[Statement, ...]:
    return tuple(parse(sql))


def _token_streams(sql: str) -> Iterator[TokenStream]:
    """Yield the tokens of each statement."""
    tokens = tokenize(sql)
    begin = 0
    for number, token in enumerate(tokens):
        if token.kind is Kind.END or (token.kind is Kind.SYMBOL and token.value == ";"):
            if number > begin:
                end = Token(Kind.END, "", token.start, token.start)
                yield TokenStream(sql, [*tokens[begin:number], end])
            begin = number + 1


def _parse_statement(stream: TokenStream) -> Statement:
    try:
        command = next_command(stream)
        if command is None:
            raise _unknown_statement(stream)
        statement = command.parse(stream)
        stream.end()
        return statement
    except RecursionError:
        raise SqlError("nested too deeply", hint="use WITH for the inner parts") from None


def _unknown_statement(stream: TokenStream) -> SqlError:
    first, second = stream.token, stream.ahead()
    known = second_words(first.upper)
    if known:
        what = f"{first.upper} {second.upper}".strip()
        hint = did_you_mean(second.upper, known) or f"write {' or '.join(f'{first.upper} {word}' for word in known)}"
        if what == "CREATE SCHEMA":
            hint = "a schema exists as soon as it has a table: CREATE TABLE schema.name (…)"
        return stream.error(f"{what[:80]} is not supported", hint, second)
    words = [word for word in FIRST_WORDS if word.isalpha()]
    hint = did_you_mean(first.upper, words) or f"statements begin with {', '.join(words)}"
    written = stream.sql[first.start : first.end][:40]
    return stream.error(f"{written!r} does not begin a supported statement", hint, first)
