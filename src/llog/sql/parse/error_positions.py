"""Finds where in a statement an error of sqlglot or DuckDB is: both report positions in the rendered text. No I/O."""

from __future__ import annotations

import re
from typing import Any, Final

from sqlglot.errors import SqlglotError

from llog.errors import SqlError
from llog.sql.parse.clauses import did_you_mean
from llog.sql.parse.lexer import Token
from llog.sql.parse.renderer import BEFORE_COLUMN, RenderedText
from llog.sql.parse.token_stream import RESERVED, TokenStream

_EXCERPT: Final = re.compile(r"^(LINE (\d+): )(.*)\n( *)\^", re.MULTILINE)
_NAMED_COLUMN: Final = re.compile(
    r'(?:update column|a column with name|Duplicate column name) "?([^"\n]+?)"?(?: not found| in |\n|$)'
)
"""Matches errors about a column that INSERT or UPDATE names, for which DuckDB reports no position."""
_KEYWORDS: Final = (
    *("FROM", "WHERE", "GROUP", "ORDER", "BY", "HAVING", "LIMIT", "OFFSET", "JOIN", "USING", "UNION", "WINDOW"),
    *("QUALIFY", "VALUES", "SET", "INTO", "RETURNING", "CONFLICT", "PRIMARY", "DEFAULT", "BETWEEN", "DISTINCT"),
)


def from_sqlglot(error: SqlglotError, stream: TokenStream, rendered: RenderedText) -> SqlError:
    """Return sqlglot's error at the token that it points at."""
    details: list[dict[str, Any]] = getattr(error, "errors", [])
    message = str(details[0].get("description") or "not understood") if details else "not understood"
    if message.startswith("Required keyword"):  # sqlglot names its own classes
        message = "an expression is missing before this"
    message = message.partition(" but got <Token")[0]
    lines = rendered.text.split("\n")
    line, column = (details[0].get("line") or 1, details[0].get("col") or 0) if details else (1, 0)
    token = _token_at(stream, rendered, lines, line - 1, column - 1)
    return stream.error(message.rstrip("."), _hint_at(stream, token), token)


def from_duckdb(message: str, stream: TokenStream | None, rendered: RenderedText | None) -> SqlError:
    """Return the error of DuckDB's parser at the token that it points at, if that is known."""
    explanation = "DuckDB cannot parse it: " + message.partition("\n")[0].removeprefix("Parser Error: ")[:300]
    token = None if stream is None or rendered is None else token_at_caret(message, stream, rendered)
    if stream is None or token is None:
        return SqlError(explanation)
    return stream.error(explanation, _hint_at(stream, token), token)


def named_column(message: str) -> str | None:
    """Return the column that DuckDB's message is about, if the message has no position."""
    found = _NAMED_COLUMN.search(message)
    return None if found is None else found[1].lower()


def token_at_caret(message: str, stream: TokenStream, rendered: RenderedText) -> Token | None:
    """Return the token below which DuckDB, whose message shows part of a line, has put its caret."""
    excerpt = _EXCERPT.search(message)
    lines = rendered.text.split("\n")
    if excerpt is None or int(excerpt[2]) > len(lines):
        return None
    line = int(excerpt[2]) - 1
    text = excerpt[3].removeprefix("...")
    begin = lines[line].find(text.removesuffix("..."))
    if begin < 0:
        return None
    indent = len(excerpt[1]) + len(excerpt[3]) - len(text)
    return _token_at(stream, rendered, lines, line, begin + len(excerpt[4]) - indent)


def _hint_at(stream: TokenStream, token: Token) -> str:
    """Return a hint if the token or the one before it looks like a misspelt keyword, or is a keyword used as a name.

    Parsers take a misspelt keyword for an alias and report the token after it.
    """
    number = stream.tokens.index(token)
    for near in stream.tokens[max(number - 1, 0) : number + 1]:
        hint = "" if near.upper in _KEYWORDS else did_you_mean(near.upper, _KEYWORDS)
        if hint:
            return hint
    is_name = number > 0 and token.upper in RESERVED and stream.tokens[number - 1].upper in (*BEFORE_COLUMN, "TABLE")
    return f"{token.value} is a keyword: as a name, it needs double quotes" if is_name else ""


def _token_at(stream: TokenStream, rendered: RenderedText, lines: list[str], line: int, column: int) -> Token:
    position = sum(len(text) + 1 for text in lines[:line]) + max(column, 0)
    return stream.tokens[max((number for start, number in rendered.starts.items() if start <= position), default=0)]
