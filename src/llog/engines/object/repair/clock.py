"""The repair of a log whose clocks were far ahead: finds floors, ceilings and pins in the future, and brings them back.

A floor that a collector raised by such a clock makes every writer stamp its blobs in the future, and a ceiling above
those stamps keeps the collector from judging them. The repair changes records only. What it frees, the next collection
deletes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec

from llog.engines.object.clocks import AHEAD_MS, R, is_put, lowered, store_time_ms
from llog.errors import VersionMismatch
from llog.log.catalog import OBJECT, Catalog
from llog.log.keys import PINS, ROOT, SINKS, PartitionKeys
from llog.log.log import Log
from llog.log.records import Control, LogState, Pin, Sink, decode
from llog.runtime import stamp_of
from llog.stores.meta import Entry, scan


class WrongBounds(msgspec.Struct, frozen=True, kw_only=True):
    """A control record (`topic/partition`) or a sink's whose bounds are in the future."""

    name: str
    key: str
    floor_ms: int
    ceiling_ms: int


class ClockDamage(msgspec.Struct, frozen=True, kw_only=True):
    """What clocks that were far ahead have left behind."""

    present_ms: int
    """By the blob store's clock."""
    partitions: tuple[WrongBounds, ...] = ()
    sinks: tuple[WrongBounds, ...] = ()
    pins: tuple[str, ...] = ()
    blobs: int = 0
    blob_bytes: int = 0
    """Of blobs stamped in the future, in use or not."""

    @property
    def is_repairable(self) -> bool:
        return bool(self.partitions or self.sinks or self.pins)


async def find_clock_damage(log: Log) -> ClockDamage:
    """Looks at every record and lists every blob; changes nothing."""
    present_ms = await store_time_ms(log)
    blobs = size = 0
    async for page in log.blobs.list(ROOT):
        far = [info.size for info in page if (stamp_of(info.name) or 0) > present_ms + AHEAD_MS]
        blobs += len(far)
        size += sum(far)
    return ClockDamage(
        present_ms=present_ms,
        partitions=tuple([each async for each in _wrong_partitions(log, present_ms, far_stamps=blobs > 0)]),
        sinks=tuple([each async for each in _wrong_sinks(log, present_ms, far_stamps=blobs > 0)]),
        pins=tuple([found.key.removeprefix(PINS) async for found in _far_pins(log, present_ms)]),
        blobs=blobs,
        blob_bytes=size,
    )


async def repair_clock(log: Log, damage: ClockDamage) -> None:
    """Sets floors to the present and ceilings a little above it, and releases the pins that would not run out for long.

    It voids uploads that are not committed: appends under way upload once more, and a sink's batch under way fails and
    has to be run again.
    """
    present_ms = await store_time_ms(log)
    for each in damage.partitions:
        await _lower(log, each.key, Control, present_ms)
    for each in damage.sinks:
        await _lower(log, each.key, Sink, present_ms)
    async for found in _far_pins(log, present_ms):
        try:
            await log.meta.delete(found.key, expected=found.version)
        except VersionMismatch:
            pass  # renewed just now


async def _wrong_partitions(log: Log, present_ms: int, *, far_stamps: bool) -> AsyncIterator[WrongBounds]:
    for topic in await Catalog(log).topics(OBJECT):
        for partition in range(topic.partitions):
            key = PartitionKeys(topic.directory, partition).control
            found = await log.meta.get(key)
            control = Control(log_state=LogState.DELETED) if found is None else decode(Control, found.value, key)
            if control.log_state is not LogState.DELETED and _is_wrong(control, present_ms, far_stamps):
                yield _bounds(f"{topic.name}/{partition}", key, control)


async def _wrong_sinks(log: Log, present_ms: int, *, far_stamps: bool) -> AsyncIterator[WrongBounds]:
    async for found in scan(log.meta, SINKS):
        sink = decode(Sink, found.value, found.key)
        if _is_wrong(sink, present_ms, far_stamps):
            yield _bounds(found.key.removeprefix(SINKS), found.key, sink)


async def _far_pins(log: Log, present_ms: int) -> AsyncIterator[Entry]:
    """The pins that no reader of now has put: leases are of minutes."""
    async for found in scan(log.meta, PINS):
        if decode(Pin, found.value, found.key).expires_ms > present_ms + AHEAD_MS:
            yield found


def _is_wrong(record: Control | Sink, present_ms: int, far_stamps: bool) -> bool:
    """Whether a bound is in the future; or there is none to tell blobs with far stamps by."""
    if isinstance(record, Sink) and max(record.touched_ms, record.finished_ms) > present_ms + AHEAD_MS:
        return True
    if not record.blob_ceiling_ms and far_stamps:
        return True
    # A right ceiling may be as much too high as two clocks differ that are not wrong.
    return record.blob_floor_ms > present_ms + AHEAD_MS or record.blob_ceiling_ms > present_ms + 2 * AHEAD_MS


def _bounds(name: str, key: str, record: Control | Sink) -> WrongBounds:
    return WrongBounds(name=name, key=key, floor_ms=record.blob_floor_ms, ceiling_ms=record.blob_ceiling_ms)


async def _lower(log: Log, key: str, kind: type[R], present_ms: int) -> None:
    while True:
        found = await log.meta.get(key)
        if found is None:
            return
        record = lowered(decode(kind, found.value, key), present_ms)
        if isinstance(record, Sink):
            record = msgspec.structs.replace(
                record,
                touched_ms=min(record.touched_ms, present_ms),
                finished_ms=min(record.finished_ms, present_ms),
            )
        if await is_put(log, found, record):
            return
