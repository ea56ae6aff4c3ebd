"""Renders the tokens of a statement as text for DuckDB: without comments, with parameters as `$1` or `$name`, and with
tables in place of `TOPIC x`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from llog.sql.parse.lexer import Kind, outside_brackets, tokenize
from llog.sql.parse.statements import Parameter
from llog.sql.parse.token_stream import TokenStream

_ENDS_FROM: Final = frozenset(
    {
        "WHERE",
        "GROUP",
        "ORDER",
        "HAVING",
        "LIMIT",
        "OFFSET",
        "WINDOW",
        "QUALIFY",
        "SELECT",
        "UNION",
        "INTERSECT",
        "EXCEPT",
        "RETURNING",
        "SET",
        "VALUES",
    }
)
BEFORE_COLUMN: Final = frozenset(
    {
        *",(.=<>+-/%|[",
        *("SELECT", "DISTINCT", "BY", "WHERE", "HAVING", "QUALIFY", "ON", "AND", "OR", "NOT", "BETWEEN", "IN", "LIKE"),
        *("CASE", "WHEN", "THEN", "ELSE", "AS", "SET"),
    }
)
_STRING: Final = "'1'"
"""Stands for every string in the text for sqlglot, which only has to find the tables."""
_PARAMETER: Final = "? "
"""Stands for every parameter in the text for sqlglot, which takes `?::` for an operator."""


class RenderedText(NamedTuple):
    text: str
    starts: dict[int, int]
    """Position of a token in `text` → the token's number."""


def placeholder(parameter: Parameter) -> str:
    """Return the parameter as DuckDB writes it: `$1` or `$name`."""
    return f"${parameter.place + 1}" if isinstance(parameter.place, int) else f"${parameter.place}"


def render(
    stream: TokenStream,
    replacements: Mapping[int, str],
    first: int = 0,
    stop: int | None = None,
    *,
    for_sqlglot: bool = False,
) -> RenderedText:
    """Return the text of the tokens from `first` up to `stop`, with `replacements` for the tokens of those numbers."""
    parts: list[str] = []
    starts: dict[int, int] = {}
    length, sql = 0, stream.sql
    last_end = stream.tokens[first].start
    for number in range(first, len(stream.tokens) - 1 if stop is None else stop):
        token = stream.tokens[number]
        if token.start > last_end and parts:
            gap = "\n" if "\n" in sql[last_end : token.start] else " "
            parts.append(gap)
            length += 1
        last_end = token.end
        text = replacements.get(number)
        if text is None:
            if token.kind is Kind.PARAMETER:
                text = _PARAMETER if for_sqlglot else placeholder(stream.parameters[token.start])
                if not sql[token.end : token.end + 1].isspace():
                    text += " "  # sqlglot takes `$1,$` for the beginning of a string
            elif for_sqlglot and token.kind in (Kind.STRING, Kind.BLOB):
                text = _STRING
            else:
                text = sql[token.start : token.end]
        starts[length] = number
        parts.append(text)
        length += len(text)
    return RenderedText("".join(parts), starts)


def quote(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def full_name(table: str) -> str:
    """Return `schema.name` with each part in quotes."""
    return ".".join(map(quote, table.split(".")))


def with_schema(table: str) -> str:
    """Return the table's name with its schema, which is `main` if it names none."""
    return table if "." in table else f"main.{table}"


def split_expressions(text: str, table: str) -> Iterator[str]:
    """Yield each of several expressions, without the schema where it precedes the table's name."""
    tokens = tokenize(text)
    names = [token.value.lower() if token.kind in (Kind.WORD, Kind.NAME) else token.upper for token in tokens]
    schema, _, name = table.lower().rpartition(".")
    before = [schema, ".", name, "."]
    outside = set(outside_brackets(tokens))
    begin, written = 0, ""
    for number, token in enumerate(tokens):
        if token.kind is Kind.END or (number in outside and token.upper == ","):
            yield (written + text[begin : tokens[number - 1].end]).strip()
            begin, written = token.end, ""
        elif names[number : number + 4] == before and names[number - 1 : number] != ["."]:
            written += text[begin : token.start]
            begin = tokens[number + 1].end


class UnusedNames:
    """Chooses names that the statement does not use itself."""

    def __init__(self, stream: TokenStream) -> None:
        self._used = {token.value.lower() for token in stream.tokens if token.kind in (Kind.WORD, Kind.NAME)}

    def choose(self, wanted: str) -> str:
        """Return the wanted name, with underscores after it if it is in use."""
        name = wanted
        while name in self._used:
            name += "_"
        self._used.add(name)
        return name


def offset_replacements(stream: TokenStream, first: int) -> dict[int, str]:
    """Return replacements that quote OFFSET where it can only be a column.

    Every topic has a column of that name, and DuckDB takes the bare word for a keyword.
    """
    tokens = stream.tokens
    return {
        number: quote("offset")
        for number in range(first + 1, len(tokens))
        if tokens[number].upper == "OFFSET" and tokens[number - 1].upper in BEFORE_COLUMN
    }


def topic_replacements(stream: TokenStream, names: UnusedNames, first: int) -> tuple[dict[int, str], dict[str, str]]:
    """Return replacements for every `TOPIC x` after FROM, JOIN or a comma of a FROM clause, and topics by table name.

    TOPIC is a keyword there only if a name follows: `FROM topic` and `FROM topic AS t` read a table. A topic without an
    alias gets the last part of its name as its alias.
    """
    replacements: dict[int, str] = {}
    topics: dict[str, str] = {}
    in_from = [False]
    expects_table = False
    deletes = stream.tokens[first].upper == "DELETE"
    stream.at = first
    while stream.token.kind is not Kind.END:
        number, word = stream.at, stream.token.upper
        if expects_table and word == "TOPIC" and stream.is_name(1):
            if deletes and len(in_from) == 1 and number == first + 2:
                raise stream.error("records of a topic cannot be deleted one by one", "CLEAR TOPIC removes all of them")
            stream.take()
            topic = stream.topic()
            has_alias = stream.token.upper == "AS" or stream.is_name()
            name = names.choose(f"topic_{len(topics) + 1}")
            topics[name] = topic
            replacements[number] = name if has_alias else f"{name} AS {quote(topic.rpartition('.')[2])}"
            replacements.update(dict.fromkeys(range(number + 1, stream.at), ""))
            expects_table = False
            continue
        stream.take()
        if word == "FROM" or word == "JOIN" or (word == "USING" and deletes):
            before = stream.tokens[number - 1].upper if number > first else ""
            expects_table = (
                word != "FROM" or before != "DISTINCT" or stream.tokens[number - 2].upper not in ("IS", "NOT")
            )
            in_from[-1] = in_from[-1] or expects_table
        elif word == ",":
            expects_table = in_from[-1]
        elif word in ("(", "[", "{"):
            in_from.append(expects_table)
        elif word in (")", "]", "}"):
            in_from.pop()
            expects_table = False
        else:
            expects_table = False
            if word in _ENDS_FROM:
                in_from[-1] = False
    return replacements, topics
