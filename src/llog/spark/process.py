"""One open log per process and settings, used from synchronous code.

Spark calls a data source from several Python processes and reuses them: a log is opened on first use in each, and stays
open while the process lives.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import TypeVar

from llog.api.portal import LogPortal
from llog.config import Settings
from llog.config.locations import NO_BLOBS
from llog.errors import Contention, OutcomeUnknown, StoreUnavailable
from llog.log.log import Log

T = TypeVar("T")

_ATTEMPTS = 6
_ITEMS_PER_STEP = 8

_connections: dict[tuple[Settings, bool], LogPortal[Log]] = {}


def run(settings: Settings, use: Callable[[Log], Awaitable[T]], *, reads_only: bool = False) -> T:
    """Return the result of `use` on this process's log. `reads_only` is that of `open_log`."""
    return _connection(settings, reads_only).call(use)


def run_patiently(settings: Settings, use: Callable[[Log], Awaitable[T]], *, reads_only: bool = False) -> T:
    """Do the same as `run`, but try again for some seconds if a store fails.

    For work that may be done twice, and whose failure would end a whole query.
    """
    for attempt in range(_ATTEMPTS - 1):
        try:
            return run(settings, use, reads_only=reads_only)
        except (StoreUnavailable, OutcomeUnknown, Contention):
            time.sleep(0.2 * 2**attempt)
    return run(settings, use, reads_only=reads_only)


def iterate(settings: Settings, use: Callable[[Log], AsyncIterator[T]], *, reads_only: bool = False) -> Iterator[T]:
    """Yield what `use` yields on this process's log.

    Several items cross from the log's thread at once: on a busy machine each change of threads waits for a core.
    """
    connection = _connection(settings, reads_only)

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


def _connection(settings: Settings, reads_only: bool) -> LogPortal[Log]:
    """Return the connection of readers and writers; without a blob store in the settings each kind has its own."""
    reads_only = reads_only and settings.blobs == NO_BLOBS
    return _connections.setdefault((settings, reads_only), LogPortal(settings, lambda log: log, reads_only=reads_only))
