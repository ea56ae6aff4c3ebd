"""What a run reports: the invariant that it found broken, and a trace of its events."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable

import msgspec

EVENTS_KEPT = 60


class Violation(Exception):
    """An invariant does not hold."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a seed. `digest` covers the whole trace: the same seed gives the same digest."""

    seed: int
    violation: str | None
    digest: str
    counts: dict[str, int]
    last: tuple[str, ...]


class Trace:
    """The last events of a run for people to read, a digest of all events to compare runs by, and counts."""

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
