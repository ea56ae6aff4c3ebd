"""Blobs as local files: what is acknowledged survives power loss.

A put writes a temporary file beside its target, fsyncs it, links it into place (which fails if the name is taken) and
fsyncs the directory. So a name is either absent or a whole blob, and a crash leaves at most a temporary file.
"""

from __future__ import annotations

import asyncio
import errno
import mmap
import os
import stat
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import TypeVar

from llog.base.durable import DIRECTORY_MODE, FILE_MODE, REMEDIES, check_writable, make_directory, sync_directory
from llog.errors import BlobExists, BlobNotFound, InvalidArgument, OutcomeUnknown, StoreUnavailable
from llog.stores.blob_rules import PAGE, TEMPORARY, check_name, check_prefix, check_range, lost, too_short
from llog.stores.blobs import BlobInfo, Buffer
from llog.stores.counting import OperationCounts, counted

T = TypeVar("T")
Buffers = list[Buffer]
Views = list[memoryview]

MAP_BYTES_MIN = 1024 * 1024
"""From this size on, a range is mapped instead of copied."""
_VECTOR_MAX = 1024  # IOV_MAX of Linux and macOS
_WRITE_BYTES = 128 << 10
"""At most this much in one call: on Linux 6.18 with ext4, calls of 1 MiB and more took four times the CPU and the time.
"""
_REMEDIES = REMEDIES | {
    errno.EPERM: "give this user read and write access to it, on a file system that has hard links",
    errno.EOPNOTSUPP: "put the data on a file system that has hard links",
}


