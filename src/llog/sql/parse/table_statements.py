"""Parses statements on tables: their kind, what they read and write, and their text for DuckDB.

sqlglot finds the tables. The text stays as it was written, except for the names of tables and topics, so that DuckDB
runs what the caller wrote. DuckDB's own parser has the last word: it must find exactly one statement, of the same kind
and with the same parameters.
"""

from __future__ import annotations

import logging
import threading
from typing import Any, Final, NamedTuple

import duckdb
import sqlglot
from sqlglot import exp
from sqlglot.errors import SqlglotError

from llog.errors import SqlError
from llog.sql.parse.create_table import check_create
from llog.sql.parse.error_positions import from_duckdb, from_sqlglot, named_column, token_at_caret
from llog.sql.parse.lexer import Kind
from llog.sql.parse.literals import parse_plain_insert
from llog.sql.parse.renderer import (
    RenderedText,
    UnusedNames,
    full_name,
    offset_replacements,
    render,
    topic_replacements,
)
from llog.sql.parse.statements import TableStatement
from llog.sql.parse.token_stream import TokenStream, table_name

SQLGLOT_TOKENS_MAX: Final = 250_000
"""Bounds what sqlglot has to parse, at about 10 µs a token. Plain values do not go through sqlglot."""
EXPRESSION_MAX: Final = 10_000
"""Characters of an expression of a route."""
SYSTEM_TABLES: Final = ("topics", "topic_offsets", "routes", "partitions")
TABLE_FUNCTIONS: Final = frozenset(
    {"range", "generate_series", "unnest", "json_each", "json_tree", "repeat", "repeat_row"}
)
_FOREIGN_SCHEMAS: Final = frozenset({"information_schema", "pg_catalog", "temp", "memory"})
_CHANGES: Final = (exp.Insert, exp.Update, exp.Delete, exp.Merge, exp.Create, exp.Drop, exp.Into, exp.Command)
_DUCKDB_KINDS: Final = {"CREATE TABLE": "CREATE", "DROP TABLE": "DROP"}

logging.getLogger("sqlglot").addHandler(logging.NullHandler())
_parsing = threading.Lock()
_duckdb: Any = None


class Analysis(NamedTuple):
    """What a statement reads and writes, and the replacements that turn its tokens into DuckDB's text."""

    tree: exp.Expr
    rendered: RenderedText
    replacements: dict[int, str]
    tables: tuple[str, ...]
    target: str | None
    topics: dict[str, str]
    system: dict[str, str]


