"""The collector: deletes blobs that nothing names and nothing can come to name.

1. Finish interrupted deletions of topics, and sweep leftover index entries.
2. Remove what killed puts have left in the blob store. List the blobs whose stamp and whose age in the store are below
   the threshold T, or so far ahead that a wrong clock stamped them. A first mark strikes off the blobs that something
   names; it saves work and decides nothing.
3. Only after the listing, enumerate the partitions and sinks, and raise their floors to T and their ceilings by CAS. A
   writer that stalled before its commit now loses its CAS, sees its blob below the floor, and uploads it again. Blobs
   stamped above T stay, unless they are also above all ceilings (`clocks.py`).
4. The last mark reads references in the order in which they move: sink manifests, then for each partition `pending`,
   the compaction's breadcrumb and the index. A blob that the mark does not meet is not named and never will be, except
   by a repair: where the index has a gap, the blobs that could fill it stay (`gaps.py`). One scan collects both names
   and gaps, so that an entry which a repair puts back meanwhile is met as one or the other.
5. Read the pins. A live pin may belong to a reader that resolved a reference before the reference disappeared. A name
   therefore waits for all pins that were alive when it was first found unreferenced, regardless of their start times,
   because clocks differ. Later pins do not matter.
6. Confirm all reads since step 3, because a stale read may have missed a reference. If one was stale, the run ends with
   `StaleReads`, deletes nothing, and the next run starts over.
7. Delete the remaining blobs.

Clocks decide when a blob is deleted, never whether that is safe. A run costs a probe of the blob store's clock, one
listing, one scan of the control records and the index per `chunk_names` old blobs (including referenced ones), one more
scan if any blob is unreferenced, and one CAS per partition. It holds at most two chunks of names, about 200 bytes each,
and the waiting names in memory.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from llog.engines.object.clocks import Window, collection_window, raise_bounds
from llog.engines.object.gaps import Gap, GapFinder, Gaps, subtract_trimmed
from llog.engines.object.partition_keys import find_keys
from llog.engines.object.producer_upkeep import tend_producers
from llog.engines.object.reader import pending_spans
from llog.errors import VersionMismatch
from llog.log.cas import update
from llog.log.catalog import OBJECT, Catalog
from llog.log.inline import is_inline
from llog.log.keys import ROOT, SINK_BLOBS, SINKS, PartitionKeys, end_offset_of
from llog.log.log import Log
from llog.log.pins import alive_pins
from llog.log.record_producers import PRODUCER_EXPIRY_MS
from llog.log.records import Compaction, Control, IndexEntry, Kind, LogState, Sink, decode
from llog.model import TopicPartition
from llog.runtime import stamp_of
from llog.stores.blobs import BlobInfo
from llog.stores.meta import MetaEntry, Reads, prefix_end, scan

GRACE_MS = 3_600_000
SINK_OPEN_MS = 86_400_000
UNFINISHED_MS = 86_400_000
"""How old an unfinished put must be before its bytes are removed: longer than any put takes."""
_DELETE_PAGE = 1000
_GAPS_NAMED = 3
_INDEX_PAGE = 5000
_CONCURRENCY = 32
_UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}"
_SHAPE = re.compile(
    rf"{ROOT}(?:wal-shared|compacted-shared|clock|sink/[^/]+|[^/]+/partitions/[0-9]+/data/compacted)/{_UUID}"
)


class CollectorOptions(msgspec.Struct, frozen=True, kw_only=True):
    grace_ms: int = GRACE_MS
    """How long a blob is left alone after its upload. Keep it longer than an append takes, or appends upload twice."""
    sink_open_ms: int = SINK_OPEN_MS
    """How long a sink's batch may take from its first upload to its commit."""
    producer_expiry_ms: int = PRODUCER_EXPIRY_MS
    """How much later than a producer's last append the partition's newest append has to be before its state is
    forgotten.
    """
    chunk_names: int = 200_000
    waiting_max: int = 100_000


