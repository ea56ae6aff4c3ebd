"""The keyed log that a broker holds: its writer from the first append on, a reader from the first read that needs one.

There is one writer of a keyed log at a time, its owner, and what others are asked to append goes to that one. A broker
that was paused for longer than its session may find that another has become the owner: then it is one of the others. If
it was paused while it opened the log, it fences that other by it, which takes the log back. A broker that was fenced by
somebody who insisted appends no more until it is restarted: two that took turns would only fence each other. Its reads
go on.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, Final, Generic, TypeVar

from llog.base.durable import OpenedFile, check_writable
from llog.broker.metrics import Metrics
from llog.config import Settings
from llog.errors import LlogError, NotSeenYet, OutcomeUnknown, StoreUnavailable, WriterFenced
from llog.keyed import KeyedLog, KeyedLogReader
from llog.log.owners import Owners

T = TypeVar("T")
L = TypeVar("L", bound=KeyedLogReader, covariant=True)

CLOSE_LIMIT_S: Final = 10.0
"""SlateDB tries for ever to reach a bucket; a broker that was told to stop must end."""
WRITE_LOOKS_MAX: Final = 30
WRITE_LOOK_S: Final = 1.0
"""How often a write that takes long looks what is wrong with its store, and how many times before it gives up."""
_CANCELS_MAX: Final = 3
_CANCEL_S: Final = 1.0


class _Opened(Generic[L]):
    """A log that is opened by the first who wants it. Who comes meanwhile shares the attempt; after a failure the next
    one tries again.
    """

    def __init__(self, opening: Callable[[], Coroutine[Any, Any, L]]) -> None:
        self._open = opening
        self._task: asyncio.Task[L] | None = None

    @property
    def now(self) -> L | None:
        """The log, if it is open."""
        task = self._task
        return task.result() if task is not None and _went_well(task) else None

    async def get(self) -> L:
        if self._task is None:
            self._task = asyncio.create_task(self._open())
        task = self._task
        try:
            return await asyncio.shield(task)
        finally:
            if task.done() and not _went_well(task) and self._task is task:
                self._task = None

    async def drop(self, log: KeyedLogReader) -> None:
        """Closes it, and lets the next one open it again."""
        if self.now is log:
            self._task = None
            with suppress(LlogError):
                await log.close()

    async def close(self) -> None:
        """`WriterFenced` if appends that nobody waited for are lost."""
        task, self._task = self._task, None
        if task is not None:
            await asyncio.wait([task])
            if _went_well(task):
                await task.result().close()


def _went_well(task: asyncio.Task[L]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


class HeldLog:
    """Made on the event loop that it is used on."""

    def __init__(self, url: str, settings: Settings, metrics: Metrics, owners: Owners | None = None) -> None:
        self.url = url
        self._owners = owners
        self._settings = settings
        self._metrics = metrics
        self._writer = _Opened(self._open_writer)
        self._reader = _Opened(self._open_reader)
        self._file: OpenedFile | None = None
        """The directory of a log in local files, since it was opened first: what is there later may be another one, or
        none.
        """
        self._is_stalled = False
        """A write was given up: the next one looks at the store first, so that no more of them wait."""
        self._is_closed = False

    async def write(self, use: Callable[[KeyedLog], Coroutine[Any, Any, T]]) -> T:
        """The result of `use` on the writer; `LogOwned` if another process owns the log.

        `WriterFenced` for good once a writer that asked nobody has taken over.
        """
        self._check_open()
        if self._metrics.keyed_fenced:
            raise self._fenced()
        if self._is_stalled:
            await asyncio.to_thread(self.check)
            self._is_stalled = False
        writer = await self._writer.get()
        if writer.ownership.is_known_lost:
            await self._writer.drop(writer)
            writer = await self._writer.get()
        try:
            return await self._in_time(use(writer))
        except WriterFenced as error:
            raise await self._after_fence(writer) from error
        except StoreUnavailable as error:
            await self._writer.drop(writer)  # of no use after a failure
            if self._metrics.keyed_fenced:  # found out by another request, which closed it
                raise self._fenced() from error
            raise

    async def read(self, use: Callable[[KeyedLogReader], Awaitable[T]]) -> T:
        """The result of `use` on the writer, which sees its own appends at once, or else on the reader."""
        self._check_open()
        writer = self._writer.now
        if writer is not None and writer.ownership.is_known_lost:
            await self._writer.drop(writer)
            writer = None
        if writer is not None:
            try:
                return await use(writer)
            except WriterFenced:
                await self._after_fence(writer)
            except StoreUnavailable:
                await self._writer.drop(writer)
            except NotSeenYet:
                pass  # it may have been taken over without knowing; nothing is wrong with it otherwise
        reader = await self._reader.get()
        try:
            return await use(reader)
        except StoreUnavailable:
            await self._reader.drop(reader)
            raise

    async def reader(self) -> KeyedLogReader:
        """For what goes on for long: it sees what any writer appends, this one or the next."""
        self._check_open()
        return await self._reader.get()

    async def drop_reader(self, reader: KeyedLogReader) -> None:
        """It failed: the next one who wants a reader gets another."""
        await self._reader.drop(reader)

    def check(self) -> None:
        """`StoreUnavailable` if the log was opened, and its directory is gone, full or read-only."""
        if self._file is not None:
            self._file.check()
            check_writable(self._file.path)

    async def close(self) -> None:
        """Makes everything durable, unless the store is out of reach: what was not acknowledged may then be lost."""
        self._is_closed = True
        closing = [asyncio.create_task(opened.close()) for opened in (self._reader, self._writer)]
        _, late = await asyncio.wait(closing, timeout=CLOSE_LIMIT_S)
        for _ in range(_CANCELS_MAX):  # one ends only the wait that it meets, and whoever closes waits more than once
            for task in late:
                task.cancel()
            if late:
                _, late = await asyncio.wait(late, timeout=_CANCEL_S)
        for task in closing:
            if not task.done() or task.cancelled():
                _tell(f"the keyed log at {self.url} was not closed within {CLOSE_LIMIT_S:.0f} s: is it out of reach?")
            elif isinstance(error := task.exception(), LlogError):
                _tell(f"the keyed log at {self.url} was not closed cleanly: {error}")

    async def _in_time(self, write: Coroutine[Any, Any, T]) -> T:
        """SlateDB tries for ever to write to a store that is full or out of reach; `OutcomeUnknown`, since it goes on
        trying.
        """
        task = asyncio.create_task(write)
        why = f"no answer within {WRITE_LOOKS_MAX * WRITE_LOOK_S:.0f} seconds"
        try:
            for _ in range(WRITE_LOOKS_MAX):
                await asyncio.wait([task], timeout=WRITE_LOOK_S)
                if task.done():
                    return task.result()
                try:
                    await asyncio.to_thread(self.check)
                except StoreUnavailable as error:
                    why = str(error)
                    break
        finally:
            task.cancel()
        self._is_stalled = True
        raise OutcomeUnknown(f"the keyed log at {self.url} could not be written yet, and may be later: {why}")

    async def _open_writer(self) -> KeyedLog:
        self.check()
        writer = await KeyedLog.open(self.url, settings=self._settings, owners=self._owners)
        self._file = self._file or writer.file
        _tell(f"this broker is now the writer of the keyed log at {self.url}")
        return writer

    async def _open_reader(self) -> KeyedLogReader:
        self.check()
        reader = await KeyedLogReader.open(self.url, settings=self._settings)
        self._file = self._file or reader.file
        return reader

    async def _after_fence(self, writer: KeyedLog) -> WriterFenced:
        """Closes the fenced writer, and returns the error for whoever met the fence."""
        unknown = "the records may or may not be there"
        if await writer.ownership.is_lost():
            what = f"another process became the owner of the keyed log at {self.url} while this broker was paused"
            error = WriterFenced(f"{what}: {unknown}, and what is sent here from now on goes to it")
        elif not await writer.was_taken_over():
            what = f"a process that was paused opened the keyed log at {self.url} after its lease had ended"
            error = WriterFenced(f"{what}: {unknown}, and this broker goes on as the writer")
        else:
            what = f"another writer has taken over the keyed log at {self.url}: this broker appends no more to it"
            self._metrics.keyed_fenced = 1
            error = self._fenced()
        if self._writer.now is writer:
            _tell(what)
        await self._writer.drop(writer)
        return error

    def _fenced(self) -> WriterFenced:
        return WriterFenced(
            f"another writer has taken over the keyed log at {self.url}: append there, or restart this broker to "
            "take it back"
        )

    def _check_open(self) -> None:
        if self._is_closed:
            raise StoreUnavailable("the broker is stopping: ask another one, or come again")


def _tell(what: str) -> None:
    print(f"llog: {what}", file=sys.stderr, flush=True)
