"""The stores that llog can use, by the scheme of their address. A new one is a folder beside this file and a line here.

An adapter's module is imported when an address of its scheme is met. It must not import optional packages at once: it
also checks addresses, for which they are not needed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple

from llog.errors import ConfigurationError
from llog.stores.addresses import Address, shown
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
"""Takes the name of the setting and its URL; raises `ConfigurationError`, which names the setting."""


class MetaAdapter(NamedTuple):
    """A metadata store's door: the object `META_ADAPTER` of its module.

    `open` and `has_key` take the log's settings, of which each adapter declares those it reads.
    """

    parse: ParseAddress
    open: Callable[[Address, Any], Awaitable[MetaStore]]
    """Opens the store, which may create it."""
    has_key: Callable[[Address, Any, str], bool]
    """Whether the store exists and has the key. Creates no store on a server; may block for a moment."""
    is_local: bool = False
    """Whether the metadata is on this machine, so that blobs are, too, unless a setting says otherwise."""
    exists: Callable[[Address], bool] = lambda _: True
    """Whether a local store exists."""
    directory: Callable[[Address], Path | None] = lambda _: None
    """The directory of this machine that the store is in, where the other engines then have theirs."""
    settings_prefix: str | None = None
    """What the names of the settings begin with that only this store reads."""


class BlobAdapter(NamedTuple):
    """A blob store's door: the object `BLOB_ADAPTER` of its module."""

    parse: ParseAddress
    open: Callable[[Address, Any], BlobStore]
    in_bucket: bool = False
    """Whether every process can reach the store by the address that metadata names, with credentials of its own."""


def meta_adapter(scheme: str) -> MetaAdapter:
    adapter: MetaAdapter = import_module(META[scheme]).META_ADAPTER
    return adapter


def blob_adapter(scheme: str) -> BlobAdapter:
    adapter: BlobAdapter = import_module(BLOBS[scheme]).BLOB_ADAPTER
    return adapter


def settings_prefixes() -> set[str]:
    """What the names of the settings begin with that only one metadata store reads, of all metadata stores."""
    return {prefix for scheme in META if (prefix := meta_adapter(scheme).settings_prefix) is not None}


def parse_meta(variable: str, url: str) -> Address:
    scheme, url = _scheme_of(variable, url, META)
    return meta_adapter(scheme).parse(variable, url)


def parse_blobs(variable: str, url: str, schemes: Mapping[str, str] = BLOBS) -> Address:
    """The address of a blob store, of one of the schemes given."""
    scheme, url = _scheme_of(variable, url, schemes)
    return blob_adapter(scheme).parse(variable, url)


def _scheme_of(variable: str, url: str, schemes: Mapping[str, str]) -> tuple[str, str]:
    """The scheme of the URL, and the URL with that scheme instead of an alias."""
    written, separator, rest = url.partition("://")
    scheme = _ALIASES.get(written, written)
    if not separator or scheme not in schemes:
        raise ConfigurationError(
            f"{variable} is {shown(url)!r}: it must start with {' or '.join(f'{each}://' for each in schemes)}"
        )
    return scheme, f"{scheme}://{rest}"


@contextmanager
def needing_extra(name: str, extra: str) -> Iterator[None]:
    """Raise `ConfigurationError`, which says what to install, if an import fails."""
    try:
        yield
    except ImportError as error:
        raise ConfigurationError(f"{name} needs {error.name}: pip install 'leaderless-log[{extra}]'") from error


def run_apart(call: Coroutine[Any, Any, bool]) -> bool:
    """Run the coroutine on an event loop of its own, in a thread: the caller may be running another one."""
    import asyncio
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, call).result()


async def has_key(opening: Awaitable[MetaStore], key: str) -> bool:
    """Whether the store that is being opened has the key. The store is closed again."""
    store = await opening
    try:
        return await store.get(key) is not None
    finally:
        await store.close()
