"""Finding and reading the records of one partition: in passes of one iterator, and by bisection over what only
grows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from llog.batch.columns import Columns
from llog.engines.rocksdb.envelope import Decoded, Fixed, decode, fixed_of
from llog.engines.rocksdb.keys import LOGS, offset_of, record_key
from llog.engines.rocksdb.partition_state import PartitionState
from llog.errors import CorruptBatch
from llog.model import TimestampType

if TYPE_CHECKING:
    from llog.engines.rocksdb.store import RocksStore

BATCH_BYTES: Final = 2 << 20
_PAGE: Final = 1024


def decoded(
    store: RocksStore, topic: str, partition: int, start: int, stop: int, max_bytes: int | None = None
) -> Iterator[Decoded]:
    """The records of [start, stop) as they are now, about `BATCH_BYTES` at a time, up to about `max_bytes`, but at
    least one.
    """
    with store.using("read"):
        values = store.values(LOGS, record_key(topic, partition, start), record_key(topic, partition, stop))
    left = max(1, max_bytes) if max_bytes is not None else 1 << 62
    while left > 0:
        limit = min(left, BATCH_BYTES)
        with store.using("read"):
            taken, size = _taken(values, limit)
        if taken:
            batch = _checked(taken, topic, partition, start, stop)
            start = int(batch.offsets[-1]) + 1
            yield batch
        if size < limit:
            store.check_none(LOGS, record_key(topic, partition, start), record_key(topic, partition, stop))
            return
        left -= size


def _taken(values: Iterator[bytes], limit: int) -> tuple[list[bytes], int]:
    """The next values until they have `limit` bytes, and their bytes: fewer only at the end."""
    taken: list[bytes] = []
    size = 0
    for value in values:
        taken.append(value)
        size += len(value)
        if size >= limit:
            break
    return taken, size


def read(
    store: RocksStore, topic: str, partition: int, start: int, stop: int, max_bytes: int
) -> list[tuple[int, Columns]]:
    """Runs of consecutive records of [start, stop), each with its first offset. Damage is an error if it is in the
    first batch.
    """
    found: list[tuple[int, Columns]] = []
    try:
        for batch in decoded(store, topic, partition, start, stop, max_bytes):
            found += batch.runs()
    except CorruptBatch:
        if not found:
            raise
    return found


def fixed_from(
    store: RocksStore, topic: str, partition: int, state: PartitionState, offset: int, limit: int
) -> list[Fixed]:
    """The numbers of up to `limit` records from `offset` on."""
    start = max(offset, state.log_start_offset)
    entries = store.items(
        LOGS, record_key(topic, partition, start), record_key(topic, partition, state.next_offset), limit
    )
    return [fixed_of(value) for _, value in entries]


def first_at_time(
    store: RocksStore, topic: str, partition: int, state: PartitionState, timestamp_ms: int, by: TimestampType
) -> int:
    """The first offset whose time, as a running maximum, is at or after this; the next offset if there is none."""
    if by is TimestampType.APPEND:
        return _first(store, topic, partition, state, lambda fixed: fixed.append_ms >= timestamp_ms)
    return _first(store, topic, partition, state, lambda fixed: fixed.newest_ms >= timestamp_ms)


def first_within_bytes(store: RocksStore, topic: str, partition: int, state: PartitionState, max_bytes: int) -> int:
    """The first offset to be kept so that what is left is `max_bytes` or just more; the log start if there are
    fewer.
    """
    if not state.has_gaps:
        bytes_before = state.position - max_bytes
        return _first(store, topic, partition, state, lambda fixed: fixed.position + fixed.length > bytes_before)
    start, first, size = record_key(topic, partition, state.log_start_offset), state.next_offset, 0
    while page := store.items(LOGS, start, record_key(topic, partition, first), _PAGE, backwards=True):
        for key, value in page:
            if size >= max_bytes:
                return first
            first, size = offset_of(key), size + len(value)
    return state.log_start_offset


def bytes_below(store: RocksStore, topic: str, partition: int, state: PartitionState, offset: int) -> int:
    """Bytes of the records that are there below `offset`."""
    low, high = record_key(topic, partition, state.log_start_offset), record_key(topic, partition, offset)
    if state.has_gaps:
        with store.using("read"):
            return sum(map(len, store.values(LOGS, low, high)))
    first = store.items(LOGS, low, high, 1)
    if not first:
        return 0
    above = store.items(LOGS, high, record_key(topic, partition, state.next_offset), 1)
    end = fixed_of(above[0][1]).position if above else state.position
    return end - fixed_of(first[0][1]).position


def _first(
    store: RocksStore, topic: str, partition: int, state: PartitionState, is_found: Callable[[Fixed], bool]
) -> int:
    """The first offset whose record passes a test that all records above it pass, too; the next offset if there is
    none.
    """
    low, high = state.bounds
    found = high
    while low < high:
        middle = (low + high) // 2
        entries = store.items(LOGS, record_key(topic, partition, middle), record_key(topic, partition, high), 1)
        if not entries:
            high = middle
            continue
        fixed = fixed_of(entries[0][1])
        if is_found(fixed):
            found, high = fixed.offset, middle
        else:
            low = fixed.offset + 1
    return found


def _checked(envelopes: list[bytes], topic: str, partition: int, start: int, stop: int) -> Decoded:
    try:
        batch = decode(envelopes)
    except CorruptBatch as error:
        raise CorruptBatch(f"records of {topic}/{partition} from offset {start} on are damaged: {error}") from error
    if not start <= int(batch.offsets[0]) <= int(batch.offsets[-1]) < stop:
        raise CorruptBatch(
            f"entries of {topic}/{partition} say that they are offsets {batch.offsets[0]} to {batch.offsets[-1]}, "
            "outside "
            f"of the {start} to {stop - 1} that they lie under"
        )
    return batch
