"""Damage to stored data: index entries that get lost, blobs that are cut off or whose bytes change.

No protocol can prevent damage. It must hold that no reader gets wrong records, and that nothing that could repair the
damage is deleted. `Damage` remembers the undamaged data, for the checker and for the repair at the end.
"""

from __future__ import annotations

import random

from llog.errors import CorruptBatch, InconsistentReadState
from llog.log.keys import LOG_ID
from llog.sim.stores import WatchedMeta
from llog.stores.memory.blobs import MemoryBlobs


class Damage:
    def __init__(self, meta: WatchedMeta, blobs: MemoryBlobs) -> None:
        self._meta = meta
        self._blobs = blobs
        self.entries: dict[str, bytes] = {}
        """The index entries that were lost and not put back, by key."""
        self.keys: set[str] = set()
        """The keys of all entries that were ever lost."""
        self.blobs: dict[str, bytes] = {}
        """The undamaged bytes of the damaged blobs."""
        self.unmended = False
        """Whether processes may meet the damage."""

    def lose_entry(self, key: str) -> None:
        value = self._meta.value(key)
        assert value is not None
        self.entries[key] = value
        self.keys.add(key)
        self._meta.lose(key)
        self.unmended = True

    def damage_blob(self, draw: random.Random) -> str | None:
        """Cut off a blob or change one of its bytes, and return its name; None if there is no undamaged blob."""
        whole = [name for name in self._blobs.names if not name.startswith(LOG_ID) and name not in self.blobs]
        if not whole:
            return None
        name = draw.choice(whole)
        data, put_ms = self._blobs.blobs[name]
        position = draw.randrange(len(data))
        changed = (
            data[:position]
            if draw.random() < 0.5
            else data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]
        )
        self.blobs[name] = data
        self._blobs.blobs[name] = changed, put_ms
        self.unmended = True
        return name

    def undamaged(self, name: str) -> bytes | None:
        """Return the blob's undamaged bytes; None if the blob does not exist."""
        if name not in self._blobs.blobs:
            return None
        return self.blobs.get(name) or self._blobs.blobs[name][0]

    def explains(self, error: BaseException) -> bool:
        """Return whether the damage may have caused this error."""
        return self.unmended and isinstance(error, InconsistentReadState | CorruptBatch)

    def mend_blobs(self) -> None:
        """Restore the blobs, as an operator with copies would."""
        for name, data in self.blobs.items():
            if name in self._blobs.blobs:
                self._blobs.blobs[name] = data, self._blobs.blobs[name][1]

    def end(self) -> None:
        """Allow no more errors because of damage."""
        self.unmended = False
