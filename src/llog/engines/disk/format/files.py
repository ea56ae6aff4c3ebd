"""The names of files in a log's directory, and how their bytes are written durably.

| file | content |
| --- | --- |
| `<base>.log` | frames (`frames.py`); `<base>` is the first offset, 20 digits |
| `<base>.index`, `<base>.timeindex` | sparse indexes (`index.py`), which can be rebuilt from the frames |
| `<offset>.producers` | the producers that the log knew before this offset (`producer_snapshot.py`) |
| `<base>.swap`, `*.cleaned` | a replacement under way (`log/replacement.py`) |
| `tail`, `log-start` | how far readers may read, and from where (`tail.py`) |
| `compacted` | how far key compaction has come (`cleaning/progress.py`) |
| `unsynced` | exists while a writer acknowledges before it syncs: a power cut may leave holes in the newest segment |
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
"""The largest buffer of one call: on Linux 6.18 with ext4, single buffers of 1 MiB and more took several times the CPU
and the time.
"""
_SYNC_FILE_RANGE_WRITE: Final = 2
_REMEDIES: Final = REMEDIES | {
    errno.ENOSPC: "free some space on its disk, or shorten the retention; then appends continue by themselves",
    errno.EFBIG: "raise the limit of a file's size (ulimit -f)",
    errno.ENOENT: "restore its directory from a copy, or delete its topic, then restart this process",
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


def file_name(base: int, suffix: str) -> str:
    return f"{base:0{_DIGITS}}{suffix}"


def file_numbers(directory: Path, suffix: str) -> list[int]:
    """Return the numbers of all files named `<20 digits><suffix>`, sorted; none if the directory does not exist."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    stems = (name[:_DIGITS] for name in names if name[_DIGITS:] == suffix)
    return sorted(int(stem) for stem in stems if stem.isascii() and stem.isdigit())


def write_at(descriptor: int, parts: Sequence[Buffer], position: int, size: int) -> None:
    """Write all parts, `size` bytes together, one after the other from `position` on, without joining them."""
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


def start_writeback(descriptor: int, position: int, length: int) -> None:
    """Have the kernel start writing these bytes to disk, so that the next sync waits less. Does nothing on systems
    without `sync_file_range`.
    """
    if _SYNC_FILE_RANGE is not None:
        _SYNC_FILE_RANGE(descriptor, position, length, _SYNC_FILE_RANGE_WRITE)  # the next sync reports any error


def sync_data(descriptor: int) -> None:
    """Make a file's bytes and size durable, but not its times (macOS cannot leave those out)."""
    getattr(os, "fdatasync", os.fsync)(descriptor)


def is_removed(descriptor: int) -> bool:
    """Whether an open file has no name any more.

    Avoids `fstat` where it can: since Linux 6.13, the first write after a process has read a file's times must record
    a new time at once. On ext4, that makes a small write with its sync take 1.4 times as long.
    """
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}").endswith(" (deleted)")
    except OSError:
        return not os.fstat(descriptor).st_nlink


def replace_small_file(path: Path, content: Buffer) -> None:
    """Replace a small file durably: whenever the machine stops, the file has either the old content or the new."""
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


def read_small_file(path: Path) -> bytes | None:
    """Return the content of a file, or None if it does not exist."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def unavailable(doing: str, path: Path, error: OSError) -> StoreUnavailable:
    remedy = _REMEDIES.get(error.errno or 0, "check its file system")
    return StoreUnavailable(f"cannot {doing} {path} ({error.strerror or error}): {remedy}")


@contextmanager
def translate_os_errors(doing: str, path: Path) -> Iterator[None]:
    """Raise an operating system's error as one that names the path and the remedy: "cannot {doing} {path}"."""
    try:
        yield
    except NotADirectoryError as error:
        raise InvalidArgument(f"cannot {doing} {path}: a part of that path is not a directory") from error
    except OSError as error:
        raise unavailable(doing, path, error) from error
