"""The segment files that an open log has open: writers, with their locks, until the log is closed; readers while they
are used.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Final

from llog.base.durable import check_writable
from llog.base.lockfile import LOCK_AMONG_OTHERS, directory_id, owner_of, take_lock
from llog.engines.disk.cleaning.cleaner import clean
from llog.engines.disk.format.files import translate_os_errors
from llog.engines.disk.log.log import SegmentLog
from llog.engines.disk.log.reader import SegmentReader
from llog.engines.disk.options import SegmentOptions
from llog.errors import LlogError, LogOwned, StoreUnavailable
from llog.log.engine import CleanResult
from llog.log.owners import Owners, disk_ownership
from llog.model import TopicPartition
from llog.runtime import Runtime

READERS_MAX: Final = 256


class _SharedReader:
    """A reader, the writer that it was opened with, and its number of users."""

    def __init__(self, reader: SegmentReader, log: SegmentLog | None) -> None:
        self.reader = reader
        self.log = log
        self.users = 0
        self.is_dropped = False

    def drop(self) -> None:
        """Close the reader, now or after its last use."""
        self.is_dropped = True
        if not self.users:
            self.reader.close()


class _SharedWriter:
    """A writer, its number of borrowers, and whether it stays open without any."""

    def __init__(self, log: SegmentLog) -> None:
        self.log = log
        self.is_kept = False
        self.borrowers = 0
        self.cleaning: asyncio.Future[CleanResult] | None = None
        self.closing = threading.Event()

    async def close(self) -> None:
        """Stop a cleaning under way, wait for its end, and close the writer."""
        self.closing.set()
        if self.cleaning is not None:
            await asyncio.wait([self.cleaning])
        await self.log.close()


class SegmentPool:
    """Shares the readers and writers of disk topics among all users of one `Log`."""

    def __init__(
        self, directory: Path, options: SegmentOptions, runtime: Runtime, owners: Owners | None = None
    ) -> None:
        self._directory = directory
        self._owners = owners
        self._identity: str | None = None
        self._ownership_mutex = asyncio.Lock()
        self._ownership: int | None = None
        """The lock of the whole directory, if this process is the broker that serves it."""
        self._options = options
        self._runtime = runtime
        self._locks: dict[Path, asyncio.Lock] = {}
        self._writers: dict[Path, _SharedWriter] = {}
        self._readers: OrderedDict[Path, _SharedReader] = OrderedDict()
        self._closed = False

    @property
    def directory(self) -> Path:
        return self._directory

    async def identity(self) -> str | None:
        """Return the id of the directory; None if no topic was ever created in it."""
        if self._identity is None:
            self._identity = await asyncio.to_thread(directory_id, self._directory)
        return self._identity

    async def ensure_directory(self) -> str | None:
        """Create the directory if needed, and return its id. A broker also becomes its owner, and raises `LogOwned` if
        another broker is.

        Other programs serve nobody, so the locks of the partitions that they append to are enough.
        """
        owners = self._owners
        if owners is None:
            return None
        self._identity = await owners.identity(self._directory)
        if owners.is_broker and self._ownership is None:
            await asyncio.shield(asyncio.ensure_future(self._take_ownership(owners, disk_ownership(self._identity))))
        return self._identity

    async def take_ownership(self) -> None:
        """Make this broker the owner of the directory, if topics were created in it."""
        if self._ownership is None and await self.identity() is not None:
            await self.ensure_directory()

    def kept_writer(self, path: Path) -> SegmentLog | None:
        """Return the writer of this partition if it is open and kept; never opens it."""
        writer = self._writers.get(path)
        return writer.log if writer is not None and writer.is_kept else None

    async def open_kept_writer(self, path: Path, tp: TopicPartition) -> SegmentLog:
        """Return the one writer of this partition, opened if needed, and kept open. Raises `LogOwned` if another
        process has it.
        """
        async with self._lock(path):
            writer = await self._get_or_open(path, tp)
            writer.is_kept = True
            return writer.log

    @asynccontextmanager
    async def borrow_writer(self, path: Path, tp: TopicPartition) -> AsyncIterator[SegmentLog]:
        """Yield the writer of this partition, and close it afterwards unless it is kept open: upkeep must not make this
        process the owner.
        """
        async with self._lock(path):
            writer = await self._get_or_open(path, tp)
            writer.borrowers += 1
        try:
            yield writer.log
        finally:
            async with self._lock(path):
                writer.borrowers -= 1
                if not writer.is_kept and not writer.borrowers and self._writers.get(path) is writer:
                    del self._writers[path]
                    await writer.close()

    async def clean(self, path: Path, tp: TopicPartition, delete_retention_ms: int, *, force: bool) -> CleanResult:
        """Compact the sealed segments by key, on a thread; appends and reads go on. `force` seals the newest one
        first.
        """
        async with self.borrow_writer(path, tp):
            writer = self._writers[path]
            if force:
                await writer.log.roll()
            if writer.cleaning is not None:
                return CleanResult()  # one is under way
            writer.cleaning = asyncio.ensure_future(
                asyncio.to_thread(
                    clean,
                    writer.log,
                    delete_retention_ms=delete_retention_ms,
                    now_ms=self._runtime.now_ms,
                    force=force,
                    stopped=writer.closing.is_set,
                )
            )
            writer.cleaning.add_done_callback(lambda _: setattr(writer, "cleaning", None))
            return await asyncio.shield(writer.cleaning)

    @contextmanager
    def borrow_reader(self, path: Path, tp: TopicPartition) -> Iterator[SegmentReader]:
        """Yield a reader of this partition. Beyond `READERS_MAX`, the least recently used readers are closed once they
        are free.
        """
        self._check_open()
        writer = self._writers.get(path)
        log = None if writer is None else writer.log
        shared = self._readers.pop(path, None)
        if shared is not None and shared.log is not log:
            shared.drop()
            shared = None
        if shared is None:
            shared = _SharedReader(SegmentReader.open(path, self._runtime, what=str(tp), log=log), log)
        self._readers[path] = shared
        shared.users += 1
        while len(self._readers) > READERS_MAX:
            self._readers.popitem(last=False)[1].drop()
        try:
            yield shared.reader
        finally:
            shared.users -= 1
            if shared.is_dropped:
                shared.drop()

    async def close_below(self, directory: Path) -> None:
        """Close all readers and writers below this directory, which was removed."""
        for path in [path for path in self._readers if path.is_relative_to(directory)]:
            self._readers.pop(path).drop()
        for path in [path for path in self._writers if path.is_relative_to(directory)]:
            try:
                await self._writers.pop(path).close()
            except LlogError:
                pass  # the files are gone, so nothing can be lost

    async def close_deleted(self) -> None:
        """Close the files of topics whose directories are gone. Otherwise they would take up space until their next
        use.
        """
        for path in {path.parent for path in (*self._readers, *self._writers)}:
            if not path.is_dir():
                await self.close_below(path)

    async def check(self) -> None:
        """Raise `StoreUnavailable` if disk topics cannot take records."""
        is_there = await asyncio.to_thread(self._directory.is_dir)
        if is_there:
            await asyncio.to_thread(check_writable, self._directory)
        elif self._writers:
            raise StoreUnavailable(
                f"{self._directory} was deleted or unmounted while this process had files in it open: restore it, "
                "or restart"
            )

    async def close(self) -> None:
        """Close all readers and writers; raises the first error. Acknowledged records stay, whatever the error.
        Idempotent.
        """
        self._closed = True
        for shared in self._readers.values():
            shared.drop()
        self._readers.clear()
        writers, self._writers = self._writers, {}
        results = await asyncio.gather(*(writer.close() for writer in writers.values()), return_exceptions=True)
        ownership, self._ownership = self._ownership, None
        if ownership is not None:
            os.close(ownership)
        for path, result in zip(writers, results, strict=True):
            if isinstance(result, BaseException) and path.is_dir():  # without a directory, its topic was deleted
                raise result

    async def _get_or_open(self, path: Path, tp: TopicPartition) -> _SharedWriter:
        """Return the writer, opened if needed; the caller holds the partition's mutex. Opening goes on even if the
        caller is cancelled, so that no lock is left behind.
        """
        writer = self._writers.get(path)
        if writer is None:
            writer = await asyncio.shield(asyncio.ensure_future(self._open(path, tp)))
        return writer

    async def _open(self, path: Path, tp: TopicPartition) -> _SharedWriter:
        self._check_open()
        try:
            await self.ensure_directory()
            log = await asyncio.to_thread(SegmentLog.open, path, self._options, self._runtime, what=str(tp))
        except LogOwned as error:
            error.address = error.address or self._broker_with(path)
            error.args = (
                f"{error}. If it is a broker, send records over HTTP (POST /produce); it runs retention and key "
                "compaction itself",
            )
            raise
        writer = _SharedWriter(log)
        if self._closed:
            await writer.close()
            self._check_open()
        self._writers[path] = writer
        return writer

    async def _take_ownership(self, owners: Owners, what: str) -> None:
        async with self._ownership_mutex:
            self._check_open()
            if self._ownership is None:
                await owners.check_machine(what, "disk topics")
                self._ownership = await asyncio.to_thread(self._lock_directory, owners.local_address)
                await owners.publish(what)

    def _lock_directory(self, address: str | None) -> int:
        with translate_os_errors("lock", self._directory):
            return take_lock(self._directory, "disk topics", address=address, name=LOCK_AMONG_OTHERS)

    def _broker_with(self, path: Path) -> str | None:
        """Return the address of the broker that owns the directory, if it also has the partition open."""
        owner, broker = owner_of(path), owner_of(self._directory, LOCK_AMONG_OTHERS)
        return broker.address if owner and broker and owner.pid == broker.pid else None

    def _lock(self, path: Path) -> asyncio.Lock:
        return self._locks.setdefault(path, asyncio.Lock())

    def _check_open(self) -> None:
        if self._closed:
            raise StoreUnavailable("this log is closed: open another one")
