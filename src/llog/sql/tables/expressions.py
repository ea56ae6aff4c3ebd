"""Expressions of routes: filters and partition keys, checked against their table once and run by DuckDB over rows that
changed.

Columns may be written bare, or with the table's name before them.
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

from llog.cdc.routes import asked
from llog.errors import SqlError
from llog.sql.parse.renderer import quoted, separate
from llog.sql.tables.definitions import TableDefinition
from llog.sql.tables.mirror import Mirror
from llog.sql.workers.engine import EngineCursor

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
"""Types whose text Arrow writes as DuckDB does."""
_CAST: Final = {"JSON", "UUID", "HUGEINT"}
"""Types that Arrow does not tell from others."""
_FORBIDDEN: Final = (exp.AggFunc, exp.Query, exp.Window, exp.Placeholder, exp.Parameter, exp.Star)


class _Expressions(NamedTuple):
    sql: tuple[str, ...]
    """As written, columns without the table's schema."""
    columns: frozenset[str]
    """Names of columns, in lower case."""
    used: frozenset[str]
    """And those that may be: to sqlglot, `j -> 'a'` in the brackets of a function is a lambda, and `j` its variable."""
    plain: str | None
    """The one column that the whole is, in lower case."""


@lru_cache(maxsize=1024)
def _parse(text: str, table: str) -> _Expressions:
    try:
        select = sqlglot.parse_one(f"SELECT {text}\n", read="duckdb")
    except (sqlglot.ParseError, sqlglot.TokenError, RecursionError) as error:
        raise SqlError(f"{text!r} is no expression: {str(error).splitlines()[0]}") from error
    if type(select) is not exp.Select or any(value for name, value in select.args.items() if name != "expressions"):
        raise SqlError(f"{text!r} is no expression")
    for found in select.find_all(*_FORBIDDEN):
        if found is not select:
            raise SqlError(
                f"{found.sql('duckdb')!r} in {text!r} cannot be asked of one row",
                hint="use columns of the row, constants and functions of them; no aggregates, subqueries, windows "
                "or parameters",
            )
    columns = frozenset(each.name.lower() for each in select.find_all(exp.Column))
    variables = {each.name.lower() for found in select.find_all(exp.Lambda) for each in found.expressions}
    whole = select.expressions[0]
    plain = whole.name.lower() if len(select.expressions) == 1 and isinstance(whole, exp.Column) else None
    return _Expressions(tuple(separate(text, table)), columns, columns | variables, plain)


def rows_as(definition: TableDefinition, source: str, alias: str, columns: frozenset[str] | None = None) -> str:
    """FROM … for Arrow rows of a table that are registered as `source`, with the types that the table has."""
    chosen = [
        f"CAST({quoted(each.name)} AS {each.type}) AS {quoted(each.name)}" if each.type in _CAST else quoted(each.name)
        for each in definition.columns
        if columns is None or each.name.lower() in columns
    ]
    number = [_ROW] if columns is not None else []
    return f"(SELECT {', '.join(number + chosen)} FROM {quoted(source)}) AS {quoted(alias)}"


class Expressions:
    """The router's evaluator. Any thread may call; one runs at a time."""

    def __init__(self, mirror: Mirror, definition: Callable[[str], TableDefinition]) -> None:
        self._mirror = mirror
        self._definition = definition
        self._lock = threading.Lock()
        self._cursor: tuple[int, EngineCursor] | None = None

    def select(
        self, table: str, rows: pa.Table, where: str | None, key: str | None
    ) -> tuple[npt.NDArray[np.int64], Any | None]:
        """The numbers of the rows that `where` is true of, and their keys as text (several expressions are joined by
        \\x1f).
        """
        definition = self._definition(table)
        keys = None if key is None else _parse(key, definition.name)
        if where is None and keys is None:
            return np.arange(rows.num_rows, dtype=np.int64), None
        if where is None and keys is not None and keys.plain is not None:
            place = definition.codec.places.get(keys.plain)
            if place is not None and definition.columns[place].type in _AS_TEXT:
                return np.arange(rows.num_rows, dtype=np.int64), rows.column(place).combine_chunks().cast(pa.string())
        filtered = None if where is None else _parse(where, definition.name)
        used = (filtered.used if filtered else frozenset()) | (keys.used if keys else frozenset())
        numbered = rows.select([each for each in rows.column_names if each.lower() in used]).append_column(
            _ROW, pa.array(np.arange(rows.num_rows, dtype=np.int64))
        )
        sql = self._sql(definition, filtered, keys, used)
        with self._lock, self._mirror.explained():
            found = self._own_cursor().run(sql, tables={"llog_changed": numbered}, limited=False)
        numbers = found.column(0).to_numpy().astype(np.int64, copy=False)
        order = np.argsort(numbers, kind="stable")
        if keys is None:
            return numbers[order], None
        return numbers[order], found.column(1).combine_chunks().take(pa.array(order))

    def _sql(
        self, definition: TableDefinition, where: _Expressions | None, keys: _Expressions | None, used: frozenset[str]
    ) -> str:
        chosen = _ROW
        if keys is not None:
            texts = [f"CAST(({each}) AS VARCHAR)" for each in keys.sql]
            if len(texts) > 1:
                texts = [" || chr(31) || ".join(f"coalesce({each}, '')" for each in texts)]
            chosen += f", {texts[0]}"
        source = rows_as(definition, "llog_changed", definition.last_part, used)
        return f"SELECT {chosen} FROM {source}" + ("" if where is None else f" WHERE ({where.sql[0]})")

    def check(self, table: str, where: str | None, partition_by: str | None) -> None:
        """`SqlError` unless the expressions can be asked of every row of the table."""
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
        nothing = pa.table([pa.nulls(1, kind) for kind in definition.codec.kinds], definition.codec.schema)
        try:
            kind = "BOOLEAN" if where is None else self._kind_of(definition, where)
            self.select(definition.name, nothing, where, partition_by)
            if partition_by is not None:
                self._kind_of(definition, partition_by)
        except SqlError as error:
            said = f"{asked(where, partition_by)} cannot be asked of rows of table {definition.name!r}: {error.message}"
            raise SqlError(said, hint=error.hint) from error
        if kind != "BOOLEAN":
            raise SqlError(f"WHERE {where!r} is {kind}, not true or false")

    def _kind_of(self, definition: TableDefinition, text: str) -> str:
        parsed = _parse(text, definition.name)
        empty = definition.codec.schema.empty_table().append_column(_ROW, pa.array([], pa.int64()))
        source = rows_as(definition, "llog_changed", definition.last_part)
        with self._lock, self._mirror.explained():
            described = f"DESCRIBE SELECT {', '.join(parsed.sql)} FROM {source}"
            found = self._own_cursor().run(described, tables={"llog_changed": empty})
            return str(found["column_type"][0])

    def _own_cursor(self) -> EngineCursor:
        self._mirror.replace_ended()
        if self._cursor is None or self._cursor[0] != self._mirror.generation:
            if self._cursor is not None:
                self._cursor[1].close()
            self._cursor = (self._mirror.generation, self._mirror.cursor())
        return self._cursor[1]
