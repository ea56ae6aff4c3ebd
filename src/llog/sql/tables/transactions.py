"""Transactions: DuckDB runs the statements, and all rows that they changed are written to RocksDB together.

One transaction at a time changes tables. Its changes and their events are one WriteBatch, in the order of its
statements; a transaction that fails leaves nothing behind. DuckDB commits after RocksDB; if DuckDB's commit fails, the
mirror is loaded again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Final, NamedTuple

import duckdb
import msgspec
import pyarrow as pa

from llog.cdc.changes import Change
from llog.cdc.events import Op
from llog.cdc.router import Router
from llog.engines.rocksdb.keys import ROWS
from llog.engines.rocksdb.logs import RocksLogs
from llog.errors import ResultTooLarge, SqlError, TransactionConflict, TransactionFailed
from llog.runtime import Runtime
from llog.sql.parse.renderer import quote
from llog.sql.parse.statements import TableStatement
from llog.sql.tables.definitions import TableDefinition, TableStore
from llog.sql.tables.expressions import from_clause
from llog.sql.tables.mirror import Mirror, roll_back
from llog.sql.tables.plans import STAGED, Plan, Staging, batches, distinct_ranges, select_params
from llog.sql.workers.duckdb_client import DuckDBCursor, Params

_OPS: Final = {"INSERT": Op.INSERT, "UPDATE": Op.UPDATE, "DELETE": Op.DELETE}


class ExecuteResult(msgspec.Struct, frozen=True):
    count: int
    """The number of changed rows."""
    rows: pa.Table | None
    """The rows of RETURNING, if the statement has it."""


class WriterLock:
    """Lets one session at a time change tables. Not bound to a thread, since several may serve a session."""

    def __init__(self, runtime: Runtime, timeout_s: float) -> None:
        self._runtime = runtime
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._holder = ("", 0)

    def acquire(self, name: str) -> None:
        if not self._lock.acquire(timeout=self._timeout_s):
            holder, since_ms = self._holder
            raise TransactionConflict(
                f"session {name!r} waited {self._timeout_s:g} s to change tables: session {holder!r} has been doing so "
                f"for {(self._runtime.now_ms() - since_ms) / 1000:.1f} s. Try again when it has ended"
            )
        self._holder = (name, self._runtime.now_ms())

    def release(self) -> None:
        self._lock.release()

    def hold(self, name: str) -> AbstractContextManager[None]:
        return _HeldLock(self, name)


class _HeldLock:
    """A class rather than a generator because every INSERT uses it."""

    def __init__(self, lock: WriterLock, name: str) -> None:
        self._lock = lock
        self._name = name

    def __enter__(self) -> None:
        self._lock.acquire(self._name)

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class TableSession:
    """One caller's cursor and transaction. One thread at a time may use it; only `interrupt` may come from another."""

    def __init__(self, mirror: Mirror, name: str) -> None:
        self.name = name
        self._mirror = mirror
        self._cursor: DuckDBCursor | None = None
        self._generation = -1
        self.transaction: Transaction | None = None

    @property
    def in_transaction(self) -> bool:
        return self.transaction is not None

    def refresh_cursor(self, definitions: Sequence[TableDefinition]) -> DuckDBCursor:
        """Bring these tables up to date in the mirror, and return a cursor of it."""
        while True:
            generation = self._mirror.generation
            self._mirror.catch_up(definitions)
            cursor = self.cursor()
            if self._mirror.generation == generation:
                return cursor

    def cursor(self) -> DuckDBCursor:
        if self._cursor is None or self._generation != self._mirror.generation:
            self.drop_cursor()
            self._generation = self._mirror.generation
            self._cursor = self._mirror.cursor()
        return self._cursor

    def interrupt(self) -> None:
        """Make the running statement, if there is one, fail with `SqlError`."""
        cursor = self._cursor
        if cursor is not None:
            cursor.interrupt()

    def close(self) -> None:
        if self.transaction is not None:
            self.transaction.roll_back()
        self.drop_cursor()

    def drop_cursor(self) -> None:
        """Close the cursor with everything it holds; the next statement gets another one."""
        if self._cursor is not None:
            self._cursor.close()
            self._cursor = None


class TransactionContext(NamedTuple):
    """What every transaction works on."""

    tables: TableStore
    mirror: Mirror
    logs: RocksLogs
    router: Router
    lock: WriterLock
    plan: Callable[[TableStatement], Plan]
    """Calls `plans.plan_of`, in this process or in a worker."""