class CollectionResult(msgspec.Struct, frozen=True, kw_only=True):
    """The counts of one run. `candidates` are old enough; of these, `referenced` are in use, `kept` could fill a gap,
    and `waiting` are held back by pins.
    """

    listed: int
    candidates: int
    referenced: int
    waiting: int
    deleted: int
    deleted_bytes: int
    kept: int = 0
    gaps: tuple[Gap, ...] = ()

    @property
    def warning(self) -> str | None:
        return gap_warning(self.gaps, self.kept)


class Waiting:
    """Unreferenced names that pins hold back, with the pins that were alive when each was first found.

    Names beyond `names_max` are forgotten, and begin to wait anew in the next run.
    """

    def __init__(self, names_max: int = 100_000) -> None:
        self._names_max = names_max
        self._before: dict[str, frozenset[str]] = {}
        self._now: dict[str, frozenset[str]] = {}

    def begin_run(self) -> None:
        """Forget the names that the previous run did not meet again."""
        self._before, self._now = self._now, {}

    def free(self, names: Iterable[str], alive: frozenset[str]) -> list[str]:
        """Return the names that no pin holds back; the others wait."""
        released = []
        still: dict[frozenset[str], frozenset[str]] = {}
        for name in names:
            pins = self._before.get(name, alive)
            pins = still.setdefault(pins, pins & alive)
            if not pins:
                released.append(name)
            elif len(self._now) < self._names_max:
                self._now[name] = pins
        return released


class Collector:
    """Collects one log. Several may run at once; each remembers which names wait for which pins."""

    def __init__(self, log: Log, options: CollectorOptions | None = None) -> None:
        self._log = log
        self._options = options or CollectorOptions()
        self._waiting = Waiting(self._options.waiting_max)

    async def collect_once(self) -> CollectionResult:
        await Catalog(self._log).finish_deletions()
        for keys in await list_partitions(self._log):
            await sweep_partition(self._log, keys, self._options.producer_expiry_ms)
        run = await begin_collection(self._log, self._options.grace_ms)
        self._waiting.begin_run()
        listing = Listing(self._options.grace_ms)
        waiting = deleted = deleted_bytes = spared = kept = 0
        async for names in list_unreferenced(self._log, run, listing, self._options.chunk_names):
            found = len(names)
            reads = await self._log.meta.begin_reads()
            await self._mark_last(names, run, listing.gaps)
            spared += found - len(names)
            found = len(names)
            strike_off_kept(names, listing.gaps)
            kept += found - len(names)
            gone = await delete_unreferenced(self._log, names, self._waiting, run, reads)
            waiting += len(names) - len(gone)
            deleted += len(gone)
            deleted_bytes += sum(names[name] for name in gone)
        return CollectionResult(
            listed=listing.listed,
            candidates=listing.candidates,
            referenced=listing.referenced + spared,
            waiting=waiting,
            deleted=deleted,
            deleted_bytes=deleted_bytes,
            kept=kept,
            gaps=listing.gaps.found,
        )

    async def _mark_last(self, names: dict[str, int], run: Window, gaps: Gaps) -> None:
        """Remove from `names` all blobs that are, or may yet be, named; pins and gaps are considered later."""
        enumerated = await list_partitions(self._log)
        bounds = CommittableStamps(
            StampRange(run.old_ms, await raise_floors(self._log, enumerated, run)),
            await raise_sink_floors(self._log, run, self._options.sink_open_ms),
        )
        for name in [name for name in names if may_be_named(name, bounds)]:
            del names[name]
        await strike_off(self._log, enumerated, names, gaps)


async def begin_collection(log: Log, grace_ms: int) -> Window:
    """Return the window of a new run, after removing what killed puts have left in the blob store."""
    run = await collection_window(log, grace_ms)
    await log.blobs.remove_unfinished_puts(run.now_ms - UNFINISHED_MS)
    return run


