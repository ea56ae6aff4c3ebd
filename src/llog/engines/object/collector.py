"""The collector: deletes blobs that nothing names and nothing can come to name.

1. Deletions of topics that were interrupted are finished, and leftover index entries swept.
2. Listed: the blobs whose stamp and whose age in the store are below the threshold T, or so far ahead that a wrong
   clock gave them. Those that something names are struck off by a first mark, which saves work and decides nothing.
3. Only after the listing, the partitions and sinks are enumerated, and their floors raised to T by CAS, their ceilings
   with them: a writer that stalled before its commit now loses its CAS, sees its blob below the floor, and uploads it
   again. Blobs stamped above T stay unless they are above all ceilings as well (`clocks.py`).
4. The last mark reads references in the order in which they move: sink manifests, then per partition `pending`, the
   compaction's breadcrumb, the index. What it does not find is not named, and never will be, except by a repair: where
   the index has a gap, what could fill it stays (`gaps.py`). One scan tells names and gaps, so that an entry which a
   repair puts back meanwhile is met as one or as the other.
5. The pins are read. A pin that is alive now may be of a reader that resolved a reference before it went away: a name
   waits for the pins alive when it was first found here, however they started, for their clocks are not ours. Later
   pins do not matter to it.
6. All reads since step 3 are confirmed: what an old state of the metadata store did not show may be there. If one was
   stale, the run ends with `StaleReads`, nothing is deleted, and the next run starts over.
7. The rest is deleted.

Clocks decide when a blob goes, never whether that is safe. Cost of a run: a probe of the blob store's clock, one
listing, one scan of the control records and the index per `chunk_names` old blobs (referenced ones included), one more
if any is unreferenced, and then one CAS per partition. Memory: at most two chunks of names, about 200 bytes each, and
the waiting ones.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from llog.engines.object.clocks import Window, is_put, raised, window
from llog.engines.object.gaps import Coverage, Gap, Gaps, without_trimmed
from llog.engines.object.partition_keys import find_keys
from llog.engines.object.reader import pending_pieces
from llog.errors import VersionMismatch
from llog.log.catalog import OBJECT, Catalog
from llog.log.keys import ROOT, SINK_BLOBS, SINKS, PartitionKeys, end_offset_of
from llog.log.log import Log
from llog.log.pins import alive_pins
from llog.log.records import Compaction, Control, IndexEntry, Kind, LogState, Sink, decode
from llog.model import TopicPartition
from llog.runtime import stamp_of
from llog.stores.blobs import BlobInfo
from llog.stores.meta import Entry, Reads, after, scan

GRACE_MS = 3_600_000
SINK_OPEN_MS = 86_400_000
_DELETE_PAGE = 1000
_GAPS_NAMED = 3
_INDEX_PAGE = 5000
_CONCURRENCY = 32
_UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}"
_SHAPE = re.compile(rf"{ROOT}(?:wal-shared|clock|sink/[^/]+|[^/]+/partitions/[0-9]+/data/compacted)/{_UUID}")


class CollectorOptions(msgspec.Struct, frozen=True, kw_only=True):
    grace_ms: int = GRACE_MS
    """How long a blob is left alone after its upload: longer than an append takes, or appends upload twice."""
    sink_open_ms: int = SINK_OPEN_MS
    """How long a sink's batch may take from its first upload to its commit."""
    chunk_names: int = 200_000
    waiting_max: int = 100_000


