"""A log of segments in this process: `SegmentLog` is its one writer, for programs with an event loop.

Concurrent appends are encoded as they come and committed in groups, on a thread, in the order of the calls: a group
shares one write and one sync. What is acknowledged is durable with fsync `always`; otherwise it is once `sync` has run.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Final, TypeVar

from llog.batch.columns import Buffer, Columns, stamped
from llog.engines.disk.format.bodies import encode_bodies, encode_body
from llog.engines.disk.format.files import LOG, explained, numbered
from llog.engines.disk.format.frames import Body, Offsets
from llog.engines.disk.log import retention
from llog.engines.disk.log.index_repair import rebuild_indexes
from llog.engines.disk.log.recovery import maxima_before
from llog.engines.disk.log.replacement import Rewrite, carry_on
from llog.engines.disk.log.writer import GROUP_BYTES_MAX, Append, Result, SegmentWriter
from llog.engines.disk.options import Fsync, SegmentOptions
from llog.engines.port import Bounds, RetentionResult
from llog.errors import InvalidArgument, LlogError, StoreUnavailable
from llog.log.producers import Producer, check_producer
from llog.model import TimestampType
from llog.runtime import Runtime, SystemRuntime

__all__ = ["Fsync", "Result", "SegmentLog", "SegmentOptions", "encode_body"]

T = TypeVar("T")

_THREADS: Final = 16


class SegmentLog:
    """The one writer of a log. `LogOwned` from `open` if another process, or another instance here, has it."""

    def __init__(self, writer: SegmentWriter, runtime: Runtime) -> None:
        self._writer = writer
        self._runtime = runtime
        self._append_ms = writer.state.maxima.append_ms
        self._queue: deque[tuple[Append, asyncio.Future[Result]]] = deque()
        self._committer: asyncio.Task[None] | None = None
        self._syncer: asyncio.Task[None] | None = None
        self._waiting: set[asyncio.Future[None]] = set()
        self._closing = False

    @classmethod
    def open(
        cls,
        directory: Path,
        options: SegmentOptions | None = None,
        runtime: Runtime | None = None,
        *,
        what: str = "the log",
    ) -> SegmentLog:
        """Opens or creates the log, and brings it in order if its last writer was killed. `what` names it in errors."""
        writer = SegmentWriter(directory.absolute(), options or SegmentOptions(), what)
        return cls(writer, runtime or SystemRuntime())

    @property
    def directory(self) -> Path:
        return self._writer.directory

    @property
    def options(self) -> SegmentOptions:
        return self._writer.options

    def bounds(self) -> Bounds:
        return self._writer.bounds

    async def append(self, columns: Columns, producer: Producer | None = None) -> Result:
        """Appends these records together, or none of them. An error says whether it may be known that none is there."""
        if columns.count == 0:
            raise InvalidArgument(f"an append to {self._writer.what} needs at least one record")
        if producer is not None:
            check_producer(producer)
        self._check_open()
        # Nothing is awaited before the queue: append times are in the order of the offsets.
        now = max(self._runtime.now_ms(), self._append_ms, self._writer.state.maxima.append_ms)
        bodies = encode_bodies(stamped(columns, now), self.options.codec, self.options.frame_bytes)
        self._append_ms = now
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        self._queue.append((Append(bodies, producer), future))
        if self._committer is None:
            self._committer = loop.create_task(self._commit_all())
        return await future

    def append_encoded(self, bodies: Sequence[Body]) -> list[Result | LlogError]:
        """Appends each of these bodies, encoded before, as one group, on this thread: for programs without an event
        loop.
        """
        results = self._writer.commit([Append([body]) for body in bodies], self._runtime.now_ms())
        if self._waiting:
            self._wake()
        return results

    async def sync(self) -> None:
        """Makes everything acknowledged so far durable."""
        await self._run(self._writer.sync)

    async def roll(self) -> None:
        """Seals the newest segment, unless it is empty."""
        await self._run(self._writer.roll)

    async def trim(self, before_offset: int) -> RetentionResult:
        """Removes every record below `before_offset`: `bounds()` says so at once."""
        return await self._run(lambda: retention.trim(self._writer, before_offset))

    async def retain(
        self,
        *,
        retention_ms: int | None,
        retention_bytes: int | None,
        now_ms: int | None = None,
        by: TimestampType = TimestampType.APPEND,
    ) -> RetentionResult:
        """Removes whole segments that are too old or too much. Also makes indexes of sealed segments again that are
        missing.
        """
        now = self._runtime.now_ms() if now_ms is None else now_ms

        def work() -> RetentionResult:
            result = retention.retain(
                self._writer, retention_ms=retention_ms, retention_bytes=retention_bytes, now_ms=now, by=by
            )
            rebuild_indexes(self._writer)
            return result

        return await self._run(work)

    def sealed(self) -> list[int]:
        """Base offsets of the sealed segments, in order."""
        return [base for base in numbered(self.directory, LOG) if base < self._writer.active.base]

    def replace(self, bases: Sequence[int], frames: Iterable[tuple[Sequence[Buffer], Offsets | None]]) -> int:
        """Replaces neighbouring sealed segments by one of these frames, all or nothing; how many bytes it has.

        Blocking, for a thread of its own; appends go on meanwhile. Each frame comes as `frame_parts` makes it, with its
        offsets if it is sparse. Together they cover every offset of the segments.
        """
        with explained("rewrite a segment in", self.directory):
            with self._writer.mutex:
                carry_on(self.directory)
            sealed = [*self.sealed(), self._writer.active.base]
            first = sealed.index(bases[0]) if bases and bases[0] in sealed else -1
            if first < 0 or sealed[first : first + len(bases)] != list(bases) or first + len(bases) >= len(sealed):
                raise InvalidArgument(f"{list(bases)} are not neighbouring sealed segments of {self._writer.what}")
            stop = sealed[first + len(bases)]
            before = maxima_before(self.directory, sealed, first)
            with Rewrite(self.directory, bases, stop, self.options, before) as rewrite:
                for parts, offsets in frames:
                    rewrite.add(parts, offsets)
                rewrite.prepare()
                with self._writer.mutex:
                    self._check_open()
                    if not set(bases) <= set(self.sealed()):
                        raise InvalidArgument(f"segments of {list(bases)} were removed by retention meanwhile")
                    rewrite.commit(last_record_needed=stop == self._writer.active.base)
                return rewrite.bytes_written

    def changed(self) -> asyncio.Future[None]:
        """A future that is done with the next commit of this process."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        future.add_done_callback(self._waiting.discard)
        return future

    async def close(self) -> None:
        """Commits what is queued, syncs, and lets go of the directory."""
        self._closing = True
        if self._committer is not None:
            await asyncio.wait([self._committer])
        if self._syncer is not None:
            self._syncer.cancel()
        loop = asyncio.get_running_loop()
        try:
            if not self._writer.closed:
                await loop.run_in_executor(_threads(), self._writer.close)
        finally:
            self._wake()

    async def _commit_all(self) -> None:
        loop = asyncio.get_running_loop()
        taken: list[tuple[Append, asyncio.Future[Result]]] = []
        try:
            while self._queue:
                taken, size = [], 0
                while self._queue and size < GROUP_BYTES_MAX:
                    taken.append(self._queue.popleft())
                    size += sum(body.length for body in taken[-1][0].bodies)
                appends = [append for append, _ in taken]
                results = await loop.run_in_executor(_threads(), self._writer.commit, appends, self._runtime.now_ms())
                for (_, future), result in zip(taken, results, strict=True):
                    _settle(future, result)
                self._wake()
                if self.options.fsync is Fsync.INTERVAL and self._syncer is None:
                    self._syncer = loop.create_task(self._sync_later())
        except BaseException as error:
            for _, future in [*taken, *self._queue]:
                _settle(future, error)
            self._queue.clear()
            raise
        finally:
            self._committer = None

    async def _sync_later(self) -> None:
        try:
            # Once more if something was committed behind the sync, before this heard of its end.
            while self._writer.unsynced:
                await self._runtime.sleep(self.options.fsync_interval_ms / 1000)
                await self._run(self._writer.sync)
        except LlogError:
            pass  # the next append opens the segment again, and tells its caller if that fails
        finally:
            self._syncer = None

    async def _run(self, work: Callable[[], T]) -> T:
        self._check_open()
        return await asyncio.get_running_loop().run_in_executor(_threads(), work)

    def _check_open(self) -> None:
        if self._closing or self._writer.closed:
            raise StoreUnavailable(f"{self._writer.what} in {self.directory} is closed: open it again")

    def _wake(self) -> None:
        for future in list(self._waiting):
            _settle(future, None)


@cache
def _threads() -> ThreadPoolExecutor:
    """All logs of the process share them: most of thousands of partitions are idle. A log's calls exclude one another
    by its mutex.
    """
    return ThreadPoolExecutor(_THREADS, thread_name_prefix="llog-segment")


def _settle(future: asyncio.Future[T], result: T | BaseException) -> None:
    if future.done():
        return
    if isinstance(result, BaseException):
        future.set_exception(result)
    else:
        future.set_result(result)
