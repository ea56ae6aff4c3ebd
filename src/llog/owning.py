"""The lock on a directory that one process may write: an flock, which ends with its process, and who holds it as JSON in the file."""

from __future__ import annotations

import fcntl
import os
import sys
from pathlib import Path
from typing import Final

import msgspec

from llog.durable import FILE_MODE
from llog.errors import LogOwned

LOCK: Final = "lock"
_COMMAND_CHARS_MAX: Final = 500


class Owner(msgspec.Struct, frozen=True):
    pid: int
    command: str


def take_lock(directory: Path, what: str) -> int:
    """The descriptor that holds the lock until it is closed; `LogOwned` if another has it."""
    path = directory / LOCK
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = owner_of(directory)
            named = f"process {owner.pid} ({owner.command})" if owner else "another process"
            raise LogOwned(
                f"{what} in {directory} can only be changed by {named}, which has the lock: go through that process, or stop it"
            ) from None
        owner = Owner(os.getpid(), " ".join(sys.orig_argv)[:_COMMAND_CHARS_MAX])
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, msgspec.json.encode(owner), 0)
        except OSError:
            pass  # the disk may be full: it is the lock that counts, not the name on it
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def owner_of(directory: Path) -> Owner | None:
    """Who took the lock last; None if nobody can be named."""
    try:
        return msgspec.json.decode((directory / LOCK).read_bytes(), type=Owner)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