class CollectionResult(msgspec.Struct, frozen=True, kw_only=True):
    """`candidates` are old enough; of those, `referenced` are in use, `kept` could fill a gap, and `waiting` are held
    back by pins.
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
    """Unreferenced names that pins hold back, with the pins alive when each was first found; beyond `names_max` they
    start anew.
    """

    def __init__(self, names_max: int = 100_000) -> None:
        self._names_max = names_max
        self._before: dict[str, frozenset[str]] = {}
        self._now: dict[str, frozenset[str]] = {}

    def begin_run(self) -> None:
        """Forgets the names that the run before did not meet again."""
        self._before, self._now = self._now, {}

    def free(self, names: Iterable[str], alive: frozenset[str]) -> list[str]:
        """Those of the names that no pin holds back; the others wait."""
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
    """Collects one log. Two may run at once; each remembers for itself which names wait for which pins."""

    def __init__(self, log: Log, options: CollectorOptions | None = None) -> None:
        self._log = log
        self._options = options or CollectorOptions()
        self._waiting = Waiting(self._options.waiting_max)

    async def collect_once(self) -> CollectionResult:
        await Catalog(self._log).finish_deletions()
        for keys in await partitions(self._log):
            await sweep_partition(self._log, keys)
        run = await window(self._log, self._options.grace_ms)
        self._waiting.begin_run()
        listing = Listing(self._options.grace_ms)
        waiting = deleted = deleted_bytes = spared = kept = 0
        async for names in unreferenced(self._log, run, listing, self._options.chunk_names):
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
        """Leaves those in `names` that may go, pins and gaps aside."""
        enumerated = await partitions(self._log)
        bounds = Bounds(
            Span(run.old_ms, await raise_floors(self._log, enumerated, run)),
            await raise_sink_floors(self._log, run, self._options.sink_open_ms),
        )
        for name in [name for name in names if may_be_named(name, bounds)]:
            del names[name]
        await strike_off(self._log, enumerated, names, gaps)


def is_candidate(info: BlobInfo, run: Window) -> bool:
    """Whether it is one of our blobs, and old by its name as well as by the store's clock.

    A time that is far ahead says nothing: a clock was wrong when the blob was put, on one machine with the files maybe
    the store's, too.
    """
    stamp = stamp_of(info.name)
    if stamp is None or run.is_inside(stamp) or run.is_inside(info.modified_ms):
        return False
    return _SHAPE.fullmatch(info.name) is not None


class Span(NamedTuple):
    """Stamps from `floor_ms` to `ceiling_ms`, both included; without a ceiling, all from `floor_ms` on."""

    floor_ms: int
    ceiling_ms: int | None

    def has(self, stamp: int) -> bool:
        return self.floor_ms <= stamp and (self.ceiling_ms is None or stamp <= self.ceiling_ms)


class Bounds(NamedTuple):
    """Which stamps writers may still commit: in any of the partitions, and in each sink."""

    partitions: Span
    sinks: Mapping[str, Span]


def may_be_named(name: str, bounds: Bounds) -> bool:
    """Whether an append or a batch of its sink may still come to name a blob that was listed before these bounds were
    set.

    A sink that is not among them was forgotten: uploads follow the sink's record, and the listing follows the uploads.
    """
    span: Span | None = bounds.partitions
    if name.startswith(SINK_BLOBS):
        span = bounds.sinks.get(name.removeprefix(SINK_BLOBS).split("/", 1)[0])
    stamp = stamp_of(name)
    return span is not None and (stamp is None or span.has(stamp))


async def partitions(log: Log) -> list[PartitionKeys]:
    """Every partition of every topic that is not deleted. Topics on disk have no blobs."""
    return [
        PartitionKeys(topic.directory, partition)
        for topic in await Catalog(log).topics(OBJECT)
        for partition in range(topic.partitions)
    ]


class Listing:
    """Counts of one listing, complete when it is, and the gaps that its marks met."""

    def __init__(self, grace_ms: int = GRACE_MS) -> None:
        self.gaps = Gaps(grace_ms)
        self.listed = 0
        self.candidates = 0
        self.referenced = 0


async def unreferenced(
    log: Log, run: Window, listing: Listing, chunk_names: int = 200_000
) -> AsyncIterator[dict[str, int]]:
    """Candidates that nothing named when looked for, with their sizes; safe to delete only after a last mark."""
    chunk: dict[str, int] = {}
    suspects: dict[str, int] = {}

    async def settle() -> None:
        candidates = len(chunk)
        if chunk:
            await strike_off(log, await partitions(log), chunk, listing.gaps)
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
    """A mark: removes from `names` what something names, and adds the gaps that it meets."""
    async for name in sink_references(log):
        names.pop(name, None)
    async for name in references(log, enumerated, gaps):
        names.pop(name, None)


def strike_off_kept(names: dict[str, int], gaps: Gaps) -> None:
    """Removes from `names` what could fill a gap."""
    for name in [name for name in names if gaps.keeps(name)]:
        del names[name]


def gap_warning(gaps: Sequence[Gap], kept: int) -> str | None:
    """What an operator should know of the gaps that a collection met."""
    if not gaps:
        return None
    more = f" and {len(gaps) - _GAPS_NAMED} more" if len(gaps) > _GAPS_NAMED else ""
    return (
        f"the index has gaps ({'; '.join(map(str, gaps[:_GAPS_NAMED]))}{more}): {kept} blobs that could fill them "
        "are kept. "
        "`llog repair index` shows what can be mended"
    )


async def sink_references(log: Log) -> AsyncIterator[str]:
    """The blobs that sink manifests name. To be read before those of the partitions, to which they move."""
    async for found in scan(log.meta, SINKS):
        manifest = decode(Sink, found.value, found.key).manifest
        if manifest is not None:
            for blob in manifest.blobs:
                yield blob


async def references(log: Log, enumerated: Sequence[PartitionKeys], gaps: Gaps | None = None) -> AsyncIterator[str]:
    """The blobs that these partitions name, some more than once. A reference that moves meanwhile is met at least once.

    The gaps of the partitions' indexes are added to `gaps` on the way.
    """
    for keys in enumerated:
        control = await _control(log, keys)
        coverage = Coverage(keys, control)
        pending = pending_pieces(control)
        for piece in pending:
            yield log.blob_name(piece.entry.data_uri)
        found = await log.meta.get(keys.compaction)
        if found is not None:
            yield decode(Compaction, found.value, found.key).blob
        async for found in scan(log.meta, keys.index):
            entry = decode(IndexEntry, found.value, found.key)
            coverage.add(end_offset_of(found.key), entry)
            yield log.blob_name(entry.data_uri)
        for piece in pending:
            coverage.add(piece.end_offset, piece.entry)
        holes = coverage.gaps()
        if holes and gaps is not None:
            gaps.add(without_trimmed(holes, await _control(log, keys)))


async def _control(log: Log, keys: PartitionKeys) -> Control:
    """The control record; that of an empty partition if there is none."""
    found = await log.meta.get(keys.control)
    return Control() if found is None else decode(Control, found.value, found.key)


async def raise_floors(log: Log, enumerated: Sequence[PartitionKeys], run: Window) -> int:
    """Returns the highest ceiling of these partitions, after floors and ceilings were raised; neither ever goes back
    here.

    From now on, no writer commits a blob stamped below `old_ms` to any of them, nor one that exists and is stamped
    above that ceiling.
    """
    highest = 0
    for first in range(0, len(enumerated), _CONCURRENCY):
        some = enumerated[first : first + _CONCURRENCY]
        highest = max(highest, *await asyncio.gather(*(_raise_floor(log, keys, run) for keys in some)))
    return highest


async def _raise_floor(log: Log, keys: PartitionKeys, run: Window) -> int:
    while True:
        found = await log.meta.get(keys.control)
        if found is None:
            return 0
        control = decode(Control, found.value, found.key)
        if control.log_state is LogState.DELETED:
            return 0
        changed = raised(control, run.old_ms, run.far_ms)
        if not control.blob_ceiling_ms:
            # The first one lowers it from infinity: uploads that nobody could bound are voided.
            changed = msgspec.structs.replace(changed, clock_repairs=control.clock_repairs + 1)
        if await is_put(log, found, changed):
            return changed.blob_ceiling_ms


async def raise_sink_floors(log: Log, run: Window, sink_open_ms: int = SINK_OPEN_MS) -> dict[str, Span]:
    """Of every sink, the stamps of uploads that can still be committed, after its floor was raised to `old_ms`.

    The floor of a sink in use stops short of the batch it may be working on, which can then take longer than the grace
    period.
    """
    spans = {}
    async for found in scan(log.meta, SINKS):
        span = await _raise_sink_floor(log, found.key, run, sink_open_ms)
        if span is not None:
            spans[found.key.removeprefix(SINKS)] = span
    return spans


async def _raise_sink_floor(log: Log, key: str, run: Window, sink_open_ms: int) -> Span | None:
    while True:
        found = await log.meta.get(key)
        if found is None:
            return None
        sink = decode(Sink, found.value, key)
        in_use = sink.touched_ms + sink_open_ms > run.now_ms
        changed = raised(sink, min(run.old_ms, sink.finished_ms + 1) if in_use else run.old_ms, run.far_ms)
        if not sink.blob_ceiling_ms:
            # A sink of old: to void its uploads would fail its batch, which only a repair may.
            changed = msgspec.structs.replace(changed, blob_ceiling_ms=0)
        if await is_put(log, found, changed):
            return Span(changed.blob_floor_ms, changed.blob_ceiling_ms or None)


async def delete_unreferenced(
    log: Log, names: Collection[str], waiting: Waiting, run: Window, reads: Reads
) -> list[str]:
    """Deletes what the last mark has left in `names`, except for what pins hold back; returns what was deleted.

    `reads` were begun before that mark. They are confirmed before `waiting` learns of the pins: one that an old state
    did not show would not be waited for in later runs either.
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
    """Deletes index entries that a stalled writer left where nobody needs them; returns how many."""
    return await sweep_partition(log, await find_keys(log, tp))


