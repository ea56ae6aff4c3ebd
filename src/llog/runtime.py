"""Clock, randomness and sleep, which protocol code gets from outside, so that the simulation runs the shipped code."""

from __future__ import annotations

import asyncio
import random
import time
from functools import lru_cache
from typing import Protocol


class Runtime(Protocol):
    """Everything that protocol code may know of the outside world, apart from its stores."""

    def now_ms(self) -> int:
        """Return the wall clock in ms since 1970. It may jump, so no safety may depend on it."""

    def random(self) -> random.Random:
        """Return the source of names and jitter."""

    async def sleep(self, seconds: float) -> None:
        """Wait for at least `seconds`."""


class SystemRuntime:
    """The runtime of real processes."""

    def __init__(self) -> None:
        self._random = random.Random()

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def random(self) -> random.Random:
        return self._random

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def uuid7(stamp_ms: int, source: random.Random) -> str:
    """Return a UUIDv7 with this stamp, so that names sort by time and carry their stamp."""
    value = (stamp_ms & ((1 << 48) - 1)) << 80 | 0x7 << 76 | source.getrandbits(12) << 64 | 0b10 << 62
    text = f"{value | source.getrandbits(62):032x}"
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


@lru_cache(maxsize=64)  # a flush asks for the stamp of its blob once for each partition
def stamp_of(name: str) -> int | None:
    """Return the stamp of the UUIDv7 at the end of `name`, or None if the name does not end in one."""
    text = name[-36:]
    if len(text) != 36 or text[8] != "-" or text[13] != "-" or text[14] != "7":
        return None
    try:
        return int(text[:8] + text[9:13], 16)
    except ValueError:
        return None
