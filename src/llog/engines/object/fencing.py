"""Fencing: stops all appends to a partition, from any process, without stopping readers.

The fence is in the control record, whose CAS is the commit point of every append: an append under way loses its CAS,
reads the record again and is refused.
"""

from __future__ import annotations

import msgspec

from llog.engines.object.control_record import update_control
from llog.engines.object.partition_keys import find_keys
from llog.log.log import Log
from llog.log.records import Control, LogState
from llog.model import TopicPartition


async def fence(log: Log, tp: TopicPartition) -> None:
    """Fence the partition: after this returns, no append commits until it is unfenced. Idempotent."""
    await _change_state(log, tp, LogState.FENCED)


async def unfence(log: Log, tp: TopicPartition) -> None:
    """Let appends commit again. Idempotent."""
    await _change_state(log, tp, LogState.OPEN)


async def _change_state(log: Log, tp: TopicPartition, state: LogState) -> None:
    keys = await find_keys(log, tp)

    def change_state(control: Control) -> Control:
        return msgspec.structs.replace(control, log_state=state)

    await update_control(log, tp, keys, change_state, confirm=True)
