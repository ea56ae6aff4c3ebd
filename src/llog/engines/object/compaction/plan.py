"""What to compact next: one run of consecutive WAL index entries from the cursor on, or a compaction that somebody
left.

Nothing here writes data. It puts the index entries of `pending`, moves the cursor up where there is nothing left to
compact below it, and clears breadcrumbs that can no longer lead anywhere.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Final, NamedTuple

import msgspec

from llog.batch.format import Codec
from llog.engines.object.reader import Piece
from llog.engines.object.writer import index_puts
from llog.errors import InconsistentReadState, PartitionNotInitialized, VersionMismatch
from llog.log.keys import PartitionKeys, end_offset_of
from llog.log.log import Log
from llog.log.records import (
    Compaction,
    CompactionState,
    Control,
    Cursor,
    IndexEntry,
    Kind,
    LogState,
    decode,
    encode,
)
from llog.model import TopicPartition
from llog.stores.meta import certain, confirmed

INDEX_PAGE: Final = 1000
_CHOOSE_ATTEMPTS: Final = 100


class CompactorOptions(msgspec.Struct, frozen=True, kw_only=True):
    max_offsets: int = 1_000_000
    max_bytes: int = 64 << 20
    min_entries: int = 2
    """A shorter run at the end of the log waits for more, unless it is large."""
    max_entries: int = 4096
    codec: Codec = Codec.NONE
    concurrency: int = 32
    memory_bytes_max: int = 384 << 20
    """Slices that one pass over many partitions holds at a time."""
    holder: str = ""
    """Name of this compactor in its claims, for people."""
    idle_ms: int = 60_000
    """A partition without an append for so long has its `pending` cleared, which would keep a shared blob alive."""


class Crumb(NamedTuple):
    """The breadcrumb and the version that lets one change it."""

    record: Compaction
    version: int


class Plan(NamedTuple):
    """A run to compact; with a breadcrumb if it has been begun, then past WRITING_BLOB without pieces."""

    tp: TopicPartition
    keys: PartitionKeys
    pieces: tuple[Piece, ...]
    version: int
    """Of the run's highest index entry."""
    control: Control
    crumb: Crumb | None = None


class _Scan(NamedTuple):
    pieces: list[Piece]
    version: int
    at_tail: bool
    """Whether only the end of the log ended the run, so that it may still grow."""
    passed: int
    """The cursor may move here: everything below is compacted, or was trimmed."""
    gap: bool = False
    """Whether no entry below the limit covers the position."""


async def choose(
    log: Log,
    options: CompactorOptions,
    tp: TopicPartition,
    keys: PartitionKeys,
    *,
    force: bool = False,
    stop_before: int | None = None,
) -> Plan | None:
    """The next run of this partition, which ends below `stop_before`; None if nothing is worth it now."""
    choosing = partial(_chosen, log, options, tp, keys, force=force, stop_before=stop_before)
    return await certain(log.meta, choosing, InconsistentReadState)


async def _chosen(
    log: Log,
    options: CompactorOptions,
    tp: TopicPartition,
    keys: PartitionKeys,
    *,
    force: bool,
    stop_before: int | None,
) -> Plan | None:
    for _ in range(_CHOOSE_ATTEMPTS):
        control = await _settle_pending(log, options, tp, keys, force)
        found = await log.meta.get(keys.compaction)
        if found is not None:
            crumb = Crumb(decode(Compaction, found.value, found.key), found.version)
            plan = await _resumed(log, tp, keys, control, crumb)
            if plan is not None:
                return plan
            continue
        cursor, cursor_version = await read_cursor(log, tp, keys)
        limit = control.sequence_counter if control.pending is None else control.pending.start_offset
        position = max(cursor, control.log_start_offset)
        scan = await _scan(log, options, keys, position, limit, stop_before)
        if scan.gap:
            if await _moved(log, tp, keys, control, cursor_version):
                continue
            raise InconsistentReadState(f"the index of {tp} has a gap at offset {position}: no entry covers it")
        if scan.passed > cursor:
            await _move_cursor(log, keys, cursor_version, scan.passed)
            continue
        if not scan.pieces:
            return None
        if scan.pieces[0].start_offset != cursor:
            raise InconsistentReadState(
                f"the index entry of {tp} that ends at {scan.pieces[0].end_offset} begins at "
                f"{scan.pieces[0].start_offset}, but the compaction cursor is at {cursor}"
            )
        size = sum(piece.entry.byte_length for piece in scan.pieces)
        small = len(scan.pieces) < options.min_entries and size < options.max_bytes // 4
        if scan.at_tail and small and not force:
            return None
        return Plan(tp, keys, tuple(scan.pieces), scan.version, control)
    return None


async def read_cursor(log: Log, tp: TopicPartition, keys: PartitionKeys) -> tuple[int, int]:
    """The cursor and its version."""
    found = await log.meta.get(keys.cursor)
    if found is None:
        raise PartitionNotInitialized(f"partition {tp} has no compaction cursor: it was deleted")
    return decode(Cursor, found.value, found.key).offset, found.version


async def clear(log: Log, keys: PartitionKeys, crumb: Crumb) -> bool:
    """Removes the breadcrumb if it still is this one."""
    try:
        return await log.meta.delete(keys.compaction, expected=crumb.version)
    except VersionMismatch:
        return False


