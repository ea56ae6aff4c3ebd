"""A store's client of each shard: its stream of writes, its lookups, its session, and its notifications if any."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import lru_cache
from typing import Any, Final

from llog.errors import LlogError
from llog.stores.event_watches import EventWatch
from llog.stores.meta import partition_prefix
from llog.stores.oxia.cluster import Cluster, Shard
from llog.stores.oxia.keys import SORTING_BOUND, SORTING_PROBE, encode, hash_of
from llog.stores.oxia.proto import client_pb2 as proto
from llog.stores.oxia.reads import Lookups
from llog.stores.oxia.sessions import ShardSession
from llog.stores.oxia.watches import Notifications, Watches
from llog.stores.oxia.writes import Writes

CLOSE_SECONDS: Final = 5.0


class ShardClient:
    """The client of one shard."""

    def __init__(self, cluster: Cluster, shard: Shard, session_timeout_ms: int, identity: str, seconds: float) -> None:
        self.shard = shard
        self.writes = Writes(cluster, shard, seconds)
        self.lookups = Lookups(cluster, shard, seconds)
        self._notifications: Notifications | None = None
        self._cluster = cluster
        self._session_timeout_ms = session_timeout_ms
        self._identity = identity
        self._seconds = seconds
        self.session = self.new_session()

    def new_session(self) -> ShardSession:
        """Return a session apart from the client's, which begins with its first use."""
        return ShardSession(self._cluster, self.shard, self._session_timeout_ms, self._identity, self._seconds)

    def start_notifications(self, watches: Watches) -> Notifications:
        """Return the notifications, which the first call starts."""
        if self._notifications is None:
            self._notifications = Notifications(self._cluster, self.writes, watches, self._seconds)
        return self._notifications

    async def sorts_naturally(self) -> bool:
        """Return whether keys sort as plain bytes. Puts a key to find out, because Oxia does not report it."""
        gets = [
            proto.GetRequest(key=SORTING_PROBE),
            proto.GetRequest(key=SORTING_BOUND, comparison_type=proto.KeyComparisonType.LOWER),
        ]
        probe, below = await self.lookups.submit(gets)
        if probe.status != proto.Status.OK:
            (future,) = self.writes.submit(proto.WriteRequest(puts=[proto.PutRequest(key=SORTING_PROBE)]))
            await future
            _, below = await self.lookups.submit(gets)
        return below.status == proto.Status.OK and below.key == SORTING_PROBE

    async def close(self) -> None:
        self.lookups.close()
        if self._notifications is not None:
            await self._notifications.close()
        await self.writes.close()
        await self.session.close(CLOSE_SECONDS / 2)


class Clients:
    """The clients of all shards that the namespace has now, each made on first use."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        session_timeout_ms: int,
        identity: str,
        seconds: float,
        check_open: Callable[[], None],
    ) -> None:
        self.cluster = cluster
        self._session_timeout_ms = session_timeout_ms
        self._identity = identity
        self._seconds = seconds
        self._clients: dict[int, ShardClient] = {}
        self._watches = Watches(check_open, self._wait_until_delivered)
        self._is_watching = False
        self._background: set[asyncio.Task[None]] = set()
        cluster.on_change = self._on_shards_changed

    def of_shard(self, shard: Shard) -> ShardClient:
        client = self._clients.get(shard.number)
        if client is None:
            client = ShardClient(self.cluster, shard, self._session_timeout_ms, self._identity, self._seconds)
            self._clients[shard.number] = client
        return client

    def of_key(self, key: str) -> ShardClient:
        return self.of_routing_key(partition_prefix(key) or encode(key))

    def of_routing_key(self, routing_key: str) -> ShardClient:
        """Return the client for a partition's prefix, or for the stored form of a key outside any partition."""
        return self.of_shard(self.cluster.shard_of(_routing_hash(routing_key)))

    def of_partition(self, partition: str | None) -> list[ShardClient]:
        """Return the client of the partition's shard, or those of all shards if `partition` is None."""
        if partition is not None:
            return [self.of_routing_key(partition)]
        return [self.of_shard(shard) for shard in self.cluster.shards.values()]

    def watch(self, prefix: str) -> EventWatch:
        watch = self._watches.watch(prefix)
        self._is_watching = True
        self._in_background(self._start_all_notifications())
        return watch

    async def close(self) -> None:
        """End all watches, sessions and connections, and give up on each step after CLOSE_SECONDS."""
        self._watches.close()
        for task in self._background:
            task.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await asyncio.gather(*(client.close() for client in self._clients.values()))
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await self.cluster.close()
                await self.cluster.channels.close()

    def _on_shards_changed(self) -> None:
        for number in [number for number in self._clients if number not in self.cluster.shards]:
            self._in_background(self._clients.pop(number).close())
        if self._is_watching:
            self._in_background(self._start_all_notifications())

    async def _start_all_notifications(self) -> None:
        """Start the notifications of every shard that has none yet."""
        with suppress(LlogError):  # the next watch tries again, and so does a change of the shards
            await self.cluster.wait_until_known(self._seconds)
            for client in self.of_partition(None):
                client.start_notifications(self._watches)
            self._watches.wake_all()

    async def _wait_until_delivered(self) -> None:
        await self.cluster.wait_until_known(self._seconds)
        await asyncio.gather(
            *(client.start_notifications(self._watches).wait_until_delivered() for client in self.of_partition(None))
        )

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


@lru_cache(maxsize=1 << 16)
def _routing_hash(text: str) -> int:
    return hash_of(text)
