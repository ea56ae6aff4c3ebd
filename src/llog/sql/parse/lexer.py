"""Splits SQL text into tokens with positions, by DuckDB's rules. No I/O.

Strings are `'…'` (with quotes doubled), `e'…'` (with backslashes), `x'…'` and `$tag$…$tag$`. Names are words or `"…"`.
Comments are `--` and `/* */`, which nest. Parameters are `?`, `$1`, `$name` and `:name`. Ambiguous text (`a$$`, `1x`)
is refused. Bounds: 16 MiB of text; 1,000,000 tokens; brackets, CASE and comments nested 200 deep; 100 prefix operators
or subscripts in a row; 500 set operations in a statement.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Final, NamedTuple

from llog.errors import SqlError

TEXT_BYTES_MAX: Final = 16 << 20
TOKENS_MAX: Final = 1_000_000
DEPTH_MAX: Final = 200
PREFIXES_MAX: Final = 100
SET_OPERATIONS_MAX: Final = 500


class Kind(IntEnum):
    WORD = 1
    """A name or keyword as written."""
    NAME = 2
    """A name in double quotes, which `value` omits."""
    STRING = 3
    BLOB = 4
    NUMBER = 5
    PARAMETER = 6
    """`value` is `?`, the number, or the name."""
    SYMBOL = 7
    END = 8


class Token(NamedTuple):
    kind: Kind
    value: str
    start: int
    end: int

    @property
    def upper(self) -> str:
        """A word in capitals or a symbol, to compare with a keyword; empty for any other token."""
        return self.value.upper() if self.kind is Kind.WORD else self.value if self.kind is Kind.SYMBOL else ""


_TOKEN: Final = re.compile(
    r"""(?P<space>\s++)
      | (?P<plain>[(),;=*])
      | (?P<line>--[^\n]*+)
      | (?P<block>/\*)
      | (?P<escape>[eE]'[^'\\]*+(?:(?:''|\\.)[^'\\]*+)*+')
      | (?P<hex>[xX]'(?:[0-9a-fA-F]{2})*+')
      | (?P<odd>[eExXbBnN]'|[uU]&['"])
      | (?P<word>[^\W\d][\w$]*+)
      | (?P<string>'[^']*+(?:''[^']*+)*+')
      | (?P<name>"[^"]*+(?:""[^"]*+)*+")
      | (?P<number>(?:[0-9][0-9_]*+(?:\.[0-9_]*+)?|\.[0-9][0-9_]*+)(?:[eE][+-]?[0-9]++)?)
      | (?P<dollar>\$(?:[^\W\d]\w*+)?\$)
      | (?P<numbered>\$[0-9]++|\?)
      | (?P<named>\$[^\W\d]\w*+)
      | (?P<colon>::|:=|:)
      | (?P<symbol>[^\s\w'"])
    """,
    re.VERBOSE | re.DOTALL,
)
_COMMENT: Final = re.compile(r"/\*|\*/")
_NAMED: Final = re.compile(r"[^\W\d]\w*+")
_ESCAPED: Final = re.compile(r"''|\\(.)", re.DOTALL)
_ESCAPES: Final = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}
_OPEN: Final = {"(": ")", "[": "]", "{": "}"}
_PREFIXES: Final = frozenset("+-~!@")
_SET_OPERATIONS: Final = frozenset({"UNION", "INTERSECT", "EXCEPT"})
_VALUES: Final = frozenset({Kind.NAME, Kind.STRING, Kind.BLOB, Kind.NUMBER, Kind.PARAMETER})


def tokenize(sql: str) -> list[Token]:
    """Return all tokens but comments, END last. Raises `SqlError` beyond the bounds and for text that is not SQL."""
    if len(sql) > TEXT_BYTES_MAX or _utf8_size(sql) > TEXT_BYTES_MAX:
        raise SqlError(
            f"the text is longer than {TEXT_BYTES_MAX >> 20} MiB", hint="send rows as parameters, in several statements"
        )
    tokens: list[Token] = []
    at, length = 0, len(sql)
    match_at, append, symbol, word = _TOKEN.match, tokens.append, Kind.SYMBOL, Kind.WORD
    while at < length:
        if len(tokens) > TOKENS_MAX:
            raise SqlError.at(sql, at, f"more than {TOKENS_MAX:,} tokens", hint="send rows as parameters")
        match = match_at(sql, at)
        if match is None:
            what = {"'": "unterminated string", '"': "unterminated name"}.get(sql[at], "not SQL")
            raise SqlError.at(sql, at, what)
        group, end = match.lastgroup, match.end()
        if group == "plain":
            append(Token(symbol, sql[at], at, end))
            at = end
            continue
        if group == "space" or group == "line":
            at = end
            continue
        if group == "word" and "$" not in match[0]:
            append(Token(word, match[0], at, end))
            at = end
            continue
        if group == "block":
            at = _comment_end(sql, at)
            continue
        token = _make_token(sql, group or "", match[0], at, end, tokens)
        append(token)
        at = token.end
    tokens.append(Token(Kind.END, "", len(sql), len(sql)))
    _check_depth(sql, tokens)
    return tokens


def outside_brackets(tokens: Sequence[Token]) -> Iterator[int]:
    """Yield the numbers of the tokens that are not in brackets and are no brackets themselves."""
    depth = 0
    for number, token in enumerate(tokens):
        is_symbol = token.kind is Kind.SYMBOL
        if is_symbol and token.value in _OPEN:
            depth += 1
        elif is_symbol and token.value in _OPEN.values():
            depth -= 1
        elif not depth:
            yield number


def _utf8_size(sql: str) -> int:
    try:
        return len(sql) if sql.isascii() else len(sql.encode())
    except UnicodeEncodeError as error:
        raise SqlError.at(sql, error.start, "a lone surrogate, which is not a Unicode character") from None


def _make_token(sql: str, group: str, text: str, at: int, end: int, before: list[Token]) -> Token:
    match group:
        case "word":
            raise SqlError.at(sql, at, "a name with '$'", hint="put it in double quotes")
        case "symbol":
            if text == "\0" or (text == "$"):
                raise SqlError.at(sql, at, f"{text!r} does not belong here")
            return Token(Kind.SYMBOL, text, at, end)
        case "number":
            if (end < len(sql) and (sql[end].isalnum() or sql[end] in "_$")) or "__" in text or text.endswith("_"):
                raise SqlError.at(sql, at, "a number that is followed by letters")
            return Token(Kind.NUMBER, text.replace("_", ""), at, end)
        case "string":
            return Token(Kind.STRING, text[1:-1].replace("''", "'"), at, end)
        case "name":
            if text == '""':
                raise SqlError.at(sql, at, "an empty name")
            return Token(Kind.NAME, text[1:-1].replace('""', '"'), at, end)
        case "hex":
            return Token(Kind.BLOB, text[2:-1], at, end)
        case "escape":
            return Token(Kind.STRING, _unescape(sql, text[2:-1], at), at, end)
        case "dollar":
            close = sql.find(text, end)
            if close < 0:
                raise SqlError.at(sql, at, f"unterminated string: {text} does not follow")
            return Token(Kind.STRING, sql[end:close], at, close + len(text))
        case "numbered" | "named":
            return Token(Kind.PARAMETER, text if text == "?" else text[1:], at, end)
        case "colon":
            name = _NAMED.match(sql, end) if text == ":" and _may_be_parameter(before, at) else None
            if name:
                return Token(Kind.PARAMETER, name[0], at, name.end())
            return Token(Kind.SYMBOL, text, at, end)
    raise SqlError.at(sql, at, f"{text!r} begins a string that is unterminated or of an unsupported kind")


def _may_be_parameter(before: list[Token], at: int) -> bool:
    """Whether a colon can begin `:name`, which it cannot in `{'a':b}`, `a[1:b]` and `a[:b]`, nor right after a word."""
    if not before:
        return False
    last = before[-1]
    if last.kind in _VALUES or last.value in (")", "]") or (last.kind is Kind.SYMBOL and last.value == "["):
        return False
    return not (last.kind is Kind.WORD and last.end == at)


def _unescape(sql: str, text: str, at: int) -> str:
    def character(match: re.Match[str]) -> str:
        if match[1] is None:
            return "'"
        if match[1].isalnum() and match[1] not in _ESCAPES:
            raise SqlError.at(sql, at, f"the escape \\{match[1]} is not supported", hint="write the character itself")
        return _ESCAPES.get(match[1], match[1])

    return _ESCAPED.sub(character, text)


def _comment_end(sql: str, at: int) -> int:
    depth = 0
    for mark in _COMMENT.finditer(sql, at):
        depth += 1 if mark[0] == "/*" else -1
        if depth == 0:
            return mark.end()
        if depth > DEPTH_MAX:
            raise SqlError.at(sql, mark.start(), f"comments nested deeper than {DEPTH_MAX}")
    raise SqlError.at(sql, at, "unterminated comment")


def _check_depth(sql: str, tokens: list[Token]) -> None:
    """Raise `SqlError` if the text is nested too deeply for parsers, which recurse, or if its brackets do not match."""
    closing: list[str] = []
    cases = prefixes = operations = subscripts = 0
    last = ""
    symbol, a_word = Kind.SYMBOL, Kind.WORD
    for token in tokens:
        kind, value, _, _ = token
        if kind is symbol and value == ",":
            prefixes = subscripts = 0
            last = value
            continue
        if kind is symbol:
            subscripts = 0 if value in ",;" else subscripts + (value == "[" and last == "]")
            if value in _OPEN:
                closing.append(_OPEN[value])
            elif value in ")]}":
                if not closing or closing.pop() != value:
                    raise SqlError.at(sql, token.start, f"{value!r} closes nothing")
            elif value == ";":
                cases = operations = 0
                if closing:
                    raise SqlError.at(sql, token.start, f"the statement ends before {closing[-1]!r}")
            prefixes = prefixes + 1 if value in _PREFIXES else 0
        elif kind is a_word:
            word = value.upper()
            cases += 1 if word == "CASE" else -1 if word == "END" and cases else 0
            prefixes = prefixes + 1 if word == "NOT" else 0
            operations += word in _SET_OPERATIONS
        else:
            prefixes = 0
        if len(closing) + cases > DEPTH_MAX:
            raise SqlError.at(sql, token.start, f"nested deeper than {DEPTH_MAX}", hint="use WITH for the inner parts")
        if prefixes > PREFIXES_MAX:
            raise SqlError.at(sql, token.start, f"more than {PREFIXES_MAX} prefix operators in a row")
        last = value
        if subscripts > PREFIXES_MAX:
            raise SqlError.at(sql, token.start, f"more than {PREFIXES_MAX} subscripts in a row")
        if operations > SET_OPERATIONS_MAX:
            raise SqlError.at(sql, token.start, f"more than {SET_OPERATIONS_MAX} set operations in one statement")
    if closing:
        raise SqlError.at(sql, len(sql), f"the statement ends before {closing[-1]!r}")
