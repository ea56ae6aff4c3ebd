"""Key compaction: the newest record of each key stays, at its offset; older ones are removed.

A pass finds the newest offset of each key among the records that no pass has reached, up to `KEYS_MAX` keys, and then
removes, from the log start on, older records of these keys. Deletions (records without a value, events of a deleted
row) are removed when they are old enough, after all older records of their keys. A record without a key stays, and so
does the log's last record.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from llog.batch.event_headers import deletion_mask
from llog.engines.rocksdb.partition_state import PartitionState
from llog.engines.rocksdb.reader import decode_batches

if TYPE_CHECKING:
    from llog.engines.rocksdb.logs import RocksLogs
    from llog.engines.rocksdb.store import RocksStore

KEYS_MAX: Final = 1_000_000


class CompactResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a compaction did. Offsets below `through` are compacted."""

    through: int = 0
    passes: int = 0
    removed: int = 0
    bytes_before: int = 0
    bytes_after: int = 0


class _Newest(NamedTuple):
    """The newest offset of each key in a range that ends before `stop`."""

    offsets: dict[bytes, int]
    stop: int


class _Removal(NamedTuple):
    """The records of one batch to be removed, and the number and bytes of those that stay."""

    offsets: list[int]
    bytes: int
    kept: int
    kept_bytes: int


def is_worth_it(state: PartitionState) -> bool:
    """Whether more records were appended since the last compaction than it had left."""
    new = state.last_offset - max(state.compacted_through, state.log_start_offset - 1)
    return new > state.compacted_records


def compact(
    logs: RocksLogs, directory: str, partition: int, deletions_before_ms: int, keys_max: int, what: str
) -> CompactResult:
    """Compact up to the record that is the last one at the time of the call. Later records are left alone."""
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
    """Return the newest offsets of the keys of [start, stop), or of a shorter range if it has too many keys."""
    newest: dict[bytes, int] = {}
    for batch in decode_batches(store, topic, partition, start, stop):
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
    """Yield the records of [start, newest.stop) that are not the newest of their keys, or old deletions."""
    for batch in decode_batches(store, topic, partition, start, newest.stop):
        offsets, keys = batch.offsets, batch.columns.keys
        if keys is None:
            yield _Removal([], 0, len(offsets), int(batch.lengths.sum()))
            continue
        find = newest.offsets.get
        above: npt.NDArray[np.int64] = np.fromiter(
            (find(key, 0) if key is not None else 0 for key in keys.to_pylist()), np.int64, len(offsets)
        )
        has_key = keys.is_valid().to_numpy(zero_copy_only=False)
        goes = (above > offsets) | (deletion_mask(batch.columns) & has_key & (batch.append_ms < deletions_before_ms))
        goes &= offsets != last_offset
        stays = batch.lengths[~goes]
        yield _Removal(offsets[goes].tolist(), int(batch.lengths[goes].sum()), len(stays), int(stays.sum()))
