"""The metadata store in a PostgreSQL database.

Writes share one connection, in groups (`writer`); reads use a few others (`reader`), and notifications one more
(`watches`). Each connection is opened on first use, by the event loop that a store object belongs to.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from typing import Final
from weakref import WeakSet

from llog.base.secret import Secret
from llog.errors import InvalidArgument, OutcomeUnknown, StaleReads, StoreUnavailable, VersionMismatch
from llog.stores.counting import OperationCounts, measure_answer
from llog.stores.diagnosis import Diagnosis
from llog.stores.event_watches import EventWatch
from llog.stores.meta import MetaEntry, Put, check_bounds, check_puts, check_size, entries_size, entry_size
from llog.stores.postgres.address import PostgresAddress
from llog.stores.postgres.connections import Credentials, Identity, Server
from llog.stores.postgres.diagnosis import diagnose
from llog.stores.postgres.reader import Reader
from llog.stores.postgres.watches import Watches
from llog.stores.postgres.writer import (
    Operation,
    Writer,
    decode_result,
    delete_operation,
    delete_range_operation,
    put_operation,
)


class PostgresMetaStore:
    """Connects with the first call, on the event loop of that call. After a fork, the child connects on its own."""

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
        self._process: _ProcessState | None = None
        self._is_closed = False

    async def open(self) -> None:
        """Create the schema if it does not exist.

        Raises `ConfigurationError` if the server does not admit this user, `WrongStore` if a newer llog made the
        schema, and `StoreUnreachable` if no server answers. Without `open`, the first other call creates the schema,
        and raises `StoreUnavailable` in all these cases.
        """
        await self._server.open()

    async def has_key(self, key: str) -> bool:
        """Return whether the schema exists and has the key. Raises what `open` raises, and creates nothing."""
        return await self._server.has_key(key)

    async def get(self, key: str) -> MetaEntry | None:
        check_size(key)
        return await measure_answer(self.counts, "get", self._process_state().reader.get(key), entry_size)

    async def get_many(self, keys: Sequence[str]) -> list[MetaEntry | None]:
        for key in keys:
            check_size(key)
        return await measure_answer(self.counts, "get_many", self._process_state().reader.get_many(keys), entries_size)

    async def put(self, key: str, value: bytes, *, expected: int | None = None, ephemeral: bool = False) -> int:
        check_size(key, value)
        (result,) = await self._write("put", [put_operation(key, value, expected, ephemeral=ephemeral)], len(value))
        if isinstance(result, VersionMismatch):
            raise result
        return result

    async def put_many(self, puts: Sequence[Put]) -> list[int | VersionMismatch]:
        size = check_puts(puts)
        operations = [put_operation(each.key, each.value, each.expected) for each in puts]
        return await self._write("put_many", operations, size)

    async def delete(self, key: str, *, expected: int | None = None) -> bool:
        check_size(key)
        (result,) = await self._write("delete", [delete_operation(key, expected)])
        if isinstance(result, VersionMismatch):
            raise result
        return bool(result)

    async def delete_range(self, start: str, end: str) -> None:
        check_bounds(start, end)
        await self._write("delete_range", [delete_range_operation(start, end)])

    async def floor(self, key: str) -> MetaEntry | None:
        check_bounds(key)
        return await measure_answer(self.counts, "floor", self._process_state().reader.floor(key), entry_size)

    async def floor_many(self, keys: Sequence[str]) -> list[MetaEntry | None]:
        for key in keys:
            check_bounds(key)
        return await measure_answer(
            self.counts, "floor_many", self._process_state().reader.floor_many(keys), entries_size
        )

    async def ceiling(self, key: str) -> MetaEntry | None:
        check_bounds(key)
        return await measure_answer(self.counts, "ceiling", self._process_state().reader.ceiling(key), entry_size)

    async def range(self, start: str, end: str, limit: int) -> list[MetaEntry]:
        check_bounds(start, end, limit)
        return await measure_answer(
            self.counts, "range", self._process_state().reader.range(start, end, limit), entries_size
        )

    async def keys(self, start: str, end: str, limit: int) -> list[str]:
        check_bounds(start, end, limit)
        return await measure_answer(
            self.counts, "keys", self._process_state().reader.keys(start, end, limit), lambda _: 0
        )

    async def begin_reads(self) -> _PostgresReads:
        process = self._process_state()
        reads = _PostgresReads(self, process.writer)
        process.reads_under_way.add(reads)
        return reads

    def watch(self, prefix: str) -> EventWatch:
        check_bounds(prefix)
        return self._process_state().watches.watch(prefix)

    async def check(self) -> None:
        await self._write("check", [])

    async def diagnose(self, now_ms: Callable[[], int]) -> list[Diagnosis]:
        return await diagnose(self._process_state().reader, now_ms)

    async def close(self) -> None:
        self._is_closed = True
        process = self._process
        if process is not None and process.is_current:
            if process.closing is None:
                process.closing = asyncio.ensure_future(process.close())
            await asyncio.shield(process.closing)

    def check_open(self) -> None:
        if self._is_closed:
            raise StoreUnavailable(f"metadata store ({self._server.name}) is closed: open another one")

    def _process_state(self) -> _ProcessState:
        """Return the connections of this process and event loop, which are made anew after a fork."""
        self.check_open()
        process = self._process
        if process is None or process.pid != os.getpid():
            if process is not None:
                _inherited_states.append(process)
            process = self._process = _ProcessState(self._server, self._session_timeout_ms, self.check_open)
        if not process.is_current:
            raise StoreUnavailable(
                f"metadata store ({self._server.name}) belongs to another event loop: open a store for each event loop"
            )
        return process

    async def _write(self, name: str, operations: list[Operation], size: int = 0) -> list[int | VersionMismatch]:
        writing = self._process_state().writer.write(operations, size)
        results = await measure_answer(self.counts, name, writing, lambda _: size)
        return [decode_result(operation, result) for operation, result in zip(operations, results, strict=True)]


class _ProcessState:
    """The connections, the session and the watches that one event loop of one process has of a store."""

    def __init__(self, server: Server, session_timeout_ms: int, check_open: Callable[[], None]) -> None:
        self.pid = os.getpid()
        self.reads_under_way: WeakSet[_PostgresReads] = WeakSet()
        self.closing: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()
        self.writer = Writer(server, session_timeout_ms)
        self.reader = Reader(server, self._record_answer)
        self.watches = Watches(server, check_open, self.reader.revision, self.writer.end_sessions)

    @property
    def is_current(self) -> bool:
        return self.pid == os.getpid() and self._loop is asyncio.get_running_loop()

    async def close(self) -> None:
        await self.watches.close()
        await self.writer.close()
        await self.reader.close()

    def _record_answer(self, identity: Identity) -> None:
        for reads in self.reads_under_way:
            reads.identities.add(identity)


class _PostgresReads:
    """The servers that have answered the reads of a store object since `begin_reads`."""

    def __init__(self, store: PostgresMetaStore, writer: Writer) -> None:
        self.identities: set[Identity] = set()
        self._store = store
        self._writer = writer

    async def confirm(self) -> None:
        """Commit a write, and check that the server that commits it has answered all reads.

        With synchronous standbys, a server that was replaced cannot commit, and one that commits was in charge since it
        started.
        """
        self._store.check_open()
        try:
            identity = await self._writer.confirm()
        except OutcomeUnknown as error:
            raise StoreUnavailable(f"cannot find out whether the reads are fresh: {error}") from error
        if not self.identities <= {identity}:
            raise StaleReads(
                "another server took over, or the server was restarted, since the reads began, so that some of them "
                "may be old: read again"
            )


_inherited_states: Final[list[_ProcessState]] = []
"""The connections that this process inherited by a fork. They are the parent's: neither used nor closed here."""
