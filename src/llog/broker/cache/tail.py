"""The tail: batches that this process appended or read a moment ago, so that consuming them needs no blob store.

Batches are kept by topic directory, partition and start offset. A directory belongs to one incarnation of a topic, and
the record at an offset never changes there, so a kept batch is as good as the stored one. Whether its offsets may still
be read is for the broker's views to say (`engines/object/views.py`).

With LLOG_TAIL_CACHE_DIR, batches that are not in memory are looked for in the shared tail (`shared_tail.py`), where the
processes of this machine put what they append. A failure there is counted, reported once, and counts as a miss.

One bound holds for two kinds of batches, and the oldest go first: those at the end of their partition, and the pages of
clients that read old records. A page replaces the one that it follows, and all pages together have at most half of the
room, so that clients that read the past do not push out what everybody is about to read.
"""

from __future__ import annotations

import asyncio
import logging
import os
from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from stat import S_IMODE, S_ISVTX, S_IWOTH
from typing import Final, NamedTuple

from llog.base.durable import is_changeable_by_others, make_directory
from llog.batch.columns import Buffer, Columns
from llog.batch.encodings import decoder
from llog.batch.format import ENCODING, HEADER_BYTES, peek
from llog.broker.cache.shared_tail import SharedBatch, TailKey, TailReader, TailWriter, prepare
from llog.broker.metrics import Metrics
from llog.errors import ConfigurationError, CorruptBatch

logger: Final = logging.getLogger("llog.broker")

BATCH_OVERHEAD: Final = 512
"""Bytes that a batch counts for besides its own: small batches must not accumulate without bound."""
_FIND_BYTES: Final = 1 << 20
"""Bytes that are taken from the shared tail at a time: the following batches are asked for next."""
_PUBLICATION_PAUSES_S: Final = (0.001, 0.002, 0.004, 0.008, 0.016)
"""Pauses between looks for a batch that its writer has committed and is about to keep here or share."""
_OWN_PAUSES: Final = 3
"""The number of these pauses for an append of this process, which hears of its commit a moment later than the watch."""
_LATE_PENALTY: Final = 8
"""After a batch that did not come, this many must come before another one is waited for."""
_EXPECTED_MAX: Final = 10_000
_WAITING_BYTES_MAX: Final = 32 << 20
"""Bytes that wait to be shared; more are not shared, since the disk does not keep up."""


class _CachedBatch:
    """One batch. An appended one is decoded when it is first read."""

    __slots__ = ("columns", "count", "data", "end_offset", "page_end", "size")

    def __init__(
        self,
        start_offset: int,
        count: int,
        columns: Columns | None,
        data: Buffer | None,
        size: int,
        *,
        page_end: int | None = None,
    ) -> None:
        self.end_offset = start_offset + count - 1
        self.count = count
        self.columns = columns
        self.data = data
        self.size = size + BATCH_OVERHEAD
        self.page_end = page_end
        """The offset that follows the page of old records that the batch belongs to, if it does."""


class _ExpectedBatch(NamedTuple):
    """Where the next batch of a partition begins that a writer of this machine puts into the tail."""

    start_offset: int
    hits: int
    """Batches that came, in their turn, since one did not come: negative while the next one is not waited for."""


