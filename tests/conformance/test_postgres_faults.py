"""PostgreSQL that is restarted, stopped, cut off or replaced: what happened, what did not, and what may have."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import asyncpg
import pytest
import trustme

from devtools.servers.postgres import PostgresServer, postgres_server
from devtools.servers.weed import ServerError
from llog.config import Secret, Settings
from llog.errors import ConfigurationError, LlogError, OutcomeUnknown, StaleReads, StoreUnavailable, StoreUnreachable
from llog.log.log import Log
from llog.log.opening import open_log, opened_log
from llog.stores.meta import ABSENT, MetaStore
from llog.stores.postgres.schema import lock_key
from tests.conformance.conftest import Open
from tests.conftest import unavailable


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """One that these tests may stop; each leaves it running."""
    with ExitStack() as stack:
        try:
            started = stack.enter_context(postgres_server())
        except ServerError as error:
            unavailable(str(error))
        yield started


@asynccontextmanager
async def open_connection(server: PostgresServer) -> AsyncIterator[Any]:
    connection = await asyncpg.connect(
        host=server.host, port=server.port, user=server.user, database=server.database, password=server.password
    )
    try:
        yield connection
    finally:
        await connection.close()


async def _until(connection: Any, query: str, *arguments: Any) -> list[Any]:
    """Ask until there is a row."""
    async with asyncio.timeout(60):
        while not (rows := await connection.fetch(query, *arguments)):
            await asyncio.sleep(0.02)
        return list(rows)


# --- what happened


async def test_writes_during_kills_and_restarts_happened_did_not_or_may_have(
    open_store: Open, server: PostgresServer
) -> None:
    """Every error is as good as its word: `StoreUnavailable` did not happen, and what returned is there."""
    store = open_store()
    outcomes: dict[str, type[LlogError] | None] = {}
    stop = asyncio.Event()

    async def write(writer: int) -> None:
        number = 0
        while not stop.is_set():
            key = f"{writer}/{number:06}"
            number += 1
            try:
                await store.put(key, b"", expected=ABSENT)
                outcomes[key] = None
            except LlogError as error:
                outcomes[key] = type(error)

    async def written(more: int) -> None:
        wanted = sum(error is None for error in outcomes.values()) + more
        async with asyncio.timeout(120):
            while sum(error is None for error in outcomes.values()) < wanted:
                await asyncio.sleep(0.01)

    writers = [asyncio.create_task(write(number)) for number in range(16)]
    for end in (server.kill, server.stop, server.kill):
        await written(100)
        await asyncio.to_thread(end)
        await asyncio.to_thread(server.start)
    await written(100)
    stop.set()
    await asyncio.gather(*writers)
    found = set(await store.keys("", "\U0010ffff", 1_000_000))
    assert {key for key, error in outcomes.items() if error is None} - found == set()
    assert {key for key, error in outcomes.items() if error is StoreUnavailable} & found == set()
    assert set(outcomes.values()) <= {None, StoreUnavailable, OutcomeUnknown}


@pytest.mark.parametrize(
    ("interruption", "outcome", "advice"),
    [
        pytest.param("pg_terminate_backend", OutcomeUnknown, "read to find out", id="connection lost: it may have"),
        pytest.param("pg_cancel_backend", StoreUnavailable, None, id="cancelled by the server: it did not"),
    ],
)
async def test_a_write_that_is_interrupted_says_whether_it_may_have_happened(
    open_store: Open,
    server: PostgresServer,
    schema: str,
    interruption: str,
    outcome: type[LlogError],
    advice: str | None,
) -> None:
    store = open_store()
    await store.put("a", b"")
    async with open_connection(server) as other:
        await other.execute(f"SELECT pg_advisory_lock({lock_key(schema)})")
        writing = asyncio.ensure_future(store.put("b", b""))
        (waiting,) = await _until(other, "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND NOT granted")
        await other.execute(f"SELECT {interruption}($1)", waiting["pid"])
        with pytest.raises(outcome, match=advice) as raised:
            await writing
        assert type(raised.value) is outcome
    assert await store.get("b") is None
    await store.put("b", b"")


async def test_a_write_that_waits_too_long_for_other_writers_did_not_happen(
    open_store: Open, server: PostgresServer, schema: str
) -> None:
    store = open_store()
    await store.put("a", b"")
    async with open_connection(server) as other:
        await other.execute(f"SELECT pg_advisory_lock({lock_key(schema)})")
        with pytest.raises(StoreUnavailable):
            await store.put("b", b"")
    await store.put("c", b"")
    assert await store.keys("", "z", 10) == ["a", "c"]


async def test_connections_that_were_cut_while_idle_are_made_again(open_store: Open, server: PostgresServer) -> None:
    store, other = open_store(), open_store()
    watch = store.watch("w/")
    await anext(watch)
    await watch.confirm()
    for number in range(3):
        server.sql(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'llog' AND pid <> "
            "pg_backend_pid()"
        )
        with suppress(OutcomeUnknown):  # sent before it was noticed that nobody is there
            await store.put("a", b"")
        version = await store.put("a", b"%d" % number)
        found = await store.get("a")
        assert found is not None
        assert found.version == version
        waiting = asyncio.ensure_future(anext(watch))
        with suppress(OutcomeUnknown):
            await other.put(f"w/{number}", b"")
        await other.put(f"w/{number}", b"")
        async with asyncio.timeout(30):
            await waiting
            await watch.confirm()


async def test_a_session_survives_a_restart_that_is_shorter_than_its_timeout(
    open_store: Open, server: PostgresServer
) -> None:
    store, other = open_store(), open_store()
    await store.put("claim", b"", ephemeral=True)
    await asyncio.to_thread(server.restart)
    assert await other.get("claim") is not None
    await store.close()
    assert await other.get("claim") is None


async def test_every_call_and_closing_end_while_the_server_hangs(open_store: Open, server: PostgresServer) -> None:
    store = open_store()
    await store.put("a", b"")
    await store.get("a")
    watch = store.watch("w/")
    await anext(watch)
    await watch.confirm()
    server.pause()
    try:
        async with asyncio.timeout(60):
            calls = [store.get("a"), store.put("b", b""), store.range("", "z", 10), watch.confirm(), store.check()]
            results = await asyncio.gather(*calls, return_exceptions=True)
            assert all(isinstance(result, StoreUnavailable | OutcomeUnknown) for result in results)
            with pytest.raises(StoreUnreachable):
                await open_store().open()
            await store.close()
    finally:
        server.resume()
    again = open_store()
    assert await again.get("a") is not None


# --- standbys


async def test_a_commit_that_no_standby_has_is_not_acknowledged(open_store: Open, server: PostgresServer) -> None:
    """An operator cancels the wait for a synchronous standby, and PostgreSQL answers as if all were well, with a
    warning.
    """
    store = open_store()
    await store.put("a", b"")
    reads = await store.begin_reads()
    server.sql("ALTER SYSTEM SET synchronous_standby_names = 'nobody'; SELECT pg_reload_conf()")
    try:
        async with open_connection(server) as other:
            for call in (lambda: store.put("b", b""), reads.confirm):
                writing, pid = await _wait_for_standbys(other, call)
                await other.execute("SELECT pg_cancel_backend($1)", pid)
                with pytest.raises((OutcomeUnknown, StoreUnavailable), match="standbys may not have it"):
                    await writing
        assert await store.get("b") is not None
    finally:
        server.sql(
            "SET synchronous_commit = local; ALTER SYSTEM RESET synchronous_standby_names; SELECT pg_reload_conf()"
        )


async def _wait_for_standbys(
    connection: Any, call: Callable[[], Coroutine[Any, Any, object]]
) -> tuple[asyncio.Future[object], int]:
    """Repeat the call until it waits for a standby, and return it with the id of its process.

    The processes of a server take up reloaded settings one after the other, some time after the reload.
    """
    async with asyncio.timeout(60):
        while True:
            writing = asyncio.ensure_future(call())
            while not writing.done():
                rows = await connection.fetch("SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep'")
                if rows:
                    return writing, rows[0]["pid"]
            await writing


async def test_reads_of_a_server_that_was_restarted_since_are_not_confirmed(
    open_store: Open, server: PostgresServer
) -> None:
    store = open_store()
    await store.put("a", b"")
    reads = await store.begin_reads()
    await store.get("a")
    await reads.confirm()
    await asyncio.to_thread(server.restart)
    with pytest.raises(StaleReads):
        await reads.confirm()
    again = await store.begin_reads()
    await store.get("a")
    await again.confirm()


async def test_a_standby_is_refused_and_takes_over_when_it_is_promoted(
    open_store: Open, schema: str, tmp_path: Path
) -> None:
    with postgres_server() as first, first.standby() as second:
        first.sql("ALTER SYSTEM SET synchronous_standby_names = '*'; SELECT pg_reload_conf()")
        with pytest.raises(ConfigurationError, match=r"LLOG_META is .* is read-only, as a standby is"):
            await open_log(_settings(second.url(schema), first, tmp_path))
        both = first.url(schema).replace(str(first.port), f"{first.port},{second.host}:{second.port}")
        async with opened_log(_settings(both, first, tmp_path)) as log:
            version = await log.meta.put("a", b"1")
            reads = await log.meta.begin_reads()
            await log.meta.get("a")
            await asyncio.to_thread(first.kill)
            second.sql(
                "SET synchronous_commit = local; ALTER SYSTEM RESET synchronous_standby_names; SELECT pg_reload_conf()"
            )
            second.promote()
            assert await log.meta.put("a", b"2", expected=version) > version
            with pytest.raises(StaleReads):
                await reads.confirm()


async def test_a_server_that_was_replaced_while_it_slept_confirms_nothing(schema: str, tmp_path: Path) -> None:
    with postgres_server() as first, first.standby() as second:
        first.sql("ALTER SYSTEM SET synchronous_standby_names = '*'; SELECT pg_reload_conf()")
        async with opened_log(_settings(first.url(schema), first, tmp_path)) as old:
            await old.meta.put("a", b"old")
            first.pause()
            second.sql(
                "SET synchronous_commit = local; ALTER SYSTEM RESET synchronous_standby_names; SELECT pg_reload_conf()"
            )
            second.promote()
            async with opened_log(_settings(second.url(schema), first, tmp_path)) as new:
                await new.meta.put("a", b"new")
            first.resume()
            reads = await old.meta.begin_reads()
            found = await old.meta.get("a")
            assert found is not None
            assert found.value == b"old"
            with pytest.raises(StoreUnavailable):
                await reads.confirm()


def _settings(meta: str, server: PostgresServer, directory: Path) -> Settings:
    return Settings(blobs=f"file://{directory}/blobs", meta=meta, postgres_password=Secret(server.password))


# --- TLS


@asynccontextmanager
async def tls(server: PostgresServer, certificate: trustme.LeafCert) -> AsyncIterator[int]:
    """The port of a server before this one that speaks TLS as PostgreSQL does, whether the test's PostgreSQL can or
    not.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate.configure_cert(context)

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            assert await reader.readexactly(8) == b"\x00\x00\x00\x08\x04\xd2\x16\x2f"  # SSLRequest
            writer.write(b"S")
            await writer.start_tls(context)
            behind = await asyncio.open_connection(server.host, server.port)
            await asyncio.gather(pipe(reader, behind[1]), pipe(behind[0], writer))
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", family=socket.AF_INET)
    try:
        yield listening.sockets[0].getsockname()[1]
    finally:
        listening.close()


