"""Stores are found by the scheme of their address: a new one needs an adapter and a line in the registry."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from llog.config import Settings
from llog.errors import ConfigurationError
from llog.log.catalog import Catalog
from llog.log.opening import log_exists, opened_log
from llog.stores import registry
from llog.stores.addresses import Address, parse_path
from llog.stores.memory.meta import MemoryMeta, MemoryMetaStore
from llog.stores.meta import MetaStore
from llog.stores.object.adapter import BucketSettings
from llog.stores.oxia.adapter import OxiaSettings
from llog.stores.postgres.adapter import PostgresSettings
from llog.stores.registry import META, MetaAdapter, meta_adapter
from llog.stores.sqlite.adapter import SqliteSettings


async def test_a_registered_store_holds_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = MemoryMeta()

    async def opened(address: Address, settings: Settings) -> MetaStore:
        assert address == Address("shelf", "", str(tmp_path / "meta"))
        return MemoryMetaStore(kept)

    module = ModuleType("shelf_adapter")
    module.META_ADAPTER = MetaAdapter(parse_path, opened, lambda *_: False, is_local=True)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "shelf_adapter", module)
    monkeypatch.setattr(registry, "META", {**META, "shelf": "shelf_adapter"})
    settings = Settings(data_dir=str(tmp_path), meta=f"shelf://{tmp_path}/meta")
    async with opened_log(settings) as log:
        await Catalog(log).create("t")
    async with opened_log(settings) as log:
        assert [topic.name for topic in await Catalog(log).topics()] == ["t"]
    assert not log_exists(Settings(data_dir=str(tmp_path), meta=settings.meta, root_prefix="other"))


def test_a_scheme_that_nothing_is_registered_for_is_refused_with_those_there_are() -> None:
    with pytest.raises(
        ConfigurationError, match="LLOG_META is 'shelf://x': it must start with sqlite:// or postgresql"
    ):
        Settings(meta="shelf://x")


def test_addresses_are_checked_without_the_packages_of_their_stores() -> None:
    code = """
import sys
from llog.stores.registry import BLOBS, META, blob_adapter, meta_adapter
for scheme in META: meta_adapter(scheme)
for scheme in BLOBS: blob_adapter(scheme)
print(*({"grpc", "asyncpg", "obstore", "sqlite3", "pyarrow"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_every_store_that_reads_settings_of_its_own_finds_them() -> None:
    settings = Settings()
    adapters: tuple[BucketSettings, OxiaSettings, PostgresSettings, SqliteSettings] = (settings,) * 4
    assert adapters == (settings,) * 4  # the types are the point
    for scheme in META:
        prefix = meta_adapter(scheme).settings_prefix
        assert prefix is None or any(field.startswith(prefix) for field in Settings.__struct_fields__)
