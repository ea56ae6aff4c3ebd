"""Message ids: unique, and growing in the order in which they were given, across restarts and steps of the clock.

An id is one i64: 41 bits ms since 2024-01-01, 10 bits node, 12 bits sequence within the ms. The node is drawn once for
each store. When the sequence of a ms does not suffice, the next ms is begun early; when the clock goes back, ids go on
from the last one. The last id goes into the WriteBatch that uses it: an id that anybody has seen is never given again.
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
    """Gives ids; the caller holds the store's mutex."""

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
        """The next `count` ids, growing: a range for each ms that they take, one if they fit into the sequence of
        one.
        """
        taken: list[range] = []
        while count:
            ms, sequence = max(now_ms - EPOCH_MS, 0), 0
            if self.last >> _MS_SHIFT >= ms:
                ms, sequence = self.last >> _MS_SHIFT, (self.last & (_SEQUENCES - 1)) + 1
            many = min(count, _SEQUENCES)
            if sequence + many > _SEQUENCES:
                ms, sequence = ms + 1, 0
            first = ms << _MS_SHIFT | self.node << SEQUENCE_BITS | sequence
            taken.append(range(first, first + many))
            self.last = first + many - 1
            count -= many
        return taken

    def put(self, changes: Changes) -> None:
        """Makes what was taken last part of these changes."""
        changes.put(COUNTERS, MESSAGE_ID, self.last.to_bytes(8, "little"))
