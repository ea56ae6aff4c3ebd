"""What a mutation of the shipped code is made of: attributes that are replaced, and put back in the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from llog.sim.plan import SimPlan


class Patch:
    """Replaces attributes of modules and classes until it is undone."""

    def __init__(self) -> None:
        self._shipped: list[tuple[object, str, Any]] = []

    def setattr(self, target: object, name: str, value: object) -> None:
        self._shipped.append((target, name, getattr(target, name)))
        setattr(target, name, value)

    def undo(self) -> None:
        while self._shipped:
            setattr(*self._shipped.pop())


Change = Callable[[Patch], None]


class Mutation(NamedTuple):
    """A way to break the protocol, and the invariants (a regular expression) as whose violation it must be found."""

    change: Change
    found_as: str
    focus: Callable[[SimPlan], SimPlan] | None = None
    """Makes of every seed's plan one that looks for this mutation, where it takes more luck than those that are drawn
    have.
    """


@contextmanager
def mutated(mutation: Mutation) -> Iterator[None]:
    """Runs the block with the mutation in place of the shipped code."""
    patch = Patch()
    try:
        mutation.change(patch)
        yield
    finally:
        patch.undo()
