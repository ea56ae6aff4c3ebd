"""What happened in a run: the last events to read, a digest of all of them to compare, and counts."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable

EVENTS_KEPT = 60


class Trace:
    def __init__(self, now: Callable[[], float]) -> None:
        self.counts: dict[str, int] = {}
        self.last: deque[str] = deque(maxlen=EVENTS_KEPT)
        self._now = now
        self._digest = hashlib.blake2b(digest_size=16)

    def add(self, event: str) -> None:
        line = f"{self._now():10.4f} {event}"
        self.last.append(line)
        self._digest.update(line.encode())

    def count(self, what: str, times: int = 1) -> None:
        self.counts[what] = self.counts.get(what, 0) + times

    def digest(self) -> str:
        return self._digest.hexdigest()
