"""What a store has with each shard: a stream of writes, lookups, a session, and notifications if somebody watches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import lru_cache
from typing import Any, Final

from llog.errors import LlogError
from llog.stores.meta import partition_prefix
from llog.stores.oxia.cluster import Cluster, Shard
from llog.stores.oxia.keys import SORTING_BOUND, SORTING_PROBE, encode, hash_of
from llog.stores.oxia.proto import client_pb2 as proto
from llog.stores.oxia.reads import Lookups
from llog.stores.oxia.sessions import Session
from llog.stores.oxia.watches import Notifications, OxiaWatch, Watches
from llog.stores.oxia.writes import Writes

CLOSE_SECONDS: Final = 5.0


class ShardClient:
    """One shard's."""

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

    def new_session(self) -> Session:
        """A session of its own, which begins with its first use."""
        return Session(self._cluster, self.shard, self._session_timeout_ms, self._identity, self._seconds)

    def notify(self, watches: Watches) -> Notifications:
        """The notifications, which begin with the first call."""
        if self._notifications is None:
            self._notifications = Notifications(self._cluster, self.writes, watches, self._seconds)
        return self._notifications

    async def sorts_naturally(self) -> bool:
        """Whether keys sort as plain bytes here. Leaves a key that shows it, for Oxia does not say."""
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
    """Those of all shards that the namespace has now, made when they are needed."""

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
        self._watches = Watches(check_open, self._deliver)
        self._is_watching = False
        self._background: set[asyncio.Task[None]] = set()
        cluster.on_change = self._shards_changed

    def of_shard(self, shard: Shard) -> ShardClient:
        client = self._clients.get(shard.number)
        if client is None:
            client = ShardClient(self.cluster, shard, self._session_timeout_ms, self._identity, self._seconds)
            self._clients[shard.number] = client
        return client

    def of_key(self, key: str) -> ShardClient:
        return self.of_routed(partition_prefix(key) or encode(key))

    def of_routed(self, text: str) -> ShardClient:
        """That of the shard which has this prefix of a partition, or this stored key of none."""
        return self.of_shard(self.cluster.shard_of(_routing_hash(text)))

    def of_partition(self, partition: str | None) -> list[ShardClient]:
        """That of the partition's shard; without a partition, those of all shards."""
        if partition is not None:
            return [self.of_routed(partition)]
        return [self.of_shard(shard) for shard in self.cluster.shards.values()]

    def watch(self, prefix: str) -> OxiaWatch:
        watch = self._watches.watch(prefix)
        self._is_watching = True
        self._in_background(self._notify())
        return watch

    async def close(self) -> None:
        """End everything, within CLOSE_SECONDS."""
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

    def _shards_changed(self) -> None:
        for number in [number for number in self._clients if number not in self.cluster.shards]:
            self._in_background(self._clients.pop(number).close())
        if self._is_watching:
            self._in_background(self._notify())

    async def _notify(self) -> None:
        """Begin the notifications of every shard that has none yet."""
        with suppress(LlogError):  # the next watch tries again, and so does a change of the shards
            await self.cluster.ready(self._seconds)
            for client in self.of_partition(None):
                client.notify(self._watches)
            self._watches.wake_all()

    async def _deliver(self) -> None:
        await self.cluster.ready(self._seconds)
        await asyncio.gather(*(client.notify(self._watches).delivered() for client in self.of_partition(None)))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


@lru_cache(maxsize=1 << 16)
def _routing_hash(text: str) -> int:
    return hash_of(text)
