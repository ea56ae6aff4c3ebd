"""Sessions: one for each shard that holds ephemeral keys of this process, kept alive by heartbeats."""

from __future__ import annotations

import asyncio
from typing import Final

from grpc.aio import AioRpcError

from llog.errors import StoreUnavailable
from llog.stores.oxia.cluster import PAUSE_SECONDS_MIN, Cluster, Shard
from llog.stores.oxia.proto import client_pb2 as proto
from llog.stores.oxia.proto.client_pb2_grpc import OxiaClientStub
from llog.stores.oxia.refusals import is_session_lost

TIMEOUT_MS_MIN: Final = 2000
TIMEOUT_MS_MAX: Final = 300_000
"""The timeouts that Oxia accepts."""
_HEARTBEATS: Final = 5
"""Heartbeats within one timeout: four of them may be late or lost."""


class ShardSession:
    """The session of one shard. It begins with the first ephemeral key, and again after Oxia ended it."""

    def __init__(self, cluster: Cluster, shard: Shard, timeout_ms: int, identity: str, seconds: float) -> None:
        self._cluster = cluster
        self._shard = shard
        self._timeout_ms = min(max(timeout_ms, TIMEOUT_MS_MIN), TIMEOUT_MS_MAX)
        self._identity = identity
        self._seconds = seconds
        self._number: int | None = None
        self._open_lock = asyncio.Lock()
        self._heartbeat_task: asyncio.Task[None] | None = None

    @property
    def number(self) -> int | None:
        """The number of the living session, or None."""
        return self._number

    async def ensure_open(self) -> int:
        """Return the number of the living session, which is created if there is none.

        Raises `StoreUnavailable` after the deadline. A session whose answer was lost has no keys and ends by itself.
        """
        async with self._open_lock:
            if self._number is None:
                request = proto.CreateSessionRequest(
                    shard=self._shard.number, session_timeout_ms=self._timeout_ms, client_identity=self._identity
                )
                metadata = self._cluster.channels.metadata()

                async def attempt(stubs: list[OxiaClientStub]) -> int:
                    answer = await stubs[0].CreateSession(request, metadata=metadata)
                    return int(answer.session_id)

                number = await self._cluster.call_leaders([self._shard], attempt, self._seconds)
                self._number = number
                self._heartbeat_task = asyncio.get_running_loop().create_task(self._keep_alive(number))
            return self._number

    def forget(self, number: int) -> None:
        """Take note that the server has ended this session: its keys are gone."""
        if self._number == number:
            self._number = None
            if self._heartbeat_task is not None:
                self._heartbeat_task.cancel()

    async def close(self, seconds: float) -> None:
        """End the session, so that its keys disappear now.

        If Oxia does not answer within `seconds`, they disappear after the session's timeout.
        """
        number, self._number = self._number, None
        if self._heartbeat_task is not None:
            self._heartbeat_task.cancel()
        if number is None or self._shard.is_gone:
            return
        request = proto.CloseSessionRequest(shard=self._shard.number, session_id=number)
        metadata = self._cluster.channels.metadata()

        async def attempt(stubs: list[OxiaClientStub]) -> None:
            try:
                await stubs[0].CloseSession(request, metadata=metadata)
            except AioRpcError as error:
                if not is_session_lost(error):
                    raise

        try:
            await self._cluster.call_leaders([self._shard], attempt, seconds)
        except StoreUnavailable:
            pass

    async def _keep_alive(self, number: int) -> None:
        interval = self._timeout_ms / 1000 / _HEARTBEATS
        request = proto.SessionHeartbeat(shard=self._shard.number, session_id=number)

        async def attempt(stubs: list[OxiaClientStub]) -> bool:
            try:
                await stubs[0].KeepAlive(request, metadata=self._cluster.channels.metadata())
            except AioRpcError as error:
                if is_session_lost(error):
                    return False
                raise
            return True

        pause = interval
        while True:
            await asyncio.sleep(pause)
            try:
                if not await self._cluster.call_leaders([self._shard], attempt, interval):
                    self._number = None if self._number == number else self._number
                    return
                pause = interval
            except StoreUnavailable:
                if self._shard.is_gone:
                    return
                pause = PAUSE_SECONDS_MIN  # the call has waited for a whole interval already
