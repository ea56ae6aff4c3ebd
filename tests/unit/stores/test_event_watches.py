"""Watches that notifications wake, without a store."""

from __future__ import annotations

import gc

from llog.stores.event_watches import EventWatch, WatchesByPrefix


class Source:
    def start(self) -> None:
        pass

    def check_open(self) -> None:
        pass

    async def confirm(self) -> None:
        pass


async def watch_after_its_first_item(watches: WatchesByPrefix, prefix: str) -> EventWatch:
    watch = EventWatch(Source())
    watches.add(prefix, watch)
    await anext(watch)
    return watch


async def test_a_changed_key_wakes_the_watches_of_its_prefixes_and_no_others() -> None:
    watches = WatchesByPrefix()
    every = await watch_after_its_first_item(watches, "")
    topic = await watch_after_its_first_item(watches, "t/")
    key = await watch_after_its_first_item(watches, "t/1")
    other = await watch_after_its_first_item(watches, "t/10")
    watches.wake(["t/1"])
    assert [watch.take() for watch in (every, topic, key)] == [frozenset({"t/1"})] * 3
    assert other.take() == frozenset()


async def test_a_watch_that_nobody_holds_is_forgotten() -> None:
    watches = WatchesByPrefix()
    watch: EventWatch | None = await watch_after_its_first_item(watches, "t/")
    assert watches.has_watches()
    del watch
    gc.collect()
    assert not watches.has_watches()
    watches.wake(["t/1"])
    watches.wake_all()
