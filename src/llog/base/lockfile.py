"""A directory that one process may write: its lock, an flock, which ends with the process and has its holder as JSON in
the file; and the id that tells the directory from those of other machines.
"""

from __future__ import annotations

import fcntl
import os
import sys
from pathlib import Path
from typing import Final

import msgspec

from llog.base.decoders import json_decoder
from llog.base.durable import FILE_MODE, REMEDIES, make_directory, sync_directory
from llog.errors import LogOwned, StoreUnavailable

LOCK: Final = "lock"
LOCK_AMONG_OTHERS: Final = "~lock"
"""Where others name files: no topic and no file of SlateDB is called so."""
DIRECTORY_ID: Final = "~id"
_COMMAND_CHARS_MAX: Final = 500


class Owner(msgspec.Struct, frozen=True, omit_defaults=True):
    pid: int
    command: str
    address: str | None = None
    """Where it answers requests, if it is a broker."""

    @classmethod
    def this(cls, address: str | None = None) -> Owner:
        return cls(os.getpid(), " ".join(sys.orig_argv)[:_COMMAND_CHARS_MAX], address)

    def __str__(self) -> str:
        return f"process {self.pid} ({self.command})"


def take_lock(directory: Path, what: str, *, address: str | None = None, name: str = LOCK) -> int:
    """The descriptor that holds the lock until it is closed; `LogOwned` if another has it."""
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
                "lock: go through that "
                "process, or stop it"
            )
            refusal.address = None if owner is None else owner.address
            raise refusal from None
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, msgspec.json.encode(Owner.this(address)), 0)
        except OSError:
            pass  # the disk may be full: it is the lock that counts, not the name on it
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def owner_of(directory: Path, name: str = LOCK) -> Owner | None:
    """Who took the lock last; None if nobody can be named."""
    try:
        return json_decoder(Owner).decode((directory / name).read_bytes())
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def directory_id(directory: Path) -> str | None:
    """The id that the directory was given, and that goes wherever its files are moved or mounted; None if it has
    none.
    """
    try:
        return (directory / DIRECTORY_ID).read_text().strip() or None
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise StoreUnavailable(f"cannot read {directory / DIRECTORY_ID} ({error}): check its file system") from error


def make_directory_id(directory: Path, new_id: str) -> str:
    """The directory's id: `new_id`, durably, unless it has one, or another process gives it one at the same moment.
    Makes the directory.
    """
    found = directory_id(directory)
    if found is not None:
        return found
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
        raise StoreUnavailable(
            f"cannot write to {directory} ({error.strerror or error}): "
            f"{REMEDIES.get(error.errno or 0, 'check its file system')}"
        ) from error
    return directory_id(directory) or new_id
