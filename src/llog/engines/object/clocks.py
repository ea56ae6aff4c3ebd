"""Clocks: which stamps the names of blobs may have, and the repair of a log in which a clock was far ahead.

A control record has a floor and a ceiling, and so has a sink's record. A blob stamped below the floor or above the
ceiling is not committed but uploaded again under a new name. The collector decides about blobs stamped below the floor
that it has raised, and about those stamped above all ceilings, which no right clock has stamped. So a clock that is
ahead, even by years, stamps nothing above the ceiling, and what was stamped higher before there was one is collected
when nothing names it.

- Ceilings go up with the clocks of collectors and writers that come near to one. Before, each compares its clock with
  the blob store's, and takes that one if its own is ahead by more than `SKEW_MS`.
- Only a repair lowers a floor or a ceiling. It voids all uploads that are not committed yet: it counts up
  `clock_repairs`, and a blob whose name was chosen under another count is uploaded again. So it does not matter what a
  collector has decided before, by whichever clock. The first ceiling of a partition counts as a repair, for until then
  there was no bound.
"""

from __future__ import annotations

from typing import Final, NamedTuple, TypeVar

import msgspec

from llog.errors import OutcomeUnknown, StoreUnavailable, VersionMismatch
from llog.log.keys import CLOCK
from llog.log.log import Log
from llog.log.records import Control, Sink, encode
from llog.runtime import stamp_of, uuid7
from llog.stores.meta import Entry

R = TypeVar("R", Control, Sink)

AHEAD_MS: Final = 86_400_000
"""How far ceilings are ahead of the present: further than clocks differ that are not wrong."""
SKEW_MS: Final = 300_000
"""A clock that is further ahead of the blob store's is not believed."""


class Window(NamedTuple):
    """What is below `old_ms`, by stamp or by age, is old enough to be collected; above `far_ms`, no right clock has
    stamped it.
    """

    old_ms: int
    now_ms: int
    far_ms: int

    def is_inside(self, time_ms: int) -> bool:
        return self.old_ms <= time_ms <= self.far_ms


async def window(log: Log, grace_ms: int) -> Window:
    now_ms = await present_ms(log)
    return Window(now_ms - grace_ms, now_ms, now_ms + AHEAD_MS)


async def present_ms(log: Log) -> int:
    """The present by this process's clock; by the blob store's if this one is far ahead of it."""
    store_ms = await store_time_ms(log)
    now_ms = log.runtime.now_ms()
    return now_ms if now_ms <= store_ms + SKEW_MS else store_ms


async def store_time_ms(log: Log) -> int:
    """The present by the blob store's clock, read off a blob that is put and deleted again. One that is left over is
    garbage.
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
    """The stamp of a blob to be put now: the clock's, brought within the bounds of the records that may come to name
    it.

    It is never above a ceiling: a collector takes such a blob for one that nobody may commit. Where a floor is higher
    than another ceiling, it is below that floor.
    """
    stamp = max([now_ms, *(record.blob_floor_ms for record in records)])
    return min([stamp, *(record.blob_ceiling_ms for record in records if record.blob_ceiling_ms)])


def bounded_ms(now_ms: int, record: Control | Sink) -> int:
    """The clock's time, which is not above the record's ceiling."""
    return min(now_ms, record.blob_ceiling_ms) if record.blob_ceiling_ms else now_ms


def may_commit(record: Control | Sink, blob: str, clock_repairs: int) -> bool:
    """Whether no collector can have decided about a blob whose name was chosen after so many repairs of the record."""
    stamp = stamp_of(blob)
    if stamp is None or stamp < record.blob_floor_ms or clock_repairs != record.clock_repairs:
        return False
    return not record.blob_ceiling_ms or stamp <= record.blob_ceiling_ms


def is_near_ceiling(record: Control | Sink, now_ms: int) -> bool:
    return bool(record.blob_ceiling_ms) and now_ms > record.blob_ceiling_ms - AHEAD_MS // 2


def raised(record: R, floor_ms: int, ceiling_ms: int) -> R:
    """The record with these bounds; those that it has do not go down, and there is always a stamp between them."""
    floor_ms = max(floor_ms, record.blob_floor_ms)
    ceiling_ms = max(ceiling_ms, record.blob_ceiling_ms, floor_ms)
    return msgspec.structs.replace(record, blob_floor_ms=floor_ms, blob_ceiling_ms=ceiling_ms)


def lowered(record: R, present_ms: int) -> R:
    """The record with bounds that are right now, and every upload voided that is not committed."""
    return msgspec.structs.replace(
        record,
        blob_floor_ms=present_ms,
        blob_ceiling_ms=present_ms + AHEAD_MS,
        clock_repairs=record.clock_repairs + 1,
    )


async def is_put(log: Log, found: Entry, record: Control | Sink) -> bool:
    """Whether the record is there now, in place of what was found."""
    value = encode(record)
    if value == found.value:
        return True
    try:
        await log.meta.put(found.key, value, expected=found.version)
    except (VersionMismatch, OutcomeUnknown):
        return False
    return True
