"""Watches of a PostgreSQL metadata store: one connection receives the notifications for all of them, and also polls.

A notification names the keys that may have changed, and wakes the watches of their prefixes. The poll finds changes
without a notification: a proxy that pools transactions delivers none, and a session that was not renewed sends none.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final

from llog.errors import StoreUnavailable
from llog.stores.event_watches import EventWatch, WatchesByPrefix
from llog.stores.postgres.connections import FAILURES, OPERATION_SECONDS, PAUSE_SECONDS_MAX, Connection, Server
from llog.stores.postgres.schema import notification_channel

POLL_SECONDS: Final = 1.0


class Watches:
    """The watches of one event loop.

    `read_revision` returns the number of the last change. `end_sessions` is called when a session was not renewed.
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
        self._channel = notification_channel(schema)
        self.check_open = check_open
        self._read_revision = read_revision
        self._end_sessions = end_sessions
        self._connection = Connection(server)
        self._watches = WatchesByPrefix()
        self._reached = -1
        """The last change that every watch has received; -1 while the connection does not listen."""
        self._progress = asyncio.Event()
        """Set when `_reached` may have grown."""
        self._nudge = asyncio.Event()
        """Set to poll now."""
        self._task: asyncio.Task[None] | None = None

    def watch(self, prefix: str) -> EventWatch:
        watch = EventWatch(self)
        self._watches.add(prefix, watch)
        return watch

    def start(self) -> None:
        """Begin to listen, unless a task does so already. The task ends by itself when no watch is left."""
        self.check_open()
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def confirm(self) -> None:
        """Return once every change that is committed now has woken its watches."""
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
                f"the watch did not receive change {revision} within {OPERATION_SECONDS:g} s: check that the server "
                "can be reached"
            ) from None

    async def close(self) -> None:
        """Wake every watch of the closed store, which then raises the error of `check_open`."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._watches.wake_all()
        self._progress.set()

    async def _run(self) -> None:
        try:
            while self._watches.has_watches():
                with suppress(StoreUnavailable, *FAILURES):
                    await self._listen()
                self._stop_listening()
                await asyncio.sleep(PAUSE_SECONDS_MAX)
        finally:
            self._stop_listening()

    async def _listen(self) -> None:
        """Wake watches for as long as the connection lasts and any watch is left."""
        opened = await self._connection.open(asyncio.get_running_loop().time() + OPERATION_SECONDS)
        connection = opened.client
        async with asyncio.timeout(OPERATION_SECONDS):
            await connection.add_listener(self._channel, self._on_notification)
        connection.add_termination_listener(lambda _: self._nudge.set())
        while self._watches.has_watches():
            self._nudge.clear()
            async with asyncio.timeout(OPERATION_SECONDS):
                revision, has_ended_sessions = await connection.fetchrow(self._poll_query)
            if revision > self._reached:
                self._watches.wake_all()
                self._reached = revision
            self._progress.set()
            if has_ended_sessions:
                await self._end_sessions()
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_SECONDS):
                    await self._nudge.wait()

    def _on_notification(self, _connection: Any, _pid: int, _channel: str, payload: str) -> None:
        revision, _, names = payload.partition(" ")
        if names:
            self._watches.wake(json.loads(names))
        else:
            self._watches.wake_all()
        if self._reached >= 0:  # else an earlier change may have been missed
            self._reached = max(self._reached, int(revision))
        self._progress.set()

    def _stop_listening(self) -> None:
        """Wake all watches, since changes are missed until the task listens again: a read then shows them, or fails."""
        self._reached = -1
        self._connection.drop()
        self._watches.wake_all()
