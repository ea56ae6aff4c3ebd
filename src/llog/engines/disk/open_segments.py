"""The segment files that one opened log holds: writers by their locks until the log is closed, readers as long as they
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
from llog.engines.disk.format.files import explained
from llog.engines.disk.log.log import SegmentLog
from llog.engines.disk.log.reader import SegmentReader
from llog.engines.disk.options import SegmentOptions
from llog.engines.port import CleanResult
from llog.errors import LlogError, LogOwned, StoreUnavailable
from llog.log.owners import Owners, disk_of
from llog.model import TopicPartition
from llog.runtime import Runtime

READERS_MAX: Final = 256


class _Used:
    """A reader, the writer that it knows of, and how many use it."""

    def __init__(self, reader: SegmentReader, log: SegmentLog | None) -> None:
        self.reader = reader
        self.log = log
        self.users = 0
        self.dropped = False

    def drop(self) -> None:
        """Closes it, once nobody uses it."""
        self.dropped = True
        if not self.users:
            self.reader.close()


class _Owned:
    """A writer, whether it is kept when nobody borrows it, and how many do."""

    def __init__(self, log: SegmentLog) -> None:
        self.log = log
        self.kept = False
        self.borrowers = 0
        self.cleaning: asyncio.Future[CleanResult] | None = None
        self.closing = threading.Event()

    async def close(self) -> None:
        """After the cleaning that is under way, which is told to stop."""
        self.closing.set()
        if self.cleaning is not None:
            await asyncio.wait([self.cleaning])
        await self.log.close()


class OpenSegments:
    """All that read or append to disk topics through one `Log` share these."""

    def __init__(
        self, directory: Path, options: SegmentOptions, runtime: Runtime, owners: Owners | None = None
    ) -> None:
        self._directory = directory
        self._owners = owners
        self._identity: str | None = None
        self._owning = asyncio.Lock()
        self._ownership: int | None = None
        """The lock of the whole directory, in the one broker that answers for it."""
        self._options = options
        self._runtime = runtime
        self._locks: dict[Path, asyncio.Lock] = {}
        self._writers: dict[Path, _Owned] = {}
        self._readers: OrderedDict[Path, _Used] = OrderedDict()
        self._closed = False

    @property
    def directory(self) -> Path:
        return self._directory

    async def identity(self) -> str | None:
        """The id of the directory; None if no topic was made in it yet."""
        if self._identity is None:
            self._identity = await asyncio.to_thread(directory_id, self._directory)
        return self._identity

    async def hold(self) -> str | None:
        """Returns the id of the directory, which is made if need be. A broker owns it from then on: `LogOwned` if
        another one does.

        Programs other than brokers answer nobody: the locks of the partitions that they append to are enough.
        """
        owners = self._owners
        if owners is None:
            return None
        self._identity = await owners.identity(self._directory)
        if owners.is_broker and self._ownership is None:
            await asyncio.shield(asyncio.ensure_future(self._own(owners, disk_of(self._identity))))
        return self._identity

    async def take_up(self) -> None:
        """As `hold`, if there are topics in the directory."""
        if self._ownership is None and await self.identity() is not None:
            await self.hold()

    def held(self, path: Path) -> SegmentLog | None:
        """The writer of this partition, if it is kept here."""
        owned = self._writers.get(path)
        return owned.log if owned is not None and owned.kept else None

    async def writer(self, path: Path, tp: TopicPartition) -> SegmentLog:
        """The one writer of this partition, opened if need be, and kept; `LogOwned` if another process has it."""
        async with self._lock(path):
            owned = await self._owned(path, tp)
            owned.kept = True
            return owned.log

    @asynccontextmanager
    async def borrowed(self, path: Path, tp: TopicPartition) -> AsyncIterator[SegmentLog]:
        """The writer of this partition, which is closed again after this unless somebody keeps it: upkeep must not
        become the owner.
        """
        async with self._lock(path):
            owned = await self._owned(path, tp)
            owned.borrowers += 1
        try:
            yield owned.log
        finally:
            async with self._lock(path):
                owned.borrowers -= 1
                if not owned.kept and not owned.borrowers and self._writers.get(path) is owned:
                    del self._writers[path]
                    await owned.close()

    async def clean(self, path: Path, tp: TopicPartition, delete_retention_ms: int, *, force: bool) -> CleanResult:
        """Key compaction of the sealed segments, on a thread; appends and reads go on. `force` seals the newest one
        first.
        """
        async with self.borrowed(path, tp):
            owned = self._writers[path]
            if force:
                await owned.log.roll()
            if owned.cleaning is not None:
                return CleanResult()  # it is being done
            owned.cleaning = asyncio.ensure_future(
                asyncio.to_thread(
                    clean,
                    owned.log,
                    delete_retention_ms=delete_retention_ms,
                    now_ms=self._runtime.now_ms,
                    force=force,
                    stopped=owned.closing.is_set,
                )
            )
            owned.cleaning.add_done_callback(lambda _: setattr(owned, "cleaning", None))
            return await asyncio.shield(owned.cleaning)

    @contextmanager
    def reading(self, path: Path, tp: TopicPartition) -> Iterator[SegmentReader]:
        """A reader of this partition. When there are many, those that nobody is using are closed, the longest unused
        first.
        """
        self._check_open()
        owned = self._writers.get(path)
        log = None if owned is None else owned.log
        used = self._readers.pop(path, None)
        if used is not None and used.log is not log:
            used.drop()
            used = None
        if used is None:
            used = _Used(SegmentReader.open(path, self._runtime, what=str(tp), log=log), log)
        self._readers[path] = used
        used.users += 1
        while len(self._readers) > READERS_MAX:
            self._readers.popitem(last=False)[1].drop()
        try:
            yield used.reader
        finally:
            used.users -= 1
            if used.dropped:
                used.drop()

    async def let_go(self, directory: Path) -> None:
        """Closes what is open below this directory, which is gone."""
        for path in [path for path in self._readers if path.is_relative_to(directory)]:
            self._readers.pop(path).drop()
        for path in [path for path in self._writers if path.is_relative_to(directory)]:
            try:
                await self._writers.pop(path).close()
            except LlogError:
                pass  # there is nothing left to close properly

    async def let_go_of_deleted(self) -> None:
        """Closes what is open of topics whose directories are gone: else it would stay, with its bytes, until somebody
        asks for them.
        """
        for path in {path.parent for path in (*self._readers, *self._writers)}:
            if not path.is_dir():
                await self.let_go(path)

    async def check(self) -> None:
        """`StoreUnavailable` if the files that are open can take no records."""
        is_there = await asyncio.to_thread(self._directory.is_dir)
        if is_there:
            await asyncio.to_thread(check_writable, self._directory)
        elif self._writers:
            raise StoreUnavailable(
                f"{self._directory} was deleted or unmounted while this process had files in it open: bring it "
                "back, or restart"
            )

    async def close(self) -> None:
        """Idempotent. All that was appended stays appended, whatever the first error says that it raises."""
        self._closed = True
        for used in self._readers.values():
            used.drop()
        self._readers.clear()
        writers, self._writers = self._writers, {}
        results = await asyncio.gather(*(writer.close() for writer in writers.values()), return_exceptions=True)
        ownership, self._ownership = self._ownership, None
        if ownership is not None:
            os.close(ownership)
        for path, result in zip(writers, results, strict=True):
            if isinstance(result, BaseException) and path.is_dir():  # else its topic was deleted
                raise result

    async def _owned(self, path: Path, tp: TopicPartition) -> _Owned:
        """Under the partition's lock. An opening goes on though its caller is cancelled: nobody else would let go of
        the lock.
        """
        owned = self._writers.get(path)
        if owned is None:
            owned = await asyncio.shield(asyncio.ensure_future(self._open(path, tp)))
        return owned

    async def _open(self, path: Path, tp: TopicPartition) -> _Owned:
        self._check_open()
        try:
            await self.hold()
            log = await asyncio.to_thread(SegmentLog.open, path, self._options, self._runtime, what=str(tp))
        except LogOwned as error:
            error.address = error.address or self._broker_with(path)
            error.args = (
                f"{error}. If it is a broker, send records over HTTP (POST /produce); its retention and key "
                "compaction it does itself",
            )
            raise
        owned = _Owned(log)
        if self._closed:
            await owned.close()
            self._check_open()
        self._writers[path] = owned
        return owned

    async def _own(self, owners: Owners, what: str) -> None:
        async with self._owning:
            self._check_open()
            if self._ownership is None:
                await owners.check_machine(what, "disk topics")
                self._ownership = await asyncio.to_thread(self._take_ownership, owners.address)
                await owners.publish(what)

    def _take_ownership(self, address: str | None) -> int:
        with explained("lock", self._directory):
            return take_lock(self._directory, "disk topics", address=address, name=LOCK_AMONG_OTHERS)

    def _broker_with(self, path: Path) -> str | None:
        """The address of the broker that answers for the directory, if that is what has the partition."""
        owner, broker = owner_of(path), owner_of(self._directory, LOCK_AMONG_OTHERS)
        return broker.address if owner and broker and owner.pid == broker.pid else None

    def _lock(self, path: Path) -> asyncio.Lock:
        return self._locks.setdefault(path, asyncio.Lock())

    def _check_open(self) -> None:
        if self._closed:
            raise StoreUnavailable("this log is closed: open another one")
