"""Blobs as local files, which survive a power cut once their put has returned.

A put writes a temporary file beside its target, fsyncs it, links it into place (which fails if the name is taken) and
fsyncs the directory. So a blob is whole or absent, and a crash leaves at most a temporary file.
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
from llog.errors import InvalidArgument, OutcomeUnknown, StoreUnavailable
from llog.stores.blob_rules import (
    PAGE,
    TEMPORARY,
    blob_exists,
    blob_not_found,
    blob_too_short,
    check_name,
    check_prefix,
    check_range,
    required_blob_missing,
)
from llog.stores.blobs import BlobInfo, Buffer
from llog.stores.counting import OperationCounts, measure

T = TypeVar("T")
Buffers = list[Buffer]  # in the class below, `list` is a method
Views = list[memoryview]

MAP_BYTES_MIN = 1024 * 1024
"""A range of at least this size is mapped instead of copied."""
_VECTOR_MAX = 1024  # IOV_MAX of Linux and macOS
_WRITE_BYTES = 128 << 10
"""Bytes of one call: on Linux 6.18 with ext4, calls of 1 MiB and more took four times the CPU and the time."""
_PUT_POOL = 0
_OTHER_POOL = 1
_REMEDIES = REMEDIES | {
    errno.EPERM: "give this user read and write access to it, on a file system that has hard links",
    errno.EOPNOTSUPP: "put the data on a file system that has hard links",
}


class FileBlobStore:
    """`BlobStore` on a directory, which the first put creates.

    Blocking calls run on two small thread pools, so that slow puts do not hold up reads.
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
        with measure(self.counts, "put") as call:
            call.size = sum(map(len, views))
            await self._run(_PUT_POOL, lambda: self._put(name, path, views))

    async def get(self, name: str) -> Buffer:
        path = self._path(name)
        with measure(self.counts, "get") as call:
            data = await self._run(_OTHER_POOL, lambda: self._read(name, path, None)[0])
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
        with measure(self.counts, "range_get") as call:
            data = await self._run(_OTHER_POOL, lambda: self._read(name, path, ranges))
            call.size = sum(map(len, data))
            return data

    async def head(self, name: str) -> BlobInfo | None:
        path = self._path(name)
        with measure(self.counts, "head"):
            return await self._run(_OTHER_POOL, lambda: _blob_info(name, path))

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[list[BlobInfo]]:
        walk = self._walk(prefix[: prefix.rfind("/") + 1], check_prefix(prefix), start_after)
        size = PAGE
        while size == PAGE:
            with measure(self.counts, "list"):
                page = await self._run(_OTHER_POOL, lambda: list(islice(walk, PAGE)))
            size = len(page)
            if page:
                yield page

    async def delete_many(self, names: Sequence[str]) -> None:
        """Delete these blobs, but not durably: the collector finds and deletes a blob that a power cut brings back."""
        paths = [self._path(name) for name in names]
        for start in range(0, len(paths), PAGE):
            with measure(self.counts, "delete"):
                chunk = paths[start : start + PAGE]
                await self._run(_OTHER_POOL, lambda chunk=chunk: _delete(chunk))  # type: ignore[misc]

    async def remove_unfinished_puts(self, before_ms: int) -> int:
        return await self._run(_OTHER_POOL, lambda: _remove_temporary_files(self.root, before_ms * 1_000_000))

    def require(self, name: str) -> None:
        self._required = check_name(name)

    async def check(self) -> None:
        await self._run(_OTHER_POOL, self._check)

    async def close(self) -> None:
        """Wait until all calls under way have ended, and end the threads."""
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
        # A pool's threads do not survive a fork: the child makes its own.
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
        with _translate_os_errors("put", path):
            self._check_required()
            descriptor = self._create_temporary(directory, temporary)
            try:
                try:
                    _write(descriptor, views)
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
                is_linked = _try_link(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)
        try:
            # Also if the name is taken: the caller may rely on that blob, whose own put may not have come this far yet.
            sync_directory(directory)
            self._make_durable(directory)
        except OSError as error:
            raise OutcomeUnknown(
                f"blob {name!r} was written to {path}, but its directory could not be made durable ({error.strerror}): "
                f"{_remedy(error)}"
            ) from error
        if not is_linked:
            raise blob_exists(name, self.uri)

    def _check(self) -> None:
        self._check_required()
        if self.root.is_dir():
            check_writable(self.root)

    def _check_required(self) -> None:
        if self._required is not None and not os.path.exists(self.root / self._required):
            raise required_blob_missing(self.uri, self._required)

    def _create_temporary(self, directory: Path, temporary: Path) -> int:
        self._make_directory(directory)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            return os.open(temporary, flags, FILE_MODE)
        except FileNotFoundError:
            # Another process removed directories that this one had made.
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
        """Make the names of the directory and its parents durable, once per process.

        This includes directories that existed before: another process may just have made them. It comes after the blob
        is written, because the file system has then committed the names with it, and hardly anything is left to do.
        """
        if directory in self._durable:
            return
        if directory == self.root:
            with suppress(PermissionError):  # the directory above the root is the operator's and may be unreadable
                sync_directory(directory.parent)
        else:
            sync_directory(directory.parent)
            self._make_durable(directory.parent)
        self._durable.add(directory)

    def _read(self, name: str, path: Path, ranges: Sequence[tuple[int, int]] | None) -> Buffers:
        with _translate_os_errors("read", path):
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except (FileNotFoundError, NotADirectoryError):
                raise blob_not_found(name, self.uri) from None
            try:
                status = os.fstat(descriptor)
                if not stat.S_ISREG(status.st_mode):
                    raise blob_not_found(name, self.uri)
                wanted = [(0, status.st_size)] if ranges is None else ranges
                return [_read_range(descriptor, name, offset, length, status.st_size) for offset, length in wanted]
            finally:
                os.close(descriptor)

    def _walk(self, directory: str, prefix: str, start_after: str) -> Iterator[BlobInfo]:
        """Yield blobs in the order of names. A directory sorts by its name with the '/', as all names below it do."""
        keys = []
        with _translate_os_errors("list", self.root / directory):
            try:
                with os.scandir(self.root / directory) as entries:
                    for entry in entries:
                        key = directory + entry.name
                        if entry.name.startswith(TEMPORARY) or not _is_unicode(key):
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
            elif (info := _blob_info(key, self.root / key)) is not None:
                yield info


