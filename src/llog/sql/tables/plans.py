"""Statements that change a table, as DuckDB is to run them: so that they give back the rows they changed. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import sqlglot
from sqlglot import exp

from llog.errors import SqlError
from llog.sql.parse.lexer import Kind, Token, outside_brackets, tokens_of
from llog.sql.parse.renderer import full_name, quoted, separate
from llog.sql.parse.statements import TableStatement
from llog.sql.workers.engine import Params

_ROWS_AT_ONCE: Final = 500
_TEXT_MAX: Final = 256 << 10
"""sqlglot takes about 10 µs a token."""
_CACHED_TEXT_MAX: Final = 10_000
STAGED: Final = "temp.llog_staged"
"""A table with the columns and defaults of an INSERT's target, and without its rules."""


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
    parameters: frozenset[str]
    """Numbers and names."""
    staging: Staging | None = None
    """For an INSERT with ON CONFLICT, OR REPLACE or OR IGNORE."""


class Staging(NamedTuple):
    """INSERT … ON CONFLICT as two statements. In one, DuckDB applies the first of several rows with the same key and
    drops the others.
    """

    fill: Plan
    """Puts the rows into `STAGED`."""
    apply: tuple[str, str]
    """Inserts rows from there: what comes before and after the range of their row ids."""
    parameters: frozenset[str]
    """Those of `apply`."""
    updates: bool
    """Rows may be changed. If not, the first row of a primary key wins, as it does in DuckDB."""


def is_simple(statement: TableStatement) -> bool:
    """Whether the statement is INSERT of plain values alone, for which nothing has to be parsed."""
    return statement.values is not None and not (statement.conflict or statement.returning)


def plan_of(statement: TableStatement) -> Plan:
    """`SqlError` if the statement is too long to be read, or cannot be."""
    if is_simple(statement):
        listed = f" ({', '.join(map(quoted, statement.columns))})" if statement.columns else ""
        before = f"INSERT INTO {full_name(statement.target or '')}{listed} VALUES "
        return Plan("", None, "", frozenset(), (before, "\nRETURNING *"), 0, frozenset())
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
    parameters = [token for token in tokens if token.kind is Kind.PARAMETER]
    end, listed = outside[-1].start, None
    if statement.args.get("returning") is not None:
        asked = next(token for token in reversed(outside) if token.upper == "RETURNING")
        if any(token.start > asked.start for token in parameters):
            raise SqlError("RETURNING has a parameter", hint="use constants there")
        end, listed = asked.start, ", ".join(separate(sql[asked.end :], f"{target.db}.{target.name}"))
    whole = f"{sql[:end]}\nRETURNING *"
    values = statement.args.get("expression")
    rows, template = 0, None
    if isinstance(statement, exp.Insert) and isinstance(values, exp.Values):
        rows = len(values.expressions)
        first, stop = _extent(outside)
        if all(first < token.start < stop for token in parameters):
            template = (sql[:first], whole[stop:])
    plan = Plan(whole, listed, target.alias_or_name, changed, template, rows, _places(parameters))
    if conflict is None and not statement.args.get("alternative"):
        return plan
    return plan._replace(staging=_plan_staging(statement, plan, sql[:end], tokens))


def _plan_staging(statement: exp.Expr, plan: Plan, sql: str, tokens: Sequence[Token]) -> Staging:
    """`sql` ends before RETURNING."""
    alternative = str(statement.args.get("alternative") or "").upper()
    if alternative == "REPLACE" and statement.args.get("by_name"):
        raise SqlError("INSERT OR REPLACE cannot be BY NAME", hint="list the columns, or use ON CONFLICT … DO UPDATE")
    words = {number: tokens[number].upper for number in outside_brackets(tokens)}
    insert = next(number for number, word in words.items() if word == "INSERT")
    source = next(number for number, word in words.items() if number > insert and word == "INTO") + 2
    while words.get(source) in (".", "AS"):
        source += 2
    conflict = [number for number, word in words.items() if (word, words.get(number + 1)) == ("ON", "CONFLICT")]
    begin, first = tokens[insert].start, tokens[source].start
    stop = len(sql) if alternative else tokens[conflict[-1]].start
    columns = ", ".join(quoted(each.name) for each in statement.this.expressions)
    fill = f"{sql[:begin]}INSERT INTO {STAGED} "
    template = None if plan.template is None else (fill + plan.template[0][first:], "")
    parameters = [token for token in tokens if token.kind is Kind.PARAMETER]
    of_rows = _places(token for token in parameters if token.start < stop)
    return Staging(
        fill=Plan(fill + sql[first:stop], None, "", frozenset(), template, plan.rows, of_rows),
        apply=(
            f"{sql[begin:first]}{f'({columns}) ' if columns else ''}SELECT {columns or '*'} FROM {STAGED} WHERE "
            "rowid BETWEEN ",
            f"\n{sql[stop:]}\nRETURNING *",
        ),
        parameters=_places(token for token in parameters if token.start > stop),
        updates=bool(plan.changed) or alternative == "REPLACE",
    )


def _places(parameters: Iterable[Token]) -> frozenset[str]:
    return frozenset(token.value for token in parameters)


_cached: Final = lru_cache(maxsize=512)(_planned)


def _extent(outside: Sequence[Token]) -> tuple[int, int]:
    """Where the rows of VALUES begin and end: what is outside of brackets there are the commas between them."""
    words = [token.upper for token in outside]
    first = words.index("VALUES") if "VALUES" in words else len(words) - 1
    after = next(token for token in outside[first + 1 :] or outside[-1:] if token.upper != ",")
    return outside[first].end, after.start


def spread(plan: Plan, values: Sequence[tuple[Any, ...]] | None, params: Params) -> Iterator[tuple[str, Params]]:
    """What to run with which parameters: the statement as it is, or, for many rows that it was bound to, one for every
    few of them.
    """
    if values is None or (len(values) == plan.rows and (params is not None or not plan.parameters)):
        yield plan.sql, params
        return
    assert plan.template is not None  # the grammar gives rows only if no parameter stands beside them
    before, after = plan.template
    for start in range(0, len(values), _ROWS_AT_ONCE):
        chunk = values[start : start + _ROWS_AT_ONCE]
        places = ", ".join(f"({', '.join('?' * len(row))})" for row in chunk)
        yield f"{before}{places}{after}", [value for row in chunk for value in row]


def share(params: Params, places: frozenset[str]) -> Params:
    """Returns the parameters that a part of the statement has, by number or name."""
    if not places or params is None:
        return None
    return {each: params[each] if isinstance(params, Mapping) else params[int(each) - 1] for each in places}


def runs(rows: Sequence[int], before: Sequence[int | None]) -> Iterator[tuple[int, int]]:
    """Yields the first and last row id of rows that can be inserted at once, because no key repeats among them; at
    least one range.

    `rows` are row ids in ascending order; `before` has, for each, the one of the row before it with the same key.
    """
    first, last = (rows[0], rows[0]) if rows else (0, -1)
    for row, earlier in zip(rows, before, strict=True):
        if earlier is not None and earlier >= first:
            yield first, last
            first = row
        last = row
    yield first, last
