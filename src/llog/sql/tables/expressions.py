"""The expressions of routes (filters and partition keys), checked once against their table and evaluated by DuckDB over
changed rows.

Columns may be written with or without the table's name before them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import sqlglot
from sqlglot import exp

from llog.cdc.routes import route_clauses
from llog.errors import SqlError
from llog.sql.parse.renderer import quote, split_expressions
from llog.sql.tables.definitions import TableDefinition
from llog.sql.tables.mirror import Mirror
from llog.sql.workers.duckdb_client import DuckDBCursor

_ROW: Final = "llog_row"
_AS_TEXT: Final = {
    "VARCHAR",
    "UUID",
    "TINYINT",
    "SMALLINT",
    "INTEGER",
    "BIGINT",
    "UTINYINT",
    "USMALLINT",
    "UINTEGER",
    "UBIGINT",
}
"""Types that Arrow converts to the same text as DuckDB."""
_CAST: Final = {"JSON", "UUID", "HUGEINT"}
"""Types that Arrow does not distinguish from others."""
_FORBIDDEN: Final = (exp.AggFunc, exp.Query, exp.Window, exp.Placeholder, exp.Parameter, exp.Star)


class _ParsedExpressions(NamedTuple):
    sql: tuple[str, ...]
    """The expressions as written, but with columns that do not name the table's schema."""
    columns: frozenset[str]
    """Names of columns, in lower case."""
    possible_columns: frozenset[str]
    """`columns` and the variables of lambdas: sqlglot takes `j -> 'a'` in a function's brackets for a lambda."""
    only_column: str | None
    """The column, in lower case, if the text is nothing but one column."""


@lru_cache(maxsize=1024)
def _parse(text: str, table: str) -> _ParsedExpressions:
    try:
        select = sqlglot.parse_one(f"SELECT {text}\n", read="duckdb")
    except (sqlglot.ParseError, sqlglot.TokenError, RecursionError) as error:
        raise SqlError(f"{text!r} is not an expression: {str(error).splitlines()[0]}") from error
    if type(select) is not exp.Select or any(value for name, value in select.args.items() if name != "expressions"):
        raise SqlError(f"{text!r} is not an expression")
    for found in select.find_all(*_FORBIDDEN):
        if found is not select:
            raise SqlError(
                f"{found.sql('duckdb')!r} in {text!r} cannot be evaluated for a single row",
                hint="use columns of the row, constants and functions of them; no aggregates, subqueries, windows "
                "or parameters",
            )
    columns = frozenset(each.name.lower() for each in select.find_all(exp.Column))
    variables = {each.name.lower() for found in select.find_all(exp.Lambda) for each in found.expressions}
    first = select.expressions[0]
    only_column = first.name.lower() if len(select.expressions) == 1 and isinstance(first, exp.Column) else None
    return _ParsedExpressions(tuple(split_expressions(text, table)), columns, columns | variables, only_column)


def from_clause(definition: TableDefinition, source: str, alias: str, columns: frozenset[str] | None = None) -> str:
    """Return what follows FROM to read Arrow rows that are registered as `source` with the types of the table."""
    chosen = [
        f"CAST({quote(each.name)} AS {each.type}) AS {quote(each.name)}" if each.type in _CAST else quote(each.name)
        for each in definition.columns
        if columns is None or each.name.lower() in columns
    ]
    number = [_ROW] if columns is not None else []
    return f"(SELECT {', '.join(number + chosen)} FROM {quote(source)}) AS {quote(alias)}"


