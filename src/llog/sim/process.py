"""A simulated process: its own clock, its own randomness, and a life that may end at any await."""

from __future__ import annotations

import asyncio
import random
from typing import Final

from llog.sim.loop import Owner, SimLoop

EPOCH_MS: Final = 1_700_000_000_000


class SimRuntime:
    """`Runtime` of one process: a clock that is off by `skew_ms`, random numbers of its own, sleep in virtual time."""

    def __init__(self, loop: SimLoop, source: random.Random, skew_ms: int = 0) -> None:
        self._loop = loop
        self._source = source
        self.skew_ms = skew_ms

    def now_ms(self) -> int:
        return EPOCH_MS + int(self._loop.time() * 1000) + self.skew_ms

    def random(self) -> random.Random:
        return self._source

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class Process(Owner):
    """One life of a process; a restart is another one of the same role."""

    def __init__(self, loop: SimLoop, role: str, life: int, source: random.Random, skew_ms: int) -> None:
        super().__init__(f"{role}.{life}")
        self.role = role
        self.life = life
        self.runtime = SimRuntime(loop, source, skew_ms)
