"""Finds the process that holds a lock on a file, for the messages to people who wait for the lock."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

_LOCKS: Final = Path("/proc/locks")


def describe_holder(*paths: Path) -> str:
    """Return the process that has one of these files locked for writing, and what to do about it, as text.

    Linux lists the locks of all processes that this one can see. Where no lock is listed, the text says how to find the
    holder.
    """
    pid = _locking_pid(paths)
    if pid is None:
        return f"another process; `lsof {paths[0]}` lists those that have the file open"
    try:
        before, _, after = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
        command, state = before.partition("(")[2], after.split()[0]
    except (OSError, IndexError):
        return f"process {pid}"
    if state == "T":
        return f"process {pid} ({command}), which is stopped: continue it with `kill -CONT {pid}`, or end it"
    return f"process {pid} ({command}): wait for it, or end it"


def _locking_pid(paths: tuple[Path, ...]) -> int | None:
    try:
        files = {_identity(path) for path in paths if path.exists()}
        lines = _LOCKS.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        fields = line.split()  # 1: FLOCK  ADVISORY  WRITE 10038 fe:00:9978923 0 EOF
        if len(fields) == 8 and fields[3] == "WRITE" and fields[5] in files and int(fields[4]) > 0:
            return int(fields[4])
    return None


def _identity(path: Path) -> str:
    status = path.stat()
    return f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
