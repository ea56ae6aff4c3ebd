"""Compare-and-swap by many: how often it is tried, and how long one steps back in between."""

from __future__ import annotations

from typing import Final

from llog.errors import Contention, OutcomeUnknown, VersionMismatch
from llog.runtime import Runtime

TRIES_MAX: Final = 100
_STEP_S: Final = 0.002
_WAIT_S_MAX: Final = 0.05


class Tries:
    """Those of one call to change `what`."""

    def __init__(self, runtime: Runtime, what: object) -> None:
        self._runtime = runtime
        self._what = what
        self._lost = 0
        self._unknown: OutcomeUnknown | None = None

    async def another(self) -> None:
        """Before each. The first ones are made at once; after the last, `OutcomeUnknown` if its answer was lost, or
        `Contention`.
        """
        if self._lost >= TRIES_MAX:
            raise self._unknown or Contention(
                f"{self._what} was changed by others {self._lost} times in a row: try again"
            )
        if self._lost > 1:
            await self._runtime.sleep(self._runtime.random().random() * min(self._lost * _STEP_S, _WAIT_S_MAX))

    def lost(self, error: VersionMismatch | OutcomeUnknown) -> None:
        """Others were faster, or the answer was lost."""
        self._lost += 1
        self._unknown = error if isinstance(error, OutcomeUnknown) else None
