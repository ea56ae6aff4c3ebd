"""Statements on tables: which kind they are, what they read and write, and their text for DuckDB.

sqlglot finds the tables; the text stays the one that was written, with names put in place of tokens, so that DuckDB
runs what the caller wrote. DuckDB's own parser has the last word: exactly one statement, of the kind and with the
parameters that were found here.
"""

from __future__ import annotations

import logging
import re
import threading
from typing import Any, Final, NamedTuple

import duckdb
import sqlglot
from sqlglot import exp
from sqlglot.errors import SqlglotError

from llog.errors import SqlError
from llog.sql.parse.clauses import did_you_mean
from llog.sql.parse.create_table import check_create
from llog.sql.parse.lexer import Kind, Token
from llog.sql.parse.literals import plain_insert
from llog.sql.parse.renderer import (
    BEFORE_COLUMN,
    Names,
    Rendered,
    full_name,
    offset_replacements,
    render,
    topic_replacements,
)
from llog.sql.parse.statements import TableStatement
from llog.sql.parse.token_stream import RESERVED, TokenStream, table_name

SQLGLOT_TOKENS_MAX: Final = 250_000
"""What is not plain values goes through sqlglot: about 10 µs a token."""
EXPRESSION_MAX: Final = 10_000
"""Characters of an expression that a route keeps."""
SYSTEM_TABLES: Final = ("topics", "topic_offsets", "routes", "partitions")
TABLE_FUNCTIONS: Final = frozenset(
    {"range", "generate_series", "unnest", "json_each", "json_tree", "repeat", "repeat_row"}
)
_FOREIGN_SCHEMAS: Final = frozenset({"information_schema", "pg_catalog", "temp", "memory"})
_CHANGES: Final = (exp.Insert, exp.Update, exp.Delete, exp.Merge, exp.Create, exp.Drop, exp.Into, exp.Command)
_SHOWN: Final = re.compile(r"^(LINE (\d+): )(.*)\n( *)\^", re.MULTILINE)
_COLUMN: Final = re.compile(
    r'(?:update column|a column with name|Duplicate column name) "?([^"\n]+?)"?(?: not found| in |\n|$)'
)
"""Columns that INSERT and UPDATE name: DuckDB does not say where."""
_DUCKDB_KINDS: Final = {"CREATE TABLE": "CREATE", "DROP TABLE": "DROP"}

_KEYWORDS: Final = (
    *(
        "FROM",
        "WHERE",
        "GROUP",
        "ORDER",
        "BY",
        "HAVING",
        "LIMIT",
        "OFFSET",
        "JOIN",
        "USING",
        "UNION",
        "WINDOW",
        "QUALIFY",
    ),
    *("VALUES", "SET", "INTO", "RETURNING", "CONFLICT", "PRIMARY", "DEFAULT", "BETWEEN", "DISTINCT"),
)

logging.getLogger("sqlglot").addHandler(logging.NullHandler())
_parsing = threading.Lock()
_duckdb: Any = None


class Analysis(NamedTuple):
    """What a statement reads and writes, and the replacements that make DuckDB's text of its tokens."""

    tree: exp.Expr
    rendered: Rendered
    replacements: dict[int, str]
    tables: tuple[str, ...]
    target: str | None
    topics: dict[str, str]
    system: dict[str, str]


def table_statement(stream: TokenStream) -> TableStatement:
    """The statement whose tokens these are; `SqlError` if it is none of those that tables know."""
    places = _places(stream)
    plain = plain_insert(stream)
    if plain is not None and any(start > stream.token.start for start in stream.parameters):
        plain = None  # rows of several runs cannot be joined: each has its own values beside them
    if plain is not None and plain.ends:
        at = plain.table_at
        qualify = {} if stream.tokens[at + 1].upper == "." else {at: _main(stream, at)}
        return TableStatement(
            kind="INSERT",
            sql=render(stream, qualify).text,
            target=plain.table,
            tables=(plain.table,),
            columns=plain.columns,
            values=plain.values,
            parameters=places,
        )
    found = analyze(stream, 0)
    kind, if_exists = _kind(stream, found.tree)
    if kind in ("CREATE TABLE", "DROP TABLE") and places:
        raise SqlError(f"{kind} cannot have parameters", hint="write the values")
    tree = found.tree
    if isinstance(tree, exp.TruncateTable):
        sql = "DELETE FROM " + full_name(found.target or "")
    else:
        rendered = render(stream, found.replacements)
        sql = rendered.text
        _check_with_duckdb(sql, kind, places, stream, rendered)
    schema = tree.this if isinstance(tree, exp.Insert) else None
    columns = tuple(c.name.lower() for c in schema.expressions) if isinstance(schema, exp.Schema) else ()
    return TableStatement(
        kind=kind,
        sql=sql,
        target=found.target,
        tables=found.tables,
        topics=found.topics,
        system=found.system,
        columns=columns,
        values=plain.values if plain else None,
        if_exists=if_exists,
        conflict=isinstance(tree, exp.Insert)
        and any(tree.args.get(name) for name in ("conflict", "alternative", "ignore")),
        returning=bool(tree.args.get("returning")),
        parameters=places,
    )


