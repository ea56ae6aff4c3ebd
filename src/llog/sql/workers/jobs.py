"""Work on a thread that another thread can stop, although all it does is wait for a worker."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Call(Protocol):
    """A call of a worker that it has not answered."""

    def interrupt(self) -> None:
        """Asks the worker to end the call soon."""

    def kill(self) -> None:
        """Ends the worker, and so the call, whatever it does."""


class JobStopped(Exception):
    """The job was stopped before it asked a worker."""


class Job:
    """One piece of work. `begun` is entered by the thread that does it; any other may `stop` it, again and again."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._call: Call | None = None
        self._is_ending = False
        self._stopped = False

    @contextmanager
    def begun(self) -> Iterator[None]:
        _local.job = self
        try:
            yield
        finally:
            _local.job = None

    def check(self) -> None:
        if self._stopped:
            raise JobStopped("the statement was cancelled")

    @contextmanager
    def waiting(self, call: Call, ending: bool) -> Iterator[None]:
        with self._mutex:
            if not ending:
                self.check()
            self._call, self._is_ending = call, ending
        try:
            yield
        finally:
            with self._mutex:
                self._call = None

    def stop(self, *, kill: bool) -> None:
        """Interrupts the call that the job waits for, or kills its worker. No other call is begun.

        Calls that end something, such as a transaction, are begun all the same, and not interrupted.
        """
        with self._mutex:
            self._stopped = True
            if self._call is None:
                return
            if kill:
                self._call.kill()
            elif not self._is_ending:
                self._call.interrupt()


_local = threading.local()


def check() -> None:
    """`JobStopped` if the job of this thread was stopped."""
    job: Job | None = getattr(_local, "job", None)
    if job is not None:
        job.check()


@contextmanager
def waiting(call: Call, *, ending: bool = False) -> Iterator[None]:
    """Wraps the wait for a worker, so that the job of this thread, if any, can be stopped meanwhile.

    `JobStopped` if the job was stopped before.
    """
    job: Job | None = getattr(_local, "job", None)
    if job is None:
        yield
        return
    with job.waiting(call, ending):
        yield
