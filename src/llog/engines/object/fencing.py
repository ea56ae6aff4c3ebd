"""Fencing: stops all appends to a partition, whoever makes them, without stopping readers.

The fence is in the control record, whose CAS is the commit point of every append: one that was under way loses its CAS,
reads the record again and is refused.
"""

from __future__ import annotations

import msgspec

from llog.engines.object.partition_keys import find_keys
from llog.errors import OutcomeUnknown, PartitionNotInitialized, VersionMismatch
from llog.log.log import Log
from llog.log.records import Control, LogState, decode, encode
from llog.model import TopicPartition


async def fence(log: Log, tp: TopicPartition) -> None:
    """Once this returned, no append to the partition commits until it is unfenced. Fencing twice is no error."""
    await _change_state(log, tp, LogState.FENCED)


async def unfence(log: Log, tp: TopicPartition) -> None:
    """Lets appends in again."""
    await _change_state(log, tp, LogState.OPEN)


async def _change_state(log: Log, tp: TopicPartition, state: LogState) -> None:
    keys = await find_keys(log, tp)
    while True:
        reads = await log.meta.begin_reads()
        found = await log.meta.get(keys.control)
        control = None if found is None else decode(Control, found.value, found.key)
        if found is None or control is None:
            raise PartitionNotInitialized(f"partition {tp} has no control record")
        if control.log_state is LogState.DELETED:
            raise PartitionNotInitialized(f"partition {tp} was deleted")
        if control.log_state is state:
            await reads.confirm()  # in an old state it may be: then the partition is not what the caller wants
            return
        try:
            await log.meta.put(
                keys.control, encode(msgspec.structs.replace(control, log_state=state)), expected=found.version
            )
        except (VersionMismatch, OutcomeUnknown):
            continue  # what the record says now is what counts
        return
