"""Whatever holds records is for the user of this process alone: 0600 and 0700, or stricter if the umask is."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from stat import S_IMODE

import pytest

from llog.base.durable import make_directory, make_library_directory
from llog.batch.columns import columns_of, stamp
from llog.batch.format import encode
from llog.broker.cache.shared_tail import TailReader, TailWriter
from llog.broker.cache.tail import private_directory
from llog.config import Settings
from llog.engines.routing import EngineAppender
from llog.errors import ConfigurationError, LlogError, StoreUnavailable
from llog.keyed import KeyedLog
from llog.log.catalog import DISK, OBJECT, ROCKSDB, Catalog
from llog.log.engine import AppendGroup
from llog.log.opening import opened_log
from llog.log.records import Cleanup
from llog.model import Record, TopicPartition


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def open_to_others(root: Path) -> dict[str, str]:
    """What others may do something with, and its mode."""
    everything = list(root.rglob("*"))
    assert everything
    modes = {str(path.relative_to(root)): S_IMODE(path.lstat().st_mode) for path in everything}
    return {name: oct(mode) for name, mode in modes.items() if mode & 0o077}


async def test_every_file_of_a_new_log_is_for_its_user_alone(tmp_path: Path) -> None:
    root = tmp_path / "made/by/llog"
    settings = Settings(data_dir=str(root), segment_bytes=1024)
    async with opened_log(settings) as log:
        appender = EngineAppender(log)
        for engine in (OBJECT, DISK, ROCKSDB):
            await Catalog(log).create(
                engine, engine=engine, cleanup=Cleanup.DELETE if engine is OBJECT else Cleanup.COMPACT
            )
            for _ in range(20):
                group = AppendGroup(topic=engine, partition=0, records=[Record(payload=bytes(200), key=b"k")])
                (result,) = await appender.append([group])
                assert not isinstance(result, LlogError)
        await log.engines[DISK].clean(log, TopicPartition(DISK, 0), force=True)
        names = {path.name for path in root.rglob("*")}
        assert {"meta.sqlite", "meta.sqlite-wal", "meta.sqlite-shm", "tail", "compacted", "CURRENT"} <= names
        assert open_to_others(tmp_path) == {}
    assert open_to_others(tmp_path) == {}


async def test_every_file_of_a_keyed_log_is_for_its_user_alone(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir(0o755)
    for name in ("new", "there"):
        async with await KeyedLog.open(f"file://{tmp_path}/{name}") as log:
            await log.append([(b"a", bytes(1000))])
            await log.flush()
        assert open_to_others(tmp_path / name) == {}
    assert S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    assert S_IMODE((tmp_path / "there").stat().st_mode) == 0o755, "what was there before is the operator's"


async def test_a_keyed_log_whose_directory_cannot_be_made_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(directory: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("llog.keyed.slate.make_library_directory", refused)
    with pytest.raises(
        StoreUnavailable, match=r"cannot make its directory \(Read-only.*: mount its file system writable"
    ):
        await KeyedLog.open(f"file://{tmp_path}/log")


def test_a_stricter_umask_counts(tmp_path: Path) -> None:
    os.umask(0o277)
    make_directory(tmp_path / "a")
    assert S_IMODE((tmp_path / "a").stat().st_mode) == 0o500


def test_a_file_system_without_lists_of_rights_still_gives_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "setxattr")
    make_library_directory(tmp_path / "a/b")
    assert S_IMODE((tmp_path / "a/b").stat().st_mode) == 0o700


def test_every_file_of_the_shared_tail_is_for_its_user_alone(tmp_path: Path) -> None:
    root = private_directory(tmp_path / "tail") / "log"
    writer = TailWriter(root, "w", 1 << 20)
    assert writer.put(("t", 0), 1, b"".join(encode(stamp(columns_of([Record(payload=b"a")]), 5))))
    assert len(list(root.rglob("*"))) >= 4
    assert open_to_others(tmp_path) == {}
    writer.close()


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770, 0o702])
def test_a_tail_cache_directory_that_others_may_write_is_refused(tmp_path: Path, mode: int) -> None:
    directory = tmp_path / "tail"
    directory.mkdir()
    directory.chmod(mode)
    with pytest.raises(ConfigurationError, match=rf"{directory}, which has mode {mode:04o} .chmod go-w"):
        private_directory(directory)
    directory.chmod(0o755)
    assert private_directory(directory) == directory


def test_a_tail_cache_directory_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "tail"
    directory.mkdir(0o700)
    (tmp_path / "link").symlink_to(directory)
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    for name in ("tail", "link"):
        with pytest.raises(
            ConfigurationError, match=f"{directory}, which belongs to user {own}, while this process runs as {own + 1}"
        ):
            private_directory(tmp_path / name)


def test_a_tail_cache_directory_that_others_may_replace_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(ConfigurationError, match=f"lies in {tmp_path}/open, where any user may replace it"):
        private_directory(tmp_path / "open/tail")
    (tmp_path / "open").chmod(0o1777)
    assert private_directory(tmp_path / "open/tail").is_dir()


def test_a_link_to_the_tail_cache_directory_is_followed_once(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "tail")
    assert private_directory(tmp_path / "link") == tmp_path / "tail"


def test_records_that_another_user_plants_in_the_shared_tail_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory was removed under a running broker, and another user was quicker to make it again."""
    writer = TailWriter(tmp_path, "planted", 1 << 20)
    batch = b"".join(encode(stamp(columns_of([Record(payload=b"planted")]), 5)))
    assert writer.put(("t", 0), 1, batch)
    assert len(TailReader(tmp_path).find(("t", 0), 1, 1000)) == 1
    own = os.geteuid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: own + 1)
        assert TailReader(tmp_path).find(("t", 0), 1, 1000) == []
    (tmp_path / "planted").chmod(0o777)
    assert TailReader(tmp_path).find(("t", 0), 1, 1000) == []
    writer.close()
