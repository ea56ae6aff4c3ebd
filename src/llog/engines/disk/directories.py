"""The directories of disk topics, `{segments}/{topic directory}/{partition}/`: made with the topic, gone with it.

What lies in them is the engine's business. A deletion first renames the topic's directory to `{topic
directory}~deleted`, which no topic is called: from that moment on, whoever holds files in it open finds its directory
gone.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from llog.base.durable import DIRECTORY_MODE, make_directory, sync_directory
from llog.errors import ConfigurationError, StoreUnavailable, WrongStore
from llog.log.log import Log, Rocks
from llog.log.owners import ROCKSDB, ROCKSDB_NAMED, disk_of
from llog.log.records import Topic

_DELETED = "~deleted"


def segments_directory(log: Log, what: str) -> Path:
    """Where disk topics lie on this machine; `ConfigurationError` if nothing says where that is."""
    if log.segments is None:
        raise ConfigurationError(
            f"{what} is of engine 'disk', and nothing says where its files lie: set LLOG_SEGMENTS_DIR to a directory"
        )
    return log.segments.directory


async def topic_path(log: Log, topic: Topic) -> Path:
    """Where the files of a disk topic lie on this machine.

    If they are in a directory of another one, `LogOwned` with the address of the broker there, or `OwnerUnavailable` if
    none runs.
    """
    what = f"topic {topic.name!r}"
    if topic.home and log.owners is not None:
        here = None if log.segments is None else await log.segments.identity()
        if here != topic.home:
            segments = None if log.segments is None else log.segments.directory
            raise await log.owners.elsewhere(disk_of(topic.home), what, topic.home, segments, "LLOG_SEGMENTS_DIR")
    return segments_directory(log, what) / topic.directory


async def rocks_of(log: Log, what: str) -> Rocks:
    """The RocksDB of this machine. If nothing says where that is, `LogOwned` if a process elsewhere has it, else
    `ConfigurationError`.
    """
    if log.rocks is None:
        if log.owners is not None and (home := await log.owners.home(ROCKSDB)) is not None:
            raise await log.owners.elsewhere(ROCKSDB, ROCKSDB_NAMED, home, None, "LLOG_ROCKSDB_DIR")
        raise ConfigurationError(
            f"{what} is of engine 'rocksdb', and nothing says where that lies: set LLOG_ROCKSDB_DIR to a directory"
        )
    return log.rocks


def make_directories(path: Path, partitions: Iterable[int], *, new: bool) -> None:
    """Makes the directories of a topic's partitions, durably. Those of a `new` topic must be empty: what is there would
    be read as it.
    """
    try:
        make_directory(path)
        for partition in partitions:
            made = path / str(partition)
            made.mkdir(DIRECTORY_MODE, exist_ok=True)
            if new and any(made.iterdir()):
                raise WrongStore(
                    f"{made} is not empty: it holds files of another log. Move them away, or set LLOG_SEGMENTS_DIR "
                    "to another directory"
                )
        for parent in (path, path.parent, path.parent.parent):
            sync_directory(parent)
    except OSError as error:
        raise StoreUnavailable(f"cannot make the directory {path} (LLOG_SEGMENTS_DIR): {error.strerror}") from error


def remove_directories(path: Path) -> None:
    """Removes a topic's directory and all in it. Idempotent, also after one that was interrupted."""
    deleted = path.with_name(path.name + _DELETED)
    try:
        if path.exists():
            if deleted.exists():
                shutil.rmtree(deleted)
            path.rename(deleted)
            sync_directory(path.parent)
        if deleted.exists():
            shutil.rmtree(deleted)
    except FileNotFoundError:
        return  # somebody else removes it, too
    except OSError as error:
        raise StoreUnavailable(f"cannot remove the directory {path} (LLOG_SEGMENTS_DIR): {error.strerror}") from error