async def _settle_pending(
    log: Log, options: CompactorOptions, tp: TopicPartition, keys: PartitionKeys, force: bool
) -> Control:
    """The control record, the entries of its `pending` being in the index; an idle partition's is cleared."""
    control, version = await _read_control(log, tp, keys)
    if control.pending is None:
        return control
    await log.meta.put_many(index_puts(keys, control.pending))
    age_ms = log.runtime.now_ms() - control.pending.entries[-1].append_ms
    if force or not 0 <= age_ms < options.idle_ms:
        cleared = msgspec.structs.replace(control, pending=None)
        try:
            await log.meta.put(keys.control, encode(cleared), expected=version)
        except VersionMismatch:
            return control
        return cleared
    return control


async def _read_control(log: Log, tp: TopicPartition, keys: PartitionKeys) -> tuple[Control, int]:
    found = await log.meta.get(keys.control)
    control = None if found is None else decode(Control, found.value, found.key)
    if found is None or control is None or control.log_state is LogState.DELETED:
        raise PartitionNotInitialized(f"partition {tp} was deleted, or never initialised")
    return control, found.version


async def _moved(log: Log, tp: TopicPartition, keys: PartitionKeys, control: Control, cursor_version: int) -> bool:
    """Whether retention or another compaction may have removed entries since these were read."""
    if await log.meta.get(keys.compaction) is not None:
        return True
    _, version = await read_cursor(log, tp, keys)
    now, _ = await _read_control(log, tp, keys)
    return version != cursor_version or now.log_start_offset != control.log_start_offset


async def _resumed(log: Log, tp: TopicPartition, keys: PartitionKeys, control: Control, crumb: Crumb) -> Plan | None:
    """The compaction that this breadcrumb began; None if it was given up, because its run is no longer there as it
    was.
    """
    record = crumb.record
    plan = Plan(tp, keys, (), record.expected_version, control, crumb)
    if record.state in (CompactionState.DELETING_OLD, CompactionState.UPDATING_CURSOR):
        return plan
    trimmed = control.log_start_offset > record.end_offset
    if record.state is CompactionState.WRITING_COMPACTED_INDEX:
        return None if trimmed and await _give_up_publishing(log, keys, crumb) else plan
    pieces, version = [], -1
    expected = record.start_offset
    async for piece, entry_version in _entries(log, keys, record.start_offset, record.end_offset):
        if piece.start_offset != expected or piece.entry.kind is not Kind.WAL:
            break
        pieces.append(piece)
        expected, version = piece.end_offset + 1, entry_version
    if trimmed or expected != record.end_offset + 1 or version != record.expected_version:
        await clear(log, keys, crumb)
        return None
    return plan._replace(pieces=tuple(pieces))


async def _give_up_publishing(log: Log, keys: PartitionKeys, crumb: Crumb) -> bool:
    """Clears the breadcrumb so that no stalled twin can publish its run afterwards; False if one has, or has taken it
    over.

    A twin publishes at the version of the highest entry that the breadcrumb names: rewriting the entry as it is takes
    that away.
    """
    key = keys.entry(crumb.record.end_offset)
    found = await confirmed(log.meta, lambda: log.meta.get(key))
    if found is not None and found.version == crumb.record.expected_version:
        try:
            await log.meta.put(key, found.value, expected=found.version)
        except VersionMismatch:
            return False
    elif found is not None and decode(IndexEntry, found.value, key) == crumb.record.entry:
        return False
    return await clear(log, keys, crumb)


async def _scan(
    log: Log,
    options: CompactorOptions,
    keys: PartitionKeys,
    position: int,
    limit: int,
    stop_before: int | None,
) -> _Scan:
    """The WAL entries from the one that covers `position` on, up to the options' limits."""
    pieces: list[Piece] = []
    version, size, at_tail, passed = -1, 0, True, 0
    if position >= limit:
        return _Scan(pieces, version, at_tail, passed)
    async for piece, entry_version in _entries(log, keys, position, limit - 1):
        first = pieces[0].start_offset if pieces else position
        if piece.entry.kind is Kind.COMPACTED:
            if piece.start_offset <= first:
                # WAL entries before it are leftovers inside its range.
                return _Scan([], -1, False, piece.end_offset + 1)
            at_tail = False
            break
        if not pieces:
            if piece.start_offset > position:
                return _Scan([], -1, False, 0, gap=True)
            passed = piece.start_offset
        elif piece.start_offset != pieces[-1].end_offset + 1:
            at_tail = False
            break
        offsets = piece.end_offset - first + 1
        size += piece.entry.byte_length
        full = offsets > options.max_offsets or size > options.max_bytes or len(pieces) >= options.max_entries
        stopped = stop_before is not None and piece.end_offset >= stop_before
        if stopped or (pieces and full):
            at_tail = False
            break
        pieces.append(piece)
        version = entry_version
    return _Scan(pieces, version, at_tail, passed, gap=passed == 0)


async def _entries(log: Log, keys: PartitionKeys, first_end: int, last_end: int) -> AsyncIterator[tuple[Piece, int]]:
    """Index entries whose keys are in [first_end, last_end], with their versions; one page in memory at a time."""
    key, stop = keys.entry(first_end), keys.entry(last_end + 1)
    while True:
        page = await log.meta.range(key, stop, INDEX_PAGE)
        for found in page:
            entry = decode(IndexEntry, found.value, found.key)
            end = end_offset_of(found.key)
            yield Piece(end - entry.msg_count + 1, end, entry), found.version
        if len(page) < INDEX_PAGE:
            return
        key = page[-1].key + "\x00"


async def _move_cursor(log: Log, keys: PartitionKeys, version: int, offset: int) -> None:
    """Somebody else may have moved it: then their word counts."""
    try:
        await log.meta.put(keys.cursor, encode(Cursor(offset)), expected=version)
    except VersionMismatch:
        pass
