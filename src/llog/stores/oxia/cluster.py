"""Which server leads which shard, and calls to the leaders of shards.

The cluster follows the shard assignments of one server at a time. When calls wait, it asks the next server, because the
one it follows may hang, or be cut off from the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Final, TypeVar

from grpc.aio import EOF, AioRpcError

from llog.errors import LlogError, StoreUnavailable
from llog.stores.oxia.channels import Channels
from llog.stores.oxia.proto import client_pb2 as proto
from llog.stores.oxia.proto.client_pb2_grpc import OxiaClientStub
from llog.stores.oxia.refusals import no_shard, permanent_error, unavailable

PATIENCE_SECONDS: Final = 0.25
"""How long a call waits before the cluster asks whether another server leads the shard."""
PAUSE_SECONDS_MIN: Final = 0.05
PAUSE_SECONDS_MAX: Final = 1.0
_FIRST_ANSWER_SECONDS: Final = 2.0
_ROTATION_SECONDS: Final = 0.5
"""How long a server is followed at least before another one is asked."""

R = TypeVar("R")


class Shard:
    """One shard, as this process knows it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.leader = ""
        """The leader's address, or "" while no leader is known."""
        self.server = ""
        """The address of the last known leader."""
        self.generation = 0
        """Grows with every sign that another leader, or the same leader in another term, may be in charge."""
        self.answers = 0
        """The number of reads that were answered."""
        self.is_gone = False
        """Whether the namespace no longer has this shard."""
        self.running: set[asyncio.Task[object]] = set()
        """Tasks that wait for the leader, and are cancelled when another leader is named."""
        self._changed = asyncio.Event()

    def assign(self, leader: str) -> None:
        """Take note of the leader, or of "" if there is none now."""
        if leader == self.leader:
            return
        self.leader = leader
        self.generation += 1
        if leader and leader != self.server:
            if self.server:
                self._cancel_tasks()
            self.server = leader
        self._changed.set()
        self._changed = asyncio.Event()

    def remove(self) -> None:
        """Take note that the namespace no longer has this shard."""
        self.is_gone = True
        self.generation += 1
        self._cancel_tasks()
        self._changed.set()

    def note_interruption(self) -> None:
        """Take note that the connection to the leader broke: another process may answer next."""
        self.generation += 1

    async def wait_for_leader(self) -> str:
        """Return the leader's address once a leader is known."""
        while not self.leader:
            self.check()
            await self._changed.wait()
        self.check()
        return self.leader

    async def pause(self, seconds: float) -> None:
        """Wait, but only until another leader is named."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    def check(self) -> None:
        """Raise `StoreUnavailable` if the namespace no longer has this shard."""
        if self.is_gone:
            raise StoreUnavailable(f"shard {self.number} of Oxia was replaced by others: try again")

    def _cancel_tasks(self) -> None:
        for task in list(self.running):
            task.cancel()


class Cluster:
    """The servers of one namespace. Belongs to one event loop."""

    def __init__(self, servers: Sequence[str], namespace: str, channels: Channels) -> None:
        self.namespace = namespace
        self.channels = channels
        self.shards: dict[int, Shard] = {}
        self._bounds: list[tuple[int, int, Shard]] = []
        self._servers = tuple(servers)
        self._turn = 0
        self._known = asyncio.Event()
        self._refusal: BaseException | None = None
        self._permanent_error: LlogError | None = None
        self._asked_s = 0.0
        self._waiting: asyncio.Task[object] | None = None
        self.on_change: Callable[[], None] = lambda: None
        """Called after the set of shards has changed."""
        self._following = asyncio.get_running_loop().create_task(self._follow())

    async def wait_until_known(self, seconds: float) -> None:
        """Return once the shards are known.

        Raises at once an error that waiting cannot cure, and `StoreUnavailable` after `seconds`.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._known.wait()
        if not self.shards:
            raise self._permanent_error or unavailable(f"no Oxia answers at {','.join(self._servers)}", self._refusal)

    def shard_of(self, number: int) -> Shard:
        """Return the shard whose range includes this hash."""
        for low, high, shard in self._bounds:
            if low <= number <= high:
                return shard
        raise no_shard(number)

    def suspect(self, address: str) -> None:
        """Take note that a call to this server waits or failed: ask the next server who leads, unless one was asked
        within _ROTATION_SECONDS.
        """
        self.channels.replace_if_silent(address)
        now = asyncio.get_running_loop().time()
        if now - self._asked_s >= _ROTATION_SECONDS and self._waiting is not None:
            self._asked_s = now
            self._waiting.cancel()

    async def call_leaders(
        self, shards: Sequence[Shard], attempt: Callable[[list[OxiaClientStub]], Awaitable[R]], seconds: float
    ) -> R:
        """Return the answer of `attempt`, which gets a stub of each shard's leader and must be safe to repeat.

        It is repeated until an answer comes from servers that lead the shards from its beginning to its end. Raises
        `StoreUnavailable` after `seconds`.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        refusal: BaseException | None = None
        pause = PAUSE_SECONDS_MIN
        try:
            async with asyncio.timeout_at(deadline):
                while True:
                    leaders = [await shard.wait_for_leader() for shard in shards]
                    generations = [shard.generation for shard in shards]
                    task = asyncio.ensure_future(attempt([self.channels.stub(leader) for leader in leaders]))
                    try:
                        answer = await self._await_answer(task, shards, leaders)
                    except AioRpcError as error:
                        refusal = error
                        if permanent := permanent_error(error, ",".join(leaders), self.namespace):
                            raise StoreUnavailable(str(permanent)) from error
                        for leader in leaders:
                            self.suspect(leader)
                        await shards[0].pause(pause)
                        pause = min(pause * 2, PAUSE_SECONDS_MAX)
                        continue
                    except _LeaderMoved:
                        continue
                    if generations == [shard.generation for shard in shards]:
                        for shard, leader in zip(shards, leaders, strict=True):
                            self.channels.note_answer(leader)
                            shard.answers += 1
                        return answer
        except TimeoutError:
            numbers = ", ".join(str(shard.number) for shard in shards)
            raise unavailable(f"Oxia's shard {numbers} did not answer within {seconds:g} s", refusal) from None

    async def _await_answer(self, task: asyncio.Future[R], shards: Sequence[Shard], leaders: Sequence[str]) -> R:
        assert isinstance(task, asyncio.Task)
        for shard in shards:
            shard.running.add(task)
        try:
            with self.suspect_while_waiting(leaders):
                answer: R = await task
                return answer
        except asyncio.CancelledError:
            current = asyncio.current_task()
            assert current is not None
            if current.cancelling():
                task.cancel()
                raise
            raise _LeaderMoved from None  # cancelled by the shard, or with the connection
        finally:
            for shard in shards:
                shard.running.discard(task)

    @contextmanager
    def suspect_while_waiting(self, leaders: Sequence[str]) -> Iterator[None]:
        """Suspect these servers every second while the block waits for them."""
        loop = asyncio.get_running_loop()
        timer: asyncio.TimerHandle

        def suspect() -> None:
            nonlocal timer
            for leader in leaders:
                self.suspect(leader)
            timer = loop.call_later(PAUSE_SECONDS_MAX, suspect)

        timer = loop.call_later(PATIENCE_SECONDS, suspect)
        try:
            yield
        finally:
            timer.cancel()

    async def close(self) -> None:
        self._following.cancel()
        await asyncio.wait([self._following])

    async def _follow(self) -> None:
        pause = PAUSE_SECONDS_MIN
        while True:
            address = self._next_server()
            try:
                await self._follow_server(address)
                pause = PAUSE_SECONDS_MIN
            except (AioRpcError, TimeoutError, EOFError, LlogError) as error:
                self._refusal = error
                permanent = error if isinstance(error, LlogError) else permanent_error(error, address, self.namespace)
                if permanent is not None and not self._known.is_set():
                    self._permanent_error = permanent
                    self._known.set()
            await asyncio.sleep(pause)
            pause = min(pause * 2, PAUSE_SECONDS_MAX)

    async def _follow_server(self, address: str) -> None:
        """Apply the assignments of one server. Returns when `suspect` asks for another server, and raises if the
        stream ends otherwise.
        """
        request = proto.ShardAssignmentsRequest(namespace=self.namespace)
        self._asked_s = asyncio.get_running_loop().time()
        call = self.channels.stub(address).GetShardAssignments(request, metadata=self.channels.metadata())
        seconds: float | None = _FIRST_ANSWER_SECONDS
        try:
            while True:
                self._waiting = asyncio.ensure_future(call.read())
                done, _ = await asyncio.wait([self._waiting], timeout=seconds)
                if not done:
                    raise TimeoutError
                if self._waiting.cancelled():
                    return
                answer = self._waiting.result()
                if answer is EOF:
                    raise EOFError
                assert isinstance(answer, proto.ShardAssignments)
                self.channels.note_answer(address)
                self._apply_assignments(answer.namespaces[self.namespace].assignments)
                seconds = None
        finally:
            self._waiting = None
            call.cancel()

    def _apply_assignments(self, assignments: Iterable[proto.ShardAssignment]) -> None:
        before = set(self.shards)
        bounds = []
        for each in assignments:
            shard = self.shards.get(each.shard)
            if shard is None:
                shard = self.shards[each.shard] = Shard(each.shard)
            shard.assign(each.leader)
            covered = each.int32_hash_range
            bounds.append((covered.min_hash_inclusive, covered.max_hash_inclusive, shard))
        if not bounds:
            return
        self._bounds = bounds
        for number in before - {shard.number for _, _, shard in bounds}:
            self.shards.pop(number).remove()
        self._permanent_error = None
        self._known.set()
        if set(self.shards) != before:
            self.on_change()

    def _next_server(self) -> str:
        known = dict.fromkeys(chain(self._servers, (shard.server for shard in self.shards.values() if shard.server)))
        turn, self._turn = self._turn, self._turn + 1
        return list(known)[turn % len(known)]


class _LeaderMoved(Exception):
    """Another server leads the shard, or the connection was replaced: call again."""
