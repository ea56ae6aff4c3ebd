"""The state of a log's producers, and the snapshot of it that a roll and a close write.

`<offset>.producers` is JSON: the producers known before that offset, and the highest times of the log up to there. The
state at any later offset follows from the headers of the frames in between.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import msgspec

from llog.engines.disk.format.files import PRODUCERS, file_name, file_numbers, replace_small_file
from llog.engines.disk.format.frames import Frame
from llog.engines.disk.format.index import Maxima, maxima_of
from llog.log.producers import ProducerState, RememberedAppend, remember
from llog.model import FIRST_OFFSET

VERSION: Final = 1
SNAPSHOTS_KEPT: Final = 2


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    offset: int
    max_append_ms: int
    max_timestamp_ms: int
    evicted_through: int
    producers: dict[str, ProducerState]


class LogState(msgspec.Struct, frozen=True, kw_only=True):
    """A log as of its next offset."""

    next_offset: int = FIRST_OFFSET
    maxima: Maxima = Maxima()
    producers: dict[str, ProducerState] = {}
    evicted_through: int = 0

    def after(self, frame: Frame) -> LogState:
        """Return the state after one more frame."""
        producers, evicted = self.producers, self.evicted_through
        if frame.producer is not None:
            appended = RememberedAppend(frame.sequence, frame.base_offset, frame.next_offset - 1)
            known = producers.get(frame.producer)
            if known is not None and known.last[-1].sequence == frame.sequence:
                # One more frame of the same append.
                appended = RememberedAppend(frame.sequence, known.last[-1].start_offset, frame.next_offset - 1)
                producers = {**producers, frame.producer: ProducerState(last=known.last[:-1], used_ms=known.used_ms)}
            producers, evicted = remember(producers, evicted, frame.producer, appended, frame.append_ms)
        return LogState(
            next_offset=frame.next_offset, maxima=maxima_of(frame), producers=producers, evicted_through=evicted
        )


def put_snapshot(directory: Path, state: LogState) -> None:
    """Write a snapshot durably, and remove older ones that are not needed any more."""
    snapshot = Snapshot(
        version=VERSION,
        offset=state.next_offset,
        max_append_ms=state.maxima.append_ms,
        max_timestamp_ms=state.maxima.timestamp_ms,
        evicted_through=state.evicted_through,
        producers=state.producers,
    )
    replace_small_file(directory / file_name(state.next_offset, PRODUCERS), msgspec.json.encode(snapshot))
    for offset in file_numbers(directory, PRODUCERS)[:-SNAPSHOTS_KEPT]:
        os.unlink(directory / file_name(offset, PRODUCERS))


def newest_snapshot(directory: Path, through: int, *, remove: bool = True) -> LogState | None:
    """Return the newest intact snapshot at or below this offset. Later ones belong to a tail that is lost; `remove`
    deletes them.
    """
    for offset in reversed(file_numbers(directory, PRODUCERS)):
        path = directory / file_name(offset, PRODUCERS)
        if offset > through:
            if remove:
                os.unlink(path)
            continue
        try:
            found = msgspec.json.decode(path.read_bytes(), type=Snapshot)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
        if found.version == VERSION and found.offset == offset:
            return LogState(
                next_offset=offset,
                maxima=Maxima(found.max_append_ms, found.max_timestamp_ms),
                producers=found.producers,
                evicted_through=found.evicted_through,
            )
    return None