class FileBlobStore:
    """`BlobStore` on a directory, which is made when the first blob is put.

    Blocking calls run on two small thread pools of its own, so that slow puts do not hold up reads.
    """

    def __init__(self, root: Path, *, put_threads: int = 8, other_threads: int = 8) -> None:
        self.root = root.absolute()
        self.uri = self.root.as_uri()
        self.counts = OperationCounts()
        self._threads = (put_threads, other_threads)
        self._pools: tuple[ThreadPoolExecutor, ThreadPoolExecutor] | None = None
        self._pid = 0
        self._closed = False
        self._durable: set[Path] = set()
        self._required: str | None = None

    async def put(self, name: str, parts: Sequence[Buffer]) -> None:
        path = self._path(name)
        views = [memoryview(part).cast("B") for part in parts if memoryview(part).nbytes]
        with counted(self.counts, "put") as call:
            call.size = sum(map(len, views))
            await self._run(0, lambda: self._put(name, path, views))

    async def get(self, name: str) -> Buffer:
        path = self._path(name)
        with counted(self.counts, "get") as call:
            data = await self._run(1, lambda: self._read(name, path, None)[0])
            call.size = len(data)
            return data

    async def get_range(self, name: str, offset: int, length: int) -> Buffer:
        return (await self.get_ranges(name, [(offset, length)]))[0]

    async def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        path = self._path(name)
        for offset, length in ranges:
            check_range(name, offset, length)
        if not ranges:
            return []
        with counted(self.counts, "get") as call:
            found = await self._run(1, lambda: self._read(name, path, ranges))
            call.size = sum(map(len, found))
            return found

    async def head(self, name: str) -> BlobInfo | None:
        path = self._path(name)
        with counted(self.counts, "head"):
            return await self._run(1, lambda: _info(name, path))

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[list[BlobInfo]]:
        walk = self._walk(prefix[: prefix.rfind("/") + 1], check_prefix(prefix), start_after)
        size = PAGE
        while size == PAGE:
            with counted(self.counts, "list"):
                page = await self._run(1, lambda: list(islice(walk, PAGE)))
            size = len(page)
            if page:
                yield page

    async def delete_many(self, names: Sequence[str]) -> None:
        """Deletions are not made durable: a blob that a power loss brings back is deleted again by whoever finds it."""
        paths = [self._path(name) for name in names]
        for start in range(0, len(paths), PAGE):
            with counted(self.counts, "delete"):
                chunk = paths[start : start + PAGE]
                await self._run(1, lambda chunk=chunk: _delete(chunk))  # type: ignore[misc]

    def require(self, name: str) -> None:
        self._required = check_name(name)

    async def check(self) -> None:
        await self._run(1, self._check)

    async def clean_temporary(self, older_than_ms: int, now_ms: int) -> int:
        """Removes temporary files that crashed puts left, if untouched for `older_than_ms` (a day is safe); how
        many.
        """
        return await self._run(1, lambda: _clean(self.root, (now_ms - older_than_ms) * 1_000_000))

    async def close(self) -> None:
        """Waits for what is under way."""
        self._closed = True
        pools, self._pools = self._pools, None
        if pools is not None and self._pid == os.getpid():
            for pool in pools:
                await asyncio.get_running_loop().run_in_executor(None, pool.shutdown)

    def _path(self, name: str) -> Path:
        return self.root / check_name(name)

    async def _run(self, pool: int, work: Callable[[], T]) -> T:
        if self._closed:
            raise StoreUnavailable(f"the blob store {self.uri} is closed: open it again")
        # A pool's threads do not survive a fork: a new process makes its own.
        if self._pools is None or self._pid != os.getpid():
            self._pid = os.getpid()
            puts, others = self._threads
            self._pools = (
                ThreadPoolExecutor(puts, thread_name_prefix="llog-blob-put"),
                ThreadPoolExecutor(others, thread_name_prefix="llog-blob"),
            )
        return await asyncio.get_running_loop().run_in_executor(self._pools[pool], work)

    def _put(self, name: str, path: Path, views: Views) -> None:
        directory = path.parent
        temporary = directory / f"{TEMPORARY}{uuid.uuid4().hex}"
        with _explained("put", path):
            self._check_required()
            descriptor = self._create(directory, temporary)
            try:
                try:
                    _write(descriptor, views)
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
                taken = _link(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)
        try:
            # Also when the name is taken: whoever hears so may rely on that blob, and its put may not be this far yet.
            sync_directory(directory)
            self._make_durable(directory)
        except OSError as error:
            raise OutcomeUnknown(
                f"blob {name!r} was written to {path}, but its directory could not be made durable ({error.strerror}): "
                f"{_remedy(error)}"
            ) from error
        if taken:
            raise BlobExists(f"blob {name!r} is already in {self.uri}: blobs are immutable, choose another name")

    def _check(self) -> None:
        self._check_required()
        if self.root.is_dir():
            check_writable(self.root)

    def _check_required(self) -> None:
        if self._required is not None and not os.path.exists(self.root / self._required):
            raise lost(self.uri, self._required)

    def _create(self, directory: Path, temporary: Path) -> int:
        self._make_directory(directory)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            return os.open(temporary, flags, FILE_MODE)
        except FileNotFoundError:
            # Somebody removed directories that we had made.
            self._durable.clear()
            self._make_directory(directory)
            return os.open(temporary, flags, FILE_MODE)

    def _make_directory(self, directory: Path) -> None:
        if directory in self._durable:
            return
        if directory != self.root:
            self._make_directory(directory.parent)
            with suppress(FileExistsError):
                os.mkdir(directory, DIRECTORY_MODE)
        elif self._required is None and not directory.exists():
            make_directory(directory)

    def _make_durable(self, directory: Path) -> None:
        """The names of it and of its parents. Once a process, also of those that were there: another may just have made
        them.

        After the blob is written: the file system has then committed them with it, and hardly anything is left to do.
        """
        if directory in self._durable:
            return
        if directory == self.root:
            with suppress(PermissionError):  # what is above the root is the operator's, and need not be readable
                sync_directory(directory.parent)
        else:
            sync_directory(directory.parent)
            self._make_durable(directory.parent)
        self._durable.add(directory)

    def _read(self, name: str, path: Path, ranges: Sequence[tuple[int, int]] | None) -> Buffers:
        with _explained("read", path):
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except (FileNotFoundError, NotADirectoryError):
                raise _not_found(name, self.uri) from None
            try:
                found = os.fstat(descriptor)
                if not stat.S_ISREG(found.st_mode):
                    raise _not_found(name, self.uri)
                wanted = [(0, found.st_size)] if ranges is None else ranges
                return [_range(descriptor, name, offset, length, found.st_size) for offset, length in wanted]
            finally:
                os.close(descriptor)

    def _walk(self, directory: str, prefix: str, start_after: str) -> Iterator[BlobInfo]:
        """In the order of names: a directory sorts as its name with the '/', like everything below it."""
        keys = []
        with _explained("list", self.root / directory):
            try:
                with os.scandir(self.root / directory) as entries:
                    for entry in entries:
                        key = directory + entry.name
                        if entry.name.startswith(TEMPORARY) or not _is_text(key):
                            continue
                        if entry.is_dir():
                            key += "/"
                            within = key.startswith(prefix) or prefix.startswith(key)
                            if within and (key > start_after or start_after.startswith(key)):
                                keys.append(key)
                        elif key.startswith(prefix) and key > start_after:
                            keys.append(key)
            except (FileNotFoundError, NotADirectoryError):
                return
        keys.sort()
        for key in keys:
            if key.endswith("/"):
                yield from self._walk(key, prefix, start_after)
            elif (info := _info(key, self.root / key)) is not None:
                yield info


