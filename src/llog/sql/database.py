"""SQL on a log, in one process: sessions run their statements on it.

Tables and topics of engine `rocksdb` are in RocksDB, which the first statement that needs it opens; this process owns
it from then on. Statements about topics of other engines work without it.
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
from llog.groups.consumption import Consuming
from llog.groups.groups import Groups
from llog.groups.listing import GroupListing
from llog.log.catalog import Catalog
from llog.log.log import Log
from llog.log.opening import writer_options
from llog.runtime import uuid7
from llog.sql.parse.statements import TableStatement
from llog.sql.session import Session
from llog.sql.sources import Sources
from llog.sql.tables.mirror import Mirror
from llog.sql.tables.plans import Plan, is_simple, plan_of
from llog.sql.tables.tables import Tables
from llog.sql.threads import Threads
from llog.sql.workers import jobs
from llog.sql.workers.duckdb_server import DuckDBOptions
from llog.sql.workers.process import zygote
from llog.sql.workers.remote_call import call_in_worker

R = TypeVar("R")

_RELAY_SECONDS: Final = 5.0
"""How long a close waits for events that are on their way to topics of other engines. They stay in the outbox."""
_PARSED_HERE_CHARACTERS_MAX: Final = 32 << 10
"""A parser takes up to 0.3 s for a text of this length, and a worker is there in 50 ms."""
_STOP_CHECK_S: Final = 0.1


class OpenTables(NamedTuple):
    """The tables, and what comes with them, while RocksDB is open."""

    tables: Tables
    sources: Sources
    relay: Relay
    relaying: asyncio.Future[None]


class Database:
    """Close it before its log. `start` takes up what an earlier process left in the outbox.

    `stopping` ends every CONSUME that waits.
    """

    def __init__(self, log: Log, settings: Settings, *, stopping: asyncio.Event | None = None) -> None:
        self.log = log
        self.reader = EngineReader(log)
        self.appender = EngineAppender(log, writer_options(settings))
        self.catalog = Catalog(log)
        self.groups = GroupListing(Groups(log, self.reader))
        self.consuming = Consuming(log, self.reader, self.appender, stopping=stopping)
        self.threads = Threads(settings.sql_timeout_ms)
        zygote.hold()
        zygote.warm_up()
        self._options = DuckDBOptions(memory_max_bytes=settings.sql_memory_max_bytes)
        self._parsing = threading.Lock()
        """Held while a worker parses: the memory that one parser may use is not used several times."""
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
        """Opens RocksDB if it exists, unless another process has it. Idempotent."""
        if self.may_have_tables:
            try:
                await self.require_tables()
            except LogOwned:
                pass  # statements that need it will say so

    def session(self, *, member: str | None = None) -> Session:
        """Opens a session. CONSUME and ACK go by the name `member` unless they name another; None for a new name."""
        return Session(self, self.new_member() if member is None else member)

    def new_member(self) -> str:
        return uuid7(self.log.runtime.now_ms(), self.log.runtime.random())

    async def require_tables(self) -> OpenTables:
        """Opens the tables unless they are open; `LogOwned` if another process has them."""
        if self._open_tables is None:
            async with self._opening:
                if self._open_tables is None:
                    self._open_tables = await self._open()
        return self._open_tables

    async def sources(self) -> Sources:
        """The routes from tables, without those to topics that others have deleted meanwhile."""
        sources = (await self.require_tables()).sources
        await sources.follow()
        return sources

    @property
    def open_tables(self) -> OpenTables | None:
        """The open tables, or None; never opens them."""
        return self._open_tables

    def tableless_mirror(self) -> Mirror:
        """A DuckDB for queries that read no tables; the first call makes it."""
        if self._tableless_mirror is None:
            self._tableless_mirror = Mirror(self._options, lambda _: ())
        return self._tableless_mirror

    def parse(self, text: str, function: Callable[..., R], *args: Any) -> R:
        """Calls a function that parses the text: in a worker process if the text is long. Blocks."""
        if len(text) <= _PARSED_HERE_CHARACTERS_MAX:
            return function(*args)
        while not self._parsing.acquire(timeout=_STOP_CHECK_S):
            jobs.check()
        try:
            return call_in_worker(function, *args, memory_max_bytes=self._options.memory_max_bytes)
        finally:
            self._parsing.release()

    async def close(self) -> None:
        """Idempotent. Events that are still in the outbox go on when it is opened again."""
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
            await asyncio.to_thread(zygote.let_go)

    def _plan(self, statement: TableStatement) -> Plan:
        return plan_of(statement) if is_simple(statement) else self.parse(statement.sql, plan_of, statement)

    async def _open(self) -> OpenTables:
        rocks = rocksdb_of(self.log).rocks
        if rocks is None:
            raise ConfigurationError("there are no tables here: set LLOG_ROCKSDB_DIR to a directory")
        logs = await rocks.opened()
        store, runtime = logs.store, self.log.runtime
        relay = Relay(RocksOutbox(store, runtime), self.appender, self.reader, runtime)
        tables = await asyncio.to_thread(lambda: Tables(store, logs, runtime, options=self._options, plan=self._plan))
        sources = Sources(tables, self.catalog, self.threads)
        await sources.follow()
        return OpenTables(tables, sources, relay, asyncio.ensure_future(relay.run()))
