"""Values that cost requests to read: kept for a while, and read again in the background when somebody asks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final, Generic, TypeVar

from llog.errors import LlogError

T = TypeVar("T")
FIRST_WAIT_S: Final = 2.0
"""How long a caller waits for the first value. Later callers get the value before."""


class Cached(Generic[T]):
    """The newest value that `read` returned. At most one read runs at a time; one that fails keeps the old value."""

    def __init__(self, read: Callable[[], Awaitable[T]], keep_s: Callable[[T | None], float]) -> None:
        """`keep_s` returns how long a value counts as new; None stands for a read that failed."""
        self._read = read
        self._keep_s = keep_s
        self._value: T | None = None
        self._next_read = 0.0
        self._reading: asyncio.Task[None] | None = None
        self.failures = 0

    async def get(self) -> T | None:
        """Return the value; None if none could be read yet. A value that is too old is read again for the next call."""
        if self._reading is None and time.monotonic() >= self._next_read:
            self._reading = asyncio.ensure_future(self._refresh())
        if self._value is None and self._reading is not None:
            await asyncio.wait([self._reading], timeout=FIRST_WAIT_S)
        return self._value

    async def close(self) -> None:
        """End a read that is under way."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    async def _refresh(self) -> None:
        value: T | None = None
        try:
            value = self._value = await self._read()
        except LlogError:  # the store is out of order, which the metrics of its operations show
            self.failures += 1
        finally:
            self._next_read = time.monotonic() + self._keep_s(value)
            self._reading = None
