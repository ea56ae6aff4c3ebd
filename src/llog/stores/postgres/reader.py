"""Reads of a PostgreSQL metadata store: a few connections, and one query for all keys that are requested at once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from llog.errors import StoreUnavailable
from llog.stores.meta import MetaEntry
from llog.stores.postgres.connections import (
    FAILURES,
    OPERATION_SECONDS,
    PAUSE_SECONDS_MIN,
    Connection,
    Identity,
    Server,
    is_answer,
)

CONNECTIONS_MAX: Final = 4
"""Connections for reads. Each runs one query at a time."""
KEYS_MAX: Final = 1000
"""Keys in one query."""


class _Query:
    """One query, and the future of its rows."""

    def __init__(self, sql: str, arguments: tuple[Any, ...]) -> None:
        loop = asyncio.get_running_loop()
        self.sql = sql
        self.arguments = arguments
        self.deadline = loop.time() + OPERATION_SECONDS
        self.rows: asyncio.Future[list[Any]] = loop.create_future()


class _Lookup(_Query):
    """One query for the keys of several callers, which grows until a connection takes it up."""

    def __init__(self, sql: str) -> None:
        self.keys: dict[str, asyncio.Future[MetaEntry | None]] = {}
        super().__init__(sql, ())
        self.rows.add_done_callback(self._deliver)

    def _deliver(self, rows: asyncio.Future[list[Any]]) -> None:
        error = rows.exception()
        found = {} if error is not None else {row[0]: row for row in rows.result()}
        for key, future in self.keys.items():
            if future.done():
                continue
            if error is not None:
                future.set_exception(error)
                future.exception()  # else asyncio logs the error if the caller was cancelled
            else:
                row = found.get(key.encode())
                future.set_result(None if row is None else entry_of(row))


class Reader:
    """The reads of one event loop. `on_answer` is called with the identity of the server for every answer."""

    def __init__(self, server: Server, on_answer: Callable[[Identity], None]) -> None:
        entries = f"{server.address.schema}.llog_entries"
        live = (
            f"(session IS NULL OR EXISTS (SELECT FROM {server.address.schema}.llog_sessions "
            "WHERE id = session AND expires > clock_timestamp()))"
        )
        columns = "SELECT key, value, version FROM"
        self._lookup = f"{columns} {entries} WHERE key = ANY($1) AND {live}"
        self._floor = f"{columns} {entries} WHERE key <= $1 AND {live} ORDER BY key DESC LIMIT 1"
        self._floors = (
            "SELECT found.key, found.value, found.version "
            "FROM unnest($1::bytea[]) WITH ORDINALITY AS wanted(bound, number) "
            f"LEFT JOIN LATERAL ({columns} {entries} WHERE key <= bound AND {live} ORDER BY key DESC LIMIT 1) AS found "
            "ON true ORDER BY number"
        )
        self._ceiling = f"{columns} {entries} WHERE key >= $1 AND {live} ORDER BY key LIMIT 1"
        self._range = f"{columns} {entries} WHERE key >= $1 AND key < $2 AND {live} ORDER BY key LIMIT $3"
        self._keys = f"SELECT key FROM {entries} WHERE key >= $1 AND key < $2 AND {live} ORDER BY key LIMIT $3"
        self._revision = f"SELECT revision FROM {server.address.schema}.llog_state"
        self._server = server
        self._on_answer = on_answer
        self._queue: deque[_Query] = deque()
        self._open_lookup: _Lookup | None = None
        self._connections: list[Connection] = []
        self._idle: list[Connection] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def get(self, key: str) -> MetaEntry | None:
        lookup = self._open_lookup
        if lookup is None or len(lookup.keys) >= KEYS_MAX:
            lookup = self._open_lookup = _Lookup(self._lookup)
            self._submit(lookup)
        future = lookup.keys.get(key)
        if future is None:
            future = lookup.keys[key] = asyncio.get_running_loop().create_future()
        return await asyncio.shield(future)  # another caller may wait for the same key

    async def get_many(self, keys: Sequence[str]) -> list[MetaEntry | None]:
        found: dict[bytes, Any] = {}
        encoded = [key.encode() for key in keys]
        for first in range(0, len(keys), KEYS_MAX):
            rows = await self._fetch(self._lookup, encoded[first : first + KEYS_MAX])
            found.update((row[0], row) for row in rows)
        return [entry_of(found[key]) if key in found else None for key in encoded]

    async def floor(self, key: str) -> MetaEntry | None:
        rows = await self._fetch(self._floor, key.encode())
        return entry_of(rows[0]) if rows else None

    async def floor_many(self, keys: Sequence[str]) -> list[MetaEntry | None]:
        rows = await self._fetch(self._floors, [key.encode() for key in keys])  # one query: one server, one snapshot
        return [None if row[0] is None else entry_of(row) for row in rows]

    async def ceiling(self, key: str) -> MetaEntry | None:
        rows = await self._fetch(self._ceiling, key.encode())
        return entry_of(rows[0]) if rows else None

    async def range(self, start: str, end: str, limit: int) -> list[MetaEntry]:
        return [entry_of(row) for row in await self._fetch(self._range, start.encode(), end.encode(), limit)]

    async def keys(self, start: str, end: str, limit: int) -> list[str]:
        return [key.decode() for (key,) in await self._fetch(self._keys, start.encode(), end.encode(), limit)]

    async def revision(self) -> int:
        """Return the number of the last committed change."""
        ((revision,),) = await self._fetch(self._revision)
        return int(revision)

    async def rows(self, sql: str, *arguments: Any) -> list[Any]:
        """Return the rows of any query that changes nothing."""
        return await self._fetch(sql, *arguments)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for query in self._queue:
            _fail(query, self._closed_error())
        self._queue.clear()
        await asyncio.gather(*(connection.close() for connection in self._connections))

    async def _fetch(self, sql: str, *arguments: Any) -> list[Any]:
        query = _Query(sql, arguments)
        self._submit(query)
        return await query.rows

    def _submit(self, query: _Query) -> None:
        self._queue.append(query)
        if not self._idle:
            if len(self._connections) == CONNECTIONS_MAX:
                return
            self._connections.append(Connection(self._server))
            self._idle.append(self._connections[-1])
        task = asyncio.get_running_loop().create_task(self._serve(self._idle.pop()))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, connection: Connection) -> None:
        while self._queue:
            query = self._queue.popleft()
            if query is self._open_lookup:
                self._open_lookup = None
            if isinstance(query, _Lookup):
                query.arguments = ([key.encode() for key in query.keys],)
            try:
                await self._answer(query, connection)
            except asyncio.CancelledError:
                connection.drop()
                _fail(query, self._closed_error())
                raise
        self._idle.append(connection)

    async def _answer(self, query: _Query, connection: Connection) -> None:
        """Run the query, and repeat it over another connection until its deadline: a read changes nothing."""
        loop = asyncio.get_running_loop()
        while not query.rows.done():
            try:
                opened = await connection.open(query.deadline)
                async with asyncio.timeout_at(query.deadline):
                    rows = await opened.client.fetch(query.sql, *query.arguments)
            except FAILURES as error:
                connection.drop()
                if is_answer(error) or loop.time() >= query.deadline:
                    _fail(query, self._server.unavailable(error))
                await asyncio.sleep(PAUSE_SECONDS_MIN)
            except Exception as error:
                # The error of a failed connection; and a defect of llog must reach the caller, not end the task.
                connection.drop()
                _fail(query, error)
            else:
                self._on_answer(opened.identity)
                if not query.rows.done():
                    query.rows.set_result(rows)

    def _closed_error(self) -> StoreUnavailable:
        return StoreUnavailable(f"{self._server.name} is closed: open another store")


def entry_of(row: Any) -> MetaEntry:
    key, value, version = row
    return MetaEntry(key.decode(), value, version)


def _fail(query: _Query, error: Exception) -> None:
    if not query.rows.done():
        query.rows.set_exception(error)
