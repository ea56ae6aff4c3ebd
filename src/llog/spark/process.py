"""One open log per process and settings, used from synchronous code.

Spark calls a data source from several Python processes and reuses them: a log is opened on first use in each, and stays
open while the process lives.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import TypeVar

from llog.api.portal import Connection
from llog.config import Settings
from llog.errors import Contention, OutcomeUnknown, StoreUnavailable
from llog.log.log import Log

T = TypeVar("T")

_ATTEMPTS = 6
_ITEMS_PER_STEP = 8

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
    """What `use` yields on this process's log, a few items to a change of threads: on a busy machine each change waits
    for a core.
    """
    connection = _connection(settings)

    async def begin(log: Log) -> AsyncIterator[T]:
        return use(log)

    async def step(_: Log) -> list[T]:
        found: list[T] = []
        async for item in items:
            found.append(item)
            if len(found) == _ITEMS_PER_STEP:
                break
        return found

    items = connection.call(begin)
    while found := connection.call(step):
        yield from found


def _connection(settings: Settings) -> Connection[Log]:
    return _connections.setdefault(settings, Connection(settings, lambda log: log))