def _write(descriptor: int, views: Views) -> None:
    """All of them, in order, without joining them."""
    gathered: Views = []
    size = 0
    for view in views:
        for start in range(0, len(view), _WRITE_BYTES):
            piece = view[start : start + _WRITE_BYTES]
            if size + len(piece) > _WRITE_BYTES or len(gathered) == _VECTOR_MAX:
                _write_all(descriptor, gathered)
                gathered, size = [], 0
            gathered.append(piece)
            size += len(piece)
    _write_all(descriptor, gathered)


def _write_all(descriptor: int, views: Views) -> None:
    while views:
        written = os.writev(descriptor, views)
        while views and written >= len(views[0]):
            written -= len(views.pop(0))
        if written:
            views[0] = views[0][written:]


def _link(temporary: Path, path: Path) -> bool:
    """Whether the name was taken already."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        return True
    return False


def _range(descriptor: int, name: str, offset: int, length: int, size: int) -> Buffer:
    if offset + length > size:
        raise too_short(name, offset, length, size)
    if length >= MAP_BYTES_MIN:
        # Populated here, on a pool's thread, so that the one that reads it does not wait for the disk page by page.
        start = offset - offset % mmap.ALLOCATIONGRANULARITY
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        mapped = mmap.mmap(descriptor, offset + length - start, flags=flags, prot=mmap.PROT_READ, offset=start)
        return memoryview(mapped)[offset - start :]
    data = os.pread(descriptor, length, offset)
    while len(data) < length:
        more = os.pread(descriptor, length - len(data), offset + len(data))
        if not more:
            raise too_short(name, offset, length, offset + len(data))
        data += more
    return data


def _info(name: str, path: Path) -> BlobInfo | None:
    with _explained("look at", path):
        try:
            found = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        if not stat.S_ISREG(found.st_mode):
            return None
        return BlobInfo(name, found.st_size, found.st_mtime_ns // 1_000_000)


def _delete(paths: list[Path]) -> None:
    for path in paths:
        with _explained("delete", path):
            try:
                os.unlink(path)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except (IsADirectoryError, PermissionError):
                if not path.is_dir():
                    raise


def _clean(directory: Path, before_ns: int) -> int:
    removed = 0
    with _explained("clean", directory):
        for parent, _, files in os.walk(directory):
            for file in files:
                path = Path(parent, file)
                try:
                    if file.startswith(TEMPORARY) and path.stat().st_mtime_ns < before_ns:
                        path.unlink()
                        removed += 1
                except FileNotFoundError:
                    continue
    return removed


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _not_found(name: str, uri: str) -> BlobNotFound:
    return BlobNotFound(f"blob {name!r} is not in {uri}: it was never put, or has been deleted")


def _remedy(error: OSError) -> str:
    return _REMEDIES.get(error.errno or 0, "check its file system")


@contextmanager
def _explained(doing: str, path: Path) -> Iterator[None]:
    """Turns what the operating system says into an error that names the path and what to do."""
    try:
        yield
    except NotADirectoryError as error:
        raise InvalidArgument(f"cannot {doing} {path}: a part of that path is a blob, not a directory") from error
    except OSError as error:
        raise StoreUnavailable(f"cannot {doing} {path} ({error.strerror or error}): {_remedy(error)}") from error
