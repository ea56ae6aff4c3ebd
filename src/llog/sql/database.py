"""SQL on a log, in one process, which sessions run their statements on.

Tables and topics of the engine `rocksdb` are in RocksDB. The first statement that needs RocksDB opens it, and this
process owns it from then on. Statements on topics of other engines work without it.
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
from llog.groups.dispatcher import Dispatcher
from llog.groups.groups import Groups
from llog.groups.listing import GroupListing
from llog.log.catalog import Catalog
from llog.log.log import Log
from llog.log.opening import writer_options
from llog.runtime import uuid7
from llog.sql.parse.statements import TableStatement
from llog.sql.session import DatabaseSession
from llog.sql.sources import Sources
from llog.sql.tables.mirror import Mirror
from llog.sql.tables.plans import Plan, is_simple, plan_of
from llog.sql.tables.tables import Tables
from llog.sql.workers import jobs
from llog.sql.workers.duckdb_server import DuckDBOptions
from llog.sql.workers.process import call_in_worker, zygote
from llog.sql.workers.thread_pools import ThreadPools

R = TypeVar("R")

_RELAY_SECONDS: Final = 5.0
"""How long `close` waits for the relay to stop. Events that it has not moved stay in the outbox."""
_PARSED_HERE_CHARACTERS_MAX: Final = 32 << 10
"""Longer texts are parsed in a worker. Parsing this length takes up to 0.3 s, and starting a worker 50 ms."""
_STOP_CHECK_S: Final = 0.1


class OpenTables(NamedTuple):
    """The tables, their routes and the relay, while RocksDB is open."""

    tables: Tables
    sources: Sources
    relay: Relay
    relaying: asyncio.Future[None]


class Database:
    """Runs SQL on a log. Close it before the log.

    `start` resumes moving the events that an earlier process left in the outbox. `stopping` ends every CONSUME that
    waits.
    """

    def __init__(self, log: Log, settings: Settings, *, stopping: asyncio.Event | None = None) -> None:
        self.log = log
        self.reader = EngineReader(log)
        self.appender = EngineAppender(log, writer_options(settings))
        self.catalog = Catalog(log)
        self.groups = GroupListing(Groups(log, self.reader))
        self.dispatcher = Dispatcher(log, self.reader, self.appender, stopping=stopping)
        self.threads = ThreadPools(settings.sql_timeout_ms)
        zygote.hold()
        zygote.warm_up()
        self._options = DuckDBOptions(memory_max_bytes=settings.sql_memory_max_bytes)
        self._parsing = threading.Lock()
        """Held while a worker parses, so that parsers never use more memory than one may."""
        self._opening = asyncio.Lock()
        self._open_tables: OpenTables | None = None
        self._tableless_mirror: Mirror | None = None
        self._closed = False

    @property
    def may_have_tables(self) -> bool:
        """Whether this process or another has created a RocksDB."""
        rocks = rocksdb_of(self.log).rocks
        return rocks is not None and rocks.directory.is_dir()

    async def start(self) -> None:
        """Open RocksDB if it exists, unless another process owns it. Idempotent."""
        if self.may_have_tables:
            try:
                await self.require_tables()
            except LogOwned:
                pass  # statements that need RocksDB will raise it

    def session(self, *, member: str | None = None) -> DatabaseSession:
        """Return a new session. `member` is its default name in consumer groups; None for a generated one."""
        return DatabaseSession(self, self.new_member() if member is None else member)

    def new_member(self) -> str:
        return uuid7(self.log.runtime.now_ms(), self.log.runtime.random())

    async def require_tables(self) -> OpenTables:
        """Return the tables, and open them first if need be. Raises `LogOwned` if another process owns them."""
        if self._open_tables is None:
            async with self._opening:
                if self._open_tables is None:
                    self._open_tables = await self._open_rocksdb()
        return self._open_tables

    async def sources(self) -> Sources:
        """Return the routes from tables, after dropping those to topics that others have deleted."""
        sources = (await self.require_tables()).sources
        await sources.follow()
        return sources

    @property
    def open_tables(self) -> OpenTables | None:
        """The open tables, or None; never opens them."""
        return self._open_tables

    def tableless_mirror(self) -> Mirror:
        """Return a DuckDB for queries that read no tables. The first call starts it."""
        if self._tableless_mirror is None:
            self._tableless_mirror = Mirror(self._options, lambda _: ())
        return self._tableless_mirror

    def parse(self, text: str, function: Callable[..., R], *args: Any) -> R:
        """Call a function that parses the text, in a worker if the text is long. Blocks."""
        if len(text) <= _PARSED_HERE_CHARACTERS_MAX:
            return function(*args)
        while not self._parsing.acquire(timeout=_STOP_CHECK_S):
            jobs.check()
        try:
            return call_in_worker(function, *args, memory_max_bytes=self._options.memory_max_bytes)
        finally:
            self._parsing.release()

    async def close(self) -> None:
        """Close the tables and stop the relay. Idempotent. Events in the outbox move on when it is opened again."""
        opened, self._open_tables = self._open_tables, None
        if opened is not None:
            opened.relaying.cancel()
            await asyncio.wait([opened.relaying], timeout=_RELAY_SECONDS)
            await asyncio.to_thread(opened.tables.close)
        mirror, self._tableless_mirror = self._tableless_mirror, None
        if mirror is not None:
            mirror.close()
        self.threads.close()
        if not self._closed:
            self._closed = True
            await asyncio.to_thread(zygote.release)

    def _plan(self, statement: TableStatement) -> Plan:
        return plan_of(statement) if is_simple(statement) else self.parse(statement.sql, plan_of, statement)

    async def _open_rocksdb(self) -> OpenTables:
        rocks = rocksdb_of(self.log).rocks
        if rocks is None:
            raise ConfigurationError("this process has no tables: set LLOG_ROCKSDB_DIR to a directory")
        logs = await rocks.open()
        store, runtime = logs.store, self.log.runtime
        relay = Relay(RocksOutbox(store, runtime), self.appender, self.reader, runtime)
        tables = await asyncio.to_thread(lambda: Tables(store, logs, runtime, options=self._options, plan=self._plan))
        sources = Sources(tables, self.catalog, self.threads)
        await sources.follow()
        return OpenTables(tables, sources, relay, asyncio.ensure_future(relay.run()))
