"""The portal from blocking code into the asynchronous core: one event loop per process, in a background thread."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, TypeVar

from llog.config import Settings
from llog.errors import InvalidArgument, StoreUnavailable
from llog.log.log import Log
from llog.log.opening import close_log, open_log

T = TypeVar("T")
R = TypeVar("R")

_starting = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None


def run(coroutine: Coroutine[Any, Any, R]) -> R:
    """Run the coroutine on this process's background loop and wait for its result. An interrupt (Ctrl-C) cancels it."""
    loop = _background_loop()
    if _running_loop() is loop:
        coroutine.close()
        raise InvalidArgument(
            "a blocking call was made on llog's own event loop, which would wait for itself forever: use another thread"
        )
    future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


class LogPortal(Generic[T]):
    """A log and the object that `build` makes on it, opened by the first call of a process and again in a forked child.

    Threads may share a portal. After a failed opening, the next call tries again.
    """

    def __init__(self, settings: Settings, build: Callable[[Log], T], *, reads_only: bool = False) -> None:
        self.settings = settings
        self._reads_only = reads_only
        self._build = build
        self._pid = 0
        self._opening: asyncio.Future[tuple[Log, T]] | None = None
        self._closed = False

    def call(self, operation: Callable[[T], Awaitable[R]]) -> R:
        return run(self._call_opened(operation))

    def close(self) -> None:
        """Close the log and refuse further calls. Idempotent."""
        if not self._closed:
            self._closed = True
            if self._opening is not None and self._pid == os.getpid():
                run(self._close())

    async def _call_opened(self, operation: Callable[[T], Awaitable[R]]) -> R:
        if self._closed:
            raise StoreUnavailable("this object is closed: make another one")
        if self._opening is None or self._pid != os.getpid():
            self._pid = os.getpid()
            self._opening = asyncio.ensure_future(self._open())
        opening = self._opening
        if not opening.done():
            await asyncio.wait([opening])
        if self._opening is opening and (opening.cancelled() or opening.exception()):
            self._opening = None
        _, target = opening.result()
        return await operation(target)

    async def _open(self) -> tuple[Log, T]:
        log = await open_log(self.settings, reads_only=self._reads_only)
        return log, self._build(log)

    async def _close(self) -> None:
        if self._opening is not None:
            log, _ = await self._opening
            await close_log(log)


def _background_loop() -> asyncio.AbstractEventLoop:
    global _loop
    with _starting:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="llog-portal", daemon=True).start()
        return _loop


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _forget_after_fork() -> None:
    """Start anew in a forked child: it has the loop's memory but not its thread, and perhaps a lock that nothing
    releases.
    """
    global _loop, _starting
    _loop, _starting = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_after_fork)
