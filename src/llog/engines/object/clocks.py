"""Bounds on the stamps in blob names, which limit what a wrong clock can do.

Every control record and every sink's record has a floor and a ceiling. A blob stamped below the floor or above the
ceiling is not committed, but uploaded again under a new name. The collector decides about blobs stamped below the floor
that it has raised, and about blobs stamped above all ceilings, which no correct clock can have stamped. A clock that is
ahead, even by years, therefore stamps nothing above the ceiling, and blobs that were stamped higher before a ceiling
existed are collected once nothing names them.

- A collector, or a writer whose clock comes near a ceiling, raises the ceiling. It first compares its clock with the
  blob store's, and uses the blob store's if its own is ahead by more than `SKEW_MS`.
- Only a repair lowers a floor or a ceiling. It voids all uploads that are not committed yet: it increments
  `clock_repairs`, and a blob whose name was chosen under another count is uploaded again. Earlier decisions of a
  collector, by whatever clock, therefore do no harm. The first ceiling of a partition counts as a repair, because until
  then there was no bound.
"""

from __future__ import annotations

from typing import Final, NamedTuple, TypeVar

import msgspec

from llog.errors import StoreUnavailable
from llog.log.keys import CLOCK
from llog.log.log import Log
from llog.log.records import Control, Sink
from llog.runtime import stamp_of, uuid7

R = TypeVar("R", Control, Sink)

AHEAD_MS: Final = 86_400_000
"""How far ceilings are ahead of the present: further than correct clocks differ."""
SKEW_MS: Final = 300_000
"""A clock that is further ahead of the blob store's is not used."""


class Window(NamedTuple):
    """The stamps that a collection leaves alone. A blob is old enough below `old_ms`; no correct clock stamps above
    `far_ms`.
    """

    old_ms: int
    now_ms: int
    far_ms: int

    def is_inside(self, time_ms: int) -> bool:
        return self.old_ms <= time_ms <= self.far_ms


async def collection_window(log: Log, grace_ms: int) -> Window:
    now_ms = await present_ms(log)
    return Window(now_ms - grace_ms, now_ms, now_ms + AHEAD_MS)


async def present_ms(log: Log) -> int:
    """Return the present by this process's clock, or by the blob store's if this clock is far ahead of it."""
    store_ms = await store_time_ms(log)
    now_ms = log.runtime.now_ms()
    return now_ms if now_ms <= store_ms + SKEW_MS else store_ms


async def store_time_ms(log: Log) -> int:
    """Return the present by the blob store's clock: the modification time of a probe blob, which is then deleted.

    The collector deletes a probe that is left behind.
    """
    probe = CLOCK + uuid7(0, log.runtime.random())
    await log.blobs.put(probe, [b"what time is it?"])
    found = await log.blobs.head(probe)
    if found is None:
        raise StoreUnavailable(
            f"the blob {probe}, put to learn the store's time, was deleted by another collector: try again"
        )
    await log.blobs.delete_many([probe])
    return found.modified_ms


def stamp_within(now_ms: int, *records: Control | Sink) -> int:
    """Return the stamp of a blob to be put now: the clock's, brought within the bounds of the records that may come to
    name the blob.

    The stamp is never above a ceiling, because a collector takes such a blob for one that no writer may commit. If one
    record's floor is above another's ceiling, the stamp is below that floor.
    """
    stamp = max([now_ms, *(record.blob_floor_ms for record in records)])
    return min([stamp, *(record.blob_ceiling_ms for record in records if record.blob_ceiling_ms)])


def clamp_to_ceiling(now_ms: int, record: Control | Sink) -> int:
    """Return the clock's time, at most the record's ceiling."""
    return min(now_ms, record.blob_ceiling_ms) if record.blob_ceiling_ms else now_ms


def may_commit(record: Control | Sink, blob: str, clock_repairs: int) -> bool:
    """Return whether the record admits the blob, so that no collector can have decided to delete it.

    `clock_repairs` is the record's count when the blob's name was chosen.
    """
    stamp = stamp_of(blob)
    if stamp is None or stamp < record.blob_floor_ms or clock_repairs != record.clock_repairs:
        return False
    return not record.blob_ceiling_ms or stamp <= record.blob_ceiling_ms


def is_near_ceiling(record: Control | Sink, now_ms: int) -> bool:
    return bool(record.blob_ceiling_ms) and now_ms > record.blob_ceiling_ms - AHEAD_MS // 2


def raise_bounds(record: R, floor_ms: int, ceiling_ms: int) -> R:
    """Return the record with its bounds raised to these; neither bound goes down, and the ceiling is never below the
    floor.
    """
    floor_ms = max(floor_ms, record.blob_floor_ms)
    ceiling_ms = max(ceiling_ms, record.blob_ceiling_ms, floor_ms)
    return msgspec.structs.replace(record, blob_floor_ms=floor_ms, blob_ceiling_ms=ceiling_ms)


def lower_bounds(record: R, present_ms: int) -> R:
    """Return the record with bounds around the present, and every uncommitted upload voided."""
    return msgspec.structs.replace(
        record,
        blob_floor_ms=present_ms,
        blob_ceiling_ms=present_ms + AHEAD_MS,
        clock_repairs=record.clock_repairs + 1,
    )
