"""Statements that change a table, as DuckDB is to run them: so that they give back the rows they changed. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import sqlglot
from sqlglot import exp

from llog.errors import SqlError
from llog.sql.lexing import Kind, Token, outside_brackets, tokens_of
from llog.sql.mirror import Params
from llog.sql.rendering import full_name, quoted, separate
from llog.sql.statements import TableStatement

_ROWS_AT_ONCE: Final = 500
_TEXT_MAX: Final = 256 << 10
"""sqlglot takes about 10 µs a token."""
_CACHED_TEXT_MAX: Final = 10_000


class Plan(NamedTuple):
    sql: str
    """Gives back the changed rows as a whole."""
    returning: str | None
    """The list that was asked for."""
    alias: str
    """What that list calls the table."""
    changed: frozenset[str]
    """Columns that SET names, in lower case."""
    template: tuple[str, str] | None
    """INSERT … VALUES: what comes before and after the rows. None if there is a parameter beside them."""
    rows: int
    """How many rows VALUES has."""
    has_parameters: bool


def planned(statement: TableStatement) -> Plan:
    """`SqlError` if the statement is too long to be read, or cannot be."""
    if statement.values is not None and not (statement.conflict or statement.returning):
        listed = f" ({', '.join(map(quoted, statement.columns))})" if statement.columns else ""
        before = f"INSERT INTO {full_name(statement.target or '')}{listed} VALUES "
        return Plan("", None, "", frozenset(), (before, "\nRETURNING *"), 0, False)
    if len(statement.sql) > _TEXT_MAX:
        raise SqlError(
            f"the statement has {len(statement.sql):,} characters; unless it is INSERT of plain values alone, "
            f"{_TEXT_MAX:,} are allowed",
            hint="give the values as parameters, many rows at a time, or as Arrow",
        )
    return _cached(statement.sql) if len(statement.sql) <= _CACHED_TEXT_MAX else _planned(statement.sql)


def _planned(sql: str) -> Plan:
    try:
        statement = sqlglot.parse_one(sql, read="duckdb")
    except (sqlglot.ParseError, sqlglot.TokenError, RecursionError) as error:
        raise SqlError(f"the statement cannot be read: {str(error).splitlines()[0]}") from error
    target = statement.this.this if isinstance(statement.this, exp.Schema) else statement.this
    conflict = statement.args.get("conflict")
    assigned = [] if conflict is None else list(conflict.expressions)
    if isinstance(statement, exp.Update):
        assigned += statement.expressions
    changed = frozenset(column.name.lower() for each in assigned for column in each.this.find_all(exp.Column))
    tokens = tokens_of(sql)
    outside = [tokens[number] for number in outside_brackets(tokens)]
    parameters = [token.start for token in tokens if token.kind is Kind.PARAMETER]
    end, listed = outside[-1].start, None
    if statement.args.get("returning") is not None:
        asked = next(token for token in reversed(outside) if token.upper == "RETURNING")
        if any(start > asked.start for start in parameters):
            raise SqlError("RETURNING has a parameter", hint="use constants there")
        end, listed = asked.start, ", ".join(separate(sql[asked.end :], f"{target.db}.{target.name}"))
    whole = f"{sql[:end]}\nRETURNING *"
    values = statement.args.get("expression")
    rows, template = 0, None
    if isinstance(statement, exp.Insert) and isinstance(values, exp.Values):
        rows = len(values.expressions)
        first, stop = _extent(outside)
        if all(first < start < stop for start in parameters):
            template = (sql[:first], whole[stop:])
    return Plan(whole, listed, target.alias_or_name, changed, template, rows, bool(parameters))


_cached: Final = lru_cache(maxsize=512)(_planned)


def _extent(outside: Sequence[Token]) -> tuple[int, int]:
    """Where the rows of VALUES begin and end: what is outside of brackets there are the commas between them."""
    words = [token.upper for token in outside]
    first = words.index("VALUES") if "VALUES" in words else len(words) - 1
    after = next(token for token in outside[first + 1 :] or outside[-1:] if token.upper != ",")
    return outside[first].end, after.start


def spread(plan: Plan, values: Sequence[tuple[Any, ...]] | None, params: Params) -> Iterator[tuple[str, Params]]:
    """What to run with which parameters: the statement as it is, or, for many rows that it was bound to, one for every few of them."""
    if values is None or (len(values) == plan.rows and (params is not None or not plan.has_parameters)):
        yield plan.sql, params
        return
    if plan.template is None:
        raise SqlError("the statement has parameters beside its rows", hint="run it once for each row")
    before, after = plan.template
    for start in range(0, len(values), _ROWS_AT_ONCE):
        chunk = values[start : start + _ROWS_AT_ONCE]
        places = ", ".join(f"({', '.join('?' * len(row))})" for row in chunk)
        yield f"{before}{places}{after}", [value for row in chunk for value in row]
