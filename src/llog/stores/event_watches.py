"""Watches that notifications wake, for the stores whose server sends notifications of changed keys."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Protocol
from weakref import WeakSet


class NotificationSource(Protocol):
    """The part of a store that receives its notifications."""

    def start(self) -> None:
        """Begin to receive notifications, unless that has begun. Raises `StoreUnavailable` if the store is closed."""
        ...

    def check_open(self) -> None: ...

    async def confirm(self) -> None:
        """Return once every change that was committed before this call has woken its watches."""
        ...


class EventWatch:
    """A `Watch` that yields after its event was set: after changes, and when changes may have been missed."""

    def __init__(self, source: NotificationSource) -> None:
        self.event = asyncio.Event()
        self.event.set()
        self._source = source

    def __aiter__(self) -> EventWatch:
        return self

    async def __anext__(self) -> None:
        self._source.start()
        await self.event.wait()
        self._source.check_open()
        self.event.clear()

    async def confirm(self) -> None:
        await self._source.confirm()


class WatchesByPrefix:
    """Finds the watches of a changed key. It does not keep watches alive."""

    def __init__(self) -> None:
        self._by_prefix: dict[str, WeakSet[EventWatch]] = {}

    def add(self, prefix: str, watch: EventWatch) -> None:
        for unwatched in [each for each, watches in self._by_prefix.items() if not watches]:
            del self._by_prefix[unwatched]
        self._by_prefix.setdefault(prefix, WeakSet()).add(watch)

    def wake(self, keys: Iterable[str]) -> None:
        """Wake the watches of every prefix of these keys."""
        lengths = {len(prefix) for prefix in self._by_prefix}
        for key in keys:
            for length in lengths:
                for watch in list(self._by_prefix.get(key[:length], ())):
                    watch.event.set()

    def wake_all(self) -> None:
        for watches in self._by_prefix.values():
            for watch in list(watches):
                watch.event.set()

    def has_watches(self) -> bool:
        return any(self._by_prefix.values())
