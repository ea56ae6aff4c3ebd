"""Opening a log: what the settings name is opened, or one line says which setting is to blame."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from llog.api.leaderless import LeaderlessLogCompactor, LeaderlessLogReader, LeaderlessLogWriter, SharedAppendGroup
from llog.config import Settings
from llog.config.locations import NO_BLOBS
from llog.engines.object.collector import Collector, CollectorOptions
from llog.engines.object.compaction.compactor import Compactor
from llog.engines.object.reader import Reader
from llog.engines.object.verify import verify
from llog.engines.object.writer import Writer
from llog.errors import ConfigurationError, LlogError, LogNotFound, StoreUnavailable, WrongStore
from llog.log.catalog import Catalog
from llog.log.engine import AppendGroup
from llog.log.keys import LOG_FORMAT
from llog.log.opening import close_log, log_exists, open_log, opened_log
from llog.log.records import LogFormat, decode
from llog.model import Record, TopicPartition
from llog.stores.sqlite.store import SqliteMetaStore


async def test_what_was_appended_is_there_when_the_log_is_opened_again(tmp_path: Path) -> None:
    settings = Settings(data_dir=str(tmp_path / "data"))
    async with opened_log(settings) as log:
        await Catalog(log).create("t")
        await Writer(log).append([AppendGroup(topic="t", partition=0, records=[Record(payload=b"x")])])
    async with opened_log(settings) as log:
        assert (await Reader(log).read_offset(TopicPartition("t", 0), 1)).payload == b"x"
    assert (tmp_path / "data/meta.sqlite").is_file()
    assert (tmp_path / "data/blobs").is_dir()


async def test_a_log_in_memory_is_shared_by_its_name_within_the_process() -> None:
    here, there = Settings(meta="memory://here", blobs="memory://here"), Settings(meta="memory://x", blobs="memory://x")
    async with opened_log(here) as log:
        await Catalog(log).create("t")
    async with opened_log(here) as log, opened_log(there) as other:
        assert [topic.name for topic in await Catalog(log).topics()] == ["t"]
        assert await Catalog(other).topics() == []


@pytest.mark.parametrize("memory", ["meta", "blobs"])
async def test_one_store_in_memory_and_the_other_kept_is_refused(tmp_path: Path, memory: str) -> None:
    settings = Settings(data_dir=str(tmp_path), **{memory: "memory://"})  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"LLOG_META is .* and LLOG_BLOBS is"):
        await open_log(settings)


async def test_a_blob_store_of_another_log_is_refused(tmp_path: Path) -> None:
    settings = Settings(data_dir=str(tmp_path / "data"))
    async with opened_log(settings) as log:
        await Catalog(log).create("t")
    with pytest.raises(WrongStore, match="LLOG_BLOBS is"):
        await open_log(Settings(meta=settings.meta, blobs=f"file://{tmp_path}/other"))


async def test_new_metadata_does_not_take_the_blobs_of_another_log(tmp_path: Path) -> None:
    settings = Settings(data_dir=str(tmp_path / "data"))
    async with opened_log(settings) as log:
        await Catalog(log).create("t")
    new = Settings(meta=f"sqlite://{tmp_path}/new.sqlite", blobs=settings.blobs)
    for _ in range(2):
        await _refused(WrongStore, new, "belongs to a log with other metadata")
    await close_log(await open_log(settings))


async def test_a_file_that_is_not_ours_is_refused_by_the_name_of_its_setting(tmp_path: Path) -> None:
    (tmp_path / "text.sqlite").write_text("no database at all, but long enough to look like something " * 20)
    with closing(sqlite3.connect(tmp_path / "foreign.sqlite")) as connection:
        connection.execute("CREATE TABLE theirs (x)")
        connection.commit()
    for name in ("text.sqlite", "foreign.sqlite"):
        await _refused(WrongStore, Settings(data_dir=str(tmp_path), meta=f"sqlite://{tmp_path}/{name}"), "LLOG_META is")


async def test_metadata_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    settings = Settings(data_dir=str(tmp_path))
    await close_log(await open_log(settings))
    with closing(sqlite3.connect(tmp_path / "meta.sqlite")) as connection:
        connection.execute("PRAGMA user_version = 99")
    await _refused(WrongStore, settings, "upgrade llog")


async def test_a_log_carries_its_format_from_the_first_opening_on(tmp_path: Path) -> None:
    async with opened_log(Settings(data_dir=str(tmp_path))) as log:
        found = await log.meta.get(LOG_FORMAT)
        assert found is not None
        assert decode(LogFormat, found.value, found.key) == LogFormat(number=1, needs="0.1.0")


async def test_a_log_of_before_counts_as_format_1_and_gets_its_number(tmp_path: Path) -> None:
    settings = Settings(data_dir=str(tmp_path))
    async with opened_log(settings) as log:
        await Catalog(log).create("t")
        await log.meta.delete(LOG_FORMAT)
    async with opened_log(settings) as log:
        assert await log.meta.get(LOG_FORMAT) is not None
        assert (await Catalog(log).get("t")).partitions == 1


async def test_a_log_of_before_can_be_opened_while_its_store_takes_no_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(data_dir=str(tmp_path))
    async with opened_log(settings) as log:
        await log.meta.delete(LOG_FORMAT)

    async def full(self: SqliteMetaStore, key: str, value: bytes, **_: object) -> int:
        raise StoreUnavailable("the disk is full")

    monkeypatch.setattr(SqliteMetaStore, "put", full)
    async with opened_log(settings) as log:
        assert await log.meta.get(LOG_FORMAT) is None
    new = Settings(data_dir=str(tmp_path / "new"))
    await _refused(StoreUnavailable, new, "LLOG_META is .*: the disk is full")


async def test_a_directory_that_cannot_be_made_is_blamed_on_its_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    below = f"{tmp_path}/file/below"
    await _refused(
        StoreUnavailable, Settings(data_dir=str(tmp_path), meta=f"sqlite://{below}/meta.sqlite"), "LLOG_META"
    )
    await _refused(LlogError, Settings(data_dir=str(tmp_path), blobs=f"file://{below}"), "LLOG_BLOBS")


async def _refused(kind: type[LlogError], settings: Settings, named: str) -> None:
    with pytest.raises(kind, match=named) as caught:
        await open_log(settings)
    assert "\n" not in str(caught.value)


async def test_closing_twice_is_no_error(tmp_path: Path) -> None:
    log = await open_log(Settings(data_dir=str(tmp_path)))
    await close_log(log)
    await close_log(log)


async def test_logs_with_other_prefixes_share_both_stores_without_seeing_each_other(tmp_path: Path) -> None:
    every = [Settings(data_dir=str(tmp_path), root_prefix=prefix) for prefix in ("", "a", "a/b", "a-b")]
    for number, settings in enumerate(every):
        assert not log_exists(settings)
        async with opened_log(settings) as log:
            assert log_exists(settings)
            assert await Catalog(log).topics() == []
            await Catalog(log).create("t")
            for payload in (b"x", b"y", b"%d" % number):
                await Writer(log).append([AppendGroup(topic="t", partition=0, records=[Record(payload=payload)])])
    for number, settings in enumerate(every):
        async with opened_log(settings) as log:
            assert [topic.name for topic in await Catalog(log).topics()] == ["t"]
            await Compactor(log).compact_once(TopicPartition("t", 0), force=True)
            await Collector(log, CollectorOptions(grace_ms=0)).collect_once()
            await Catalog(log).create(f"t{number}")
    for number, settings in enumerate(every):
        async with opened_log(settings) as log:
            assert [topic.name for topic in await Catalog(log).topics()] == ["t", f"t{number}"]
            assert (await Reader(log).read_offset(TopicPartition("t", 0), 3)).payload == b"%d" % number
            assert (await verify(log, TopicPartition("t", 0))).problems == []
            await Catalog(log).delete("t")
            await Collector(log, CollectorOptions(grace_ms=0)).collect_once()


def test_whoever_writes_needs_a_blob_store(tmp_path: Path) -> None:
    settings = Settings(data_dir=str(tmp_path), blobs=NO_BLOBS)
    needed = r"LLOG_S3_BUCKET=.*LLOG_BLOBS="
    with LeaderlessLogWriter(settings) as writer, pytest.raises(ConfigurationError, match=needed):
        writer.initialize_partition("t", 0)
    with LeaderlessLogCompactor(settings) as compactor, pytest.raises(ConfigurationError, match=needed):
        compactor.compact_once("t", 0)
    assert not (tmp_path / "meta.sqlite").exists()


def test_a_reader_without_a_blob_store_makes_no_log_and_says_which_blob_it_cannot_find(tmp_path: Path) -> None:
    local = Settings(data_dir=str(tmp_path), inline_max_bytes=0)
    with LeaderlessLogReader(Settings(data_dir=str(tmp_path), blobs=NO_BLOBS)) as reader:
        with pytest.raises(LogNotFound, match="there is no log"):
            reader.topics()
        with LeaderlessLogWriter(local) as writer:
            writer.initialize_partition("t", 0)
            writer.append_shared([SharedAppendGroup(topic="t", partition=0, payloads=["x"])])
        assert reader.bounds("t", 0) == (1, 2)
        with pytest.raises(ConfigurationError, match=r"names the blob 'llog/wal-shared/.* set LLOG_BLOBS"):
            reader.read_offset("t", 0, 1)
