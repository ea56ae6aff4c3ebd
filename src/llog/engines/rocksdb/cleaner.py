"""Key compaction: of each key, the newest record stays, at its offset; which records those are not.

A pass finds the newest offset of each key among the records that no pass has reached, up to `KEYS_MAX` keys, and then,
from the log start on, what is older of these keys. Deletions (records without a payload, events of a deleted row) go
when they are old enough: all that is older of their keys goes before them. A record without a key stays, and so does
the log's last record.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from llog.batch.event_headers import deletions
from llog.engines.rocksdb.partition_state import PartitionState
from llog.engines.rocksdb.reader import decoded

if TYPE_CHECKING:
    from llog.engines.rocksdb.logs import RocksLogs
    from llog.engines.rocksdb.store import RocksStore

KEYS_MAX: Final = 1_000_000


class CompactResult(msgspec.Struct, frozen=True, kw_only=True):
    """What was done. `through`: offsets below are compacted."""

    through: int = 0
    passes: int = 0
    removed: int = 0
    bytes_before: int = 0
    bytes_after: int = 0


class _Newest(NamedTuple):
    """The newest offset of each key in some range, which ends before `stop`."""

    offsets: dict[bytes, int]
    stop: int


class _Removal(NamedTuple):
    """Records to be removed, and what stays beside them. All that lies below was told before."""

    offsets: list[int]
    bytes: int
    kept: int
    kept_bytes: int


def is_worth_it(state: PartitionState) -> bool:
    """Whether as many records came since the last compaction as it had left."""
    new = state.last_offset - max(state.compacted_through, state.log_start_offset - 1)
    return new > state.compacted_records


def compact(
    logs: RocksLogs, directory: str, partition: int, deletions_before_ms: int, keys_max: int, what: str
) -> CompactResult:
    """Everything up to what is the last record when this begins. What comes meanwhile is left alone."""
    state = logs.state(directory, partition, what)
    first, last, stop = state.log_start_offset, state.last_offset, state.next_offset
    passes = removed = removed_bytes = 0
    start = max(state.compacted_through + 1, first)
    while True:
        newest = _newest_of(logs.store, directory, partition, start, stop, keys_max)
        kept = kept_bytes = 0
        for each in _removals(logs.store, directory, partition, first, newest, last, deletions_before_ms):
            kept, kept_bytes = kept + each.kept, kept_bytes + each.kept_bytes
            if each.offsets:
                logs.remove_records(directory, partition, each.offsets, what)
                removed, removed_bytes = removed + len(each.offsets), removed_bytes + each.bytes
        logs.note_compaction(directory, partition, newest.stop - 1, kept, what)
        passes, start = passes + 1, newest.stop
        if start >= stop:
            return CompactResult(
                through=stop,
                passes=passes,
                removed=removed,
                bytes_before=kept_bytes + removed_bytes,
                bytes_after=kept_bytes,
            )


def _newest_of(store: RocksStore, topic: str, partition: int, start: int, stop: int, keys_max: int) -> _Newest:
    """Of the records of [start, stop), or fewer if their keys are too many."""
    newest: dict[bytes, int] = {}
    for batch in decoded(store, topic, partition, start, stop):
        keys, offsets = batch.columns.keys, batch.offsets
        if keys is not None and keys.null_count:
            keys, offsets = keys.drop_null(), offsets[keys.is_valid().to_numpy(zero_copy_only=False)]
        if keys is not None:
            newest.update(zip(keys.to_pylist(), offsets.tolist(), strict=True))
        if len(newest) >= keys_max:
            return _Newest(newest, int(batch.offsets[-1]) + 1)
    return _Newest(newest, stop)


def _removals(
    store: RocksStore,
    topic: str,
    partition: int,
    start: int,
    newest: _Newest,
    last_offset: int,
    deletions_before_ms: int,
) -> Iterator[_Removal]:
    """What of [start, newest.stop) is not the newest of its key, or a deletion from before this time."""
    for batch in decoded(store, topic, partition, start, newest.stop):
        offsets, keys = batch.offsets, batch.columns.keys
        if keys is None:
            yield _Removal([], 0, len(offsets), int(batch.lengths.sum()))
            continue
        find = newest.offsets.get
        above: npt.NDArray[np.int64] = np.fromiter(
            (find(key, 0) if key is not None else 0 for key in keys.to_pylist()), np.int64, len(offsets)
        )
        has_key = keys.is_valid().to_numpy(zero_copy_only=False)
        goes = (above > offsets) | (deletions(batch.columns) & has_key & (batch.append_ms < deletions_before_ms))
        goes &= offsets != last_offset
        stays = batch.lengths[~goes]
        yield _Removal(offsets[goes].tolist(), int(batch.lengths[goes].sum()), len(stays), int(stays.sum()))
