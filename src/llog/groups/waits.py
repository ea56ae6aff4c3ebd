"""Waiting for the first of several events: a record in one of many partitions, a moment, or the end of the process."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from llog.model import TopicPartition
from llog.runtime import Runtime

T = TypeVar("T")

_CONCURRENCY: Final = 32
_PAUSE_S: Final = 0.1


class Wakeup(NamedTuple):
    """An event that ends a wait: a record at `offset` of `tp`, or the moment `wake_ms`, whichever comes first."""

    tp: TopicPartition | None
    """None if only the moment ends the wait."""
    offset: int
    wake_ms: int | None = None


class Waiter(Protocol):
    """The part of a `LogReader` that waits for records."""

    async def wait(self, tp: TopicPartition, past_offset: int, timeout: float) -> bool: ...


async def wait_for_any(
    waiter: Waiter, runtime: Runtime, wakeups: Sequence[Wakeup], timeout: float, stopping: asyncio.Event
) -> None:
    """Return when one of the wakeups has come, a wait failed, the process stops, or `timeout` seconds have passed."""
    moments = [wakeup.wake_ms for wakeup in wakeups if wakeup.wake_ms is not None]
    if moments:
        timeout = min(timeout, max(0, min(moments) - runtime.now_ms()) / 1000 + 0.001)
    waits: list[asyncio.Task[bool]] = [
        asyncio.ensure_future(waiter.wait(wakeup.tp, wakeup.offset, timeout))
        for wakeup in wakeups
        if wakeup.tp is not None
    ]
    everything = [*waits, asyncio.ensure_future(stopping.wait())]
    try:
        done, _ = await asyncio.wait(everything, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in everything:
            task.cancel()
        results = await asyncio.gather(*everything, return_exceptions=True)
    if done and True not in results:
        await runtime.sleep(min(_PAUSE_S, timeout))  # a wait that ended early must not become a busy loop


async def gather_bounded(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of all calls, in order; at most 32 of them run at a time."""
    if len(calls) == 1:
        return [await calls[0]]
    gate = asyncio.Semaphore(_CONCURRENCY)

    async def one(call: Coroutine[Any, Any, T]) -> T:
        async with gate:
            return await call

    return list(await asyncio.gather(*map(one, calls)))
