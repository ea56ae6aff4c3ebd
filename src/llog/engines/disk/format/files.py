"""Names in a log's directory, and how its bytes are made durable.

| file | content |
| --- | --- |
| `<base>.log` | frames (`frames.py`); `<base>` is the first offset, 20 digits |
| `<base>.index`, `<base>.timeindex` | sparse indexes (`index.py`), which can be made again from the frames |
| `<offset>.producers` | what the log remembered of producers before this offset (`producer_snapshot.py`) |
| `<base>.swap`, `*.cleaned` | a replacement under way (`log/replacement.py`) |
| `tail`, `log-start` | how far readers may read, and from where (`tail.py`) |
| `compacted` | how far key compaction has come (`cleaning/progress.py`) |
| `unsynced` | there while a writer acknowledges before it syncs: the newest segment may have holes after a power cut |
| `lock` | held by the one writer (`llog.base.lockfile`) |
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import CDLL, c_int, c_int64, c_uint
from pathlib import Path
from typing import Final

from llog.base.durable import FILE_MODE, REMEDIES, sync_directory
from llog.batch.columns import Buffer
from llog.errors import InvalidArgument, StoreUnavailable

LOG: Final = ".log"
INDEX: Final = ".index"
TIMEINDEX: Final = ".timeindex"
PRODUCERS: Final = ".producers"
SWAP: Final = ".swap"
CLEANED: Final = ".cleaned"
TEMPORARY: Final = ".tmp"
TAIL: Final = "tail"
LOG_START: Final = "log-start"
UNSYNCED: Final = "unsynced"

_DIGITS: Final = 20
_VECTOR_MAX: Final = 1024  # IOV_MAX of Linux and macOS
_WRITE_BYTES: Final = 128 << 10
"""No part of a call is larger: on Linux 6.18 with ext4, single parts of 1 MiB and more took several times the CPU and
the time.
"""
_SYNC_FILE_RANGE_WRITE: Final = 2
_REMEDIES: Final = REMEDIES | {
    errno.ENOSPC: "free some space on its disk, or shorten the retention; appends go on by themselves after that",
    errno.EFBIG: "raise the limit of a file's size (ulimit -f)",
    errno.ENOENT: "bring its directory back from a copy, or delete its topic, then restart this process",
}


def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    try:
        call = CDLL(None).sync_file_range
    except (AttributeError, OSError):
        return None
    call.argtypes = (c_int, c_int64, c_int64, c_uint)
    found: Callable[[int, int, int, int], int] = call
    return found


_SYNC_FILE_RANGE: Final = _sync_file_range()


def name_of(base: int, suffix: str) -> str:
    return f"{base:0{_DIGITS}}{suffix}"


def numbered(directory: Path, suffix: str) -> list[int]:
    """The numbers of all files `<20 digits><suffix>`, in order. An absent directory has none."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    stems = (name[:_DIGITS] for name in names if name[_DIGITS:] == suffix)
    return sorted(int(stem) for stem in stems if stem.isascii() and stem.isdigit())


def write_at(descriptor: int, parts: Sequence[Buffer], position: int, size: int) -> None:
    """All parts, of this size together, in order from `position` on, without joining them."""
    if size <= _WRITE_BYTES and len(parts) <= _VECTOR_MAX and os.pwritev(descriptor, parts, position) == size:
        return
    views: list[memoryview | Buffer] = []
    for part in parts:
        if len(part) <= _WRITE_BYTES:
            views.append(part)
        else:
            view = memoryview(part).cast("B")
            views += [view[start : start + _WRITE_BYTES] for start in range(0, len(view), _WRITE_BYTES)]
    for first in range(0, len(views), _VECTOR_MAX):
        position += _write_all(descriptor, views[first : first + _VECTOR_MAX], position)


def _write_all(descriptor: int, views: list[memoryview | Buffer], position: int) -> int:
    total = sum(map(len, views))
    written = os.pwritev(descriptor, views, position)
    done = written
    while done < total:
        while views and written >= len(views[0]):
            written -= len(views.pop(0))
        if written:
            views[0] = memoryview(views[0])[written:]
        written = os.pwritev(descriptor, views, position + done)
        if written == 0:
            raise OSError(errno.EIO, "the file system took no bytes")
        done += written
    return done


def begin_writing(descriptor: int, position: int, length: int) -> None:
    """Has the disk begin with these bytes, so that a sync finds it at work. Where a system cannot, nothing happens."""
    if _SYNC_FILE_RANGE is not None:
        _SYNC_FILE_RANGE(descriptor, position, length, _SYNC_FILE_RANGE_WRITE)  # what goes wrong, the sync tells


def sync_data(descriptor: int) -> None:
    """Makes a file's bytes durable, and its size, but not its times. macOS cannot leave those out."""
    getattr(os, "fdatasync", os.fsync)(descriptor)


def is_removed(descriptor: int) -> bool:
    """Whether an open file has no name any more.

    Not by `fstat` if there is another way: since Linux 6.13, a write after somebody has looked at a file's times must
    note a new one at once. Measured with ext4, a small write with its sync takes 1.4 times as long then.
    """
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}").endswith(" (deleted)")
    except OSError:
        return not os.fstat(descriptor).st_nlink


def put_small(path: Path, content: Buffer) -> None:
    """Replaces a small file durably: it has the old content or the new one, whenever the machine stops."""
    temporary = path.with_name(path.name + TEMPORARY)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, FILE_MODE)
    try:
        try:
            write_at(descriptor, [content], 0, len(content))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def read_small(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def unavailable(doing: str, path: Path, error: OSError) -> StoreUnavailable:
    remedy = _REMEDIES.get(error.errno or 0, "check its file system")
    return StoreUnavailable(f"cannot {doing} {path} ({error.strerror or error}): {remedy}")


@contextmanager
def explained(doing: str, path: Path) -> Iterator[None]:
    """Turns what the operating system says into an error that names the path and what to do."""
    try:
        yield
    except NotADirectoryError as error:
        raise InvalidArgument(f"cannot {doing} {path}: a part of that path is not a directory") from error
    except OSError as error:
        raise unavailable(doing, path, error) from error
