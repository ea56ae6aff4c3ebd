"""Connections to a PostgreSQL server: how they are made and checked, and what their errors mean.

A connection is good for one server process tree in one role: what a demoted or restarted server answers comes over
another one.
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
from llog.stores.postgres.schema import FORMAT, creation

OPERATION_SECONDS: Final = 10.0
"""How long a call may take, reconnecting included."""
STATEMENT_SECONDS: Final = 8.0
"""After which the server gives a statement up. It says so before a call's time is over, so that the outcome is known.
"""
ATTEMPT_SECONDS: Final = 5.0
"""How long one host may take to let us in before the next one is tried."""
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
"""A write is on the disk before it is answered, whatever the server's default is; and every query walks the index of
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
"""What waiting seldom mends."""
_NO_TLS: Final = "rejected SSL upgrade"
"""In asyncpg's words, which have no class of their own: the server has no TLS, or is no PostgreSQL."""
FAILURES: Final = (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)
"""What a server, the way to it or asyncpg can say; a timeout is an `OSError`."""


def is_answer(error: BaseException) -> bool:
    """Whether the server answered that the statement failed, so that nothing of it happened.

    A FATAL error is none: it ends the connection, be it before the commit or after it, while standbys are waited for.
    """
    return isinstance(error, asyncpg.PostgresError) and getattr(error, "severity_en", None) == "ERROR"


def _is_wrong_setting(error: BaseException) -> bool:
    return isinstance(error, _WRONG_SETTING) or _NO_TLS in str(error)


class Credentials(msgspec.Struct, frozen=True):
    """The password, or the file that holds it. With neither, PostgreSQL's own ways are tried (PGPASSFILE,
    ~/.pgpass).
    """

    password: Secret | None = None
    file: str | None = None

    def reveal(self) -> str | None:
        """Return the password as it is now: a file may have been replaced since."""
        if self.file is None:
            return None if self.password is None else self.password.value
        try:
            return Path(self.file).read_text(encoding="utf-8").rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise ConfigurationError(
                f"LLOG_POSTGRES_PASSWORD_FILE is {self.file}, which cannot be read: {reason}"
            ) from None


class Identity(NamedTuple):
    """One run of one server as the one in charge. A standby that takes over, and a server that restarts, is another
    one.
    """

    system: str
    timeline: str
    started: str


class Link(NamedTuple):
    """An open connection, and who is at its other end."""

    connection: Any
    identity: Identity

    @property
    def is_open(self) -> bool:
        return not self.connection.is_closed()

    async def close(self) -> None:
        with suppress(Exception):  # it is let go of in any case
            await self.connection.close(timeout=CLOSE_SECONDS)