class Tail:
    """The batches that one process keeps in memory."""

    def __init__(self, max_bytes: int, metrics: Metrics) -> None:
        self._max_bytes = max_bytes
        self._metrics = metrics
        self._shared: SharedTail | None = None
        self._batches: dict[tuple[TailKey, int], _CachedBatch] = {}
        """By partition and start offset, the oldest first."""
        self._starts: dict[TailKey, list[int]] = {}
        """The start offsets of each partition, in order."""
        self._pages: dict[tuple[TailKey, int], dict[int, None]] = {}
        """The start offsets of each page, by partition and the offset that follows the page, the oldest page first."""
        self._page_bytes = 0
        self._expected: dict[TailKey, _ExpectedBatch] = {}

    async def find(self, key: TailKey, offset: int) -> tuple[int, Columns] | None:
        """Return the start offset and the records, with their stored timestamps, of a batch that has `offset`.

        None if neither this process nor the shared tail has one.
        """
        found = self.get(key, offset) or await self._find_shared(key, offset)
        if found is None:
            found = await self._wait_for(key, offset)
        if found is None:
            self._metrics.tail_misses += 1
        else:
            self._metrics.tail_hits += 1
        return found

    async def _find_shared(self, key: TailKey, offset: int) -> tuple[int, Columns] | None:
        if self._shared is None:
            return None
        batches = await self._shared.find(key, offset)
        for start, data in batches:
            count = peek(data).count
            self._keep(key, start, _CachedBatch(start, count, None, data, len(data)))
            self._expect_after(key, start + count)
        found = self.get(key, offset)
        if found is None and batches:  # it has no room in memory
            columns = _decode_batch(batches[0].data)
            found = None if columns is None else (batches[0].start_offset, columns)
        return found

    async def _wait_for(self, key: TailKey, offset: int) -> tuple[int, Columns] | None:
        """Wait a moment for a batch at `offset`, if the batch before it came from a writer of this machine.

        A reader may learn of a commit before the batch is here, and would ask the blob store for every hot record.
        """
        expected = self._expected.get(key)
        if expected is None or expected.start_offset != offset or expected.hits < 0:
            return None
        pauses = _PUBLICATION_PAUSES_S if self._shared is not None else _PUBLICATION_PAUSES_S[:_OWN_PAUSES]
        if self._shared is None and not self._metrics.flushes_in_flight:
            return None
        for pause in pauses:
            await asyncio.sleep(pause)
            found = self.get(key, offset) or await self._find_shared(key, offset)
            if found is not None:
                return found
        self._expected[key] = _ExpectedBatch(offset, -_LATE_PENALTY)
        return None

    def _expect_after(self, key: TailKey, next_offset: int) -> None:
        expected = self._expected.pop(key, None)
        if len(self._expected) >= _EXPECTED_MAX:
            self._expected.clear()
        self._expected[key] = _ExpectedBatch(next_offset, 0 if expected is None else min(expected.hits + 1, 0))

    def next_start(self, key: TailKey, offset: int, end: int) -> int:
        """Return the lowest start offset above `offset` of the batches in memory, at most `end`."""
        starts = self._starts.get(key, ())
        at = bisect_right(starts, offset)
        return min(starts[at], end) if at < len(starts) else end

    def get(self, key: TailKey, offset: int) -> tuple[int, Columns] | None:
        """Return what `find` returns, from memory alone."""
        starts = self._starts.get(key, ())
        at = bisect_right(starts, offset) - 1
        if at < 0:
            return None
        start = starts[at]
        kept = self._batches[key, start]
        if offset > kept.end_offset:
            return None
        columns = kept.columns or self._decode(key, start, kept)
        return None if columns is None else (start, columns)

    def keep_appended(self, directory: str, partition: int, start_offset: int, parts: Sequence[Buffer]) -> int:
        """Keep a batch that was just committed here, given as the parts of what is stored (`bytes-batch-v1`).

        Returns the number of its records.
        """
        if self._shared is None and not self._max_bytes:
            return peek(parts[0] if len(parts[0]) >= HEADER_BYTES else b"".join(parts)).count
        key, data = (directory, partition), b"".join(parts)
        count = peek(data).count
        if self._shared is not None:
            self._shared.put(key, start_offset, data)
        self._keep(key, start_offset, _CachedBatch(start_offset, count, None, data, len(data)))
        self._expect_after(key, start_offset + count)
        return count

    def keep_read(self, key: TailKey, batches: Sequence[tuple[int, Columns]], next_offset: int) -> None:
        """Keep batches that were just read, each with its start offset.

        They are at the end of the partition if they reach `next_offset`; otherwise they are a page of old records.
        """
        if not batches:
            return
        for start in list(self._pages.get((key, batches[0][0]), ())):
            self._drop(key, start)
        end = batches[-1][0] + batches[-1][1].count
        page_end = end if end < next_offset else None
        for start, columns in batches:
            self._keep(
                key, start, _CachedBatch(start, columns.count, columns, None, _memory_bytes(columns), page_end=page_end)
            )

    @property
    def is_on(self) -> bool:
        """Whether batches are kept in memory."""
        return self._max_bytes > 0

    def share(self, shared: SharedTail) -> None:
        """Use the shared tail, too, from now on."""
        self._shared = shared

    async def close(self) -> None:
        if self._shared is not None:
            await self._shared.close()
            self._shared = None

    def _keep(self, key: TailKey, start: int, kept: _CachedBatch) -> None:
        if kept.size > self._max_bytes:
            return
        old = self._batches.get((key, start))
        if old is not None and old.count >= kept.count:
            return
        self._drop(key, start)
        self._batches[key, start] = kept
        starts = self._starts.setdefault(key, [])
        if starts and starts[-1] > start:
            starts.insert(bisect_right(starts, start), start)
        else:
            starts.append(start)
        self._metrics.tail_bytes += kept.size
        if kept.page_end is not None:
            self._page_bytes += kept.size
            self._pages.setdefault((key, kept.page_end), {})[start] = None
        self._make_room()

    def _drop(self, key: TailKey, start: int) -> None:
        kept = self._batches.pop((key, start), None)
        if kept is None:
            return
        self._metrics.tail_bytes -= kept.size
        if kept.page_end is not None:
            self._page_bytes -= kept.size
            page = self._pages[key, kept.page_end]
            del page[start]
            if not page:
                del self._pages[key, kept.page_end]
        starts = self._starts[key]
        del starts[bisect_right(starts, start) - 1]
        if not starts:
            del self._starts[key]

    def _decode(self, key: TailKey, start: int, kept: _CachedBatch) -> Columns | None:
        assert kept.data is not None
        columns = _decode_batch(kept.data)
        if columns is None or columns.count != kept.count:
            self._drop(key, start)
            return None
        size = _memory_bytes(columns) + BATCH_OVERHEAD
        self._metrics.tail_bytes += size - kept.size
        kept.columns, kept.data, kept.size = columns, None, size
        self._make_room()  # a compressed batch has grown
        return columns

    def _make_room(self) -> None:
        while self._page_bytes > self._max_bytes // 2:
            (key, _), page = next(iter(self._pages.items()))
            self._drop(key, next(iter(page)))
        while self._metrics.tail_bytes > self._max_bytes:
            self._drop(*next(iter(self._batches)))


