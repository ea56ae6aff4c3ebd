"""The tail: record bytes that this process appended or read a moment ago, so that consuming them asks no blob store.

Kept by (topic directory, partition, offset). Within a directory, which names the topic's incarnation, what lies at an
offset never changes, so a kept batch is as good as a stored one; whether its offsets may still be read is for the
metadata to say, every time.

With LLOG_TAIL_CACHE_DIR, what is not in memory is looked for in the shared tail (`shared_tail.py`), where the processes
of this machine put what they append. Whatever is wrong there is counted, told once, and otherwise as if the batch were
not there.

Two kinds are kept in one bound, the oldest going first: batches at the end of their partition, and the pages of a
client that reads old records, which take the place of each other: one client's way through the past must not push out
what everybody is about to read.
"""

from __future__ import annotations

import asyncio
import os
import sys
from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from stat import S_IMODE, S_ISVTX, S_IWOTH
from typing import Final

from llog.base.durable import changeable_by_others, make_directory
from llog.batch.codecs import decoder
from llog.batch.columns import Buffer, Columns
from llog.batch.format import ENCODING, peek
from llog.broker.cache.shared_tail import Place, SharedBatch, TailReader, TailWriter, prepare
from llog.broker.metrics import Metrics
from llog.errors import ConfigurationError, CorruptBatch

BATCH_OVERHEAD: Final = 512
"""Bytes that a batch counts for besides its own: small ones must not collect without bound."""
_FIND_BYTES: Final = 1 << 20
"""How much is taken from the shared tail at a time: the batches that follow are asked for next."""
_WAITING_BYTES_MAX: Final = 32 << 20
"""Batches beyond it are not shared: the disk does not keep up."""


class _Kept:
    """One batch. What was appended is decoded when somebody first reads it."""

    __slots__ = ("columns", "count", "data", "end_offset", "size")

    def __init__(self, start_offset: int, count: int, columns: Columns | None, data: Buffer | None, size: int) -> None:
        self.end_offset = start_offset + count - 1
        self.count = count
        self.columns = columns
        self.data = data
        self.size = size + BATCH_OVERHEAD


class Tail:
    """What one process keeps in memory."""

    def __init__(self, max_bytes: int, metrics: Metrics) -> None:
        self._max_bytes = max_bytes
        self._metrics = metrics
        self._shared: SharedTail | None = None
        self._kept: dict[tuple[Place, int], _Kept] = {}
        """By place and start offset, the oldest first."""
        self._starts: dict[Place, list[int]] = {}
        """The start offsets of each place, in order."""
        self._pages: dict[Place, list[int]] = {}

    async def find(self, place: Place, offset: int) -> tuple[int, Columns] | None:
        """A batch that has a record at `offset`: its start offset and its records, with the timestamps they were stored
        with.
        """
        found = self.get(place, offset)
        if found is None and self._shared is not None:
            batches = await self._shared.find(place, offset)
            for start, data in batches:
                self._keep(place, start, _Kept(start, peek(data).count, None, data, len(data)))
            found = self.get(place, offset)
            if found is None and batches:  # there is no room for it here
                columns = _decoded(batches[0].data)
                found = None if columns is None else (batches[0].start_offset, columns)
        if found is None:
            self._metrics.tail_misses += 1
        else:
            self._metrics.tail_hits += 1
        return found

    def next_start(self, place: Place, offset: int, end: int) -> int:
        """The lowest start offset above `offset` of a batch that is kept in memory, at most `end`."""
        starts = self._starts.get(place, ())
        at = bisect_right(starts, offset)
        return min(starts[at], end) if at < len(starts) else end

    def get(self, place: Place, offset: int) -> tuple[int, Columns] | None:
        starts = self._starts.get(place, ())
        at = bisect_right(starts, offset) - 1
        if at < 0:
            return None
        start = starts[at]
        kept = self._kept[place, start]
        if offset > kept.end_offset:
            return None
        columns = kept.columns or self._decode(place, start, kept)
        return None if columns is None else (start, columns)

    def keep_appended(self, place: Place, start_offset: int, data: Buffer) -> None:
        """A batch as it is stored (`bytes-batch-v1`), which was just appended at these offsets."""
        if self._shared is not None:
            self._shared.put(place, start_offset, data)
        self._keep(place, start_offset, _Kept(start_offset, peek(data).count, None, data, len(data)))

    def keep_read(self, place: Place, batches: Sequence[tuple[int, Columns]], next_offset: int) -> None:
        """Batches that were just read, (start offset, records) each; at the end of the partition if they reach
        `next_offset`.
        """
        for start in self._pages.pop(place, ()):
            self._drop(place, start)
        pages = []
        for start, columns in batches:
            if self._keep(place, start, _Kept(start, columns.count, columns, None, _memory_of(columns))):
                pages.append(start)
        if batches and batches[-1][0] + batches[-1][1].count < next_offset:
            self._pages[place] = pages

    def share(self, shared: SharedTail) -> None:
        """Looks there, too, from now on."""
        self._shared = shared

    async def close(self) -> None:
        if self._shared is not None:
            await self._shared.close()
            self._shared = None

    def _keep(self, place: Place, start: int, kept: _Kept) -> bool:
        if kept.size > self._max_bytes:
            return False
        old = self._kept.get((place, start))
        if old is not None and old.count >= kept.count:
            return False
        self._drop(place, start)
        self._kept[place, start] = kept
        starts = self._starts.setdefault(place, [])
        if starts and starts[-1] > start:
            starts.insert(bisect_right(starts, start), start)
        else:
            starts.append(start)
        self._metrics.tail_bytes += kept.size
        self._make_room()
        return (place, start) in self._kept

    def _drop(self, place: Place, start: int) -> None:
        kept = self._kept.pop((place, start), None)
        if kept is None:
            return
        self._metrics.tail_bytes -= kept.size
        starts = self._starts[place]
        del starts[bisect_right(starts, start) - 1]
        if not starts:
            del self._starts[place]

    def _decode(self, place: Place, start: int, kept: _Kept) -> Columns | None:
        assert kept.data is not None
        columns = _decoded(kept.data)
        if columns is None or columns.count != kept.count:
            self._drop(place, start)
            return None
        size = _memory_of(columns) + BATCH_OVERHEAD
        self._metrics.tail_bytes += size - kept.size
        kept.columns, kept.data, kept.size = columns, None, size
        self._make_room()  # what was compressed is larger now
        return columns

    def _make_room(self) -> None:
        while self._metrics.tail_bytes > self._max_bytes:
            self._drop(*next(iter(self._kept)))


