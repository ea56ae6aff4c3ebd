"""Watches of a SQLite metadata store. SQLite sends no notifications, so all watches of an event loop share one poll.

After a change of the store, one query finds the watches that it concerns, and only those are woken.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any, Final
from weakref import WeakKeyDictionary, WeakSet

from llog.errors import StoreUnavailable
from llog.stores.event_watches import ChangedKeys
from llog.stores.meta import Changes

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
    """The watches of a store. `read` runs a query, `is_closed` returns whether the store was closed, and `wrote_all`
    whether all changes between two revisions are known to be this process's.
    """

    def __init__(self, read: Read, is_closed: Callable[[], bool], wrote_all: Callable[[int, int], bool]) -> None:
        self._read = read
        self.is_closed = is_closed
        self.wrote_all = wrote_all
        self._polls: WeakKeyDictionary[asyncio.AbstractEventLoop, Poll] = WeakKeyDictionary()

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

    def poll(self) -> Poll:
        """Return the poll of the running event loop."""
        loop = asyncio.get_running_loop()
        poll = self._polls.get(loop)
        if poll is None:
            poll = self._polls[loop] = Poll(self)
        return poll


class SqliteWatch:
    """Yields after a change of its only key if the prefix has at most one key, else after any change of the store."""

    def __init__(self, watches: Watches, prefix: str) -> None:
        self.prefix = prefix
        self.changed = ChangedKeys()
        self._watches = watches
        self._seen: _State | None = None
        self._poll: Poll | None = None

    def __aiter__(self) -> SqliteWatch:
        return self

    async def __anext__(self) -> Changes:
        poll = self._enter()
        if self._seen is None:
            await poll.deliver([self])
        await poll.wait(self)
        return self.changed.take()

    def take(self) -> Changes:
        return self.changed.take()

    async def confirm(self) -> None:
        await self._enter().confirm()

    def see(self, state: _State) -> None:
        """Remember that any key may have changed if the state is another than the one seen before."""
        if state != self._seen:
            self._seen = state
            self.changed.add_all()

    def _enter(self) -> Poll:
        poll = self._watches.poll()
        if self._poll is not poll:
            self._poll = poll
            poll.watches.add(self)
            self.changed.add_all()  # the poll may have passed a change already
        return poll


class Poll:
    """The poll of one event loop, which runs while any of its watches is waited for."""

    def __init__(self, watches: Watches) -> None:
        self._source = watches
        self.watches: WeakSet[SqliteWatch] = WeakSet()
        self._waiting: set[asyncio.Future[None]] = set()
        self._stamp: _Stamp | None = None
        """Every watch has seen the changes up to this stamp."""
        self._task: asyncio.Task[None] | None = None

    async def wait(self, watch: SqliteWatch) -> None:
        """Return when the watch has changes; raise `StoreUnavailable` if the poll fails or the store is closed."""
        loop = asyncio.get_running_loop()
        changes = loop.create_task(watch.changed.wait())
        failure = loop.create_future()
        self._waiting.add(failure)
        if self._task is None or self._task.done():
            self._task = loop.create_task(self._run())
        try:
            await asyncio.wait([changes, failure], return_when=asyncio.FIRST_COMPLETED)
        finally:
            changes.cancel()
            self._waiting.discard(failure)
        if not changes.done() or self._source.is_closed():
            await self._source.read_stamp()  # raises the error itself
            watch.changed.add_all()

    async def confirm(self) -> None:
        """Return once every change that is committed now has reached all watches."""
        stamp = await self._source.read_stamp()
        if stamp != self._stamp:
            await self._deliver(stamp, list(self.watches))
            self._stamp = stamp

    async def deliver(self, watches: Sequence[SqliteWatch]) -> None:
        await self._deliver(await self._source.read_stamp(), watches)

    async def _deliver(self, stamp: _Stamp, watches: Sequence[SqliteWatch]) -> None:
        states = await self._source.read_states(stamp, {watch.prefix for watch in watches})
        for watch in watches:
            watch.see(states[watch.prefix])

    async def _run(self) -> None:
        try:
            await self._poll_until_closed()
        finally:
            for failure in self._waiting:
                if not failure.done():
                    failure.set_result(None)

    async def _poll_until_closed(self) -> None:
        pause = POLL_SECONDS_MIN
        while self._waiting and not self._source.is_closed():
            before = self._stamp
            try:
                await self.confirm()
            except StoreUnavailable:
                return
            if self._has_foreign_change(before):
                pause = POLL_SECONDS_MIN
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, POLL_SECONDS_MAX)

    def _has_foreign_change(self, before: _Stamp | None) -> bool:
        """Return whether another process may have changed the store since this stamp. Where one writes, more will come;
        what this process writes is no reason to look more often.
        """
        if before is None or self._stamp is None or self._stamp[1] != before[1]:
            return True
        return self._stamp != before and not self._source.wrote_all(before[0], self._stamp[0])
