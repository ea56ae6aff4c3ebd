"""DuckDB in memory: a copy of the tables that were asked for, loaded at their first use, that runs SQL.

The truth is in RocksDB. Rows that were written without DuckDB wait here until a statement reads their table. The database can reach neither
files nor the network, and no SQL changes its settings. If it is damaged it is thrown away and loaded anew.
"""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, groupby
from typing import Any, Final

import duckdb
import msgspec
import pyarrow as pa

from llog.errors import ConfigurationError, ConstraintViolation, LlogError, ResultTooLarge, SqlError
from llog.sql.definitions import Column, TableDefinition, check_definition
from llog.sql.rendering import full_name, quoted

Params = Sequence[Any] | Mapping[str, Any] | None
Cursor = Any
"""A duckdb.DuckDBPyConnection: duckdb has no types."""

_PENDING_ROWS_MAX: Final = 50_000
_BATCH_ROWS: Final = 50_000
_AT: Final = re.compile(r"\n\nLINE (\d+): (.*)\n( *)\^", re.DOTALL)
_HINT: Final = re.compile(r"\n((?:Candidate|Did you mean)[^\n]*)")
_KIND: Final = re.compile(r"^[A-Z][A-Za-z]*(?: [A-Za-z]+)* Error: ")

# `sql()`, which DuckDB would have us call instead, is slower for small statements, and its errors do not say where.
warnings.filterwarnings("ignore", message="Arrow output on a DB-API result", category=UserWarning)


class MirrorOptions(msgspec.Struct, frozen=True, kw_only=True):
    memory_max_bytes: int = 1 << 30
    threads: int = 1
    """More than one slows small statements down."""
    max_rows: int = 1_000_000
    """Of one result, and of the changes of one transaction."""
    max_bytes: int = 256 << 20
    """Of one result."""


class _Copy:
    """A table here: rows still to be inserted, and when it was loaded."""

    def __init__(self, tick: int) -> None:
        self.tick = tick
        self.pending: list[pa.Table | list[bytes]] = []
        self.pending_rows = 0

    def waiting(self, definition: TableDefinition, count: int) -> pa.Table:
        """The rows of the first `count` that are pending."""
        tables: list[pa.Table] = []
        for encoded, group in groupby(self.pending[:count], lambda part: isinstance(part, list)):
            parts = list(group)
            tables += [definition.codec.decode([*chain(*parts)], definition.name)] if encoded else parts
        return pa.concat_tables(tables)


