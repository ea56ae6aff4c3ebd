"""A bad network, the two servers behind it, and the blob store as a process sees it; `meta_store.py` has the metadata
store.

A call is a message that takes time, an effect at the server, and an answer that takes time. The message may never
arrive (`StoreUnavailable`), and the answer may get lost. Messages and answers travel on when the sender is dead or
stalled. A write may take effect even after its caller got `OutcomeUnknown`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

import msgspec

from llog.errors import LlogError, OutcomeUnknown, StoreUnavailable
from llog.sim.loop import SimLoop
from llog.sim.outcome import Trace
from llog.stores.blobs import BlobInfo, Buffer
from llog.stores.memory.blobs import MemoryBlobs, MemoryBlobStore
from llog.stores.memory.meta import MemoryMeta
from llog.stores.meta import partition_prefix

if TYPE_CHECKING:
    from llog.sim.meta_store import OldState

T = TypeVar("T")
Page = list[BlobInfo]
META: Final = "metadata"
BLOBS: Final = "blobs"
_LATE: Final = 0.3
"""The fraction of a late writer's writes that are late."""


class Faults(msgspec.Struct, kw_only=True):
    """How bad the network is: probabilities per call, delays in seconds."""

    unavailable: float = 0.0
    lost_answer: float = 0.0
    late_effect: float = 0.0
    throttled: float = 0.0
    delay: float = 0.01
    throttle_delay: float = 2.0
    late_writer: str = ""
    """A process whose writes may take up to `late_writer_delay` longer, so that others overtake it between its reads
    and its writes.
    """
    late_writer_delay: float = 4.0


class Watcher(Protocol):
    """Sees every change at the servers, in the order in which they happen."""

    def meta_put(self, key: str, old: bytes | None, new: bytes) -> None: ...

    def meta_removed(self, removed: Sequence[tuple[str, bytes]]) -> None: ...

    def blobs_removed(self, names: Sequence[str]) -> None: ...


class WatchedMeta(MemoryMeta):
    """The metadata server, which shows every change to the watcher. Versions count per partition, as in a sharded
    store.
    """

    def __init__(self) -> None:
        super().__init__()
        self.watcher: Watcher | None = None
        self._versions: dict[str, int] = {}

    def _next_version(self, key: str) -> int:
        shared = partition_prefix(key) or key
        self._versions[shared] = self._versions.get(shared, 0) + 1
        return self._versions[shared]

    def value(self, key: str) -> bytes | None:
        found = self._entries.get(key)
        return None if found is None else found.value

    def below(self, prefix: str) -> list[tuple[str, bytes]]:
        low, high = self._slice(prefix, prefix[:-1] + chr(ord(prefix[-1]) + 1))
        return [(key, self._entries[key].value) for key in self._keys[low:high]]

    def lose(self, key: str) -> None:
        """Remove the key as damage does, without showing it to the watcher."""
        super()._remove(key)

    def put_back(self, key: str, value: bytes) -> None:
        self._put(key, value, None, None)

    def _put(self, key: str, value: bytes, expected: int | None, session: int | None) -> int:
        old = self.value(key)
        version = super()._put(key, value, expected, session)
        if self.watcher is not None:
            self.watcher.meta_put(key, old, value)
        return version

    def _remove(self, key: str) -> None:
        removed = [(key, self._entries[key].value)]
        super()._remove(key)
        if self.watcher is not None:
            self.watcher.meta_removed(removed)

    def _delete_range(self, start: str, end: str) -> None:
        low, high = self._slice(start, end)
        removed = [(key, self._entries[key].value) for key in self._keys[low:high]]
        super()._delete_range(start, end)
        if self.watcher is not None:
            self.watcher.meta_removed(removed)


class WatchedBlobs(MemoryBlobStore):
    """A client of the blob server that shows its deletions to the watcher."""

    def __init__(self, server: MemoryBlobs, watcher: Watcher) -> None:
        super().__init__(server, uri="memory://sim")
        self._watcher = watcher

    async def delete_many(self, names: Sequence[str]) -> None:
        there = [name for name in names if name in self.server.blobs]
        await super().delete_many(names)
        self._watcher.blobs_removed(there)


