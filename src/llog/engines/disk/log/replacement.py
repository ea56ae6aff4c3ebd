"""Replaces sealed segments by a rewritten one. A crash at any point leaves the old segments or the new one, never parts
of both.

1. `<base>.log.cleaned`, `<base>.index.cleaned` and `<base>.timeindex.cleaned` are written and synced. After a crash
   here, they are removed.
2. `<base>.swap` is written durably: JSON that names the segments to be replaced. This is the commit point.
3. The cleaned files are renamed to their final names, the other segments are removed, then the swap file. After a crash
   here, `finish_replacements` does the rest when the log is opened next.

Readers take no part in this: they find frames by offset, check each, and list the directory again when a file was
removed or replaced.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final

import msgspec

from llog.base.durable import FILE_MODE, sync_directory
from llog.batch.columns import Buffer
from llog.engines.disk.format.files import (
    CLEANED,
    INDEX,
    LOG,
    PRODUCERS,
    SWAP,
    TIMEINDEX,
    file_name,
    file_numbers,
    replace_small_file,
    write_at,
)
from llog.engines.disk.format.frames import Frame, Offsets, parse
from llog.engines.disk.format.index import IndexRule, Maxima, maxima_of
from llog.engines.disk.options import SegmentOptions
from llog.errors import CorruptBatch, InvalidArgument

VERSION: Final = 1
_SUFFIXES: Final = (INDEX, TIMEINDEX, LOG)


class Swap(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a swap file: the segment `bases[0]` was rewritten and now holds the records of all `bases`."""

    version: int
    bases: tuple[int, ...]


class Replacement:
    """The new content of neighbouring sealed segments, added frame by frame. It takes effect with `commit`; without
    that, leaving the context removes it.

    Frames cover the same offsets as before, without a gap: the span of a sparse frame covers removed records.
    """

    def __init__(
        self, directory: Path, bases: Sequence[int], stop: int, options: SegmentOptions, before: Maxima
    ) -> None:
        self._directory = directory
        self._bases = tuple(bases)
        self._stop = stop
        """The base offset of the segment that follows."""
        self._offset = bases[0]
        self._before = before
        self._position = 0
        self._rule = IndexRule(bases[0], options.index_interval_bytes, options.index_interval_records)
        self._indexes = bytearray(), bytearray()
        self._ends_in_record = False
        self._done = False
        self._descriptor = os.open(self._path(LOG), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, FILE_MODE)

    def __enter__(self) -> Replacement:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)
        if not self._done:
            for suffix in _SUFFIXES:
                self._path(suffix).unlink(missing_ok=True)

    @property
    def next_offset(self) -> int:
        """The base offset that the next frame must have."""
        return self._offset

    @property
    def bytes_written(self) -> int:
        return self._position

    def add(self, parts: Sequence[Buffer], offsets: Offsets | None = None) -> None:
        """Add one frame as `frame_parts` makes it, with the same `offsets`."""
        frame = parse(parts[0], 0, len(parts[0]))
        if not isinstance(frame, Frame) or frame.base_offset != self._offset:
            raise InvalidArgument(f"a rewritten segment needs a frame of base offset {self._offset} here")
        length = sum(map(len, parts))
        write_at(self._descriptor, parts, self._position, length)
        if length != frame.length:
            raise InvalidArgument(f"a frame says that it has {frame.length} bytes, but has {length}")
        entry, time_entry = self._rule.entries(self._position, self._offset, self._before)
        self._indexes[0].extend(entry)
        self._indexes[1].extend(time_entry)
        last = frame.records - 1 if offsets is None else int(offsets[-1]) if len(offsets) else -1
        self._ends_in_record = last == frame.span - 1
        self._before = maxima_of(frame)
        self._position += length
        self._offset = frame.next_offset

    def prepare(self) -> None:
        """Make the new files durable once all frames are added. This is the slow part; appends need not wait for it."""
        if self._offset != self._stop:
            raise InvalidArgument(
                f"the rewritten segment ends at offset {self._offset - 1}, not at {self._stop - 1}: cover all offsets"
            )
        os.fsync(self._descriptor)
        for suffix, content in zip((INDEX, TIMEINDEX), self._indexes, strict=True):
            replace_small_file(self._path(suffix), content)

    def commit(self, *, last_record_needed: bool) -> None:
        """Replace the segments, after `prepare`. `last_record_needed` says that no sealed segment follows, so readers
        need a record at the end of this one.
        """
        if last_record_needed and not self._ends_in_record:
            raise InvalidArgument(
                f"offset {self._stop - 1} is the last sealed one: keep its record, or readers wait for it in vain"
            )
        swap = self._directory / file_name(self._bases[0], SWAP)
        try:
            replace_small_file(swap, msgspec.json.encode(Swap(version=VERSION, bases=self._bases)))
        finally:
            # Even after an error: once the swap file exists, the cleaned files replace the others, and must stay.
            self._done = swap.exists()
        _swap_files(self._directory, self._bases)

    def _path(self, suffix: str) -> Path:
        return self._directory / (file_name(self._bases[0], suffix) + CLEANED)


def finish_replacements(directory: Path) -> None:
    """Complete the replacements that were committed, and remove the files of those that were not."""
    complete_committed(directory)
    leftovers = [name for name in os.listdir(directory) if name.endswith(CLEANED)]
    for name in leftovers:
        os.unlink(directory / name)


def complete_committed(directory: Path) -> None:
    """Complete the replacements that were committed but interrupted. Called before segments are changed in any way."""
    for base in file_numbers(directory, SWAP):
        path = directory / file_name(base, SWAP)
        try:
            swap = msgspec.json.decode(path.read_bytes(), type=Swap)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CorruptBatch(f"{path} is damaged: {error}. Remove it: the segments then stay as they are") from error
        if swap.version != VERSION:
            raise CorruptBatch(f"{path} has version {swap.version}, not {VERSION}: a newer llog may have written it")
        _swap_files(directory, swap.bases)


def _swap_files(directory: Path, bases: Iterable[int]) -> None:
    """Move the cleaned files into place and remove the replaced ones. Idempotent, so it can resume after a crash."""
    first, *others = bases
    for suffix in _SUFFIXES:
        cleaned = directory / (file_name(first, suffix) + CLEANED)
        if cleaned.exists():
            os.rename(cleaned, directory / file_name(first, suffix))
    sync_directory(directory)
    for base in others:
        for suffix in (*_SUFFIXES, PRODUCERS):
            (directory / file_name(base, suffix)).unlink(missing_ok=True)
    sync_directory(directory)
    (directory / file_name(first, SWAP)).unlink(missing_ok=True)
    sync_directory(directory)