def query_statement(stream: TokenStream, first: int, rows: tuple[tuple[Any, ...], ...] | None) -> TableStatement:
    """The query that begins at this token; with `rows`, it is VALUES and they are known to be plain."""
    if rows is not None:
        sql = render(stream, {}, first).text
        return TableStatement(kind="SELECT", sql=sql, values=rows, parameters=_places(stream))
    found = analyze(stream, first)
    if not _is_query(found.tree):
        raise stream.error("expected VALUES or a query", token=stream.tokens[first])
    places = _places(stream)
    rendered = render(stream, found.replacements, first)
    sql = rendered.text
    _check_with_duckdb(sql, "SELECT", places, stream, rendered)
    return TableStatement(
        kind="SELECT", sql=sql, tables=found.tables, topics=found.topics, system=found.system, parameters=places
    )


def check_expression(text: str, clause: str, several: bool) -> None:
    """Refuses what is not one expression (or several with commas) over the columns of a row."""
    if len(text) > EXPRESSION_MAX:
        raise SqlError(
            f"{clause} has {len(text):,} characters; {EXPRESSION_MAX:,} are allowed, for every row is asked",
            hint="compute it when rows are inserted, and route by that column",
        )
    wrapped = f"SELECT coalesce({text})" if several else f"SELECT ({text})"
    try:
        tree = sqlglot.parse_one(wrapped, dialect="duckdb")
        _check_with_duckdb(wrapped, "SELECT", ())
    except (SqlglotError, RecursionError, SqlError) as error:
        raise SqlError(f"{clause}: {text[:200]!r} is not an expression: {_first_line(error)}") from None
    expressions = tree.expressions
    one = len(expressions) == 1 and isinstance(expressions[0], exp.Coalesce if several else exp.Paren)
    if (
        not one
        or tree.args.get("from_")
        or any(True for _ in tree.find_all(exp.Subquery, exp.Table, exp.Star, exp.Window))
    ):
        raise SqlError(
            f"{clause}: {text[:200]!r} must be an expression over the columns of one row, without subqueries"
        )
    if any(isinstance(node, exp.Select) and node is not tree for node in tree.find_all(exp.Select)):
        raise SqlError(f"{clause}: {text[:200]!r} cannot have subqueries")


def analyze(stream: TokenStream, first: int) -> Analysis:
    """Parses the tokens from `first` on, and finds what the statement reads and writes."""
    if len(stream.tokens) - first > SQLGLOT_TOKENS_MAX:
        raise stream.error(
            f"more than {SQLGLOT_TOKENS_MAX:,} tokens that are not plain values",
            "send rows as parameters",
            stream.tokens[first],
        )
    names = Names(stream)
    replacements, topics = topic_replacements(stream, names, first)
    replacements = offset_replacements(stream, first) | replacements
    rendered = render(stream, replacements, first, for_sqlglot=True)
    tree = _parse_tree(stream, rendered)
    target_node = _target(tree)
    for node in tree.find_all(*_CHANGES):
        if node is not tree:
            raise stream.error(
                "a change inside of another statement", "run it as a statement of its own", stream.tokens[first]
            )
    if isinstance(tree, exp.Create):
        check_create(stream, tree)
    tables: dict[str, None] = {}
    system: dict[str, str] = {}
    target: str | None = None
    for node in tree.find_all(exp.Table):
        number = rendered.starts.get(node.this.meta.get("start", -1)) if node.this else None
        if number is None:
            raise stream.error("a table that cannot be told by name", token=stream.tokens[first])
        token = stream.tokens[number]
        if not isinstance(node.this, exp.Identifier):
            _check_function(stream, number, node)
            continue
        name, schema = node.name.lower(), node.db.lower()
        if token.kind is Kind.STRING or node.catalog:
            raise stream.error(
                "only tables and topics of this log can be read", "write a table's name, schema.name", token
            )
        if (name in topics and not schema) or (node is not target_node and not schema and _is_cte(node, name)):
            continue
        if schema == "system":
            if node is target_node or name not in SYSTEM_TABLES:
                known = ", ".join(f"system.{known}" for known in SYSTEM_TABLES)
                raise stream.error(
                    f"system.{name} cannot be {'changed' if node is target_node else 'read'}; there are {known}",
                    token=token,
                )
            stands = names.unused(f"system_{name}")
            system[stands] = name
            replacements[number - 2], replacements[number - 1] = stands, ""
            replacements[number] = "" if node.alias else f" AS {name}"
            continue
        if schema in _FOREIGN_SCHEMAS:
            raise stream.error(
                f"the schema {schema!r} is not for tables", "SHOW TABLES and DESCRIBE say what there is", token
            )
        full = table_name(stream, [schema, name] if schema else [name], token)
        tables[full] = None
        if not schema:
            replacements[number] = _main(stream, number)
        if node is target_node:
            target = full
    return Analysis(tree, rendered, replacements, tuple(tables), target, topics, system)


