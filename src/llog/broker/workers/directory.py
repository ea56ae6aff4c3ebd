"""The private directory of a supervisor: the plans of its workers, their counts, and the tail that they share.

{directory}/lock            held by the supervisor while it lives
{directory}/settings.toml   empty: the workers' settings come from their environment alone
{directory}/{number}.json   the plan of a worker (`plan.py`)
{directory}/counts          the counts of the workers (`counts.py`)
{directory}/tail            the shared tail, unless LLOG_TAIL_CACHE_DIR names another one
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from llog.base.durable import FILE_MODE
from llog.base.lockfile import LOCK, remove_abandoned

TAIL: Final = "tail"
SETTINGS_FILE: Final = "settings.toml"
PREFIX: Final = "llog-workers-"
_MEMORY: Final = Path("/dev/shm")  # the directory that is made there is this user's alone


@contextmanager
def private_directory(tail_bytes: int) -> Iterator[Path]:
    """Yield a new directory that belongs to this user alone, in memory if it has room for `tail_bytes`; remove it
    afterwards, and before that what supervisors that were killed have left.
    """
    on_disk = Path(tempfile.gettempdir())
    for parent in {_MEMORY, on_disk}:
        _remove_leftovers(parent)
    directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=_MEMORY if _has_room(_MEMORY, tail_bytes) else on_disk))
    new_lock = directory / f"{LOCK}-new"
    lock = os.open(new_lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        new_lock.rename(directory / LOCK)  # at no moment is there a lock that nobody holds
        (directory / SETTINGS_FILE).touch(FILE_MODE)
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)


def _has_room(directory: Path, size: int) -> bool:
    try:
        return os.access(directory, os.W_OK | os.X_OK) and shutil.disk_usage(directory).free >= 2 * size
    except OSError:
        return False


def _remove_leftovers(parent: Path) -> None:
    """Remove this user's directories whose supervisor is dead."""
    for each in parent.glob(f"{PREFIX}*"):
        try:
            is_own = each.lstat().st_uid == os.geteuid() and not each.is_symlink()
        except OSError:
            continue
        if is_own:
            remove_abandoned(each, is_made_with_lock=False)
