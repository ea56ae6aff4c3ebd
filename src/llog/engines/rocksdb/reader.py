"""Finds and reads the records of one partition: with one iterator per read, and by bisection over values that only
grow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from llog.batch.columns import Columns
from llog.engines.rocksdb.envelope import DecodedRecords, EnvelopeHeader, decode, decode_header
from llog.engines.rocksdb.keys import LOGS, offset_of, record_key
from llog.engines.rocksdb.partition_state import PartitionState
from llog.errors import CorruptBatch
from llog.model import TimestampType

if TYPE_CHECKING:
    from llog.engines.rocksdb.store import RocksStore

BATCH_BYTES: Final = 2 << 20
_PAGE: Final = 1024


def decode_batches(
    store: RocksStore, topic: str, partition: int, start: int, stop: int, max_bytes: int | None = None
) -> Iterator[DecodedRecords]:
    """Yield the present records of [start, stop), about `BATCH_BYTES` at a time, up to about `max_bytes` but at least
    one record.
    """
    with store.using("read"):
        values = store.values(LOGS, record_key(topic, partition, start), record_key(topic, partition, stop))
    left = max(1, max_bytes) if max_bytes is not None else 1 << 62
    while left > 0:
        limit = min(left, BATCH_BYTES)
        with store.using("read"):
            envelopes, size = _take_values(values, limit)
        if envelopes:
            batch = _decode_checked(envelopes, topic, partition, start, stop)
            start = int(batch.offsets[-1]) + 1
            yield batch
        if size < limit:
            store.check_none(LOGS, record_key(topic, partition, start), record_key(topic, partition, stop))
            return
        left -= size


def _take_values(values: Iterator[bytes], limit: int) -> tuple[list[bytes], int]:
    """Return the next values, up to `limit` bytes, and their size, which is below `limit` only at the end."""
    envelopes: list[bytes] = []
    size = 0
    for value in values:
        envelopes.append(value)
        size += len(value)
        if size >= limit:
            break
    return envelopes, size


def read(
    store: RocksStore, topic: str, partition: int, start: int, stop: int, max_bytes: int
) -> list[tuple[int, Columns]]:
    """Return runs of consecutive records of [start, stop), each with its first offset. Raises `CorruptBatch` only if
    the first batch is damaged.
    """
    found: list[tuple[int, Columns]] = []
    try:
        for batch in decode_batches(store, topic, partition, start, stop, max_bytes):
            found += batch.runs()
    except CorruptBatch:
        if not found:
            raise
    return found


def headers_from(
    store: RocksStore, topic: str, partition: int, state: PartitionState, offset: int, limit: int
) -> list[EnvelopeHeader]:
    """Return the headers of up to `limit` records from `offset` on."""
    start = max(offset, state.log_start_offset)
    entries = store.items(
        LOGS, record_key(topic, partition, start), record_key(topic, partition, state.next_offset), limit
    )
    return [decode_header(value) for _, value in entries]


def first_at_time(
    store: RocksStore, topic: str, partition: int, state: PartitionState, timestamp_ms: int, by: TimestampType
) -> int:
    """Return the first offset whose time, as a running maximum, is at or after this time; else the next offset."""
    if by is TimestampType.APPEND:
        return _first(store, topic, partition, state, lambda header: header.append_ms >= timestamp_ms)
    return _first(store, topic, partition, state, lambda header: header.newest_ms >= timestamp_ms)


def first_within_bytes(store: RocksStore, topic: str, partition: int, state: PartitionState, max_bytes: int) -> int:
    """Return the highest offset from which the records have at least `max_bytes`; the log start if all have fewer."""
    if not state.has_gaps:
        bytes_before = state.position - max_bytes
        return _first(store, topic, partition, state, lambda header: header.position + header.length > bytes_before)
    start, first, size = record_key(topic, partition, state.log_start_offset), state.next_offset, 0
    while page := store.items(LOGS, start, record_key(topic, partition, first), _PAGE, backwards=True):
        for key, value in page:
            if size >= max_bytes:
                return first
            first, size = offset_of(key), size + len(value)
    return state.log_start_offset


def bytes_below(store: RocksStore, topic: str, partition: int, state: PartitionState, offset: int) -> int:
    """Return the bytes of the records below `offset`."""
    low, high = record_key(topic, partition, state.log_start_offset), record_key(topic, partition, offset)
    if state.has_gaps:
        with store.using("read"):
            return sum(map(len, store.values(LOGS, low, high)))
    first = store.items(LOGS, low, high, 1)
    if not first:
        return 0
    above = store.items(LOGS, high, record_key(topic, partition, state.next_offset), 1)
    end = decode_header(above[0][1]).position if above else state.position
    return end - decode_header(first[0][1]).position


def _first(
    store: RocksStore, topic: str, partition: int, state: PartitionState, is_found: Callable[[EnvelopeHeader], bool]
) -> int:
    """Return the first offset whose record passes the test, by bisection: all later records pass it, too. Without any,
    return the next offset.
    """
    low, high = state.bounds
    found = high
    while low < high:
        middle = (low + high) // 2
        entries = store.items(LOGS, record_key(topic, partition, middle), record_key(topic, partition, high), 1)
        if not entries:
            high = middle
            continue
        header = decode_header(entries[0][1])
        if is_found(header):
            found, high = header.offset, middle
        else:
            low = header.offset + 1
    return found


def _decode_checked(envelopes: list[bytes], topic: str, partition: int, start: int, stop: int) -> DecodedRecords:
    try:
        batch = decode(envelopes)
    except CorruptBatch as error:
        raise CorruptBatch(f"records of {topic}/{partition} from offset {start} on are damaged: {error}") from error
    if not start <= int(batch.offsets[0]) <= int(batch.offsets[-1]) < stop:
        raise CorruptBatch(
            f"entries under offsets {start} to {stop - 1} of {topic}/{partition} say that they are offsets "
            f"{batch.offsets[0]} to {batch.offsets[-1]}"
        )
    return batch
