"""Splits SQL text at its semicolons, so that statements run one by one and errors name their line in a file. No I/O.

Only what may hide a semicolon is parsed here: quotes, dollar quotes and comments.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from llog.sql.commands.transactions import BEGIN, COMMIT, ROLLBACK

_TOKEN: Final = re.compile(
    r"""
      (?P<quoted>  \b[eE]'[^'\\]*+(?:(?:''|\\.)[^'\\]*+)*+' | '[^']*+(?:''[^']*+)*+' | "[^"]*+(?:""[^"]*+)*+" )
    | (?P<comment> --[^\n]*+ )
    | (?P<block>   /\* )
    | (?P<dollar>  \$(?:[^\W\d]\w*+)?\$ )
    | (?P<open>    ['"] )
    | (?P<end>     ; )
    | (?P<space>   \s++ )
    | (?P<word>    \w++ )
    | (?P<other>   . )
    """,
    re.VERBOSE | re.DOTALL,
)
_BLOCK: Final = re.compile(r"/\*|\*/")
_ENDS: Final = (*COMMIT.begins, *ROLLBACK.begins)


class ScriptStatement(NamedTuple):
    """A statement as written, without its semicolon and leading comments, and where it begins, counted from 1."""

    sql: str
    line: int
    column: int
    word: str
    """Its first word, in capitals."""


class Script(NamedTuple):
    statements: list[ScriptStatement]
    rest: ScriptStatement | None
    """The text after the last semicolon, unless it is only comments."""


def split(text: str) -> Script:
    statements: list[ScriptStatement] = []
    begin: int | None = None
    word = ""
    line, line_start, position = 1, 0, 0

    def statement_between(start: int, end: int) -> ScriptStatement:
        nonlocal line, line_start, position
        line += text.count("\n", position, start)
        line_start = max(line_start, text.rfind("\n", position, start) + 1)
        position = start
        return ScriptStatement(text[start:end].rstrip(), line, start - line_start + 1, word)

    at = 0
    while match := _TOKEN.match(text, at):
        kind, at = match.lastgroup, match.end()
        if kind == "block":
            at = _block_end(text, at)
        elif kind == "dollar":
            close = text.find(match.group(), at)
            at = -1 if close < 0 else close + len(match.group())
        if kind == "open" or at < 0:
            return Script(statements, statement_between(match.start() if begin is None else begin, len(text)))
        if kind == "end":
            if begin is not None:
                statements.append(statement_between(begin, match.start()))
            begin, word = None, ""
        elif begin is None and kind not in ("comment", "block", "space"):
            begin, word = match.start(), match.group().upper()
    return Script(statements, None if begin is None else statement_between(begin, len(text)))


def _block_end(text: str, at: int) -> int:
    """Return where the comment that began before `at` ends, or -1. Comments nest."""
    depth = 1
    for match in _BLOCK.finditer(text, at):
        depth += 1 if match.group() == "/*" else -1
        if depth == 0:
            return match.end()
    return -1


def join_transactions(statements: Sequence[ScriptStatement]) -> tuple[list[ScriptStatement], list[ScriptStatement]]:
    """Join the statements of each transaction, from BEGIN to its end, into one.

    Returns the statements, and those of a transaction that has not ended.
    """
    joined: list[ScriptStatement] = []
    held: list[ScriptStatement] = []
    for statement in statements:
        if held or statement.word in BEGIN.begins:
            held.append(statement)
        else:
            joined.append(statement)
        if held and statement.word in _ENDS:
            joined.append(_join(held))
            held = []
    return joined, held


def _join(statements: Sequence[ScriptStatement]) -> ScriptStatement:
    """Join statements into one text that keeps each on its line."""
    first = statements[0]
    text, line = "", first.line
    for statement in statements:
        text += "\n" * (statement.line - line) + statement.sql + "; "
        line = statement.line + statement.sql.count("\n")
    return first._replace(sql=text.rstrip())
