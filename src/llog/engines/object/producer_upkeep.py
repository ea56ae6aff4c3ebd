"""Upkeep of the states of producers of records: forgets those that have not appended for long, and deletes the keys
that are not needed.

Age is by append times within the partition: a producer expires once the partition's newest append is later than the
producer's last by the time of expiry. In a partition that is idle, nobody expires. First a CAS raises
`producers_expired_through`, never to the pending append; from then on, keys at or below it count as missing. A key is
also deleted once a higher one of its producer was seen. Both rest on facts that never go back, and need no confirmed
reads.
"""

from __future__ import annotations

from itertools import groupby

import msgspec

from llog.engines.object.control_record import change_control
from llog.log.keys import PartitionKeys, end_offset_of
from llog.log.log import Log
from llog.log.record_producers import PRODUCER_EXPIRY_MS, StoredProducer
from llog.log.records import Control, LogState, decode
from llog.stores.meta import MetaEntry, prefix_end

_PAGE = 5000


async def tend_producers(log: Log, keys: PartitionKeys, control: Control, expiry_ms: int = PRODUCER_EXPIRY_MS) -> int:
    """Expire producers and delete their keys; return the number of producers of which keys were deleted.

    `control` is the partition's record, which may be outdated.
    """
    start, end, deleted = keys.producers, prefix_end(keys.producers), 0
    while page := await log.meta.range(start, end, _PAGE):
        expired = _expired_through(page, control.max_append_ms - expiry_ms)
        if expired > control.producers_expired_through:
            control = await _expire(log, keys, expired) or control
        for directory, found in groupby((entry.key for entry in page), lambda key: key[:-20]):
            deleted += await _delete_unneeded(log, directory, list(found), control.producers_expired_through)
        if len(page) < _PAGE:
            break
        start = page[-1].key + "\x00"
    return deleted


def _expired_through(page: list[MetaEntry], before_ms: int) -> int:
    """Return the highest end of the states that are older."""
    states = [decode(StoredProducer, entry.value, entry.key).state for entry in page]
    return max((state.end_offset for state in states if state.append_ms < before_ms), default=0)


async def _expire(log: Log, keys: PartitionKeys, through: int) -> Control | None:
    """Raise the offset up to which producers are forgotten, and return the control record."""

    def expire(control: Control) -> Control:
        stop = control.next_offset if control.pending is None else control.pending.start_offset
        expired = min(through, stop - 1)
        if control.log_state is LogState.DELETED or expired <= control.producers_expired_through:
            return control
        return msgspec.structs.replace(control, producers_expired_through=expired)

    change = await change_control(log, keys, expire)
    return None if change is None else change.new


async def _delete_unneeded(log: Log, directory: str, found: list[str], expired_through: int) -> int:
    """Delete the keys of one producer below its highest, and the highest if the producer has expired."""
    newest = found[-1]
    is_expired = end_offset_of(newest) <= expired_through
    if is_expired:
        await log.meta.delete_range(directory, newest + "\x00")
    elif len(found) > 1:
        await log.meta.delete_range(directory, newest)
    return int(is_expired or len(found) > 1)
