"""How llog opens a metadata store in Oxia."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, Protocol
from urllib.parse import unquote

from llog.base.secret import Secret, reveal
from llog.errors import ConfigurationError
from llog.stores.addresses import Address, refuse_credentials, refuse_parameters, split_url
from llog.stores.meta import MetaStore
from llog.stores.registry import MetaAdapter, require_extra

if TYPE_CHECKING:
    from llog.stores.oxia.store import OxiaMetaStore

OXIA_SCHEMES: Final = ("oxia", "oxias")
OXIA_NAMESPACE: Final = "default"
_HOST_AND_PORT: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")


class OxiaSettings(Protocol):
    @property
    def oxia_ca_file(self) -> str | None: ...
    @property
    def oxia_token(self) -> Secret | None: ...
    @property
    def oxia_token_file(self) -> str | None: ...
    @property
    def client_name(self) -> str: ...
    @property
    def store_session_timeout_ms(self) -> int: ...


def check_servers(variable: str, servers: str) -> str:
    """Return the servers, `host:port` with commas between them, or raise `ConfigurationError`."""
    for server in servers.split(","):
        found = _HOST_AND_PORT.fullmatch(server)
        if found is None or not 1 <= int(found[2]) <= 65_535:
            raise ConfigurationError(
                f"{variable} names the Oxia server {server[:80]!r}: write host:port, and commas between several servers"
            )
    return servers


def _parse(variable: str, url: str) -> Address:
    refuse_credentials(variable, url)
    refuse_parameters(variable, url)
    scheme, servers, path = split_url(url)
    return Address(scheme, check_servers(variable, servers), unquote(path.strip("/")) or OXIA_NAMESPACE)


def _new_store(address: Address, settings: OxiaSettings) -> OxiaMetaStore:
    with require_extra("Oxia", "oxia"):
        from llog.stores.oxia.channels import Security
        from llog.stores.oxia.store import OxiaMetaStore
    return OxiaMetaStore(
        address.authority.split(","),
        address.path,
        session_timeout_ms=settings.store_session_timeout_ms,
        identity=settings.client_name,
        security=Security(
            tls=address.scheme == "oxias",
            ca_file=settings.oxia_ca_file,
            token=reveal(settings.oxia_token),
            token_file=settings.oxia_token_file,
        ),
    )


async def _open(address: Address, settings: OxiaSettings) -> MetaStore:
    return await _new_store(address, settings).connect()


def _has_key(address: Address, settings: OxiaSettings, key: str) -> bool:
    return _new_store(address, settings).has_key(key)


META_ADAPTER: Final = MetaAdapter(_parse, _open, _has_key, settings_prefix="oxia_")
