"""The brokers that are alive: each puts an ephemeral key with its address, and follows those of the others.

Every broker can serve every partition and coordinate every group, so nobody is elected: clients are spread over the
brokers by a hash that all brokers compute alike. A broker whose knowledge of the others is old sends some clients to
another place than the rest does, which is harmless: appends are decided by the metadata store, and so are the
generations of groups (`groups/`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Final

import msgspec

from llog.errors import LlogError, OutcomeUnknown, VersionMismatch
from llog.kafka.nodes import Node
from llog.log.keys import LIVE_BROKERS, live_broker_key
from llog.log.log import Log
from llog.log.records import decode, encode
from llog.stores.meta import ABSENT, scan

logger: Final = logging.getLogger("llog.kafka")

_ID_BITS: Final = 30
"""Node ids are random: positive, and so many that two brokers rarely choose the same one."""
_ATTEMPTS: Final = 20
_PAUSE_S: Final = 0.5
"""The least time between two looks for the other brokers."""


class LiveBroker(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a broker says of itself."""

    host: str
    port: int
    zone: str = ""
    address: str | None = None
    """Where other brokers reach it over HTTP, by which the owner of a topic is found among the brokers."""


class LiveBrokers:
    """The brokers that serve Kafka clients, as this one sees them. `start` it before use, and `run` it meanwhile."""

    def __init__(self, log: Log, me: LiveBroker, *, refresh_s: float) -> None:
        self._log = log
        self._broker = me
        self._refresh_s = refresh_s
        self._brokers: dict[int, LiveBroker] = {}
        self._nodes: tuple[Node, ...] = ()
        self._id = 0

    @property
    def me(self) -> Node:
        return _node(self._id, self._broker)

    @property
    def nodes(self) -> Sequence[Node]:
        """The brokers that are alive, this one among them, ordered by id."""
        return self._nodes

    async def start(self) -> None:
        """Choose an id that no other broker has, and look for the other brokers."""
        for _ in range(_ATTEMPTS):
            self._id = self._log.runtime.random().getrandbits(_ID_BITS) + 1
            with suppress(VersionMismatch):
                await self._put_lease()
                break
        await self._refresh()

    async def run(self) -> None:
        """Follow the other brokers, and put this one's key again if its session was lost, until cancelled."""
        watch = self._log.meta.watch(LIVE_BROKERS)
        while True:
            try:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._refresh_s):
                        await anext(watch)
                await self._refresh()
                # SQLite's watch ends after any change of the store: appends must not cost a look each.
                await self._log.runtime.sleep(min(_PAUSE_S, self._refresh_s))
            except LlogError as error:
                logger.warning("cannot look for the other brokers: %s", error)
                await self._log.runtime.sleep(self._refresh_s)

    def leader_of(self, directory: str, partition: int, zone: str = "") -> Node:
        """Return the broker to which clients of this zone should send requests for a partition."""
        near = [node for node in self._nodes if node.rack == zone] if zone else []
        return _choose(near or self._nodes, f"{directory}/{partition}")

    def near(self, zone: str) -> Node | None:
        """Return a broker of the zone; None if this one will do, or if the zone has none."""
        if not zone or zone == self._broker.zone:
            return None
        near = [node for node in self._nodes if node.rack == zone]
        return _choose(near, zone) if near else None

    def owner(self, address: str) -> Node | None:
        """Return the broker that is reached over HTTP at this address, if it serves Kafka clients."""
        for node_id, broker in self._brokers.items():
            if broker.address == address:
                return _node(node_id, broker)
        return None

    def coordinator_of(self, group: str) -> Node:
        return _choose(self._nodes, f"group/{group}")

    async def _refresh(self) -> None:
        found = {
            int(entry.key.removeprefix(LIVE_BROKERS)): decode(LiveBroker, entry.value, entry.key)
            async for entry in scan(self._log.meta, LIVE_BROKERS)
        }
        if self._id not in found:
            with suppress(VersionMismatch, OutcomeUnknown):  # it is there, after all, or will be seen next time
                await self._put_lease()
        self._brokers = found | {self._id: self._broker}
        self._nodes = tuple(_node(*each) for each in sorted(self._brokers.items()))

    async def _put_lease(self) -> None:
        await self._log.meta.put(live_broker_key(self._id), encode(self._broker), expected=ABSENT, ephemeral=True)


def _node(node_id: int, broker: LiveBroker) -> Node:
    return Node(node_id, broker.host, broker.port, broker.zone)


def _choose(nodes: Sequence[Node], key: str) -> Node:
    """Choose by rendezvous: when a broker comes or goes, only what it serves moves."""
    if len(nodes) == 1:
        return nodes[0]
    return max(nodes, key=lambda node: blake2b(f"{key}/{node.id}".encode(), digest_size=8).digest())
