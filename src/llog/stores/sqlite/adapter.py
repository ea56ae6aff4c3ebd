"""How llog opens a metadata store in a SQLite file."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final, Protocol

from llog.stores.addresses import Address, parse_path
from llog.stores.meta import MetaStore
from llog.stores.registry import MetaAdapter, has_key, run_in_own_loop


class SqliteSettings(Protocol):
    @property
    def store_session_timeout_ms(self) -> int: ...


async def _open(address: Address, settings: SqliteSettings) -> MetaStore:
    from llog.stores.sqlite.store import SqliteMetaStore

    return await asyncio.to_thread(
        SqliteMetaStore.open, Path(address.path), session_timeout_ms=settings.store_session_timeout_ms
    )


def _exists(address: Address) -> bool:
    return Path(address.path).exists()


def _has_key(address: Address, settings: SqliteSettings, key: str) -> bool:
    return _exists(address) and run_in_own_loop(has_key(_open(address, settings), key))


def _directory(address: Address) -> Path:
    return Path(address.path).parent


META_ADAPTER: Final = MetaAdapter(parse_path, _open, _has_key, is_local=True, exists=_exists, directory=_directory)
