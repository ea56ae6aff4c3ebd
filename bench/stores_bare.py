"""Bare clients that do the same work on the same server: the baselines of the metadata stores."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from devtools.servers.oxia import OxiaServer
    from devtools.servers.postgres import PostgresServer

VALUE = bytes(500)
"""About the size of a control record or an index entry."""


class Pace(NamedTuple):
    """The rate and latencies of callers, each of which waits for one answer at a time."""

    per_second: float
    latencies_ms: list[float]


class Bare(Protocol):
    async def pace(self, callers: int, seconds: float, *, commits: bool) -> Pace:
        """Measure conditional puts, or commits: a new key and then a conditional put."""
        ...


Call = Callable[[int], Awaitable[None]]
"""Does the next operation of a caller, by the caller's number."""


async def measure_pace(call: Call, callers: int, seconds: float) -> Pace:
    latencies: list[float] = []
    end = time.perf_counter() + seconds

    async def run(caller: int) -> None:
        while (began := time.perf_counter()) < end:
            await call(caller)
            latencies.append((time.perf_counter() - began) * 1000)

    began = time.perf_counter()
    await asyncio.gather(*map(run, range(callers)))
    return Pace(len(latencies) / (time.perf_counter() - began), latencies)


class BareSqlite:
    """Plain SQLite on the same disk. Callers share a durable transaction, as a group commit has them at best."""

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None)
        for pragma in ("journal_mode = WAL", "synchronous = FULL"):
            self._connection.execute(f"PRAGMA {pragma}")
        self._connection.execute(
            "CREATE TABLE entries (key TEXT PRIMARY KEY, value BLOB, version INTEGER) WITHOUT ROWID"
        )
        self._version = 0

    async def pace(self, callers: int, seconds: float, *, commits: bool) -> Pace:
        execute = self._connection.execute
        rows = [(f"c/{caller:05}", VALUE, self._version) for caller in range(callers)]
        self._connection.executemany("INSERT OR REPLACE INTO entries VALUES (?, ?, ?)", rows)
        latencies: list[float] = []
        began = now = time.perf_counter()
        while now < began + seconds:
            execute("BEGIN IMMEDIATE")
            for caller in range(callers):
                if commits:
                    execute("INSERT INTO entries VALUES (?, ?, 0)", (f"i/{caller:05}/{self._version:020}", VALUE))
                execute(
                    "UPDATE entries SET value = ?, version = ? WHERE key = ? AND version = ?",
                    (VALUE, self._version + 1, f"c/{caller:05}", self._version),
                )
            execute("COMMIT")
            self._version += 1
            before, now = now, time.perf_counter()
            latencies += [(now - before) * 1000] * callers
        return Pace(len(latencies) / (now - began), latencies)


class BarePostgres:
    """One connection for each caller, and one statement, which is its own transaction, for each call."""

    def __init__(self, server: PostgresServer) -> None:
        self._server = server
        self._made = 0

    async def pace(self, callers: int, seconds: float, *, commits: bool) -> Pace:
        import asyncpg

        self._made += 1
        table = f"bare_{self._made}"
        server = self._server
        connections = [
            await asyncpg.connect(
                host=server.host,
                port=server.port,
                user=server.user,
                password=server.password,
                database=server.database,
            )
            for _ in range(callers)
        ]
        try:
            await connections[0].execute(
                f"CREATE TABLE {table} (key bytea PRIMARY KEY, value bytea NOT NULL, version bigint NOT NULL)"
            )
            rows = [(b"c/%d" % caller, VALUE, 0) for caller in range(callers)]
            await connections[0].executemany(f"INSERT INTO {table} VALUES ($1, $2, $3)", rows)
            swap = f"UPDATE {table} SET value = $2, version = version + 1 WHERE key = $1 AND version = $3"
            new = f"WITH new AS (INSERT INTO {table} VALUES ($4, $2, 0)) {swap}"
            statements = [await connection.prepare(new if commits else swap) for connection in connections]
            versions = [0] * callers

            async def call(caller: int) -> None:
                key, version = b"c/%d" % caller, versions[caller]
                entry = (b"i/%d/%d" % (caller, version),) if commits else ()
                await statements[caller].fetch(key, VALUE, version, *entry)
                versions[caller] += 1

            return await measure_pace(call, callers, seconds)
        finally:
            for connection in connections:
                await connection.close()


class BareOxia:
    """One unary write for each call, to the shards in turn."""

    def __init__(self, server: OxiaServer) -> None:
        self._server = server
        self._made = 0

    async def pace(self, callers: int, seconds: float, *, commits: bool) -> Pace:
        import grpc

        from llog.stores.oxia.proto import client_pb2 as proto
        from llog.stores.oxia.proto.client_pb2_grpc import OxiaClientStub

        self._made += 1
        leaders = sorted(self._server.leaders().items())
        versions = [-1] * callers
        async with _channels({leader for _, leader in leaders}) as channels:
            stubs = {leader: OxiaClientStub(channel) for leader, channel in channels.items()}

            async def call(caller: int) -> None:
                shard, leader = leaders[caller % len(leaders)]
                name = f"=bare-{self._made}-{caller}"
                puts = [proto.PutRequest(key=name, value=VALUE, expected_version_id=versions[caller])]
                if commits:
                    entry = proto.PutRequest(key=f"{name}-{versions[caller]}", value=VALUE, expected_version_id=-1)
                    puts.insert(0, entry)
                answer = await stubs[leader].Write(proto.WriteRequest(shard=shard, puts=puts), timeout=30)
                if any(put.status != proto.Status.OK for put in answer.puts):
                    raise grpc.RpcError(f"a bare write was refused: {answer}")
                versions[caller] = answer.puts[-1].version.version_id

            return await measure_pace(call, callers, seconds)


@asynccontextmanager
async def _channels(addresses: set[str]) -> AsyncIterator[dict[str, object]]:
    import grpc.aio

    channels = {address: grpc.aio.insecure_channel(address) for address in addresses}
    try:
        yield channels
    finally:
        for channel in channels.values():
            await channel.close()
