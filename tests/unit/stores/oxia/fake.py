"""An Oxia in this process that speaks its protocol, and hangs, forgets and refuses when it is told to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio

from llog.stores.oxia.proto import client_pb2 as proto
from llog.stores.oxia.proto.client_pb2_grpc import OxiaClientServicer, add_OxiaClientServicer_to_server

NOT_LEADER = "oxia: node is not leader"


class FakeShard:
    """The data of one shard, which all nodes share."""

    def __init__(self) -> None:
        self.records: dict[str, proto.GetResponse] = {}
        self.version = -1
        self.offset = -1
        self.sessions: set[int] = set()
        self.batches: list[proto.NotificationBatch] = []
        self.requests: list[proto.WriteRequest] = []
        """Those that came from callers, not the echoes that open streams."""
        self.changed = asyncio.Condition()

    async def apply(self, request: proto.WriteRequest) -> proto.WriteResponse:
        response = proto.WriteResponse()
        self.offset += 1
        batch = proto.NotificationBatch(offset=self.offset)
        for put in request.puts:
            response.puts.append(self._put(put, batch))
        for delete in request.deletes:
            found = self.records.get(delete.key)
            status = proto.Status.OK if found else proto.Status.KEY_NOT_FOUND
            if delete.HasField("expected_version_id") and (
                found is None or found.version.version_id != delete.expected_version_id
            ):
                status = proto.Status.UNEXPECTED_VERSION_ID
            if status == proto.Status.OK:
                del self.records[delete.key]
                _note(batch, delete.key, proto.NotificationType.KEY_DELETED)
            response.deletes.append(proto.DeleteResponse(status=status))
        for each in request.delete_ranges:
            for key in [key for key in self.records if each.start_inclusive <= key < each.end_exclusive]:
                del self.records[key]
            _note(batch, each.start_inclusive, proto.NotificationType.KEY_RANGE_DELETED)
            response.delete_ranges.append(proto.DeleteRangeResponse(status=proto.Status.OK))
        async with self.changed:
            self.batches.append(batch)
            self.changed.notify_all()
        return response

    def _put(self, put: proto.PutRequest, batch: proto.NotificationBatch) -> proto.PutResponse:
        found = self.records.get(put.key)
        current = found.version.version_id if found else -1
        if put.HasField("expected_version_id") and put.expected_version_id != current:
            return proto.PutResponse(status=proto.Status.UNEXPECTED_VERSION_ID)
        if put.HasField("session_id") and put.session_id not in self.sessions:
            return proto.PutResponse(status=proto.Status.SESSION_DOES_NOT_EXIST)
        self.version += 1
        version = proto.Version(version_id=self.version)
        self.records[put.key] = proto.GetResponse(key=put.key, value=put.value, version=version)
        _note(batch, put.key, proto.NotificationType.KEY_MODIFIED, self.version)
        return proto.PutResponse(status=proto.Status.OK, version=version)


class FakeNode(OxiaClientServicer):
    """One server. Whatever is asked while it hangs is not answered before it wakes."""

    def __init__(self, cluster: FakeOxia) -> None:
        self.address = ""
        self.awake = asyncio.Event()
        self.awake.set()
        self.loses_answers = False
        """Writes after the one that opens a stream are applied, and the stream breaks instead of answering."""
        self.streams_ignored = 0
        """How many of the next write streams are opened and never answered."""
        self.swallows = False
        """Writes and notifications after the first of a stream are swallowed; everything else is answered."""
        self.headers: list[dict[str, str]] = []
        self.peers: set[str] = set()
        """The other ends of all connections that there were."""
        self._cluster = cluster

    def hang(self) -> None:
        self.awake.clear()

    async def _begin(self, context: Any) -> None:
        self.headers.append(dict(context.invocation_metadata()))
        self.peers.add(context.peer())
        await self.awake.wait()
        if self._cluster.token and self.headers[-1].get("authorization") != f"Bearer {self._cluster.token}":
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "token is invalid")

    async def _leading_shard(self, number: int, context: Any) -> FakeShard:
        await self._begin(context)
        if self._cluster.leaders.get(number) != self.address:
            await context.abort(grpc.StatusCode.UNKNOWN, NOT_LEADER)
        return self._cluster.shards[number]

    async def GetShardAssignments(self, request: proto.ShardAssignmentsRequest, context: Any) -> AsyncIterator[Any]:
        await self._begin(context)
        if request.namespace != "default":
            await context.abort(grpc.StatusCode.UNKNOWN, "oxia: namespace not found")
        while True:
            said = self._cluster.said
            yield self._cluster.assignments()
            async with self._cluster.changed:
                await self._cluster.changed.wait_for(lambda said=said: self._cluster.said != said)  # type: ignore[misc]
            await self.awake.wait()

    async def WriteStream(self, requests: AsyncIterator[proto.WriteRequest], context: Any) -> AsyncIterator[Any]:
        number = int(dict(context.invocation_metadata())["shard-id"])
        shard = await self._leading_shard(number, context)
        if self.streams_ignored:
            self.streams_ignored -= 1
            await asyncio.Event().wait()
        is_first = True
        async for request in requests:
            await self.awake.wait()
            if self._cluster.leaders.get(number) != self.address:
                await context.abort(grpc.StatusCode.UNKNOWN, NOT_LEADER)
            if not is_first:
                shard.requests.append(request)
            response = await shard.apply(request)
            if self.swallows and not is_first:
                await asyncio.sleep(3600)
            if self.loses_answers and not is_first:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "connection reset")
            is_first = False
            yield response

    async def Read(self, request: proto.ReadRequest, context: Any) -> AsyncIterator[Any]:
        shard = await self._leading_shard(request.shard, context)
        self._cluster.reads.append(request)
        yield proto.ReadResponse(gets=[_look_up(shard, get) for get in request.gets])

    async def RangeScan(self, request: proto.RangeScanRequest, context: Any) -> AsyncIterator[Any]:
        shard = await self._leading_shard(request.shard, context)
        for key in _between(shard, request):
            yield proto.RangeScanResponse(records=[shard.records[key]])

    async def List(self, request: proto.ListRequest, context: Any) -> AsyncIterator[Any]:
        shard = await self._leading_shard(request.shard, context)
        yield proto.ListResponse(keys=_between(shard, request))

    async def GetNotifications(self, request: proto.NotificationsRequest, context: Any) -> AsyncIterator[Any]:
        shard = await self._leading_shard(request.shard, context)
        position = shard.offset
        if request.HasField("start_offset_exclusive"):
            position = request.start_offset_exclusive
        else:
            yield proto.NotificationBatch(offset=position)
        while True:
            async with shard.changed:
                await shard.changed.wait_for(lambda: shard.offset > position)  # noqa: B023
            await self.awake.wait()
            if self.swallows:
                await asyncio.sleep(3600)
            for batch in shard.batches[position + 1 :]:
                yield batch
                position = batch.offset

    async def CreateSession(self, request: proto.CreateSessionRequest, context: Any) -> Any:
        shard = await self._leading_shard(request.shard, context)
        self._cluster.sessions_opened += 1
        shard.sessions.add(self._cluster.sessions_opened)
        return proto.CreateSessionResponse(session_id=self._cluster.sessions_opened)

    async def KeepAlive(self, request: proto.SessionHeartbeat, context: Any) -> Any:
        shard = await self._leading_shard(request.shard, context)
        if request.session_id not in shard.sessions:
            await context.abort(grpc.StatusCode.UNKNOWN, "oxia: session not found")
        return proto.KeepAliveResponse()

    async def CloseSession(self, request: proto.CloseSessionRequest, context: Any) -> Any:
        shard = await self._leading_shard(request.shard, context)
        shard.sessions.discard(request.session_id)
        return proto.CloseSessionResponse()


class FakeOxia:
    def __init__(self, shards: int, nodes: int, token: str) -> None:
        self.token = token
        self.shards = {number: FakeShard() for number in range(shards)}
        self.nodes = [FakeNode(self) for _ in range(nodes)]
        self.leaders: dict[int, str] = {}
        self.said = 0
        self.changed = asyncio.Condition()
        self.sessions_opened = 0
        self.reads: list[proto.ReadRequest] = []

    @property
    def addresses(self) -> list[str]:
        return [node.address for node in self.nodes]

    @property
    def applied(self) -> list[proto.WriteRequest]:
        return [request for shard in self.shards.values() for request in shard.requests]

    async def lead(self, leaders: dict[int, str]) -> None:
        """Change the leaders, and say so to all who listen."""
        self.leaders |= leaders
        self.said += 1
        async with self.changed:
            self.changed.notify_all()

    def assignments(self) -> proto.ShardAssignments:
        size = (1 << 32) // len(self.shards)
        assigned = [
            proto.ShardAssignment(
                shard=number,
                leader=self.leaders[number],
                int32_hash_range=proto.Int32HashRange(
                    min_hash_inclusive=place * size, max_hash_inclusive=(place + 1) * size - 1
                ),
            )
            for place, number in enumerate(self.shards)
        ]
        return proto.ShardAssignments(namespaces={"default": proto.NamespaceShardsAssignment(assignments=assigned)})


@asynccontextmanager
async def fake_oxia(
    *, shards: int = 1, nodes: int = 1, token: str = "", credentials: grpc.ServerCredentials | None = None
) -> AsyncIterator[FakeOxia]:
    """The first node leads every shard."""
    cluster = FakeOxia(shards, nodes, token)
    servers = []
    for node in cluster.nodes:
        server = grpc.aio.server()
        add_OxiaClientServicer_to_server(node, server)
        place = "127.0.0.1:0"
        port = server.add_secure_port(place, credentials) if credentials else server.add_insecure_port(place)
        node.address = f"127.0.0.1:{port}"
        await server.start()
        servers.append(server)
    cluster.leaders = dict.fromkeys(cluster.shards, cluster.nodes[0].address)
    try:
        yield cluster
    finally:
        for node in cluster.nodes:
            node.awake.set()
        await asyncio.gather(*(server.stop(None) for server in servers))


def _between(shard: FakeShard, request: Any) -> list[str]:
    return sorted(key for key in shard.records if request.start_inclusive <= key < request.end_exclusive)


def _look_up(shard: FakeShard, get: proto.GetRequest) -> proto.GetResponse:
    key: str | None = get.key
    if get.comparison_type == proto.KeyComparisonType.FLOOR:
        key = max((each for each in shard.records if each <= get.key), default=None)
    elif get.comparison_type == proto.KeyComparisonType.CEILING:
        key = min((each for each in shard.records if each >= get.key), default=None)
    elif get.comparison_type == proto.KeyComparisonType.LOWER:
        # As in hierarchical sorting, a key with a slash is above all without one.
        key = max((each for each in shard.records if each < get.key and "/" not in each), default=None)
    found = None if key is None else shard.records.get(key)
    return found or proto.GetResponse(status=proto.Status.KEY_NOT_FOUND)


def _note(batch: proto.NotificationBatch, key: str, kind: Any, version: int | None = None) -> None:
    batch.notifications.append(
        proto.NotificationEntry(key=key, value=proto.Notification(type=kind, version_id=version))
    )