def _parse_tree(stream: TokenStream, rendered: Rendered) -> exp.Expr:
    try:
        trees = [tree for tree in sqlglot.parse(rendered.text, dialect="duckdb") if tree is not None]
    except RecursionError:
        raise SqlError("nested too deeply", hint="use WITH for the inner parts") from None
    except SqlglotError as error:
        raise _at_token(stream, rendered, error) from None
    if len(trees) != 1:
        raise stream.error("expected one statement")
    return trees[0]


def _at_token(stream: TokenStream, rendered: Rendered, error: SqlglotError) -> SqlError:
    details: list[dict[str, Any]] = getattr(error, "errors", [])
    message = str(details[0].get("description") or "not understood") if details else "not understood"
    if message.startswith("Required keyword"):  # it names its own classes
        message = "an expression is missing before this"
    message = message.partition(" but got <Token")[0]
    lines = rendered.text.split("\n")
    line, column = (details[0].get("line") or 1, details[0].get("col") or 0) if details else (1, 0)
    token = _token_at(stream, rendered, lines, line - 1, column - 1)
    return stream.error(message.rstrip("."), _hint_at(stream, token), token)


def _kind(stream: TokenStream, tree: exp.Expr) -> tuple[str, bool]:
    if isinstance(tree, exp.Create):
        return "CREATE TABLE", bool(tree.args.get("exists"))
    if isinstance(tree, exp.Drop) and str(tree.args.get("kind")).upper() == "TABLE":
        return "DROP TABLE", bool(tree.args.get("exists"))
    for node, kind in (
        (exp.Insert, "INSERT"),
        (exp.Update, "UPDATE"),
        (exp.Delete, "DELETE"),
        (exp.TruncateTable, "DELETE"),
    ):
        if isinstance(tree, node):
            return kind, False
    if _is_query(tree):
        return "SELECT", False
    raise stream.error("this statement is not supported", token=stream.tokens[0])


def _is_query(tree: exp.Expr) -> bool:
    return isinstance(tree, exp.Query | exp.Values)


def _target(tree: exp.Expr) -> exp.Table | None:
    node: Any = None
    if isinstance(tree, exp.Insert | exp.Update | exp.Delete | exp.Create):
        node = tree.this
    elif isinstance(tree, exp.Drop):
        tables = tree.args.get("tables") or [tree.this]
        node = tables[0] if len(tables) == 1 else None
    elif isinstance(tree, exp.TruncateTable):
        node = tree.expressions[0] if len(tree.expressions) == 1 else None
    elif _is_query(tree):
        return None
    node = node.this if isinstance(node, exp.Schema) else node
    if not isinstance(node, exp.Table) or not isinstance(node.this, exp.Identifier):
        raise SqlError("the statement must name exactly one table that it changes")
    return node


def _is_cte(table: exp.Expr, name: str) -> bool:
    """Whether a WITH around the table names it: one before its own part, or its own if that is recursive."""
    node: exp.Expr | None = table
    inside: exp.Expr | None = None
    while node is not None:
        if isinstance(node, exp.CTE):
            inside = node
        named = node.args.get("with_")
        if isinstance(named, exp.With):
            for part in named.expressions:
                if part is inside and not named.args.get("recursive"):
                    break
                if part.alias.lower() == name:
                    return True
                if part is inside:
                    break
        node = node.parent
    return False


