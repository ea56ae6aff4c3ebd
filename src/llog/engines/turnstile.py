"""Callers in the order in which they came, though some have to wait for something first."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


class Line:
    """What a caller does right after `through`, without waiting, is done before any later caller gets through."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._waiting = 0

    async def through(self, ready: Callable[[], T | None], prepare: Callable[[], Awaitable[T]]) -> T:
        """What `ready` has, or `prepare` gets. Nobody overtakes those who wait for the latter."""
        if not self._waiting and (found := ready()) is not None:
            return found
        self._waiting += 1
        try:
            async with self._lock:
                found = ready()
                return await prepare() if found is None else found
        finally:
            self._waiting -= 1
