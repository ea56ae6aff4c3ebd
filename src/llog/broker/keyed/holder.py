"""The keyed log that a broker holds: its writer from the first append on, a reader from the first read that needs one.

A keyed log has one writer at a time, its owner, and other brokers send appends on to it. A broker that was paused for
longer than its session may find that another one has become the owner, and then sends appends on as well. A broker that
was paused while it opened the log fences the new owner by opening it, and the owner takes the log back. A broker that
was fenced by a writer that ignored the lease appends no more until it is restarted: two such writers would only fence
each other in turns. Its reads continue.
"""

from __future__ import annotations

import asyncio
import logging
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

logger: Final = logging.getLogger("llog.broker")

CLOSE_LIMIT_S: Final = 10.0
"""SlateDB tries for ever to reach a bucket; a broker that stops must end."""
WRITE_CHECKS_MAX: Final = 30
WRITE_CHECK_S: Final = 1.0
"""How often a slow write checks its store, and how many times before it gives up."""
_CANCELS_MAX: Final = 3
_CANCEL_S: Final = 1.0


class _SharedOpening(Generic[L]):
    """A log that the first caller opens. Callers that come meanwhile share the attempt; after a failure the next one
    tries again.
    """

    def __init__(self, opening: Callable[[], Coroutine[Any, Any, L]]) -> None:
        self._open = opening
        self._task: asyncio.Task[L] | None = None

    @property
    def now(self) -> L | None:
        """The log if it is open, else None."""
        task = self._task
        return task.result() if task is not None and _has_succeeded(task) else None

    async def get(self) -> L:
        if self._task is None:
            self._task = asyncio.create_task(self._open())
        task = self._task
        try:
            return await asyncio.shield(task)
        finally:
            if task.done() and not _has_succeeded(task) and self._task is task:
                self._task = None

    async def drop(self, log: KeyedLogReader) -> None:
        """Close the log, and let the next caller open it again."""
        if self.now is log:
            self._task = None
            with suppress(LlogError):
                await log.close()

    async def close(self) -> None:
        """Close the log. Raises `WriterFenced` if appends that no caller waited for are lost."""
        task, self._task = self._task, None
        if task is not None:
            await asyncio.wait([task])
            if _has_succeeded(task):
                await task.result().close()


def _has_succeeded(task: asyncio.Task[L]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


class HeldLog:
    """The writer and the reader of one keyed log. Made on the event loop that it is used on."""

    def __init__(self, url: str, settings: Settings, metrics: Metrics, owners: Owners | None = None) -> None:
        self.url = url
        self._owners = owners
        self._settings = settings
        self._metrics = metrics
        self._writer = _SharedOpening(self._open_writer)
        self._reader = _SharedOpening(self._open_reader)
        self._file: OpenedFile | None = None
        """The directory of a log in local files, since it was first opened: the path may later lead to another one."""
        self._is_stalled = False
        """Whether a write was given up: the next one checks the store first instead of waiting as well."""
        self._is_closed = False

    async def write(self, use: Callable[[KeyedLog], Coroutine[Any, Any, T]]) -> T:
        """Return the result of `use` on the writer. Raises `LogOwned` if another process owns the log.

        Raises `WriterFenced` from then on once a writer that ignored the lease has taken over.
        """
        self._check_open()
        if self._metrics.keyed_fenced:
            raise self._fenced_error()
        if self._is_stalled:
            await asyncio.to_thread(self.check)
            self._is_stalled = False
        writer = await self._writer.get()
        if writer.ownership.is_known_lost:
            await self._writer.drop(writer)
            writer = await self._writer.get()
        try:
            return await self._write_in_time(use(writer))
        except WriterFenced as error:
            raise await self._after_fence(writer) from error
        except StoreUnavailable as error:
            await self._writer.drop(writer)  # a writer cannot be used after a failure
            if self._metrics.keyed_fenced:  # another request found out, and closed the writer
                raise self._fenced_error() from error
            raise

    async def read(self, use: Callable[[KeyedLogReader], Awaitable[T]]) -> T:
        """Return the result of `use` on the writer, which sees its own appends at once, or else on the reader."""
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
                pass  # another writer may have taken over unnoticed; the reader will see its records
        reader = await self._reader.get()
        try:
            return await use(reader)
        except StoreUnavailable:
            await self._reader.drop(reader)
            raise

    async def reader(self) -> KeyedLogReader:
        """Return the reader, for long reads: it sees the appends of every writer, this one and later ones."""
        self._check_open()
        return await self._reader.get()

    async def drop_reader(self, reader: KeyedLogReader) -> None:
        """Close a reader that failed: the next caller gets another."""
        await self._reader.drop(reader)

    def check(self) -> None:
        """Raise `StoreUnavailable` if the log was opened, and its directory is gone, full or read-only."""
        if self._file is not None:
            self._file.check()
            check_writable(self._file.path)

    async def close(self) -> None:
        """Make everything durable and close. If the store is out of reach, unacknowledged appends may be lost."""
        self._is_closed = True
        closing = [asyncio.create_task(opened.close()) for opened in (self._reader, self._writer)]
        _, late = await asyncio.wait(closing, timeout=CLOSE_LIMIT_S)
        for _ in range(_CANCELS_MAX):  # a cancel ends one wait, and closing has several
            for task in late:
                task.cancel()
            if late:
                _, late = await asyncio.wait(late, timeout=_CANCEL_S)
        for task in closing:
            if not task.done() or task.cancelled():
                _report(f"the keyed log at {self.url} was not closed within {CLOSE_LIMIT_S:.0f} s: is it out of reach?")
            elif isinstance(error := task.exception(), LlogError):
                _report(f"the keyed log at {self.url} was not closed cleanly: {error}")

    async def _write_in_time(self, write: Coroutine[Any, Any, T]) -> T:
        """Return the result of a write, or give it up in time: SlateDB writes to a full or lost store for ever.

        A write that is given up raises `OutcomeUnknown`, since SlateDB goes on trying.
        """
        task = asyncio.create_task(write)
        why = f"no answer within {WRITE_CHECKS_MAX * WRITE_CHECK_S:.0f} seconds"
        try:
            for _ in range(WRITE_CHECKS_MAX):
                await asyncio.wait([task], timeout=WRITE_CHECK_S)
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
        _report(f"this broker is now the writer of the keyed log at {self.url}")
        return writer

    async def _open_reader(self) -> KeyedLogReader:
        self.check()
        reader = await KeyedLogReader.open(self.url, settings=self._settings)
        self._file = self._file or reader.file
        return reader

    async def _after_fence(self, writer: KeyedLog) -> WriterFenced:
        """Close the fenced writer, and return the error for the caller that met the fence."""
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
            error = self._fenced_error()
        if self._writer.now is writer:
            _report(what)
        await self._writer.drop(writer)
        return error

    def _fenced_error(self) -> WriterFenced:
        return WriterFenced(
            f"another writer has taken over the keyed log at {self.url}: append there, or restart this broker to "
            "take it back"
        )

    def _check_open(self) -> None:
        if self._is_closed:
            raise StoreUnavailable("the broker is stopping: ask another one, or come again")


def _report(what: str) -> None:
    logger.warning("%s", what)