class Mirror:
    """Any thread may call. `pages` gives all rows of a table."""

    def __init__(self, options: MirrorOptions, pages: Callable[[TableDefinition], Iterable[pa.Table]]) -> None:
        self.options = options
        self._pages = pages
        self._lock = threading.RLock()
        self._queue = threading.Lock()
        self.generation = 0
        self.tick = 0
        """Counts loads: a transaction that began before a load does not see it."""
        self._start()

    def _start(self) -> None:
        self._copies: dict[int, _Copy] = {}
        try:
            self._root = duckdb.connect(
                ":memory:",
                config={
                    "allow_community_extensions": "false",
                    "autoinstall_known_extensions": "false",
                    "autoload_known_extensions": "false",
                    "enable_external_access": "false",
                    "memory_limit": f"{self.options.memory_max_bytes}B",
                    "python_enable_replacements": "false",
                    "temp_directory": "",
                    "threads": str(self.options.threads),
                },
            )
            self._root.execute("SET GLOBAL TimeZone = 'UTC'")
            self._root.execute("SET lock_configuration = true")
        except duckdb.Error as error:
            raise ConfigurationError(f"DuckDB does not start with {self.options}: {error}") from error
        self._own = self._root.cursor()

    def cursor(self) -> Cursor:
        return self._root.cursor()

    def reset(self) -> None:
        """Throws everything away. Statements that run go on with what they have."""
        with self._lock, self._queue:
            self.generation += 1
            self._start()

    def close(self) -> None:
        with self._lock:
            self._own.close()
            self._root.close()

    def has(self, definition: TableDefinition) -> bool:
        """Whether the table is loaded, or being loaded: then it has to be told of new rows."""
        return definition.number in self._copies

    def tell(self, definition: TableDefinition, rows: pa.Table | list[bytes]) -> None:
        """Rows, as a table or encoded, were inserted in RocksDB. To be called before the writer's lock is given up."""
        with self._queue:
            copy = self._copies.get(definition.number)
            if copy is None:
                return
            copy.pending.append(rows)
            copy.pending_rows += len(rows)
            full = copy.pending_rows >= _PENDING_ROWS_MAX
        if full:
            try:
                self.catch_up([definition])
            except LlogError:
                pass  # the rows are written; the mirror was thrown away, and whoever reads next loads it

    def waiting(self) -> list[int]:
        """Numbers of the tables whose rows wait to be inserted."""
        with self._queue:
            return [number for number, copy in self._copies.items() if copy.pending]

    def sees(self, definition: TableDefinition, tick: int) -> bool:
        """Whether a transaction that began at `tick` finds this table loaded and up to date."""
        copy = self._copies.get(definition.number)
        return copy is not None and copy.tick <= tick and not copy.pending

    def catch_up(self, definitions: Iterable[TableDefinition]) -> None:
        """Afterwards a new transaction sees all rows of these tables that were acknowledged before the call."""
        for definition in definitions:
            if self.sees(definition, self.tick):
                continue
            with self._lock:
                if definition.number not in self._copies:
                    self._load(definition)
                self._flush(definition, self._copies[definition.number])

    def _load(self, definition: TableDefinition) -> None:
        copy = _Copy(self.tick + 1)
        with self._queue:
            self._copies[definition.number] = copy
        try:
            with self.explained():
                self._make_schema(definition.name)
                self._own.execute("BEGIN TRANSACTION")
                try:
                    self._own.execute(definition.ddl)
                    for page in self._pages(definition):
                        self.insert(self._own, definition, page)
                    self._own.execute("COMMIT")
                except BaseException:
                    roll_back(self._own)
                    raise
        except BaseException:
            with self._queue:
                del self._copies[definition.number]
            raise
        self.tick += 1

    def _flush(self, definition: TableDefinition, copy: _Copy) -> None:
        with self._queue:
            count = len(copy.pending)
        if not count:
            return
        rows = copy.waiting(definition, count)
        try:
            with self.explained():
                try:
                    self.insert(self._own, definition, rows)
                except duckdb.ConstraintException:  # the load has met some of them
                    self.insert(self._own, definition, rows, "INSERT OR REPLACE")
        except BaseException:
            self.reset()
            raise
        with self._queue:  # only now: who finds nothing pending reads at once
            del copy.pending[:count]
            copy.pending_rows -= rows.num_rows

    def put(self, cursor: Cursor, definition: TableDefinition, rows: pa.Table, gone: pa.Table) -> None:
        """Brings `rows` into a table and takes those with the keys of `gone` out, in the cursor's transaction."""
        with registered(cursor, {"llog_gone": gone}):
            same = " AND ".join(f"t.{quoted(each)} = g.{quoted(each)}" for each in definition.primary_key)
            cursor.execute(f"DELETE FROM {full_name(definition.name)} t USING llog_gone g WHERE {same}")
        self.insert(cursor, definition, rows, "INSERT OR REPLACE")

    def insert(self, cursor: Cursor, definition: TableDefinition, rows: pa.Table, how: str = "INSERT") -> None:
        with registered(cursor, {"llog_rows": rows}):
            cursor.execute(f"{how} INTO {full_name(definition.name)} SELECT * FROM llog_rows")

    @contextmanager
    def creating(self, name: str, number: int, sql: str) -> Iterator[TableDefinition]:
        """Runs CREATE TABLE and gives the checked definition; the table stays unless the block fails."""
        with self._lock:
            with self.explained():
                self._make_schema(name)
                self._own.execute("BEGIN TRANSACTION")
            try:
                with self.explained():
                    # a query that began before an older table of the name was dropped may have loaded it again
                    self._own.execute(f"DROP TABLE IF EXISTS {full_name(name)}")
                    self._own.execute(sql)
                    definition = check_definition(self._described(name, number))
                yield definition
            except BaseException:
                roll_back(self._own)
                raise
            try:
                self._own.execute("COMMIT")
            except duckdb.Error:
                self.reset()
                return
            self.tick += 1
            with self._queue:
                self._copies[number] = _Copy(self.tick)

    def forget(self, definition: TableDefinition) -> None:
        """The table was dropped."""
        with self._lock:
            with self._queue:
                self._copies.pop(definition.number, None)
            try:
                self._own.execute(f"DROP TABLE IF EXISTS {full_name(definition.name)}")
            except duckdb.Error:
                self.reset()

    def _make_schema(self, name: str) -> None:
        schema = name.rpartition(".")[0]
        if schema:
            self._own.execute(f"CREATE SCHEMA IF NOT EXISTS {quoted(schema)}")

    def _described(self, name: str, number: int) -> TableDefinition:
        schema, _, table = name.rpartition(".")
        where = "database_name = 'memory' AND lower(schema_name) = lower(?) AND lower(table_name) = lower(?)"
        names = [schema or "main", table]
        found = self._own.execute(f"SELECT sql FROM duckdb_tables() WHERE {where}", names).fetchall()
        if len(found) != 1:
            raise SqlError(
                f"the statement did not create table {name!r}", hint="write CREATE TABLE name (column type, …)"
            )
        ddl = found[0][0]
        columns = self._own.execute(
            f"SELECT column_name, data_type, is_nullable, column_default FROM duckdb_columns() WHERE {where} ORDER BY column_index",
            names,
        ).fetchall()
        rules = self._own.execute(
            f"SELECT constraint_type, constraint_column_names FROM duckdb_constraints() WHERE {where}", names
        ).fetchall()
        kinds = {kind for kind, _ in rules}
        if "FOREIGN KEY" in kinds:
            raise SqlError(f"table {name!r} has a FOREIGN KEY", hint="tables know no foreign keys: leave it out")
        if " GENERATED ALWAYS AS" in ddl:
            raise SqlError(f"table {name!r} has generated columns", hint="compute them in SELECT")
        spelled = {each[0].lower(): each[0] for each in columns}
        key = next(
            (tuple(spelled[each.lower()] for each in names) for kind, names in rules if kind == "PRIMARY KEY"), ()
        )
        return TableDefinition(
            name=name,
            number=number,
            ddl=ddl,
            columns=tuple(Column(*each) for each in columns),
            primary_key=key,
            checked=bool(kinds & {"UNIQUE", "CHECK"}),
        )

    def fetch(self, cursor: Cursor, sql: str, params: Params = None) -> pa.Table:
        """Runs a statement and gives its rows; `ResultTooLarge` if they are more than the options allow."""
        with self.explained():
            result = cursor.execute(sql, params) if params else cursor.execute(sql)
            reader = result.to_arrow_reader(_BATCH_ROWS)
            batches: list[pa.RecordBatch] = []
            rows = size = 0
            for batch in reader:
                batches.append(batch)
                rows += batch.num_rows
                size += batch.nbytes
                if rows > self.options.max_rows or size > self.options.max_bytes:
                    raise ResultTooLarge(
                        f"the statement gives more than {self.options.max_rows} rows or {self.options.max_bytes} bytes: "
                        "add LIMIT, or ask for less at a time"
                    )
            return pa.Table.from_batches(batches, reader.schema)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """What DuckDB says, as errors of llog."""
        try:
            yield
        except (duckdb.InternalException, duckdb.FatalException) as error:
            self.reset()
            raise SqlError(f"DuckDB failed, and was started anew: {error}", hint="try again") from error
        except duckdb.Error as error:
            raise explain(error) from error
        except (UnicodeError, RuntimeError, OSError, pa.ArrowException) as error:  # what Python's layers raise
            raise SqlError(f"DuckDB cannot take the statement or one of its values: {error}") from error


