"""Watches of a PostgreSQL metadata store: notifications over one connection for all of them, with a poll behind it.

A notification names the keys that may have changed, and wakes the watches of their prefixes. The poll finds what was
not notified: behind a proxy that pools transactions nothing is, and nobody tells of a session that was not renewed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Any, Final
from weakref import WeakSet

from llog.errors import StoreUnavailable
from llog.stores.postgres.connections import FAILURES, OPERATION_SECONDS, PAUSE_SECONDS_MAX, Line, Server
from llog.stores.postgres.schema import channel

POLL_SECONDS: Final = 1.0


class Watch:
    """Yields after changes below its prefix, and after times at which some may have been missed."""

    def __init__(self, watches: Watches, prefix: str) -> None:
        self.prefix = prefix
        self.changed = asyncio.Event()
        self.changed.set()
        self._watches = watches

    def __aiter__(self) -> Watch:
        return self

    async def __anext__(self) -> None:
        self._watches.start()
        await self.changed.wait()
        self._watches.check_open()
        self.changed.clear()

    async def confirm(self) -> None:
        await self._watches.confirm()


class Watches:
    """Those of one event loop. `read_revision` returns the last change; `end_sessions` is called when some session was
    not renewed.
    """

    def __init__(
        self,
        server: Server,
        check_open: Callable[[], None],
        read_revision: Callable[[], Awaitable[int]],
        end_sessions: Callable[[], Awaitable[None]],
    ) -> None:
        schema = server.address.schema
        self._poll_query = (
            f"SELECT revision, EXISTS (SELECT FROM {schema}.llog_sessions WHERE expires <= clock_timestamp()) "
            f"FROM {schema}.llog_state"
        )
        self._channel = channel(schema)
        self.check_open = check_open
        self._read_revision = read_revision
        self._end_sessions = end_sessions
        self._line = Line(server)
        self._by_prefix: dict[str, WeakSet[Watch]] = {}
        self._reached = -1
        """The last change that every watch knows of; -1 while nobody listens."""
        self._progress = asyncio.Event()
        """Set when `_reached` may have grown."""
        self._nudge = asyncio.Event()
        """Set to poll now."""
        self._task: asyncio.Task[None] | None = None

    def watch(self, prefix: str) -> Watch:
        watch = Watch(self, prefix)
        self._by_prefix.setdefault(prefix, WeakSet()).add(watch)
        return watch

    def start(self) -> None:
        """Begin to listen, unless somebody does. It ends by itself when there are no more watches."""
        self.check_open()
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def confirm(self) -> None:
        self.start()
        revision = await self._read_revision()
        try:
            async with asyncio.timeout(OPERATION_SECONDS):
                while self._reached < revision:
                    self.start()
                    self._progress.clear()
                    self._nudge.set()
                    await self._progress.wait()
                    self.check_open()
        except TimeoutError:
            raise StoreUnavailable(
                f"the watch has not heard of change {revision} within {OPERATION_SECONDS:g} s: the server cannot "
                "be listened to"
            ) from None

    async def close(self) -> None:
        """The store is closed: every watch ends with the error that `check_open` raises."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._wake_all()
        self._progress.set()

    async def _run(self) -> None:
        try:
            while self._has_watches():
                with suppress(StoreUnavailable, *FAILURES):
                    await self._listen()
                self._lose()
                await asyncio.sleep(PAUSE_SECONDS_MAX)
        finally:
            self._lose()

    async def _listen(self) -> None:
        """Wake watches as long as the connection lasts and there are any."""
        link = await self._line.link(asyncio.get_running_loop().time() + OPERATION_SECONDS)
        connection = link.connection
        async with asyncio.timeout(OPERATION_SECONDS):
            await connection.add_listener(self._channel, self._hear)
        connection.add_termination_listener(lambda _: self._nudge.set())
        while self._has_watches():
            self._nudge.clear()
            async with asyncio.timeout(OPERATION_SECONDS):
                revision, are_sessions_over = await connection.fetchrow(self._poll_query)
            if revision > self._reached:
                self._wake_all()
                self._reached = revision
            self._progress.set()
            if are_sessions_over:
                await self._end_sessions()
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_SECONDS):
                    await self._nudge.wait()

    def _hear(self, _connection: Any, _pid: int, _channel: str, payload: str) -> None:
        revision, _, names = payload.partition(" ")
        if names:
            self._wake(json.loads(names))
        else:
            self._wake_all()
        if self._reached >= 0:  # else some change before this one may have been missed
            self._reached = max(self._reached, int(revision))
        self._progress.set()

    def _lose(self) -> None:
        """What happens until somebody listens again is missed: the watches look, and meet the error themselves if there
        is one.
        """
        self._reached = -1
        self._line.drop()
        self._wake_all()

    def _wake(self, keys: Iterable[str]) -> None:
        lengths = sorted({len(prefix) for prefix in self._by_prefix})
        for key in keys:
            for length in lengths:
                if length > len(key):
                    break
                for watch in self._by_prefix.get(key[:length], ()):
                    watch.changed.set()

    def _wake_all(self) -> None:
        for watches in self._by_prefix.values():
            for watch in watches:
                watch.changed.set()

    def _has_watches(self) -> bool:
        for prefix in [prefix for prefix, watches in self._by_prefix.items() if not watches]:
            del self._by_prefix[prefix]
        return bool(self._by_prefix)
