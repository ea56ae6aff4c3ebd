"""Worker processes, as the process that starts them sees them.

Workers are forked from one zygote, a program of its own: what the starter has open (RocksDB, SQLite, clients of object
stores) would not survive a fork. The zygote runs while it has holders. However the starter ends, its sockets are
closed, which ends the zygote and the workers.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar, cast

from llog.base.units import format_size
from llog.errors import SqlMemoryExceeded, SqlWorkerEnded
from llog.sql.workers import framing, jobs
from llog.sql.workers.worker import CallOnce

R = TypeVar("R")

_END_S: Final = 0.5
_ENVIRONMENT: Final = {
    # Arrow's own pool reserves address space, which the memory limit would count
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",  # threads do not survive a fork
    "PYTHONSAFEPATH": "1",
}


class _Zygote:
    """The zygote, which starts on demand, ends with its last holder, and is started again if it has died."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._holders = 0
        self._running: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def hold(self) -> None:
        with self._mutex:
            self._holders += 1

    def warm_up(self) -> None:
        """Begin to start the zygote, so that the first worker need not wait for libraries. The caller holds it."""
        with self._mutex:
            if self._socket is None:
                self._start()

    def release(self) -> None:
        with self._mutex:
            self._holders -= 1
            if not self._holders:
                self._end()

    def fork(self, sockets: Sequence[socket.socket]) -> None:
        """Fork a worker with these sockets, the first of which is its leash. The caller holds the zygote."""
        self.warm_up()
        with self._mutex:
            try:
                self._send(sockets)
            except OSError:  # the zygote was killed
                self._end()
                self._start()
                self._send(sockets)

    def disown(self) -> None:
        """Close the child's copies after a fork of this process: the zygote belongs to the parent."""
        if self._socket is not None:
            self._socket.close()
        self.__init__()  # type: ignore[misc]

    def _send(self, sockets: Sequence[socket.socket]) -> None:
        assert self._socket is not None  # the caller holds the zygote
        socket.send_fds(self._socket, [b"+"], [each.fileno() for each in sockets])

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._running = subprocess.Popen(
                [sys.executable, "-m", "llog.sql.workers.zygote", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=os.environ | _ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(sys.path)},
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # signals from the terminal are for the starter
            )
        self._socket = ours

    def _end(self) -> None:
        """End the zygote, which first kills its workers, unless it is still starting and has none."""
        if self._socket is not None and self._running is not None:
            self._socket.close()
            try:
                self._running.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._running.kill()
                self._running.wait()
        self._socket = self._running = None


zygote: Final = _Zygote()


class WorkerProcess:
    """A worker process and its task. The constructor does not wait until the worker runs.

    A lane is a socket that carries one request at a time; `control` carries the task, and messages that need no answer.
    """

    def __init__(self, task: Any, lanes: int = 0) -> None:
        pairs = [socket.socketpair() for _ in range(lanes + 2)]
        (self._leash, self.control, *self.lanes), theirs = zip(*pairs, strict=True)
        self._mutex = threading.Lock()
        self._ended = False
        zygote.hold()
        _living.add(self)
        try:
            zygote.fork(theirs)
            framing.send(self.control, task)
        except BaseException:
            self.kill()
            raise
        finally:
            for each in theirs:
                each.close()

    @property
    def has_ended(self) -> bool:
        """Whether the worker was killed or has died."""
        with self._mutex:
            if self._ended:
                return True
            try:
                return not self.control.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
            except OSError:
                return True

    def has_aborted(self) -> bool:
        """Whether the worker, which has ended, did so by SIGABRT, as Python does when it cannot raise a MemoryError."""
        with self._mutex, suppress(OSError):
            if not self._ended:
                self._leash.shutdown(socket.SHUT_WR)
                return bool(self._leash.recv(1) == bytes([signal.SIGABRT]))
        return False

    def kill(self) -> None:
        """Kill the worker. Idempotent. Threads that wait for an answer find the sockets closed at once."""
        with self._mutex:
            if self._ended:
                return
            self._ended = True
        for each in (self.control, *self.lanes):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._leash.close()
        zygote.release()

    def close(self) -> None:
        """Kill the worker and close the sockets, which nobody may use any more."""
        self.kill()
        self.close_sockets()

    def close_sockets(self) -> None:
        """Close this process's ends. A forked child does so, since the worker belongs to the parent."""
        for each in (self._leash, self.control, *self.lanes):
            each.close()


_living: weakref.WeakSet[WorkerProcess] = weakref.WeakSet()


def _disown_workers() -> None:
    for process in list(_living):
        process.close_sockets()
    zygote.disown()


os.register_at_fork(after_in_child=_disown_workers)


class _PendingCall:
    def __init__(self, process: WorkerProcess) -> None:
        self._process = process

    def interrupt(self) -> None:
        self._process.kill()

    kill = interrupt


def call_in_worker(function: Callable[..., R], *args: Any, memory_max_bytes: int) -> R:
    """Call a function of a module in a worker of its own. Returns its result, or raises the `LlogError` it raises.

    Raises `SqlMemoryExceeded` if the function needs more than `memory_max_bytes`, and `JobStopped` if the job of this
    thread was stopped.
    """
    jobs.check()
    process = WorkerProcess(CallOnce(function, args, memory_max_bytes))
    try:
        with jobs.waiting_for(_PendingCall(process)):
            has_failed, result = framing.receive(process.control)[0]
    except (EOFError, OSError):
        if not process.has_aborted():
            raise SqlWorkerEnded(
                "the process that parses the statement has ended",
                hint="try again, or set LLOG_SQL_MEMORY_MAX_BYTES higher",
            ) from None
        has_failed, result = True, MemoryError()
    finally:
        process.close()
    if isinstance(result, MemoryError):
        raise SqlMemoryExceeded(
            f"parsing the statement needs more than {format_size(memory_max_bytes)} of memory",
            hint="send rows as parameters, or set LLOG_SQL_MEMORY_MAX_BYTES higher",
        )
    if has_failed:
        raise result
    return cast(R, result)
