"""Lookups and ranges.

Lookups that begin in one turn of the event loop share a request. Ranges over several shards are merged as they arrive.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any, Final

from grpc.aio import EOF

from llog.errors import LlogError
from llog.stores.meta import MetaEntry
from llog.stores.oxia.cluster import Cluster, Shard
from llog.stores.oxia.keys import decode
from llog.stores.oxia.proto import client_pb2 as proto
from llog.stores.oxia.proto.client_pb2_grpc import OxiaClientStub
from llog.stores.oxia.refusals import store_closed

GETS_MAX: Final = 10_000
"""Lookups in one request."""

_Call = tuple[Sequence[proto.GetRequest], asyncio.Future[list[proto.GetResponse]]]


class Lookups:
    """The lookups of one shard."""

    def __init__(self, cluster: Cluster, shard: Shard, seconds: float) -> None:
        self._cluster = cluster
        self._shard = shard
        self._seconds = seconds
        self._waiting: list[_Call] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def submit(self, gets: Sequence[proto.GetRequest]) -> asyncio.Future[list[proto.GetResponse]]:
        """Return the future of the answers, in the order of the requests."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._send)
        future: asyncio.Future[list[proto.GetResponse]] = loop.create_future()
        self._waiting.append((gets, future))
        return future

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _send(self) -> None:
        calls, self._waiting = self._waiting, []
        batch: list[_Call] = []
        size = 0
        for call in calls:
            if batch and size + len(call[0]) > GETS_MAX:
                self._begin(batch)
                batch, size = [], 0
            batch.append(call)
            size += len(call[0])
        self._begin(batch)

    def _begin(self, calls: list[_Call]) -> None:
        task = asyncio.get_running_loop().create_task(self._answer(calls))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, calls: list[_Call]) -> None:
        request = proto.ReadRequest(shard=self._shard.number, gets=[get for gets, _ in calls for get in gets])
        metadata = self._cluster.channels.metadata()

        async def attempt(stubs: list[OxiaClientStub]) -> list[proto.GetResponse]:
            found: list[proto.GetResponse] = []
            async for answer in _messages(stubs[0].Read(request, metadata=metadata)):
                found.extend(answer.gets)
            return found

        try:
            answers = await self._cluster.call_leaders([self._shard], attempt, self._seconds)
        except LlogError as error:
            _fail(calls, error)
            return
        except asyncio.CancelledError:
            _fail(calls, store_closed())
            raise
        position = 0
        for gets, future in calls:
            if not future.done():
                future.set_result(answers[position : position + len(gets)])
            position += len(gets)


def _fail(calls: Iterable[_Call], error: LlogError) -> None:
    for _, future in calls:
        if not future.done():
            future.set_exception(type(error)(str(error)))


def entry_of(answer: proto.GetResponse, requested: str) -> MetaEntry | None:
    """Return the entry that was found, or None if its key is not the log's.

    The answer to an exact match does not repeat the requested key.
    """
    if answer.status != proto.Status.OK:
        return None
    key = decode(answer.key if answer.HasField("key") else requested)
    return None if key is None else MetaEntry(key, answer.value, answer.version.version_id)


async def scan_entries(
    cluster: Cluster, shards: Sequence[Shard], start: str, end: str, limit: int, seconds: float
) -> list[MetaEntry]:
    """Return the first entries of the stored keys [start, end) in order, at most `limit`.

    The entries of one shard are a snapshot.
    """
    metadata = cluster.channels.metadata()

    def call(stub: OxiaClientStub, shard: Shard) -> Any:
        request = proto.RangeScanRequest(shard=shard.number, start_inclusive=start, end_exclusive=end)
        return stub.RangeScan(request, metadata=metadata)

    def page(answer: Any) -> list[tuple[str, Any]]:
        return [(record.key, record) for record in answer.records]

    found = await _scan(cluster, shards, call, page, limit, seconds)
    return [entry for key, record in found if (entry := entry_of(record, key)) is not None]


async def scan_keys(
    cluster: Cluster, shards: Sequence[Shard], start: str, end: str, limit: int, seconds: float
) -> list[str]:
    """Return the keys of the entries that `scan_entries` returns."""
    metadata = cluster.channels.metadata()

    def call(stub: OxiaClientStub, shard: Shard) -> Any:
        request = proto.ListRequest(shard=shard.number, start_inclusive=start, end_exclusive=end)
        return stub.List(request, metadata=metadata)

    def page(answer: Any) -> list[tuple[str, Any]]:
        return [(key, None) for key in answer.keys]

    found = await _scan(cluster, shards, call, page, limit, seconds)
    return [key for stored, _ in found if (key := decode(stored)) is not None]


async def _scan(
    cluster: Cluster,
    shards: Sequence[Shard],
    call: Callable[[OxiaClientStub, Shard], Any],
    page: Callable[[Any], list[tuple[str, Any]]],
    limit: int,
    seconds: float,
) -> list[tuple[str, Any]]:
    async def attempt(stubs: list[OxiaClientStub]) -> list[tuple[str, Any]]:
        calls = [call(stub, shard) for stub, shard in zip(stubs, shards, strict=True)]
        try:
            return await _merge([_pages(each, page) for each in calls], limit)
        finally:
            for each in calls:
                each.cancel()  # a request has no limit: Oxia would go on to the end of the range

    return await cluster.call_leaders(shards, attempt, seconds)


async def _merge(streams: list[AsyncIterator[list[tuple[str, Any]]]], limit: int) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    if len(streams) == 1:
        async for rows in streams[0]:
            found += rows
            if len(found) >= limit:
                break
        return found[:limit]
    pages = await asyncio.gather(*(anext(stream, []) for stream in streams))
    heap = [(rows[0][0], number) for number, rows in enumerate(pages) if rows]
    positions = [0] * len(streams)
    heapq.heapify(heap)
    while heap and len(found) < limit:
        _, number = heap[0]
        found.append(pages[number][positions[number]])
        positions[number] += 1
        if positions[number] == len(pages[number]):
            pages[number], positions[number] = await anext(streams[number], []), 0
        if pages[number]:
            heapq.heapreplace(heap, (pages[number][positions[number]][0], number))
        else:
            heapq.heappop(heap)
    return found


async def _pages(call: Any, page: Callable[[Any], list[tuple[str, Any]]]) -> AsyncIterator[list[tuple[str, Any]]]:
    async for answer in _messages(call):
        if rows := page(answer):
            yield rows


async def _messages(call: Any) -> AsyncIterator[Any]:
    """Yield the answers of a call, and cancel the call when the iteration ends."""
    try:
        while (answer := await call.read()) is not EOF:
            yield answer
    finally:
        call.cancel()
