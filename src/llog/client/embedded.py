"""Clients on a log that this process opens. RocksDB has one owner, so clients of a process that name the same log share
one database.

The first call opens the log, and closing its last client closes it. A forked child opens it again.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa

from llog.api.portal import LogPortal
from llog.client.backend import Backend, Params
from llog.config import Settings
from llog.errors import StoreUnavailable
from llog.groups.acks import AckResult
from llog.groups.dispatcher import Dispatcher
from llog.groups.options import ConsumeOptions
from llog.log.log import Log
from llog.sql.opening import open_database
from llog.sql.result import Names, Result

if TYPE_CHECKING:
    from llog.sql.database import Database
    from llog.sql.session import DatabaseSession

R = TypeVar("R")


class _OpenLog:
    """What clients use on an open log. The database is opened when first needed: consuming works without the extra
    `sql`.
    """

    def __init__(self, log: Log, settings: Settings) -> None:
        self.dispatcher = Dispatcher(log)
        self._log = log
        self._settings = settings
        self._opening = asyncio.Lock()
        self._database: Database | None = None

    async def database(self) -> Database:
        async with self._opening:
            if self._database is None:
                self._database = await open_database(self._log, self._settings)
            return self._database

    async def close(self) -> None:
        async with self._opening:
            if self._database is not None:
                await self._database.close()
                self._database = None


class _SharedLog:
    """One log, and how many clients use it."""

    def __init__(self, settings: Settings) -> None:
        self._portal = LogPortal(settings, lambda log: _OpenLog(log, settings))
        self._used = False
        self.users = 0

    def call(self, operation: Callable[[_OpenLog], Awaitable[R]]) -> R:
        self._used = True
        return self._portal.call(operation)

    def close(self) -> None:
        try:
            if self._used:
                self._portal.call(_OpenLog.close)
        finally:
            self._portal.close()


_mutex = threading.Lock()
_shared_logs: dict[tuple[str, str | None], _SharedLog] = {}
"""By metadata store, which identifies a log, and directory of RocksDB, which has one owner."""


def _acquire_log(settings: Settings) -> _SharedLog:
    name = (settings.meta, settings.rocksdb_dir)
    with _mutex:
        found = _shared_logs.get(name)
        if found is None or settings.meta.startswith("memory:"):
            found = _shared_logs[name] = _SharedLog(settings)
        found.users += 1
        return found


def _release_log(shared: _SharedLog) -> None:
    with _mutex:
        shared.users -= 1
        if shared.users:
            return
        for name in [name for name, each in _shared_logs.items() if each is shared]:
            del _shared_logs[name]
        shared.close()  # with the mutex, so that the next client can open the same log


def _forget_after_fork() -> None:
    global _mutex
    _mutex = threading.Lock()
    _shared_logs.clear()


os.register_at_fork(after_in_child=_forget_after_fork)


class EmbeddedBackend:
    """See `Backend`. Each call has a session of its own, so that no call sees another's transaction."""

    def __init__(self, shared: _SharedLog) -> None:
        self._log = shared

    def execute(self, sql: str, params: Params = ()) -> list[Result]:
        return self._in_session(lambda session: session.execute(sql, params))

    def insert(self, table: str, rows: pa.Table | pa.RecordBatch) -> int:
        data = pa.Table.from_batches([rows]) if isinstance(rows, pa.RecordBatch) else rows
        return self._in_session(lambda session: session.insert(table, data)).changed

    def consume(self, options: ConsumeOptions) -> pa.Table:
        return self._log.call(lambda log: log.dispatcher.consume(options))

    def ack(self, topic: str, group: str, upto: Mapping[int | None, int], member: str = "") -> dict[int, AckResult]:
        return self._log.call(lambda log: log.dispatcher.ack(topic, group, upto, member))

    def release(self, topic: str, group: str, partition: int, offset: int, *, member: str, delay_ms: int = 0) -> None:
        self._log.call(
            lambda log: log.dispatcher.release(topic, group, partition, offset, member=member, delay_ms=delay_ms)
        )

    def heartbeat(self, topic: str, group: str, member: str, *, visibility_ms: int) -> None:
        self._log.call(lambda log: log.dispatcher.heartbeat(topic, group, member, visibility_ms=visibility_ms))

    def leave(self, topic: str, group: str, member: str) -> None:
        self._log.call(lambda log: log.dispatcher.leave(topic, group, member))

    def close(self) -> None:
        """Do nothing: closing the session that this backend belongs to closes the log."""

    def _in_session(self, operation: Callable[[DatabaseSession], Awaitable[R]]) -> R:
        async def run(log: _OpenLog) -> R:
            session = (await log.database()).session()
            try:
                return await operation(session)
            finally:
                await session.close()

        return self._log.call(run)


class EmbeddedSession:
    """See `SqlSession`."""

    is_remote = False

    def __init__(self, settings: Settings, *, member: str | None = None) -> None:
        self._settings = settings
        self._member = member
        self._statement = threading.Lock()
        self._acquiring = threading.Lock()
        self._pid = 0
        self._shared: _SharedLog | None = None
        self._session: DatabaseSession | None = None
        self._turn = asyncio.Lock()
        """Held while a statement runs: a cancelled statement may still be ending when the next one begins."""
        self._closed = False

    @property
    def in_transaction(self) -> bool:
        session = self._session
        return session is not None and self._pid == os.getpid() and session.in_transaction

    @property
    def backend(self) -> Backend:
        return EmbeddedBackend(self._acquire())

    def execute(self, sql: str, params: Sequence[Any] | Mapping[str, Any] = ()) -> list[Result]:
        return self._run(lambda session: session.execute(sql, params))

    def execute_many(self, sql: str, rows: Sequence[Sequence[Any]]) -> Result:
        return self._run(lambda session: session.execute_many(sql, rows))

    def insert(self, table: str, data: pa.Table) -> Result:
        return self._run(lambda session: session.insert(table, data))

    def names(self) -> Names:
        return self._run(lambda session: session.names())

    def close(self) -> None:
        with self._statement, self._acquiring:
            if self._closed:
                return
            self._closed = True
            shared, session = self._shared, self._session
            if shared is None or self._pid != os.getpid():
                return
            try:
                if session is not None:
                    shared.call(lambda _: self._close_session(session))
            finally:
                _release_log(shared)

    async def _close_session(self, session: DatabaseSession) -> None:
        async with self._turn:
            await session.close()

    def _acquire(self) -> _SharedLog:
        with self._acquiring:
            if self._closed:
                raise StoreUnavailable("this connection is closed: make another one")
            if self._shared is None or self._pid != os.getpid():
                self._pid, self._session, self._turn = os.getpid(), None, asyncio.Lock()
                self._shared = _acquire_log(self._settings)
            return self._shared

    def _run(self, operation: Callable[[DatabaseSession], Awaitable[R]]) -> R:
        async def run(log: _OpenLog) -> R:
            async with self._turn:
                if self._session is None:
                    self._session = (await log.database()).session(member=self._member)
                return await operation(self._session)

        with self._statement:
            return self._acquire().call(run)
