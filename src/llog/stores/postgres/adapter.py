"""How llog opens a metadata store in a PostgreSQL database."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from llog.base.secret import Secret, reveal
from llog.errors import ConfigurationError
from llog.stores.addresses import Address, redact, split_url
from llog.stores.meta import MetaStore
from llog.stores.postgres.address import PostgresAddress
from llog.stores.registry import MetaAdapter, require_extra, run_in_own_loop

if TYPE_CHECKING:
    from llog.stores.postgres.store import PostgresMetaStore


class PostgresSettings(Protocol):
    @property
    def postgres_password(self) -> Secret | None: ...
    @property
    def postgres_password_file(self) -> str | None: ...
    @property
    def client_name(self) -> str: ...
    @property
    def store_session_timeout_ms(self) -> int: ...


def _parse(variable: str, url: str) -> Address:
    try:
        normalized, _, query = str(PostgresAddress.parse(url)).partition("?")
    except ValueError as error:
        raise ConfigurationError(f"{variable} is {redact(url)!r}: {error}") from None
    return Address(*split_url(normalized), query)


def _new_store(address: Address, settings: PostgresSettings) -> PostgresMetaStore:
    with require_extra("PostgreSQL", "postgres"):
        from llog.stores.postgres.store import PostgresMetaStore
    return PostgresMetaStore(
        PostgresAddress.parse(address.url),
        password=reveal(settings.postgres_password),
        password_file=settings.postgres_password_file,
        client_name=settings.client_name,
        session_timeout_ms=settings.store_session_timeout_ms,
    )


async def _open(address: Address, settings: PostgresSettings) -> MetaStore:
    store = _new_store(address, settings)
    await store.open()
    return store


def _has_key(address: Address, settings: PostgresSettings, key: str) -> bool:
    return run_in_own_loop(_new_store(address, settings).has_key(key))


META_ADAPTER: Final = MetaAdapter(_parse, _open, _has_key, settings_prefix="postgres_")
