"""Reading and changing a partition's control record. The record of a deleted partition counts as missing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from llog.engines.object.pending import puts_before_change
from llog.errors import PartitionNotInitialized
from llog.log.cas import Change, update
from llog.log.keys import PartitionKeys
from llog.log.log import Log
from llog.log.records import Control, LogState, decode
from llog.model import TopicPartition
from llog.stores.meta import MetaEntry


async def read_control(log: Log, tp: TopicPartition, keys: PartitionKeys) -> tuple[Control, int]:
    """Return the control record and its version; raise `PartitionNotInitialized` if the partition does not exist or was
    deleted.
    """
    found = await log.meta.get(keys.control)
    if found is None:
        raise _missing(tp)
    return decode_control(tp, found), found.version


def decode_control(tp: TopicPartition, found: MetaEntry | None) -> Control:
    """Return the control record in this entry; raise `PartitionNotInitialized` as `read_control` does."""
    if found is None:
        raise _missing(tp)
    return _check_not_deleted(tp, decode(Control, found.value, found.key))


async def update_control(
    log: Log, tp: TopicPartition, keys: PartitionKeys, decide: Callable[[Control], Control], *, confirm: bool = False
) -> Change[Control]:
    """Replace the control record as `change_control` does; raise `PartitionNotInitialized` as `read_control` does."""
    change = await change_control(log, keys, lambda control: decide(_check_not_deleted(tp, control)), confirm=confirm)
    if change is None:
        raise _missing(tp)
    return change


async def change_control(
    log: Log, keys: PartitionKeys, decide: Callable[[Control], Control], *, confirm: bool = False
) -> Change[Control] | None:
    """Replace the control record, deleted or not, as `cas.update` does.

    A change that drops `pending` first puts what has to be there (`engines/object/pending.py`).
    """
    return await update(
        log, keys.control, Control, decide, puts_before=partial(puts_before_change, keys), confirm=confirm
    )


def _missing(tp: TopicPartition) -> PartitionNotInitialized:
    return PartitionNotInitialized(f"partition {tp} has no control record")


def _check_not_deleted(tp: TopicPartition, control: Control) -> Control:
    if control.log_state is LogState.DELETED:
        raise PartitionNotInitialized(f"partition {tp} was deleted")
    return control
