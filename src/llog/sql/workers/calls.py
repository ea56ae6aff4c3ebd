"""Functions that are called in a worker of their own, which is killed when the caller goes away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from llog.errors import SqlMemoryExceeded, SqlWorkerEnded
from llog.sql.workers import framing, jobs
from llog.sql.workers.process import Process
from llog.sql.workers.serving import CallOnce

R = TypeVar("R")


class _Call:
    def __init__(self, process: Process) -> None:
        self._process = process

    def interrupt(self) -> None:
        self._process.kill()

    kill = interrupt


def call_apart(function: Callable[..., R], *args: Any, memory_max_bytes: int) -> R:
    """What the function gives or raises. `SqlMemoryExceeded` if it needs more memory than that, `JobStopped` if it was
    stopped.
    """
    jobs.check()
    process = Process(CallOnce(function, args, memory_max_bytes))
    try:
        with jobs.waiting(_Call(process)):
            failed, given = framing.receive(process.control)[0]
    except (EOFError, OSError):
        raise SqlWorkerEnded(
            "the process that reads the statement has ended", hint="try again, or set LLOG_SQL_MEMORY_MAX_BYTES higher"
        ) from None
    finally:
        process.close()
    if isinstance(given, MemoryError):
        raise SqlMemoryExceeded(
            "the statement needs more memory to be read than it may have",
            hint="send rows as parameters, or set LLOG_SQL_MEMORY_MAX_BYTES higher",
        )
    if failed:
        raise given
    return cast(R, given)
