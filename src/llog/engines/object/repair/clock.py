"""The repair of a log whose clocks were far ahead: finds floors, ceilings and pins in the future, and corrects them.

A floor that a collector raised by such a clock makes every writer stamp its blobs in the future, and a ceiling above
those stamps keeps the collector from deciding about the blobs. The repair changes only metadata records; the next
collection deletes the blobs that it frees.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec

from llog.engines.object.clocks import AHEAD_MS, R, lower_bounds, store_time_ms
from llog.errors import VersionMismatch
from llog.log.cas import update
from llog.log.catalog import OBJECT, Catalog
from llog.log.keys import PINS, ROOT, SINKS, PartitionKeys
from llog.log.log import Log
from llog.log.records import Control, LogState, Pin, Sink, decode
from llog.runtime import stamp_of
from llog.stores.meta import MetaEntry, scan


class WrongBounds(msgspec.Struct, frozen=True, kw_only=True):
    """A control record (named `topic/partition`) or a sink's record whose bounds are in the future."""

    name: str
    key: str
    floor_ms: int
    ceiling_ms: int


class ClockDamage(msgspec.Struct, frozen=True, kw_only=True):
    """The damage of clocks that were far ahead."""

    present_ms: int
    """The present by the blob store's clock."""
    partitions: tuple[WrongBounds, ...] = ()
    sinks: tuple[WrongBounds, ...] = ()
    pins: tuple[str, ...] = ()
    blobs: int = 0
    blob_bytes: int = 0
    """The bytes of the blobs stamped in the future, in use or not."""

    @property
    def is_repairable(self) -> bool:
        return bool(self.partitions or self.sinks or self.pins)


async def find_clock_damage(log: Log) -> ClockDamage:
    """Read every control and sink record, list every blob, and return the damage. Changes nothing."""
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
    """Set floors to the present and ceilings a day above it, and release the pins that end far in the future.

    Voids uploads that are not committed: appends under way upload again, and a sink's batch under way fails and has to
    be run again.
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
            pass  # A reader has just renewed it.


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


async def _far_pins(log: Log, present_ms: int) -> AsyncIterator[MetaEntry]:
    """Iterate over the pins that end far in the future; a reader with a correct clock leases for minutes."""
    async for found in scan(log.meta, PINS):
        if decode(Pin, found.value, found.key).expires_ms > present_ms + AHEAD_MS:
            yield found


def _is_wrong(record: Control | Sink, present_ms: int, far_stamps: bool) -> bool:
    """Return whether a bound is in the future, or is missing while blobs with far stamps exist."""
    if isinstance(record, Sink) and max(record.touched_ms, record.finished_ms) > present_ms + AHEAD_MS:
        return True
    if not record.blob_ceiling_ms and far_stamps:
        return True
    # A correct ceiling may be too high by as much as two correct clocks differ.
    return record.blob_floor_ms > present_ms + AHEAD_MS or record.blob_ceiling_ms > present_ms + 2 * AHEAD_MS


def _bounds(name: str, key: str, record: Control | Sink) -> WrongBounds:
    return WrongBounds(name=name, key=key, floor_ms=record.blob_floor_ms, ceiling_ms=record.blob_ceiling_ms)


async def _lower(log: Log, key: str, kind: type[R], present_ms: int) -> None:
    def lower(record: R) -> R:
        record = lower_bounds(record, present_ms)
        if isinstance(record, Sink):
            return msgspec.structs.replace(
                record,
                touched_ms=min(record.touched_ms, present_ms),
                finished_ms=min(record.finished_ms, present_ms),
            )
        return record

    await update(log, key, kind, lower)
