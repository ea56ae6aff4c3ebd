"""The one thread of a process that writes to a SQLite metadata store: group commit and the session's heartbeat.

All calls that arrive while a transaction runs share the next one and its one fsync. An event loop hands over the calls
of one turn together, and is woken once for all answers of a transaction.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Sequence
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final

import msgspec

from llog.base.durable import OpenedFile
from llog.errors import OutcomeUnknown, StoreUnavailable, VersionMismatch
from llog.stores.counting import OperationCounts
from llog.stores.sqlite.file import (
    BUSY_SECONDS,
    LOCK_SECONDS,
    connect,
    hold_lock,
    lock_timeout,
    open_lock,
    unavailable,
)
from llog.stores.sqlite.transaction import Transaction

GROUP_JOBS_MAX: Final = 1024
GROUP_BYTES_MAX: Final = 16 << 20
KNOWN_VERSIONS_MAX: Final = 20_000
"""Versions of keys that are remembered from one transaction to the next."""

CLOSE_SECONDS_MAX: Final = 5.0


class Job(msgspec.Struct):
    """One call, and the future of its answer."""

    operation: str
    size: int
    started: float
    keys: Sequence[str]
    apply: Callable[..., Any]
    arguments: tuple[Any, ...]
    future: asyncio.Future[Any]
    result: Any = None
    error: Exception | None = None


class Batch:
    """The jobs of one turn of an event loop, which are handed over, timed and answered together."""

    __slots__ = ("deadline", "error", "is_begun", "jobs", "loop", "size")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.jobs: list[Job] = []
        self.size = 0
        self.deadline: asyncio.TimerHandle | None = None
        """The timer of the batch, set when it is handed over."""
        self.is_begun = False
        """Whether a transaction has taken up the batch, and will answer it."""
        self.error: Exception | None = None
        """The reason why all jobs of the batch failed."""

    def deliver(self, counts: OperationCounts) -> None:
        """Answer and count the jobs. After a withdrawn batch was answered, no jobs are left for a second answer."""
        if self.deadline is not None:
            self.deadline.cancel()
        jobs, self.jobs = self.jobs, []
        self._count(jobs, counts)
        for job in jobs:
            if job.future.done():  # its caller was cancelled
                continue
            error = self.error or job.error
            if error is None:
                job.future.set_result(job.result)
            else:
                job.future.set_exception(error)

    def _count(self, jobs: Sequence[Job], counts: OperationCounts) -> None:
        """Count jobs that are not answered yet. A future that is done was cancelled, which counts as a failure."""
        now = time.perf_counter()
        for operation, group in groupby(jobs, attrgetter("operation")):
            same = list(group)
            seconds = len(same) * now - sum([job.started for job in same])
            failures = len(same) if self.error is not None else sum([job.future.done() for job in same])
            counts.add(operation, sum([job.size for job in same]), seconds, calls=len(same), failures=failures)


class Writer:
    """The writing thread of one store in one process."""

    def __init__(self, file: OpenedFile, session_timeout_ms: int, counts: OperationCounts) -> None:
        self.commits = 0
        self.gate = threading.Lock()
        """Held while a transaction runs. The holder may call `disconnect`."""
        self._counts = counts
        self._file = file
        self._path = file.path
        self._timeout_ms = session_timeout_ms
        self._beat_seconds = session_timeout_ms / 3000
        self._beat_at = 0.0
        self._session: int | None = None
        self._connection: sqlite3.Connection | None = None
        self._versions: dict[str, int] = {}
        """Versions of keys that this connection wrote or looked up, valid until another one changes the file."""
        self._data_version = 0
        self._own_revisions = 0, 0
        """All changes of the store from one revision to the other are commits of this thread."""
        self._open_batch: Batch | None = None
        """The batch of the event loop that wrote last, in its present turn."""
        self._queue: SimpleQueue[Batch | None] = SimpleQueue()
        self._unanswered: set[Batch] = set()
        self._group: list[Batch] = []
        self._closed = False
        self._abandoned = False
        self._is_locked_out = False
        """Whether a batch met its deadline while the thread waited for the lock. All jobs fail at once until the thread
        has the lock.
        """
        self._ended = threading.Event()
        self._lock = open_lock(file.path)
        self._thread = threading.Thread(target=self._run, name=f"llog-meta-{file.path.name}", daemon=True)
        self._thread.start()

    def write(
        self, operation: str, keys: Sequence[str], size: int, apply: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> asyncio.Future[Any]:
        """Have the thread call `apply` with a transaction and the arguments, and return the future of its result.

        The future is done once the transaction is durable. `keys` are all keys that `apply` puts or deletes one by one.
        The call is counted as `operation` when it is answered.
        """
        if self._closed:
            raise _closed_error(self._path)
        if self._is_locked_out:
            raise lock_timeout(self._path)
        loop = asyncio.get_running_loop()
        batch = self._open_batch
        if batch is None or batch.loop is not loop:
            batch = self._open_batch = Batch(loop)
            loop.call_soon(self._hand_over, batch)
        future: asyncio.Future[Any] = loop.create_future()
        batch.jobs.append(Job(operation, size, time.perf_counter(), keys, apply, arguments, future))
        batch.size += size
        if len(batch.jobs) >= GROUP_JOBS_MAX or batch.size >= GROUP_BYTES_MAX:
            self._open_batch = None
        return future

    def wrote_all(self, since: int, until: int) -> bool:
        """Return whether all changes of the store between these revisions are known to be this thread's."""
        own_since, own_until = self._own_revisions
        return own_since <= since and until <= own_until

    async def close(self) -> None:
        """Finish the calls that were made before, and end the session. Gives up on a thread that is stuck."""
        if not self._closed:
            self._closed = True
            # Queued behind the batches that this turn of the event loop has yet to hand over.
            asyncio.get_running_loop().call_soon(self._queue.put, None)
        deadline = time.monotonic() + CLOSE_SECONDS_MAX
        pause = 0.0005
        while not self._ended.is_set() and not self._abandoned:
            if time.monotonic() > deadline:
                self._abandon()
            await asyncio.sleep(pause)
            pause = min(pause * 2, 0.02)

    def disconnect(self) -> None:
        """Close the connection, which rolls back an open transaction. Only for the holder of the gate."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
            self._versions.clear()

    def forget(self) -> None:
        """In a forked child: close the inherited descriptor, with which the child would hold the parent's lock."""
        if not self._ended.is_set():
            os.close(self._lock)

    def _hand_over(self, batch: Batch) -> None:
        if self._open_batch is batch:
            self._open_batch = None
        batch.deadline = batch.loop.call_later(LOCK_SECONDS, self._withdraw, batch)
        self._unanswered.add(batch)
        self._queue.put(batch)
        if self._ended.is_set():
            self._fail([batch], _closed_error(self._path))

    def _withdraw(self, batch: Batch) -> None:
        """Fail the batch at its deadline if the thread still waits for the lock.

        While this method holds the gate, no transaction begins.
        """
        if batch.is_begun:
            return
        if not self.gate.acquire(blocking=False):
            batch.deadline = batch.loop.call_later(LOCK_SECONDS, self._withdraw, batch)
            return
        try:
            if not batch.is_begun:
                self._is_locked_out = True
                self._fail([batch], lock_timeout(self._path))
        finally:
            self.gate.release()

    def _abandon(self) -> None:
        # While this method holds the gate, no transaction runs, and none will: no unanswered write has happened.
        is_idle = self.gate.acquire(blocking=False)
        self._abandoned = True
        group = [] if is_idle else list(self._group)
        if is_idle:
            self.gate.release()
        unknown = OutcomeUnknown(
            f"metadata store {self._path} was closed during the commit of this write: read to find out"
        )
        self._fail(group, unknown)
        self._fail(self._unanswered.difference(group), _closed_error(self._path))

    def _run(self) -> None:
        try:
            while self._run_once():
                pass
            if self._session is not None:
                self._transact([], lambda transaction: transaction.end_session())
            with self.gate:
                self.disconnect()
            os.close(self._lock)
        finally:
            # In this order: a batch that is queued later finds that the thread has ended.
            self._ended.set()
            self._fail([batch for batch in self._unanswered.copy() if batch.error is None], _closed_error(self._path))

    def _run_once(self) -> bool:
        """Run one group, or one heartbeat, and return whether the thread goes on."""
        try:
            wait = None if self._session is None else max(0.0, self._beat_at - time.monotonic())
            batch = self._queue.get(timeout=wait)
        except Empty:
            self._transact([], lambda transaction: transaction.renew())
            return not self._abandoned
        group: list[Batch] = []
        jobs = size = 0
        while batch is not None:
            group.append(batch)
            jobs += len(batch.jobs)
            size += batch.size
            if jobs >= GROUP_JOBS_MAX or size >= GROUP_BYTES_MAX or self._queue.empty():
                break
            batch = self._queue.get()
        if group:
            is_heartbeat_due = self._session is not None and time.monotonic() >= self._beat_at
            self._transact(group, (lambda transaction: transaction.renew()) if is_heartbeat_due else None)
            self._answer(group)
        return batch is not None and not self._abandoned

    def _transact(self, group: list[Batch], first: Callable[[Transaction], None] | None) -> None:
        error: Exception
        try:
            with hold_lock(self._lock), self.gate:
                self._group = group
                self._apply(group, first)
                return
        except (StoreUnavailable, OutcomeUnknown) as raised:
            error = raised
        except (sqlite3.Error, OSError) as raised:
            error = unavailable(self._path, raised)
        except Exception as raised:  # a defect of llog must reach the callers, not end the thread
            error = raised
        finally:
            self._group = []
        self._beat_at = time.monotonic() + self._beat_seconds / 4
        for batch in group:
            batch.error = error

    def _apply(self, group: list[Batch], first: Callable[[Transaction], None] | None) -> None:
        if self._abandoned:
            raise _closed_error(self._path)
        self._is_locked_out = False
        group = [batch for batch in group if batch.error is None]
        for batch in group:
            batch.is_begun = True
        jobs = [job for batch in group for job in batch.jobs]
        if self._connection is None:
            self._file.check()
            self._connection = connect(self._path, BUSY_SECONDS)
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            self._forget_old_versions(self._connection)
            keys = [job.keys for job in jobs]
            transaction = Transaction(self._connection, self._session, self._timeout_ms, keys, self._versions)
            if first is not None:
                first(transaction)
            for job in jobs:
                try:
                    job.result = job.apply(transaction, *job.arguments)
                except VersionMismatch as error:
                    job.error = error
            transaction.finish()
            self._file.check()
            try:
                self._connection.execute("COMMIT")
            except sqlite3.Error as error:
                raise OutcomeUnknown(
                    f"metadata store {self._path}: the commit failed ({error}), and the write may have "
                    "happened: read to find out"
                ) from error
        except BaseException:
            # Closing rolls back the transaction, and a new connection keeps no trace of the failure.
            self.disconnect()
            raise
        self.commits += transaction.has_changes
        before, after = transaction.revisions
        since, until = self._own_revisions
        self._own_revisions = (since if before == until else before), after
        if transaction.is_renewed or transaction.session != self._session:
            self._beat_at = time.monotonic() + self._beat_seconds
        self._session = transaction.session

    def _forget_old_versions(self, connection: sqlite3.Connection) -> None:
        (data_version,) = connection.execute("PRAGMA data_version").fetchone()
        if data_version != self._data_version or len(self._versions) > KNOWN_VERSIONS_MAX:
            self._versions.clear()
            self._data_version = data_version

    def _fail(self, batches: Collection[Batch], error: Exception) -> None:
        for batch in batches:
            batch.error = error
        self._answer(batches)

    def _answer(self, batches: Collection[Batch]) -> None:
        """Wake every event loop once, for all of its batches."""
        loops: dict[asyncio.AbstractEventLoop, list[Batch]] = {}
        for batch in batches:
            self._unanswered.discard(batch)
            loops.setdefault(batch.loop, []).append(batch)
        for loop, answered in loops.items():
            try:
                loop.call_soon_threadsafe(_deliver, answered, self._counts)
            except RuntimeError:  # the loop was closed, and with it every caller that waited
                continue


def _deliver(batches: list[Batch], counts: OperationCounts) -> None:
    for batch in batches:
        batch.deliver(counts)


def _closed_error(path: Path) -> StoreUnavailable:
    return StoreUnavailable(f"metadata store {path} is closed: open another one")
