"""Keyed logs in memory, and a clock that tests move."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from itertools import count

import pytest

from llog.errors import WriterFenced
from llog.keyed import Config, KeyedLog, KeyedLogReader
from llog.runtime import SystemRuntime

_numbers = count()


class Clock(SystemRuntime):
    """Time stands still until a test moves it; sleeping is real."""

    def __init__(self) -> None:
        super().__init__()
        self.ms = 1_700_000_000_000

    def now_ms(self) -> int:
        return self.ms


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def url() -> str:
    """Of a log of its own, which does not exist yet."""
    return f"memory://unit-{next(_numbers)}"


Opener = Callable[..., Awaitable[KeyedLog]]
ReaderOpener = Callable[[], Awaitable[KeyedLogReader]]


@pytest.fixture
async def opener(url: str, clock: Clock) -> AsyncIterator[Opener]:
    """Opens writers of the log, and closes them in the end."""
    async with AsyncExitStack() as stack:

        async def closed(log: KeyedLog) -> None:
            with suppress(WriterFenced):
                await log.close()

        async def opened(config: Config | None = None) -> KeyedLog:
            log = await KeyedLog.open(url, config, runtime=clock)
            stack.push_async_callback(closed, log)
            return log

        yield opened


@pytest.fixture
async def log(opener: Opener) -> KeyedLog:
    return await opener()


@pytest.fixture
async def reader_opener(url: str) -> AsyncIterator[ReaderOpener]:
    async with AsyncExitStack() as stack:

        async def opened() -> KeyedLogReader:
            return await stack.enter_async_context(await KeyedLogReader.open(url))

        yield opened