async def test_the_servers_certificate_is_checked_as_the_address_says(
    server: PostgresServer, schema: str, tmp_path: Path
) -> None:
    authority, stranger = trustme.CA(), trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    stranger.cert_pem.write_to_path(tmp_path / "stranger.pem")

    async with (
        tls(server, authority.issue_cert("127.0.0.1")) as good,
        tls(server, authority.issue_cert("other.example")) as other,
    ):

        async def use(port: int, **parameters: str) -> None:
            meta = server.url(schema, **parameters).replace(str(server.port), str(port))
            async with opened_log(_settings(meta, server, tmp_path)) as log:
                await _written(log)

        await use(good, sslmode="verify-full", sslrootcert=str(tmp_path / "ca.pem"))
        await use(other, sslmode="verify-ca", sslrootcert=str(tmp_path / "ca.pem"))
        await use(good, sslmode="require")
        with pytest.raises(ConfigurationError, match=r"LLOG_META is .* TLS failed .* check sslmode and sslrootcert"):
            await use(good, sslmode="verify-full", sslrootcert=str(tmp_path / "stranger.pem"))
        with pytest.raises(ConfigurationError, match="TLS failed"):
            await use(other, sslmode="verify-full", sslrootcert=str(tmp_path / "ca.pem"))
    with pytest.raises(ConfigurationError, match="refuses TLS"):
        await use(server.port, sslmode="require")


async def _written(log: Log) -> None:
    meta: MetaStore = log.meta
    version = await meta.put("tls", b"")
    found = await meta.get("tls")
    assert found is not None
    assert found.version == version
