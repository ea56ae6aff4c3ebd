"""Counts appends over time, in a bounded number of equal steps, however long the time is."""

from __future__ import annotations

from typing import Final, NamedTuple

STEPS_MAX: Final = 512
_WIDTH_MS_MIN: Final = 1000


class Moment(NamedTuple):
    start_ms: int
    records: float
    bytes: float


class Timeline:
    """Records and bytes in steps of 1, 2, 4, … seconds since 1970: two timelines can always get the same steps."""

    def __init__(self, width_ms: int = _WIDTH_MS_MIN) -> None:
        self.width_ms = width_ms
        self._steps: dict[int, tuple[float, float]] = {}

    def add(self, first_ms: int, last_ms: int, records: float, size: float) -> None:
        """Spread records evenly between two times, which is all that the index knows about a compacted blob."""
        first_ms = min(first_ms, last_ms)
        while last_ms // self.width_ms - first_ms // self.width_ms >= STEPS_MAX:
            self.widen(self.width_ms * 2)
        steps = range(first_ms // self.width_ms, last_ms // self.width_ms + 1)
        span = last_ms - first_ms
        for step in steps:
            overlap = min(last_ms, (step + 1) * self.width_ms) - max(first_ms, step * self.width_ms)
            share = overlap / span if span else 1.0
            known = self._steps.get(step, (0.0, 0.0))
            self._steps[step] = (known[0] + records * share, known[1] + size * share)
        while max(self._steps) - min(self._steps) >= STEPS_MAX:
            self.widen(self.width_ms * 2)

    def widen(self, width_ms: int) -> None:
        factor = width_ms // self.width_ms
        old, self._steps, self.width_ms = self._steps, {}, width_ms
        for step, (records, size) in old.items():
            known = self._steps.get(step // factor, (0.0, 0.0))
            self._steps[step // factor] = (known[0] + records, known[1] + size)

    def moments(self) -> list[Moment]:
        """Return all steps from the first to the last, including empty ones."""
        if not self._steps:
            return []
        return [
            Moment(step * self.width_ms, *self._steps.get(step, (0.0, 0.0)))
            for step in range(min(self._steps), max(self._steps) + 1)
        ]
