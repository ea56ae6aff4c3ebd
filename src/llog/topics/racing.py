"""Compare-and-swap by many: how often it is tried, and how long one steps back in between."""

from __future__ import annotations

from typing import Final

from llog.errors import Contention, LlogError
from llog.runtime import Runtime

TRIES_MAX: Final = 100
_STEP_S: Final = 0.002
_WAIT_S_MAX: Final = 0.05


async def before_try(runtime: Runtime, number: int, what: str, unknown: LlogError | None = None) -> None:
    """Call it before each try, counted from 0. The first ones are made at once; after the last, `unknown` is raised, or `Contention`."""
    if number >= TRIES_MAX:
        raise unknown or Contention(f"{what} was changed by others {number} times in a row: try again")
    if number > 1:
        await runtime.sleep(runtime.random().random() * min(number * _STEP_S, _WAIT_S_MAX))
