"""Work on many items at the same time, but not on all of them; work that ends when it is told to."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


async def gather_bounded(step: Callable[[T], Awaitable[R]], items: Iterable[T], concurrency: int) -> list[R]:
    """Return the results of `step` for all items, in their order, with at most `concurrency` steps under way.

    The first error is raised at once; steps that have begun go on.
    """
    gate = asyncio.Semaphore(concurrency)

    async def bounded(item: T) -> R:
        async with gate:
            return await step(item)

    return list(await asyncio.gather(*map(bounded, items)))


async def run_until(stopping: asyncio.Event, work: Awaitable[None]) -> None:
    """Run the work until it ends, or cancel it once `stopping` is set; return when it has ended, or raise its error."""
    task, stop = asyncio.ensure_future(work), asyncio.ensure_future(stopping.wait())
    try:
        await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        task.cancel()
        stop.cancel()
        await asyncio.wait({task, stop})
    if not task.cancelled():
        task.result()


class ByteGate:
    """Lets work in, in the order of arrival, while neither its number nor its bytes exceed their bounds.

    Work that has more bytes than the bound goes in alone.
    """

    def __init__(self, number_max: int, bytes_max: int) -> None:
        self._number_max = number_max
        self._bytes_max = bytes_max
        self._number = 0
        self._bytes = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def enter(self, size: int) -> AsyncIterator[None]:
        """Wait until work of `size` bytes may go in, and keep its place for the length of the block."""
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, place))
        self._admit()
        try:
            await place
        except asyncio.CancelledError:
            if place.cancelled():
                self._admit()  # a smaller one may have waited behind this one
            else:
                self._leave(size)
            raise
        try:
            yield
        finally:
            self._leave(size)

    def _leave(self, size: int) -> None:
        self._number -= 1
        self._bytes -= size
        self._admit()

    def _admit(self) -> None:
        while self._waiting:
            size, place = self._waiting[0]
            if not place.cancelled():
                fits = self._number < self._number_max and self._bytes + size <= self._bytes_max
                if self._number and not fits:
                    return
                self._number += 1
                self._bytes += size
                place.set_result(None)
            self._waiting.popleft()