def _check_function(stream: TokenStream, number: int, node: exp.Table) -> None:
    token = stream.tokens[number]
    if token.value.lower() not in TABLE_FUNCTIONS or node.db:
        known = ", ".join(sorted(TABLE_FUNCTIONS))
        raise stream.error(f"{token.value[:80]} cannot stand in FROM; functions that can are {known}", token=token)


def _check_with_duckdb(
    sql: str,
    kind: str,
    places: tuple[int | str, ...],
    stream: TokenStream | None = None,
    rendered: Rendered | None = None,
) -> None:
    global _duckdb
    with _parsing:
        if _duckdb is None:
            _duckdb = duckdb.connect(":memory:")
        try:
            statements = _duckdb.extract_statements(sql)
        except duckdb.Error as error:
            raise _from_duckdb(str(error), stream, rendered) from None
    names = {str(place + 1) if isinstance(place, int) else place.lower() for place in places}
    if len(statements) != 1 or statements[0].type.name != _DUCKDB_KINDS.get(kind, kind):
        raise SqlError("the statement can be read in two ways", hint="put names in double quotes")
    if {name.lower() for name in statements[0].named_parameters} != names:
        raise SqlError("the parameters can be read in two ways", hint="write them as $1, $2 or $name")


def pointed_at(stream: TokenStream, first: int, said: str) -> int | None:
    """Where in the text that was written DuckDB's error about the statement from token `first` on points; None if it
    points elsewhere.
    """
    column = _COLUMN.search(said)
    if column is not None:
        return next((token.start for token in stream.tokens if token.value.lower() == column[1].lower()), None)
    try:
        found = analyze(stream, first)
    except SqlError:
        return None
    token = _pointed_at(said, stream, render(stream, found.replacements, first))
    return None if token is None else token.start


def _from_duckdb(said: str, stream: TokenStream | None, rendered: Rendered | None) -> SqlError:
    """DuckDB's error, at the token that it points at in the text it was given."""
    message = "DuckDB does not understand it: " + said.partition("\n")[0].removeprefix("Parser Error: ")[:300]
    token = None if stream is None or rendered is None else _pointed_at(said, stream, rendered)
    if stream is None or token is None:
        return SqlError(message)
    return stream.error(message, _hint_at(stream, token), token)


def _pointed_at(said: str, stream: TokenStream, rendered: Rendered) -> Token | None:
    """The token below which DuckDB, which shows a part of a line, has put its caret."""
    shown = _SHOWN.search(said)
    lines = rendered.text.split("\n")
    if shown is None or int(shown[2]) > len(lines):
        return None
    line = int(shown[2]) - 1
    text = shown[3].removeprefix("...")
    begin = lines[line].find(text.removesuffix("..."))
    if begin < 0:
        return None
    indent = len(shown[1]) + len(shown[3]) - len(text)
    return _token_at(stream, rendered, lines, line, begin + len(shown[4]) - indent)


def _hint_at(stream: TokenStream, token: Token) -> str:
    """A misspelt keyword is read as an alias, and what follows is the error; a keyword where a name can stand is no
    name.
    """
    number = stream.tokens.index(token)
    for near in stream.tokens[max(number - 1, 0) : number + 1]:
        hint = "" if near.upper in _KEYWORDS else did_you_mean(near.upper, _KEYWORDS)
        if hint:
            return hint
    is_name = number > 0 and token.upper in RESERVED and stream.tokens[number - 1].upper in (*BEFORE_COLUMN, "TABLE")
    return f"{token.value} is a keyword: as a name, it needs double quotes" if is_name else ""


def _token_at(stream: TokenStream, rendered: Rendered, lines: list[str], line: int, column: int) -> Token:
    position = sum(len(text) + 1 for text in lines[:line]) + max(column, 0)
    return stream.tokens[max((number for start, number in rendered.starts.items() if start <= position), default=0)]


def _places(stream: TokenStream) -> tuple[int | str, ...]:
    return tuple(dict.fromkeys(parameter.place for parameter in stream.parameters.values()))


def _main(stream: TokenStream, number: int) -> str:
    token = stream.tokens[number]
    return "main." + stream.sql[token.start : token.end]


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:300] or "nested too deeply"