def is_candidate(info: BlobInfo, run: Window) -> bool:
    """Return whether the blob is a log's, and old both by its name and by the store's clock.

    A time that is far ahead counts as old: a clock was wrong when the blob was put, perhaps the store's as well if it
    is a local directory.
    """
    stamp = stamp_of(info.name)
    if stamp is None or run.is_inside(stamp) or run.is_inside(info.modified_ms):
        return False
    return _SHAPE.fullmatch(info.name) is not None


class StampRange(NamedTuple):
    """Stamps from `floor_ms` to `ceiling_ms`, both included; without a ceiling, all from `floor_ms` on."""

    floor_ms: int
    ceiling_ms: int | None

    def has(self, stamp: int) -> bool:
        return self.floor_ms <= stamp and (self.ceiling_ms is None or stamp <= self.ceiling_ms)


class CommittableStamps(NamedTuple):
    """The stamps that writers may still commit: to any of the partitions, and in each sink."""

    partitions: StampRange
    sinks: Mapping[str, StampRange]


def may_be_named(name: str, bounds: CommittableStamps) -> bool:
    """Return whether an append, or a batch of the blob's sink, may still come to name a blob that was listed before
    these bounds were set.

    A sink without bounds was forgotten: its record precedes its uploads, and the listing follows them.
    """
    stamps: StampRange | None = bounds.partitions
    if name.startswith(SINK_BLOBS):
        stamps = bounds.sinks.get(name.removeprefix(SINK_BLOBS).split("/", 1)[0])
    stamp = stamp_of(name)
    return stamps is not None and (stamp is None or stamps.has(stamp))


async def list_partitions(log: Log) -> list[PartitionKeys]:
    """Return the keys of every partition of every `object` topic that is not deleted."""
    return [
        PartitionKeys(topic.directory, partition)
        for topic in await Catalog(log).topics(OBJECT)
        for partition in range(topic.partitions)
    ]


class Listing:
    """The counts of one listing, complete at its end, and the gaps that its marks met."""

    def __init__(self, grace_ms: int = GRACE_MS) -> None:
        self.gaps = Gaps(grace_ms)
        self.listed = 0
        self.candidates = 0
        self.referenced = 0


async def list_unreferenced(
    log: Log, run: Window, listing: Listing, chunk_names: int = 200_000
) -> AsyncIterator[dict[str, int]]:
    """Iterate over chunks of candidates that nothing named when they were listed, with their sizes.

    They are safe to delete only after a last mark.
    """
    chunk: dict[str, int] = {}
    suspects: dict[str, int] = {}

    async def settle() -> None:
        candidates = len(chunk)
        if chunk:
            await strike_off(log, await list_partitions(log), chunk, listing.gaps)
        listing.candidates += candidates
        listing.referenced += candidates - len(chunk)
        suspects.update(chunk)
        chunk.clear()

    async for page in log.blobs.list(ROOT):
        listing.listed += len(page)
        chunk.update((info.name, info.size) for info in page if is_candidate(info, run))
        if len(chunk) >= chunk_names:
            await settle()
        if len(suspects) >= chunk_names:
            yield suspects
            suspects = {}
    await settle()
    if suspects:
        yield suspects


async def strike_off(
    log: Log, enumerated: Sequence[PartitionKeys], names: dict[str, int], gaps: Gaps | None = None
) -> None:
    """Mark: remove from `names` every blob that something names, and add the gaps that the scan meets."""
    async for name in sink_references(log):
        names.pop(name, None)
    async for name in references(log, enumerated, gaps):
        names.pop(name, None)


def strike_off_kept(names: dict[str, int], gaps: Gaps) -> None:
    """Remove from `names` the blobs that could fill a gap."""
    for name in [name for name in names if gaps.keeps(name)]:
        del names[name]


