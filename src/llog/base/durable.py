"""Files and directories that survive a power cut and belong to this user alone; remedies for file system errors."""

from __future__ import annotations

import errno
import os
import struct
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Final

from llog.errors import StoreUnavailable

REMEDIES: Final = {
    errno.ENOSPC: "free some space on its disk, or move the data to a larger one",
    errno.EDQUOT: "raise the quota, or free some space",
    errno.EACCES: "give this user read and write access to it",
    errno.EPERM: "give this user read and write access to it",
    errno.EROFS: "mount its file system writable",
    errno.EIO: "check the disk and the kernel's log",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "raise the system's limit of open files",
}


FILE_MODE: Final = 0o600
DIRECTORY_MODE: Final = 0o700
"""The modes of everything that holds records: for this user alone. The umask may remove more."""

PROBE_BYTES: Final = 1 << 20
"""A disk with less free space than this counts as full."""

_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


def _acl(*entries: tuple[int, int]) -> bytes:
    """Return the pairs of tag and permissions as Linux stores them (acl(5), `posix_acl_xattr.h`)."""
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHi", tag, permissions, -1) for tag, permissions in entries)


_OWNER_ONLY: Final = _acl((0x01, 7), (0x04, 0), (0x20, 0))
"""The owner may read, write and enter; the group and others may do nothing."""


def boot_id() -> str | None:
    """Return an id that is the same until the machine restarts, or None where the system has none.

    While it is the same, no power cut has lost data that was written but not synced.
    """
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return None


class OpenedFile:
    """The identity of an open file. Writes to a file that was deleted meanwhile are lost, and no write reports it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._identity = _identity(path)

    def is_in_place(self) -> bool:
        """Return whether the path still leads to this file."""
        try:
            return _identity(self.path) == self._identity
        except OSError:
            return False

    def check(self) -> None:
        """Raise `StoreUnavailable` if the path leads to nothing, or to another file."""
        if not self.is_in_place():
            raise StoreUnavailable(
                f"{self.path} was deleted, replaced or unmounted while this process had it open, so nothing was "
                "written: restore it, or restart this process to use what is there now"
            )


def check_writable(directory: Path) -> None:
    """Raise `StoreUnavailable` if no file of PROBE_BYTES can be written: the disk is full or read-only, or access is
    denied.
    """
    probe = directory / f".tmp-{uuid.uuid4().hex}"
    try:
        descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
        try:
            if os.write(descriptor, bytes(PROBE_BYTES)) < PROBE_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(descriptor)
            os.unlink(probe)
    except OSError as error:
        raise cannot_write(directory, error) from error


def cannot_write(directory: Path, error: OSError) -> StoreUnavailable:
    remedy = REMEDIES.get(error.errno or 0, "check its file system")
    return StoreUnavailable(f"cannot write to {directory} ({error.strerror or error}): {remedy}")


def _identity(path: Path) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino


def sync_directory(directory: Path) -> None:
    """Make the names in the directory durable; the files must be synced on their own."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(directory: Path) -> None:
    """Create the directory and its missing parents, durably and for this user alone."""
    missing = [each for each in (directory, *directory.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(DIRECTORY_MODE, exist_ok=True)
    directory.mkdir(DIRECTORY_MODE, exist_ok=True)  # raises if it is a file
    for each in reversed(missing):
        sync_directory(each.parent)


def make_library_directory(directory: Path) -> None:
    """Create a directory for a library that gives its files modes of its own, so that they are for this user alone.

    A default ACL on the empty directory achieves it. The umask could, too, but belongs to the whole program. On a file
    system without ACLs, only the mode of the directory keeps other users out.
    """
    make_directory(directory)
    if hasattr(os, "setxattr") and not any(directory.iterdir()):
        with suppress(OSError):
            os.setxattr(directory, "system.posix_acl_default", _OWNER_ONLY)


def is_changeable_by_others(status: os.stat_result) -> bool:
    """Return whether users other than this one and root may change a file, or the content of a directory."""
    return status.st_uid != os.geteuid() or bool(status.st_mode & 0o022)
