"""Connections to a PostgreSQL server: how they are made and checked, and what their errors mean.

A connection reaches one run of one server in one role: the answers of a server that was demoted or restarted come over
another connection.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlencode

import asyncpg
import msgspec

from llog.base.secret import Secret
from llog.errors import ConfigurationError, LlogError, StoreUnavailable, StoreUnreachable, WrongStore
from llog.stores.postgres.address import PostgresAddress
from llog.stores.postgres.schema import FORMAT, creation_statement

OPERATION_SECONDS: Final = 10.0
"""The time limit of a call, including reconnects."""
STATEMENT_SECONDS: Final = 8.0
"""The server's time limit of a statement. It ends before that of the call, so that the outcome is known."""
ATTEMPT_SECONDS: Final = 5.0
"""The time limit of a connection attempt, after which the next host is tried."""
PAUSE_SECONDS_MIN: Final = 0.02
PAUSE_SECONDS_MAX: Final = 0.5
CLOSE_SECONDS: Final = 1.0
VERSION_MIN: Final = 13
APPLICATION_NAME_MAX: Final = 63

_SETUP: Final = f"""
SET default_transaction_isolation = 'read committed';
SET statement_timeout = {int(STATEMENT_SECONDS * 1000)};
SET plan_cache_mode = 'force_generic_plan';
SET enable_seqscan = off;
SET enable_bitmapscan = off;
SET jit = off;
SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off';
"""
"""The server answers a write only when it is on the disk, whatever its default is, and every query walks the index of
keys.
"""
_SERVER: Final = """
SELECT current_setting('server_version_num')::int / 10000 AS version,
    left(pg_walfile_name(pg_current_wal_lsn()), 8) AS timeline,
    pg_postmaster_start_time()::text AS started,
    (SELECT system_identifier FROM pg_control_system())::text AS system,
    to_regclass($1) IS NOT NULL AS exists
"""

_WRONG_SETTING: Final = (
    asyncpg.InvalidPasswordError,
    asyncpg.InvalidAuthorizationSpecificationError,
    asyncpg.InvalidCatalogNameError,
    asyncpg.InsufficientPrivilegeError,
    asyncpg.ClientConfigurationError,
    asyncpg.TargetServerAttributeNotMatched,
    ssl.SSLError,
)
"""Errors that waiting seldom cures."""
_NO_TLS: Final = "rejected SSL upgrade"
"""Part of asyncpg's message, which has no class of its own, if the server has no TLS or is not PostgreSQL."""
FAILURES: Final = (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)
"""All errors of the server, the network and asyncpg. A timeout is an `OSError`."""


def is_answer(error: BaseException) -> bool:
    """Return whether the server answered that the statement failed, so that nothing of it happened.

    A FATAL error is no such answer: it ends the connection, before the commit or after it, while the server waits for
    its standbys.
    """
    return isinstance(error, asyncpg.PostgresError) and getattr(error, "severity_en", None) == "ERROR"


def _is_wrong_setting(error: BaseException) -> bool:
    return isinstance(error, _WRONG_SETTING) or _NO_TLS in str(error)


class Credentials(msgspec.Struct, frozen=True):
    """The password, or the file that holds it. Without either, asyncpg reads PGPASSFILE or ~/.pgpass."""

    password: Secret | None = None
    file: str | None = None

    def reveal(self) -> str | None:
        """Return the present password: its file may have been replaced since the last connection."""
        if self.file is None:
            return None if self.password is None else self.password.value
        try:
            return Path(self.file).read_text(encoding="utf-8").rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise ConfigurationError(
                f"LLOG_POSTGRES_PASSWORD_FILE is {self.file}, which cannot be read ({reason}): check the path and its "
                "permissions"
            ) from None


class Identity(NamedTuple):
    """One run of one server as the primary. After a takeover or a restart, the identity is another one."""

    system: str
    timeline: str
    started: str


class OpenConnection(NamedTuple):
    """An open connection, and the server at its other end."""

    client: Any
    """asyncpg's connection."""
    identity: Identity

    @property
    def is_open(self) -> bool:
        return not self.client.is_closed()

    async def close(self) -> None:
        # Not asyncpg's own timeout: before 0.32, it does not bound the wait for a request that was cancelled.
        with suppress(Exception):  # the connection is abandoned in any case
            async with asyncio.timeout(CLOSE_SECONDS):
                await self.client.close()


