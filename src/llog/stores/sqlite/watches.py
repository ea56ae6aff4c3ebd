"""Watches of the embedded metadata store: SQLite tells nobody of changes, so they poll, all watches of an event loop
together.

After a change of the store, one query finds out which watches it concerns, and only those are woken.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Any, Final
from weakref import WeakKeyDictionary

from llog.errors import StoreUnavailable

POLL_SECONDS_MIN: Final = 0.005
POLL_SECONDS_MAX: Final = 0.02

_STAMP: Final = "SELECT revision, (SELECT count(*) FROM sessions WHERE expires_ms > ?) FROM state"
"""Differs after every change; the count of live sessions tells of keys that vanished without a write."""
_VERSIONS: Final = """
SELECT watched.value, (
    SELECT CASE WHEN count(*) < 2 THEN max(version) ELSE -1 END
    FROM (SELECT version FROM entries WHERE key >= watched.value AND key < watched.value || char(1114111) LIMIT 2)
) FROM json_each(?) AS watched
"""
"""For each prefix the version of its only key, null if it has none, -1 if it has several."""

Read = Callable[[str, tuple[Any, ...]], Awaitable[list[Any]]]
_Stamp = tuple[int, int]
_Seen = tuple[int, int | None]
"""What differs after a change below a prefix: the live sessions, and the version of the only key or else the store's
revision.
"""


class Watches:
    """`read` runs a query; `is_closed` says that there will be no more changes."""

    def __init__(self, read: Read, is_closed: Callable[[], bool]) -> None:
        self._read = read
        self.is_closed = is_closed
        self._polls: WeakKeyDictionary[asyncio.AbstractEventLoop, _Poll] = WeakKeyDictionary()

    def watch(self, prefix: str) -> Watch:
        return Watch(self, prefix)

    async def stamp(self) -> _Stamp:
        ((revision, sessions),) = await self._read(_STAMP, (time.time_ns() // 1_000_000,))
        return revision, sessions

    async def seen(self, stamp: _Stamp, prefixes: Collection[str]) -> dict[str, _Seen]:
        """Return what is there below each prefix; `stamp` was read before."""
        revision, sessions = stamp
        rows = await self._read(_VERSIONS, (json.dumps(list(prefixes)),))
        return {prefix: (sessions, revision if version == -1 else version) for prefix, version in rows}

    async def changed(self, prefix: str, seen: _Seen) -> None:
        """Return some time after the prefix differs from what was seen of it, or the store failed or was closed."""
        await self._poll().changed(prefix, seen)

    async def deliver(self) -> None:
        """Wake every watch of this event loop that waits for a change that is committed already."""
        await self._poll().deliver(await self.stamp())

    def _poll(self) -> _Poll:
        loop = asyncio.get_running_loop()
        poll = self._polls.get(loop)
        if poll is None:
            poll = self._polls[loop] = _Poll(self)
        return poll


class Watch:
    """Sleeps through changes elsewhere if the prefix is that of one key; else yields after any change of the store."""

    def __init__(self, watches: Watches, prefix: str) -> None:
        self._watches = watches
        self._prefix = prefix
        self._seen: _Seen | None = None

    def __aiter__(self) -> Watch:
        return self

    async def __anext__(self) -> None:
        while True:
            seen = (await self._watches.seen(await self._watches.stamp(), [self._prefix]))[self._prefix]
            if seen != self._seen:
                self._seen = seen
                return
            await self._watches.changed(self._prefix, seen)

    async def confirm(self) -> None:
        await self._watches.deliver()


class _Poll:
    """One event loop's."""

    def __init__(self, watches: Watches) -> None:
        self._watches = watches
        self._waiting: dict[asyncio.Future[None], tuple[str, _Seen]] = {}
        self._task: asyncio.Task[None] | None = None

    async def changed(self, prefix: str, seen: _Seen) -> None:
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        self._waiting[waiter] = prefix, seen
        if self._task is None or self._task.done():
            self._task = loop.create_task(self._run())
        try:
            await waiter
        finally:
            self._waiting.pop(waiter, None)

    async def deliver(self, stamp: _Stamp) -> None:
        """Wake the waiting watches whose prefix differs from what they saw of it; `stamp` was read just now."""
        prefixes = {prefix for prefix, _ in self._waiting.values()}
        found = await self._watches.seen(stamp, prefixes)
        _wake([each for each, (prefix, seen) in self._waiting.items() if found.get(prefix, seen) != seen])

    async def _run(self) -> None:
        try:
            await self._wake_changed()
        finally:
            _wake(self._waiting)  # every watch meets the error itself

    async def _wake_changed(self) -> None:
        stamp: _Stamp | None = None
        pause = POLL_SECONDS_MIN
        while self._waiting and not self._watches.is_closed():
            try:
                now = await self._watches.stamp()
                if now != stamp:
                    await self.deliver(now)
                    stamp, pause = now, POLL_SECONDS_MIN
            except StoreUnavailable:
                return
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, POLL_SECONDS_MAX)


def _wake(waiters: Iterable[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)
