"""Watches: one stream of notifications per shard serves all watches of a store, since Oxia does not filter them.

After an interruption, a stream continues from the last offset, and every watch wakes in case the server has dropped
older notifications.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final

from grpc.aio import EOF, AioRpcError

from llog.errors import LlogError, OutcomeUnknown, StoreUnavailable
from llog.stores.event_watches import EventWatch, WatchesByPrefix
from llog.stores.oxia.cluster import PAUSE_SECONDS_MAX, PAUSE_SECONDS_MIN, Cluster
from llog.stores.oxia.keys import ECHO, decode
from llog.stores.oxia.proto import client_pb2 as proto
from llog.stores.oxia.proto.client_pb2_grpc import OxiaClientStub
from llog.stores.oxia.writes import Writes

IDLE_SECONDS: Final = 10.0
"""After this time without a notification, a lookup shows whether the connection still works."""


class Notifications:
    """The notifications of one shard."""

    def __init__(self, cluster: Cluster, writes: Writes, watches: Watches, seconds: float) -> None:
        self._cluster = cluster
        self._shard = writes.shard
        self._writes = writes
        self._watches = watches
        self._seconds = seconds
        self._offset: int | None = None
        """The offset of the last notification."""
        self._begun = asyncio.Event()
        """Set once every later change is certain to be notified."""
        self._echoed_version = -1
        """The highest version of the echo key that was notified. Its first notification wakes all watches."""
        self._progress = asyncio.Event()
        self._streaming: asyncio.Task[None] | None = None
        self._running = asyncio.get_running_loop().create_task(self._run())
        self._echoing = asyncio.get_running_loop().create_task(self._echo_once())

    async def wait_until_delivered(self) -> None:
        """Return once every change that was committed before the call has woken its watches."""
        try:
            async with asyncio.timeout(self._seconds):
                await self._begun.wait()
                self._shard.check()
                version = await self._echo()
                while self._echoed_version < version:
                    self._shard.check()
                    await self._progress.wait()
        except TimeoutError:
            if self._streaming is not None:
                self._streaming.cancel()  # the next stream continues after the last notification
            raise StoreUnavailable(
                f"Oxia's shard {self._shard.number} did not notify of a write within {self._seconds:g} s: check that "
                "its namespace has notifications enabled"
            ) from None

    async def close(self) -> None:
        self._echoing.cancel()
        self._running.cancel()
        await asyncio.wait([self._echoing, self._running])

    async def _echo(self) -> int:
        while True:
            try:
                return await self._writes.echo()
            except OutcomeUnknown:  # the echo key may be written twice
                await self._shard.pause(PAUSE_SECONDS_MIN)

    async def _echo_once(self) -> None:
        """Write the echo key until its notification has come.

        A new stream begins after the last committed change, which the leader may not have applied yet: a reader does
        not see that change, and no watch is notified of it. The echo key's change is applied after it, and its
        notification wakes every watch.
        """
        await self._begun.wait()
        while self._echoed_version < 0 and not self._shard.is_gone:
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
                leader = await self._shard.wait_for_leader()
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
        self._signal_progress()
        self._watches.wake_all()

    async def _stream(self, leader: str) -> None:
        request = proto.NotificationsRequest(shard=self._shard.number, start_offset_exclusive=self._offset)
        call = self._cluster.channels.stub(leader).GetNotifications(request, metadata=self._cluster.channels.metadata())
        try:
            while (batch := await self._next_batch(call)) is not EOF:
                self._cluster.channels.note_answer(leader)
                self._apply_batch(batch)
            raise EOFError
        finally:
            call.cancel()
            self._watches.wake_all()

    async def _next_batch(self, call: Any) -> Any:
        """Return the next batch. While none comes, check now and then that the leader still answers."""
        reading = asyncio.ensure_future(call.read())
        try:
            while not (await asyncio.wait([reading], timeout=IDLE_SECONDS))[0]:
                await self._cluster.call_leaders([self._shard], self._look_up_echo, IDLE_SECONDS)
            return reading.result()
        finally:
            reading.cancel()

    async def _look_up_echo(self, stubs: list[OxiaClientStub]) -> None:
        request = proto.ReadRequest(shard=self._shard.number, gets=[proto.GetRequest(key=ECHO)])
        call = stubs[0].Read(request, metadata=self._cluster.channels.metadata())
        while await call.read() is not EOF:
            pass

    def _apply_batch(self, batch: proto.NotificationBatch) -> None:
        self._offset = batch.offset
        self._begun.set()
        changed_keys = []
        for each in batch.notifications:
            if each.value.type == proto.NotificationType.KEY_RANGE_DELETED:
                self._watches.wake_all()
            elif each.key == ECHO:
                if self._echoed_version < 0:
                    self._watches.wake_all()
                self._echoed_version = max(self._echoed_version, each.value.version_id)
            else:
                changed_keys.append(each.key)
        self._watches.wake(changed_keys)
        self._signal_progress()

    def _signal_progress(self) -> None:
        self._progress.set()
        self._progress = asyncio.Event()


class Watches:
    """All watches of a store. `wait_until_delivered` returns once every change so far has woken its watches."""

    def __init__(self, check_open: Callable[[], None], wait_until_delivered: Callable[[], Awaitable[None]]) -> None:
        self.check_open = check_open
        self._wait_until_delivered = wait_until_delivered
        self._watches = WatchesByPrefix()
        self._round: asyncio.Task[None] | None = None
        self._next: asyncio.Task[None] | None = None

    def watch(self, prefix: str) -> EventWatch:
        watch = EventWatch(self)
        self._watches.add(prefix, watch)
        return watch

    def start(self) -> None:
        """Check that the store is open: notifications have begun with the first watch."""
        self.check_open()

    def wake(self, stored_keys: Iterable[str]) -> None:
        self._watches.wake(key for key in map(decode, stored_keys) if key is not None)

    def wake_all(self) -> None:
        self._watches.wake_all()

    def close(self) -> None:
        for task in (self._round, self._next):
            if task is not None:
                task.cancel()
        self.wake_all()

    async def confirm(self) -> None:
        """Wait for one round of `wait_until_delivered`: all calls that arrive during a round share the next one."""
        self.check_open()
        if self._next is None:
            self._next = asyncio.get_running_loop().create_task(self._run_next_round(self._round))
            self._next.add_done_callback(lambda task: task.cancelled() or task.exception())
        waiting = self._next
        try:
            await asyncio.shield(waiting)
        except asyncio.CancelledError:
            if waiting.cancelled():
                self.check_open()
            raise

    async def _run_next_round(self, previous: asyncio.Task[None] | None) -> None:
        if previous is not None:
            await asyncio.wait([previous])
        self._round, self._next = self._next, None
        await self._wait_until_delivered()
