"""Plans: how DuckDB runs a statement that changes a table, so that it returns the changed rows. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import sqlglot
from sqlglot import exp

from llog.errors import SqlError
from llog.sql.parse.lexer import Kind, Token, outside_brackets, tokenize
from llog.sql.parse.renderer import full_name, quote, split_expressions
from llog.sql.parse.statements import TableStatement
from llog.sql.workers.duckdb_client import Params

_ROWS_AT_ONCE: Final = 500
_TEXT_MAX: Final = 256 << 10
"""sqlglot takes about 10 µs a token."""
_CACHED_TEXT_MAX: Final = 10_000
STAGED: Final = "temp.llog_staged"
"""A table with the columns and defaults of an INSERT's target, but without its constraints."""


class Plan(NamedTuple):
    sql: str
    """The statement, returning every column of the changed rows."""
    returning: str | None
    """The list after RETURNING, if the statement has one."""
    alias: str
    """The name of the table in that list."""
    changed: frozenset[str]
    """Columns that SET names, in lower case."""
    template: tuple[str, str] | None
    """INSERT … VALUES: the text before and after the rows. None if a parameter stands outside of the rows."""
    rows: int
    """The number of rows after VALUES."""
    parameters: frozenset[str]
    """Numbers or names of the parameters."""
    staging: Staging | None = None
    """Set for an INSERT with ON CONFLICT, OR REPLACE or OR IGNORE."""


class Staging(NamedTuple):
    """INSERT … ON CONFLICT as two statements. In one, DuckDB applies only the first of several rows with one key."""

    fill: Plan
    """Inserts the rows into `STAGED`."""
    apply: tuple[str, str]
    """Inserts rows from `STAGED`: the text before and after the range of their row ids."""
    parameters: frozenset[str]
    """The parameters of `apply`."""
    updates: bool
    """Whether existing rows may change. If not, the first row of a primary key wins, as it does in DuckDB."""


def is_simple(statement: TableStatement) -> bool:
    """Whether the statement is nothing but an INSERT of plain values, which needs no parser."""
    return statement.values is not None and not (statement.conflict or statement.returning)


def plan_of(statement: TableStatement) -> Plan:
    """Return the plan of a statement. Raises `SqlError` if the text is too long or cannot be parsed."""
    if is_simple(statement):
        listed = f" ({', '.join(map(quote, statement.columns))})" if statement.columns else ""
        before = f"INSERT INTO {full_name(statement.target or '')}{listed} VALUES "
        return Plan("", None, "", frozenset(), (before, "\nRETURNING *"), 0, frozenset())
    if len(statement.sql) > _TEXT_MAX:
        raise SqlError(
            f"the statement has {len(statement.sql):,} characters; {_TEXT_MAX:,} are allowed for anything but an "
            "INSERT of plain values",
            hint="pass the values as parameters, many rows at a time, or as Arrow",
        )
    return _plan_text_cached(statement.sql) if len(statement.sql) <= _CACHED_TEXT_MAX else _plan_text(statement.sql)


def _plan_text(sql: str) -> Plan:
    try:
        statement = sqlglot.parse_one(sql, read="duckdb")
    except (sqlglot.ParseError, sqlglot.TokenError, RecursionError) as error:
        raise SqlError(f"the statement cannot be parsed: {str(error).splitlines()[0]}") from error
    target = statement.this.this if isinstance(statement.this, exp.Schema) else statement.this
    conflict = statement.args.get("conflict")
    assigned = [] if conflict is None else list(conflict.expressions)
    if isinstance(statement, exp.Update):
        assigned += statement.expressions
    changed = frozenset(column.name.lower() for each in assigned for column in each.this.find_all(exp.Column))
    tokens = tokenize(sql)
    outside = [tokens[number] for number in outside_brackets(tokens)]
    parameters = [token for token in tokens if token.kind is Kind.PARAMETER]
    end, listed = outside[-1].start, None
    if statement.args.get("returning") is not None:
        returning = next(token for token in reversed(outside) if token.upper == "RETURNING")
        if any(token.start > returning.start for token in parameters):
            raise SqlError("RETURNING cannot contain a parameter", hint="write the value")
        end, listed = returning.start, ", ".join(split_expressions(sql[returning.end :], f"{target.db}.{target.name}"))
    returning_all = f"{sql[:end]}\nRETURNING *"
    values = statement.args.get("expression")
    rows, template = 0, None
    if isinstance(statement, exp.Insert) and isinstance(values, exp.Values):
        rows = len(values.expressions)
        first, stop = _values_span(outside)
        if all(first < token.start < stop for token in parameters):
            template = (sql[:first], returning_all[stop:])
    plan = Plan(returning_all, listed, target.alias_or_name, changed, template, rows, _places(parameters))
    if conflict is None and not statement.args.get("alternative"):
        return plan
    return plan._replace(staging=_plan_staging(statement, plan, sql[:end], tokens))


def _plan_staging(statement: exp.Expr, plan: Plan, sql: str, tokens: Sequence[Token]) -> Staging:
    """Plan an INSERT that handles conflicts; `sql` ends before RETURNING."""
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
    columns = ", ".join(quote(each.name) for each in statement.this.expressions)
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


_plan_text_cached: Final = lru_cache(maxsize=512)(_plan_text)


def _values_span(outside: Sequence[Token]) -> tuple[int, int]:
    """Return where the rows of VALUES begin and end; outside of brackets, only commas stand between them."""
    words = [token.upper for token in outside]
    first = words.index("VALUES") if "VALUES" in words else len(words) - 1
    after = next(token for token in outside[first + 1 :] or outside[-1:] if token.upper != ",")
    return outside[first].end, after.start


def batches(plan: Plan, values: Sequence[tuple[Any, ...]] | None, params: Params) -> Iterator[tuple[str, Params]]:
    """Yield the statements to run, with their parameters.

    That is the statement as it is or, if it was bound to many rows, one statement for every `_ROWS_AT_ONCE` rows.
    """
    if values is None or (len(values) == plan.rows and (params is not None or not plan.parameters)):
        yield plan.sql, params
        return
    assert plan.template is not None  # the parser sets `values` only if no parameter stands outside of the rows
    before, after = plan.template
    for start in range(0, len(values), _ROWS_AT_ONCE):
        chunk = values[start : start + _ROWS_AT_ONCE]
        places = ", ".join(f"({', '.join('?' * len(row))})" for row in chunk)
        yield f"{before}{places}{after}", [value for row in chunk for value in row]


def select_params(params: Params, places: frozenset[str]) -> Params:
    """Return the parameters with these numbers or names, or None if there are none."""
    if not places or params is None:
        return None
    return {each: params[each] if isinstance(params, Mapping) else params[int(each) - 1] for each in places}


def distinct_ranges(rows: Sequence[int], before: Sequence[int | None]) -> Iterator[tuple[int, int]]:
    """Yield the first and last row id of each range in which no key repeats, so that its rows can be inserted at once.

    Yields at least one range, which may be empty. `rows` are row ids in ascending order; `before` has, for each, the id
    of the previous row with the same key.
    """
    first, last = (rows[0], rows[0]) if rows else (0, -1)
    for row, earlier in zip(rows, before, strict=True):
        if earlier is not None and earlier >= first:
            yield first, last
            first = row
        last = row
    yield first, last
