"""Creates, changes and queries tables. Calls block, and may come from any thread.

An INSERT of plain values or of Arrow columns goes straight to RocksDB, with rows, events and counters in one synced
WriteBatch. Everything else runs in DuckDB first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import pyarrow as pa

from llog.batch.columns import FEW
from llog.cdc.changes import Change, FewRows
from llog.cdc.events import Op
from llog.cdc.router import Router
from llog.engines.rocksdb.keys import ROWS
from llog.engines.rocksdb.logs import RocksLogs
from llog.engines.rocksdb.store import RocksStore
from llog.errors import ConstraintViolation, SqlError, TableExists, TransactionFailed
from llog.runtime import Runtime
from llog.sql.parse.statements import TableStatement
from llog.sql.tables.definitions import TableDefinition, TableStore
from llog.sql.tables.expressions import ExpressionEvaluator
from llog.sql.tables.mirror import Mirror
from llog.sql.tables.plans import Plan, plan_of
from llog.sql.tables.rows import Cells
from llog.sql.tables.transactions import ExecuteResult, TableSession, Transaction, TransactionContext, WriterLock
from llog.sql.tables.values import CellsByPlace, Defaults, from_arrow, from_values
from llog.sql.workers.duckdb_client import Params
from llog.sql.workers.duckdb_server import DuckDBOptions


class Tables:
    """The tables of one store."""

    def __init__(
        self,
        store: RocksStore,
        logs: RocksLogs,
        runtime: Runtime,
        *,
        options: DuckDBOptions | None = None,
        lock_timeout_s: float = 10.0,
        router: Router | None = None,
        plan: Callable[[TableStatement], Plan] = plan_of,
    ) -> None:
        self.store = store
        self._tables = TableStore(store)
        self._logs = logs
        self._mirror = Mirror(options or DuckDBOptions(), self._tables.pages)
        self.evaluator = ExpressionEvaluator(self._mirror, self._tables.definition)
        self.router = Router(store, runtime, self.evaluator) if router is None else router
        self._lock = WriterLock(runtime, lock_timeout_s)
        self._context = TransactionContext(self._tables, self._mirror, logs, self.router, self._lock, plan)
        self._defaults = Defaults(runtime, self._mirror.fetch_once)

    def close(self) -> None:
        self._mirror.close()

    def session(self, name: str = "") -> TableSession:
        return TableSession(self._mirror, name)

    def definitions(self) -> dict[str, TableDefinition]:
        """Return all definitions by name."""
        return self._tables.definitions()

    def definition(self, name: str) -> TableDefinition:
        """Return the definition, ignoring the case of the name. `TableNotFound` suggests similar names."""
        return self._tables.definition(name)

    def create(self, statement: TableStatement) -> bool:
        """Create a table. Returns False if it exists and the statement says IF NOT EXISTS."""
        name = _target(statement)
        with self.lock_writes(statement.kind):
            if self._tables.find(name) is not None:
                if statement.if_exists:
                    return False
                raise TableExists(f"table {name!r} exists already: drop it first, or write IF NOT EXISTS")
            with self._mirror.create_table(name, self._tables.next_number(), statement.sql) as definition:
                self._tables.add(definition)
            return True

    def drop(self, statement: TableStatement) -> bool:
        """Drop a table. Returns False if it does not exist and the statement says IF EXISTS."""
        name = _target(statement)
        with self.lock_writes(statement.kind):
            if statement.if_exists and self._tables.find(name) is None:
                return False
            definition = self._tables.definition(name)
            if any(self.router.has_routes(definition.name, op) for op in Op):
                raise SqlError(
                    f"table {definition.name!r} is the source of a topic",
                    hint="ALTER TOPIC … DROP SOURCE first; SHOW ROUTES lists the topics",
                )
            self._tables.remove(definition)
            self._mirror.drop_copy(definition)
            return True

    @contextmanager
    def lock_writes(self, what: str) -> Iterator[None]:
        """Hold the writer's lock, so that no transaction sees the block half done. Errors of others name `what`."""
        with self._lock.hold(what):
            yield

    def check_route(self, table: str, where: str | None, partition_by: str | None) -> None:
        """Raise `SqlError` unless the expressions can be evaluated for every row of the table."""
        self.evaluator.check(table, where, partition_by)

    def begin(self, session: TableSession) -> None:
        """Begin a transaction. Raises `TransactionConflict` if another transaction does not end in time."""
        if session.transaction is not None:
            raise SqlError("a transaction is open already", hint="COMMIT or ROLLBACK first")
        Transaction(self._context, session)

    def commit(self, session: TableSession) -> None:
        """Commit. If one of the statements has failed, rolls back and raises `TransactionFailed`."""
        self._open_transaction(session).commit()

    def rollback(self, session: TableSession) -> None:
        self._open_transaction(session).roll_back()

    def select(
        self,
        session: TableSession,
        statement: TableStatement,
        params: Params = None,
        extra: Mapping[str, pa.Table] | None = None,
    ) -> pa.Table:
        """Return the rows as of now, or as the session's transaction sees them. Only this statement sees `extra`."""
        if session.transaction is not None:
            return session.transaction.select(statement, params, extra or {})
        cursor = session.refresh_cursor([self._tables.definition(each) for each in statement.tables])
        return self._mirror.fetch(cursor, statement.sql, params, extra)

    def execute(
        self,
        session: TableSession,
        statement: TableStatement,
        params: Params = None,
        extra: Mapping[str, pa.Table] | None = None,
    ) -> ExecuteResult:
        """Run a bound INSERT, UPDATE or DELETE in the session's transaction, or else in one of its own."""
        if session.transaction is not None:
            return session.transaction.execute(statement, params, extra or {})
        if statement.values is not None and not (statement.conflict or statement.returning):
            with self._lock.hold(session.name):
                definition = self._tables.definition(_target(statement))
                if not definition.checked:
                    columns = from_values(definition, statement.columns, statement.values)
                    if columns is not None:
                        return ExecuteResult(self._append(definition, columns), None)
        transaction = Transaction(self._context, session)
        try:
            result = transaction.execute(statement, params, extra or {})
        except BaseException:
            transaction.roll_back()
            raise
        transaction.commit()
        return result

    def insert(self, session: TableSession, table: str, rows: pa.Table) -> int:
        """Insert Arrow columns by name and return the number of rows. Missing columns get their defaults.

        Values are cast only if the cast loses nothing.
        """
        transaction = session.transaction
        if transaction is not None:
            if transaction.failed:
                raise TransactionFailed("a statement of this transaction has failed: ROLLBACK and begin again")
            definition = self._tables.definition(table)
            if rows.num_rows:
                columns = self._defaults.fill(definition, from_arrow(definition, rows))
                transaction.insert(definition, definition.codec.table(columns))
            return int(rows.num_rows)
        with self._lock.hold(session.name):
            definition = self._tables.definition(table)
            if not definition.checked:
                named_columns = from_arrow(definition, rows)
                return self._append(definition, named_columns) if rows.num_rows else 0
        self.begin(session)
        try:
            count = self.insert(session, table, rows)
        except BaseException:
            self.rollback(session)
            raise
        self.commit(session)
        return count

    def _append(self, definition: TableDefinition, named_columns: CellsByPlace) -> int:
        """Insert new rows into RocksDB without DuckDB. The caller holds the writer's lock."""
        codec = definition.codec
        columns = self._defaults.fill(definition, named_columns)
        keys, values = codec.encode(columns, definition.prefix)
        if len(keys) > 1 and len(set(keys)) < len(keys):
            first = {key: place for place, key in reversed(list(enumerate(keys)))}
            raise _duplicate_key(
                definition, columns, next(place for place, key in enumerate(keys) if first[key] != place)
            )
        if not self._tables.has_no_rows_between(keys):
            for place, row in enumerate(self._tables.rows(keys)):
                if row is not None:
                    raise _duplicate_key(definition, columns, place)
        is_small = len(keys) <= FEW
        rows = (
            FewRows(dict(zip(codec.names, columns, strict=True)), lambda: codec.table(columns))
            if is_small
            else codec.table(columns)
        )
        with self._logs.stage() as staged:
            staged.changes.put_all(ROWS, keys, values)
            if self.router.has_routes(definition.name, Op.INSERT):
                self.router.add(staged, [Change(definition.shape, Op.INSERT, rows)])
            staged.commit(sync=True)
        if self._mirror.has_copy_of(definition):
            self._mirror.add_pending(definition, values if is_small else rows)
        return len(keys)

    def _open_transaction(self, session: TableSession) -> Transaction:
        if session.transaction is None:
            raise SqlError("no transaction is open", hint="BEGIN first")
        return session.transaction


def _target(statement: TableStatement) -> str:
    if statement.target is None:
        raise SqlError(f"{statement.kind} names no table")
    return statement.target


def _duplicate_key(definition: TableDefinition, columns: Sequence[Cells], place: int) -> ConstraintViolation:
    key = ", ".join(
        f"{name}: {columns[definition.codec.places[name.lower()]][place]}" for name in definition.primary_key
    )
    return ConstraintViolation(f"a row with primary key {key} is already in table {definition.name!r}")
