"""Waiting for the first of several things: a record in one of many partitions, a moment, or the end of the process."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from llog.model import TopicPartition
from llog.runtime import Runtime

T = TypeVar("T")

_AT_A_TIME: Final = 32
_PAUSE_S: Final = 0.1


class Watch(NamedTuple):
    tp: TopicPartition | None
    """None: no partition, a moment only."""
    offset: int
    """Wakes when there is a record here."""
    wake_ms: int | None = None
    """Wakes then, in any case."""


class Waits(Protocol):
    """What of a `LogReader` waits for records."""

    async def wait(self, tp: TopicPartition, past_offset: int, timeout: float) -> bool: ...


async def any_of(
    waiter: Waits, runtime: Runtime, watches: Sequence[Watch], timeout: float, stopping: asyncio.Event
) -> None:
    """Returns when one of the watches has something, a moment has come, something failed, the process stops, or the
    time is up.
    """
    moments = [watch.wake_ms for watch in watches if watch.wake_ms is not None]
    if moments:
        timeout = min(timeout, max(0, min(moments) - runtime.now_ms()) / 1000 + 0.001)
    waits: list[asyncio.Task[bool]] = [
        asyncio.ensure_future(waiter.wait(watch.tp, watch.offset, timeout)) for watch in watches if watch.tp is not None
    ]
    everything = [*waits, asyncio.ensure_future(stopping.wait())]
    try:
        done, _ = await asyncio.wait(everything, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in everything:
            task.cancel()
        results = await asyncio.gather(*everything, return_exceptions=True)
    if done and True not in results:
        await runtime.sleep(min(_PAUSE_S, timeout))  # a watch that ended early must not become a busy loop


async def gathered(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all, in order, so many at a time."""
    if len(calls) == 1:
        return [await calls[0]]
    gate = asyncio.Semaphore(_AT_A_TIME)

    async def one(call: Coroutine[Any, Any, T]) -> T:
        async with gate:
            return await call

    return list(await asyncio.gather(*map(one, calls)))
