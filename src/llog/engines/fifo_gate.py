"""Keeps callers in the order of their arrival, although some must wait for something first."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


class FifoGate:
    """Lets callers enter one after the other. What a caller does right after `enter`, without awaiting, happens before
    any later caller enters.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._waiting = 0

    async def enter(self, ready: Callable[[], T | None], prepare: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `ready`, or of `prepare` if that is None. No caller overtakes one that waits for
        `prepare`.
        """
        if not self._waiting and (found := ready()) is not None:
            return found
        self._waiting += 1
        try:
            async with self._lock:
                found = ready()
                return await prepare() if found is None else found
        finally:
            self._waiting -= 1