class Network:
    """Carries calls to the servers and answers back."""

    def __init__(self, loop: SimLoop, source: random.Random, faults: Faults, trace: Trace) -> None:
        self.faults = faults
        self.failures: list[BaseException] = []
        """Errors of effects that no caller may meet: the watcher's findings."""
        self.actor = ""
        """The process whose call takes effect, or did last."""
        self.full: set[str] = set()
        """The stores that have no room now: they refuse writes that need room, and answer everything else."""
        self.old: dict[str, OldState] = {}
        """The state from which a former leader answers the reads of a role's processes, by role."""
        self.draw = source
        self.trace = trace
        self.loop = loop

    def draw_delay(self) -> float:
        """Return how long a message takes now."""
        faults, draw = self.faults, self.draw.random
        delay = faults.delay * draw()
        if draw() < faults.throttled:
            self.trace.count("throttled")
            delay += faults.throttle_delay * draw()
        return delay

    async def call(
        self,
        who: str,
        what: str,
        effect: Callable[[], Coroutine[Any, Any, T]],
        *,
        write: bool,
        fills: str | None = None,
        in_part: Callable[[], Coroutine[Any, Any, T]] | None = None,
    ) -> T:
        """Call the server. `fills` names the store that must have room for the effect.

        If the caller never learns the outcome, the effect may be `in_part` instead.
        """
        faults, draw, loop = self.faults, self.draw.random, self.loop
        arrival = self.draw_delay()
        if write and faults.late_writer and who.startswith(faults.late_writer + ".") and draw() < _LATE:
            arrival += faults.late_writer_delay * draw()
        if draw() < faults.unavailable:
            await asyncio.sleep(arrival)
            self.trace.add(f"{who} {what}: unavailable")
            raise StoreUnavailable("simulated: the store cannot be reached")
        answer: asyncio.Future[T] = loop.create_future()
        lost = draw() < faults.lost_answer
        late = write and draw() < faults.late_effect
        back = faults.delay * draw()

        def arrive() -> None:
            outcome = self._apply(who, what, in_part if in_part and (lost or late) else effect, fills)
            if not late:
                loop.call_world(back, lambda: self._answer(answer, outcome, lost, write))

        if late:
            self.trace.count("late effects")
            loop.call_world(arrival + faults.throttle_delay * 2 * draw(), arrive)
            await asyncio.sleep(arrival + back)
            raise OutcomeUnknown("simulated: no answer came")
        loop.call_world(arrival, arrive)
        return await answer

    def _apply(
        self, who: str, what: str, effect: Callable[[], Coroutine[Any, Any, T]], fills: str | None
    ) -> T | LlogError:
        self.trace.count("operations")
        if fills in self.full:
            self.trace.count("refused by a full store")
            self.trace.add(f"{who} {what}: the store is full")
            return StoreUnavailable("simulated: the store is full")
        self.actor = who
        try:
            effect().send(None)
        except StopIteration as done:
            self.trace.add(f"{who} {what}")
            result: T = done.value
            return result
        except LlogError as error:
            self.trace.add(f"{who} {what}: {error.code}")
            return error
        except BaseException as error:
            self.trace.add(f"{who} {what}")
            self.failures.append(error)
            return StoreUnavailable("simulated: the run is over")
        raise AssertionError("a store in memory never waits")

    def _answer(self, answer: asyncio.Future[T], outcome: T | LlogError, lost: bool, write: bool) -> None:
        if answer.done():
            return
        if lost:
            self.trace.count("lost answers")
            error = OutcomeUnknown if write else StoreUnavailable
            answer.set_exception(error("simulated: the answer was lost"))
        elif isinstance(outcome, LlogError):
            answer.set_exception(outcome)
        else:
            answer.set_result(outcome)


class SimBlobStore:
    """The `BlobStore` of one process."""

    def __init__(self, network: Network, server: MemoryBlobs, watcher: Watcher, who: str) -> None:
        self._client = WatchedBlobs(server, watcher)
        self._network = network
        self._who = who
        self.uri = self._client.uri

    async def put(self, name: str, parts: Sequence[Buffer]) -> None:
        put = partial(self._client.put, name, parts)
        await self._network.call(self._who, f"blob put {name}", put, write=True, fills=BLOBS)

    async def get(self, name: str) -> Buffer:
        return await self._call(f"blob get {name}", lambda: self._client.get(name), write=False)

    async def get_range(self, name: str, offset: int, length: int) -> Buffer:
        return await self._call(f"blob get {name}", lambda: self._client.get_range(name, offset, length), write=False)

    async def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        return await self._call(f"blob get {name}", lambda: self._client.get_ranges(name, ranges), write=False)

    async def head(self, name: str) -> BlobInfo | None:
        return await self._call(f"blob head {name}", lambda: self._client.head(name), write=False)

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[list[BlobInfo]]:
        more = True
        while more:
            page = await self._call(f"blob list {prefix}", partial(self._page, prefix, start_after), write=False)
            more = bool(page)
            if page:
                yield page
                start_after = page[-1].name

    async def delete_many(self, names: Sequence[str]) -> None:
        await self._call(f"blob delete {' '.join(names)}", lambda: self._client.delete_many(names))

    async def remove_unfinished_puts(self, before_ms: int) -> int:
        """Return 0: a put is one step."""
        return 0

    def require(self, name: str) -> None:
        self._client.require(name)

    async def check(self) -> None:
        await self._call("blob check", self._client.check, write=False)

    async def close(self) -> None:
        """Do nothing: there is nothing to release."""

    async def _page(self, prefix: str, start_after: str) -> Page:
        async for page in self._client.list(prefix, start_after=start_after):
            return page
        return []

    async def _call(self, what: str, effect: Callable[[], Coroutine[Any, Any, T]], *, write: bool = True) -> T:
        return await self._network.call(self._who, what, effect, write=write)
