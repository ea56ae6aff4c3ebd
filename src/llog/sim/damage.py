"""Damage to what is stored: index entries that get lost, blobs that are cut off or whose bytes change.

No protocol can prevent it. What must hold: nobody is given wrong records, and nothing that could mend it is deleted.
The damage remembers what was there, for the checker to compare with and for the end, when all of it is mended.
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
        """The index entries that were lost and are not back yet, by key."""
        self.keys: set[str] = set()
        """The keys of all entries that were ever lost."""
        self.blobs: dict[str, bytes] = {}
        """What the damaged blobs held."""
        self.unmended = False
        """Whether processes may meet it."""

    def lose_entry(self, key: str) -> None:
        value = self._meta.value(key)
        assert value is not None
        self.entries[key] = value
        self.keys.add(key)
        self._meta.lose(key)
        self.unmended = True

    def damage_blob(self, draw: random.Random) -> str | None:
        """Cuts off a blob, or changes a byte of it; None if there is none."""
        whole = [name for name in self._blobs.names if not name.startswith(LOG_ID) and name not in self.blobs]
        if not whole:
            return None
        name = draw.choice(whole)
        data, put_ms = self._blobs.blobs[name]
        place = draw.randrange(len(data))
        changed = data[:place] if draw.random() < 0.5 else data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        self.blobs[name] = data
        self._blobs.blobs[name] = changed, put_ms
        self.unmended = True
        return name

    def undamaged(self, name: str) -> bytes | None:
        """What the blob holds, or would hold if it were whole; None if there is no such blob."""
        if name not in self._blobs.blobs:
            return None
        return self.blobs.get(name) or self._blobs.blobs[name][0]

    def explains(self, error: BaseException) -> bool:
        """Whether a process may meet this error because of the damage."""
        return self.unmended and isinstance(error, InconsistentReadState | CorruptBatch)

    def mend_blobs(self) -> None:
        """As an operator would who has copies of them."""
        for name, data in self.blobs.items():
            if name in self._blobs.blobs:
                self._blobs.blobs[name] = data, self._blobs.blobs[name][1]

    def end(self) -> None:
        """From now on nobody may meet an error because of it."""
        self.unmended = False