class Transaction:
    """Acquires the writer's lock when it begins, and releases it however it ends."""

    def __init__(self, context: TransactionContext, session: TableSession) -> None:
        context.lock.acquire(session.name)
        self._context = context
        self._session = session
        self._cursor: DuckDBCursor | None = None
        self._tick = 0
        self._generation = 0
        self._writes: dict[bytes, bytes | None] = {}
        self._touched: dict[int, TableDefinition] = {}
        self._changes: list[Change] = []
        self.failed = False
        """Whether one of its statements has failed."""
        session.transaction = self

    @contextmanager
    def _step(self) -> Iterator[None]:
        if self.failed:
            raise TransactionFailed("a statement of this transaction has failed: ROLLBACK and begin again")
        try:
            yield
        except BaseException:
            self.failed = True
            raise

    def select(self, statement: TableStatement, params: Params, extra: Mapping[str, pa.Table]) -> pa.Table:
        with self._step():
            cursor = self._cursor_in_transaction(map(self._context.tables.definition, statement.tables))
            return self._context.mirror.fetch(cursor, statement.sql, params, extra)

    def execute(self, statement: TableStatement, params: Params, extra: Mapping[str, pa.Table]) -> ExecuteResult:
        with self._step():
            definition = self._context.tables.definition(statement.target or "")
            plan = self._context.plan(statement)
            for name in plan.changed:
                if name in (each.lower() for each in definition.primary_key):
                    raise SqlError(
                        f"column {name!r} is in the primary key of table {definition.name!r}, which cannot be updated",
                        hint="DELETE the row and INSERT it anew",
                    )
            read = map(self._context.tables.definition, statement.tables)
            cursor = self._cursor_in_transaction({each.number: each for each in (definition, *read)}.values())
            changed, returned = 0, []
            with self._context.mirror.register(cursor, extra):
                for sql, values in self._steps(cursor, definition, statement, plan, params):
                    rows = self._context.mirror.fetch(cursor, sql, values)
                    rows = rows.rename_columns(definition.codec.names).cast(definition.codec.schema)
                    self._record(definition, _OPS[statement.kind], rows, may_exist=statement.conflict)
                    changed += rows.num_rows
                    if plan.returning is not None:
                        returned.append(self._returned_rows(cursor, definition, plan, rows))
            return ExecuteResult(changed, pa.concat_tables(returned) if returned else None)

    def _steps(
        self, cursor: DuckDBCursor, definition: TableDefinition, statement: TableStatement, plan: Plan, params: Params
    ) -> Iterator[tuple[str, Params]]:
        """Yield the statements to run, with their parameters. The caller runs each before it takes the next."""
        staging = plan.staging
        count = plan.rows if statement.values is None else len(statement.values)
        if staging is None or count == 1 or not (staging.updates or definition.checked):
            return batches(plan, statement.values, params)
        return self._staged_steps(cursor, definition, statement, staging, params)

    def _staged_steps(
        self,
        cursor: DuckDBCursor,
        definition: TableDefinition,
        statement: TableStatement,
        staging: Staging,
        params: Params,
    ) -> Iterator[tuple[str, Params]]:
        """Yield statements that upsert the rows in order, as if one by one: as many at once as have distinct keys."""
        columns = ", ".join(
            f"{quote(each.name)} {each.type}" + ("" if each.default is None else f" DEFAULT {each.default}")
            for each in definition.columns
        )
        key = ", ".join(map(quote, definition.primary_key))
        with self._context.mirror.translating_errors():
            cursor.do(f"CREATE TEMPORARY TABLE {STAGED} ({columns})")
            for sql, values in batches(staging.fill, statement.values, select_params(params, staging.fill.parameters)):
                cursor.do(sql, values)
        numbered = self._context.mirror.fetch(
            cursor, f"SELECT rowid, lag(rowid) OVER (PARTITION BY {key} ORDER BY rowid) FROM {STAGED} ORDER BY rowid"
        )
        rows, before = (column.to_pylist() for column in numbered.columns)
        if definition.checked:  # rows may also conflict in other columns
            before = [None, *rows][: len(rows)]
        head, tail = staging.apply
        for first, last in distinct_ranges(rows, before):
            yield f"{head}{first} AND {last}{tail}", select_params(params, staging.parameters)
        with self._context.mirror.translating_errors():
            cursor.do(f"DROP TABLE {STAGED}")

    def _returned_rows(self, cursor: DuckDBCursor, definition: TableDefinition, plan: Plan, rows: pa.Table) -> pa.Table:
        source = from_clause(definition, "llog_returned", plan.alias)
        sql = f"SELECT {plan.returning} FROM {source}"
        return self._context.mirror.fetch(cursor, sql, tables={"llog_returned": rows})

    def insert(self, definition: TableDefinition, rows: pa.Table) -> None:
        """Insert rows that have all columns of the table."""
        with self._step():
            cursor = self._cursor_in_transaction([definition])
            with self._context.mirror.translating_errors():
                self._context.mirror.insert(cursor, definition, rows)
            self._record(definition, Op.INSERT, rows, may_exist=False)

    def _cursor_in_transaction(self, definitions: Iterable[TableDefinition]) -> DuckDBCursor:
        """Return a cursor whose DuckDB transaction sees these tables and the changes so far."""
        mirror, wanted = self._context.mirror, list(definitions)
        mirror.restart_if_ended()
        if self._cursor is not None and all(mirror.sees(each, self._tick) for each in wanted):
            return self._cursor
        if self._cursor is not None:
            roll_back(self._cursor)
        waiting = self._context.tables.definitions_numbered(mirror.tables_with_pending_rows())
        self._generation = mirror.generation
        self._cursor = cursor = self._session.refresh_cursor([*wanted, *self._touched.values(), *waiting])
        self._tick = mirror.tick
        with mirror.translating_errors():
            cursor.do("BEGIN TRANSACTION")
            for definition in self._touched.values():
                self._replay(cursor, definition)
        return cursor

    def _replay(self, cursor: DuckDBCursor, definition: TableDefinition) -> None:
        """Apply the changes so far to a new DuckDB transaction."""
        writes = {key: row for key, row in self._writes.items() if key.startswith(definition.prefix)}
        old = [row for row in self._context.tables.rows(list(writes)) if row is not None]
        codec = definition.codec
        new = codec.decode([row for row in writes.values() if row is not None], definition.name)
        self._context.mirror.put(cursor, definition, new, codec.decode(old, definition.name))

    def _record(self, definition: TableDefinition, op: Op, rows: pa.Table, *, may_exist: bool) -> None:
        if rows.num_rows == 0:
            return
        keys, values = definition.codec.encode([each.combine_chunks() for each in rows.columns], definition.prefix)
        changes: list[Change]
        if op is Op.UPDATE:
            old = None
            if self._context.router.needs_old(definition.name):
                current = [row for row in self._current(keys) if row is not None]
                if len(current) < len(keys):
                    self._context.mirror.reset()
                    raise SqlError(
                        f"DuckDB had rows of table {definition.name!r} that no longer exist; the table was reloaded",
                        hint="try again",
                    )
                old = definition.codec.decode(current, definition.name)
            changes = [Change(definition.shape, op, rows, old)]
        elif op is Op.INSERT and may_exist:
            changes = self._split_upsert(definition, rows, self._current(keys))
        else:
            changes = [Change(definition.shape, op, rows)]
        if op is Op.DELETE:
            self._writes.update(dict.fromkeys(keys))
        else:
            self._writes.update(zip(keys, values, strict=True))
        rows_max = self._context.mirror.options.max_rows
        if len(self._writes) > rows_max:
            raise ResultTooLarge(f"the transaction changes more than {rows_max} rows: change fewer at a time")
        self._touched[definition.number] = definition
        self._changes += (each for each in changes if self._context.router.has_routes(definition.name, each.op))

    def _split_upsert(self, definition: TableDefinition, rows: pa.Table, current: list[bytes | None]) -> list[Change]:
        """Split an upsert into inserts and updates."""
        new = [place for place, row in enumerate(current) if row is None]
        existing = [place for place, row in enumerate(current) if row is not None]
        changes: list[Change] = []
        if new:
            changes.append(Change(definition.shape, Op.INSERT, rows.take(new)))
        if existing:
            old = definition.codec.decode([row for row in current if row is not None], definition.name)
            changes.append(Change(definition.shape, Op.UPDATE, rows.take(existing), old))
        return changes

    def _current(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the rows as this transaction sees them."""
        stored = iter(self._context.tables.rows([key for key in keys if key not in self._writes]))
        return [self._writes[key] if key in self._writes else next(stored) for key in keys]

    def commit(self) -> None:
        try:
            if self.failed:
                raise TransactionFailed("a statement of this transaction has failed: the transaction was rolled back")
            if self._writes:
                with self._context.logs.stage() as staged:
                    for key, row in self._writes.items():
                        if row is None:
                            staged.changes.delete(ROWS, key)
                        else:
                            staged.changes.put(ROWS, key, row)
                    if self._changes:
                        self._context.router.add(staged, self._changes)
                    staged.commit(sync=True)
        except BaseException:
            self.roll_back()
            raise
        try:
            if self._cursor is not None:
                self._cursor.end("COMMIT")
        except BaseException as error:
            self._context.mirror.reset()
            if not isinstance(error, duckdb.Error):
                raise
        else:
            if self._writes and self._generation != self._context.mirror.generation:
                self._context.mirror.reset()
        finally:
            self._end()

    def roll_back(self) -> None:
        try:
            if self._cursor is not None:
                roll_back(self._cursor)
                self._session.drop_cursor()
        finally:
            self._end()

    def _end(self) -> None:
        if self._session.transaction is self:
            self._session.transaction = None
            self._context.lock.release()
