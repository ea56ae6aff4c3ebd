"""Chooses the segments that retention deletes, and deletes segments so that readers see all of one or nothing, even
after a crash.

First, one write takes the segment off the list of segments and gives it a deletion mark: from then on no reader reads
it. Then its entries are deleted, some at a time, and the mark last. A writer that finds a mark when it opens the log
finishes the deletion.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any, Final

from llog.keyed.encoding import (
    DELETION_MARK,
    ENTRY,
    LISTING,
    SEGMENT_META,
    SEGMENT_TOTALS,
    STATE_KEY,
    LogState,
    after_prefix,
    segment_key,
    segment_of,
    state_value,
)
from llog.keyed.model import RetentionConfig
from llog.keyed.segments import Segments
from llog.keyed.slate import Database, new_batch

ROWS_AT_ONCE: Final = 64


def first_kept_segment(segments: Segments, limits: RetentionConfig, now_ms: int) -> int:
    """Return the first segment to keep: those before it are too old, or exceed the size limit with all after them."""
    before, active = segments.first_id, segments.active_id
    if limits.max_age is not None:
        oldest = now_ms - round(limits.max_age / timedelta(milliseconds=1))
        while before < active and segments.totals(before).append_ms < oldest:
            before += 1
    if limits.max_bytes is not None:
        size = sum(segments.totals(each).size for each in range(before, active + 1))
        while before < active and size > limits.max_bytes:
            size -= segments.totals(before).size
            before += 1
    return before


async def unlist(database: Database, segment_ids: Iterable[int], state: LogState) -> Any:
    """Take segments off the list, which leaves `state`; return a handle for `Database.await_durable`."""
    batch = new_batch()
    batch.put(STATE_KEY, state_value(state))
    for segment_id in segment_ids:
        batch.put(segment_key(DELETION_MARK, segment_id), b"")
        batch.delete(segment_key(SEGMENT_META, segment_id))
        batch.delete(segment_key(SEGMENT_TOTALS, segment_id))
    return await database.write(batch)


async def marked_segments(database: Database) -> list[int]:
    """Return the segments that are off the list but not erased yet."""
    first = segment_key(DELETION_MARK, 0)[:2]
    rows = await database.rows(first, after_prefix(first))
    found: list[int] = []
    while page := await rows.page(ROWS_AT_ONCE):
        found += [segment_of(row.key) for row in page]
    return found


async def erase(database: Database, segment_id: int) -> None:
    """Delete the entries of a segment that is off the list. Idempotent."""
    for kind in (ENTRY, LISTING):
        first = segment_key(kind, segment_id)
        rows = await database.rows(first, after_prefix(first), durable=False)
        while page := await rows.page(ROWS_AT_ONCE):
            batch = new_batch()
            for row in page:
                batch.delete(row.key)
            await database.write(batch)
    batch = new_batch()
    batch.delete(segment_key(DELETION_MARK, segment_id))
    await database.await_durable(await database.write(batch))
