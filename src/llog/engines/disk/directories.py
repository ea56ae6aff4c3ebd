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
from llog.engines.disk.open_segments import OpenSegments
from llog.errors import ConfigurationError, StoreUnavailable, WrongStore
from llog.log.log import Log
from llog.log.owners import disk_of
from llog.log.records import Topic

_DELETED = "~deleted"


async def topic_path(log: Log, segments: OpenSegments | None, topic: Topic) -> Path:
    """Where the files of a disk topic lie on this machine; `ConfigurationError` if no setting says so.

    If they are in a directory of another one, `LogOwned` with the address of the broker there, or `OwnerUnavailable` if
    none runs.
    """
    what = f"topic {topic.name!r}"
    if topic.home and log.owners is not None:
        here = None if segments is None else await segments.identity()
        if here != topic.home:
            directory = None if segments is None else segments.directory
            raise await log.owners.elsewhere(disk_of(topic.home), what, topic.home, directory, "LLOG_SEGMENTS_DIR")
    if segments is None:
        raise ConfigurationError(
            f"{what} is of engine 'disk', and nothing says where its files lie: set LLOG_SEGMENTS_DIR to a directory"
        )
    return segments.directory / topic.directory


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