async def sweep_partition(log: Log, keys: PartitionKeys) -> int:
    """As `sweep`: entries that end below the log start, and WAL entries wholly inside a COMPACTED one."""
    found = await log.meta.get(keys.control)
    if found is None:
        return 0
    # The log start never goes back: what is below the one read here is never needed again.
    log_start = decode(Control, found.value, found.key).log_start_offset
    swept = 0
    async for found in _entries(log, keys.index, keys.entry(log_start)):
        swept += await _delete_at_version(log, found)
    previous_end = log_start - 1
    async for found in _entries(log, keys.entry(log_start), after(keys.index)):
        entry, end = decode(IndexEntry, found.value, found.key), end_offset_of(found.key)
        start = end - entry.msg_count + 1
        if entry.kind is Kind.COMPACTED and max(start, log_start) <= previous_end:
            async for inner in _entries(log, keys.entry(start), found.key):
                leftover = decode(IndexEntry, inner.value, inner.key)
                inside = end_offset_of(inner.key) - leftover.msg_count + 1 >= start
                if leftover.kind is Kind.WAL and inside:
                    swept += await _delete_at_version(log, inner)
        previous_end = end
    return swept


async def _entries(log: Log, start: str, end: str) -> AsyncIterator[Entry]:
    while True:
        page = await log.meta.range(start, end, _INDEX_PAGE)
        for found in page:
            yield found
        if len(page) < _INDEX_PAGE:
            return
        start = page[-1].key + "\x00"


async def _delete_at_version(log: Log, found: Entry) -> int:
    try:
        return int(await log.meta.delete(found.key, expected=found.version))
    except VersionMismatch:
        return 0
