"""Arrivals of records: requests that wait for them share what wakes them, however many they are.

The broker's views (`engines/object/views.py`) wake requests that wait for partitions of the object engine: after an
append of this broker at once, and after one of another by the one watch of the process. For a partition whose engine
has an owner, all requests share one wait of its reader: after an append, the partition is looked up once, and every
request that has a record now is woken with the result, in one pass.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from llog.broker.metrics import Metrics
from llog.engines.object.views import Read, View, Views
from llog.engines.routing import EngineReader
from llog.errors import LlogError
from llog.log.engine import PartitionView
from llog.model import TopicPartition

_WATCH_S: Final = 60.0
_PAUSE_S: Final = 0.1

Arrival = tuple[TopicPartition, PartitionView]
_Waiter = asyncio.Future[Arrival | None]
_Wanted = tuple[TopicPartition, int]


class Arrivals:
    """Waits for records. `stopping` ends every wait."""

    def __init__(self, reader: EngineReader, views: Views, metrics: Metrics, stopping: asyncio.Event) -> None:
        self._reader = reader
        self._views = views
        self._metrics = metrics
        self._stopping = stopping
        self._waiters: set[_Waiter] = set()
        self._rooms: dict[TopicPartition, _Room] = {}
        self._end: asyncio.Task[None] | None = None

    async def wait(self, tp: TopicPartition, past_offset: int, timeout: float) -> bool:
        """Return whether the partition has a record at `past_offset` within `timeout` seconds."""
        deadline = self._views.now() + timeout
        while not self._stopping.is_set():
            view = (await self._views.look([Read(tp, past_offset, True)], self._views.now()))[tp]
            if not isinstance(view, View):
                return False
            if view.has_record(past_offset):
                return True
            left = deadline - self._views.now()
            if left <= 0:
                return False
            arrival = await self.first([(tp, past_offset)], left)
            if view.bounds is None:
                return arrival is not None
        return False

    async def first(self, wanted: Sequence[_Wanted], timeout: float) -> Arrival | None:
        """Return when one of these partitions may have a record at the offset beside it; each was looked up just now.

        Returns the partition with its bounds if its engine has an owner. None otherwise, if the time is up, the broker
        stops, or a lookup failed, in which case the caller's own lookup will fail.
        """
        if self._stopping.is_set():
            return None
        if self._end is None:
            self._end = asyncio.ensure_future(self._wake_when_stopping())
        waiter: _Waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        self._metrics.waiting += 1
        rooms: list[_Room] = []
        try:
            for tp, offset in wanted:
                if self._views.is_followed(tp):
                    self._views.add_waiter(tp, offset, waiter)
                else:
                    rooms.append(self._enter(tp, offset, waiter))
            timer = waiter.get_loop().call_later(timeout, _end_wait, waiter)
            try:
                return await waiter
            finally:
                timer.cancel()
        finally:
            self._metrics.waiting -= 1
            self._waiters.discard(waiter)
            for tp, _ in wanted:
                self._views.remove_waiter(tp, waiter)
            for room in rooms:
                room.waiters.pop(waiter, None)
                self._close_if_empty(room)

    async def close(self) -> None:
        """Return when every wait has been ended; only after `stopping` is set."""
        if self._end is not None:
            await self._end

    def _enter(self, tp: TopicPartition, offset: int, waiter: _Waiter) -> _Room:
        room = self._rooms.get(tp)
        if room is None:
            room = self._rooms[tp] = _Room(tp)
        room.waiters[waiter] = min(offset, room.waiters.get(waiter, offset))
        if room.watch is None or room.watch.done() or offset < room.watched_offset:
            room.stop()
            room.watched_offset = offset
            room.watch = asyncio.ensure_future(self._watch(room))
        return room

    def _close_if_empty(self, room: _Room) -> None:
        if not room.waiters:
            room.stop()
            if self._rooms.get(room.tp) is room:
                del self._rooms[room.tp]

    async def _watch(self, room: _Room) -> None:
        while room.waiters:
            room.watched_offset = min(room.waiters.values())
            try:
                has_record = await self._reader.wait(room.tp, room.watched_offset, _WATCH_S)
                view = await self._reader.view(room.tp)
            except LlogError:
                has_record, view = False, None
            if view is not None and view.bounds.next_offset > room.watched_offset:
                room.wake(view)
                continue
            await asyncio.sleep(_PAUSE_S)  # a watch that ends early must not become a busy loop
            if view is None or has_record:
                # The lookup failed, or the topic was created again: the waiters look it up themselves.
                room.wake_all()

    async def _wake_when_stopping(self) -> None:
        await self._stopping.wait()
        for waiter in self._waiters:
            _end_wait(waiter)


class _Room:
    """The requests that wait for one partition."""

    def __init__(self, tp: TopicPartition) -> None:
        self.tp = tp
        self.waiters: dict[_Waiter, int] = {}
        """Each with the offset that it wants."""
        self.watch: asyncio.Task[None] | None = None
        self.watched_offset = 0
        """The lowest wanted offset: a record there ends the watch."""

    def wake(self, view: PartitionView) -> None:
        waiters, self.waiters = self.waiters, {}
        for waiter, offset in waiters.items():
            if offset >= view.bounds.next_offset:
                self.waiters[waiter] = offset
            elif not waiter.done():
                waiter.set_result((self.tp, view))

    def wake_all(self) -> None:
        for waiter in self.waiters:
            _end_wait(waiter)
        self.waiters.clear()

    def stop(self) -> None:
        if self.watch is not None:
            self.watch.cancel()
            self.watch = None


def _end_wait(waiter: _Waiter) -> None:
    if not waiter.done():
        waiter.set_result(None)
