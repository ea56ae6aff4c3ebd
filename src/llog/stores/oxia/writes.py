"""The writes of one shard: one stream to its leader, with requests in the order of the calls.

A stream is established once the leader has acknowledged a write to the echo key on it. Callers' requests are sent only
then. So a request that was not sent has certainly not happened and goes to the next stream, and one that was sent and
not answered may have happened.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from typing import Any, Final

from grpc.aio import EOF, AioRpcError

from llog.errors import LlogError, OutcomeUnknown, StoreUnavailable
from llog.stores.oxia.cluster import PATIENCE_SECONDS, PAUSE_SECONDS_MAX, PAUSE_SECONDS_MIN, Cluster, Shard
from llog.stores.oxia.keys import ECHO
from llog.stores.oxia.proto import client_pb2 as proto
from llog.stores.oxia.refusals import describe, store_closed, unavailable

REQUEST_BYTES_MAX: Final = 16 << 20
"""Oxia appends a request to its log as one entry, which must fit into a segment of 64 MiB."""
REQUESTS_SENT_MAX: Final = 256
"""Requests without an answer on one stream. Further calls wait, and are joined into requests."""
WAITING_BYTES_MAX: Final = 256 << 20
ECHO_SECONDS: Final = 5.0
"""How long a new stream may take to answer its first write before another one is opened."""

_KINDS: Final = ("puts", "deletes", "delete_ranges")
"""The kinds of operations, in the order in which Oxia applies them within a request."""


class Request:
    """One request to the server: calls whose operations Oxia applies in the order of the calls."""

    def __init__(self, shard: int) -> None:
        self.message = proto.WriteRequest()
        self.size = 0
        self.timer: asyncio.TimerHandle | None = None
        self._shard = shard
        self._rank = 0
        self._calls: list[tuple[str, int, asyncio.Future[list[Any]]]] = []

    def add(self, call: proto.WriteRequest, size: int) -> asyncio.Future[list[Any]] | None:
        """Return the future of the call's answers, or None if the call must go into a later request.

        All operations of a call are of one kind.
        """
        kind = _kind(call)
        rank = _KINDS.index(kind)
        if rank < self._rank or (self._calls and self.size + size > REQUEST_BYTES_MAX):
            return None
        self._rank = rank
        self.size += size
        future: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self._calls.append((kind, len(getattr(call, kind)), future))
        if len(self._calls) == 1:
            self.message = call  # a large call is mostly alone, and not copied
            self.message.shard = self._shard
        else:
            self.message.MergeFrom(call)
        return future

    def answer(self, response: proto.WriteResponse) -> None:
        self._stop_timer()
        answers = {kind: list(getattr(response, kind)) for kind in _KINDS}
        positions = dict.fromkeys(_KINDS, 0)
        for kind, count, future in self._calls:
            first, positions[kind] = positions[kind], positions[kind] + count
            if not future.done():
                future.set_result(answers[kind][first : first + count])

    def fail(self, error: LlogError) -> None:
        self._stop_timer()
        for _, _, future in self._calls:
            if not future.done():
                future.set_exception(type(error)(str(error)))  # a copy for each caller, which adds its own traceback

    def _stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()


class Writes:
    """The writes of one shard."""

    def __init__(self, cluster: Cluster, shard: Shard, seconds: float) -> None:
        self.shard = shard
        self._cluster = cluster
        self._seconds = seconds
        self._waiting: deque[Request] = deque()
        self._waiting_bytes = 0
        self._sent: deque[Request] = deque()
        self._wanted = asyncio.Event()
        self._seeking = 0
        """The number of callers that wait for a stream without having a write."""
        self._established = asyncio.Event()
        self._answered = asyncio.Event()
        self._refusal: BaseException | None = None
        self._running: asyncio.Task[None] | None = None
        self._serving: asyncio.Task[None] | None = None
        self._is_closed = False

    def submit(self, call: proto.WriteRequest, size: int | None = None) -> list[asyncio.Future[list[Any]]]:
        """Queue the operations of a call, all of one kind, and return the futures of their answers, in order.

        A call that does not fit into one request has several futures. The message belongs to the request from here on.
        `size` is roughly its bytes: pass it for a large call, because protobuf encodes the message to find out.
        """
        self.shard.check()
        if size is None:
            size = call.ByteSize()
        if self._waiting_bytes + size > WAITING_BYTES_MAX and self._waiting:
            raise StoreUnavailable(
                f"{self._waiting_bytes} bytes already wait for Oxia's shard {self.shard.number}: try again later"
            )
        self._start()
        if size <= REQUEST_BYTES_MAX:
            return [self._queue(call, size)]
        return [self._queue(part, part.ByteSize()) for part in _split(call)]

    @property
    def is_established(self) -> bool:
        return self._established.is_set() and not self.shard.is_gone

    async def wait_until_established(self) -> None:
        """Return once a stream is established; raise `StoreUnavailable` after the deadline."""
        self._start()
        self._seeking += 1
        self._wanted.set()
        try:
            async with asyncio.timeout(self._seconds):
                await self._established.wait()
        except TimeoutError:
            raise self._unavailable() from None
        finally:
            self._seeking -= 1
        self.shard.check()

    async def echo(self) -> int:
        """Write to the echo key, and return its new version."""
        (future,) = self.submit(proto.WriteRequest(puts=[proto.PutRequest(key=ECHO)]))
        (answer,) = await future
        return int(answer.version.version_id)

    async def close(self) -> None:
        """End the stream, and fail all requests that wait."""
        self._is_closed = True
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])
        self._fail_waiting(store_closed())

    def _start(self) -> None:
        if self._is_closed:
            raise store_closed()
        if self._running is None:
            self._running = asyncio.get_running_loop().create_task(self._run())

    def _queue(self, call: proto.WriteRequest, size: int) -> asyncio.Future[list[Any]]:
        future = self._waiting[-1].add(call, size) if self._waiting else None
        if future is None:
            request = Request(self.shard.number)
            request.timer = asyncio.get_running_loop().call_later(self._seconds, self._expire, request)
            self._waiting.append(request)
            future = request.add(call, size)
            assert future is not None
        self._waiting_bytes += size
        self._wanted.set()
        return future

    def _expire(self, request: Request) -> None:
        if request in self._waiting:
            self._waiting.remove(request)
            self._waiting_bytes -= request.size
            request.fail(self._unavailable())
        else:
            request.fail(self._unknown(None))
            if self._serving is not None:
                self._serving.cancel()  # a stream that does not answer one request may answer none

    async def _run(self) -> None:
        pause = PAUSE_SECONDS_MIN
        while not self.shard.is_gone:
            await self._wanted.wait()
            leader = ""
            try:
                leader = await self.shard.wait_for_leader()
                await self._stream(leader)
                pause = PAUSE_SECONDS_MIN
            except (AioRpcError, TimeoutError, EOFError, LlogError) as error:
                self._refusal = error
            if leader:
                self._cluster.suspect(leader)
            if not self._waiting and not self._seeking:
                self._wanted.clear()
            await self.shard.pause(pause)
            pause = min(pause * 2, PAUSE_SECONDS_MAX)
        self._established.set()  # callers that wait for a stream then find that the shard is gone
        self._fail_waiting(StoreUnavailable(f"shard {self.shard.number} of Oxia was replaced by others: try again"))

    async def _stream(self, leader: str) -> None:
        """Run one stream from its first write to its end."""
        metadata = self._cluster.channels.metadata(
            ("namespace", self._cluster.namespace), ("shard-id", str(self.shard.number))
        )
        call = self._cluster.channels.stub(leader).WriteStream(metadata=metadata)
        task = self._serving = asyncio.ensure_future(self._serve(call, leader))
        self.shard.running.add(task)
        try:
            await asyncio.wait([task])
            if not task.cancelled():
                task.result()
        finally:
            self._serving = None
            self.shard.running.discard(task)
            task.cancel()
            call.cancel()
            if self._established.is_set():
                self._established.clear()
                self.shard.note_interruption()
            lost, self._sent = self._sent, deque()
            for request in lost:
                request.fail(self._unknown(None if task.cancelled() or not task.done() else task.exception()))

    async def _serve(self, call: Any, leader: str) -> None:
        with self._cluster.suspect_while_waiting([leader]):
            async with asyncio.timeout(ECHO_SECONDS):
                await call.write(proto.WriteRequest(shard=self.shard.number, puts=[proto.PutRequest(key=ECHO)]))
                if await call.read() is EOF:
                    raise EOFError
        self._cluster.channels.note_answer(leader)
        self._established.set()
        sending = asyncio.ensure_future(self._send(call, leader))
        try:
            while (response := await call.read()) is not EOF:
                self._cluster.channels.note_answer(leader)
                self._sent.popleft().answer(response)
                self._answered.set()
            raise EOFError
        finally:
            sending.cancel()

    async def _send(self, call: Any, leader: str) -> None:
        """Send waiting requests as they come, until the stream ends."""
        while not call.done():
            if not self._waiting:
                self._wanted.clear()
                await self._wanted.wait()
            elif len(self._sent) >= REQUESTS_SENT_MAX:
                self._answered.clear()
                await self._answered.wait()
            else:
                request = self._waiting.popleft()
                self._waiting_bytes -= request.size
                if not self._sent:
                    asyncio.get_running_loop().call_later(
                        PATIENCE_SECONDS, self._suspect_if_unanswered, request, leader
                    )
                self._sent.append(request)
                try:
                    await call.write(request.message)
                except (AioRpcError, asyncio.InvalidStateError):
                    return  # the stream has ended, and `_serve`, which reads its answers, finds out why

    def _suspect_if_unanswered(self, oldest: Request, leader: str) -> None:
        """Suspect the leader if the request that was the oldest a moment ago is still unanswered."""
        if self._sent:
            if self._sent[0] is oldest:
                self._cluster.suspect(leader)
            asyncio.get_running_loop().call_later(PATIENCE_SECONDS, self._suspect_if_unanswered, self._sent[0], leader)

    def _fail_waiting(self, error: StoreUnavailable) -> None:
        waiting, self._waiting, self._waiting_bytes = self._waiting, deque(), 0
        for request in waiting:
            request.fail(error)

    def _unavailable(self) -> StoreUnavailable:
        return unavailable(
            f"Oxia's shard {self.shard.number} took no write within {self._seconds:g} s; nothing was changed",
            self._refusal,
        )

    def _unknown(self, error: BaseException | None) -> OutcomeUnknown:
        return OutcomeUnknown(
            f"Oxia's shard {self.shard.number} did not acknowledge a write ({describe(error)}): it may have happened; "
            "read to find out"
        )


def _kind(call: proto.WriteRequest) -> str:
    return next(kind for kind in _KINDS if getattr(call, kind))


def _split(call: proto.WriteRequest) -> Iterator[proto.WriteRequest]:
    """Yield the operations in order, in parts that each fit into one request."""
    kind = _kind(call)
    part, size = proto.WriteRequest(), 0
    for operation in getattr(call, kind):
        if size and size + operation.ByteSize() > REQUEST_BYTES_MAX:
            yield part
            part, size = proto.WriteRequest(), 0
        getattr(part, kind).append(operation)
        size += operation.ByteSize()
    yield part
