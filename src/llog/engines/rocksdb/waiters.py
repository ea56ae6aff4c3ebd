"""Events on which tasks of any event loop wait for a partition, set from any thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

Partition = tuple[str, int]
"""The topic's directory, and the number of the partition."""


class Waiters:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: dict[Partition, list[tuple[asyncio.AbstractEventLoop, asyncio.Event]]] = {}

    @contextmanager
    def register(self, partition: Partition) -> Iterator[asyncio.Event]:
        """Yield an event of the running loop, which every `wake` of the partition sets."""
        waiter = (asyncio.get_running_loop(), asyncio.Event())
        with self._lock:
            self._events.setdefault(partition, []).append(waiter)
        try:
            yield waiter[1]
        finally:
            with self._lock:
                others = self._events[partition]
                others.remove(waiter)
                if not others:
                    del self._events[partition]

    def wake(self, partitions: Iterable[Partition]) -> None:
        if not self._events:  # a waiter that registers now reads the partition afterwards
            return
        with self._lock:
            waiters = [waiter for partition in partitions for waiter in self._events.get(partition, ())]
        for loop, event in waiters:
            try:
                loop.call_soon_threadsafe(event.set)
            except RuntimeError:
                pass  # the waiter's loop is closed

    def wake_where(self, is_meant: Callable[[Partition], bool]) -> None:
        with self._lock:
            partitions = [partition for partition in self._events if is_meant(partition)]
        self.wake(partitions)
