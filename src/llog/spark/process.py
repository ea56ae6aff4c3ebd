"""One open log per process and address, used from synchronous code.

Spark calls a data source from several Python processes and reuses them. Native clients must not cross a fork, so a log is opened on
first use in each process, on an event loop in a thread of its own, and stays open while the process lives.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from typing import Any, TypeVar

from llog.config import Settings
from llog.opening import open_log
from llog.partition.log import Log

T = TypeVar("T")

_lock = threading.Lock()
_loops: dict[int, asyncio.AbstractEventLoop] = {}
_logs: dict[tuple[int, Settings], Log] = {}


def run(settings: Settings, use: Callable[[Log], Awaitable[T]]) -> T:
    """The result of `use` on this process's log."""

    async def with_log() -> T:
        return await use(await _log(settings))

    return _submit(with_log())


def iterate(settings: Settings, use: Callable[[Log], AsyncIterator[T]]) -> Iterator[T]:
    """What `use` yields on this process's log, one item at a time."""
    items = run(settings, _wrapped(use))
    while True:
        try:
            yield _submit(_next(items))
        except _Exhausted:
            return


class _Exhausted(Exception):
    pass


def _wrapped(use: Callable[[Log], AsyncIterator[T]]) -> Callable[[Log], Awaitable[AsyncIterator[T]]]:
    async def start(log: Log) -> AsyncIterator[T]:
        return use(log)

    return start


async def _next(items: AsyncIterator[T]) -> T:
    try:
        return await anext(items)
    except StopAsyncIteration:
        raise _Exhausted from None


async def _log(settings: Settings) -> Log:
    key = os.getpid(), settings
    if key not in _logs:
        _logs[key] = await open_log(settings)
    return _logs[key]


def _submit(coroutine: Coroutine[Any, Any, T]) -> T:
    return asyncio.run_coroutine_threadsafe(coroutine, _loop()).result()


def _loop() -> asyncio.AbstractEventLoop:
    with _lock:
        loop = _loops.get(os.getpid())
        if loop is None:
            loop = _loops[os.getpid()] = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="llog", daemon=True).start()
        return loop
