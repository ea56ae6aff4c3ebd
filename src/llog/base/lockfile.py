"""A directory that only one process may write: its lock, and the id that distinguishes it from other directories.

The lock is an flock, which ends with the process. The file holds its owner as JSON.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
from pathlib import Path
from typing import Final

import msgspec

from llog.base.decoders import json_decoder
from llog.base.durable import FILE_MODE, cannot_write, make_directory, sync_directory
from llog.errors import LogOwned, StoreUnavailable

LOCK: Final = "lock"
LOCK_AMONG_OTHERS: Final = "~lock"
"""The lock's name in a directory with other files: no topic and no file of SlateDB has this name."""
DIRECTORY_ID: Final = "~id"
_COMMAND_CHARS_MAX: Final = 500


class Owner(msgspec.Struct, frozen=True, omit_defaults=True):
    """The process that holds a lock, as the lock's file names it."""

    pid: int
    command: str
    address: str | None = None
    """The address at which the process answers requests, if it is a broker."""

    @classmethod
    def this(cls, address: str | None = None) -> Owner:
        return cls(os.getpid(), " ".join(sys.orig_argv)[:_COMMAND_CHARS_MAX], address)

    def __str__(self) -> str:
        return f"process {self.pid} ({self.command})"


class WorkerAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where one of several workers, which share the address of their broker, is reached by the others."""

    group: str
    """A random id that the workers of one supervisor have in common."""
    address: str


def take_lock(directory: Path, what: str, *, address: str | None = None, name: str = LOCK) -> int:
    """Take the lock and return its descriptor, which holds it until it is closed. Raise `LogOwned` if another process
    has the lock.
    """
    path = directory / name
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = owner_of(directory, name)
            at = f" at {owner.address}" if owner and owner.address else ""
            refusal = LogOwned(
                f"{what} in {directory} can only be changed by {owner or 'another process'}{at}, which has the "
                "lock: go through that process, or stop it"
            )
            refusal.address = None if owner is None else owner.address
            raise refusal from None
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, msgspec.json.encode(Owner.this(address)), 0)
        except OSError:
            pass  # the disk may be full: the lock counts, not the name in it
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def remove_abandoned(directory: Path, *, is_made_with_lock: bool) -> None:
    """Remove a directory whose lock no living process holds. A directory without a lock is removed only if it
    `is_made_with_lock`: otherwise it may be one that is just being made.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if is_made_with_lock else 0)
    try:
        descriptor = os.open(directory / LOCK, flags, FILE_MODE)
    except OSError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(directory, ignore_errors=True)
    except BlockingIOError:
        pass
    finally:
        os.close(descriptor)


def owner_of(directory: Path, name: str = LOCK) -> Owner | None:
    """Return the process that took the lock last, or None if the file does not name it."""
    try:
        return json_decoder(Owner).decode((directory / name).read_bytes())
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def directory_id(directory: Path) -> str | None:
    """Return the directory's id, which moves with its files and mounts, or None if it has none."""
    try:
        return (directory / DIRECTORY_ID).read_text().strip() or None
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise StoreUnavailable(f"cannot read {directory / DIRECTORY_ID} ({error}): check its file system") from error


def make_directory_id(directory: Path, new_id: str) -> str:
    """Create the directory if need be, give it `new_id` unless it has an id, and return its id.

    If two processes do so at the same moment, both get the same id.
    """
    existing = directory_id(directory)
    if existing is not None:
        return existing
    written = directory / f".tmp-{new_id}"
    try:
        make_directory(directory)
        descriptor = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
        try:
            os.write(descriptor, new_id.encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        try:
            os.link(written, directory / DIRECTORY_ID)
        except FileExistsError:
            pass
        finally:
            os.unlink(written)
        sync_directory(directory)
    except OSError as error:
        raise cannot_write(directory, error) from error
    return directory_id(directory) or new_id
