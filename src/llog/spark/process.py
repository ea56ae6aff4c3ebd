"""One open log per process and address, used from synchronous code.

Spark calls a data source from several Python processes and reuses them, so a log stays open while its process lives.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import TypeVar

from llog.config import Settings
from llog.errors import Contention, OutcomeUnknown, StoreUnavailable
from llog.partition.log import Log
from llog.portal import Connection

T = TypeVar("T")

_ATTEMPTS = 6

_connections: dict[Settings, Connection[Log]] = {}


def run(settings: Settings, use: Callable[[Log], Awaitable[T]]) -> T:
    """The result of `use` on this process's log."""
    return _connection(settings).call(use)


def run_patiently(settings: Settings, use: Callable[[Log], Awaitable[T]]) -> T:
    """The same for what may be done twice and ends a whole query if it fails: tried again for some seconds."""
    for attempt in range(_ATTEMPTS - 1):
        try:
            return run(settings, use)
        except (StoreUnavailable, OutcomeUnknown, Contention):
            time.sleep(0.2 * 2**attempt)
    return run(settings, use)


def iterate(settings: Settings, use: Callable[[Log], AsyncIterator[T]]) -> Iterator[T]:
    """What `use` yields on this process's log, one item at a time, none of them None."""

    async def begin(log: Log) -> AsyncIterator[T]:
        return use(log)

    async def following(_: Log) -> T | None:
        return await anext(items, None)

    items = run(settings, begin)
    while (item := run(settings, following)) is not None:
        yield item


def _connection(settings: Settings) -> Connection[Log]:
    return _connections.setdefault(settings, Connection(settings, lambda log: log))
