"""Threads that statements run on, apart from those of the rest of the process.

A statement may wait for the writer's lock, or compute for minutes. Those that wait never keep the transaction that has the lock from a
thread: at most one is open, and it has one of its own. Neither do queries keep changes from one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
        waiting = self._pools[use].submit(work)
        running = asyncio.wrap_future(waiting)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            while not waiting.cancel() and not running.done():
                interrupt()
                await asyncio.wait([running], timeout=_INTERRUPT_S)
            if running.done() and not running.cancelled():
                running.exception()  # looked at: nobody else will
            raise

    def close(self) -> None:
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)
