"""Appends that commit together, with whatever else belongs into the same WriteBatch: rows, counters, an outbox."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from llog.engines.rocksdb.envelope import Cells, Times, check_records, encode
from llog.engines.rocksdb.keys import COUNTERS, LOGS, counter_key, record_keys
from llog.engines.rocksdb.partition_state import PartitionState, encode_state
from llog.engines.rocksdb.waiters import Partition
from llog.log.producers import Producer, RememberedAppend, check_producer, find_repeated, remember

if TYPE_CHECKING:
    from llog.engines.rocksdb.logs import RocksLogs


class StagedAppend(NamedTuple):
    """The offsets that the records will have; if the append is repeated, those that they got the first time."""

    start: int
    end: int
    repeated: bool


class StagedWrites:
    """Collects appends, and what callers add to `changes`, into one WriteBatch. Its context holds the store's mutex, so
    one thread must use it.
    """

    def __init__(self, logs: RocksLogs) -> None:
        self._logs = logs
        self._store = logs.store
        self._new: dict[Partition, PartitionState] = {}
        self.changes = logs.store.changes()

    def __enter__(self) -> StagedWrites:
        self._store.mutex.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._store.mutex.release()

    def append(
        self,
        directory: str,
        partition: int,
        values: Cells,
        *,
        keys: Cells | None = None,
        headers: Cells | None = None,
        timestamps: Times | None = None,
        now_ms: int,
        producer: Producer | None = None,
        what: str,
    ) -> StagedAppend:
        """Stage these records for the end of a partition. Their append time is `now_ms`, or that of the previous append
        if that is later.

        Headers are encoded (`encode_headers`), b"" for none; a timestamp of None is the append time. If this raises,
        nothing is staged.
        """
        check_records(values, keys, headers, timestamps)
        state = self._new.get((directory, partition)) or self._logs.state(directory, partition, what)
        if producer is not None:
            check_producer(producer)
            found = find_repeated(state.producers, state.evicted_through, state.next_offset, producer, what)
            if found is not None:
                return StagedAppend(found.start_offset, found.end_offset, True)
        start, end = state.next_offset, state.last_offset + len(values)
        append_ms = max(state.append_ms, now_ms)
        encoded = encode(
            values,
            keys,
            headers,
            timestamps,
            first_offset=start,
            append_ms=append_ms,
            newest_ms=state.timestamp_ms,
            position=state.position,
        )
        producers, evicted_through = state.producers, state.evicted_through
        if producer is not None:
            appended = RememberedAppend(producer.sequence, start, end)
            producers, evicted_through = remember(producers, evicted_through, producer.id, appended, append_ms)
        self.changes.put_all(LOGS, record_keys(directory, partition, range(start, end + 1)), encoded.envelopes)
        self._new[directory, partition] = msgspec.structs.replace(
            state,
            last_offset=end,
            append_ms=append_ms,
            timestamp_ms=encoded.newest_ms,
            position=encoded.position,
            producers=producers,
            evicted_through=evicted_through,
        )
        return StagedAppend(start, end, False)

    def commit(self, *, sync: bool = True) -> None:
        """Write all of it or nothing; call it once. Then the records can be read, and waiting readers are woken. With
        `sync`, they survive a power cut.
        """
        for (directory, partition), state in self._new.items():
            self.changes.put(COUNTERS, counter_key(directory, partition), encode_state(state))
        self._store.write(self.changes, sync=sync)
        self._logs.publish(self._new)
