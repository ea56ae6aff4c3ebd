"""What a metadata store reports about its server to `llog doctor`. A store without a server reports nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal, NamedTuple, Protocol, runtime_checkable

SKEW_MS_MAX: Final = 60_000
"""How far a server's clock may be from this machine's without a warning."""


class Diagnosis(NamedTuple):
    """The result of one check. A warning is about a store that works, but promises less than it could."""

    check: str
    detail: str
    verdict: Literal["ok", "warning", "failed"] = "ok"


@runtime_checkable
class Diagnosable(Protocol):
    async def diagnose(self, now_ms: Callable[[], int]) -> list[Diagnosis]:
        """Check the server's version, its clock against `now_ms`, and those of its settings that llog depends on."""
        ...


async def diagnose(store: object, now_ms: Callable[[], int]) -> list[Diagnosis]:
    """Return what the store reports about its server; nothing for a store that has none."""
    return await store.diagnose(now_ms) if isinstance(store, Diagnosable) else []


def judge_clock(skew_ms: float) -> Diagnosis:
    """Judge how far a server's clock is ahead of this machine's."""
    verdict: Literal["ok", "warning"] = "ok" if abs(skew_ms) <= SKEW_MS_MAX else "warning"
    advice = "" if verdict == "ok" else ": set the clock of this machine or of the server"
    return Diagnosis("its clock is near ours", f"{skew_ms / 1000:+.1f} s{advice}", verdict)