def private_directory(directory: Path) -> Path:
    """LLOG_TAIL_CACHE_DIR without links, made if it is missing. `ConfigurationError` if other users may write there:
    they could plant records that readers take for the log's.

    One that cannot be made is reported by the shared tail, without which the broker goes on.
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
    elif changeable_by_others(found):
        why = f"has mode {S_IMODE(found.st_mode):04o} (chmod go-w takes that from others)"
    elif open_to_all:
        why = f"lies in {open_to_all[0]}, where anybody may replace it"
    else:
        return directory
    raise ConfigurationError(
        f"LLOG_TAIL_CACHE_DIR is {directory}, which {why}: other users could plant records there. Name a directory "
        "that is "
        "this user's alone; llog makes one that is missing"
    )


class SharedTail:
    """The shared tail, off the event loop: one thread reads and writes its files."""

    def __init__(self, root: Path, writer: str | None, max_bytes: int, metrics: Metrics) -> None:
        self._root = root
        self._metrics = metrics
        self._writer = None if writer is None else TailWriter(root, writer, max_bytes)
        self._reader = TailReader(root)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="llog-shared-tail")
        self._waiting = 0
        self._is_told = False
        self._thread.submit(self._prepare)

    async def find(self, place: Place, offset: int) -> list[SharedBatch]:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._find, place, offset)

    def put(self, place: Place, start_offset: int, data: Buffer) -> None:
        """Soon; nobody waits for it."""
        if self._writer is not None and self._waiting + len(data) <= _WAITING_BYTES_MAX:
            self._waiting += len(data)
            done = asyncio.get_running_loop().run_in_executor(self._thread, self._put, place, start_offset, data)
            done.add_done_callback(lambda _: self._written(len(data)))

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._end)
        self._thread.shutdown(wait=False)

    def _written(self, size: int) -> None:
        self._waiting -= size

    def _prepare(self) -> None:
        try:
            prepare(self._root)
        except OSError as error:
            self._tell(error)

    def _find(self, place: Place, offset: int) -> list[SharedBatch]:
        damaged = self._reader.damaged
        found = self._reader.find(place, offset, _FIND_BYTES)
        self._metrics.shared_hits += len(found)
        if self._reader.damaged > damaged:
            self._tell("there is damage in its files")
            self._metrics.shared_errors += self._reader.damaged - damaged - 1
        return found

    def _put(self, place: Place, start_offset: int, data: Buffer) -> None:
        assert self._writer is not None
        try:
            self._metrics.shared_batches += self._writer.put(place, start_offset, data)
        except OSError as error:
            self._tell(error)

    def _end(self) -> None:
        try:
            if self._writer is not None:
                self._writer.close()
        except OSError as error:
            self._tell(error)

    def _tell(self, what: object) -> None:
        self._metrics.shared_errors += 1
        if not self._is_told:
            self._is_told = True
            print(
                f"llog: the shared tail in {self._root} fails ({what}): the broker goes on without it where it must; "
                "further failures are only counted",
                file=sys.stderr,
                flush=True,
            )


def _decoded(data: Buffer) -> Columns | None:
    try:
        return decoder(ENCODING)(data)
    except CorruptBatch:
        return None


def _memory_of(columns: Columns) -> int:
    arrays = (columns.values, columns.keys, columns.timestamps, columns.headers)
    return sum(array.get_total_buffer_size() for array in arrays if array is not None)
