"""Mutations of the shipped code: replaced attributes, which are restored at the end."""

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
    """A way to break the protocol, and a regular expression for the invariants whose violation must reveal it."""

    change: Change
    found_as: str
    focus: Callable[[SimPlan], SimPlan] | None = None
    """Adjusts every seed's plan to look for this mutation, if drawn plans rarely find it."""


@contextmanager
def mutated(mutation: Mutation) -> Iterator[None]:
    """Run the block with the mutation in place of the shipped code."""
    patch = Patch()
    try:
        mutation.change(patch)
        yield
    finally:
        patch.undo()
