"""`KeyedLog`: the one writer of a keyed log, which reads as well.

Several appends may be in flight: their sequences follow the order of the calls, and each returns when it is durable.
One WriteBatch holds all of an append, so it is in the log as a whole or not at all. A process that opens the log while
another writes it is refused (`ownership.py`). If it takes the log over, or the other was paused beyond its session,
SlateDB fences the other writer: its next append raises `WriterFenced`, and nothing of it is acknowledged any more.
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
from llog.keyed.counts import Counts, count_records
from llog.keyed.deletion import erase, first_kept_segment, marked_segments, unlist
from llog.keyed.encoding import (
    LOG_ID_KEY,
    MARKER_KEY,
    SEGMENT_META,
    SEGMENT_TOTALS,
    SEQUENCE_BLOCK_KEY,
    STATE_KEY,
    LogState,
    SegmentMeta,
    SegmentTotals,
    block_end,
    block_value,
    marker_value,
    meta_value,
    segment_key,
    state_value,
    totals_value,
)
from llog.keyed.model import NUMBER_MAX, Config, Records, RetentionConfig, WriteOptions, columns_of
from llog.keyed.ownership import Ownership, take_ownership
from llog.keyed.reader import KeyedLogReader, is_initialized
from llog.keyed.runs import GroupedRecords, group_by_key, put_runs
from llog.keyed.segments import Segments
from llog.keyed.slate import Database, DatabaseLocation, exists, locate, new_batch, open_database, open_view
from llog.log.owners import Owners
from llog.runtime import Runtime, SystemRuntime

T = TypeVar("T")

BLOCK_SEQUENCES: Final = 4096
BLOCK_APPENDS: Final = 8
"""A block of sequences lasts for this many appends of the present size, and has at least `BLOCK_SEQUENCES`."""


class _StartedWrite(NamedTuple):
    """A write on its way to the store: its sequences, and the end of the reserved sequences when it was started."""

    handle: Any
    first: int
    end: int
    reserved: int


class KeyedLog(KeyedLogReader):
    """A keyed log, open for appends. A log has one writer at a time."""

    def __init__(
        self, database: Database, location: DatabaseLocation, config: Config, runtime: Runtime, ownership: Ownership
    ) -> None:
        super().__init__(database, location, config, runtime)
        self.ownership = ownership
        self._counts = Counts(config.storage.counted_keys_max)
        self._next_seq = 0
        self._reserved = 0
        self._reserved_durably = 0
        self._durable_end = 0
        self._writes_in_flight: deque[tuple[Any, int]] = deque()
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
        """Open the log, or create it if the address is empty. Raises `WrongStore`, and changes nothing, if something
        else or a newer format is there.

        Raises `LogOwned` if another process writes the log; `take_over` fences that one instead. For a log in a bucket,
        the writer is recorded in the metadata store that the settings, or the `owners` of an open log, name: raises
        `ConfigurationError` without one, and `WrongStore` if it is not that of the log's brokers.
        """
        config, runtime = config or Config(), runtime or SystemRuntime()
        location = locate(url, settings)
        log_id: bytes | None = None
        if await exists(location):
            view = await open_view(location, config.storage, once=True)
            try:
                await is_initialized(view)  # raises before another writer is fenced
                log_id = await view.get(LOG_ID_KEY)
            finally:
                await view.close()
        ownership = await take_ownership(
            location, owners, known_log_id=log_id, settings=settings, runtime=runtime, take_over=take_over
        )
        try:
            database = await open_database(location, config.storage)
            try:
                log = cls(database, location, config, runtime, ownership)
                await log._load_state()
            except BaseException:
                with suppress(LlogError):
                    await database.close()
                raise
        except BaseException:
            await ownership.release()
            raise
        return log

    async def append(self, records: Records, await_durable: bool = True) -> int:
        """Append pairs of key and value, or an Arrow table of them, all or none. Return the sequence of the first; the
        others follow it.

        An append of nothing returns the next sequence. Raises `WriterFenced` if another writer has taken over.
        """
        return await self.append_with_options(records, WriteOptions(await_durable=await_durable))

    async def append_with_options(self, records: Records, options: WriteOptions) -> int:
        keys, values = columns_of(records)
        self._check_writable()
        if len(keys) == 0:
            return self._next_seq
        written = await _run_to_completion(self._write(group_by_key(keys, values)))
        # A sequence may be returned only if no later writer can assign it again: its block must be durable.
        if options.await_durable or written.end > self._reserved_durably:
            await self._await_durable(written)
        return written.first

    async def flush(self) -> None:
        """Wait until everything appended so far is durable."""
        async with self._writing:  # an append under way has its sequences, but has not written them yet
            self._check_writable()
            end = self._next_seq
        await self._recording_failure(self._database.flush())
        self._mark_durable(end)

    async def seal_segment(self, user_meta: bytes | None = None) -> int:
        """Seal the active segment, with `user_meta` attached, start the next one, and return the id of the sealed
        one.
        """
        if user_meta is not None and not isinstance(user_meta, bytes):
            raise InvalidArgument(f"user_meta is {type(user_meta).__name__}, not bytes")
        sealed, written = await _run_to_completion(self._seal(user_meta))
        await self._await_durable(written)
        return sealed

    async def delete_segments(self, before: int) -> int:
        """Delete all segments with ids below `before`, and return how many. The active one cannot be deleted: seal it
        first.

        Readers lose all of them at once, in the beginning; SlateDB's compaction frees their space later. If a deletion
        is interrupted, the next writer finishes it.
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
            handle = await _run_to_completion(self._unlist(gone))
            await self._recording_failure(self._database.await_durable(handle))
            for segment_id in gone:
                await self._recording_failure(erase(self._database, segment_id))
            return len(gone)

    async def retain(self, retention: RetentionConfig | None = None) -> int:
        """Delete the segments beyond `retention`, by default that of the configuration, and return how many."""
        limits = retention or self._config.retention
        return await self.delete_segments(first_kept_segment(self._segments, limits, self._runtime.now_ms()))

    async def close(self) -> None:
        """Make everything durable, and release the ownership. Raises `WriterFenced` if appends that were not awaited
        are lost. Idempotent.
        """
        async with self._writing:
            if self._closed:
                return
            self._closed = True
            lost: WriterFenced | None = None
            try:
                if self._failure is None and self._reserved > self._next_seq:
                    # Return the unused sequences, so that the next writer continues without a gap.
                    batch = new_batch()
                    batch.put(SEQUENCE_BLOCK_KEY, block_value(self._next_seq, 0))
                    await self._database.await_durable(await self._database.write(batch))
                    self._mark_durable(self._next_seq)
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
        """Return, after `WriterFenced`, whether another process took the log over with `take_over`.

        Otherwise, a process opened it after the lease of this one had ended, because this one was paused.
        """
        if self.ownership.log_id is None:
            return True
        view = await open_view(self._location, self._config.storage, once=True)
        try:
            return await view.get(LOG_ID_KEY) != self.ownership.log_id
        finally:
            await view.close()

    async def settle(self) -> None:
        """Write everything that is in memory into tables, so that the next process to open the log need replay
        nothing.
        """
        await self._recording_failure(self._database.flush_to_tables())

    async def next_sequence(self) -> int:
        self._check_open()
        # After a takeover, sequences continue behind a gap, which no reader passes before there is a record.
        return min(self._visible_end(durable=True), self._segments.next_seq)

    async def wait(self) -> None:
        self._grown.clear()
        waiting = [asyncio.ensure_future(self._grown.wait()), asyncio.ensure_future(super().wait())]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waiting:
                each.cancel()

    # What the writer knows without reading the database

    async def _current_segments(self) -> Segments:
        self._check_open()
        return self._segments

    async def _is_live(self, segment_id: int) -> bool:
        return segment_id in self._segments

    def _visible_end(self, durable: bool) -> int:
        if not durable:
            return self._next_seq
        if self._writes_in_flight:
            last_durable_write = self._database.last_durable_write()
            ends = [end for number, end in self._writes_in_flight if number <= last_durable_write]
            if ends:
                self._mark_durable(ends[-1])
        return self._durable_end

    # Writes

    async def _load_state(self) -> None:
        database = self._database
        if not await is_initialized(database):
            batch, now = new_batch(), self._runtime.now_ms()
            batch.put(MARKER_KEY, marker_value())
            batch.put(segment_key(SEGMENT_META, 0), meta_value(SegmentMeta(0, now, None)))
            batch.put(STATE_KEY, state_value(LogState(0, 0, SegmentTotals(0, 0, 0, now))))
            await database.await_durable(await database.write(batch))
        log_id = self.ownership.log_id
        if await database.get(LOG_ID_KEY) != log_id:
            batch = new_batch()
            if log_id is None:
                batch.delete(LOG_ID_KEY)
            else:
                batch.put(LOG_ID_KEY, log_id)
            await database.await_durable(await database.write(batch))
        await self._segments.refresh(database)
        block = await database.get(SEQUENCE_BLOCK_KEY)
        self._next_seq = max(self._segments.next_seq, 0 if block is None else block_end(block))
        self._reserved = self._reserved_durably = self._durable_end = self._next_seq
        self._counts.start_segment(empty=self._segments.totals(self._segments.active_id).records == 0)
        for segment_id in await marked_segments(database):
            await erase(database, segment_id)

    async def _write(self, grouped: GroupedRecords) -> _StartedWrite:
        async with self._writing:
            self._check_writable()
            with self._failing_on_any_error():
                return await self._write_next(grouped)

    async def _write_next(self, grouped: GroupedRecords) -> _StartedWrite:
        now = max(self._runtime.now_ms(), self._segments.last_ms)
        batch = new_batch()
        if self._is_due(now):
            self._start_segment(batch, now, None)
        segment_id = self._segments.active_id
        counts = await count_records(self._database, self._counts, segment_id, grouped.keys)
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
        totals = SegmentTotals(end, totals.records + grouped.count, totals.size + grouped.size, now)
        self._next_seq = end
        self._segments.set_totals(segment_id, totals)
        batch.put(STATE_KEY, state_value(self._segments.state()))
        return await self._start_write(batch, first)

    async def _seal(self, user_meta: bytes | None) -> tuple[int, _StartedWrite]:
        async with self._writing:
            self._check_writable()
            with self._failing_on_any_error():
                sealed = self._segments.active_id
                batch = new_batch()
                self._start_segment(batch, max(self._runtime.now_ms(), self._segments.last_ms), user_meta)
                return sealed, await self._start_write(batch, self._next_seq)

    async def _unlist(self, gone: range) -> Any:
        async with self._writing:
            self._check_writable()
            with self._failing_on_any_error():
                self._segments.drop(gone.stop)
                return await unlist(self._database, gone, self._segments.state())

    def _start_segment(self, batch: Any, now: int, user_meta: bytes | None) -> None:
        sealed = self._segments.active_id
        batch.put(segment_key(SEGMENT_TOTALS, sealed), totals_value(self._segments.totals(sealed)))
        if user_meta:
            meta = self._segments.meta(sealed)._replace(user_meta=user_meta)
            batch.put(segment_key(SEGMENT_META, sealed), meta_value(meta))
            self._segments.set(sealed, meta)
        meta = SegmentMeta(self._next_seq, now, None)
        batch.put(segment_key(SEGMENT_META, sealed + 1), meta_value(meta))
        self._segments.set(sealed + 1, meta)
        batch.put(STATE_KEY, state_value(self._segments.state()))
        self._counts.start_segment(empty=True)

    def _is_due(self, now: int) -> bool:
        limits, active = self._config.segmentation, self._segments.active_id
        totals = self._segments.totals(active)
        age = now - self._segments.meta(active).start_time_ms
        return (
            (limits.seal_interval is not None and age >= limits.seal_interval / timedelta(milliseconds=1))
            or (limits.seal_bytes is not None and totals.size >= limits.seal_bytes)
            or (limits.seal_records is not None and totals.records >= limits.seal_records)
        )

    async def _start_write(self, batch: Any, first: int) -> _StartedWrite:
        reserved, end = self._reserved, self._next_seq
        handle = await self._database.write(batch)
        self._writes_in_flight.append((handle.seqnum(), end))
        return _StartedWrite(handle, first, end, reserved)

    async def _await_durable(self, written: _StartedWrite) -> None:
        await self._recording_failure(self._database.await_durable(written.handle))
        self._reserved_durably = max(self._reserved_durably, written.reserved)
        self._mark_durable(written.end)

    def _mark_durable(self, end: int) -> None:
        """Record that everything below `end` is durable: SlateDB makes writes durable in their order, so a block of
        sequences is durable before the records in it.
        """
        while self._writes_in_flight and self._writes_in_flight[0][1] <= end:
            self._writes_in_flight.popleft()
        if end > self._durable_end:
            self._durable_end = end
            self._grown.set()

    async def _recording_failure(self, answer: Awaitable[T]) -> T:
        """Await, and record the failure if it fails. A caller that is cancelled meanwhile has changed nothing."""
        try:
            return await answer
        except LlogError as error:
            self._failure = error
            raise

    @contextmanager
    def _failing_on_any_error(self) -> Iterator[None]:
        """Make the writer unusable if a change fails half-way, since the content of the log is then unknown; the next
        writer reads it.
        """
        try:
            yield
        except LlogError as error:
            self._failure = error
            raise
        except BaseException as error:
            self._failure = StoreUnavailable(f"an append to {self.url} was interrupted: {type(error).__name__} {error}")
            raise

    def _check_writable(self) -> None:
        self._check_open()
        if isinstance(self._failure, WriterFenced):
            raise WriterFenced(str(self._failure))
        if self._failure is not None:
            raise StoreUnavailable(f"the keyed log at {self.url} failed before ({self._failure}): open it again")


async def _run_to_completion(change: Coroutine[Any, Any, T]) -> T:
    """Run a change to its end even if the caller is cancelled: the next change needs a known state."""
    task = asyncio.ensure_future(change)
    task.add_done_callback(_retrieve_error)
    return await asyncio.shield(task)


def _retrieve_error(done: asyncio.Future[Any]) -> None:
    """Retrieve the error of a task whose caller may be gone; the log has recorded it."""
    if not done.cancelled():
        done.exception()
