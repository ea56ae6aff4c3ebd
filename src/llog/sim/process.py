"""A simulated process: it has its own clock and randomness, and may be killed at any await."""

from __future__ import annotations

import asyncio
import random
from typing import Final

from llog.sim.loop import Owner, SimLoop

EPOCH_MS: Final = 1_700_000_000_000


class WallClock:
    """The clock by which the blob store's and all processes' clocks are set. It may jump ahead and back, and they all
    follow.
    """

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop
        self.ahead_ms = 0
        self.jumps = 0

    def jump(self, ahead_ms: int) -> None:
        self.ahead_ms = ahead_ms
        self.jumps += 1

    def now_ms(self) -> int:
        return EPOCH_MS + int(self._loop.time() * 1000) + self.ahead_ms


class SimRuntime:
    """The `Runtime` of one process: a clock that is off by `skew_ms` and may jump, its own random numbers, and sleep in
    virtual time.
    """

    def __init__(self, clock: WallClock, source: random.Random, skew_ms: int = 0) -> None:
        self._clock = clock
        self._source = source
        self._jumps = 0
        self._ahead_ms = 0
        self.skew_ms = skew_ms
        self.latest_ms = 0
        """The latest time that this clock has shown to the process."""
        self.shown_ms = 0
        """The time that this clock has shown last: it may have jumped since."""

    def jump(self, ahead_ms: int) -> None:
        self._ahead_ms = ahead_ms
        self._jumps += 1

    @property
    def jumps(self) -> int:
        """How often this clock jumped, ahead or back, alone or with all others."""
        return self._jumps + self._clock.jumps

    @property
    def is_ahead(self) -> bool:
        return bool(self._ahead_ms or self._clock.ahead_ms)

    def now_ms(self) -> int:
        self.shown_ms = self.peek_ms()
        self.latest_ms = max(self.latest_ms, self.shown_ms)
        return self.shown_ms

    def peek_ms(self) -> int:
        """Return the time as a checker sees it, without showing it to the process."""
        return self._clock.now_ms() + self.skew_ms + self._ahead_ms

    def random(self) -> random.Random:
        return self._source

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class Process(Owner):
    """One life of a process; a restart is another life of the same role."""

    def __init__(self, clock: WallClock, role: str, life: int, source: random.Random, skew_ms: int) -> None:
        super().__init__(f"{role}.{life}")
        self.role = role
        self.life = life
        self.runtime = SimRuntime(clock, source, skew_ms)