class Server:
    """The server of a store's database. The first connection determines which store later connections must find."""

    def __init__(self, address: PostgresAddress, credentials: Credentials, client_name: str) -> None:
        self.address = address
        self._client_name = client_name
        self._credentials = credentials
        self._store: str | None = None

    @property
    def name(self) -> str:
        """The database and its hosts, for messages."""
        return f"database {self.address.database!r} at {self.address.host_list}"

    async def has_key(self, key: str) -> bool:
        """Return whether the schema exists and has the key. Creates nothing."""
        deadline = asyncio.get_running_loop().time() + OPERATION_SECONDS
        connection = await self._connect_any_host(deadline, patient=False)
        try:
            async with asyncio.timeout_at(deadline):
                if not await connection.fetchval("SELECT to_regclass($1) IS NOT NULL", self._state_table):
                    return False
                entries = f"{self.address.schema}.llog_entries"
                return bool(await connection.fetchval(f"SELECT count(*) FROM {entries} WHERE key = $1", key.encode()))
        except FAILURES as error:
            raise self._refusal(error, patient=False) from error
        finally:
            connection.terminate()

    async def open(self) -> None:
        """Create the schema if it does not exist, and check that this version knows its format.

        Unlike later connections, this one does not wait for a wrong setting to be corrected.
        """
        connection = await self.connect(asyncio.get_running_loop().time() + OPERATION_SECONDS, patient=False)
        await connection.close()

    async def connect(self, deadline: float, *, patient: bool = True) -> OpenConnection:
        """Return a new connection, after as many attempts as the deadline allows. If it raises, nothing was changed.

        An impatient caller gets `ConfigurationError` or `WrongStore` at once, and `StoreUnreachable` at the deadline. A
        patient caller gets `StoreUnavailable` at the deadline, because passwords and servers may be replaced meanwhile.
        """
        try:
            connection = await self._connect_any_host(deadline, patient=patient)
            try:
                async with asyncio.timeout_at(deadline):
                    return OpenConnection(connection, await self._set_up(connection))
            except BaseException:
                connection.terminate()
                raise
        except FAILURES as error:
            raise self._refusal(error, patient=patient) from error
        except (WrongStore, ConfigurationError) as error:
            if patient:
                raise StoreUnavailable(str(error)) from error
            raise

    def unavailable(self, error: BaseException) -> StoreUnavailable:
        return StoreUnavailable(self._describe(error))

    def _refusal(self, error: BaseException, *, patient: bool) -> LlogError:
        if patient:
            return self.unavailable(error)
        if _is_wrong_setting(error):
            return ConfigurationError(self._describe(error))
        return StoreUnreachable(self._describe(error))

    async def _connect_any_host(self, deadline: float, *, patient: bool) -> Any:
        loop = asyncio.get_running_loop()
        pause = PAUSE_SECONDS_MIN
        while True:
            for host, port in self.address.hosts:
                try:
                    async with asyncio.timeout_at(min(deadline, loop.time() + ATTEMPT_SECONDS)):
                        return await self._connect_host(host, port)
                except FAILURES as raised:
                    error: Exception = raised
            is_hopeless = not patient and _is_wrong_setting(error)
            if is_hopeless or loop.time() + pause >= deadline:
                raise self._refusal(error, patient=patient) from error
            await asyncio.sleep(pause)
            pause = min(pause * 2, PAUSE_SECONDS_MAX)

    async def _connect_host(self, host: str, port: int) -> Any:
        address = self.address
        for name, value in address.tls:
            if name != "sslmode" and not os.access(value, os.R_OK):
                raise ConfigurationError(f"{name} is {value}, which cannot be read: check the path and its permissions")
        return await asyncpg.connect(
            f"postgresql:///?{urlencode(dict(address.tls))}" if address.tls else None,
            host=host,
            port=port,
            user=address.user,
            database=address.database,
            password=self._credentials.reveal(),
            target_session_attrs="read-write",
            max_cached_statement_lifetime=0,
            server_settings={"application_name": self._client_name[:APPLICATION_NAME_MAX]},
        )

    async def _set_up(self, connection: Any) -> Identity:
        """Set the session's options, create the schema if need be, and return who is in charge."""
        await connection.execute(_SETUP)
        server = await connection.fetchrow(_SERVER, self._state_table)
        if server["version"] < VERSION_MIN:
            raise WrongStore(f"{self.name} is PostgreSQL {server['version']}: llog needs {VERSION_MIN} or newer")
        if not server["exists"]:
            if self._store is not None:
                raise StoreUnavailable(
                    f"{self.name}: the schema {self.address.schema!r} has disappeared: restore it, and restart llog"
                )
            await connection.execute(creation_statement(self.address.schema))
        await self._check_store(connection)
        return Identity(server["system"], server["timeline"], server["started"])

    async def _check_store(self, connection: Any) -> None:
        store_format, store = await connection.fetchrow(f"SELECT format, store::text FROM {self._state_table}")
        if store_format > FORMAT:
            raise WrongStore(
                f"{self.name}: the schema {self.address.schema!r} has format {store_format}, made by a newer llog; "
                f"this one knows {FORMAT}: upgrade llog, or name another schema"
            )
        if self._store not in (None, store):
            raise StoreUnavailable(
                f"{self.name}: the schema {self.address.schema!r} was replaced by another one while it was in use: "
                "restart llog"
            )
        self._store = store

    @property
    def _state_table(self) -> str:
        return f"{self.address.schema}.llog_state"

    @property
    def _read_only(self) -> str:
        return (
            f"{self.name} is read-only, as a standby is: name the server that accepts writes, or all servers with "
            "commas between them"
        )

    def _describe(self, error: BaseException) -> str:
        """Return what is wrong and what to do about it, in one line and without secrets."""
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        if isinstance(error, asyncpg.InvalidPasswordError):
            return (
                f"{self.name} refuses the password of user {self.address.user!r}, or none is set: check "
                "LLOG_POSTGRES_PASSWORD, LLOG_POSTGRES_PASSWORD_FILE or PGPASSFILE"
            )
        if isinstance(error, asyncpg.InvalidCatalogNameError):
            return f"{self.name} does not exist: create it (CREATE DATABASE), or name another one"
        if isinstance(error, asyncpg.InvalidAuthorizationSpecificationError):
            return (
                f"{self.name} does not let user {self.address.user!r} in ({reason}): check the user, sslmode and "
                "the server's pg_hba.conf"
            )
        if isinstance(error, asyncpg.InsufficientPrivilegeError):
            return (
                f"{self.name}: user {self.address.user!r} may not do what llog needs ({reason}): GRANT it CREATE on "
                f"the database, or let it own the schema {self.address.schema!r}"
            )
        if isinstance(error, asyncpg.TargetServerAttributeNotMatched | asyncpg.ReadOnlySQLTransactionError):
            return self._read_only
        if _NO_TLS in reason:
            return f"{self.name} refuses TLS, or is not PostgreSQL: check the host, the port and sslmode"
        if isinstance(error, ssl.SSLError | asyncpg.ClientConfigurationError):
            return (
                f"{self.name}: TLS failed ({reason}): check sslmode and sslrootcert in the address, and the "
                "server's certificate"
            )
        if isinstance(error, TimeoutError):
            return (
                f"{self.name} does not answer within {OPERATION_SECONDS:g} s: check the host and the port, and "
                "that the server runs"
            )
        if isinstance(error, OSError):
            return f"{self.name} cannot be reached ({reason}): check the host and the port, and that the server runs"
        return f"{self.name}: {reason}"


class Connection:
    """A connection that is opened on first use, and opened again after it was lost."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._opened: OpenConnection | None = None

    async def open(self, deadline: float) -> OpenConnection:
        """Return the open connection; raise `StoreUnavailable` if none can be opened by the deadline."""
        if self._opened is None or not self._opened.is_open:
            self._opened = None
            self._opened = await self._server.connect(deadline)
        return self._opened

    def drop(self) -> None:
        """Cut the connection, on which a statement may still be under way."""
        if self._opened is not None:
            self._opened.client.terminate()
            self._opened = None

    async def close(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            await opened.close()
