"""Jobs: work on a thread that waits for a worker, and that another thread can stop meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Call(Protocol):
    """A call that the worker has not answered yet."""

    def interrupt(self) -> None:
        """Ask the worker to end the call soon."""

    def kill(self) -> None:
        """Kill the worker, which ends the call."""


class JobStopped(Exception):
    """The job was stopped before it called a worker."""


class Job:
    """One piece of work. Its thread enters `on_this_thread`; any other thread may call `stop`, repeatedly."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._call: Call | None = None
        self._must_finish = False
        self._stopped = False

    @contextmanager
    def on_this_thread(self) -> Iterator[None]:
        """Make this the job of the calling thread for the duration of the block."""
        _local.job = self
        try:
            yield
        finally:
            _local.job = None

    def check(self) -> None:
        if self._stopped:
            raise JobStopped("the statement was cancelled")

    @contextmanager
    def waiting_for(self, call: Call, must_finish: bool) -> Iterator[None]:
        with self._mutex:
            if not must_finish:
                self.check()
            self._call, self._must_finish = call, must_finish
        try:
            yield
        finally:
            with self._mutex:
                self._call = None

    def stop(self, *, kill: bool) -> None:
        """Interrupt the call that the job waits for, or kill its worker, and begin no other call.

        Calls that `must_finish`, such as those that end a transaction, still begin and are not interrupted.
        """
        with self._mutex:
            self._stopped = True
            if self._call is None:
                return
            if kill:
                self._call.kill()
            elif not self._must_finish:
                self._call.interrupt()


_local = threading.local()


def check() -> None:
    """Raise `JobStopped` if the job of this thread was stopped."""
    job: Job | None = getattr(_local, "job", None)
    if job is not None:
        job.check()


@contextmanager
def waiting_for(call: Call, *, must_finish: bool = False) -> Iterator[None]:
    """Wrap the wait for a worker's answer, so that the job of this thread, if it has one, can be stopped meanwhile.

    Raises `JobStopped` if the job was stopped before, unless the call `must_finish`.
    """
    job: Job | None = getattr(_local, "job", None)
    if job is None:
        yield
        return
    with job.waiting_for(call, must_finish):
        yield