def explain(error: Any) -> LlogError:
    """The error of llog for one of DuckDB. It shows where in the text that DuckDB was given, which is not the text as it was written."""
    text = str(error)
    at = _AT.search(text)
    found = _HINT.search(text)
    message = _KIND.sub("", text[: at.start()] if at else text)
    if found is not None:
        message = message.replace(found[0], "").rstrip()
    hint = found[1] if found else ""
    if isinstance(error, duckdb.ConstraintException):
        return ConstraintViolation(message)
    if isinstance(error, duckdb.OutOfMemoryException):
        hint = "ask for less at a time, or set LLOG_SQL_MEMORY_MAX_BYTES higher"
    if at is None:
        return SqlError(message, hint=hint)
    caret = " " * (len(at[3]) - len(f"LINE {at[1]}: ")) + "^"
    return SqlError(message, hint=hint, shown=f"\n  {at[2]}\n  {caret}")


@contextmanager
def registered(cursor: Cursor, tables: Mapping[str, pa.Table]) -> Iterator[None]:
    """Arrow tables under names that the cursor's statements can read, for as long as the block runs."""
    try:
        for name, table in tables.items():
            cursor.register(name, table)
        yield
    finally:
        for name in tables:
            try:
                cursor.unregister(name)
            except duckdb.Error:  # the transaction has failed: it takes the name with it
                pass


def roll_back(cursor: Cursor) -> None:
    """Ends a transaction, if there is one still."""
    try:
        cursor.execute("ROLLBACK")
    except duckdb.Error:
        pass
