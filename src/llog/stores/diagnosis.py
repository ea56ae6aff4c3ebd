"""What a metadata store says about itself to `llog doctor`, beyond what every store must do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal, NamedTuple, Protocol, runtime_checkable

SKEW_MS_MAX: Final = 60_000
"""How far apart clocks may be before somebody should set one of them."""


class Diagnosis(NamedTuple):
    """One thing that was looked at. A warning is about a store that works, but promises less than it could."""

    check: str
    detail: str
    verdict: Literal["ok", "warning", "failed"] = "ok"


@runtime_checkable
class Diagnosable(Protocol):
    async def diagnose(self, now_ms: Callable[[], int]) -> list[Diagnosis]:
        """Look at the server: its version, its clock beside `now_ms`, and settings of it that llog's promises rest
        on.
        """
        ...


async def diagnose(store: object, now_ms: Callable[[], int]) -> list[Diagnosis]:
    """Return what a store of whatever kind says about itself; nothing, if it has no server that could be set up
    wrongly.
    """
    return await store.diagnose(now_ms) if isinstance(store, Diagnosable) else []


def clock(skew_ms: float) -> Diagnosis:
    """Judge how far a server's clock is ahead of this machine's."""
    verdict: Literal["ok", "warning"] = "ok" if abs(skew_ms) <= SKEW_MS_MAX else "warning"
    advice = "" if verdict == "ok" else ": set the clock of this machine or of the server"
    return Diagnosis("its clock is near ours", f"{skew_ms / 1000:+.1f} s{advice}", verdict)
