"""The mirror: a copy of tables in DuckDB, which runs SQL on them. A table is loaded when a statement first reads it.

RocksDB holds the rows of record. Rows that were written to RocksDB alone are pending here until a statement reads their
table. DuckDB runs in a worker process, whose memory is limited and which is killed if a statement cannot be ended
otherwise. A mirror that is damaged or has ended is discarded and loaded again.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from itertools import chain, groupby
from typing import Any, Final

import duckdb
import pyarrow as pa

from llog.errors import ConstraintViolation, LlogError, SqlError, SqlMemoryExceeded, SqlWorkerEnded
from llog.sql.parse.renderer import full_name, quote
from llog.sql.tables.definitions import Column, TableDefinition, check_definition
from llog.sql.workers.duckdb_client import DuckDBClient, DuckDBCursor, DuckDBEnded, Params
from llog.sql.workers.duckdb_server import DuckDBOptions
from llog.sql.workers.jobs import JobStopped

_PENDING_ROWS_MAX: Final = 50_000
_AT: Final = re.compile(r"\n\nLINE (\d+): (.*)\n( *)\^", re.DOTALL)
_HINT: Final = re.compile(r"\n((?:Candidate|Did you mean)[^\n]*)")
_LESS: Final = "ask for less at a time, or set LLOG_SQL_MEMORY_MAX_BYTES higher"
_KIND: Final = re.compile(r"^[A-Z][A-Za-z]*(?: [A-Za-z]+)* Error: ")


class _TableCopy:
    """A table in the mirror: the load after which it exists, and the rows still to be inserted."""

    def __init__(self, tick: int) -> None:
        self.tick = tick
        self.pending: list[pa.Table | list[bytes]] = []
        self.pending_rows = 0

    def first_pending(self, definition: TableDefinition, count: int) -> pa.Table:
        """Return the rows of the first `count` pending parts."""
        tables: list[pa.Table] = []
        for encoded, group in groupby(self.pending[:count], lambda part: isinstance(part, list)):
            parts = list(group)
            tables += [definition.codec.decode([*chain(*parts)], definition.name)] if encoded else parts
        return pa.concat_tables(tables)


class Mirror:
    """Copies of tables in one DuckDB. Any thread may call. `pages` yields all rows of a table."""

    def __init__(self, options: DuckDBOptions, pages: Callable[[TableDefinition], Iterable[pa.Table]]) -> None:
        self.options = options
        self._pages = pages
        self._lock = threading.RLock()
        self._queue = threading.Lock()
        self._closed = False
        self.generation = 0
        self.tick = 0
        """Counts loads: a transaction that began before a load does not see the loaded table."""
        self._start()

    def _start(self) -> None:
        self._copies: dict[int, _TableCopy] = {}
        self._client = DuckDBClient(self.options)
        self._own = self._client.cursor()

    def cursor(self) -> DuckDBCursor:
        return self._client.cursor()

    def reset(self) -> None:
        """Discard all copies and start another DuckDB. Running statements continue on the old one."""
        with self._lock, self._queue:
            if self._closed:
                return
            client = self._client
            self._own.close()
            self.generation += 1
            self._start()
            client.retire()

    def close(self) -> None:
        with self._queue:
            self._closed = True
        self._client.close()

    def restart_if_ended(self) -> None:
        """Reset the mirror if its worker has died or was killed."""
        if self._client.has_ended:
            with self._lock:
                if self._client.has_ended:  # no other thread has reset it meanwhile
                    self.reset()

    def has_copy_of(self, definition: TableDefinition) -> bool:
        """Whether the table is loaded or being loaded, so that new rows must be passed to `add_pending`."""
        return definition.number in self._copies

    def add_pending(self, definition: TableDefinition, rows: pa.Table | list[bytes]) -> None:
        """Note rows that were inserted into RocksDB, as a table or encoded. The caller holds the writer's lock."""
        with self._queue:
            copy = self._copies.get(definition.number)
            if copy is None:
                return
            copy.pending.append(rows)
            copy.pending_rows += len(rows)
            is_full = copy.pending_rows >= _PENDING_ROWS_MAX
        if is_full:
            try:
                self.catch_up([definition])
            except (LlogError, JobStopped):
                pass  # the rows are in RocksDB, and the next reader inserts or loads them

    def tables_with_pending_rows(self) -> list[int]:
        """Return the numbers of the tables with rows still to be inserted."""
        with self._queue:
            return [number for number, copy in self._copies.items() if copy.pending]

    def sees(self, definition: TableDefinition, tick: int) -> bool:
        """Whether a transaction that began at `tick` finds this table loaded and up to date."""
        copy = self._copies.get(definition.number)
        return copy is not None and copy.tick <= tick and not copy.pending

    def catch_up(self, definitions: Iterable[TableDefinition]) -> None:
        """Make all rows of these tables that were acknowledged before the call visible to new transactions."""
        self.restart_if_ended()
        for definition in definitions:
            if self.sees(definition, self.tick):
                continue
            with self._lock:
                if definition.number not in self._copies:
                    self._load(definition)
                self._flush(definition, self._copies[definition.number])

    def _load(self, definition: TableDefinition) -> None:
        copy = _TableCopy(self.tick + 1)
        with self._queue:
            self._copies[definition.number] = copy
        try:
            with self.translating_errors():
                self._make_schema(definition.name)
                self._own.do("BEGIN TRANSACTION")
                try:
                    self._own.do(definition.ddl)
                    for page in self._pages(definition):
                        self.insert(self._own, definition, page)
                    self._own.end("COMMIT")
                except BaseException:
                    roll_back(self._own)
                    raise
        except BaseException:
            with self._queue:
                self._copies.pop(definition.number, None)
            raise
        self.tick += 1

    def _flush(self, definition: TableDefinition, copy: _TableCopy) -> None:
        with self._queue:
            count = len(copy.pending)
        if not count:
            return
        rows = copy.first_pending(definition, count)
        try:
            with self.translating_errors():
                try:
                    self.insert(self._own, definition, rows)
                except duckdb.ConstraintException:  # the load has read some of them
                    self.insert(self._own, definition, rows, "INSERT OR REPLACE")
        except JobStopped:
            raise
        except BaseException as error:
            if not isinstance(error.__cause__, duckdb.InterruptException):
                self.reset()
            raise
        with self._queue:  # only now: a reader that finds nothing pending reads at once
            del copy.pending[:count]
            copy.pending_rows -= rows.num_rows

    def put(self, cursor: DuckDBCursor, definition: TableDefinition, rows: pa.Table, gone: pa.Table) -> None:
        """Delete the rows with the keys of `gone` and upsert `rows`, in the cursor's transaction."""
        same = " AND ".join(f"t.{quote(each)} = g.{quote(each)}" for each in definition.primary_key)
        sql = f"DELETE FROM {full_name(definition.name)} t USING llog_gone g WHERE {same}"
        cursor.do(sql, tables={"llog_gone": gone})
        self.insert(cursor, definition, rows, "INSERT OR REPLACE")

    def insert(self, cursor: DuckDBCursor, definition: TableDefinition, rows: pa.Table, verb: str = "INSERT") -> None:
        cursor.do(f"{verb} INTO {full_name(definition.name)} SELECT * FROM llog_rows", tables={"llog_rows": rows})

    @contextmanager
    def create_table(self, name: str, number: int, sql: str) -> Iterator[TableDefinition]:
        """Run CREATE TABLE and yield the checked definition; the table is rolled back if the block fails."""
        with self._lock:
            with self.translating_errors():
                self._make_schema(name)
                self._own.do("BEGIN TRANSACTION")
            try:
                with self.translating_errors():
                    # a query that began before a table of this name was dropped may have loaded that table again
                    self._own.do(f"DROP TABLE IF EXISTS {full_name(name)}")
                    self._own.do(sql)
                    definition = check_definition(self._read_definition(name, number))
                yield definition
            except BaseException:
                roll_back(self._own)
                raise
            try:
                self._own.end("COMMIT")
            except duckdb.Error:
                self.reset()
                return
            self.tick += 1
            with self._queue:
                self._copies[number] = _TableCopy(self.tick)

    def drop_copy(self, definition: TableDefinition) -> None:
        """Drop the copy of a table that was dropped."""
        with self._lock:
            with self._queue:
                self._copies.pop(definition.number, None)
            try:
                self._own.end(f"DROP TABLE IF EXISTS {full_name(definition.name)}")
            except duckdb.Error:
                self.reset()

    def _make_schema(self, name: str) -> None:
        schema = name.rpartition(".")[0]
        if schema:
            self._own.do(f"CREATE SCHEMA IF NOT EXISTS {quote(schema)}")

    def _read_definition(self, name: str, number: int) -> TableDefinition:
        schema, _, table = name.rpartition(".")
        where = "database_name = 'memory' AND lower(schema_name) = lower(?) AND lower(table_name) = lower(?)"
        names = [schema or "main", table]

        def query(chosen: str, end: str = "") -> list[tuple[Any, ...]]:
            rows = self._own.run(f"SELECT {chosen} WHERE {where} {end}", names)
            return list(zip(*(column.to_pylist() for column in rows.columns), strict=True))

        ddls = query("sql FROM duckdb_tables()")
        if len(ddls) != 1:
            raise SqlError(
                f"the statement did not create table {name!r}", hint="write CREATE TABLE name (column type, …)"
            )
        ddl = ddls[0][0]
        columns = query(
            "column_name, data_type, is_nullable, column_default FROM duckdb_columns()", "ORDER BY column_index"
        )
        rules = query("constraint_type, constraint_column_names FROM duckdb_constraints()")
        kinds = {kind for kind, _ in rules}
        if "FOREIGN KEY" in kinds:
            raise SqlError(f"table {name!r} has a FOREIGN KEY, which is not supported", hint="leave it out")
        if " GENERATED ALWAYS AS" in ddl:
            raise SqlError(
                f"table {name!r} has generated columns, which are not supported", hint="compute them in SELECT"
            )
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

    def fetch(
        self, cursor: DuckDBCursor, sql: str, params: Params = None, tables: Mapping[str, pa.Table] | None = None
    ) -> pa.Table:
        """Run a statement and return its rows. Raises `ResultTooLarge` if they exceed the options' limits."""
        with self.translating_errors():
            return cursor.run(sql, params, tables)

    def fetch_once(self, sql: str, params: Params = None, tables: Mapping[str, pa.Table] | None = None) -> pa.Table:
        """Run a statement outside of all transactions and return its rows, as `fetch` does."""
        self.restart_if_ended()
        with closing(self.cursor()) as cursor:
            return self.fetch(cursor, sql, params, tables)

    @contextmanager
    def register(self, cursor: DuckDBCursor, tables: Mapping[str, pa.Table]) -> Iterator[None]:
        """Register tables that every statement of the block sees."""
        with ExitStack() as stack:
            with self.translating_errors():
                stack.enter_context(cursor.register(tables))
            yield

    @contextmanager
    def translating_errors(self) -> Iterator[None]:
        """Raise DuckDB's errors as errors of llog. Resets the mirror if DuckDB itself has failed."""
        try:
            yield
        except (duckdb.InternalException, duckdb.FatalException) as error:
            self.reset()
            raise SqlError(f"DuckDB failed and was restarted: {error}", hint="try again") from error
        except DuckDBEnded as error:
            self.restart_if_ended()
            raise explain(error) from error
        except duckdb.Error as error:
            raise explain(error) from error
        except (UnicodeError, RuntimeError, OSError, pa.ArrowException) as error:  # from the Python layers
            raise SqlError(f"DuckDB does not accept the statement or one of its values: {error}") from error


def explain(error: Any) -> LlogError:
    """Return llog's error for one of DuckDB's.

    Its position refers to the text that DuckDB was given, which differs from the text that the caller wrote.
    """
    if isinstance(error, DuckDBEnded):
        return _worker_ended(error)
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
        return SqlMemoryExceeded(message.partition("\n")[0], hint=_LESS)
    if at is None:
        return SqlError(message, hint=hint)
    caret = " " * (len(at[3]) - len(f"LINE {at[1]}: ")) + "^"
    return SqlError(message, hint=hint, shown=f"\n  {at[2]}\n  {caret}")


def _worker_ended(error: DuckDBEnded) -> SqlWorkerEnded:
    if error.was_killed:
        return SqlWorkerEnded(
            "the process that runs SQL was killed to end another statement",
            hint="try again; the other statement ran longer than LLOG_SQL_TIMEOUT_MS, or was cancelled",
        )
    return SqlWorkerEnded("the process that runs SQL has ended; it may have needed too much memory", hint=_LESS)


def roll_back(cursor: DuckDBCursor) -> None:
    """Roll back the cursor's transaction, if it is still open."""
    try:
        cursor.end("ROLLBACK")
    except duckdb.Error:
        pass
