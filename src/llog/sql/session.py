"""A session runs statements, one at a time: on tables, on topics of every engine, on what is known of both."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec
import pyarrow as pa

from llog.errors import InvalidArgument, SqlError
from llog.log.catalog import check_partition
from llog.sql.commands import descriptions
from llog.sql.parse import statements as sql
from llog.sql.parse.parameters import Params, bind, given_values, shares
from llog.sql.parse.parser import can_be_placed, place_of, placed, prepare
from llog.sql.result import Names, Result
from llog.sql.tables import transactions
from llog.sql.tables.definitions import with_schema
from llog.sql.threads import Use
from llog.sql.topic_tables import topic_table

if TYPE_CHECKING:
    from llog.sql.database import Database, Held

R = TypeVar("R")

_SMALL_CHARACTERS: Final = 4_096
_SMALL_ROWS: Final = 256
"""Texts and parameters up to here are taken apart on the loop: a thread costs more."""


class Session:
    """One statement at a time; a transaction belongs to its session. Close it: that rolls back what is open."""

    def __init__(self, database: Database, member: str) -> None:
        self._database = database
        self._topics = database.topics
        self._member = member
        self._table_session: transactions.TableSession | None = None
        self._lock = asyncio.Lock()

    @property
    def in_transaction(self) -> bool:
        return self._table_session is not None and self._table_session.in_transaction

    async def execute(self, text: str, params: Params = ()) -> list[Result]:
        """Runs the statements one after the other, and stops at the first that fails. Each takes its share of the
        parameters.

        A transaction that was begun here is rolled back if one of them fails, or the caller goes away: nobody could
        know that it is open, and it would keep all others from writing.
        """
        statements = await self._prepared(text)
        async with self._lock:
            was_open = self.in_transaction
            results: list[Result] = []
            try:
                for each, share in zip(statements, shares(statements, given_values(params)), strict=True):
                    results.append(await self._run(bind(each, share), share))
            except BaseException as error:
                if self.in_transaction and not was_open:
                    await self._transaction(sql.Rollback())
                if isinstance(error, SqlError):
                    raise await self._placed(text, len(results), error) from error.__cause__
                raise
            return results

    async def execute_many(self, text: str, rows: Sequence[Params]) -> Result:
        """One statement once for each of `rows`: as one change, if it is about tables; at once, if it is an INSERT of
        plain values.
        """
        statements = await self._prepared(text)
        if len(statements) != 1:
            raise InvalidArgument(f"one statement is run with many parameters, not {len(statements)}")
        [statement] = statements
        is_small = len(rows) <= _SMALL_ROWS
        rows = await self._apart(is_small, lambda: [given_values(row) for row in rows])
        bound = await self._apart(is_small, lambda: [bind(statement, row) for row in rows])
        async with self._lock:
            try:
                return await self._run_as_one(statement, bound, rows)
            except SqlError as error:
                raise await self._placed(text, 0, error) from error.__cause__

    async def _run_as_one(
        self, statement: sql.Statement, bound: Sequence[sql.Statement], rows: Sequence[Params]
    ) -> Result:
        if not isinstance(statement, sql.TableStatement) or not bound:
            return await self._run_all(bound, rows)
        if statement.values is not None:
            values = [row for each in bound if isinstance(each, sql.TableStatement) for row in each.values or ()]
            return await self._run(msgspec.structs.replace(statement, values=tuple(values)), ())
        if self.in_transaction:
            return await self._run_all(bound, rows)
        try:
            await self._transaction(sql.Begin())
            result = await self._run_all(bound, rows)
        except BaseException:
            if self.in_transaction:  # also if the caller went away while it was begun
                await self._transaction(sql.Rollback())
            raise
        await self._transaction(sql.Commit())
        return result

    async def _run_all(self, bound: Sequence[sql.Statement], rows: Sequence[Params]) -> Result:
        results = [await self._run(each, row) for each, row in zip(bound, rows, strict=True)]
        return Result(results[-1].kind if results else "", changed=sum(each.changed for each in results))

    async def insert(self, table: str, data: pa.Table) -> Result:
        """All rows or none, by the names of the columns. Without a schema, the table is in `main`."""
        async with self._lock:
            held, table_session = await self._tables()
            changed = await self._changing(
                lambda: held.tables.insert(table_session, with_schema(table), data), table_session
            )
            held.relay.poke()
            return Result("INSERT", changed=changed)

    async def names(self) -> Names:
        """What a statement may name."""
        held = self._database.known
        definitions = {} if held is None else held.tables.definitions()
        return Names(
            {name: tuple(column.name for column in each.columns) for name, each in definitions.items()},
            tuple(topic.name for topic in await self._database.catalog.topics()),
            tuple(await self._database.groups.names()),
        )

    async def close(self) -> None:
        table_session, self._table_session = self._table_session, None
        if table_session is not None:
            table_session.interrupt()
            async with self._lock:
                if table_session.in_transaction:
                    await self._database.threads.run(Use.TRANSACTION, table_session.close)
                else:  # nothing to wait for, so it need not stand in line
                    await asyncio.to_thread(table_session.close)

    async def _run(self, statement: sql.Statement, params: Params) -> Result:
        if self.in_transaction and not isinstance(
            statement, sql.TableStatement | sql.Commit | sql.Rollback | sql.Begin | sql.Show | sql.Describe
        ):
            raise SqlError(
                "a transaction is about tables only", hint="COMMIT or ROLLBACK first, then run statements about topics"
            )
        match statement:
            case sql.TableStatement():
                return await self._table_statement(statement, params)
            case sql.Begin() | sql.Commit() | sql.Rollback():
                return await self._transaction(statement)
            case sql.CreateTopic():
                return await self._topics.create(statement)
            case sql.DropTopic():
                return await self._drop_topic(statement)
            case sql.ClearTopic():
                return await self._topics.clear(statement)
            case sql.SetTopic():
                return await self._topics.set(statement)
            case sql.AddSource():
                await (await self._database.sources()).add(statement)
                return Result("ALTER TOPIC")
            case sql.DropSource():
                await (await self._database.sources()).drop(statement)
                return Result("ALTER TOPIC")
            case sql.SettleOutbox():
                return await self._settle(statement)
            case sql.Consume():
                try:
                    return await self._topics.consume(statement, self._member)
                except BaseException:
                    self._member = self._database.new_member()  # the old one may hold what it was never given
                    raise
            case sql.Ack():
                return await self._topics.ack(statement, self._member)
            case sql.ResetGroup():
                return await self._topics.reset(statement)
            case sql.InsertTopic():
                return await self._topics.insert(statement, await self._select(statement.select, params))
            case sql.Show():
                return Result("SHOW", await self._system(descriptions.SHOWN[statement.what]))
            case sql.Describe():
                return Result("DESCRIBE", await descriptions.describe(self._database, statement))

    async def _table_statement(self, statement: sql.TableStatement, params: Params) -> Result:
        if statement.kind == "SELECT":
            return Result("SELECT", await self._select(statement, params))
        extra = await self._extra(statement)
        held, table_session = await self._tables()
        tables = held.tables
        if statement.kind in ("CREATE TABLE", "DROP TABLE"):
            if table_session.in_transaction:
                raise SqlError(f"{statement.kind} cannot be part of a transaction", hint="COMMIT or ROLLBACK first")
            if statement.kind == "DROP TABLE":
                await self._database.sources()
            do = tables.create if statement.kind == "CREATE TABLE" else tables.drop
            await self._changing(lambda: do(statement), table_session)
            return Result(statement.kind)
        done = await self._changing(
            lambda: tables.execute(table_session, statement, params or None, extra), table_session
        )
        held.relay.poke()
        return Result(statement.kind, done.rows, done.count)

    async def _select(self, statement: sql.TableStatement, params: Params) -> pa.Table:
        extra = await self._extra(statement)
        threads = self._database.threads
        if not statement.tables:
            mirror = self._database.loose()
            return await threads.run(Use.QUERY, lambda: mirror.fetch_once(statement.sql, params or None, extra))
        held, table_session = await self._tables()
        use = Use.TRANSACTION if table_session.in_transaction else Use.QUERY
        return await threads.run(use, lambda: held.tables.select(table_session, statement, params or None, extra))

    async def _transaction(self, statement: sql.Begin | sql.Commit | sql.Rollback) -> Result:
        held, table_session = await self._tables()
        tables = held.tables
        match statement:
            case sql.Begin():
                await self._changing(lambda: tables.begin(table_session), table_session)
                return Result("BEGIN")
            case sql.Commit():
                await self._changing(lambda: tables.commit(table_session), table_session)
                held.relay.poke()
                return Result("COMMIT")
        await self._changing(lambda: tables.rollback(table_session), table_session)
        return Result("ROLLBACK")

    async def _drop_topic(self, statement: sql.DropTopic) -> Result:
        topic = await self._topics.drop(statement)
        held = self._database.known
        if topic is not None and held is not None:
            await held.sources.forget(topic)
        return Result("DROP TOPIC")

    async def _settle(self, statement: sql.SettleOutbox) -> Result:
        held = await self._database.held()
        topic = await self._database.catalog.get(statement.topic)
        assert isinstance(statement.partition, int)  # bound
        check_partition(topic, statement.partition)
        if not await held.relay.decide(topic.directory, statement.partition, appended=statement.appended):
            raise SqlError(
                f"no events for partition {statement.partition} of topic {topic.name!r} wait to be settled",
                hint="SHOW ROUTES has a problem where some do",
            )
        held.relay.poke()
        return Result("ALTER TOPIC")

    async def _extra(self, statement: sql.TableStatement) -> dict[str, pa.Table]:
        """The topics and system tables that a statement reads, under the names that it has for them."""
        database = self._database
        extra = {name: await self._system(table) for name, table in statement.system.items()}
        for name, topic in statement.topics.items():
            extra[name] = await topic_table(database.log, database.reader, topic)
        return extra

    async def _system(self, name: str) -> pa.Table:
        return await descriptions.system(self._database, name)

    async def _tables(self) -> tuple[Held, transactions.TableSession]:
        held = await self._database.held()
        if self._table_session is None:
            self._table_session = held.tables.session(self._member or "without a name")
        return held, self._table_session

    async def _changing(self, work: Callable[[], R], table_session: transactions.TableSession) -> R:
        use = Use.TRANSACTION if table_session.in_transaction else Use.CHANGE
        return await self._database.threads.run(use, work)

    async def _prepared(self, text: str) -> tuple[sql.Statement, ...]:
        return await self._apart(len(text) <= _SMALL_CHARACTERS, lambda: self._database.read(text, prepare, text))

    async def _placed(self, text: str, number: int, error: SqlError) -> SqlError:
        if not can_be_placed(error):
            return error
        said = str(error.__cause__)
        place = await self._apart(
            len(text) <= _SMALL_CHARACTERS, lambda: self._database.read(text, place_of, text, number, said)
        )
        return placed(text, place, error)

    async def _apart(self, is_small: bool, work: Callable[[], R]) -> R:
        """On a thread, unless it is done at once: others wait for the loop."""
        return work() if is_small else await self._database.threads.run(Use.QUERY, work)
