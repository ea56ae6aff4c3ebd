"""Measurements that take turns, so that a machine that gets busy or slow favours none of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping


class Turns:
    """The figures of several subjects, turn by turn."""

    def __init__(self, figures: Mapping[str, list[float]]) -> None:
        self._figures = figures

    def median(self, name: str) -> float:
        return statistics.median(self._figures[name])

    def ratio(self, name: str, against: str) -> float:
        """Return the median of the turns' ratios: the two sides of a turn ran under nearly the same load."""
        pairs = zip(self._figures[name], self._figures[against], strict=True)
        return statistics.median(figure / base for figure, base in pairs)


def in_turns(subjects: Mapping[str, Callable[[], float]], rounds: int) -> Turns:
    """Measure every subject once to warm it up, and then `rounds` times in turns."""
    for measure in subjects.values():
        measure()
    figures: dict[str, list[float]] = {name: [] for name in subjects}
    for _ in range(rounds):
        for name, measure in subjects.items():
            figures[name].append(measure())
    return Turns(figures)
