"""Which segments retention deletes, and deleting them so that a crash at any moment leaves either all of one or nothing
that anybody reads.

First, in one write, the segment leaves the list of segments and gets a deletion mark: from then on nobody reads it.
Then its entries go, some at a time, and the mark last. A writer that finds a mark when it takes over finishes the work.
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
    State,
    after_prefix,
    segment_key,
    segment_of,
    state_value,
)
from llog.keyed.model import RetentionConfig
from llog.keyed.segments import Segments
from llog.keyed.slate import Database, new_batch

ROWS_AT_ONCE: Final = 64


def beyond(segments: Segments, limits: RetentionConfig, now_ms: int) -> int:
    """The first segment that is kept: those before it are too old, or too much together with all after them."""
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


async def unlist(database: Database, segment_ids: Iterable[int], state: State) -> Any:
    """Takes segments off the list, so that `state` is what is left; what it returns tells when that is durable."""
    batch = new_batch()
    batch.put(STATE_KEY, state_value(state))
    for segment_id in segment_ids:
        batch.put(segment_key(DELETION_MARK, segment_id), b"")
        batch.delete(segment_key(SEGMENT_META, segment_id))
        batch.delete(segment_key(SEGMENT_TOTALS, segment_id))
    return await database.write(batch)


async def marked(database: Database) -> list[int]:
    """Segments that are off the list but not yet erased."""
    first = segment_key(DELETION_MARK, 0)[:2]
    rows = await database.rows(first, after_prefix(first))
    found: list[int] = []
    while page := await rows.page(ROWS_AT_ONCE):
        found += [segment_of(row.key) for row in page]
    return found


async def erase(database: Database, segment_id: int) -> None:
    """Deletes the entries of a segment that is off the list. May be repeated."""
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
    await database.durable(await database.write(batch))
