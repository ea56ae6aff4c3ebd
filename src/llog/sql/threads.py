"""Threads that statements run on, apart from those of the rest of the process.

A statement may wait for the writer's lock, or compute for minutes. Those that wait never keep the transaction that has the lock from a
thread: at most one is open, and it has one of its own. Neither do queries keep changes from one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from enum import Enum
from typing import Final, TypeVar

R = TypeVar("R")

_INTERRUPT_S: Final = 0.05
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

    def __init__(self) -> None:
        self._pools = {use: ThreadPoolExecutor(_COUNTS[use.value], f"llog-sql-{use.value}") for use in Use}

    async def run(self, use: Use, work: Callable[[], R], interrupt: Callable[[], None] = lambda: None) -> R:
        """If the caller goes away, the work is interrupted, again and again for it may not have begun, and has ended when this returns."""
        running = self._pools[use].submit(work)
        try:
            await _end_of(running)
        except asyncio.CancelledError:
            ended = _end_of(running)
            while not running.cancel() and not running.done():
                interrupt()
                with suppress(asyncio.CancelledError):  # it has gone already
                    await asyncio.wait([ended], timeout=_INTERRUPT_S)
            raise
        return running.result()

    def close(self) -> None:
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)


def _end_of(running: Future[R]) -> asyncio.Future[None]:
    """Done when the work is, whatever came of it. A future and a turn of the loop less than `asyncio.wrap_future` takes."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def tell(_: Future[R]) -> None:
        with suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(lambda: None if ended.done() else ended.set_result(None))

    running.add_done_callback(tell)
    return ended
