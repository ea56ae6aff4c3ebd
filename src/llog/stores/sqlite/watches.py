"""Watches of a SQLite metadata store. SQLite sends no notifications, so all watches of an event loop share one poll.

After a change of the store, one query finds the watches that it concerns, and only those are woken.
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
"""Differs after every change. The count of live sessions shows keys that disappeared without a write."""
_VERSIONS: Final = """
SELECT watched.value, (
    SELECT CASE WHEN count(*) < 2 THEN max(version) ELSE -1 END
    FROM (SELECT version FROM entries WHERE key >= watched.value AND key < watched.value || char(1114111) LIMIT 2)
) FROM json_each(?) AS watched
"""
"""For each prefix: the version of its only key, null if it has no key, -1 if it has several."""

Read = Callable[[str, tuple[Any, ...]], Awaitable[list[Any]]]
_Stamp = tuple[int, int]
_State = tuple[int, int | None]
"""The state of a prefix, which differs after a change below it: the number of live sessions, and the version of the
only key or else the store's revision.
"""


class Watches:
    """The watches of a store. `read` runs a query, and `is_closed` returns whether the store was closed."""

    def __init__(self, read: Read, is_closed: Callable[[], bool]) -> None:
        self._read = read
        self.is_closed = is_closed
        self._polls: WeakKeyDictionary[asyncio.AbstractEventLoop, _Poll] = WeakKeyDictionary()

    def watch(self, prefix: str) -> SqliteWatch:
        return SqliteWatch(self, prefix)

    async def read_stamp(self) -> _Stamp:
        ((revision, sessions),) = await self._read(_STAMP, (time.time_ns() // 1_000_000,))
        return revision, sessions

    async def read_states(self, stamp: _Stamp, prefixes: Collection[str]) -> dict[str, _State]:
        """Return the state of each prefix; `stamp` was read before."""
        revision, sessions = stamp
        rows = await self._read(_VERSIONS, (json.dumps(list(prefixes)),))
        return {prefix: (sessions, revision if version == -1 else version) for prefix, version in rows}

    async def wait_for_change(self, prefix: str, seen: _State) -> None:
        """Return soon after the prefix's state differs from the one seen, or the store failed or was closed."""
        await self._poll().wait_for_change(prefix, seen)

    async def deliver(self) -> None:
        """Wake every watch of this event loop that a change has concerned by now."""
        await self._poll().deliver(await self.read_stamp())

    def _poll(self) -> _Poll:
        loop = asyncio.get_running_loop()
        poll = self._polls.get(loop)
        if poll is None:
            poll = self._polls[loop] = _Poll(self)
        return poll


class SqliteWatch:
    """Yields after a change of its only key if the prefix has at most one key, else after any change of the store."""

    def __init__(self, watches: Watches, prefix: str) -> None:
        self._watches = watches
        self._prefix = prefix
        self._seen: _State | None = None

    def __aiter__(self) -> SqliteWatch:
        return self

    async def __anext__(self) -> None:
        while True:
            seen = (await self._watches.read_states(await self._watches.read_stamp(), [self._prefix]))[self._prefix]
            if seen != self._seen:
                self._seen = seen
                return
            await self._watches.wait_for_change(self._prefix, seen)

    async def confirm(self) -> None:
        await self._watches.deliver()


class _Poll:
    """The poll of one event loop."""

    def __init__(self, watches: Watches) -> None:
        self._watches = watches
        self._waiting: dict[asyncio.Future[None], tuple[str, _State]] = {}
        self._task: asyncio.Task[None] | None = None

    async def wait_for_change(self, prefix: str, seen: _State) -> None:
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
        """Wake the waiting watches whose prefix has changed since they saw it; `stamp` was read just now."""
        prefixes = {prefix for prefix, _ in self._waiting.values()}
        states = await self._watches.read_states(stamp, prefixes)
        _wake([waiter for waiter, (prefix, seen) in self._waiting.items() if states.get(prefix, seen) != seen])

    async def _run(self) -> None:
        try:
            await self._poll_until_closed()
        finally:
            _wake(self._waiting)  # every watch then reads, and raises the error itself

    async def _poll_until_closed(self) -> None:
        stamp: _Stamp | None = None
        pause = POLL_SECONDS_MIN
        while self._waiting and not self._watches.is_closed():
            try:
                now = await self._watches.read_stamp()
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
