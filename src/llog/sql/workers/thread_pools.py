"""The threads that statements run on, apart from those of the rest of the process.

Long work runs in workers, and a thread waits for them. Work that nobody wants any more, or that exceeds its time, is
interrupted; if that does not end it, its worker is killed.

A statement may wait for the writer's lock or compute for minutes. Statements that wait for the lock never take the
thread of the one transaction that holds it, which has a pool of its own; nor do queries take the threads of changes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from enum import Enum
from typing import Final, TypeVar

from llog.base.units import format_duration_ms
from llog.errors import StatementTimeout
from llog.sql.workers.jobs import Job

R = TypeVar("R")

_INTERRUPT_S: Final = 0.05
_INTERRUPTS: Final = 20
"""The number of interrupts before the worker is killed."""
_THREADS_MAX: Final = {"query": 8, "change": 8, "transaction": 1}


class Pool(Enum):
    """A pool by what its threads do."""

    QUERY = "query"
    """Reads or parses; never waits for a lock that is held for long."""
    CHANGE = "change"
    """Waits for the writer's lock."""
    TRANSACTION = "transaction"
    """Holds the writer's lock."""


class ThreadPools:
    """Threads start on demand. `close` does not wait for them: sessions are closed before."""

    def __init__(self, timeout_ms: int) -> None:
        self.timeout_ms = timeout_ms
        self._pools = {pool: ThreadPoolExecutor(_THREADS_MAX[pool.value], f"llog-sql-{pool.value}") for pool in Pool}

    async def run(self, pool: Pool, work: Callable[[], R]) -> R:
        """Call `work` on a thread of this pool. Raises `StatementTimeout` if it takes too long.

        When this method returns or raises, also because the caller was cancelled, the work has ended.
        """
        job = Job()

        def begin() -> R:
            with job.on_this_thread():
                return work()

        running = self._pools[pool].submit(begin)
        ended = _end_of(running)
        timer = asyncio.get_running_loop().call_later(self.timeout_ms / 1000, self._give_up, ended)
        try:
            await ended
        except asyncio.CancelledError:
            await _stop(running, job)
            raise
        except StatementTimeout:
            await _stop(running, job)
            if running.cancelled() or running.exception() is not None:
                raise
        finally:
            timer.cancel()
        return running.result()

    def _give_up(self, ended: asyncio.Future[None]) -> None:
        if not ended.done():
            message = (
                f"the statement ran for {format_duration_ms(self.timeout_ms)} and was cancelled (LLOG_SQL_TIMEOUT_MS)"
            )
            ended.set_exception(StatementTimeout(message))

    def close(self) -> None:
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)


async def _stop(running: Future[R], job: Job) -> None:
    """Interrupt the work until it has ended: repeatedly, since it may not have begun.

    After `_INTERRUPTS` attempts, kill the worker, which ends every wait for it.
    """
    ended, interrupts = _end_of(running), 0
    while not running.cancel() and not running.done():
        job.stop(kill=interrupts >= _INTERRUPTS)
        interrupts += 1
        with suppress(asyncio.CancelledError):  # the caller is gone already
            await asyncio.wait([ended], timeout=_INTERRUPT_S)


def _end_of(running: Future[R]) -> asyncio.Future[None]:
    """Return a future that is done when the work is, whether it succeeded or failed.

    `asyncio.wrap_future` would cost one more future and one more turn of the loop.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def notify(_: Future[R]) -> None:
        with suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(lambda: None if ended.done() else ended.set_result(None))

    running.add_done_callback(notify)
    return ended
