"""Directories whose names survive a power cut, whether there may have been one, and what to do when a file system refuses."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Final

REMEDIES: Final = {
    errno.EDQUOT: "raise the quota, or free some space",
    errno.EACCES: "give this user read and write access to it",
    errno.EPERM: "give this user read and write access to it",
    errno.EROFS: "mount its file system writable",
    errno.EIO: "check the disk and the kernel's log",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "raise the system's limit of open files",
}


_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str | None:
    """The same as long as the machine runs, and with it what was written and not synced; None where no system tells."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return None


def sync_directory(directory: Path) -> None:
    """Makes the names in it durable, as their files are."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(directory: Path) -> None:
    """Makes it and what is missing above it, durably."""
    missing = [each for each in (directory, *directory.parents) if not each.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for each in reversed(missing):
        sync_directory(each.parent)
