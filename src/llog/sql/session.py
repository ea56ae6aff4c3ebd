"""Sessions, which run statements one at a time: on tables, and on topics of every engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec
import pyarrow as pa

from llog.errors import InvalidArgument, SqlError
from llog.sql.commands.registry import command_of
from llog.sql.commands.transactions import Begin, Commit, Rollback
from llog.sql.parse.parameters import Params, bind, normalize_params, split_params
from llog.sql.parse.renderer import with_schema
from llog.sql.parse.statements import Statement, TableStatement
from llog.sql.parser import error_position, lacks_position, prepare, with_position
from llog.sql.result import Names, Result
from llog.sql.tables.transactions import TableSession
from llog.sql.workers.thread_pools import Pool

if TYPE_CHECKING:
    from llog.sql.database import Database, OpenTables

R = TypeVar("R")

_SMALL_CHARACTERS: Final = 4_096
_SMALL_ROWS: Final = 256
"""Texts and parameters up to these sizes are parsed on the event loop, where a thread would cost more."""


class DatabaseSession:
    """Runs one statement at a time, and has at most one transaction, which `close` rolls back.

    `member` is the session's name in consumer groups, unless a CONSUME or ACK names another.
    """

    def __init__(self, database: Database, member: str) -> None:
        self.database = database
        self.member = member
        self._table_session: TableSession | None = None
        self._lock = asyncio.Lock()

    @property
    def in_transaction(self) -> bool:
        return self._table_session is not None and self._table_session.in_transaction

    async def execute(self, text: str, params: Params = ()) -> list[Result]:
        """Run the statements one after the other, and stop at the first that fails.

        Each statement takes its share of the parameters. If a statement fails or the caller is cancelled, a transaction
        that the text has begun is rolled back: the caller may not know that it is open, and it would block all other
        writers.
        """
        statements = await self._prepare(text)
        async with self._lock:
            was_open = self.in_transaction
            results: list[Result] = []
            try:
                for each, its_params in zip(
                    statements, split_params(statements, normalize_params(params)), strict=True
                ):
                    results.append(await self._run(bind(each, its_params), its_params))
            except BaseException as error:
                if self.in_transaction and not was_open:
                    await self._run(Rollback(), ())
                if isinstance(error, SqlError):
                    raise await self._with_position(text, len(results), error) from error.__cause__
                raise
            return results

    async def execute_many(self, text: str, rows: Sequence[Params]) -> Result:
        """Run one statement once for each of `rows`.

        A statement on tables is one transaction, and the rows of an INSERT of plain values are inserted together.
        """
        statements = await self._prepare(text)
        if len(statements) != 1:
            raise InvalidArgument(f"expected one statement to run with many rows of parameters, not {len(statements)}")
        [statement] = statements
        is_small = len(rows) <= _SMALL_ROWS
        rows = await self._off_loop(is_small, lambda: [normalize_params(row) for row in rows])
        bound = await self._off_loop(is_small, lambda: [bind(statement, row) for row in rows])
        async with self._lock:
            try:
                return await self._run_as_one(statement, bound, rows)
            except SqlError as error:
                raise await self._with_position(text, 0, error) from error.__cause__

    async def _run_as_one(self, statement: Statement, bound: Sequence[Statement], rows: Sequence[Params]) -> Result:
        if not isinstance(statement, TableStatement) or not bound:
            return await self._run_all(bound, rows)
        if statement.values is not None:
            values = [row for each in bound if isinstance(each, TableStatement) for row in each.values or ()]
            return await self._run(msgspec.structs.replace(statement, values=tuple(values)), ())
        if self.in_transaction:
            return await self._run_all(bound, rows)
        try:
            await self._run(Begin(), ())
            result = await self._run_all(bound, rows)
        except BaseException:
            if self.in_transaction:  # also if the caller was cancelled during BEGIN
                await self._run(Rollback(), ())
            raise
        await self._run(Commit(), ())
        return result

    async def _run_all(self, bound: Sequence[Statement], rows: Sequence[Params]) -> Result:
        results = [await self._run(each, row) for each, row in zip(bound, rows, strict=True)]
        return Result(results[-1].kind if results else "", changed=sum(each.changed for each in results))

    async def insert(self, table: str, data: pa.Table) -> Result:
        """Insert all rows or none, by the names of the columns. Without a schema, the table is in `main`."""
        async with self._lock:
            opened, table_session = await self.tables()
            changed = await self.change(lambda: opened.tables.insert(table_session, with_schema(table), data))
            opened.relay.poke()
            return Result("INSERT", changed=changed)

    async def names(self) -> Names:
        """Return the tables, topics and groups that a statement may name."""
        opened = self.database.open_tables
        definitions = {} if opened is None else opened.tables.definitions()
        return Names(
            {name: tuple(column.name for column in each.columns) for name, each in definitions.items()},
            tuple(topic.name for topic in await self.database.catalog.topics()),
            tuple(await self.database.groups.names()),
        )

    async def close(self) -> None:
        table_session, self._table_session = self._table_session, None
        if table_session is not None:
            table_session.interrupt()
            async with self._lock:
                if table_session.in_transaction:
                    await self.database.threads.run(Pool.TRANSACTION, table_session.close)
                else:  # closing waits for no lock, so it needs no thread of a pool
                    await asyncio.to_thread(table_session.close)

    async def tables(self) -> tuple[OpenTables, TableSession]:
        """Return the tables, opened if need be, and this session's part on them. For commands."""
        opened = await self.database.require_tables()
        if self._table_session is None:
            self._table_session = opened.tables.session(self.member or "without a name")
        return opened, self._table_session

    async def change(self, work: Callable[[], R]) -> R:
        """Call a function that changes tables, on a thread that may wait for the writer's lock or holds it.

        For commands.
        """
        pool = Pool.TRANSACTION if self.in_transaction else Pool.CHANGE
        return await self.database.threads.run(pool, work)

    def change_member(self) -> None:
        """Continue under a new name in consumer groups. For commands."""
        self.member = self.database.new_member()

    async def _run(self, statement: Statement, params: Params) -> Result:
        command = command_of(statement)
        if self.in_transaction and not command.runs_in_transaction:
            raise SqlError(
                "a transaction can only use tables", hint="COMMIT or ROLLBACK first, then run statements on topics"
            )
        return await command.run(self, statement, params)

    async def _prepare(self, text: str) -> tuple[Statement, ...]:
        return await self._off_loop(len(text) <= _SMALL_CHARACTERS, lambda: self.database.parse(text, prepare, text))

    async def _with_position(self, text: str, number: int, error: SqlError) -> SqlError:
        if not lacks_position(error):
            return error
        message = str(error.__cause__)
        position = await self._off_loop(
            len(text) <= _SMALL_CHARACTERS,
            lambda: self.database.parse(text, error_position, text, number, message),
        )
        return with_position(text, position, error)

    async def _off_loop(self, is_small: bool, work: Callable[[], R]) -> R:
        """Call `work` at once if it is small, else on a thread, so that it does not block the event loop."""
        return work() if is_small else await self.database.threads.run(Pool.QUERY, work)