def table_statement(stream: TokenStream) -> TableStatement:
    """Parse a statement on tables. Raises `SqlError` if it is not supported."""
    places = _places(stream)
    plain = parse_plain_insert(stream)
    if plain is not None and any(start > stream.token.start for start in stream.parameters):
        plain = None  # rows of several runs cannot be joined: each run has its own values outside of the rows
    if plain is not None and plain.is_whole_statement:
        at = plain.table_at
        replacements = {} if stream.tokens[at + 1].upper == "." else {at: _in_main(stream, at)}
        return TableStatement(
            kind="INSERT",
            sql=render(stream, replacements).text,
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
    """Parse the query that begins at this token. With `rows`, the query is known to be VALUES with these plain rows."""
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
    """Raise `SqlError` unless the text is one expression, or `several` with commas, over the columns of a row."""
    if len(text) > EXPRESSION_MAX:
        raise SqlError(
            f"{clause} has {len(text):,} characters; {EXPRESSION_MAX:,} are allowed, since it runs for every row",
            hint="store its value in a column, and route by that column",
        )
    wrapped = f"SELECT coalesce({text})" if several else f"SELECT ({text})"
    try:
        tree = sqlglot.parse_one(wrapped, dialect="duckdb")
        _check_with_duckdb(wrapped, "SELECT", ())
    except (SqlglotError, RecursionError, SqlError) as error:
        raise SqlError(f"{clause}: {text[:200]!r} is not an expression: {_first_line(error)}") from None
    expressions = tree.expressions
    is_one = len(expressions) == 1 and isinstance(expressions[0], exp.Coalesce if several else exp.Paren)
    if (
        not is_one
        or tree.args.get("from_")
        or any(True for _ in tree.find_all(exp.Subquery, exp.Table, exp.Star, exp.Window))
    ):
        raise SqlError(
            f"{clause}: {text[:200]!r} must be an expression over the columns of one row, without subqueries"
        )
    if any(isinstance(node, exp.Select) and node is not tree for node in tree.find_all(exp.Select)):
        raise SqlError(f"{clause}: {text[:200]!r} cannot contain subqueries")


def analyze(stream: TokenStream, first: int) -> Analysis:
    """Parse the tokens from `first` on, and find what the statement reads and writes."""
    if len(stream.tokens) - first > SQLGLOT_TOKENS_MAX:
        raise stream.error(
            f"more than {SQLGLOT_TOKENS_MAX:,} tokens that are not plain values",
            "send rows as parameters",
            stream.tokens[first],
        )
    names = UnusedNames(stream)
    replacements, topics = topic_replacements(stream, names, first)
    replacements = offset_replacements(stream, first) | replacements
    rendered = render(stream, replacements, first, for_sqlglot=True)
    tree = _parse_tree(stream, rendered)
    target_node = _target(tree)
    for node in tree.find_all(*_CHANGES):
        if node is not tree:
            raise stream.error(
                "a change within another statement is not supported",
                "run it as a statement of its own",
                stream.tokens[first],
            )
    if isinstance(tree, exp.Create):
        check_create(stream, tree)
    tables: dict[str, None] = {}
    system: dict[str, str] = {}
    target: str | None = None
    for node in tree.find_all(exp.Table):
        number = rendered.starts.get(node.this.meta.get("start", -1)) if node.this else None
        if number is None:
            raise stream.error("a table that is not named is not supported", token=stream.tokens[first])
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
            stand_in = names.choose(f"system_{name}")
            system[stand_in] = name
            replacements[number - 2], replacements[number - 1] = stand_in, ""
            replacements[number] = "" if node.alias else f" AS {name}"
            continue
        if schema in _FOREIGN_SCHEMAS:
            raise stream.error(
                f"the schema {schema!r} cannot be used", "SHOW TABLES and DESCRIBE list tables and columns", token
            )
        full = table_name(stream, [schema, name] if schema else [name], token)
        tables[full] = None
        if not schema:
            replacements[number] = _in_main(stream, number)
        if node is target_node:
            target = full
    return Analysis(tree, rendered, replacements, tuple(tables), target, topics, system)


def _parse_tree(stream: TokenStream, rendered: RenderedText) -> exp.Expr:
    try:
        trees = [tree for tree in sqlglot.parse(rendered.text, dialect="duckdb") if tree is not None]
    except RecursionError:
        raise SqlError("nested too deeply", hint="use WITH for the inner parts") from None
    except SqlglotError as error:
        raise from_sqlglot(error, stream, rendered) from None
    if len(trees) != 1:
        raise stream.error("expected one statement")
    return trees[0]


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
    """Whether a WITH around the table names it: in an earlier part, or in its own part if that is recursive."""
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
        raise stream.error(f"{token.value[:80]} cannot be used in FROM; the table functions are {known}", token=token)


def _check_with_duckdb(
    sql: str,
    kind: str,
    places: tuple[int | str, ...],
    stream: TokenStream | None = None,
    rendered: RenderedText | None = None,
) -> None:
    global _duckdb
    with _parsing:
        if _duckdb is None:
            _duckdb = duckdb.connect(":memory:")
        try:
            statements = _duckdb.extract_statements(sql)
        except duckdb.Error as error:
            raise from_duckdb(str(error), stream, rendered) from None
    names = {str(place + 1) if isinstance(place, int) else place.lower() for place in places}
    if len(statements) != 1 or statements[0].type.name != _DUCKDB_KINDS.get(kind, kind):
        raise SqlError("the statement is ambiguous", hint="put names in double quotes")
    if {name.lower() for name in statements[0].named_parameters} != names:
        raise SqlError("the parameters are ambiguous", hint="write them as $1, $2 or $name")


def duckdb_error_start(stream: TokenStream, first: int, message: str) -> int | None:
    """Return where in the text, as written, DuckDB's error about the statement from token `first` on points.

    None if it points at text that llog added, or nowhere.
    """
    column = named_column(message)
    if column is not None:
        return next((token.start for token in stream.tokens if token.value.lower() == column), None)
    try:
        found = analyze(stream, first)
    except SqlError:
        return None
    token = token_at_caret(message, stream, render(stream, found.replacements, first))
    return None if token is None else token.start


def _places(stream: TokenStream) -> tuple[int | str, ...]:
    return tuple(dict.fromkeys(parameter.place for parameter in stream.parameters.values()))


def _in_main(stream: TokenStream, number: int) -> str:
    token = stream.tokens[number]
    return "main." + stream.sql[token.start : token.end]


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:300] or "nested too deeply"
