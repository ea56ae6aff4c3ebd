"""Work that ends when it is told to."""

from __future__ import annotations

import asyncio

import pytest

from llog.base.concurrency import run_until


async def test_it_returns_when_the_work_ends() -> None:
    done: list[str] = []

    async def work() -> None:
        done.append("done")

    await run_until(asyncio.Event(), work())
    assert done == ["done"]


async def test_a_stop_cancels_the_work_and_waits_for_its_end() -> None:
    stopping, told = asyncio.Event(), list[str]()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            told.append("cleaned up")

    running = asyncio.create_task(run_until(stopping, work()))
    await asyncio.sleep(0)
    stopping.set()
    await running
    assert told == ["cleaned up"]


async def test_the_error_of_the_work_is_raised() -> None:
    async def work() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await run_until(asyncio.Event(), work())
