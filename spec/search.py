"""Breadth-first search of every reachable state, so that the trace of a violation is a shortest one.

Visited states are kept as 64-bit hashes: the chance that two of a million states share a hash is below 1 in 10 million.
The hashes of -1 and -2 are equal, so no field of a state may take both values.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple, Protocol, TypeVar

S = TypeVar("S", bound=Hashable)


class Result(NamedTuple):
    """The result of one search. If it was `cut` at the limit of states, "no violation" proves nothing."""

    states: int
    depth: int
    cut: bool
    violation: str | None
    trace: tuple[str, ...]


class Configuration(Protocol):
    """The processes of a model, and how often each acts."""

    def search(self, mutation: str | None, states_max: int) -> Result: ...


def describe(model: str, shape: Any) -> str:
    """Return the model's name, and the fields of a named tuple that differ from their defaults."""
    defaults = shape._field_defaults
    return " ".join([model, *(f"{k}={v}" for k, v in shape._asdict().items() if v != defaults.get(k))])


def explore(
    start: S,
    steps: Callable[[S], Iterable[tuple[str, S]]],
    violation: Callable[[S], str | None],
    states_max: int,
) -> Result:
    """Search until a state has a violation, no state is left, or `states_max` states were met."""
    collecting = gc.isenabled()
    gc.disable()  # States are tuples of tuples, without cycles, and most live to the end.
    try:
        return _explore(start, steps, violation, states_max)
    finally:
        if collecting:
            gc.enable()


def _explore(
    start: S,
    steps: Callable[[S], Iterable[tuple[str, S]]],
    violation: Callable[[S], str | None],
    states_max: int,
) -> Result:
    parents: dict[int, tuple[int, str]] = {hash(start): (0, "")}
    queue = deque([(start, hash(start), 0)])
    depth, cut = 0, False
    while queue:
        state, key, depth = queue.popleft()
        bad = violation(state)
        if bad is not None:
            return Result(len(parents), depth, cut, bad, _trace(parents, key))
        if cut:
            continue
        for label, following in steps(state):
            following_key = hash(following)
            if following_key not in parents:
                parents[following_key] = (key, label)
                queue.append((following, following_key, depth + 1))
        cut = len(parents) >= states_max
    return Result(len(parents), depth, cut, None, ())


def _trace(parents: dict[int, tuple[int, str]], key: int) -> tuple[str, ...]:
    labels: list[str] = []
    while True:
        key, label = parents[key]
        if not label:
            return tuple(reversed(labels))
        labels.append(label)
