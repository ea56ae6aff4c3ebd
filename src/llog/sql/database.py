"""SQL on a log: what one process has of it, for sessions to run statements on.

Tables and topics of engine `rocksdb` are in RocksDB, which is opened by the first statement that needs it, and owned
from then on. Statements about topics of other engines work without it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar

from llog.cdc.outbox import RocksOutbox
from llog.cdc.relay import Relay
from llog.config import Settings
from llog.engines.rocksdb.engine import rocksdb_of
from llog.engines.routing import EngineAppender, EngineReader
from llog.errors import ConfigurationError, LogOwned
from llog.groups.groups import Groups
from llog.groups.listing import GroupListing
from llog.log.catalog import Catalog
from llog.log.log import Log
from llog.log.opening import writer_options
from llog.runtime import uuid7
from llog.sql.commands.sources import Sources
from llog.sql.commands.topics import TopicCommands
from llog.sql.parse.statements import TableStatement
from llog.sql.session import Session
from llog.sql.tables.mirror import Mirror
from llog.sql.tables.plans import Plan, is_simple, planned
from llog.sql.tables.tables import Tables
from llog.sql.threads import Threads
from llog.sql.workers import jobs
from llog.sql.workers.calls import call_apart
from llog.sql.workers.duckdb_server import DuckDBOptions
from llog.sql.workers.process import zygote

R = TypeVar("R")

_RELAY_SECONDS: Final = 5.0
"""How long a close waits for events that are on their way to topics of other engines. They stay in the outbox."""
_READ_HERE_MAX: Final = 32 << 10
"""Characters. A parser takes up to 0.3 s for them, and a worker is there in 50 ms."""
_LOOK_S: Final = 0.1


class Held(NamedTuple):
    """What there is once RocksDB is open."""

    tables: Tables
    sources: Sources
    relay: Relay
    relaying: asyncio.Future[None]


class Database:
    """Close it before its log. `start` takes up what an earlier process left in the outbox. `stopping` ends every
    CONSUME that waits.
    """

    def __init__(self, log: Log, settings: Settings, *, stopping: asyncio.Event | None = None) -> None:
        self.log = log
        self.reader = EngineReader(log)
        self.appender = EngineAppender(log, writer_options(settings))
        self.catalog = Catalog(log)
        self.groups = GroupListing(Groups(log, self.reader))
        self.topics = TopicCommands(log, self.reader, self.appender, stopping)
        self.threads = Threads(settings.sql_timeout_ms)
        zygote.hold()
        zygote.warm_up()
        self._options = DuckDBOptions(memory_max_bytes=settings.sql_memory_max_bytes)
        self._reading = threading.Lock()
        """One long text at a time: the memory that reading it may have is not had several times."""
        self._opening = asyncio.Lock()
        self._held: Held | None = None
        self._loose: Mirror | None = None
        self._closed = False

    @property
    def may_have_tables(self) -> bool:
        """Whether there is a RocksDB already, in this process or another."""
        rocks = rocksdb_of(self.log).rocks
        return rocks is not None and rocks.directory.is_dir()

    async def start(self) -> None:
        """Opens RocksDB if there is one already, unless another process has it. Idempotent."""
        if self.may_have_tables:
            try:
                await self.held()
            except LogOwned:
                pass  # statements that need it will say so

    def session(self, *, member: str | None = None) -> Session:
        """`member` is whom CONSUME and ACK speak for, unless they name one; None: a name of its own."""
        return Session(self, self.new_member() if member is None else member)

    def new_member(self) -> str:
        return uuid7(self.log.runtime.now_ms(), self.log.runtime.random())

    async def held(self) -> Held:
        """Tables and routes; `LogOwned` if another process has them."""
        if self._held is None:
            async with self._opening:
                if self._held is None:
                    self._held = await self._open()
        return self._held

    async def sources(self) -> Sources:
        """Of `held`, without topics that others have deleted meanwhile."""
        sources = (await self.held()).sources
        await sources.follow()
        return sources

    @property
    def known(self) -> Held | None:
        """As `held`, if it is open."""
        return self._held

    def loose(self) -> Mirror:
        """For queries that read no tables."""
        if self._loose is None:
            self._loose = Mirror(self._options, lambda _: ())
        return self._loose

    def read(self, text: str, function: Callable[..., R], *args: Any) -> R:
        """Calls a function that takes a time that grows with this text: in a worker, if that is long. Blocks."""
        if len(text) <= _READ_HERE_MAX:
            return function(*args)
        while not self._reading.acquire(timeout=_LOOK_S):
            jobs.check()
        try:
            return call_apart(function, *args, memory_max_bytes=self._options.memory_max_bytes)
        finally:
            self._reading.release()

    async def close(self) -> None:
        """Idempotent. Events that are still in the outbox go on when it is opened again."""
        held, self._held = self._held, None
        if held is not None:
            held.relaying.cancel()
            await asyncio.wait([held.relaying], timeout=_RELAY_SECONDS)
            await asyncio.to_thread(held.tables.close)
        loose, self._loose = self._loose, None
        if loose is not None:
            loose.close()
        self.threads.close()
        if not self._closed:
            self._closed = True
            await asyncio.to_thread(zygote.let_go)

    def _planned(self, statement: TableStatement) -> Plan:
        return planned(statement) if is_simple(statement) else self.read(statement.sql, planned, statement)

    async def _open(self) -> Held:
        rocks = rocksdb_of(self.log).rocks
        if rocks is None:
            raise ConfigurationError("there are no tables here: set LLOG_ROCKSDB_DIR to a directory")
        logs = await rocks.opened()
        store, runtime = logs.store, self.log.runtime
        relay = Relay(RocksOutbox(store, runtime), self.appender, self.reader, runtime)
        tables = await asyncio.to_thread(
            lambda: Tables(store, logs, runtime, options=self._options, plan=self._planned)
        )
        sources = Sources(tables, self.catalog, self.threads)
        await sources.follow()
        return Held(tables, sources, relay, asyncio.ensure_future(relay.run()))
