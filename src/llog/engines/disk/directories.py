"""Creates and removes the directories of disk topics, `{segments}/{topic directory}/{partition}/`.

A deletion first renames the topic's directory to `{topic directory}~deleted`, a name that no topic can have. From then
on, a process that has files of the topic open finds the directory gone.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from llog.base.durable import DIRECTORY_MODE, make_directory, sync_directory
from llog.engines.disk.segment_pool import SegmentPool
from llog.errors import ConfigurationError, StoreUnavailable, WrongStore
from llog.log.log import Log
from llog.log.owners import disk_ownership
from llog.log.records import Topic

_DELETED = "~deleted"


async def topic_path(log: Log, segments: SegmentPool | None, topic: Topic) -> Path:
    """Return the directory of a disk topic on this machine. Raises `ConfigurationError` if no setting names one.

    If the files are in a directory of another machine, raises `LogOwned` with the address of the broker there, or
    `OwnerUnavailable` if none runs.
    """
    what = f"topic {topic.name!r}"
    if topic.home and log.owners is not None:
        here = None if segments is None else await segments.identity()
        if here != topic.home:
            directory = None if segments is None else segments.directory
            raise await log.owners.elsewhere(
                disk_ownership(topic.home), what, topic.home, directory, "LLOG_SEGMENTS_DIR"
            )
    if segments is None:
        raise ConfigurationError(
            f"{what} is of engine 'disk', and no setting says where its files are: set LLOG_SEGMENTS_DIR to a directory"
        )
    return segments.directory / topic.directory


def make_directories(path: Path, partitions: Iterable[int], *, new: bool) -> None:
    """Make the directories of a topic's partitions durably. Those of a `new` topic must be empty: files in them would
    be read as its records.
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
    """Remove a topic's directory with its files. Idempotent, even after an interrupted removal."""
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
        return  # another process is removing it, too
    except OSError as error:
        raise StoreUnavailable(f"cannot remove the directory {path} (LLOG_SEGMENTS_DIR): {error.strerror}") from error
