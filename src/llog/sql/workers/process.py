"""Worker processes, as their starter has them.

They are forked from one zygote, which is a program of its own: what the starter has open (RocksDB, SQLite, clients of
object stores) does not survive a fork. It is there while somebody holds it. However the starter ends, its sockets are
closed, and so the processes end.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

from llog.sql.workers import framing

_END_S: Final = 0.5
_ENVIRONMENT: Final = {
    # Arrow's own pool takes address space in advance, which the limit would count
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",  # a thread would not survive the forks
    "PYTHONSAFEPATH": "1",
}


class _Zygote:
    """Started when it is needed, or may be soon, and ended by its last holder; started again if it has died."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._holders = 0
        self._running: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def hold(self) -> None:
        with self._mutex:
            self._holders += 1

    def warm_up(self) -> None:
        """Begins to start it, so that the first worker does not wait for libraries. The caller holds it."""
        with self._mutex:
            if self._socket is None:
                self._start()

    def let_go(self) -> None:
        with self._mutex:
            self._holders -= 1
            if not self._holders:
                self._end()

    def fork(self, sockets: Sequence[socket.socket]) -> None:
        """A worker with these sockets, of which the first is its leash. The caller holds the zygote."""
        self.warm_up()
        with self._mutex:
            try:
                self._send(sockets)
            except OSError:  # it was killed
                self._end()
                self._start()
                self._send(sockets)

    def forget(self) -> None:
        """In a forked child: it is the parent's."""
        if self._socket is not None:
            self._socket.close()
        self.__init__()  # type: ignore[misc]

    def _send(self, sockets: Sequence[socket.socket]) -> None:
        assert self._socket is not None  # it is held
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
                start_new_session=True,  # a signal of the terminal is for the starter
            )
        self._socket = ours

    def _end(self) -> None:
        """It ends its workers first, unless it is still being started and has none."""
        if self._socket is not None and self._running is not None:
            self._socket.close()
            try:
                self._running.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._running.kill()
                self._running.wait()
        self._socket = self._running = None


zygote: Final = _Zygote()


class Process:
    """A worker process with its task. The constructor does not wait until the worker runs."""

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
        """Whether it was killed, or has died."""
        with self._mutex:
            if self._ended:
                return True
            try:
                return not self.control.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
            except OSError:
                return True

    def kill(self) -> None:
        """Idempotent. Whoever waits for an answer finds the sockets closed at once."""
        with self._mutex:
            if self._ended:
                return
            self._ended = True
        for each in (self.control, *self.lanes):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._leash.close()
        zygote.let_go()

    def close(self) -> None:
        """Kills it, and closes the sockets, which nobody may use any more."""
        self.kill()
        self.forget()

    def forget(self) -> None:
        """In a forked child: it is the parent's."""
        for each in (self._leash, self.control, *self.lanes):
            each.close()


_living: weakref.WeakSet[Process] = weakref.WeakSet()


def _forget() -> None:
    for process in list(_living):
        process.forget()
    zygote.forget()


os.register_at_fork(after_in_child=_forget)
