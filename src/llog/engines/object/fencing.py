"""Fencing: stops all appends to a partition, from any process, without stopping readers.

The fence is in the control record, whose CAS is the commit point of every append: an append under way loses its CAS,
reads the record again and is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

from llog.engines.object.control_record import update_control
from llog.engines.object.partition_keys import find_keys
from llog.log.catalog import Catalog, check_partition
from llog.log.log import Log
from llog.log.records import Control, LogState
from llog.model import TopicPartition

_AT_ONCE: Final = 64
"""Partitions of a topic that are changed at a time."""


async def fence(log: Log, tp: TopicPartition) -> None:
    """Fence the partition: after this returns, no append commits until it is unfenced. Idempotent."""
    await _change_state(log, tp, LogState.FENCED)


async def unfence(log: Log, tp: TopicPartition) -> None:
    """Let appends commit again. Idempotent."""
    await _change_state(log, tp, LogState.OPEN)


async def fence_topic(log: Log, name: str, partition: int | None = None) -> list[int]:
    """Fence one partition of the topic, or all that it has now, and return them.

    Partitions that are added later are not fenced. If a call fails, some may be fenced: it can be repeated.
    """
    return await _change_partitions(log, name, partition, fence)


async def unfence_topic(log: Log, name: str, partition: int | None = None) -> list[int]:
    """Let appends to one partition of the topic, or to all, commit again, and return the partitions."""
    return await _change_partitions(log, name, partition, unfence)


async def _change_partitions(
    log: Log, name: str, partition: int | None, change: Callable[[Log, TopicPartition], Awaitable[None]]
) -> list[int]:
    topic = await Catalog(log).get(name)
    partitions = list(range(topic.partitions))
    if partition is not None:
        check_partition(topic, partition)
        partitions = [partition]
    for start in range(0, len(partitions), _AT_ONCE):
        some = partitions[start : start + _AT_ONCE]
        await asyncio.gather(*(change(log, TopicPartition(name, number)) for number in some))
    return partitions


async def _change_state(log: Log, tp: TopicPartition, state: LogState) -> None:
    keys = await find_keys(log, tp)

    def change_state(control: Control) -> Control:
        return msgspec.structs.replace(control, log_state=state)

    await update_control(log, tp, keys, change_state, confirm=True)
