"""The one thread of a process that writes to a SQLite metadata store: group commit and the session's heartbeat.

Whatever was asked for while a transaction ran shares the next one, and its one fsync. Statements take many rows each:
every step of a statement gives up the interpreter lock, which a busy event loop returns late.
"""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final

from llog.durable import OpenedFile
from llog.errors import OutcomeUnknown, StoreUnavailable, VersionMismatch
from llog.stores.meta import ABSENT, mismatch
from llog.stores.sqlite_file import (
    BUSY_SECONDS,
    LOCK_SECONDS,
    connect,
    lock_timeout,
    locked,
    open_lock,
    unavailable,
)

GROUP_JOBS_MAX: Final = 1024
GROUP_BYTES_MAX: Final = 16 << 20
ROWS_MAX: Final = 256
"""Rows per statement."""

CLOSE_SECONDS_MAX: Final = 5.0


class Transaction:
    """What a group of jobs does, applied in order to a picture of its keys, and written at the end."""

    def __init__(self, connection: sqlite3.Connection, session: int | None, timeout_ms: int, keys: list[str]) -> None:
        self.session = session
        self.changed = False
        self._connection = connection
        self._timeout_ms = timeout_ms
        self.renewed = False
        (self._revision,) = connection.execute("SELECT revision FROM state").fetchone()
        self._now_ms = time.time_ns() // 1_000_000
        self._purge()
        self._keys = keys
        self._versions = self._load()
        self._writes: dict[str, tuple[bytes, int, int | None] | None] = {}

    def put(self, key: str, value: bytes, expected: int | None, *, ephemeral: bool = False) -> int:
        self._match(key, expected)
        session = self._own_session() if ephemeral else None
        version = self._next()
        self._versions[key] = version
        self._writes[key] = (value, version, session)
        return version

    def delete(self, key: str, expected: int | None) -> bool:
        if key not in self._versions:
            return False
        self._match(key, expected)
        self._next()
        del self._versions[key]
        self._writes[key] = None
        return True

    def delete_range(self, start: str, end: str) -> None:
        self._flush()
        if self._connection.execute("DELETE FROM entries WHERE key >= ? AND key < ?", (start, end)).rowcount:
            self._next()
            self._versions = self._load()

    def renew(self) -> None:
        """Keeps the session alive. One that has ended stays ended: others may have seen its keys gone."""
        if self.session is not None and not self.renewed:
            cursor = self._connection.execute(
                "UPDATE sessions SET expires_ms = ? WHERE id = ?", (self._now_ms + self._timeout_ms, self.session)
            )
            self.renewed = cursor.rowcount == 1
            if self.renewed:
                self.changed = True
            else:
                self.session = None

    def end_session(self) -> None:
        self._flush()
        self._connection.execute("DELETE FROM entries WHERE session = ?", (self.session,))
        self._connection.execute("DELETE FROM sessions WHERE id = ?", (self.session,))
        self._next()
        self.session = None

    def finish(self) -> None:
        self._flush()
        if self.changed:
            self._connection.execute("UPDATE state SET revision = ?", (self._revision,))

    def _next(self) -> int:
        self.changed = True
        self._revision += 1
        return int(self._revision)

    def _match(self, key: str, expected: int | None) -> None:
        if expected is not None:
            found = self._versions.get(key, ABSENT)
            if found != expected:
                raise mismatch(key, expected, found)

    def _own_session(self) -> int:
        self.renew()
        if self.session is None:
            self.session = self._next()
            self.renewed = True
            self._connection.execute(
                "INSERT INTO sessions VALUES (?, ?)", (self.session, self._now_ms + self._timeout_ms)
            )
        return self.session

    def _purge(self) -> None:
        ended = self._connection.execute("SELECT id FROM sessions WHERE expires_ms <= ?", (self._now_ms,)).fetchall()
        for row in ended:
            self._connection.execute("DELETE FROM entries WHERE session = ?", row)
            self._connection.execute("DELETE FROM sessions WHERE id = ?", row)
            self._next()

    def _load(self) -> dict[str, int]:
        versions: dict[str, int] = {}
        for at in range(0, len(self._keys), ROWS_MAX):
            keys = self._keys[at : at + ROWS_MAX]
            marks = ",".join("?" * len(keys))
            (found,) = self._connection.execute(
                f"SELECT json_group_array(json_array(key, version)) FROM entries WHERE key IN ({marks})", keys
            ).fetchone()
            versions.update(json.loads(found))
        return versions

    def _flush(self) -> None:
        gone = [key for key, write in self._writes.items() if write is None]
        rows = [(key, *write) for key, write in self._writes.items() if write is not None]
        for at in range(0, len(gone), ROWS_MAX):
            keys = gone[at : at + ROWS_MAX]
            self._connection.execute(f"DELETE FROM entries WHERE key IN ({','.join('?' * len(keys))})", keys)
        for at in range(0, len(rows), ROWS_MAX):
            values = [each for row in rows[at : at + ROWS_MAX] for each in row]
            marks = ",".join(["(?,?,?,?)"] * (len(values) // 4))
            self._connection.execute(f"INSERT OR REPLACE INTO entries VALUES {marks}", values)
        self._writes.clear()


class Job:
    """One call, and where its answer goes."""

    __slots__ = ("apply", "error", "future", "is_begun", "keys", "loop", "result", "size")

    def __init__(self, apply: Callable[[Transaction], Any], keys: Sequence[str], size: int) -> None:
        self.apply = apply
        self.keys = keys
        self.size = size
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self.loop.create_future()
        self.is_begun = False
        """A transaction has taken it up, and will answer it."""
        self.result: Any = None
        self.error: Exception | None = None


class Writer:
    """Belongs to the process that made it."""

    def __init__(self, file: OpenedFile, session_timeout_ms: int) -> None:
        self.commits = 0
        self.gate = threading.Lock()
        """Held while a transaction runs. Whoever holds it may call `disconnect`."""
        self._file = file
        self._path = file.path
        self._timeout_ms = session_timeout_ms
        self._beat_seconds = session_timeout_ms / 3000
        self._beat_at = 0.0
        self._session: int | None = None
        self._connection: sqlite3.Connection | None = None
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        self._unanswered: set[Job] = set()
        self._group: list[Job] = []
        self._closed = False
        self._abandoned = False
        self._is_locked_out = False
        """A job has met its deadline while the thread waited for the lock: until the thread has it, all jobs fail at once."""
        self._ended = threading.Event()
        self._lock = open_lock(file.path)
        self._thread = threading.Thread(target=self._run, name=f"llog-meta-{file.path.name}", daemon=True)
        self._thread.start()

    async def write(self, apply: Callable[[Transaction], Any], keys: Sequence[str], size: int) -> Any:
        """What `apply` returned, once it is durable. `keys`: all that it puts or deletes one by one."""
        job = Job(apply, keys, size)
        if self._closed:
            raise _closed(self._path)
        if self._is_locked_out:
            raise lock_timeout(self._path)
        self._unanswered.add(job)
        self._queue.put(job)
        if self._ended.is_set():
            raise _closed(self._path)
        deadline = job.loop.call_later(LOCK_SECONDS, self._withdraw, job)
        try:
            return await job.future
        finally:
            deadline.cancel()

    async def close(self) -> None:
        """Finishes what was asked for before, ends the session. Gives up on a thread that is stuck."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
        give_up = time.monotonic() + CLOSE_SECONDS_MAX
        pause = 0.0005
        while not self._ended.is_set() and not self._abandoned:
            if time.monotonic() > give_up:
                self._abandon()
            await asyncio.sleep(pause)
            pause = min(pause * 2, 0.02)

    def disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def forget(self) -> None:
        """In a forked child: closes the inherited descriptor, with which it would hold the parent's lock."""
        if not self._ended.is_set():
            os.close(self._lock)

    def _withdraw(self, job: Job) -> None:
        """At a job's deadline: fails the job if the thread still waits for the lock. With the gate in our hands no transaction begins."""
        if job.is_begun:
            return
        if not self.gate.acquire(blocking=False):
            job.loop.call_later(LOCK_SECONDS, self._withdraw, job)
            return
        try:
            if not job.is_begun:
                self._is_locked_out = True
                job.error = lock_timeout(self._path)
                self._answer([job])
        finally:
            self.gate.release()

    def _abandon(self) -> None:
        # With the gate in our hands no transaction runs, and none will: nothing that is unanswered has happened.
        idle = self.gate.acquire(blocking=False)
        self._abandoned = True
        group = [] if idle else list(self._group)
        if idle:
            self.gate.release()
        for job in group:
            job.error = OutcomeUnknown(f"metadata store {self._path} was closed while this write was being committed")
        rest = self._unanswered.difference(group)
        for job in rest:
            job.error = _closed(self._path)
        self._answer([*group, *rest])

    def _run(self) -> None:
        try:
            while self._turn():
                pass
            if self._session is not None:
                self._transact([], lambda transaction: transaction.end_session())
            with self.gate:
                self.disconnect()
            os.close(self._lock)
        finally:
            # In this order: a job that is queued later sees that nobody is here any more.
            self._ended.set()
            late = [job for job in self._unanswered.copy() if job.error is None]
            for job in late:
                job.error = _closed(self._path)
            self._answer(late)

    def _turn(self) -> bool:
        """One group, or one heartbeat; False when closed."""
        try:
            wait = None if self._session is None else max(0.0, self._beat_at - time.monotonic())
            job = self._queue.get(timeout=wait)
        except Empty:
            self._transact([], lambda transaction: transaction.renew())
            return not self._abandoned
        group: list[Job] = []
        size = 0
        while job is not None:
            group.append(job)
            size += job.size
            if len(group) >= GROUP_JOBS_MAX or size >= GROUP_BYTES_MAX or self._queue.empty():
                break
            job = self._queue.get()
        if group:
            beat = self._session is not None and time.monotonic() >= self._beat_at
            self._transact(group, (lambda transaction: transaction.renew()) if beat else None)
            self._answer(group)
        return job is not None and not self._abandoned

    def _transact(self, group: list[Job], first: Callable[[Transaction], None] | None) -> None:
        error: Exception
        try:
            with locked(self._lock), self.gate:
                self._group = group
                self._apply(group, first)
                return
        except (StoreUnavailable, OutcomeUnknown) as raised:
            error = raised
        except (sqlite3.Error, OSError) as raised:
            error = unavailable(self._path, raised)
        except Exception as raised:  # a defect of ours must reach the callers, not end the thread
            error = raised
        finally:
            self._group = []
        self._beat_at = time.monotonic() + self._beat_seconds / 4
        for job in group:
            job.error = error

    def _apply(self, group: list[Job], first: Callable[[Transaction], None] | None) -> None:
        if self._abandoned:
            raise _closed(self._path)
        self._is_locked_out = False
        group = [job for job in group if job.error is None]
        for job in group:
            job.is_begun = True
        if self._connection is None:
            self._file.check()
            self._connection = connect(self._path, BUSY_SECONDS)
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            keys = list({key: None for job in group for key in job.keys})
            transaction = Transaction(self._connection, self._session, self._timeout_ms, keys)
            if first is not None:
                first(transaction)
            for job in group:
                try:
                    job.result = job.apply(transaction)
                except VersionMismatch as error:
                    job.error = error
            transaction.finish()
            self._file.check()
            try:
                self._connection.execute("COMMIT")
            except sqlite3.Error as error:
                raise OutcomeUnknown(
                    f"metadata store {self._path}: the commit failed ({error}); the write may have happened: read to find out"
                ) from error
        except BaseException:
            # Closing rolls back what is open; a new connection has no trace of what went wrong.
            self.disconnect()
            raise
        self.commits += transaction.changed
        if transaction.renewed or transaction.session != self._session:
            self._beat_at = time.monotonic() + self._beat_seconds
        self._session = transaction.session

    def _answer(self, jobs: list[Job]) -> None:
        """Wakes every event loop once, for all of its jobs."""
        loops: dict[asyncio.AbstractEventLoop, list[Job]] = {}
        for job in jobs:
            self._unanswered.discard(job)
            loops.setdefault(job.loop, []).append(job)
        for loop, answered in loops.items():
            try:
                loop.call_soon_threadsafe(_deliver, answered)
            except RuntimeError:  # the loop was closed: nobody waits any more
                continue


def _deliver(jobs: list[Job]) -> None:
    for job in jobs:
        if job.future.done():
            continue
        if job.error is not None:
            job.future.set_exception(job.error)
        else:
            job.future.set_result(job.result)


def _closed(path: Path) -> StoreUnavailable:
    return StoreUnavailable(f"metadata store {path} is closed: open another one")