class ExpressionEvaluator:
    """Evaluates the router's expressions. Any thread may call; calls run one at a time."""

    def __init__(self, mirror: Mirror, definition: Callable[[str], TableDefinition]) -> None:
        self._mirror = mirror
        self._definition = definition
        self._lock = threading.Lock()
        self._cursor: tuple[int, DuckDBCursor] | None = None

    def select(
        self, table: str, rows: pa.Table, where: str | None, key: str | None
    ) -> tuple[npt.NDArray[np.int64], Any | None]:
        """Return the numbers of the rows for which `where` is true, and their keys as text.

        The values of several key expressions are joined by `\\x1f`.
        """
        definition = self._definition(table)
        keys = None if key is None else _parse(key, definition.name)
        if where is None and keys is None:
            return np.arange(rows.num_rows, dtype=np.int64), None
        if where is None and keys is not None and keys.only_column is not None:
            place = definition.codec.places.get(keys.only_column)
            if place is not None and definition.columns[place].type in _AS_TEXT:
                return np.arange(rows.num_rows, dtype=np.int64), rows.column(place).combine_chunks().cast(pa.string())
        condition = None if where is None else _parse(where, definition.name)
        used = (condition.possible_columns if condition else frozenset()) | (
            keys.possible_columns if keys else frozenset()
        )
        numbered = rows.select([each for each in rows.column_names if each.lower() in used]).append_column(
            _ROW, pa.array(np.arange(rows.num_rows, dtype=np.int64))
        )
        sql = self._select_sql(definition, condition, keys, used)
        with self._lock, self._mirror.translating_errors():
            found = self._own_cursor().run(sql, tables={"llog_changed": numbered}, is_limited=False)
        numbers = found.column(0).to_numpy().astype(np.int64, copy=False)
        order = np.argsort(numbers, kind="stable")
        if keys is None:
            return numbers[order], None
        return numbers[order], found.column(1).combine_chunks().take(pa.array(order))

    def _select_sql(
        self,
        definition: TableDefinition,
        where: _ParsedExpressions | None,
        keys: _ParsedExpressions | None,
        used: frozenset[str],
    ) -> str:
        chosen = _ROW
        if keys is not None:
            texts = [f"CAST(({each}) AS VARCHAR)" for each in keys.sql]
            if len(texts) > 1:
                texts = [" || chr(31) || ".join(f"coalesce({each}, '')" for each in texts)]
            chosen += f", {texts[0]}"
        source = from_clause(definition, "llog_changed", definition.unqualified_name, used)
        return f"SELECT {chosen} FROM {source}" + ("" if where is None else f" WHERE ({where.sql[0]})")

    def check(self, table: str, where: str | None, partition_by: str | None) -> None:
        """Raise `SqlError` unless the expressions can be evaluated for every row of the table."""
        definition = self._definition(table)
        if where is not None and len(_parse(where, definition.name).sql) != 1:
            raise SqlError(f"WHERE {where!r} is more than one expression")
        for text in (where, partition_by):
            if text is not None:
                known = {*definition.codec.places}
                for name in sorted(_parse(text, definition.name).columns - known):
                    raise SqlError(
                        f"table {definition.name!r} has no column {name!r}, which {text!r} reads",
                        hint=f"its columns are {', '.join(definition.codec.names)}",
                    )
        row_of_nulls = pa.table([pa.nulls(1, kind) for kind in definition.codec.kinds], definition.codec.schema)
        try:
            kind = "BOOLEAN" if where is None else self._type_of(definition, where)
            self.select(definition.name, row_of_nulls, where, partition_by)
            if partition_by is not None:
                self._type_of(definition, partition_by)
        except SqlError as error:
            raise SqlError(
                f"{route_clauses(where, partition_by)} cannot be evaluated for rows of table {definition.name!r}: "
                f"{error.message}",
                hint=error.hint,
            ) from error
        if kind != "BOOLEAN":
            raise SqlError(f"WHERE {where!r} has type {kind}, not BOOLEAN")

    def _type_of(self, definition: TableDefinition, text: str) -> str:
        parsed = _parse(text, definition.name)
        empty = definition.codec.schema.empty_table().append_column(_ROW, pa.array([], pa.int64()))
        source = from_clause(definition, "llog_changed", definition.unqualified_name)
        with self._lock, self._mirror.translating_errors():
            describe = f"DESCRIBE SELECT {', '.join(parsed.sql)} FROM {source}"
            found = self._own_cursor().run(describe, tables={"llog_changed": empty})
            return str(found["column_type"][0])

    def _own_cursor(self) -> DuckDBCursor:
        self._mirror.restart_if_ended()
        if self._cursor is None or self._cursor[0] != self._mirror.generation:
            if self._cursor is not None:
                self._cursor[1].close()
            self._cursor = (self._mirror.generation, self._mirror.cursor())
        return self._cursor[1]
