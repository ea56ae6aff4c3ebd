"""Calls of functions in a worker process of their own, which is killed when the caller goes away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from llog.errors import SqlMemoryExceeded, SqlWorkerEnded
from llog.sql.workers import framing, jobs
from llog.sql.workers.process import Process
from llog.sql.workers.worker import CallOnce

R = TypeVar("R")


class _Call:
    def __init__(self, process: Process) -> None:
        self._process = process

    def interrupt(self) -> None:
        self._process.kill()

    kill = interrupt


def call_in_worker(function: Callable[..., R], *args: Any, memory_max_bytes: int) -> R:
    """Returns what the function returns, and raises the `LlogError` that it raises.

    `SqlMemoryExceeded` if it needs more than `memory_max_bytes`, `JobStopped` if the job of this thread was stopped.
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
