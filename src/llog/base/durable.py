"""Directories whose names survive a power cut, for this user alone; whether there may have been a power cut; what to do
when a file system refuses.
"""

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
"""Of all that holds records: for this user alone. The umask may take away more."""

PROBE_BYTES: Final = 1 << 20
"""A disk with less space than this is called full."""

_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


def _acl(*entries: tuple[int, int]) -> bytes:
    """Pairs of tag and permissions, as Linux stores them (acl(5), `posix_acl_xattr.h`)."""
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHi", tag, permissions, -1) for tag, permissions in entries)


_OWNER_ONLY: Final = _acl((0x01, 7), (0x04, 0), (0x20, 0))
"""The owner may read, write and enter; its group and others may nothing."""


def boot_id() -> str | None:
    """The same as long as the machine runs, and with it what was written and not synced; None where no system tells."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return None


class OpenedFile:
    """A file as it was when it was opened. What is written to a file that was deleted since is lost, and no write says
    so.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._identity = _identity(path)

    def is_in_place(self) -> bool:
        """Whether the path still leads to it."""
        try:
            return _identity(self.path) == self._identity
        except OSError:
            return False

    def check(self) -> None:
        """`StoreUnavailable` if the path leads to nothing, or to another file."""
        if not self.is_in_place():
            raise StoreUnavailable(
                f"{self.path} was deleted, replaced or unmounted while this process had it open, so nothing was "
                "written: bring it back "
                "as it was, or restart this process to use what is there now"
            )


def check_writable(directory: Path) -> None:
    """`StoreUnavailable` if no file of a size that counts can be written there: the disk is full or read-only, or
    access is denied.
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
        remedy = REMEDIES.get(error.errno or 0, "check its file system")
        raise StoreUnavailable(f"cannot write to {directory} ({error.strerror or error}): {remedy}") from error


def _identity(path: Path) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_dev, found.st_ino


def sync_directory(directory: Path) -> None:
    """Makes the names in it durable, as their files are."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(directory: Path) -> None:
    """Makes it and what is missing above it, durably and for this user alone."""
    missing = [each for each in (directory, *directory.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(DIRECTORY_MODE, exist_ok=True)
    directory.mkdir(DIRECTORY_MODE, exist_ok=True)  # which raises if it is a file
    for each in reversed(missing):
        sync_directory(each.parent)


def make_library_directory(directory: Path) -> None:
    """As `make_directory`, for a library that makes files in it with modes of its own: in an empty directory, they are
    for this user alone, too.

    A default ACL does it: the umask, which could as well, belongs to the whole program. Where a file system has none,
    only the directory keeps others out.
    """
    make_directory(directory)
    if hasattr(os, "setxattr") and not any(directory.iterdir()):
        with suppress(OSError):
            os.setxattr(directory, "system.posix_acl_default", _OWNER_ONLY)


def changeable_by_others(found: os.stat_result) -> bool:
    """Whether other users than this one may change a file, or what is in a directory; root always may."""
    return found.st_uid != os.geteuid() or bool(found.st_mode & 0o022)
