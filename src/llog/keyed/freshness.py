"""A reader follows its writer at an interval: waiting until it has come as far as somebody else has already seen."""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

from llog.errors import NotSeenYet

CATCH_UP_S: Final = 20.0


class Following(Protocol):
    """What a reader and a writer can both do."""

    url: str

    async def next_sequence(self) -> int: ...

    async def wait(self) -> None: ...


async def reach(log: Following, sequence: int) -> None:
    """Returns when everything below `sequence` can be read; `NotSeenYet` if that takes too long."""
    try:
        async with asyncio.timeout(CATCH_UP_S):
            while await log.next_sequence() < sequence:
                await log.wait()
    except TimeoutError:
        raise NotSeenYet(
            f"{log.url} was not seen up to sequence {sequence} within {CATCH_UP_S:.0f} s: is it the same log?"
        ) from None