def _write(descriptor: int, views: Views) -> None:
    """Write all views in order, without copying them into one buffer."""
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


def _try_link(temporary: Path, path: Path) -> bool:
    """Link the file to the path, or return False if the name is taken."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    return True


def _read_range(descriptor: int, name: str, offset: int, length: int, size: int) -> Buffer:
    if offset + length > size:
        raise blob_too_short(name, offset, length, size)
    if length >= MAP_BYTES_MIN:
        # Populated here, on a thread of the pool, so that the reader does not wait for the disk page by page.
        start = offset - offset % mmap.ALLOCATIONGRANULARITY
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        mapped = mmap.mmap(descriptor, offset + length - start, flags=flags, prot=mmap.PROT_READ, offset=start)
        return memoryview(mapped)[offset - start :]
    data = os.pread(descriptor, length, offset)
    while len(data) < length:
        more = os.pread(descriptor, length - len(data), offset + len(data))
        if not more:
            raise blob_too_short(name, offset, length, offset + len(data))
        data += more
    return data


def _blob_info(name: str, path: Path) -> BlobInfo | None:
    with _translate_os_errors("look at", path):
        try:
            status = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        if not stat.S_ISREG(status.st_mode):
            return None
        return BlobInfo(name, status.st_size, status.st_mtime_ns // 1_000_000)


def _delete(paths: list[Path]) -> None:
    for path in paths:
        with _translate_os_errors("delete", path):
            try:
                os.unlink(path)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except (IsADirectoryError, PermissionError):
                if not path.is_dir():
                    raise


def _remove_temporary_files(directory: Path, before_ns: int) -> int:
    removed = 0
    with _translate_os_errors("clean", directory):
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


def _is_unicode(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _remedy(error: OSError) -> str:
    return _REMEDIES.get(error.errno or 0, "check its file system")


@contextmanager
def _translate_os_errors(action: str, path: Path) -> Iterator[None]:
    """Turn an `OSError` into an error of llog that names the path and what to do."""
    try:
        yield
    except NotADirectoryError as error:
        raise InvalidArgument(f"cannot {action} {path}: a part of that path is a blob, not a directory") from error
    except OSError as error:
        raise StoreUnavailable(f"cannot {action} {path} ({error.strerror or error}): {_remedy(error)}") from error
