"""Threads that statements run on, apart from those of the rest of the process.

What takes long runs in workers, and a thread waits for them. Work that is not wanted any more, or takes longer than it
may, is interrupted, and its worker killed if that does not end it.

A statement may wait for the writer's lock, or compute for minutes. Those that wait never keep the transaction that has
the lock from a thread: at most one is open, and it has one of its own. Neither do queries keep changes from one.
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
"""Interrupts before the worker is killed."""
_COUNTS: Final = {"query": 8, "change": 8, "transaction": 1}


class Use(Enum):
    QUERY = "query"
    """Reads, or parses: never waits for a lock that is held for long."""
    CHANGE = "change"
    """Waits for the writer's lock."""
    TRANSACTION = "transaction"
    """Has the writer's lock."""


class Threads:
    """Threads are made when they are needed. `close` waits for nothing: sessions are closed before."""

    def __init__(self, timeout_ms: int) -> None:
        self.timeout_ms = timeout_ms
        self._pools = {use: ThreadPoolExecutor(_COUNTS[use.value], f"llog-sql-{use.value}") for use in Use}

    async def run(self, use: Use, work: Callable[[], R]) -> R:
        """Calls `work` on a thread for this use; `StatementTimeout` if it takes too long.

        Then, and if the caller goes away, the work has ended when this returns.
        """
        job = Job()

        def begin() -> R:
            with job.begun():
                return work()

        running = self._pools[use].submit(begin)
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
    """Interrupts the work until it has ended: repeatedly, since the work may not have begun.

    After `_INTERRUPTS` of them the worker is killed, which ends every wait for it.
    """
    ended, interrupts = _end_of(running), 0
    while not running.cancel() and not running.done():
        job.stop(kill=interrupts >= _INTERRUPTS)
        interrupts += 1
        with suppress(asyncio.CancelledError):  # it has gone already
            await asyncio.wait([ended], timeout=_INTERRUPT_S)


def _end_of(running: Future[R]) -> asyncio.Future[None]:
    """A future that is done when the work is, whatever came of it.

    It costs a future and a turn of the loop less than `asyncio.wrap_future`.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def tell(_: Future[R]) -> None:
        with suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(lambda: None if ended.done() else ended.set_result(None))

    running.add_done_callback(tell)
    return ended
