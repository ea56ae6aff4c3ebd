"""`KeyedLog`: the one writer of a keyed log, which reads as well.

Appends may be in flight together: their sequences follow the order of the calls, each is answered when it is durable,
and one WriteBatch holds all of an append, so it is there as a whole or not at all. Who opens the log while another
process writes it is refused (`ownership.py`). Of a process that takes it over nevertheless, or after the other was
paused, SlateDB fences the writer before: that gets `WriterFenced` from its next append on, and nothing of it is
acknowledged after.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Final, NamedTuple, Self, TypeVar

from llog.config import Settings
from llog.errors import InvalidArgument, LlogError, StoreUnavailable, WriterFenced
from llog.keyed.counts import Counts, counted_before
from llog.keyed.deletion import beyond, erase, marked, unlist
from llog.keyed.encoding import (
    LOG_ID_KEY,
    MARKER_KEY,
    SEGMENT_META,
    SEGMENT_TOTALS,
    SEQUENCE_BLOCK_KEY,
    STATE_KEY,
    Meta,
    State,
    Totals,
    block_end,
    block_value,
    marker_value,
    meta_value,
    segment_key,
    state_value,
    totals_value,
)
from llog.keyed.model import NUMBER_MAX, Config, Records, RetentionConfig, WriteOptions, columns_of
from llog.keyed.ownership import Ownership, own
from llog.keyed.reader import KeyedLogReader, has_begun
from llog.keyed.runs import Grouped, group, put_runs
from llog.keyed.segments import Segments
from llog.keyed.slate import Database, Place, exists, locate, new_batch, open_database, open_view
from llog.log.owners import Owners
from llog.runtime import Runtime, SystemRuntime

T = TypeVar("T")

BLOCK_SEQUENCES: Final = 4096
BLOCK_APPENDS: Final = 8
"""A block is as large as so many appends like the one that needs it, or `BLOCK_SEQUENCES`."""


class _Written(NamedTuple):
    """A write that is under way to the store: its sequences, and how far sequences were reserved when it was made."""

    handle: Any
    first: int
    end: int
    reserved: int


class KeyedLog(KeyedLogReader):
    """A keyed log, open for appends. There is one writer at a time."""

    def __init__(
        self, database: Database, place: Place, config: Config, runtime: Runtime, ownership: Ownership
    ) -> None:
        super().__init__(database, place, config, runtime)
        self.ownership = ownership
        self._counts = Counts(config.storage.counted_keys_max)
        self._next_seq = 0
        self._reserved = 0
        self._reserved_durably = 0
        self._durable_end = 0
        self._undurable: deque[tuple[Any, int]] = deque()
        self._failure: LlogError | None = None
        self._writing = asyncio.Lock()
        self._deleting = asyncio.Lock()
        self._grown = asyncio.Event()

    @classmethod
    async def open(
        cls,
        url: str,
        config: Config | None = None,
        *,
        settings: Settings | None = None,
        runtime: Runtime | None = None,
        owners: Owners | None = None,
        take_over: bool = False,
    ) -> Self:
        """Opens the log, or makes it where nothing is. `WrongStore`: something else is there, or a newer format; it is
        not touched.

        `LogOwned` if another process writes it, which `take_over` fences. Of a log in a bucket, the metadata store that
        the settings name tells, or the `owners` of an open log; `ConfigurationError` if there is none, `WrongStore` if
        it is not that of the log's brokers.
        """
        config, runtime = config or Config(), runtime or SystemRuntime()
        place = locate(url, settings)
        log_id: bytes | None = None
        if await exists(place):
            view = await open_view(place, config.storage, once=True)
            try:
                await has_begun(view)  # refuses before anybody is fenced
                log_id = await view.get(LOG_ID_KEY)
            finally:
                await view.close()
        ownership = await own(
            place, owners, known_log_id=log_id, settings=settings, runtime=runtime, take_over=take_over
        )
        try:
            database = await open_database(place, config.storage)
            try:
                log = cls(database, place, config, runtime, ownership)
                await log._take_over()
            except BaseException:
                with suppress(LlogError):
                    await database.close()
                raise
        except BaseException:
            await ownership.release()
            raise
        return log

    async def append(self, records: Records, await_durable: bool = True) -> int:
        """Appends pairs of key and value, or an Arrow table of them, and returns the sequence of the first; the others
        follow it.

        All of them or none; an append of nothing returns the next sequence. Raises `WriterFenced` if another writer has
        taken over.
        """
        return await self.append_with_options(records, WriteOptions(await_durable=await_durable))

    async def append_with_options(self, records: Records, options: WriteOptions) -> int:
        keys, values = columns_of(records)
        self._check_writable()
        if len(keys) == 0:
            return self._next_seq
        written = await _to_its_end(self._write(group(keys, values)))
        # A sequence is handed out only when no later writer can hand it out again: its block must be durable.
        if options.await_durable or written.end > self._reserved_durably:
            await self._durable(written)
        return written.first

    async def flush(self) -> None:
        """Until everything appended so far is durable."""
        async with self._writing:  # whoever is in there has taken its sequences, but not written them yet
            self._check_writable()
            end = self._next_seq
        await self._guarded(self._database.flush())
        self._is_durable(end)

    async def seal_segment(self, user_meta: bytes | None = None) -> int:
        """Ends the active segment, attaches `user_meta` to it, starts the next one, and returns the id of the one
        sealed.
        """
        if user_meta is not None and not isinstance(user_meta, bytes):
            raise InvalidArgument(f"user_meta is {type(user_meta).__name__}, not bytes")
        sealed, written = await _to_its_end(self._seal(user_meta))
        await self._durable(written)
        return sealed

    async def delete_segments(self, before: int) -> int:
        """Deletes all segments with lower ids than `before`, and returns how many. The active one cannot be deleted:
        seal it first.

        They are gone for every reader at once when this begins, and their room is given back by SlateDB's compaction
        later. If it does not end, the next writer ends it.
        """
        self._check_writable()
        if type(before) is not int or not 0 <= before <= self._segments.active_id:
            raise InvalidArgument(
                f"segments before {before!r} cannot be deleted: it must be an id up to that of the active segment, "
                f"{self._segments.active_id}; seal that one first if its records are to go"
            )
        async with self._deleting:
            gone = range(self._segments.first_id, before)
            if not gone:
                return 0
            handle = await _to_its_end(self._unlist(gone))
            await self._guarded(self._database.durable(handle))
            for segment_id in gone:
                await self._guarded(erase(self._database, segment_id))
            return len(gone)

    async def retain(self, retention: RetentionConfig | None = None) -> int:
        """Deletes the segments that are beyond `retention` (of the configuration, unless given), and returns how
        many.
        """
        limits = retention or self._config.retention
        return await self.delete_segments(beyond(self._segments, limits, self._runtime.now_ms()))

    async def close(self) -> None:
        """Makes everything durable and lets go. Idempotent. `WriterFenced` if appends that were not awaited are
        lost.
        """
        async with self._writing:
            if self._closed:
                return
            self._closed = True
            lost: WriterFenced | None = None
            try:
                if self._failure is None and self._reserved > self._next_seq:
                    # No crash: the next writer goes on without a gap.
                    batch = new_batch()
                    batch.put(SEQUENCE_BLOCK_KEY, block_value(self._next_seq, 0))
                    await self._database.durable(await self._database.write(batch))
                    self._is_durable(self._next_seq)
            except WriterFenced as error:
                lost = error if self._durable_end < self._next_seq else None
            finally:
                try:
                    await self._database.close()
                except WriterFenced as error:
                    lost = error if self._durable_end < self._next_seq else None
                finally:
                    await self.ownership.release()
            if lost is not None:
                raise lost

    async def was_taken_over(self) -> bool:
        """After `WriterFenced`: whether somebody insisted on it, with `take_over`.

        Otherwise it was a process that was paused, and opened the log after its lease had ended.
        """
        if self.ownership.log_id is None:
            return True
        view = await open_view(self._place, self._config.storage, once=True)
        try:
            return await view.get(LOG_ID_KEY) != self.ownership.log_id
        finally:
            await view.close()

    async def settle(self) -> None:
        """Puts everything that is in memory into tables, so that whoever opens the log next has nothing to replay."""
        await self._guarded(self._database.settle())

    async def next_sequence(self) -> int:
        self._check_open()
        # After a takeover sequences go on behind a gap, where no reader gets before there is a record.
        return min(self._visible_end(durable=True), self._segments.next_seq)

    async def wait(self) -> None:
        self._grown.clear()
        waiting = [asyncio.ensure_future(self._grown.wait()), asyncio.ensure_future(super().wait())]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waiting:
                each.cancel()

    # What the writer knows without looking

    async def _segments_now(self) -> Segments:
        self._check_open()
        return self._segments

    async def _is_live(self, segment_id: int) -> bool:
        return segment_id in self._segments

    def _visible_end(self, durable: bool) -> int:
        if not durable:
            return self._next_seq
        if self._undurable:
            durable_write = self._database.durable_write()
            ends = [end for number, end in self._undurable if number <= durable_write]
            if ends:
                self._is_durable(ends[-1])
        return self._durable_end

    # How it is written

    async def _take_over(self) -> None:
        database = self._database
        if not await has_begun(database):
            batch, now = new_batch(), self._runtime.now_ms()
            batch.put(MARKER_KEY, marker_value())
            batch.put(segment_key(SEGMENT_META, 0), meta_value(Meta(0, now, None)))
            batch.put(STATE_KEY, state_value(State(0, 0, Totals(0, 0, 0, now))))
            await database.durable(await database.write(batch))
        log_id = self.ownership.log_id
        if await database.get(LOG_ID_KEY) != log_id:
            batch = new_batch()
            if log_id is None:
                batch.delete(LOG_ID_KEY)
            else:
                batch.put(LOG_ID_KEY, log_id)
            await database.durable(await database.write(batch))
        await self._segments.refresh(database)
        block = await database.get(SEQUENCE_BLOCK_KEY)
        self._next_seq = max(self._segments.next_seq, 0 if block is None else block_end(block))
        self._reserved = self._reserved_durably = self._durable_end = self._next_seq
        self._counts.begin(empty=self._segments.totals(self._segments.active_id).records == 0)
        for segment_id in await marked(database):
            await erase(database, segment_id)

    async def _write(self, grouped: Grouped) -> _Written:
        async with self._writing:
            self._check_writable()
            with self._whole():
                return await self._write_next(grouped)

    async def _write_next(self, grouped: Grouped) -> _Written:
        now = max(self._runtime.now_ms(), self._segments.last_ms)
        batch = new_batch()
        if self._is_due(now):
            self._start_segment(batch, now, None)
        segment_id = self._segments.active_id
        counts = await counted_before(self._database, self._counts, segment_id, grouped.keys)
        first = self._next_seq
        end = first + grouped.count
        if end > NUMBER_MAX:
            raise InvalidArgument("the log has no sequences left")
        if end > self._reserved:
            self._reserved = first + max(BLOCK_SEQUENCES, BLOCK_APPENDS * grouped.count)
            batch.put(SEQUENCE_BLOCK_KEY, block_value(first, self._reserved - first))
        put_runs(batch, segment_id, grouped, counts, first, now)
        self._counts.remember(counts)
        totals = self._segments.totals(segment_id)
        totals = Totals(end, totals.records + grouped.count, totals.size + grouped.size, now)
        self._next_seq = end
        self._segments.set_totals(segment_id, totals)
        batch.put(STATE_KEY, state_value(self._segments.state()))
        return await self._written(batch, first)

    async def _seal(self, user_meta: bytes | None) -> tuple[int, _Written]:
        async with self._writing:
            self._check_writable()
            with self._whole():
                sealed = self._segments.active_id
                batch = new_batch()
                self._start_segment(batch, max(self._runtime.now_ms(), self._segments.last_ms), user_meta)
                return sealed, await self._written(batch, self._next_seq)

    async def _unlist(self, gone: range) -> Any:
        async with self._writing:
            self._check_writable()
            with self._whole():
                self._segments.drop(gone.stop)
                return await unlist(self._database, gone, self._segments.state())

    def _start_segment(self, batch: Any, now: int, user_meta: bytes | None) -> None:
        sealed = self._segments.active_id
        batch.put(segment_key(SEGMENT_TOTALS, sealed), totals_value(self._segments.totals(sealed)))
        if user_meta:
            meta = self._segments.meta(sealed)._replace(user_meta=user_meta)
            batch.put(segment_key(SEGMENT_META, sealed), meta_value(meta))
            self._segments.set(sealed, meta)
        meta = Meta(self._next_seq, now, None)
        batch.put(segment_key(SEGMENT_META, sealed + 1), meta_value(meta))
        self._segments.set(sealed + 1, meta)
        batch.put(STATE_KEY, state_value(self._segments.state()))
        self._counts.begin(empty=True)

    def _is_due(self, now: int) -> bool:
        limits, active = self._config.segmentation, self._segments.active_id
        totals = self._segments.totals(active)
        age = now - self._segments.meta(active).start_time_ms
        return (
            (limits.seal_interval is not None and age >= limits.seal_interval / timedelta(milliseconds=1))
            or (limits.seal_bytes is not None and totals.size >= limits.seal_bytes)
            or (limits.seal_records is not None and totals.records >= limits.seal_records)
        )

    async def _written(self, batch: Any, first: int) -> _Written:
        reserved, end = self._reserved, self._next_seq
        handle = await self._database.write(batch)
        self._undurable.append((handle.seqnum(), end))
        return _Written(handle, first, end, reserved)

    async def _durable(self, written: _Written) -> None:
        await self._guarded(self._database.durable(written.handle))
        self._reserved_durably = max(self._reserved_durably, written.reserved)
        self._is_durable(written.end)

    def _is_durable(self, end: int) -> None:
        """Everything below `end` is: SlateDB makes writes durable in their order, and a block before what is in it."""
        while self._undurable and self._undurable[0][1] <= end:
            self._undurable.popleft()
        if end > self._durable_end:
            self._durable_end = end
            self._grown.set()

    async def _guarded(self, answer: Awaitable[T]) -> T:
        """Remembers why it failed. Who is cancelled while it waits has changed nothing."""
        try:
            return await answer
        except LlogError as error:
            self._failure = error
            raise

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """After a change that failed on its way nobody knows what is in the log; the next writer finds out."""
        try:
            yield
        except LlogError as error:
            self._failure = error
            raise
        except BaseException as error:
            self._failure = StoreUnavailable(f"an append to {self.url} was cut short: {type(error).__name__} {error}")
            raise

    def _check_writable(self) -> None:
        self._check_open()
        if isinstance(self._failure, WriterFenced):
            raise WriterFenced(str(self._failure))
        if self._failure is not None:
            raise StoreUnavailable(f"the keyed log at {self.url} failed before ({self._failure}): open it again")


async def _to_its_end(change: Coroutine[Any, Any, T]) -> T:
    """Cancelled or not, a change that is begun is written whole: a half-known state would be of no use to the next
    one.
    """
    task = asyncio.ensure_future(change)
    task.add_done_callback(_retrieved)
    return await asyncio.shield(task)


def _retrieved(done: asyncio.Future[Any]) -> None:
    """Whoever waited may be gone; its error is remembered in the log."""
    if not done.cancelled():
        done.exception()
