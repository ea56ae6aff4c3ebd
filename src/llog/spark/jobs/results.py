"""What a step of the pipeline came to."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

import msgspec

_FAILURES_MAX = 100


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    seconds: float
    rows: list[tuple[str, str]]
    """What to tell people: names and values, in order."""
    failures: list[str] = []
    """What the step could not do, one line each; the rest is done."""


def some(failures: Iterable[str]) -> tuple[str, ...]:
    """The first of them: thousands of partitions may fail for the same reason."""
    return tuple(islice(failures, _FAILURES_MAX))