def gap_warning(gaps: Sequence[Gap], kept: int) -> str | None:
    """Return a warning for operators about the gaps that a collection met; None if it met none."""
    if not gaps:
        return None
    more = f" and {len(gaps) - _GAPS_NAMED} more" if len(gaps) > _GAPS_NAMED else ""
    return (
        f"the index has gaps ({'; '.join(map(str, gaps[:_GAPS_NAMED]))}{more}): {kept} blobs that could fill them "
        "are kept. `llog repair index` shows what can be repaired"
    )


async def sink_references(log: Log) -> AsyncIterator[str]:
    """Iterate over the blobs that sink manifests name. Read them before those of the partitions, to which they move."""
    async for found in scan(log.meta, SINKS):
        manifest = decode(Sink, found.value, found.key).manifest
        if manifest is not None:
            for blob in manifest.blobs:
                yield blob


async def references(log: Log, enumerated: Sequence[PartitionKeys], gaps: Gaps | None = None) -> AsyncIterator[str]:
    """Iterate over the blobs that these partitions name, some more than once; a reference that moves meanwhile is met
    at least once.

    Adds the gaps of the partitions' indexes to `gaps`.
    """
    for keys in enumerated:
        control = await _control(log, keys)
        finder = GapFinder(keys, control)
        pending = pending_spans(control)
        for span in pending:
            if not is_inline(span.entry.data_uri):
                yield log.blob_name(span.entry.data_uri)
        found = await log.meta.get(keys.compaction)
        if found is not None:
            yield decode(Compaction, found.value, found.key).blob
        async for found in scan(log.meta, keys.index):
            entry = decode(IndexEntry, found.value, found.key)
            finder.add(end_offset_of(found.key), entry)
            if not is_inline(entry.data_uri):
                yield log.blob_name(entry.data_uri)
        for span in pending:
            finder.add(span.end_offset, span.entry)
        holes = finder.gaps()
        if holes and gaps is not None:
            gaps.add(subtract_trimmed(holes, await _control(log, keys)))


async def _control(log: Log, keys: PartitionKeys) -> Control:
    """Return the control record; that of an empty partition if there is none."""
    found = await log.meta.get(keys.control)
    return Control() if found is None else decode(Control, found.value, found.key)


async def raise_floors(log: Log, enumerated: Sequence[PartitionKeys], run: Window) -> int:
    """Raise the floors and ceilings of these partitions, never lower them, and return the highest ceiling.

    From now on, no writer commits to these partitions a blob stamped below `old_ms`, nor an existing blob stamped above
    that ceiling.
    """
    highest = 0
    for first in range(0, len(enumerated), _CONCURRENCY):
        some = enumerated[first : first + _CONCURRENCY]
        highest = max(highest, *await asyncio.gather(*(_raise_floor(log, keys, run) for keys in some)))
    return highest


async def _raise_floor(log: Log, keys: PartitionKeys, run: Window) -> int:
    def raise_control_bounds(control: Control) -> Control:
        if control.log_state is LogState.DELETED:
            return control
        changed = raise_bounds(control, run.old_ms, run.far_ms)
        if not control.blob_ceiling_ms:
            # The first ceiling lowers the bound from infinity, so it voids the uploads under way, as a repair does.
            changed = msgspec.structs.replace(changed, clock_repairs=control.clock_repairs + 1)
        return changed

    change = await update(log, keys.control, Control, raise_control_bounds)
    return 0 if change is None or change.new.log_state is LogState.DELETED else change.new.blob_ceiling_ms


async def raise_sink_floors(log: Log, run: Window, sink_open_ms: int = SINK_OPEN_MS) -> dict[str, StampRange]:
    """Raise the floor of every sink to `old_ms`, and return the stamps of uploads that each can still commit.

    The floor of a sink in use stays below the batch that it may be working on, so that a batch can take longer than the
    grace period.
    """
    ranges = {}
    async for found in scan(log.meta, SINKS):
        stamps = await _raise_sink_floor(log, found.key, run, sink_open_ms)
        if stamps is not None:
            ranges[found.key.removeprefix(SINKS)] = stamps
    return ranges