class Server:
    """Where a store's database is, and how to get in. The first connection of a store settles which store that is."""

    def __init__(self, address: PostgresAddress, credentials: Credentials, client_name: str) -> None:
        self.address = address
        self._client_name = client_name
        self._credentials = credentials
        self._store: str | None = None

    @property
    def name(self) -> str:
        return f"database {self.address.database!r} at {self.address.places}"

    async def has_key(self, key: str) -> bool:
        """Whether the schema is there and has the key; creates nothing."""
        deadline = asyncio.get_running_loop().time() + OPERATION_SECONDS
        connection = await self._connection(deadline, patient=False)
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
        """Create the schema if there is none, and check that it is one that this version knows.

        Unlike later connections this one is not patient with what looks like a wrong setting.
        """
        link = await self.connect(asyncio.get_running_loop().time() + OPERATION_SECONDS, patient=False)
        await link.close()

    async def connect(self, deadline: float, *, patient: bool = True) -> Link:
        """Return a new connection, after as many attempts as fit in before the deadline; nothing was changed if it
        raises.

        An impatient caller gets a `ConfigurationError` or `WrongStore` at once, and `StoreUnreachable` in the end; a
        patient one `StoreUnavailable`: a password may be changed and a server replaced under way.
        """
        try:
            connection = await self._connection(deadline, patient=patient)
            try:
                async with asyncio.timeout_at(deadline):
                    return Link(connection, await self._prepared(connection))
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

    async def _connection(self, deadline: float, *, patient: bool) -> Any:
        loop = asyncio.get_running_loop()
        pause = PAUSE_SECONDS_MIN
        while True:
            for host, port in self.address.hosts:
                try:
                    async with asyncio.timeout_at(min(deadline, loop.time() + ATTEMPT_SECONDS)):
                        return await self._attempt(host, port)
                except FAILURES as raised:
                    error: Exception = raised
            is_hopeless = not patient and _is_wrong_setting(error)
            if is_hopeless or loop.time() + pause >= deadline:
                raise self._refusal(error, patient=patient) from error
            await asyncio.sleep(pause)
            pause = min(pause * 2, PAUSE_SECONDS_MAX)

    async def _attempt(self, host: str, port: int) -> Any:
        address = self.address
        for name, value in address.tls:
            if name != "sslmode" and not os.access(value, os.R_OK):
                raise ConfigurationError(f"{name} is {value}, which cannot be read: check the path and who may read it")
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

    async def _prepared(self, connection: Any) -> Identity:
        await connection.execute(_SETUP)
        server = await connection.fetchrow(_SERVER, self._state_table)
        if server["version"] < VERSION_MIN:
            raise WrongStore(f"{self.name} is PostgreSQL {server['version']}: llog needs {VERSION_MIN} or newer")
        if not server["exists"]:
            if self._store is not None:
                raise StoreUnavailable(
                    f"{self.name}: the schema {self.address.schema!r} is gone that was there: restore it, and "
                    "start again"
                )
            await connection.execute(creation(self.address.schema))
        await self._check_store(connection)
        return Identity(server["system"], server["timeline"], server["started"])

    async def _check_store(self, connection: Any) -> None:
        found, store = await connection.fetchrow(f"SELECT format, store::text FROM {self._state_table}")
        if found > FORMAT:
            raise WrongStore(
                f"{self.name}: the schema {self.address.schema!r} has format {found}, made by a newer llog; this "
                f"one knows {FORMAT}: "
                "upgrade llog, or name another schema"
            )
        if self._store not in (None, store):
            raise StoreUnavailable(
                f"{self.name}: the schema {self.address.schema!r} was replaced by another one while it was in use: "
                "start again"
            )
        self._store = store

    @property
    def _state_table(self) -> str:
        return f"{self.address.schema}.llog_state"

    @property
    def _read_only(self) -> str:
        return (
            f"{self.name} is read-only, as a standby is: name the server that takes writes, or all of them with "
            "commas between"
        )

    def _describe(self, error: BaseException) -> str:
        """Say what is wrong and what to do about it, in one line and without secrets."""
        said = " ".join(str(error).split())[:200] or type(error).__name__
        if isinstance(error, asyncpg.InvalidPasswordError):
            return (
                f"{self.name} refuses the password of user {self.address.user!r}, or there is none: check "
                "LLOG_POSTGRES_PASSWORD, "
                "LLOG_POSTGRES_PASSWORD_FILE or PGPASSFILE"
            )
        if isinstance(error, asyncpg.InvalidCatalogNameError):
            return f"{self.name} does not exist: create it (CREATE DATABASE), or name another"
        if isinstance(error, asyncpg.InvalidAuthorizationSpecificationError):
            return (
                f"{self.name} does not let user {self.address.user!r} in ({said}): check the user, sslmode and "
                "the server's pg_hba.conf"
            )
        if isinstance(error, asyncpg.InsufficientPrivilegeError):
            return (
                f"{self.name}: user {self.address.user!r} may not do what llog needs ({said}): GRANT it CREATE on "
                "the database, or let it "
                f"own the schema {self.address.schema!r}"
            )
        if isinstance(error, asyncpg.TargetServerAttributeNotMatched | asyncpg.ReadOnlySQLTransactionError):
            return self._read_only
        if _NO_TLS in said:
            return f"{self.name} refuses TLS, or is no PostgreSQL: check the host and the port, and sslmode"
        if isinstance(error, ssl.SSLError | asyncpg.ClientConfigurationError):
            return (
                f"{self.name}: TLS failed ({said}): check sslmode and sslrootcert in the address, and the "
                "server's certificate"
            )
        if isinstance(error, TimeoutError):
            return (
                f"{self.name} does not answer within {OPERATION_SECONDS:g} s: check the host and the port, and "
                "that the server runs"
            )
        if isinstance(error, OSError):
            return f"{self.name} cannot be reached ({said}): check the host and the port, and that the server runs"
        return f"{self.name}: {said}"


class Line:
    """One connection, made when it is needed and made again when it was lost."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._link: Link | None = None

    async def link(self, deadline: float) -> Link:
        """Raises `StoreUnavailable` if there is none by the deadline."""
        if self._link is None or not self._link.is_open:
            self._link = None
            self._link = await self._server.connect(deadline)
        return self._link

    def drop(self) -> None:
        """Cut the connection: nobody knows what it is waiting for."""
        if self._link is not None:
            self._link.connection.terminate()
            self._link = None

    async def close(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            await link.close()
