"""The metadata store in a PostgreSQL database.

Writes go over one connection, in groups (`writer`); reads over a few others (`reader`); changes are heard of over one
more (`watches`). All of them are made when they are needed, by the event loop that a store object belongs to.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from typing import Final
from weakref import WeakSet

from llog.base.secret import Secret
from llog.errors import InvalidArgument, OutcomeUnknown, StaleReads, StoreUnavailable, VersionMismatch
from llog.stores.counting import OperationCounts, counted_answer
from llog.stores.diagnosis import Diagnosis
from llog.stores.meta import Entry, Put, check, check_bounds, checked_size
from llog.stores.postgres.address import PostgresAddress
from llog.stores.postgres.connections import Credentials, Identity, Server
from llog.stores.postgres.diagnosis import diagnose
from llog.stores.postgres.reader import Reader
from llog.stores.postgres.watches import Watch, Watches
from llog.stores.postgres.writer import Operation, Writer, delete, delete_range, outcome, put


class PostgresMetaStore:
    """Connects with the first call, on the event loop that makes it; after a fork the child does so again."""

    def __init__(
        self,
        address: PostgresAddress,
        *,
        password: str | None = None,
        password_file: str | None = None,
        client_name: str = "llog",
        session_timeout_ms: int = 10_000,
    ) -> None:
        if session_timeout_ms < 1:
            raise InvalidArgument(f"session_timeout_ms is {session_timeout_ms}: it must be 1 or more")
        self.counts = OperationCounts()
        credentials = Credentials(None if password is None else Secret(password), password_file)
        self._server = Server(address, credentials, client_name)
        self._session_timeout_ms = session_timeout_ms
        self._process: _Process | None = None
        self._is_closed = False

    async def open(self) -> None:
        """Create the schema if there is none.

        Raises `ConfigurationError` if the server does not let this user in, `WrongStore` if the schema is of a newer
        version, and `StoreUnreachable` if no server answers. Without this call the first other one does the same, and
        raises `StoreUnavailable`.
        """
        await self._server.open()

    async def has_key(self, key: str) -> bool:
        """Whether the schema is there and has the key; raises as `open` does, and creates nothing."""
        return await self._server.has_key(key)

    async def get(self, key: str) -> Entry | None:
        check(key)
        return await counted_answer(self.counts, "get", self._here().reader.get(key), _sized_entry)

    async def get_many(self, keys: Sequence[str]) -> list[Entry | None]:
        for key in keys:
            check(key)
        return await counted_answer(self.counts, "get_many", self._here().reader.get_many(keys), _sized_entries)

    async def put(self, key: str, value: bytes, *, expected: int | None = None, ephemeral: bool = False) -> int:
        check(key, value)
        (result,) = await self._write("put", [put(key, value, expected, ephemeral=ephemeral)], len(value))
        if isinstance(result, VersionMismatch):
            raise result
        return result

    async def put_many(self, puts: Sequence[Put]) -> list[int | VersionMismatch]:
        size = checked_size(puts)
        return await self._write("put_many", [put(each.key, each.value, each.expected) for each in puts], size)

    async def delete(self, key: str, *, expected: int | None = None) -> bool:
        check(key)
        (result,) = await self._write("delete", [delete(key, expected)])
        if isinstance(result, VersionMismatch):
            raise result
        return bool(result)

    async def delete_range(self, start: str, end: str) -> None:
        check_bounds(start, end)
        await self._write("delete_range", [delete_range(start, end)])

    async def floor(self, key: str) -> Entry | None:
        check_bounds(key)
        return await counted_answer(self.counts, "floor", self._here().reader.floor(key), _sized_entry)

    async def ceiling(self, key: str) -> Entry | None:
        check_bounds(key)
        return await counted_answer(self.counts, "ceiling", self._here().reader.ceiling(key), _sized_entry)

    async def range(self, start: str, end: str, limit: int) -> list[Entry]:
        check_bounds(start, end, limit)
        return await counted_answer(self.counts, "range", self._here().reader.range(start, end, limit), _sized_entries)

    async def keys(self, start: str, end: str, limit: int) -> list[str]:
        check_bounds(start, end, limit)
        return await counted_answer(self.counts, "keys", self._here().reader.keys(start, end, limit), _unsized)

    async def begin_reads(self) -> _Reads:
        process = self._here()
        reads = _Reads(self, process.writer)
        process.noting.add(reads)
        return reads

    def watch(self, prefix: str) -> Watch:
        check_bounds(prefix)
        return self._here().watches.watch(prefix)

    async def check(self) -> None:
        await self._write("check", [])

    async def diagnose(self, now_ms: Callable[[], int]) -> list[Diagnosis]:
        return await diagnose(self._here().reader, now_ms)

    async def close(self) -> None:
        self._is_closed = True
        process = self._process
        if process is not None and process.is_ours:
            if process.closing is None:
                process.closing = asyncio.ensure_future(process.close())
            await asyncio.shield(process.closing)

    def check_open(self) -> None:
        if self._is_closed:
            raise StoreUnavailable(f"metadata store ({self._server.name}) is closed: open another one")

    def _here(self) -> _Process:
        """Return what this process and event loop have of the store, which a fork leaves with the parent."""
        self.check_open()
        process = self._process
        if process is None or process.pid != os.getpid():
            if process is not None:
                _left_behind.append(process)
            process = self._process = _Process(self._server, self._session_timeout_ms, self.check_open)
        if not process.is_ours:
            raise StoreUnavailable(
                f"metadata store ({self._server.name}) belongs to another event loop: open one for each event loop"
            )
        return process

    async def _write(self, name: str, operations: list[Operation], size: int = 0) -> list[int | VersionMismatch]:
        writing = self._here().writer.write(operations, size)
        results = await counted_answer(self.counts, name, writing, lambda _: size)
        return [outcome(operation, result) for operation, result in zip(operations, results, strict=True)]


class _Process:
    """What one event loop of one process has of a store: its connections, its session and its watches."""

    def __init__(self, server: Server, session_timeout_ms: int, check_open: Callable[[], None]) -> None:
        self.pid = os.getpid()
        self.noting: WeakSet[_Reads] = WeakSet()
        self.closing: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()
        self.writer = Writer(server, session_timeout_ms)
        self.reader = Reader(server, self._note)
        self.watches = Watches(server, check_open, self.reader.revision, self.writer.end_sessions)

    @property
    def is_ours(self) -> bool:
        return self.pid == os.getpid() and self._loop is asyncio.get_running_loop()

    async def close(self) -> None:
        await self.watches.close()
        await self.writer.close()
        await self.reader.close()

    def _note(self, identity: Identity) -> None:
        for reads in self.noting:
            reads.identities.add(identity)


class _Reads:
    """Who answered the reads of a store object since it was made."""

    def __init__(self, store: PostgresMetaStore, writer: Writer) -> None:
        self.identities: set[Identity] = set()
        self._store = store
        self._writer = writer

    async def confirm(self) -> None:
        """A server that was replaced cannot commit, if standbys are synchronous; and one that commits was in charge
        since it started.
        """
        self._store.check_open()
        try:
            identity = await self._writer.confirm()
        except OutcomeUnknown as error:
            raise StoreUnavailable(f"whether the reads are fresh cannot be told: {error}") from error
        if not self.identities <= {identity}:
            raise StaleReads(
                "another server took over, or the server was restarted, since the reads began, and some of them "
                "may be old: read again"
            )


_left_behind: Final[list[_Process]] = []
"""What children of a fork inherited, and must neither use nor close: it is the parent's."""


def _sized_entry(found: Entry | None) -> int:
    return 0 if found is None else len(found.value)


def _sized_entries(found: Sequence[Entry | None]) -> int:
    return sum(len(entry.value) for entry in found if entry is not None)


def _unsized(_: object) -> int:
    return 0
