"""Message ids: unique and increasing, across restarts and clock steps.

An id is one i64: 41 bits ms since 2024-01-01, 10 bits node, 12 bits sequence within the ms. The node is drawn at random
once for each store. When the sequence of a ms is exhausted, the next ms begins early; when the clock steps back, ids
continue from the last one. The last id is stored by the WriteBatch that uses it, so that no id is ever used again after
it became visible.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from llog.engines.rocksdb.keys import COUNTERS, MESSAGE_ID, MESSAGE_NODE
from llog.runtime import Runtime

if TYPE_CHECKING:
    from llog.engines.rocksdb.store import Changes, RocksStore

EPOCH_MS: Final = 1_704_067_200_000
NODE_BITS: Final = 10
SEQUENCE_BITS: Final = 12
_MS_SHIFT: Final = NODE_BITS + SEQUENCE_BITS
_SEQUENCES: Final = 1 << SEQUENCE_BITS


class MessageIds:
    """Assigns ids; the caller holds the store's mutex."""

    def __init__(self, store: RocksStore, runtime: Runtime) -> None:
        with store.mutex:
            found = store.get(COUNTERS, MESSAGE_NODE)
            if found is None:
                found = runtime.random().getrandbits(NODE_BITS).to_bytes(8, "little")
                changes = store.changes()
                changes.put(COUNTERS, MESSAGE_NODE, found)
                store.write(changes, sync=True)
            self.node = int.from_bytes(found, "little")
            self.last = int.from_bytes(store.get(COUNTERS, MESSAGE_ID) or b"", "little")

    def take(self, count: int, now_ms: int) -> list[range]:
        """Return the next `count` ids, increasing, as one range for each ms whose sequence they use."""
        ranges: list[range] = []
        while count:
            ms, sequence = max(now_ms - EPOCH_MS, 0), 0
            if self.last >> _MS_SHIFT >= ms:
                ms, sequence = self.last >> _MS_SHIFT, (self.last & (_SEQUENCES - 1)) + 1
            many = min(count, _SEQUENCES)
            if sequence + many > _SEQUENCES:
                ms, sequence = ms + 1, 0
            first = ms << _MS_SHIFT | self.node << SEQUENCE_BITS | sequence
            ranges.append(range(first, first + many))
            self.last = first + many - 1
            count -= many
        return ranges

    def put(self, changes: Changes) -> None:
        """Add the last id that was taken to these changes."""
        changes.put(COUNTERS, MESSAGE_ID, self.last.to_bytes(8, "little"))
