"""A session runs statements, one at a time: on tables, on topics of every engine, on what is known of both."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec
import pyarrow as pa

from llog.errors import InvalidArgument, SqlError
from llog.sql.commands.registry import command_of
from llog.sql.commands.transactions import Begin, Commit, Rollback
from llog.sql.parse.parameters import Params, bind, given_values, shares
from llog.sql.parse.renderer import with_schema
from llog.sql.parse.statements import Statement, TableStatement
from llog.sql.parser import error_position, lacks_position, prepare, with_position
from llog.sql.result import Names, Result
from llog.sql.tables.transactions import TableSession
from llog.sql.threads import Use

if TYPE_CHECKING:
    from llog.sql.database import Database, OpenTables

R = TypeVar("R")

_SMALL_CHARACTERS: Final = 4_096
_SMALL_ROWS: Final = 256
"""Texts and parameters up to here are parsed on the event loop: a thread costs more."""


class Session:
    """Runs one statement at a time; a transaction belongs to its session. `close` rolls back an open transaction.

    `member` is the name that CONSUME and ACK go by in consumer groups, unless the statement names another.
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
        """Runs the statements one after the other, and stops at the first that fails.

        Each statement takes its share of the parameters. A transaction that was begun here is rolled back if one of
        them fails, or the caller goes away: nobody could know that it is open, and it would keep all others from
        writing.
        """
        statements = await self._prepare(text)
        async with self._lock:
            was_open = self.in_transaction
            results: list[Result] = []
            try:
                for each, share in zip(statements, shares(statements, given_values(params)), strict=True):
                    results.append(await self._run(bind(each, share), share))
            except BaseException as error:
                if self.in_transaction and not was_open:
                    await self._run(Rollback(), ())
                if isinstance(error, SqlError):
                    raise await self._with_position(text, len(results), error) from error.__cause__
                raise
            return results

    async def execute_many(self, text: str, rows: Sequence[Params]) -> Result:
        """Runs one statement once for each of `rows`.

        A statement on tables is one change, and an INSERT of plain values is done at once.
        """
        statements = await self._prepare(text)
        if len(statements) != 1:
            raise InvalidArgument(f"one statement is run with many parameters, not {len(statements)}")
        [statement] = statements
        is_small = len(rows) <= _SMALL_ROWS
        rows = await self._off_loop(is_small, lambda: [given_values(row) for row in rows])
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
            if self.in_transaction:  # also if the caller went away while it was begun
                await self._run(Rollback(), ())
            raise
        await self._run(Commit(), ())
        return result

    async def _run_all(self, bound: Sequence[Statement], rows: Sequence[Params]) -> Result:
        results = [await self._run(each, row) for each, row in zip(bound, rows, strict=True)]
        return Result(results[-1].kind if results else "", changed=sum(each.changed for each in results))

    async def insert(self, table: str, data: pa.Table) -> Result:
        """Inserts all rows or none, by the names of the columns. Without a schema, the table is in `main`."""
        async with self._lock:
            opened, table_session = await self.tables()
            changed = await self.change(lambda: opened.tables.insert(table_session, with_schema(table), data))
            opened.relay.poke()
            return Result("INSERT", changed=changed)

    async def names(self) -> Names:
        """The tables, topics and groups that a statement may name."""
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
                    await self.database.threads.run(Use.TRANSACTION, table_session.close)
                else:  # nothing to wait for, so it need not stand in line
                    await asyncio.to_thread(table_session.close)

    async def tables(self) -> tuple[OpenTables, TableSession]:
        """For commands: the tables, opened if need be, and this session on them."""
        opened = await self.database.require_tables()
        if self._table_session is None:
            self._table_session = opened.tables.session(self.member or "without a name")
        return opened, self._table_session

    async def change(self, work: Callable[[], R]) -> R:
        """For commands: calls what changes tables on a thread that may wait for the writer's lock, or has it."""
        use = Use.TRANSACTION if self.in_transaction else Use.CHANGE
        return await self.database.threads.run(use, work)

    def change_member(self) -> None:
        """For commands: goes on under a new name in consumer groups."""
        self.member = self.database.new_member()

    async def _run(self, statement: Statement, params: Params) -> Result:
        command = command_of(statement)
        if self.in_transaction and not command.runs_in_transaction:
            raise SqlError(
                "a transaction is about tables only", hint="COMMIT or ROLLBACK first, then run statements about topics"
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
        """Calls what takes long on a thread, for others wait for the event loop; what is small, at once."""
        return work() if is_small else await self.database.threads.run(Use.QUERY, work)
