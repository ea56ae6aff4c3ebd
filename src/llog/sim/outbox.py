"""The outbox of change events in memory, as RocksDB stores it: with one owner, and a log of writes that a power cut
shortens.

A write is present as a whole or not at all. A power cut may lose unsynced writes, the last ones first. Only the owner
process touches the outbox, and a successor waits for its death.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from llog.cdc.events import Op, PayloadMode, encode_event_headers
from llog.cdc.outbox import Cut, OutboxEntry
from llog.cdc.relay import Relay, RelayOptions
from llog.engines.object.writer import Writer
from llog.engines.routing import EngineReader
from llog.log.engine import WriterOptions
from llog.log.log import Log
from llog.sim.outcome import Violation
from llog.sim.process import Process

if TYPE_CHECKING:
    from llog.sim.world import World

_ATTEMPTS_MAX: Final = 25


class OutboxState:
    """The contents of the store, by partition of the one topic."""

    def __init__(self) -> None:
        self.entries: dict[int, dict[int, OutboxEntry]] = {}
        self.last: dict[int, int] = {}
        self.cuts: dict[int, Cut] = {}
        self.events: dict[int, list[bytes]] = {}
        """All events that were ever put and not lost, for the checker."""


Write = Callable[[OutboxState], None]


class SimOutbox:
    """The store, which outlives its owner."""

    def __init__(self, topic: str) -> None:
        self.topic = topic
        self.state = OutboxState()
        self.made = 0
        self._durable = OutboxState()
        self._unsynced: list[Write] = []
        self._relayed: dict[int, int] = {}
        self._owner: Process | None = None

    async def own(self, me: Process) -> None:
        """Wait until the owner is dead, and own the store. The former owner died alone, or with the machine's power."""
        while self._owner is not None and self._owner.alive:
            await me.runtime.sleep(1.0)
        died, self._owner = self._owner, me
        draw = me.runtime.random()
        if died is not None and draw.random() < 0.5:
            self._cut_power(draw.randint(0, len(self._unsynced)))

    def write(self, change: Write, *, sync: bool) -> None:
        change(self.state)
        self._unsynced.append(change)
        if sync:
            self._keep(len(self._unsynced))

    def record_relayed(self, prefix: str, payload: bytes) -> None:
        """O1: the appended payload is the partition's next event, and its change is durable."""
        partition = int(payload.split(b"|")[1])
        events, number = self._durable.events.get(partition, []), self._relayed.get(partition, 0)
        if events[number : number + 1] != [payload]:
            raise Violation(
                f"O1: {payload!r} was appended to {prefix}, where {events[number : number + 1]} had to come next"
            )
        self._relayed[partition] = number + 1

    def check_relayed(self) -> None:
        """O1: every event is in the topic."""
        for partition, events in self.state.events.items():
            if self._relayed.get(partition, 0) != len(events):
                raise Violation(
                    f"O1: partition {partition} has {self._relayed.get(partition, 0)} of {len(events)} events"
                )

    def _cut_power(self, kept: int) -> None:
        self._keep(kept)
        self._unsynced.clear()
        self.state = copy.deepcopy(self._durable)

    def _keep(self, count: int) -> None:
        for change in self._unsynced[:count]:
            change(self._durable)
        del self._unsynced[:count]


class OwnedOutbox:
    """The owner's `OutboxStore`: every call takes a while, before and after its effect."""

    def __init__(self, store: SimOutbox, me: Process) -> None:
        self._store = store
        self._me = me

    async def name(self) -> str:
        return "sim"

    async def partitions(self) -> list[tuple[str, int]]:
        await self._pause()
        return [
            (self._store.topic, partition) for partition, found in sorted(self._store.state.entries.items()) if found
        ]

    async def entries(
        self, directory: str, partition: int, after: int, limit: int, max_bytes: int
    ) -> list[OutboxEntry]:
        await self._pause()
        found = self._store.state.entries.get(partition, {})
        return [found[sequence] for sequence in sorted(found) if sequence > after][:limit]

    async def batch(self, directory: str, partition: int, cut: Cut) -> list[OutboxEntry]:
        await self._pause()
        found = self._store.state.entries.get(partition, {})
        return [found[sequence] for sequence in sorted(found) if cut.after < sequence <= cut.through]

    async def cut(self, directory: str, partition: int) -> Cut | None:
        await self._pause()
        return self._store.state.cuts.get(partition)

    async def put_cut(self, directory: str, partition: int, cut: Cut) -> bool:
        await self._pause()
        if cut.through not in self._store.state.entries.get(partition, {}):
            return False

        def put(state: OutboxState) -> None:
            state.cuts[partition] = cut

        self._store.write(put, sync=True)
        await self._pause()
        return True

    async def finish(self, directory: str, partition: int, cut: Cut) -> None:
        await self._pause()

        def close(state: OutboxState) -> None:
            state.cuts[partition] = replace(cut, open=False)
            entries = state.entries[partition]
            state.entries[partition] = {each: entry for each, entry in entries.items() if each > cut.through}

        self._store.write(close, sync=False)
        await self._pause()

    async def drop(self, directory: str, partition: int) -> None:
        raise AssertionError(f"topic {directory} is never deleted")

    async def change(self, counts: dict[int, int], *, sync: bool) -> None:
        """Put events for several partitions by one write."""
        await self._pause()
        store, now_ms = self._store, self._me.runtime.now_ms()
        added: dict[int, list[OutboxEntry]] = {}
        for partition, count in counts.items():
            last = store.state.last.get(partition, 0)
            headers = encode_event_headers(Op.INSERT, PayloadMode.KEY, "rows", range(store.made, store.made + count))
            added[partition] = [
                OutboxEntry(last + 1 + i, now_ms, b"", headers[i], f"outbox|{partition}|{store.made + i}".encode())
                for i in range(count)
            ]
            store.made += count

        def put(state: OutboxState) -> None:
            for partition, entries in added.items():
                state.entries.setdefault(partition, {}).update((entry.sequence, entry) for entry in entries)
                state.last[partition] = entries[-1].sequence
                state.events.setdefault(partition, []).extend(entry.payload for entry in entries)

        store.write(put, sync=sync)
        await self._pause()

    async def _pause(self) -> None:
        await self._me.runtime.sleep(self._me.runtime.random().random() * 0.01)


def relay_of(world: World, me: Process, log: Log, store: OwnedOutbox) -> Relay:
    options = RelayOptions(batch_records_max=world.plan.relayed_at_once)
    writer = Writer(log, WriterOptions(attempts_max=_ATTEMPTS_MAX))
    return Relay(store, writer, EngineReader(log), me.runtime, options)


async def outbox(world: World, me: Process, log: Log) -> None:
    """Own a database, change its rows, and relay their events to a topic of another engine."""
    await world.outbox.own(me)
    store = OwnedOutbox(world.outbox, me)
    relay = relay_of(world, me, log, store)
    await asyncio.gather(relay.run(), _change(world, me, store, relay))


async def _change(world: World, me: Process, store: OwnedOutbox, relay: Relay) -> None:
    draw = me.runtime.random()
    while True:
        await me.runtime.sleep(draw.expovariate(1.0))
        partitions = draw.sample(range(2), draw.choice((1, 1, 2)))
        await store.change({each: draw.randint(1, 4) for each in partitions}, sync=draw.random() < 0.5)
        relay.poke()
        world.trace.count("changes")


async def drain(world: World, me: Process, log: Log) -> None:
    """Relay all events that are left."""
    await world.outbox.own(me)
    await relay_of(world, me, log, OwnedOutbox(world.outbox, me)).drain()
    world.outbox.check_relayed()
