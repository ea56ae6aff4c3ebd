"""DuckDB in memory: a copy of the tables that were asked for, loaded at their first use, that runs SQL.

The truth is in RocksDB. Rows that were written without DuckDB wait here until a statement reads their table. DuckDB is
in a worker process, whose memory is limited, and which is killed if a statement cannot be ended otherwise. If it is
damaged, or has ended, it is thrown away and loaded anew.
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
from llog.sql.parse.renderer import full_name, quoted
from llog.sql.tables.definitions import Column, TableDefinition, check_definition
from llog.sql.workers.duckdb_server import DuckDBOptions
from llog.sql.workers.engine import Engine, EngineCursor, EngineEnded, Params
from llog.sql.workers.jobs import JobStopped

_PENDING_ROWS_MAX: Final = 50_000
_AT: Final = re.compile(r"\n\nLINE (\d+): (.*)\n( *)\^", re.DOTALL)
_HINT: Final = re.compile(r"\n((?:Candidate|Did you mean)[^\n]*)")
_LESS: Final = "ask for less at a time, or set LLOG_SQL_MEMORY_MAX_BYTES higher"
_KIND: Final = re.compile(r"^[A-Z][A-Za-z]*(?: [A-Za-z]+)* Error: ")


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

    def __init__(self, options: DuckDBOptions, pages: Callable[[TableDefinition], Iterable[pa.Table]]) -> None:
        self.options = options
        self._pages = pages
        self._lock = threading.RLock()
        self._queue = threading.Lock()
        self._closed = False
        self.generation = 0
        self.tick = 0
        """Counts loads: a transaction that began before a load does not see it."""
        self._start()

    def _start(self) -> None:
        self._copies: dict[int, _Copy] = {}
        self._engine = Engine(self.options)
        self._own = self._engine.cursor()

    def cursor(self) -> EngineCursor:
        return self._engine.cursor()

    def reset(self) -> None:
        """Throws everything away. Statements that run go on with what they have."""
        with self._lock, self._queue:
            if self._closed:
                return
            engine = self._engine
            self._own.close()
            self.generation += 1
            self._start()
            engine.retire()

    def close(self) -> None:
        with self._queue:
            self._closed = True
        self._engine.close()

    def replace_ended(self) -> None:
        """Begins anew if the worker has died, or was killed."""
        if self._engine.has_ended:
            with self._lock:
                if self._engine.has_ended:  # nobody else did it meanwhile
                    self.reset()

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
            except (LlogError, JobStopped):
                pass  # the rows are written, and the next reader inserts or loads them

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
        self.replace_ended()
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
        except JobStopped:
            raise
        except BaseException as error:
            if not isinstance(error.__cause__, duckdb.InterruptException):
                self.reset()
            raise
        with self._queue:  # only now: who finds nothing pending reads at once
            del copy.pending[:count]
            copy.pending_rows -= rows.num_rows

    def put(self, cursor: EngineCursor, definition: TableDefinition, rows: pa.Table, gone: pa.Table) -> None:
        """Brings `rows` into a table and takes those with the keys of `gone` out, in the cursor's transaction."""
        same = " AND ".join(f"t.{quoted(each)} = g.{quoted(each)}" for each in definition.primary_key)
        sql = f"DELETE FROM {full_name(definition.name)} t USING llog_gone g WHERE {same}"
        cursor.do(sql, tables={"llog_gone": gone})
        self.insert(cursor, definition, rows, "INSERT OR REPLACE")

    def insert(self, cursor: EngineCursor, definition: TableDefinition, rows: pa.Table, how: str = "INSERT") -> None:
        cursor.do(f"{how} INTO {full_name(definition.name)} SELECT * FROM llog_rows", tables={"llog_rows": rows})

    @contextmanager
    def creating(self, name: str, number: int, sql: str) -> Iterator[TableDefinition]:
        """Runs CREATE TABLE and gives the checked definition; the table stays unless the block fails."""
        with self._lock:
            with self.explained():
                self._make_schema(name)
                self._own.do("BEGIN TRANSACTION")
            try:
                with self.explained():
                    # a query that began before an older table of the name was dropped may have loaded it again
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
                self._copies[number] = _Copy(self.tick)

    def forget(self, definition: TableDefinition) -> None:
        """The table was dropped."""
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
            self._own.do(f"CREATE SCHEMA IF NOT EXISTS {quoted(schema)}")

    def _read_definition(self, name: str, number: int) -> TableDefinition:
        schema, _, table = name.rpartition(".")
        where = "database_name = 'memory' AND lower(schema_name) = lower(?) AND lower(table_name) = lower(?)"
        names = [schema or "main", table]

        def found(chosen: str, end: str = "") -> list[tuple[Any, ...]]:
            rows = self._own.run(f"SELECT {chosen} WHERE {where} {end}", names)
            return list(zip(*(column.to_pylist() for column in rows.columns), strict=True))

        ddls = found("sql FROM duckdb_tables()")
        if len(ddls) != 1:
            raise SqlError(
                f"the statement did not create table {name!r}", hint="write CREATE TABLE name (column type, …)"
            )
        ddl = ddls[0][0]
        columns = found(
            "column_name, data_type, is_nullable, column_default FROM duckdb_columns()", "ORDER BY column_index"
        )
        rules = found("constraint_type, constraint_column_names FROM duckdb_constraints()")
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

    def fetch(
        self, cursor: EngineCursor, sql: str, params: Params = None, tables: Mapping[str, pa.Table] | None = None
    ) -> pa.Table:
        """Runs a statement and gives its rows; `ResultTooLarge` if they are more than the options allow."""
        with self.explained():
            return cursor.run(sql, params, tables)

    def fetch_once(self, sql: str, params: Params = None, tables: Mapping[str, pa.Table] | None = None) -> pa.Table:
        """As `fetch`, outside of all transactions."""
        self.replace_ended()
        with closing(self.cursor()) as cursor:
            return self.fetch(cursor, sql, params, tables)

    @contextmanager
    def registered(self, cursor: EngineCursor, tables: Mapping[str, pa.Table]) -> Iterator[None]:
        """Tables that all statements of the block know."""
        with ExitStack() as stack:
            with self.explained():
                stack.enter_context(cursor.registered(tables))
            yield

    @contextmanager
    def explained(self) -> Iterator[None]:
        """What DuckDB says, as errors of llog."""
        try:
            yield
        except (duckdb.InternalException, duckdb.FatalException) as error:
            self.reset()
            raise SqlError(f"DuckDB failed, and was started anew: {error}", hint="try again") from error
        except EngineEnded as error:
            self.replace_ended()
            raise explain(error) from error
        except duckdb.Error as error:
            raise explain(error) from error
        except (UnicodeError, RuntimeError, OSError, pa.ArrowException) as error:  # what Python's layers raise
            raise SqlError(f"DuckDB cannot take the statement or one of its values: {error}") from error


def explain(error: Any) -> LlogError:
    """The error of llog for one of DuckDB. It shows where in the text that DuckDB was given, which is not the text as
    it was written.
    """
    if isinstance(error, EngineEnded):
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


def _worker_ended(error: EngineEnded) -> SqlWorkerEnded:
    if error.killed:
        said = "the process that runs SQL was ended, since a statement did not end when its time was over"
        return SqlWorkerEnded(
            said, hint="try again; that statement ran longer than LLOG_SQL_TIMEOUT_MS, or was cancelled"
        )
    return SqlWorkerEnded("the process that runs SQL has ended; it may have needed too much memory", hint=_LESS)


def roll_back(cursor: EngineCursor) -> None:
    """Ends a transaction, if there is one still."""
    try:
        cursor.end("ROLLBACK")
    except duckdb.Error:
        pass