def private_directory(directory: Path) -> Path:
    """Return LLOG_TAIL_CACHE_DIR without links; create it if it is missing.

    Raises `ConfigurationError` if other users may write there: they could plant records. If the directory cannot be
    created, the shared tail reports it, and the broker works without.
    """
    directory = directory.resolve()
    try:
        make_directory(directory)
        found = directory.stat()
        open_to_all = [each for each in directory.parents if each.stat().st_mode & (S_IWOTH | S_ISVTX) == S_IWOTH]
    except OSError:
        return directory
    if found.st_uid != os.geteuid():
        why = f"belongs to user {found.st_uid}, while this process runs as {os.geteuid()}"
    elif is_changeable_by_others(found):
        why = f"has mode {S_IMODE(found.st_mode):04o} (chmod go-w takes that from others)"
    elif open_to_all:
        why = f"lies in {open_to_all[0]}, where any user may replace it"
    else:
        return directory
    raise ConfigurationError(
        f"LLOG_TAIL_CACHE_DIR is {directory}, which {why}: other users could plant records there. Name a directory "
        "that is this user's alone; llog creates one that is missing"
    )


class SharedTail:
    """The shared tail, off the event loop: one thread reads and writes its files."""

    def __init__(self, root: Path, writer: str | None, max_bytes: int, metrics: Metrics) -> None:
        self._root = root
        self._metrics = metrics
        self._writer = None if writer is None else TailWriter(root, writer, max_bytes)
        self._reader = TailReader(root)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="llog-shared-tail")
        self._waiting_bytes = 0
        self._is_reported = False
        self._thread.submit(self._prepare)

    async def find(self, key: TailKey, offset: int) -> list[SharedBatch]:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._find, key, offset)

    def put(self, key: TailKey, start_offset: int, data: Buffer) -> None:
        """Put the batch soon; the caller does not wait for it."""
        if self._writer is not None and self._waiting_bytes + len(data) <= _WAITING_BYTES_MAX:
            self._waiting_bytes += len(data)
            done = asyncio.get_running_loop().run_in_executor(self._thread, self._put, key, start_offset, data)
            done.add_done_callback(lambda _: self._end_put(len(data)))

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._close_writer)
        self._thread.shutdown(wait=False)

    def _end_put(self, size: int) -> None:
        self._waiting_bytes -= size

    def _prepare(self) -> None:
        try:
            prepare(self._root)
        except OSError as error:
            self._report(error)

    def _find(self, key: TailKey, offset: int) -> list[SharedBatch]:
        damaged = self._reader.damaged
        found = self._reader.find(key, offset, _FIND_BYTES)
        self._metrics.shared_hits += len(found)
        if self._reader.damaged > damaged:
            self._report("there is damage in its files")
            self._metrics.shared_errors += self._reader.damaged - damaged - 1
        return found

    def _put(self, key: TailKey, start_offset: int, data: Buffer) -> None:
        assert self._writer is not None
        try:
            self._metrics.shared_batches += self._writer.put(key, start_offset, data)
        except OSError as error:
            self._report(error)

    def _close_writer(self) -> None:
        try:
            if self._writer is not None:
                self._writer.close()
        except OSError as error:
            self._report(error)

    def _report(self, what: object) -> None:
        self._metrics.shared_errors += 1
        if not self._is_reported:
            self._is_reported = True
            logger.warning(
                "the shared tail in %s fails (%s): the broker works without it where it must; further failures are "
                "only counted",
                self._root,
                what,
            )


def _decode_batch(data: Buffer) -> Columns | None:
    try:
        return decoder(ENCODING)(data)
    except CorruptBatch:
        return None


def _memory_bytes(columns: Columns) -> int:
    arrays = (columns.values, columns.keys, columns.timestamps, columns.headers)
    return sum(array.get_total_buffer_size() for array in arrays if array is not None)