async def _raise_sink_floor(log: Log, key: str, run: Window, sink_open_ms: int) -> StampRange | None:
    def raise_sink_bounds(sink: Sink) -> Sink:
        in_use = sink.touched_ms + sink_open_ms > run.now_ms
        changed = raise_bounds(sink, min(run.old_ms, sink.finished_ms + 1) if in_use else run.old_ms, run.far_ms)
        if not sink.blob_ceiling_ms:
            # A sink of an older version has no ceiling: setting one would void its uploads and fail its batch, which
            # only a repair may do.
            changed = msgspec.structs.replace(changed, blob_ceiling_ms=0)
        return changed

    change = await update(log, key, Sink, raise_sink_bounds)
    return None if change is None else StampRange(change.new.blob_floor_ms, change.new.blob_ceiling_ms or None)


async def delete_unreferenced(
    log: Log, names: Collection[str], waiting: Waiting, run: Window, reads: Reads
) -> list[str]:
    """Delete the blobs that the last mark left in `names`, except those that pins hold back; return what was deleted.

    `reads` began before the mark. They are confirmed before `waiting` learns of the pins, because later runs would not
    wait for a pin that a stale read missed.
    """
    alive = await alive_pin_ids(log, run)
    await reads.confirm()
    free = waiting.free(names, alive)
    for first in range(0, len(free), _DELETE_PAGE):
        await log.blobs.delete_many(free[first : first + _DELETE_PAGE])
    return free


async def alive_pin_ids(log: Log, run: Window) -> frozenset[str]:
    return frozenset(pin_id for pin_id, _ in await alive_pins(log, run.now_ms))


async def sweep(log: Log, tp: TopicPartition) -> int:
    """Delete index entries that a stalled writer left where they are not needed; return their number."""
    return await sweep_partition(log, await find_keys(log, tp))


async def sweep_partition(log: Log, keys: PartitionKeys, producer_expiry_ms: int = PRODUCER_EXPIRY_MS) -> int:
    """Delete index entries that end below the log start, and those that lie completely inside a COMPACTED one; return
    their number. Delete the states of producers that are not needed, too.
    """
    found = await log.meta.get(keys.control)
    if found is None:
        return 0
    # The log start never goes back: entries below the one read here are never needed again.
    control = decode(Control, found.value, found.key)
    log_start = control.log_start_offset
    await tend_producers(log, keys, control, producer_expiry_ms)
    swept = 0
    async for found in _entries(log, keys.index, keys.entry(log_start)):
        swept += await _delete_if_unchanged(log, found)
    previous_end = log_start - 1
    async for found in _entries(log, keys.entry(log_start), prefix_end(keys.index)):
        entry, end = decode(IndexEntry, found.value, found.key), end_offset_of(found.key)
        start = end - entry.msg_count + 1
        if entry.kind is Kind.COMPACTED and max(start, log_start) <= previous_end:
            async for inner in _entries(log, keys.entry(start), found.key):
                leftover = decode(IndexEntry, inner.value, inner.key)
                if end_offset_of(inner.key) - leftover.msg_count + 1 >= start:
                    swept += await _delete_if_unchanged(log, inner)
        previous_end = end
    return swept


async def _entries(log: Log, start: str, end: str) -> AsyncIterator[MetaEntry]:
    while True:
        page = await log.meta.range(start, end, _INDEX_PAGE)
        for found in page:
            yield found
        if len(page) < _INDEX_PAGE:
            return
        start = page[-1].key + "\x00"


async def _delete_if_unchanged(log: Log, found: MetaEntry) -> int:
    try:
        return int(await log.meta.delete(found.key, expected=found.version))
    except VersionMismatch:
        return 0
