"""From the tokens of a statement to text for DuckDB: no comments, parameters as `$1` or `$name`, tables for `TOPIC
x`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from llog.sql.parse.lexer import Kind, outside_brackets, tokens_of
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
"""What sqlglot sees of every string: it only has to know where tables are."""
_PARAMETER: Final = "? "
"""And of every parameter: `?::` would be an operator."""


class Rendered(NamedTuple):
    text: str
    starts: dict[int, int]
    """Where a token begins in `text` → its number."""


def place_text(parameter: Parameter) -> str:
    return f"${parameter.place + 1}" if isinstance(parameter.place, int) else f"${parameter.place}"


def render(
    stream: TokenStream,
    replacements: Mapping[int, str],
    first: int = 0,
    stop: int | None = None,
    *,
    for_sqlglot: bool = False,
) -> Rendered:
    """The text of the tokens from `first` up to `stop`, with `replacements` in place of the tokens of those numbers."""
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
                text = _PARAMETER if for_sqlglot else place_text(stream.parameters[token.start])
                if not sql[token.end : token.end + 1].isspace():
                    text += " "  # sqlglot takes `$1,$` for the beginning of a string
            elif for_sqlglot and token.kind in (Kind.STRING, Kind.BLOB):
                text = _STRING
            else:
                text = sql[token.start : token.end]
        starts[length] = number
        parts.append(text)
        length += len(text)
    return Rendered("".join(parts), starts)


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def full_name(table: str) -> str:
    """`schema.name`, each in quotes."""
    return ".".join(map(quoted, table.split(".")))


def with_schema(table: str) -> str:
    """A table's full name, `schema.name`: without a schema, it is in `main`."""
    return table if "." in table else f"main.{table}"


def separate(text: str, table: str) -> Iterator[str]:
    """Each of several expressions, without the schema where it stands before the table's name."""
    tokens = tokens_of(text)
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


class Names:
    """Names that the statement does not use itself."""

    def __init__(self, stream: TokenStream) -> None:
        self._used = {token.value.lower() for token in stream.tokens if token.kind in (Kind.WORD, Kind.NAME)}

    def unused(self, wanted: str) -> str:
        name = wanted
        while name in self._used:
            name += "_"
        self._used.add(name)
        return name


def offset_replacements(stream: TokenStream, first: int) -> dict[int, str]:
    """OFFSET in quotes where no clause can begin: it is a column of every topic, and DuckDB takes the bare word for a
    keyword.
    """
    tokens = stream.tokens
    return {
        number: quoted("offset")
        for number in range(first + 1, len(tokens))
        if tokens[number].upper == "OFFSET" and tokens[number - 1].upper in BEFORE_COLUMN
    }


def topic_replacements(stream: TokenStream, names: Names, first: int) -> tuple[dict[int, str], dict[str, str]]:
    """(replacements, name of the table → topic) for every `TOPIC x` after FROM, JOIN or a comma of a FROM clause.

    TOPIC is a keyword there only if a name follows: `FROM topic` and `FROM topic AS t` are a table. A topic without an
    alias gets the last part of its name as one.
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
            aliased = stream.token.upper == "AS" or stream.is_name()
            name = names.unused(f"topic_{len(topics) + 1}")
            topics[name] = topic
            replacements[number] = name if aliased else f"{name} AS {quoted(topic.rpartition('.')[2])}"
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
