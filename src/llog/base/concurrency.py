"""Work on many items at the same time, but not on all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
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
