"""Which process holds a lock on a file: for messages, to people who wait for it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

_LOCKS: Final = Path("/proc/locks")


def holder_of(*paths: Path) -> str:
    """Name the process that has one of these files locked for writing, and what to do about it.

    Linux lists the locks of the processes that this one can see. Where it lists none, the message says how to look for
    the holder.
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
    found = path.stat()
    return f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
