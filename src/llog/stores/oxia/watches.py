"""Watches: one stream of notifications per shard for all watches of a store, since Oxia filters none.

After an interruption a stream goes on from the last offset, and every watch wakes, in case that the server has dropped
what is older.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final
from weakref import WeakSet

from grpc.aio import EOF, AioRpcError

from llog.errors import LlogError, OutcomeUnknown, StoreUnavailable
from llog.stores.oxia.cluster import PAUSE_SECONDS_MAX, PAUSE_SECONDS_MIN, Cluster
from llog.stores.oxia.keys import ECHO, encode
from llog.stores.oxia.proto import client_pb2 as proto
from llog.stores.oxia.proto.client_pb2_grpc import OxiaClientStub
from llog.stores.oxia.writes import Writes

IDLE_SECONDS: Final = 10.0
"""After as long without a notification, a lookup shows whether the connection still works."""


class Notifications:
    """Those of one shard."""

    def __init__(self, cluster: Cluster, writes: Writes, watches: Watches, seconds: float) -> None:
        self._cluster = cluster
        self._shard = writes.shard
        self._writes = writes
        self._watches = watches
        self._seconds = seconds
        self._offset: int | None = None
        """That of the last notification."""
        self._begun = asyncio.Event()
        """Set once later changes are certain to be notified."""
        self._echoed = -1
        """The highest version of the echo key that was notified; the first notification wakes all watches."""
        self._progress = asyncio.Event()
        self._streaming: asyncio.Task[None] | None = None
        self._running = asyncio.get_running_loop().create_task(self._run())
        self._echoing = asyncio.get_running_loop().create_task(self._echo_once())

    async def delivered(self) -> None:
        """Return once every change that was committed before the call has woken its watches."""
        try:
            async with asyncio.timeout(self._seconds):
                await self._begun.wait()
                self._shard.check()
                version = await self._echo()
                while self._echoed < version:
                    self._shard.check()
                    await self._progress.wait()
        except TimeoutError:
            if self._streaming is not None:
                self._streaming.cancel()  # the next stream goes on after the last notification
            raise StoreUnavailable(
                f"Oxia's shard {self._shard.number} notified nobody of a write within {self._seconds:g} s: check "
                "that its namespace has "
                "notifications enabled"
            ) from None

    async def close(self) -> None:
        self._echoing.cancel()
        self._running.cancel()
        await asyncio.wait([self._echoing, self._running])

    async def _echo(self) -> int:
        while True:
            try:
                return await self._writes.echo()
            except OutcomeUnknown:  # it means nothing that it may be written twice
                await self._shard.pause(PAUSE_SECONDS_MIN)

    async def _echo_once(self) -> None:
        """Have the echo key notified once.

        The leader begins after what is committed, of which it may not have applied the last: who looks now misses that,
        and is not notified of it. A change of the echo key is applied after all of it.
        """
        await self._begun.wait()
        while self._echoed < 0 and not self._shard.is_gone:
            try:
                await self._echo()
                return
            except StoreUnavailable:
                await asyncio.sleep(PAUSE_SECONDS_MAX)

    async def _run(self) -> None:
        pause = PAUSE_SECONDS_MIN
        while not self._shard.is_gone:
            leader = ""
            try:
                leader = await self._shard.led()
                task = self._streaming = asyncio.ensure_future(self._stream(leader))
                self._shard.running.add(task)
                try:
                    await asyncio.wait([task])
                    if not task.cancelled():
                        task.result()
                finally:
                    self._shard.running.discard(task)
                    task.cancel()
                pause = PAUSE_SECONDS_MIN
            except (AioRpcError, EOFError, LlogError):
                if leader:
                    self._cluster.suspect(leader)
            await self._shard.pause(pause)
            pause = min(pause * 2, PAUSE_SECONDS_MAX)
        self._begun.set()
        self._progressed()
        self._watches.wake_all()

    async def _stream(self, leader: str) -> None:
        request = proto.NotificationsRequest(shard=self._shard.number, start_offset_exclusive=self._offset)
        call = self._cluster.channels.stub(leader).GetNotifications(request, metadata=self._cluster.channels.metadata())
        try:
            while (batch := await self._next(call)) is not EOF:
                self._cluster.channels.heard(leader)
                self._take(batch)
            raise EOFError
        finally:
            call.cancel()
            self._watches.wake_all()

    async def _next(self, call: Any) -> Any:
        """The next batch; looks now and then whether there is still somebody who would send it."""
        reading = asyncio.ensure_future(call.read())
        try:
            while not (await asyncio.wait([reading], timeout=IDLE_SECONDS))[0]:
                await self._cluster.read([self._shard], self._look, IDLE_SECONDS)
            return reading.result()
        finally:
            reading.cancel()

    async def _look(self, stubs: list[OxiaClientStub]) -> None:
        request = proto.ReadRequest(shard=self._shard.number, gets=[proto.GetRequest(key=ECHO)])
        call = stubs[0].Read(request, metadata=self._cluster.channels.metadata())
        while await call.read() is not EOF:
            pass

    def _take(self, batch: proto.NotificationBatch) -> None:
        self._offset = batch.offset
        self._begun.set()
        for each in batch.notifications:
            if each.value.type == proto.NotificationType.KEY_RANGE_DELETED:
                self._watches.wake_all()
            elif each.key == ECHO:
                if self._echoed < 0:
                    self._watches.wake_all()
                self._echoed = max(self._echoed, each.value.version_id)
            else:
                self._watches.wake(each.key)
        self._progressed()

    def _progressed(self) -> None:
        self._progress.set()
        self._progress = asyncio.Event()


class Watches:
    """All watches of a store. `deliver` returns once every change so far has woken its watches."""

    def __init__(self, check_open: Callable[[], None], deliver: Callable[[], Awaitable[None]]) -> None:
        self.check_open = check_open
        self._deliver = deliver
        self._by_prefix: dict[str, WeakSet[OxiaWatch]] = {}
        self._round: asyncio.Task[None] | None = None
        self._next: asyncio.Task[None] | None = None

    def watch(self, prefix: str) -> OxiaWatch:
        for each in [each for each, watches in self._by_prefix.items() if not watches]:
            del self._by_prefix[each]
        watch = OxiaWatch(self)
        self._by_prefix.setdefault(encode(prefix), WeakSet()).add(watch)
        return watch

    def wake(self, stored: str) -> None:
        for length in {len(prefix) for prefix in self._by_prefix}:
            for watch in list(self._by_prefix.get(stored[:length], ())):
                watch.event.set()

    def wake_all(self) -> None:
        for watches in self._by_prefix.values():
            for watch in list(watches):
                watch.event.set()

    def close(self) -> None:
        for task in (self._round, self._next):
            if task is not None:
                task.cancel()
        self.wake_all()

    async def confirm(self) -> None:
        """One round for all who ask: whoever comes while one is under way shares the next."""
        self.check_open()
        if self._next is None:
            self._next = asyncio.get_running_loop().create_task(self._after(self._round))
            self._next.add_done_callback(lambda task: task.cancelled() or task.exception())
        waiting = self._next
        try:
            await asyncio.shield(waiting)
        except asyncio.CancelledError:
            if waiting.cancelled():
                self.check_open()
            raise

    async def _after(self, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])
        self._round, self._next = self._next, None
        await self._deliver()


class OxiaWatch:
    def __init__(self, watches: Watches) -> None:
        self.event = asyncio.Event()
        self.event.set()
        self._watches = watches

    def __aiter__(self) -> OxiaWatch:
        return self

    async def __anext__(self) -> None:
        await self.event.wait()
        self._watches.check_open()
        self.event.clear()

    async def confirm(self) -> None:
        await self._watches.confirm()
