"""Watches that notifications wake, for the stores whose server sends notifications of changed keys."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final, Protocol
from weakref import WeakSet

from llog.stores.meta import Changes

KEYS_MAX: Final = 10_000
"""Changed keys that a watch remembers until they are taken; with more, any key may have changed."""


class NotificationSource(Protocol):
    """The part of a store that receives its notifications."""

    def start(self) -> None:
        """Begin to receive notifications, unless that has begun. Raises `StoreUnavailable` if the store is closed."""
        ...

    def check_open(self) -> None: ...

    async def confirm(self) -> None:
        """Return once every change that was committed before this call has woken its watches."""
        ...


class ChangedKeys:
    """The changes that a watch has not handed out yet. The first ones are any changes before the watch."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._keys: set[str] | None = None
        self._event.set()

    def add(self, key: str) -> None:
        if not self._event.is_set():
            self._keys = set()
            self._event.set()
        if self._keys is not None:
            self._keys.add(key)
            if len(self._keys) > KEYS_MAX:
                self._keys = None

    def add_all(self) -> None:
        """Remember that any key may have changed."""
        self._keys = None
        self._event.set()

    async def wait(self) -> None:
        await self._event.wait()

    def take(self) -> Changes:
        if not self._event.is_set():
            return frozenset()
        self._event.clear()
        return None if self._keys is None else frozenset(self._keys)


class EventWatch:
    """A `Watch` that yields after notifications of changes, and when changes may have been missed."""

    def __init__(self, source: NotificationSource) -> None:
        self.changed = ChangedKeys()
        self._source = source

    def __aiter__(self) -> EventWatch:
        return self

    async def __anext__(self) -> Changes:
        self._source.start()
        await self.changed.wait()
        self._source.check_open()
        return self.changed.take()

    def take(self) -> Changes:
        return self.changed.take()

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
                    watch.changed.add(key)

    def wake_all(self) -> None:
        for watches in self._by_prefix.values():
            for watch in list(watches):
                watch.changed.add_all()

    def has_watches(self) -> bool:
        return any(self._by_prefix.values())
