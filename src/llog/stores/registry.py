"""The stores that llog can use, by address scheme. A new store is a folder beside this file and a line in this file.

An adapter's module is imported with the first address of its scheme. It imports optional packages only to open a store:
checking an address must work without them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple

from llog.errors import ConfigurationError
from llog.stores.addresses import Address, redact
from llog.stores.blobs import BlobStore
from llog.stores.meta import MetaStore

META: Final[Mapping[str, str]] = {
    "sqlite": "llog.stores.sqlite.adapter",
    "postgresql": "llog.stores.postgres.adapter",
    "oxia": "llog.stores.oxia.adapter",
    "oxias": "llog.stores.oxia.adapter",
    "memory": "llog.stores.memory.adapter",
}
BLOBS: Final[Mapping[str, str]] = {
    "file": "llog.stores.files.adapter",
    "s3": "llog.stores.object.adapter",
    "gs": "llog.stores.object.adapter",
    "az": "llog.stores.object.adapter",
    "memory": "llog.stores.memory.adapter",
}
_ALIASES: Final = {"postgres": "postgresql"}

ParseAddress = Callable[[str, str], Address]
"""Takes the name of the setting and its URL; raises a `ConfigurationError` that names the setting."""


class MetaAdapter(NamedTuple):
    """How llog finds and opens one kind of metadata store: the object `META_ADAPTER` of the adapter's module.

    `open` and `has_key` take the log's settings; each adapter declares a protocol with those that it reads.
    """

    parse: ParseAddress
    open: Callable[[Address, Any], Awaitable[MetaStore]]
    """Open the store, and create it if it does not exist."""
    has_key: Callable[[Address, Any, str], bool]
    """Return whether the store exists and has the key. Creates no store on a server; may block for a moment."""
    is_local: bool = False
    """Whether the metadata is on this machine: then blobs are here, too, unless a setting says otherwise."""
    exists: Callable[[Address], bool] = lambda _: True
    """Return whether a local store exists."""
    directory: Callable[[Address], Path | None] = lambda _: None
    """Return the store's directory on this machine, in which the `disk` and `rocksdb` engines put theirs by default."""
    settings_prefix: str | None = None
    """The beginning of the names of the settings that only this store reads."""


class BlobAdapter(NamedTuple):
    """How llog finds and opens one kind of blob store: the object `BLOB_ADAPTER` of the adapter's module."""

    parse: ParseAddress
    open: Callable[[Address, Any], BlobStore]
    in_bucket: bool = False
    """Whether any process with credentials can reach the store by the address that the metadata has."""


def meta_adapter(scheme: str) -> MetaAdapter:
    adapter: MetaAdapter = import_module(META[scheme]).META_ADAPTER
    return adapter


def blob_adapter(scheme: str) -> BlobAdapter:
    adapter: BlobAdapter = import_module(BLOBS[scheme]).BLOB_ADAPTER
    return adapter


def settings_prefixes() -> set[str]:
    """Return the `settings_prefix` of every metadata store that has one."""
    return {prefix for scheme in META if (prefix := meta_adapter(scheme).settings_prefix) is not None}


def parse_meta(variable: str, url: str) -> Address:
    """Return the address of a metadata store, or raise `ConfigurationError`."""
    scheme, url = _resolve_scheme(variable, url, META)
    return meta_adapter(scheme).parse(variable, url)


def parse_blobs(variable: str, url: str, schemes: Mapping[str, str] = BLOBS) -> Address:
    """Return the address of a blob store with one of these schemes, or raise `ConfigurationError`."""
    scheme, url = _resolve_scheme(variable, url, schemes)
    return blob_adapter(scheme).parse(variable, url)


def _resolve_scheme(variable: str, url: str, schemes: Mapping[str, str]) -> tuple[str, str]:
    """Return the scheme of the URL, and the URL with that scheme in place of an alias."""
    written, separator, rest = url.partition("://")
    scheme = _ALIASES.get(written, written)
    if not separator or scheme not in schemes:
        raise ConfigurationError(
            f"{variable} is {redact(url)!r}: it must start with {' or '.join(f'{each}://' for each in schemes)}"
        )
    return scheme, f"{scheme}://{rest}"


@contextmanager
def require_extra(name: str, extra: str) -> Iterator[None]:
    """Turn a failed import into a `ConfigurationError` that says what to install."""
    try:
        yield
    except ImportError as error:
        raise ConfigurationError(f"{name} needs {error.name}: pip install 'leaderless-log[{extra}]'") from error


def run_in_own_loop(call: Coroutine[Any, Any, bool]) -> bool:
    """Run the coroutine on a new event loop in a thread, since the caller's thread may run one already."""
    import asyncio
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, call).result()


async def has_key(opening: Awaitable[MetaStore], key: str) -> bool:
    """Open the store, return whether it has the key, and close the store."""
    store = await opening
    try:
        return await store.get(key) is not None
    finally:
        await store.close()
