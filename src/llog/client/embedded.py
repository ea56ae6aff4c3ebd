"""The log of this process, for clients. RocksDB has one owner, so all of a process that name the same log share one
database.

It is opened by the first call and closed with the last one that uses it. A forked child begins anew.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa

from llog.api.portal import Connection
from llog.client.backend import Backend, Params
from llog.config import Settings
from llog.errors import StoreUnavailable
from llog.groups.acks import Acked
from llog.groups.consumption import ConsumeCall, Consuming
from llog.log.log import Log
from llog.sql.opening import open_database
from llog.sql.result import Names, Result

if TYPE_CHECKING:
    from llog.sql.database import Database
    from llog.sql.session import Session

R = TypeVar("R")


class _Parts:
    """What is made on an open log. Consuming does without the extra `sql`."""

    def __init__(self, log: Log, settings: Settings) -> None:
        self.consuming = Consuming(log)
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


class _Shared:
    def __init__(self, settings: Settings) -> None:
        self._connection = Connection(settings, lambda log: _Parts(log, settings))
        self._used = False
        self.users = 0

    def call(self, operation: Callable[[_Parts], Awaitable[R]]) -> R:
        self._used = True
        return self._connection.call(operation)

    def close(self) -> None:
        try:
            if self._used:
                self._connection.call(_Parts.close)
        finally:
            self._connection.close()


_mutex = threading.Lock()
_shared: dict[tuple[str, str | None], _Shared] = {}
"""By the metadata store, which names a log, and by the directory of RocksDB, which has one owner."""


def _taken(settings: Settings) -> _Shared:
    name = (settings.meta, settings.rocksdb_dir)
    with _mutex:
        found = _shared.get(name)
        if found is None or settings.meta.startswith("memory:"):
            found = _shared[name] = _Shared(settings)
        found.users += 1
        return found


def _given_back(shared: _Shared) -> None:
    with _mutex:
        shared.users -= 1
        if shared.users:
            return
        for name in [name for name, each in _shared.items() if each is shared]:
            del _shared[name]
        shared.close()  # inside, so that whoever opens the same log next finds it free


def _forget() -> None:
    global _mutex
    _mutex = threading.Lock()
    _shared.clear()


os.register_at_fork(after_in_child=_forget)


class EmbeddedBackend:
    """Whole calls, none of which sees another's transaction."""

    def __init__(self, shared: _Shared) -> None:
        self._shared = shared

    def execute(self, sql: str, params: Params = ()) -> list[Result]:
        return self._in_session(lambda session: session.execute(sql, params))

    def insert(self, table: str, rows: pa.Table | pa.RecordBatch) -> int:
        data = pa.Table.from_batches([rows]) if isinstance(rows, pa.RecordBatch) else rows
        return self._in_session(lambda session: session.insert(table, data)).changed

    def consume(self, call: ConsumeCall) -> pa.Table:
        return self._shared.call(lambda parts: parts.consuming.consume(call))

    def ack(self, topic: str, group: str, upto: Mapping[int | None, int], member: str = "") -> dict[int, Acked]:
        return self._shared.call(lambda parts: parts.consuming.ack(topic, group, upto, member))

    def release(self, topic: str, group: str, partition: int, offset: int, *, member: str, delay_ms: int = 0) -> None:
        self._shared.call(
            lambda parts: parts.consuming.release(topic, group, partition, offset, member=member, delay_ms=delay_ms)
        )

    def heartbeat(self, topic: str, group: str, member: str, *, visibility_ms: int) -> None:
        self._shared.call(lambda parts: parts.consuming.heartbeat(topic, group, member, visibility_ms=visibility_ms))

    def leave(self, topic: str, group: str, member: str) -> None:
        self._shared.call(lambda parts: parts.consuming.leave(topic, group, member))

    def close(self) -> None:
        """The session that it is of is what is closed."""

    def _in_session(self, operation: Callable[[Session], Awaitable[R]]) -> R:
        async def run(parts: _Parts) -> R:
            session = (await parts.database()).session()
            try:
                return await operation(session)
            finally:
                await session.close()

        return self._shared.call(run)


class EmbeddedSession:
    """See `SqlSession`."""

    is_remote = False

    def __init__(self, settings: Settings, *, member: str | None = None) -> None:
        self._settings = settings
        self._member = member
        self._statement = threading.Lock()
        self._taking = threading.Lock()
        self._pid = 0
        self._taken: _Shared | None = None
        self._session: Session | None = None
        self._turn = asyncio.Lock()
        """A statement that was cancelled may still be ending when the next one comes."""
        self._closed = False

    @property
    def in_transaction(self) -> bool:
        session = self._session
        return session is not None and self._pid == os.getpid() and session.in_transaction

    @property
    def backend(self) -> Backend:
        return EmbeddedBackend(self._log())

    def execute(self, sql: str, params: Sequence[Any] | Mapping[str, Any] = ()) -> list[Result]:
        return self._run(lambda session: session.execute(sql, params))

    def execute_many(self, sql: str, rows: Sequence[Sequence[Any]]) -> Result:
        return self._run(lambda session: session.execute_many(sql, rows))

    def insert(self, table: str, data: pa.Table) -> Result:
        return self._run(lambda session: session.insert(table, data))

    def names(self) -> Names:
        return self._run(lambda session: session.names())

    def close(self) -> None:
        with self._statement, self._taking:
            if self._closed:
                return
            self._closed = True
            taken, session = self._taken, self._session
            if taken is None or self._pid != os.getpid():
                return
            try:
                if session is not None:
                    taken.call(lambda _: self._ended(session))
            finally:
                _given_back(taken)

    async def _ended(self, session: Session) -> None:
        async with self._turn:
            await session.close()

    def _log(self) -> _Shared:
        with self._taking:
            if self._closed:
                raise StoreUnavailable("this connection is closed: make another one")
            if self._taken is None or self._pid != os.getpid():
                self._pid, self._session, self._turn = os.getpid(), None, asyncio.Lock()
                self._taken = _taken(self._settings)
            return self._taken

    def _run(self, operation: Callable[[Session], Awaitable[R]]) -> R:
        async def run(parts: _Parts) -> R:
            async with self._turn:
                if self._session is None:
                    self._session = (await parts.database()).session(member=self._member)
                return await operation(self._session)

        with self._statement:
            return self._log().call(run)
