"""The embedded metadata store: one SQLite file, several processes of one machine.

Writes go through one thread (`writer`). Reads run on the caller's event loop: a lookup takes microseconds, less than
handing it to a thread, and in WAL mode no writer blocks it. A long range yields to the event loop every few rows.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, TypeVar, TypeVarTuple
from weakref import WeakSet

from llog.base.durable import OpenedFile, check_writable
from llog.errors import InvalidArgument, StoreUnavailable, VersionMismatch
from llog.stores.counting import OperationCounts
from llog.stores.meta import FreshReads, MetaEntry, Put, check_bounds, check_puts, check_size
from llog.stores.sqlite.file import BUSY_SECONDS, connect, is_locked, open_or_create, unavailable
from llog.stores.sqlite.transaction import Transaction
from llog.stores.sqlite.watches import SqliteWatch, Watches
from llog.stores.sqlite.writer import Writer

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

SLICE_ROWS_FIRST: Final = 32
SLICE_ROWS: Final = 256
SLICE_BYTES: Final = 1 << 20
"""How much a range reads before it yields to the event loop."""
_BUSY_PAUSE_SECONDS: Final = 0.005

_LIVE: Final = "(session IS NULL OR EXISTS (SELECT 1 FROM sessions WHERE id = session AND expires_ms > ?))"
_GET: Final = f"SELECT key, value, version FROM entries WHERE key = ? AND {_LIVE}"
_FLOOR: Final = f"SELECT key, value, version FROM entries WHERE key <= ? AND {_LIVE} ORDER BY key DESC LIMIT 1"
_CEILING: Final = f"SELECT key, value, version FROM entries WHERE key >= ? AND {_LIVE} ORDER BY key LIMIT 1"
_RANGE: Final = f"SELECT key, value, version FROM entries WHERE key >= ? AND key < ? AND {_LIVE} ORDER BY key LIMIT ?"
_KEYS: Final = f"SELECT key FROM entries WHERE key >= ? AND key < ? AND {_LIVE} ORDER BY key LIMIT ?"


class SqliteMetaStore:
    """`open` checks or creates the file. The first call connects, in the process of that call."""

    def __init__(self, file: OpenedFile, session_timeout_ms: int) -> None:
        self.counts = OperationCounts()
        self._file = file
        self._path = file.path
        self._session_timeout_ms = session_timeout_ms
        self._closed = False
        self._writer: Writer | None = None
        self._starting = threading.Lock()
        self._idle: list[sqlite3.Connection] = []
        self._busy: set[sqlite3.Connection] = set()
        self._reading = threading.Lock()
        """Held while a connection for reads is in use, taken or given back."""
        self._watches = self._new_watches()
        _stores.add(self)

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, session_timeout_ms: int = 10_000) -> SqliteMetaStore:
        """Open the store in this file, which is created if need be.

        Raises `WrongStore` if the file is not llog's or a newer llog wrote it, and `StoreUnavailable` if it cannot be
        opened.
        """
        if session_timeout_ms < 1:
            raise InvalidArgument(f"session_timeout_ms is {session_timeout_ms}: it must be 1 or more")
        resolved = Path(os.path.abspath(path))
        return cls(open_or_create(resolved), session_timeout_ms)

    @property
    def commits(self) -> int:
        """The number of transactions of this process that changed something. Each cost one fsync."""
        return 0 if self._writer is None else self._writer.commits

    async def get(self, key: str) -> MetaEntry | None:
        check_size(key)
        return await self._lookup("get", _GET, key)

    async def get_many(self, keys: Sequence[str]) -> list[MetaEntry | None]:
        for key in keys:
            check_size(key)
        found: dict[str, MetaEntry] = {}
        for first in range(0, len(keys), SLICE_ROWS):
            if first:
                await asyncio.sleep(0)
            page = keys[first : first + SLICE_ROWS]
            query = f"SELECT key, value, version FROM entries WHERE key IN ({','.join('?' * len(page))}) AND {_LIVE}"
            rows = await self._read("get_many", query, (*page, _now_ms()), len(page) + 1)
            found |= {row[0]: MetaEntry._make(row) for row in rows}
        return [found.get(key) for key in keys]

    async def put(self, key: str, value: bytes, *, expected: int | None = None, ephemeral: bool = False) -> int:
        check_size(key, value)
        return await self._write("put", (key,), len(value), Transaction.put, key, value, expected, ephemeral)

    async def put_many(self, puts: Sequence[Put]) -> list[int | VersionMismatch]:
        size = check_puts(puts)
        return await self._write("put_many", [put.key for put in puts], size, Transaction.put_many, tuple(puts))

    async def delete(self, key: str, *, expected: int | None = None) -> bool:
        check_size(key)
        return await self._write("delete", (key,), 0, Transaction.delete, key, expected)

    async def delete_range(self, start: str, end: str) -> None:
        check_bounds(start, end)
        await self._write("delete_range", (), 0, Transaction.delete_range, start, end)

    async def floor(self, key: str) -> MetaEntry | None:
        check_bounds(key)
        return await self._lookup("floor", _FLOOR, key)

    async def floor_many(self, keys: Sequence[str]) -> list[MetaEntry | None]:
        for key in keys:
            check_bounds(key)
        found: list[MetaEntry | None] = []
        for number, key in enumerate(keys, 1):
            found.append(await self._lookup("floor_many", _FLOOR, key))
            if number % SLICE_ROWS == 0:
                await asyncio.sleep(0)
        return found

    async def ceiling(self, key: str) -> MetaEntry | None:
        check_bounds(key)
        return await self._lookup("ceiling", _CEILING, key)

    async def range(self, start: str, end: str, limit: int) -> list[MetaEntry]:
        check_bounds(start, end, limit)
        rows = await self._fetch_range("range", _RANGE, start, end, limit)
        return list(map(MetaEntry._make, rows))

    async def keys(self, start: str, end: str, limit: int) -> list[str]:
        check_bounds(start, end, limit)
        return [key for (key,) in await self._fetch_range("keys", _KEYS, start, end, limit)]

    async def begin_reads(self) -> FreshReads:
        self._check_open()
        return FreshReads(self._check_open)

    def watch(self, prefix: str) -> SqliteWatch:
        check_bounds(prefix)
        self._check_open()
        return self._watches.watch(prefix)

    async def check(self) -> None:
        self._file.check()
        await asyncio.to_thread(check_writable, self._path.parent)
        await self._write("check", (), 0, lambda transaction: None)

    async def close(self) -> None:
        self._closed = True
        # A second caller waits as the first does.
        if self._writer is not None:
            await self._writer.close()
        with self._reading:
            self._disconnect_readers()

    # --- writing

    def _write(
        self, name: str, keys: Sequence[str], size: int, apply: Callable[[Transaction, *Ts], T], *arguments: *Ts
    ) -> Awaitable[T]:
        try:
            return (self._writer or self._start_writer()).write(name, keys, size, apply, arguments)
        except StoreUnavailable:
            self.counts.add(name, size, 0.0, failures=1)
            raise

    def _start_writer(self) -> Writer:
        with self._starting:
            self._check_open()
            if self._writer is None:
                try:
                    self._file.check()
                    self._writer = Writer(self._file, self._session_timeout_ms, self.counts)
                except OSError as error:
                    raise unavailable(self._path, error) from error
            return self._writer

    # --- reading

    async def _lookup(self, name: str, query: str, key: str) -> MetaEntry | None:
        # Fetching a second row runs the statement to its end. An open one would keep the connection on this snapshot.
        rows = await self._read(name, query, (key, _now_ms()), 2)
        return MetaEntry._make(rows[0]) if rows else None

    async def _fetch_range(self, name: str, query: str, start: str, end: str, limit: int) -> list[Any]:
        return await self._read(name, query, (start, end, _now_ms(), limit), SLICE_ROWS_FIRST)

    async def _read(self, name: str, query: str, parameters: tuple[Any, ...], first: int) -> list[Any]:
        """Return all rows of one snapshot. Waits while SQLite is busy with a recovery or the last close of the file."""
        started = time.perf_counter()
        size = 0
        failed = True
        try:
            while True:
                self._check_open()
                try:
                    rows, size = await self._fetch(query, parameters, first)
                    failed = False
                    return rows
                except sqlite3.Error as error:
                    # A fork closed the connection, or a lock is held: both pass.
                    is_temporary = isinstance(error, sqlite3.ProgrammingError) or is_locked(error)
                    if self._closed or not is_temporary or time.perf_counter() - started > BUSY_SECONDS:
                        raise unavailable(self._path, error) from error
                await asyncio.sleep(_BUSY_PAUSE_SECONDS)
        finally:
            self.counts.add(name, size, time.perf_counter() - started, failures=failed)

    async def _fetch(self, query: str, parameters: tuple[Any, ...], first: int) -> tuple[list[Any], int]:
        with self._reading:
            connection = self._take_connection()
            try:
                cursor = connection.execute(query, parameters)
                rows = cursor.fetchmany(first)
            except BaseException:
                self._drop(connection)
                raise
            if len(rows) < first:
                self._give_back(connection)
                return rows, _values_size(rows)
        size = _values_size(rows)
        # While the cursor is open, it keeps its snapshot, and the connection serves no other read.
        try:
            wanted = fetched = first
            while fetched == wanted:
                await asyncio.sleep(0)
                wanted = max(1, min(SLICE_ROWS, SLICE_BYTES * len(rows) // (size + 1)))
                with self._reading:
                    more = cursor.fetchmany(wanted)
                fetched = len(more)
                size += _values_size(more)
                rows += more
        except BaseException:
            with self._reading:
                self._drop(connection)
            raise
        with self._reading:
            self._give_back(connection)
        return rows, size

    def _take_connection(self) -> sqlite3.Connection:
        if self._idle:
            connection = self._idle.pop()
        else:
            self._file.check()
            connection = connect(self._path, 0.0)
        self._busy.add(connection)
        return connection

    def _give_back(self, connection: sqlite3.Connection) -> None:
        if connection in self._busy:
            self._busy.remove(connection)
            self._idle.append(connection)

    def _drop(self, connection: sqlite3.Connection) -> None:
        self._busy.discard(connection)
        connection.close()

    def _disconnect_readers(self) -> None:
        for connection in (*self._idle, *self._busy):
            connection.close()
        self._idle.clear()
        self._busy.clear()

    def _new_watches(self) -> Watches:
        return Watches(
            lambda query, parameters: self._read("watch", query, parameters, SLICE_ROWS_FIRST),
            lambda: self._closed,
            lambda since, until: self._writer is not None and self._writer.wrote_all(since, until),
        )

    def _check_open(self) -> None:
        if self._closed:
            raise StoreUnavailable(f"metadata store {self._path} is closed: open another one")


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


_value = itemgetter(1)


def _values_size(rows: list[Any]) -> int:
    return sum(map(len, map(_value, rows))) if rows and len(rows[0]) == 3 else 0


# SQLite keeps the locks of a file per process, in memory that a fork copies: a child that opens the file while it has
# copies of the parent's connections would believe that it holds the parent's locks. So no connection is open during a
# fork.
_stores: WeakSet[SqliteMetaStore] = WeakSet()
_forking: list[tuple[SqliteMetaStore, Writer | None]] = []


def _before_fork() -> None:
    for store in list(_stores):
        store._starting.acquire()
        store._reading.acquire()
        store._disconnect_readers()
        if store._writer is not None:
            store._writer.gate.acquire()
            store._writer.disconnect()
        _forking.append((store, store._writer))


def _after_fork_in_parent() -> None:
    for store, writer in _forking:
        if writer is not None:
            writer.gate.release()
        store._reading.release()
        store._starting.release()
    _forking.clear()


def _after_fork_in_child() -> None:
    """Let the child start anew: threads and the session stayed with the parent."""
    for store, writer in _forking:
        if writer is not None:
            writer.forget()
        store._writer = None
        store._starting = threading.Lock()
        store._reading = threading.Lock()
        store._watches = store._new_watches()
    _forking.clear()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
