"""`SegmentLog`: the one writer of a log of segments, for programs with an event loop.

Concurrent appends are encoded as they arrive and committed in groups, on a thread, in the order of the calls: a group
shares one write and one sync. With fsync `always`, an acknowledged append is durable; otherwise it is after `sync`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Final, TypeVar

from llog.batch.columns import Buffer, Columns, stamp
from llog.engines.disk.format.bodies import encode_bodies, encode_body
from llog.engines.disk.format.files import LOG, file_numbers, translate_os_errors
from llog.engines.disk.format.frames import Body, Offsets
from llog.engines.disk.log import retention
from llog.engines.disk.log.index_repair import rebuild_indexes
from llog.engines.disk.log.recovery import maxima_before
from llog.engines.disk.log.replacement import Replacement, complete_committed
from llog.engines.disk.log.writer import GROUP_BYTES_MAX, AppendedRange, EncodedAppend, SegmentWriter
from llog.engines.disk.options import Fsync, SegmentOptions
from llog.errors import InvalidArgument, LlogError, StoreUnavailable
from llog.log.engine import Bounds, RetentionResult
from llog.log.producers import Producer, check_producer
from llog.model import TimestampType
from llog.runtime import Runtime, SystemRuntime

__all__ = ["AppendedRange", "Fsync", "SegmentLog", "SegmentOptions", "encode_body"]

T = TypeVar("T")

_THREADS: Final = 16


class SegmentLog:
    """The one writer of a log: `open` raises `LogOwned` if another process, or another instance here, has it open."""

    def __init__(self, writer: SegmentWriter, runtime: Runtime) -> None:
        self._writer = writer
        self._runtime = runtime
        self._append_ms = writer.state.maxima.append_ms
        self._queue: deque[tuple[EncodedAppend, asyncio.Future[AppendedRange]]] = deque()
        self._committer: asyncio.Task[None] | None = None
        self._syncer: asyncio.Task[None] | None = None
        self._commit_waiters: set[asyncio.Future[None]] = set()
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
        """Open or create the log, and recover it if its last writer was killed. `what` names the log in errors."""
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

    async def append(self, columns: Columns, producer: Producer | None = None) -> AppendedRange:
        """Append all of these records, or none. The error `OutcomeUnknown` means that either may be the case."""
        if columns.count == 0:
            raise InvalidArgument(f"an append to {self._writer.what} needs at least one record")
        if producer is not None:
            check_producer(producer)
        self._check_open()
        # Nothing is awaited before the append is queued, so append times are in the order of offsets.
        now = max(self._runtime.now_ms(), self._append_ms, self._writer.state.maxima.append_ms)
        bodies = encode_bodies(stamp(columns, now), self.options.codec, self.options.frame_bytes)
        self._append_ms = now
        loop = asyncio.get_running_loop()
        future: asyncio.Future[AppendedRange] = loop.create_future()
        self._queue.append((EncodedAppend(bodies, producer), future))
        if self._committer is None:
            self._committer = loop.create_task(self._commit_all())
        return await future

    def append_encoded(self, bodies: Sequence[Body]) -> list[AppendedRange | LlogError]:
        """Append these encoded bodies, each on its own, as one group and on this thread, for programs without an event
        loop.
        """
        results = self._writer.commit([EncodedAppend([body]) for body in bodies], self._runtime.now_ms())
        if self._commit_waiters:
            self._wake()
        return results

    async def sync(self) -> None:
        """Make everything acknowledged so far durable."""
        await self._run(self._writer.sync)

    async def roll(self) -> None:
        """Seal the newest segment, unless it is empty."""
        await self._run(self._writer.roll)

    async def trim(self, before_offset: int) -> RetentionResult:
        """Remove every record below `before_offset`; `bounds()` reflects it at once."""
        return await self._run(lambda: retention.trim(self._writer, before_offset))

    async def retain(
        self,
        *,
        retention_ms: int | None,
        retention_bytes: int | None,
        now_ms: int | None = None,
        by: TimestampType = TimestampType.APPEND,
    ) -> RetentionResult:
        """Remove whole segments that are too old or exceed the size limit. Also rebuilds missing indexes of sealed
        segments.
        """
        now = self._runtime.now_ms() if now_ms is None else now_ms

        def work() -> RetentionResult:
            result = retention.retain(
                self._writer, retention_ms=retention_ms, retention_bytes=retention_bytes, now_ms=now, by=by
            )
            rebuild_indexes(self._writer)
            return result

        return await self._run(work)

    def sealed_bases(self) -> list[int]:
        """Return the base offsets of the sealed segments, in order."""
        return [base for base in file_numbers(self.directory, LOG) if base < self._writer.active.base]

    def replace(self, bases: Sequence[int], frames: Iterable[tuple[Sequence[Buffer], Offsets | None]]) -> int:
        """Replace neighbouring sealed segments by one of these frames, all or nothing; return its size in bytes.

        Blocks, so it needs a thread of its own; appends go on meanwhile. Each frame is as `frame_parts` makes it, with
        its offsets if it is sparse. Together the frames must cover every offset of the segments.
        """
        with translate_os_errors("rewrite a segment in", self.directory):
            with self._writer.mutex:
                complete_committed(self.directory)
            sealed_bases = [*self.sealed_bases(), self._writer.active.base]
            first = sealed_bases.index(bases[0]) if bases and bases[0] in sealed_bases else -1
            if (
                first < 0
                or sealed_bases[first : first + len(bases)] != list(bases)
                or first + len(bases) >= len(sealed_bases)
            ):
                raise InvalidArgument(f"{list(bases)} are not neighbouring sealed segments of {self._writer.what}")
            stop = sealed_bases[first + len(bases)]
            before = maxima_before(self.directory, sealed_bases, first)
            with Replacement(self.directory, bases, stop, self.options, before) as replacement:
                for parts, offsets in frames:
                    replacement.add(parts, offsets)
                replacement.prepare()
                with self._writer.mutex:
                    self._check_open()
                    if not set(bases) <= set(self.sealed_bases()):
                        raise InvalidArgument(f"segments of {list(bases)} were removed by retention meanwhile")
                    replacement.commit(last_record_needed=stop == self._writer.active.base)
                return replacement.bytes_written

    def next_commit(self) -> asyncio.Future[None]:
        """Return a future that completes with the next commit of this process."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._commit_waiters.add(future)
        future.add_done_callback(self._commit_waiters.discard)
        return future

    async def close(self) -> None:
        """Commit all queued appends, sync, and release the lock on the directory."""
        self._closing = True
        if self._committer is not None:
            await asyncio.wait([self._committer])
        if self._syncer is not None:
            self._syncer.cancel()
        loop = asyncio.get_running_loop()
        try:
            if not self._writer.is_closed:
                await loop.run_in_executor(_thread_pool(), self._writer.close)
        finally:
            self._wake()

    async def _commit_all(self) -> None:
        loop = asyncio.get_running_loop()
        taken: list[tuple[EncodedAppend, asyncio.Future[AppendedRange]]] = []
        try:
            while self._queue:
                taken, size = [], 0
                while self._queue and size < GROUP_BYTES_MAX:
                    taken.append(self._queue.popleft())
                    size += sum(body.length for body in taken[-1][0].bodies)
                appends = [append for append, _ in taken]
                results = await loop.run_in_executor(
                    _thread_pool(), self._writer.commit, appends, self._runtime.now_ms()
                )
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
            # Repeats if something was committed after the sync and before this task resumed.
            while self._writer.has_unsynced:
                await self._runtime.sleep(self.options.fsync_interval_ms / 1000)
                await self._run(self._writer.sync)
        except LlogError:
            pass  # the next append reopens the segment, and fails if that does
        finally:
            self._syncer = None

    async def _run(self, work: Callable[[], T]) -> T:
        self._check_open()
        return await asyncio.get_running_loop().run_in_executor(_thread_pool(), work)

    def _check_open(self) -> None:
        if self._closing or self._writer.is_closed:
            raise StoreUnavailable(f"{self._writer.what} in {self.directory} is closed: open it again")

    def _wake(self) -> None:
        for future in list(self._commit_waiters):
            _settle(future, None)


@cache
def _thread_pool() -> ThreadPoolExecutor:
    """Return the threads that all logs of the process share, since most of thousands of partitions are idle. A log's
    mutex serializes its calls.
    """
    return ThreadPoolExecutor(_THREADS, thread_name_prefix="llog-segment")


def _settle(future: asyncio.Future[T], result: T | BaseException) -> None:
    if future.done():
        return
    if isinstance(result, BaseException):
        future.set_exception(result)
    else:
        future.set_result(result)
